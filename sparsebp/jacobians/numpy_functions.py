"""A function of NumPy's, followed through the levels of a trace: patterns, tangents, reverse sweeps, tapes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, shown
from sparsebp.core.errors import DTypeError, ShapeError, SparseBPError, TracingError
from sparsebp.jacobians import numpy_rules  # noqa: F401  (registers)
from sparsebp.jacobians.index_sets import Sets
from sparsebp.jacobians.stored import Digests
from sparsebp.jacobians.tangents import Duals, Pool
from sparsebp.jacobians.tape import TapeDerivatives
from sparsebp.jacobians.tracing import Traced, check_length, current, gradient, lift, plain, pullback, raw, refused
from sparsebp.jacobians.trees import FlatFunction, replaced
from sparsebp.patterns.pattern import SparsityPattern


class NumpyFunction:
    """A function of NumPy arrays; of a scalar one, its gradient."""

    compiled, block_bytes = False, 1 << 22  # while they stay in the cache

    def __init__(self, f: FlatFunction, argnum: int, scalar: bool) -> None:
        self.f, self.argnum, self.scalar = f, argnum, scalar
        self._pools: list[Pool] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor: memory and compiled code stay behind."""
        return type(self), (self.f, self.argnum, self.scalar)

    def of_x(self, args: tuple[Any, ...]) -> Callable[[Any], Any]:
        """Return the function of x alone; of a scalar one, its gradient."""
        return gradient(self._alone(args)) if self.scalar else self._alone(args)

    def _alone(self, args: tuple[Any, ...]) -> Callable[[Any], Any]:
        before, after = args[: self.argnum], args[self.argnum + 1 :]

        def of(x: Any) -> Any:
            try:
                return self.f(*before, x, *after)
            except (SparseBPError, MemoryError):
                raise
            except Exception as error:
                if isinstance(error.__cause__, TracingError):  # by which NumPy replaces refusals of elements
                    raise error.__cause__ from None
                if isinstance(x, Traced):
                    self.f(*map(plain, before), np.array(plain(x)), *map(plain, after))  # may raise its own error
                    raise refused(
                        f"What {_whose(error)} does with arrays that depend on x ({type(error).__name__}: {error})",
                        "Use functions of NumPy that are listed in the reference, x * y for a diagonal matrix times y. "
                        "Sparse matrices are constant",
                    ) from error
                raise

        return of

    def pattern(self, args: tuple[Any, ...]) -> SparsityPattern:
        """Find the pattern with index sets."""
        level = Sets(args[self.argnum].size)
        return level.pattern(self._traced(args, level), self.scalar)

    def digest(self, args: tuple[Any, ...]) -> str:
        """Return the digest of the pattern."""
        level = Digests(args[self.argnum].size)
        return level.digest(self._traced(args, level), self.scalar)

    def _traced(self, args: tuple[Any, ...], level: Sets) -> Any:
        """Return what the result carries; other arguments of floats are arrays that depend on no input."""
        x = args[self.argnum]

        def unknown(value: Any) -> Any:
            if not self.varies(-1, value):
                return value
            found = Traced(raw(value), level.nothing(np.shape(value), None), level)
            found.scalar = not isinstance(value, np.ndarray)
            return found

        y = _output(self.of_x(tuple(map(unknown, args)))(level.input(np.array(x))))
        if level.refusals:  # f caught it
            raise level.refusals[0]
        return y.carried if isinstance(y, Traced) else level.nothing(y.shape, y.dtype)

    def tape(self, pattern: SparsityPattern) -> TapeDerivatives | None:
        """Return derivatives by a compiled tape, not planned yet."""
        return TapeDerivatives(self.f.f, self.recorded, self.argnum, self.varies, pattern, self.scalar, self.pattern)

    def recorded(self, *args: Any) -> Any:
        """Return what f returns: a vector, or of a scalar function a scalar."""
        y = self._alone(args)(args[self.argnum])
        return lift(y) if self.scalar else _output(y)

    def varies(self, place: int, arg: Any) -> bool:
        """Return whether it is x, or floats."""
        is_array = isinstance(arg, np.ndarray) or backend.is_on_device(arg)
        floats = isinstance(arg, (float, np.floating)) or (is_array and arg.dtype.kind == "f")
        return place == self.argnum or floats

    def compare(self, args: tuple[Any, ...]) -> None:
        """Compare the function with what it computes when it is traced, which `isinstance` may tell apart."""
        args = backend.from_device(args)
        x, f = np.array(backend.asarray("x", args[self.argnum])), self._alone(args)
        different = _difference(f, x)
        if different:  # a value that is rounding alone? In single precision it has another one
            wide = x.astype(float)
            with contextlib.suppress(Exception), np.errstate(all="ignore"):
                rounding = np.nanmax(np.abs(f(x.astype(np.float32)) - f(wide.copy()))) * _ROUNDING_IN_DOUBLE
                different = _difference(f, wide, rounding if np.isfinite(rounding) else 0)
        if different:
            expected, found = different
            raise TracingError("The function is another one when it is traced", expected=shown(expected),
                               got=shown(found), remedy="Does it test types, catch exceptions, keep arrays of an "
                               "earlier call, or draw random numbers?")  # fmt: skip

    def value(self, args: tuple[Any, ...]) -> np.ndarray:
        """Return what f returns, not its gradient."""
        return np.asarray(self._alone(args)(np.array(args[self.argnum])), float)

    def missing(self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], length: int) -> TracingError | None:
        """Return why the function cannot be followed backwards, if so."""
        try:
            if mode == "reverse":
                self.reverse(args, np.zeros((1, length), np.float32))
        except TracingError as error:
            return error
        return None

    def forward(self, args: tuple[Any, ...], seeds: np.ndarray) -> np.ndarray:
        """Carry dual numbers through the function."""
        x = args[self.argnum]
        with self._duals(len(seeds)) as level:
            y = _output(self.of_x(args)(Traced(np.array(x), seeds.astype(x.dtype), level)))
        return y.carried if isinstance(y, Traced) else np.zeros((len(seeds), len(y)), x.dtype)

    @contextlib.contextmanager
    def _duals(self, directions: int, masked: bool = True) -> Iterator[Duals]:
        """Give a level whose memory is kept for the next call; at the same time, each thread has its own."""
        try:
            pool = self._pools.pop()
        except IndexError:
            pool = Pool()
        yield Duals(directions, pool, masked)
        self._pools.append(pool)

    def reverse(self, args: tuple[Any, ...], seeds: np.ndarray) -> np.ndarray:
        """Run the function once, and carry the seeds back: they are the tangents of an adjoint that is zero."""
        x = args[self.argnum]
        y, back = pullback(lambda x: _output(self.of_x(args)(x)), np.array(x))
        check_length(len(y), seeds.shape[1])
        seeds = seeds.astype(y.dtype)
        with self._duals(len(seeds), masked=False) as level:
            adjoint = back(Traced(np.zeros(len(y), y.dtype), seeds, level), careful=False)
        found = adjoint.carried if isinstance(adjoint, Traced) else np.zeros((len(seeds), x.size), y.dtype)
        if len(unknown := np.flatnonzero(np.isnan(found).any(axis=1))):
            found = np.array(found)
            for direction in unknown.tolist():
                found[direction] = back(seeds[direction], careful=True)
        return found

    def entries(
        self, mode: Literal["forward", "reverse"], args: tuple[Any, ...], seeds: np.ndarray, width: int,
        places: np.ndarray, reached: np.ndarray,
    ) -> tuple[Any, tuple[int, float] | None]:  # fmt: skip
        """Return elements of the derivatives, (p, width), and one not `reached` that is not zero: its place, value."""
        block = self.forward(args, seeds) if mode == "forward" else self.reverse(args, seeds)
        check_length(block.shape[1], width)
        return self.taken(block, places, reached)

    def taken(self, block: Any, places: np.ndarray, reached: np.ndarray) -> tuple[Any, tuple[int, float] | None]:
        """Return elements of a block, and one that should be zero but is not: its place and value."""
        flat = np.ascontiguousarray(block).reshape(-1)
        values = flat[places]
        if np.count_nonzero(flat) != np.count_nonzero(values if reached is places else flat[reached]):
            rest = np.nan_to_num(flat, nan=0.0)
            rest[reached] = 0
            if rest.any():
                place = int(np.flatnonzero(rest)[0])
                return None, (place, flat[place])
        return values, None

    def direct(self, args: tuple[Any, ...], places: np.ndarray, count: int, size: int) -> Any:
        """There is no program."""

    def joined(self, parts: list[Any], entries: list[np.ndarray], x: Any) -> np.ndarray:
        """Return the values of all blocks; `entries`: whose values each block has."""
        if len(parts) == 1:
            return parts[0]
        found = np.empty(sum(map(len, parts)), parts[0].dtype if parts else x.dtype)
        for part, mine in zip(parts, entries, strict=False):
            found[mine] = part
        return found

    def outcome(self, args: tuple[Any, ...]) -> Any:
        """Return what f returns, with other data; of arrays on a device, by copies on the host."""
        args = backend.from_device(args)
        return self.f.outcome(*replaced(args, [self.argnum], [np.array(args[self.argnum])]))

    def gradient(self, args: tuple[Any, ...]) -> Any:
        """Return the gradient of a scalar function."""
        return plain(_output(self.of_x(args)(np.array(args[self.argnum]))))

    def batch(self, values: Callable[[tuple[Any, ...]], Any], args: tuple[Any, ...], xs: Any) -> Any:
        """There is no mapped call in NumPy."""

    def stacked(self, samples: Iterable[Any], shape: tuple[int, int], like: Any) -> Array:
        """Return samples as columns."""
        if backend.is_on_device(like):
            xp = backend.namespace(like)
            return xp.stack(list(samples), axis=1) if shape[1] else xp.zeros(shape, like.dtype)
        found, samples = None, iter(samples)
        for first in range(0, shape[1], 8):  # of which the memory is used again
            part = list(itertools.islice(samples, 8))
            found = np.empty(shape, part[0].dtype) if found is None else found
            for k in range(0, shape[0], 512):  # numbers of each, that stay in the cache
                found[k : k + 512, first : first + len(part)] = np.array([one[k : k + 512] for one in part]).T
        return np.zeros(shape, like.dtype) if found is None else found

    def to_numpy(self, values: Any) -> np.ndarray:
        """Return the array itself."""
        found: np.ndarray = values
        return found


def _whose(error: BaseException) -> str:
    """Return the name of the function that raised an error, outside of this library."""
    trace, name = error.__traceback__, "the function"
    while trace is not None:
        module, code = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_frame.f_code.co_name
        name = f"{module}.{code}" if not module.startswith("sparsebp.") else name
        trace = trace.tb_next
    return name


def _output(y: Any) -> Any:
    """Return the function's output as a vector of floats, traced or plain."""
    y = lift(y)
    y = current(y) if isinstance(y, Traced) else np.asarray(y)
    if y.dtype.kind not in "fiub" or y.dtype == np.float16:
        raise DTypeError("The function does not return real numbers", expected="an array of floats, float32 or float64",
                         got=y.dtype)  # fmt: skip
    if y.ndim != 1:
        raise ShapeError("The function does not return a vector", expected="(m,)", got=y.shape,
                         remedy="Return y.ravel(); for a scalar use sparse_hessian, or return y[None]")  # fmt: skip
    return y


_ROUNDING_IN_DOUBLE = 16 * float(np.finfo(float).eps / np.finfo(np.float32).eps)
"""Sizes of rounding in double precision over those in single precision, at most."""


def _difference(
    f: Callable[[np.ndarray], Any], x: np.ndarray, smallest: float = 0.0
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what a function computes, and what it does when it is traced, if they differ by more than rounding."""
    try:
        with np.errstate(all="ignore"):
            expected = np.asarray(f(x.copy()))
    except Exception:  # the function has no value here; its pattern does not depend on values
        return None
    traced: Any = Traced(x, np.zeros((0, *x.shape), x.dtype), Duals(0))
    y = lift(f(traced))
    found = np.asarray(y.value if isinstance(y, Traced) else y)
    if not {expected.dtype.kind, found.dtype.kind} <= {*"fiub"}:
        return None  # which is refused elsewhere
    single = "float32" in (str(found.dtype), str(expected.dtype))
    room, rounding = (1e-3, 1e-6) if single else (1e-8, 1e-15)  # of what is 0 but for that, as a singular det
    scale = np.max(np.abs(expected), initial=0, where=np.isfinite(expected)) if expected.size else 0
    close = {"rtol": room, "atol": room * scale + max(rounding, smallest), "equal_nan": True}
    same = found.shape == expected.shape and np.allclose(found, expected, **close)  # type: ignore[arg-type]
    return None if same else (expected, found)
