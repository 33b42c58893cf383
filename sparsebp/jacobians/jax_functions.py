"""Functions of JAX arrays: their pattern by asdex, which reads the jaxpr, their derivatives by `jax.jvp` and `jax.vjp`.

Derivatives along all directions of a block are one compiled call, a `vmap` over the directions. As with `jax.jit`, what
f finds outside its arguments is fixed when it is compiled, at the first call.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsebp.core.errors import DTypeError, MissingDependencyError, ShapeError, TracingError
from sparsebp.jacobians.numpy_functions import NumpyFunction
from sparsebp.jacobians.tracing import pattern_of
from sparsebp.patterns.pattern import SparsityPattern

REFUSALS = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, NotImplementedError)
"""Errors by which JAX and asdex refuse a function, besides two about differentiation that have no class."""


class JaxFunction(NumpyFunction):
    """A function of JAX arrays; of a scalar one, its gradient. Derivatives stay on the device of x."""

    compiled, block_bytes = True, 1 << 26  # XLA fuses what is elementwise: fewer arrays than in NumPy

    def __init__(self, f: Callable[..., Any], argnum: int, scalar: bool) -> None:
        super().__init__(f, argnum, scalar)
        self._given: list[int] = []
        self._runs: dict[tuple[str, int | None], Any] = {}
        self._indices: dict[int, tuple[np.ndarray, jax.Array]] = {}  # by the identity of the array beside it

    def _split(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function of x and of arguments that may vary, and these; of a scalar function, its gradient."""
        x = args[self.argnum]
        others = (i for i, arg in enumerate(args) if i != self.argnum and self.varies(i, arg))
        places = self._given = self._given or [self.argnum, *others]
        if jnp.result_type(x) != x.dtype:
            raise DTypeError("JAX has no float64 here", expected="float32", got=x.dtype,
                             remedy='Set jax.config.update("jax_enable_x64", True)')  # fmt: skip

        def of_some(*given: Any) -> jax.Array:
            whole = list(args)
            for place, value in zip(places, given, strict=True):
                whole[place] = value
            y = self.f(*whole)
            y = jnp.stack([jnp.asarray(v) for v in y]) if isinstance(y, (list, tuple)) and y else jnp.asarray(y)
            if not jnp.issubdtype(y.dtype, jnp.floating):
                raise DTypeError("The function does not return real numbers", expected="an array of floats",
                                 got=y.dtype)  # fmt: skip
            if self.scalar and y.ndim:
                raise TracingError("The function is not scalar", expected="an output of shape ()", got=y.shape)
            if not self.scalar and y.ndim != 1:
                raise ShapeError(
                    "The function does not return a vector", expected="(m,)", got=y.shape,
                    remedy="Return y.ravel(); for a scalar use sparse_hessian, or return y[None]",
                )  # fmt: skip
            return y

        return jax.grad(of_some) if self.scalar else of_some, [args[i] for i in places]

    def pattern(self, args: tuple[Any, ...]) -> SparsityPattern:
        """Ask asdex; other arguments of floats are arrays that depend on no input."""
        try:
            import asdex
        except ImportError as error:
            raise MissingDependencyError("The pattern of a function of JAX is found by asdex, which is not installed",
                                         remedy="pip install 'sparsebp[jax]', or pass pattern=") from error  # fmt: skip
        from scipy.sparse import csr_array

        f, given = self._split(args)
        with _tracing():
            found = asdex.jacobian_sparsity(f, *given)
        return pattern_of(csr_array((np.ones(found.nnz, bool), (found.rows, found.cols)), found.shape), self.scalar)

    def varies(self, place: int, arg: Any) -> bool:
        """Return whether it is x, or floats."""
        return place == self.argnum or super().varies(place, arg) or (
            isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating))  # fmt: skip

    def compare(self, args: tuple[Any, ...]) -> None:
        """Compile anew, with what f finds now; JAX itself traces the function that it differentiates."""
        self._runs.clear()

    def value(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return what f returns, not its gradient."""
        y = self.f(*args[: self.argnum], jnp.asarray(args[self.argnum]), *args[self.argnum + 1 :])
        return np.asarray(y, float)

    def forward(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return derivatives along directions (p, n): shape (p, m)."""
        f, given = self._split(args)

        def along(seeds: Any, x: Any, *others: Any) -> Any:
            _, push = jax.linearize(lambda x: f(x, *others), x)
            return jax.vmap(push)(seeds.astype(x.dtype))

        return self._run("forward", along, seeds, given)

    def reverse(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return products of vectors (p, m) with the Jacobian: shape (p, n)."""
        f, given = self._split(args)

        def back(seeds: Any, x: Any, *others: Any) -> Any:
            y, pull = jax.vjp(lambda x: f(x, *others), x)
            if len(y) != seeds.shape[1]:
                raise ShapeError("The function returns another length than before", expected=seeds.shape[1], got=len(y))
            return jax.vmap(lambda v: pull(v)[0])(seeds.astype(y.dtype))

        return self._run("reverse", back, seeds, given)

    def _run(self, name: str, function: Callable[..., Any], seeds: np.ndarray, given: list[Any]) -> Any:
        """Run a function, compiled the first time: constants among the arguments may not change later.

        Seeds that are read-only are kept by the caller and fixed in the program, which XLA simplifies by them.
        """
        key = (name, None if seeds.flags.writeable else id(seeds))
        if key not in self._runs:
            fixed = partial(function, seeds) if key[1] else function
            self._runs[key] = seeds if key[1] else None, jax.jit(fixed)  # the seeds, since others may get their place
        run = self._runs[key][1]
        with _tracing():
            return run(*given) if key[1] else run(seeds, *given)

    def taken(self, block: Any, places: np.ndarray, reached: np.ndarray) -> tuple[Any, tuple[int, float] | None]:
        """Return elements of a block, and one that should be zero but is not: its place and value."""
        seen = None if reached is places else self._on_device(reached)
        values, outside = _taken(block, self._on_device(places), seen)
        return values, super().taken(np.asarray(block), places, reached)[1] if outside else None

    def _on_device(self, index: np.ndarray) -> Any:
        """Return an index, copied once."""
        if id(index) not in self._indices:
            self._indices[id(index)] = index, jnp.asarray(index)
        return self._indices[id(index)][1]

    def joined(self, parts: list[Any], entries: list[np.ndarray], x: Any) -> Any:
        """Return the values of all blocks, an array of the kind of x and on its device."""
        if len(parts) == 1:
            return np.array(parts[0]) if isinstance(x, np.ndarray) else parts[0]
        found = super().joined([np.asarray(part) for part in parts], entries, x)
        return found if isinstance(x, np.ndarray) else jax.device_put(found, next(iter(x.devices())))

    def stacked(self, samples: list[Any], shape: tuple[int, int], like: Any) -> Any:
        """Return samples as columns."""
        found = super().stacked(samples, shape, like)
        return found if isinstance(like, np.ndarray) else jnp.asarray(found)

    def to_numpy(self, values: Any) -> np.ndarray:
        """Return values on the host."""
        return np.asarray(values)


@jax.jit
def _taken(block: Any, places: Any, reached: Any) -> tuple[Any, Any]:
    """Return elements of a block, and how many of the others are not zero."""
    flat = block.reshape(-1)
    values = flat.at[places].get(mode="promise_in_bounds")
    seen = values if reached is None else flat.at[reached].get(mode="promise_in_bounds")
    return values, jnp.count_nonzero(flat) - jnp.count_nonzero(seen)


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Say which function it is that JAX or asdex cannot trace."""
    try:
        yield
    except (TypeError, IndexError, ValueError, NotImplementedError) as error:
        if not isinstance(error, REFUSALS) and "-mode differentiation" not in str(error):
            raise
        raise TracingError("JAX cannot trace or differentiate the function", got=re.split(r"\.\s|\n", str(error))[0],
                           remedy="Use jax.numpy.where or jax.lax.cond for conditions; where only the pattern is not "
                           "found, pass pattern=") from error  # fmt: skip
