"""Functions of JAX arrays: their pattern by asdex, which reads the jaxpr, their derivatives by `jax.jvp` and `jax.vjp`.

Derivatives along all directions of a block are one compiled call, a `vmap` over the directions. As with `jax.jit`, what
f finds outside its arguments is fixed when it is compiled, at the first call.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from sparsebp.core.errors import DTypeError, MissingDependencyError, ShapeError, SparseBPError, TracingError
from sparsebp.jacobians.index_sets import pattern_of
from sparsebp.jacobians.numpy_functions import NumpyFunction
from sparsebp.jacobians.stored import FORMAT, digest_of
from sparsebp.jacobians.tracing import check_length
from sparsebp.jacobians.trees import FlatFunction, replaced
from sparsebp.patterns.pattern import SparsityPattern

REFUSALS = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, NotImplementedError)
"""Errors by which JAX and asdex refuse a function, besides some about derivatives that have no class:"""
NO_DERIVATIVE = re.compile(r"-mode (differentiation|autodiff)|not support (JVP|VJP)|no differentiation rule|jvp rule")
ARRAY = type(jnp.zeros(0))
"""Of arrays that are no tracers."""
KINDS, FLOATS = {ARRAY, np.ndarray, float}, {np.dtype(np.float32), np.dtype(np.float64)}
FIXED_SEEDS = 32
"""Most directions that are compiled into a program: XLA computes what depends on them alone while it compiles."""


class JaxFunction(NumpyFunction):
    """A function of JAX arrays; of a scalar one, its gradient. Derivatives stay on the device of x."""

    compiled, block_bytes = True, 1 << 26  # XLA fuses what is elementwise: fewer arrays than in NumPy

    def __init__(self, f: FlatFunction, argnum: int, scalar: bool) -> None:
        super().__init__(f, argnum, scalar)
        self._given: list[int] = []
        self._runs: dict[Any, Any] = {}

    def _varying(self, args: tuple[Any, ...]) -> list[Any]:
        """Return x and the arguments that may vary."""
        if not self._given:
            others = (i for i, arg in enumerate(args) if i != self.argnum and self.varies(i, arg))
            self._given = [self.argnum, *others]
        x = args[self.argnum]
        if isinstance(x, np.ndarray) and jnp.result_type(x) != x.dtype:
            raise DTypeError("JAX has no float64 here", expected="float32", got=x.dtype,
                             remedy='Set jax.config.update("jax_enable_x64", True)')  # fmt: skip
        return [args[i] for i in self._given]

    def _split(self, args: tuple[Any, ...]) -> tuple[Callable[..., Any], list[Any]]:
        """Return the function of x and of arguments that may vary, and these; of a scalar function, its gradient."""
        given_now, places = self._varying(args), self._given
        fixed = [None if i in places else arg for i, arg in enumerate(args)]  # keeps no tracers

        def of_some(*given: Any) -> jax.Array:
            y = self.f(*replaced(fixed, places, given))
            try:
                y = jnp.asarray(y)
            except (TypeError, ValueError) as error:
                raise DTypeError("The function does not return an array", expected="a vector (m,)",
                                 got=type(y).__name__) from error  # fmt: skip
            if y.dtype not in (jnp.float32, jnp.float64):
                raise DTypeError("The function does not return real numbers", expected="an array of floats, float32 or "
                                 "float64", got=y.dtype)  # fmt: skip
            if self.scalar and y.ndim:
                raise TracingError("The function is not scalar", expected="an output of shape ()", got=y.shape)
            if not self.scalar and y.ndim != 1:
                raise ShapeError(
                    "The function does not return a vector", expected="(m,)", got=y.shape,
                    remedy="Return y.ravel(); for a scalar use sparse_hessian, or return y[None]",
                )  # fmt: skip
            return y

        return jax.grad(of_some) if self.scalar else of_some, given_now

    def pattern(self, args: tuple[Any, ...]) -> SparsityPattern:
        """Ask asdex; other arguments of floats are arrays that depend on no input."""
        try:
            import asdex
        except ImportError as error:
            raise MissingDependencyError("The pattern of a function of JAX is found by asdex, which is not installed",
                                         remedy="pip install 'sparsebp[jax]', or pass pattern=") from error  # fmt: skip
        from scipy.sparse import csr_array

        f, given = self._split(args)
        try:
            with _tracing():
                closed = jax.make_jaxpr(f)(*given)
                found = asdex.jacobian_sparsity(lambda *given: _inlined(closed.jaxpr, closed.consts, *given)[0], *given)
        except SparseBPError:
            raise
        except Exception as error:  # of asdex: JAX has traced the function before
            raise TracingError("asdex does not find the pattern of the function", remedy="Pass pattern=",
                               got=f"{type(error).__name__}: {error}") from error  # fmt: skip
        return pattern_of(csr_array((np.ones(found.nnz, bool), (found.rows, found.cols)), found.shape), self.scalar)

    def digest(self, args: tuple[Any, ...]) -> str:
        """Return the digest of the jaxpr, and of the version of asdex."""
        f, given = self._split(args)
        with _tracing(), np.printoptions(threshold=sys.maxsize):
            closed = jax.make_jaxpr(lambda *given: f(*given))(*given)  # noqa: PLW0108 (a cache)
            return digest_of(FORMAT, _version("asdex"), self.scalar, str(closed), *_constants_of(closed)).hex()

    def tape(self, pattern: SparsityPattern) -> None:
        """There is none."""

    def varies(self, place: int, arg: Any) -> bool:
        """Return whether it is x, or floats."""
        return place == self.argnum or super().varies(place, arg) or (
            isinstance(arg, jax.Array) and jnp.issubdtype(arg.dtype, jnp.floating))  # fmt: skip

    def compare(self, args: tuple[Any, ...]) -> None:
        """Compile anew, with what f finds now, unless two traces find different numbers."""
        self._runs.clear()
        f, given = self._split(args)
        with _tracing():
            one, other = (jax.make_jaxpr(lambda *given: f(*given))(*given) for _ in range(2))  # noqa: PLW0108 (a cache)
        if str(one) != str(other) or not all(map(_same, one.consts, other.consts)):
            raise TracingError("Two traces of the function differ", remedy="Draw random numbers before, and pass them "
                               "as an argument, or use jax.random with a key; or does it keep state?")  # fmt: skip

    def value(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return what f returns, not its gradient."""
        y = self.f(*replaced(args, [self.argnum], [jnp.asarray(args[self.argnum])]))
        return np.asarray(y, float)

    def missing(self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], length: int) -> TracingError | None:
        """Return JAX's reason; a custom_vjp has reverse mode alone, a while_loop forward mode."""
        f, given = self._split(args)
        seeds = np.zeros((1, len(args[self.argnum]) if mode == "forward" else length), np.float32)
        try:
            with _tracing():
                jax.eval_shape(partial(_forward if mode == "forward" else _reverse, f), seeds, *given)
        except TracingError as error:
            return error
        return None

    def forward(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return derivatives along directions (p, n): shape (p, m)."""
        return self._run("forward", lambda f: partial(_forward, f), args, seeds)

    def reverse(self, args: tuple[Any, ...], seeds: np.ndarray) -> Any:
        """Return products of vectors (p, m) with the Jacobian: shape (p, n)."""
        return self._run("reverse", lambda f: partial(_reverse, f), args, seeds)

    def entries(
        self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], seeds: np.ndarray, width: int,
        places: np.ndarray, reached: np.ndarray,
    ) -> tuple[Any, tuple[int, float] | None]:  # fmt: skip
        """Return elements of the derivatives, (p, width), and one not `reached` that is not zero: its place, value.

        One compiled program does it all. A few seeds that are read-only, which the caller keeps, are fixed in it: XLA
        simplifies what they go through. It also gives the size of the largest element that should be zero; within a
        transform, whether there is one: nothing can be raised there, and values are NaN instead.
        """
        kept = not seeds.flags.writeable and len(seeds) <= FIXED_SEEDS
        traced = any(isinstance(arg, jax.core.Tracer) for arg in self._varying(args))
        direct = _forward if mode == "forward" else _reverse

        def program(f: Callable[..., Any]) -> Callable[..., Any]:
            outside = np.ones(len(seeds) * width, bool)
            outside[reached] = False
            at, factors = (
                np.flatnonzero(outside).astype(np.int32),
                outside.reshape(len(seeds), width).astype(np.float32),
            )

            def run(*given: Any) -> tuple[Any, Any]:
                where = places.astype(np.int32)  # kept alive here, since another array may get its identity
                block = direct(f, *((seeds,) if kept else ()), *given)
                check_length(block.shape[1], width)
                flat = block.reshape(-1)
                if not len(at):
                    return _at(flat, where), None
                if not traced:  # fast, and fuses so that no derivative is computed twice; NaN is looked into below
                    return _at(flat, where), jnp.max(jnp.abs(block) * factors)
                rest = _at(flat, at) if len(at) <= len(where) else flat.at[reached].set(0)
                return _at(flat, where), jnp.any(jnp.abs(rest) > 0)  # not NaN: 0 · ∞ within derivatives is no entry

            return run

        key = id(places) if kept and not traced else (id(places), traced)
        values, wrong = self._run(key, program, args, *(() if kept else (seeds,)))
        if wrong is not None and any(isinstance(found, jax.core.Tracer) for found in (wrong, values)):
            values = values * jnp.where(wrong > 0, jnp.nan, 1).astype(values.dtype)  # whose derivatives are NaN, too
        elif wrong is not None and np.asarray(wrong):  # NaN too
            block = self.forward(args, seeds) if mode == "forward" else self.reverse(args, seeds)
            return values, self.taken(np.asarray(block), places, reached)[1]
        return values, None

    def _run(self, key: Any, make: Callable[..., Any], args: tuple[Any, ...], *seeds: np.ndarray) -> Any:
        """Run what `make` makes of f, compiled the first time: constants among the arguments may not change later."""
        run, given = self._runs.get(key), self._varying(args)
        if run is None:
            run = self._runs[key] = jax.jit(make(self._split(args)[0]))
        with _tracing():
            return run(*seeds, *given)

    def direct(self, args: tuple[Any, ...], places: np.ndarray, count: int, size: int) -> Any:
        """Run the program of `entries`, if that has its seeds: the rest of a call takes as long as a small one."""
        run = self._runs.get(id(places))
        if run is None or len(args) != count or not KINDS.issuperset(map(type, args)):
            return None
        x = args[self.argnum]
        if type(x) is not ARRAY or x.shape != (size,) or x.dtype not in FLOATS:
            return None
        values, wrong = run(*[args[place] for place in self._given])
        return None if wrong is not None and np.asarray(wrong) else values

    def joined(self, parts: list[Any], entries: list[np.ndarray], x: Any) -> Any:
        """Return the values of all blocks, an array of the kind of x and on its device."""
        if len(parts) == 1:
            found = parts[0]
        else:
            found = jnp.concatenate(parts) if parts else jnp.zeros(0, x.dtype)
            found = found.at[np.concatenate([np.zeros(0, int), *entries])].set(found)
        return np.array(found) if isinstance(x, np.ndarray) and not isinstance(found, jax.core.Tracer) else found

    def outcome(self, args: tuple[Any, ...]) -> Any:
        """Return what f returns, with other data."""
        return self.f.outcome(*replaced(args, [self.argnum], [jnp.asarray(args[self.argnum])]))

    def gradient(self, args: tuple[Any, ...]) -> Any:
        """Return the gradient of a scalar function."""
        found = self._run("gradient", lambda f: f, args)
        return np.array(found) if isinstance(args[self.argnum], np.ndarray) else found

    def batch(self, values: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], xs: Any) -> Any:
        """Return the values at the columns of xs, by one compiled program; errors are raised by a call of their own."""
        given, places = self._varying(args), self._given
        if "batch" not in self._runs:
            fixed = [None if i in places else arg for i, arg in enumerate(args)]

            def run(*given: Any) -> Any:
                return values(replaced(fixed, places, given))

            self._runs["batch"] = jax.jit(jax.vmap(run, (1, *(None,) * (len(places) - 1)), 1))
        with _tracing():
            found = self._runs["batch"](jnp.asarray(xs), *given[1:])
        if isinstance(found, jax.core.Tracer):
            return found
        for column in np.flatnonzero(np.isnan(found).any(axis=0)).tolist():
            values(replaced(args, [self.argnum], [xs[:, column]]))
        return np.array(found) if isinstance(xs, np.ndarray) else found

    def stacked(self, samples: Iterable[Any], shape: tuple[int, int], like: Any) -> Any:
        """Return samples as columns."""
        if isinstance(like, np.ndarray):
            return super().stacked(samples, shape, like)
        return jnp.stack(list(samples), axis=1) if shape[1] else jnp.zeros(shape, like.dtype)

    def to_numpy(self, values: Any) -> np.ndarray:
        """Return values on the host."""
        return np.asarray(values)


def _forward(f: Callable[..., Any], seeds: Any, x: Any, *others: Any) -> Any:
    _, push = jax.linearize(lambda x: f(x, *others), x)
    return jax.vmap(push)(jnp.asarray(seeds, x.dtype))  # of JAX, also where it is constant: a callback takes no other


def _reverse(f: Callable[..., Any], seeds: Any, x: Any, *others: Any) -> Any:
    y, pull = jax.vjp(lambda x: f(x, *others), x)
    check_length(len(y), seeds.shape[1])
    return jax.vmap(lambda v: pull(v)[0])(jnp.asarray(seeds, y.dtype))


def _inlined(jaxpr: Any, constants: Any, *args: Any) -> list[Any]:
    """Run a jaxpr with compiled functions inline.

    asdex 0.5 takes what was constant in one call of a compiled function for a constant in the next: `jnp.where` is one.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in ("jit", "pjit", "closed_call"):
            inner = eqn.params["jaxpr"]
            found = _inlined(inner.jaxpr, inner.consts, *operands)
        else:
            params = eqn.primitive.get_bind_params(eqn.params)
            functions, params = params if isinstance(params, tuple) else ((), params)  # before JAX 0.10
            found = eqn.primitive.bind(*functions, *operands, **params)
            found = found if eqn.primitive.multiple_results else [found]
        values.update(zip(eqn.outvars, found, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _constants_of(found: Any) -> Iterator[Any]:
    """Yield the constants of a jaxpr, and of those inside."""
    if isinstance(found, core.ClosedJaxpr):
        for value in found.consts:
            key = jnp.issubdtype(value.dtype, jax.dtypes.extended)
            yield np.asarray(jax.random.key_data(value) if key else value)
        found = found.jaxpr
    if isinstance(found, (list, tuple)):
        for one in found:
            yield from _constants_of(one)
    elif isinstance(found, core.Jaxpr):
        for eqn in found.eqns:
            yield from _constants_of(list(eqn.params.values()))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _same(one: Any, other: Any) -> bool:
    if jnp.issubdtype(one.dtype, jax.dtypes.extended):  # a key
        return True
    return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")


def _at(flat: Any, places: Any) -> Any:
    return flat.at[places].get(mode="promise_in_bounds")


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    """Say which function it is that JAX or asdex cannot trace."""
    try:
        yield
    except (TypeError, IndexError, ValueError, NotImplementedError) as error:
        problem = "JAX cannot trace the function"
        remedy = "Use jax.numpy.where or jax.lax.cond for conditions; if only the pattern is not found, pass pattern="
        if NO_DERIVATIVE.search(str(error)):
            problem = "JAX has no such derivative of the function"
            remedy = "Give a callback a derivative by jax.custom_jvp or jax.custom_vjp; use scan instead of while_loop"
        elif not isinstance(error, REFUSALS):
            raise
        raise TracingError(problem, got=re.split(r"\.\s|\n", str(error))[0], remedy=remedy) from error
