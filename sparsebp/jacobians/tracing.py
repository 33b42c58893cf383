"""Arrays that carry something along a function of NumPy's: index sets, tangents, or the tape of a reverse sweep.

A `Traced` array stands for an array in the function that is traced. NumPy hands it every ufunc and function
(`__array_ufunc__`, `__array_function__`), and each of them is one of four kinds: elementwise, with a slope for each
operand; a choice of elements; linear; a contraction of two operands. A *level* says what these four do to what is
carried:

- `index_sets.Sets`: for each element the inputs that it depends on, whatever their values: one row of a sparse matrix;
- `tangents.Duals`: directional derivatives, exact: the slope of each operand times its tangent;
- `Tape`: what the reverse sweep needs. The sweep is NumPy code too, so a tape on top of index sets gives the pattern
  of a Hessian, and on top of tangents its products with vectors.

What cannot be followed raises `TracingError`: nothing is guessed from values.
"""

from __future__ import annotations

import abc
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from sparsebp.core.backend import check_plain
from sparsebp.core.errors import ShapeError, TracingError


class Traced(NDArrayOperatorsMixin):
    """An array of the function that is traced: its value, and what its level carries."""

    __array_priority__ = 1000.0

    def __init__(self, value: Any, carried: Any, level: Level) -> None:
        self.value, self.carried, self.level = value, carried, level
        self.versions, self.seen = [0], 0  # shared by an array and its views: a write makes the others stale
        self.owner: Traced | None = None  # of a view
        self.key: Any = None  # by which a view was taken from its owner
        self.pending: tuple[Traced, Any, int] | None = None  # the owner that a changed view must be written back to
        self.scalar = False  # a scalar of NumPy: x += … makes another, and other names keep the old one

    # ---- NumPy's protocols ------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *given: Any, **kwargs: Any) -> Any:
        """Follow a ufunc, or refuse it."""
        inputs = _owned(given)
        if method == "at":
            return _add_at(ufunc, *inputs)
        out, mask = kwargs.pop("out", None), kwargs.pop("where", True) if method == "__call__" else True
        depends = method != "__call__" or any(isinstance(x, Traced) for x in inputs)
        found = _as_scalar(_of_ufunc(ufunc, method, inputs, kwargs)) if depends else ufunc(*inputs, **kwargs)
        if mask is not True:
            if out is None:
                raise refused(f"The ufunc {ufunc.__name__} with where=, without out=,", "Pass out=, or numpy.where")
            found = np.where(mask, found, out[0])
        if out is None:
            return found
        if not isinstance(out[0], Traced):
            raise refused(f"numpy.{ufunc.__name__} with out= into a plain array",
                          "Assign the result, or make the array with numpy.zeros_like(x)")  # fmt: skip
        return out[0]._overwrite(found)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Follow a function of NumPy, or refuse it."""
        return call(func, args, kwargs)

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """Stand for one element of a list; refused otherwise, because a plain array carries nothing."""
        caller = sys._getframe(1)
        sparse = caller.f_globals.get("__name__", "").startswith("scipy.sparse")
        if (sparse and "dispatch" in caller.f_code.co_name) or (self.ndim == 0 and dtype in (None, object)):
            found = np.empty((), object)  # SciPy's A @ x then leaves the product to `__rmatmul__`
            found[()] = self
            return found
        raise refused(
            "A conversion to a plain array (asarray, numpy.array, an item of a plain array, a function outside NumPy)",
            "Leave out asarray; make arrays with numpy.stack, numpy.concatenate or numpy.zeros_like(x)",
        )

    # ---- what depends on values -------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        raise self._noted(refused("A condition on values of x (if, while, and, or, not)",
                                  "Use numpy.where(condition, a, b)"))  # fmt: skip

    def _noted(self, error: TracingError) -> TracingError:
        """Note a refusal, which the function may catch and then do something else, and return it."""
        self.level.refusals.append(error)
        return error

    def _scalar(self, *_: Any) -> Any:
        raise self._noted(refused("A conversion to a Python number (float(x), int(x), item(), tolist(), math.sin(x))",
                                  "Keep NumPy's scalar, and use functions of NumPy: numpy.sin(x)"))  # fmt: skip

    __float__ = __int__ = __complex__ = __index__ = item = tolist = _scalar

    # ---- the parts of an ndarray ------------------------------------------------------------------------------------

    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    T = property(np.transpose)
    real, imag = property(np.real), property(np.imag)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"<traced array of shape {self.shape}, {self.dtype}>"

    def __getattr__(self, name: str) -> Any:
        if name in ("reshape", "transpose"):
            function = getattr(np, name)
            return lambda *shape, **kwargs: function(self, *(shape if len(shape) < 2 else (shape,)), **kwargs)
        if name == "flatten":
            return lambda: np.copy(np.ravel(self))
        if name in METHODS:
            function = getattr(np, METHODS[name])
            return lambda *args, **kwargs: function(self, *args, **kwargs)
        if name in SLOPES and self.ndim == 0:  # numpy.sin of an array of objects calls each one's sin()
            return lambda *others: getattr(np, name)(self, *others)
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = "Use a function of NumPy that is listed in the reference"
        if name in ("at", "weak_type"):  # for which jax.numpy asks
            remedy = "For a function of JAX, pass x as an array of JAX"
        raise refused(f"The attribute {name!r} of an array", remedy)

    def astype(self, dtype: Any, **kwargs: Any) -> Any:
        """As of an ndarray."""
        current(self)
        if self.dtype.kind == "c" and np.dtype(dtype).kind == "f":
            raise refused("A conversion of complex numbers to real ones", "Use z.real")
        if np.dtype(dtype).kind not in "fciub":
            raise refused(f"A conversion to {np.dtype(dtype)}", "Keep arrays of numbers")
        return elementwise(raw(self.value.astype(dtype)), [(self, lambda: 1)])

    def __getitem__(self, key: Any) -> Any:
        current(self)
        _check_key(key)
        basic = all(isinstance(k, (int, np.integer, slice, type(...), type(None))) for k in _tuple(key))

        def spread(adjoint: Any) -> Any:
            found = np.zeros(self.shape, adjoint.dtype) if isinstance(adjoint, np.ndarray) else np.zeros_like(
                adjoint, shape=self.shape)  # fmt: skip
            found[key] = adjoint
            return found

        view = (lambda t: t[(slice(None), *_tuple(key))], spread) if basic else None
        value = self.value[key]
        found = moved(value, [self], lambda x: x[key], view=view, key=key)
        if isinstance(found, Traced):
            found.scalar = value.scalar if isinstance(value, Traced) else not isinstance(value, np.ndarray)
        return found

    def __setitem__(self, key: Any, item: Any) -> None:
        _check_key(key)
        item = lift(item)
        if isinstance(item, Traced) and item.pending and self.seen != self.versions[0]:
            owner, written, version = item.pending
            if owner is self and version == self.versions[0] and _same(written, key):
                self.seen = version  # x[key] += …: the changed view comes back
        current(self)
        if self.owner is not None:
            raise refused("Writing into a view of an array", "Write into the array itself, x[i, j] = …, or copy()")
        if isinstance(item, Traced) and item.level.depth > self.level.depth:
            raise refused("Writing what depends on x into an array that does not",
                          "Make the array with numpy.zeros_like(x)")  # fmt: skip
        operands = [self]
        if isinstance(item, Traced) and item.level is self.level:
            operands.append(current(item))
            if not np.can_cast(item.dtype, self.dtype, "same_kind"):
                raise refused(f"Writing {item.dtype} into an array of {self.dtype}", "Make the array with x's dtype")

        def write(x: Any, part: Any = 0) -> Any:
            x = np.array(x) if isinstance(x, np.ndarray) else np.copy(x)
            x[key] = part
            return x

        value = write(self.value, item.value if len(operands) == 2 else item)
        self.value, self.carried = value, self.level.choose(operands, write, value)
        self._written()

    def _written(self) -> None:
        self.versions[0] += 1
        self.seen = self.versions[0]

    def _overwrite(self, found: Any) -> Any:
        """Take the result of an in-place operation, x += …, or out=x."""
        current(self)
        if self.scalar:
            return found
        if self.ndim == 0:
            raise refused("An in-place operation on an array without axes", "Write s = s + v in place of s += v")
        if not isinstance(found, Traced) or found.level is not self.level:
            found = Traced(found, self.level.constant(raw(found)), self.level)
        if found.shape != self.shape or not np.can_cast(found.dtype, self.dtype, "same_kind"):
            raise refused(f"An in-place result of shape {found.shape}, {found.dtype}, in one of {self.shape}, "
                          f"{self.dtype}", "Assign the result to a new name")  # fmt: skip
        self.value = found.value.astype(self.dtype)
        self.carried = self.level.elementwise(self.shape, self.dtype, [(found, lambda: 1)])
        self._written()
        if self.owner is not None:  # until it is written back, the owner is stale
            self.pending = (self.owner, self.key, self.versions[0])
            self.owner, self.versions, self.seen = None, [0], 0
        return self

    def __copy__(self) -> Any:
        return np.copy(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return np.copy(self)

    def __matmul__(self, other: Any) -> Any:
        return matrix_product(other.T, self, right=True) if _sparse(other) else np.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return matrix_product(other, self) if _sparse(other) else np.matmul(other, self)


METHODS: dict[str, str] = {name: name for name in (
    "all", "any", "argmax", "argmin", "argsort", "clip", "conjugate", "copy", "cumprod", "cumsum", "diagonal", "dot",
    "max", "mean", "min", "prod", "ravel", "repeat", "round", "std", "sum", "swapaxes", "squeeze", "take", "trace",
    "var")} | {"conj": "conjugate"}  # fmt: skip
"""Methods of arrays that are functions of NumPy: under another name, or their own."""


def refused(what: str, remedy: str) -> TracingError:
    """Return the error of something that cannot be followed."""
    return TracingError(f"{what} cannot be followed", remedy=remedy)


def check_length(length: int, expected: int) -> None:
    """Check how many numbers a function returns."""
    if length != expected:
        raise ShapeError("The function returns another length than before", expected=expected, got=length)


def current(x: Traced) -> Traced:
    """Return an array, unless it was written to through another view of its memory."""
    if x.seen != x.versions[0]:
        raise refused("An array that was written to through another view of it", "Write into a copy(), or x[key] += …")
    return x


def _tuple(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def _same(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except ValueError:  # arrays
        return False


def _check_key(key: Any) -> None:
    for part in _tuple(key):
        items = part if isinstance(part, list) else [part]
        check_plain(part, "An index in the function")
        if any(isinstance(item, Traced) for item in items):
            raise refused("An index or mask that depends on x", "Use numpy.where(mask, a, b)")


def _sparse(x: Any) -> bool:
    return "scipy.sparse" in sys.modules and sys.modules["scipy.sparse"].issparse(x)


def lift(x: Any) -> Any:
    """Return an argument as an array: of a list or an object array with traced elements, their stack."""
    if isinstance(x, (list, tuple)) and any(isinstance(lift(item), Traced) for item in x):
        return np.stack([lift(item) for item in x])
    if isinstance(x, np.ndarray):
        if x.dtype == object and any(isinstance(item, Traced) for item in x.flat):
            return np.reshape(np.stack([lift(item) for item in x.flat]), x.shape)
        if type(x) is not np.ndarray:
            check_plain(x, "An array in the function")
    return x


# ---- levels ----------------------------------------------------------------------------------------------------------

Slope = Callable[[], Any]
Term = tuple[Any, ...]
"""An operand, its slope, and True if a slope of zero, as a constant, cuts the operand off."""


class Level(abc.ABC):
    """What one trace carries, and what each kind of operation does to it."""

    records = False
    """Whether it keeps the operations themselves: values are unknown, and everything depends on x."""
    structural = False
    """Whether it carries patterns, which hold for all values."""
    tangents = False
    """Whether it carries numbers that move with the values."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.refusals: list[TracingError] = []  # that the function may have caught

    @abc.abstractmethod
    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return what a constant carries."""

    def constant(self, value: Any) -> Any:
        """Return what a constant of this value carries."""
        return self.nothing(value.shape, value.dtype)

    def jump(self, name: str) -> Any:
        """Return what the result of a function carries that is constant between jumps."""
        return None

    def ufunc(self, name: str, inputs: Sequence[Any], y: Any) -> Any:
        """Return what a ufunc of inputs carries, where its slopes are not enough."""
        return None

    @abc.abstractmethod
    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Term]) -> Any:
        """Return Σ slope · operand, each broadcast to `shape`."""

    @abc.abstractmethod
    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        """Return elements of the operands: `choice` takes an array for each, and the result's value is `value`.

        `view`, where there is one, maps tangents without a copy, and adjoints.
        """

    @abc.abstractmethod
    def select(self, condition: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return `numpy.where`; a or b may be plain, the condition traced at a lower level or this."""

    @abc.abstractmethod
    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        """Return a linear map: `push` maps tangents, an axis in front, `pull` adjoints; `structure` is its matrix."""

    @abc.abstractmethod
    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return `numpy.einsum` of two operands; each label of an operand is in the other or in `out`, once."""


def finite(x: Any) -> bool:
    """Return whether all numbers are finite; where all are, by one sum."""
    return math.isfinite(abs(np.add.reduce(x, axis=None))) or bool(np.isfinite(x).all())


@np.errstate(all="ignore")
def careful_einsum(labels: str, a: np.ndarray, b: np.ndarray, cuts: bool) -> np.ndarray:
    """Return einsum of two arrays where 0 · ∞ of a zero in a is 0, and if it `cuts`, that of a zero in b as well."""
    product: Callable[..., np.ndarray] = functools.partial(np.einsum, labels)
    large_a, large_b = ~np.isfinite(a), ~np.isfinite(b)
    total = product(np.where(large_a, 0, a), np.where(large_b, 0, b))
    sign_a, sign_b = (np.nan_to_num(np.sign(x), nan=0.0) for x in (a, b))
    of_each = (sign_a * large_a, sign_b), (sign_a * ~large_a, sign_b * large_b)  # infinite products, by their factors
    net = np.add(*(product(x, y) for x, y in of_each))
    all_of = np.add(*(product(abs(x), abs(y)) for x, y in of_each))
    unknown = product(np.isnan(a) * 1.0, (b != 0) * 1.0) + product((a != 0) * 1.0, np.isnan(b) * 1.0)
    if not cuts:
        unknown = unknown + product(large_a * 1.0, (b == 0) * 1.0)
    infinite = np.where(all_of > abs(net), np.nan, net * np.inf)
    found: np.ndarray = np.where(unknown > 0, np.nan, np.where(all_of > 0, infinite, total)).astype(total.dtype)
    return found


Pull = Callable[[Any, Any], tuple[Any, Any]]


def _real(pull: Pull) -> Pull:
    """Return the way back to a real array: only the real part of an adjoint counts there."""

    def back(adjoint: Any, alive: Any) -> tuple[Any, Any]:
        found, alive = pull(adjoint, alive)
        return (found if found.dtype.kind != "c" else np.real(found)), alive

    return back


class Tape(Level):
    """A record of what was computed: each array's parents, and how an adjoint goes back to them.

    Where 0 · ∞ gave NaN, the sweep is done again, and with each adjoint goes where it is *alive*: where a path leads to
    it. None leads to a branch that `numpy.where` does not take, nor to what is not indexed; there the adjoint is 0,
    whatever the slopes. A slope of 0 ends an infinite adjoint as well, because forward mode does not move beyond it.
    NaN is left where a zero stands behind an infinite slope, in both modes. Patterns are always found by paths.

    The adjoint λ of a complex z gives the change Re(λ dz), so that holomorphic operations go back as real ones do.
    """

    def __init__(self, depth: int, below: Level | None) -> None:
        super().__init__(depth)
        self.nodes: list[list[tuple[int, Pull]]] = []
        self.of_sets = below is not None and below.structural

    def node(self, *parents: tuple[Traced, Pull]) -> int:
        """Record an array and return its number."""
        self.nodes.append([(x.carried, pull if x.dtype.kind == "c" else _real(pull)) for x, pull in parents])
        return len(self.nodes) - 1

    def nothing(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.node()

    def elementwise(self, shape: tuple[int, ...], dtype: Any, terms: list[Term]) -> Any:
        def pull(x: Traced, slope: Slope, cuts: bool = False) -> Pull:
            def back(adjoint: Any, alive: Any) -> tuple[Any, Any]:
                s = slope()
                found = adjoint * s
                if alive is not None:
                    alive = np.broadcast_to(alive, shape)
                    if cuts and not isinstance(s, Traced):
                        alive = alive & (s != 0)
                    found = np.where(alive, found, 0)
                    if not self.of_sets:
                        found = _zeroed(found, (plain(s) == 0) & ~np.isfinite(plain(adjoint)))
                return unbroadcast(found, x.shape), _moved_alive(alive, lambda a: unbroadcast(a, x.shape))

            return back

        return self.node(*((x, pull(x, *slope)) for x, *slope in terms))

    def choose(self, operands: list[Traced], choice: Any, value: Any, view: Any = None) -> Any:
        def pull(back: Callable[[Any], Any]) -> Pull:
            return lambda adjoint, alive: (back(adjoint), _moved_alive(alive, back))

        if view is not None:
            return self.node((operands[0], pull(view[1])))
        numbers = choice(*numbered(operands)).ravel()

        def to(x: Traced, first: int) -> Pull:
            mine = np.flatnonzero((numbers >= first) & (numbers < first + x.size))
            back = selection(numbers[mine] - first, mine, (x.size, numbers.size))
            return pull(lambda adjoint: np.reshape(matrix_product(back, np.reshape(adjoint, -1)), x.shape))

        first = itertools.accumulate((x.size for x in operands), initial=1)
        return self.node(*((x, to(x, start)) for x, start in zip(operands, first, strict=False)))

    def select(self, condition: Any, a: Any, b: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        def pull(x: Traced, taken: bool) -> Pull:
            def back(adjoint: Any, alive: Any) -> tuple[Any, Any]:
                sides = (adjoint, 0) if taken else (0, adjoint)
                part = unbroadcast(np.where(condition, *sides), x.shape)
                if alive is not None and not isinstance(condition, Traced):  # of a pattern
                    alive = np.broadcast_to(alive & (np.asarray(condition, bool) == taken), shape)
                return part, _moved_alive(alive, lambda mine: unbroadcast(np.broadcast_to(mine, shape), x.shape))

            return back

        return self.node(*((x, pull(x, taken)) for x, taken in ((a, True), (b, False))
                           if isinstance(x, Traced) and x.level is self))  # fmt: skip

    def linear(self, x: Traced, shape: tuple[int, ...], dtype: Any, push: Any, pull: Any, structure: Any) -> Any:
        def reached(mine: np.ndarray) -> Any:
            weights = 1 + 0.618 * np.arange(mine.size).reshape(mine.shape) % 1  # which do not cancel
            found = pull(np.broadcast_to(mine, shape) * weights)
            return np.ones(x.shape) if isinstance(found, Traced) else abs(found)

        return self.node((x, lambda adjoint, alive: (pull(adjoint), _moved_alive(alive, reached))))

    def contract(self, operands: list[Any], labels: list[str], out: str, shape: tuple[int, ...], dtype: Any) -> Any:
        def pull(k: int) -> Pull:
            other, names = raw_at(self, operands[1 - k]), f"{out},{labels[1 - k]}->{labels[k]}"
            there = np.ones(other.shape) if isinstance(operands[1 - k], Traced) else (other != 0) * 1.0

            def back(adjoint: Any, alive: Any) -> tuple[Any, Any]:
                careful = alive is not None and not (isinstance(adjoint, Traced) or isinstance(other, Traced))
                part = careful_einsum(names, adjoint, other, True) if careful else np.einsum(names, adjoint, other)
                return part, _moved_alive(alive, lambda mine: np.einsum(names, np.broadcast_to(mine, shape), there))

            return back

        mine = [k for k, x in enumerate(operands) if isinstance(x, Traced) and x.level is self]
        return self.node(*((operands[k], pull(k)) for k in mine))

    @np.errstate(all="ignore")
    def back(self, number: int, seed: Any, to: int, alive: Any = None) -> Any:
        """Return the adjoint of array `to` where that of array `number` is `seed`; None: there is no path."""
        adjoints: dict[int, tuple[Any, Any]] = {number: (seed, alive)}
        for at in range(number, to, -1):
            if at not in adjoints:
                continue
            given = adjoints.pop(at)
            for parent, pull in self.nodes[at]:
                part, mine = pull(*given)
                if parent in adjoints:
                    other, lives = adjoints[parent]
                    part, mine = other + part, mine if mine is None else mine | lives
                adjoints[parent] = part, mine
        return adjoints.get(to, (None, None))[0]


def _moved_alive(alive: Any, back: Callable[[Any], Any]) -> Any:
    """Return where a sum over elements, some of which are alive, is; `back` moves and adds elements."""
    return alive if alive is None else back(alive.astype(float)) > 0


def plain(x: Any) -> Any:
    """Return the value of an array, below all levels."""
    while isinstance(x, Traced):
        x = x.value
    return x


def _zeroed(x: Any, where: Any) -> Any:
    """Return an array whose value, not what it carries, is zero in some places."""
    if not np.any(where):
        return x
    return Traced(_zeroed(x.value, where), x.carried, x.level) if isinstance(x, Traced) else np.where(where, 0, x)


def _unknown(x: Any) -> bool:
    """Return whether a value, or what it carries, is NaN anywhere."""
    if isinstance(x, Traced):
        return _unknown(x.value) or (x.level.tangents and _unknown(x.carried))
    with np.errstate(all="ignore"):
        return x is not None and bool(np.isnan(np.add.reduce(x, axis=None))) and bool(np.isnan(x).any())


def numbered(operands: list[Traced]) -> list[np.ndarray]:
    """Return an array of numbers for each operand: elements of all of them, from 1. Constants are 0."""
    ends = itertools.accumulate((x.size for x in operands), initial=1)
    return [np.arange(first, first + x.size).reshape(x.shape) for first, x in zip(ends, operands, strict=False)]


def unbroadcast(x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes along which an array of `shape` was broadcast."""
    extra = np.ndim(x) - len(shape)
    axes = (*range(extra), *(a + extra for a, n in enumerate(shape) if n == 1 and np.shape(x)[a + extra] != 1))
    return np.reshape(np.sum(x, axis=axes), shape) if axes else x


def pullback(f: Callable[[Any], Any], x: Any) -> tuple[Any, Callable[..., Any]]:
    """Return f(x) and the product of its transposed Jacobian with a vector; x may be traced itself."""
    below = x.level if isinstance(x, Traced) else None
    tape = Tape(1 + (0 if below is None else below.depth), below)
    start = tape.node()  # f may write to its argument, which is another node then
    y = lift(f(Traced(x, start, tape)))
    if not isinstance(y, Traced) or y.level is not tape:
        return y, lambda seed, careful=None: np.zeros(np.shape(x), x.dtype)
    current(y)

    def back(seed: Any, careful: bool | None = None) -> Any:
        """Return the product; `careful`: by paths, or only if it is unknown otherwise."""
        paths = tape.of_sets or careful
        found = tape.back(y.carried, seed, start, plain(seed) != 0 if paths else None)
        if careful is None and not paths and _unknown(found):
            return back(seed, careful=True)
        return np.zeros(np.shape(x), x.dtype) if found is None else found

    return y.value, back


def gradient(g: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the gradient of a scalar function, itself a function that can be traced."""

    def of(x: Any) -> Any:
        y, back = pullback(g, x)
        if np.shape(y) != ():
            raise TracingError("The function is not scalar", expected="an output of shape ()", got=np.shape(y))
        return back(np.ones((), x.dtype))

    return of


# ---- how each operation is one of the four kinds ---------------------------------------------------------------------


def level_of(*args: Any) -> Level:
    """Return the deepest level among the arguments."""
    levels = [x.level for x in args if isinstance(x, Traced)]
    if not levels:
        raise refused(
            "An argument that depends on x, but is not an array of elements", "Write it with plain operations"
        )
    deepest = max(levels, key=lambda level: level.depth)
    if any(level is not deepest and level.depth == deepest.depth for level in levels):
        raise refused("An array that was kept from an earlier trace", "Keep no arrays between calls of the function")
    return deepest


def raw_at(level: Level, x: Any) -> Any:
    """Return the value of an array of this level; others as they are."""
    return current(x).value if isinstance(x, Traced) and x.level is level else x


def raw(x: Any) -> Any:
    """Return a scalar of NumPy as an array, so that it has a shape to index."""
    return x if isinstance(x, Traced) else np.asarray(x)


def wrapped(level: Level, value: Any, carried: Callable[[Any], Any], depends: bool = True, moves: bool = False) -> Any:
    """Return a traced result; without operands, the value alone, unless control flow on it must be refused."""
    value = raw(value)
    if level.records:  # what is computed is unknown; what is moved may be a view
        unknown = value if moves or value.dtype.kind != "f" else np.full(value.shape, np.nan, value.dtype)
        return Traced(unknown, carried(value), level)
    depends = depends and value.dtype.kind in "fc"  # integers and bools are constant between jumps
    if not depends and not level.structural:
        return value
    return Traced(value, carried(value) if depends else level.nothing(value.shape, value.dtype), level)


def elementwise(value: Any, terms: list[Term]) -> Any:
    """Return a traced result of an elementwise operation."""
    level = level_of(*(x for x, _ in terms))
    return wrapped(level, value, lambda v: level.elementwise(v.shape, v.dtype, terms))


def moved(value: Any, operands: list[Traced], choice: Any, view: Any = None, key: Any = None) -> Any:
    """Return elements of arrays; one that shares the memory of its operand is a view of it."""
    level = operands[0].level
    found = wrapped(level, value, lambda v: level.choose(operands, choice, v, view=view), moves=True)
    x = operands[0]
    if len(operands) == 1 and isinstance(found, Traced) and _shared(found.value, x.value):
        found.versions, found.seen = x.versions, x.seen
        found.owner, found.key = (x, key) if x.owner is None else (x.owner, object())
    return found


def _shared(a: Any, b: Any) -> bool:
    if isinstance(a, Traced) and isinstance(b, Traced):
        return a.versions is b.versions
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.may_share_memory(a, b)


def selection(rows: np.ndarray, columns: np.ndarray, shape: tuple[int, int]) -> Any:
    """Return a sparse matrix of ones."""
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(rows), np.int8), (rows, columns)), shape=shape)


def matrix_product(matrix: Any, x: Any, right: bool = False) -> Any:
    """Return a constant sparse matrix times an array; `right`: the array times the matrix, whose transpose it is."""
    if not isinstance(x, Traced):
        return (matrix @ x.T).T if right and x.ndim > 1 else matrix @ x
    if right and x.ndim > 1:
        return np.transpose(matrix_product(matrix, np.transpose(x)))
    if matrix.ndim != 2 or x.ndim not in (1, 2) or matrix.shape[1] != x.shape[0]:
        raise TracingError("A sparse matrix does not fit", expected=f"({matrix.shape[1]},) or ({matrix.shape[1]}, k)",
                           got=x.shape)  # fmt: skip
    level, wide = level_of(x), x.shape[1:]
    matrix = matrix.tocsr(copy=isinstance(level, Tape))  # f may write to it before the reverse sweep reads it

    def push(t: np.ndarray) -> np.ndarray:
        columns = np.moveaxis(t, 0, -1).reshape(t.shape[1], math.prod(wide) * len(t))
        return np.moveaxis((matrix @ columns).reshape(matrix.shape[0], *wide, len(t)), -1, 0)

    def structure() -> Any:
        if not wide:
            return matrix
        from scipy.sparse import csr_array, eye_array, kron

        ones = csr_array((np.ones(matrix.nnz, bool), matrix.indices, matrix.indptr), matrix.shape)
        return kron(matrix if level.records else ones, eye_array(wide[0], dtype=bool), format="csr")

    value = matrix @ raw_at(level, x)
    return wrapped(level, value, lambda v: level.linear(
        x, v.shape, v.dtype, push, lambda adjoint: matrix_product(matrix.T, adjoint), structure))  # fmt: skip


REDUCTIONS = {"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"}
ACCUMULATIONS = {"add": "cumsum", "multiply": "cumprod"}
OF_SCALARS = frozenset((
    "sum", "prod", "max", "amax", "min", "amin", "mean", "var", "std", "dot", "vdot", "inner", "matmul", "trace",
    "linalg.norm", "linalg.det", "ptp", "median", "average", "trapezoid", "einsum", "interp", "clip",
))  # fmt: skip
"""Functions of which NumPy returns scalars where a result has no axes."""
SLOPES: dict[str, tuple[Callable[..., Any] | None, ...]] = {}
SPECIAL: dict[str, tuple[Callable[..., Any] | None, ...]] = {}
"""Ufuncs of NumPy and of `scipy.special`: the slope by each operand; None is zero. Filled by `numpy_rules`."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
MOVERS: dict[str, Callable[..., Any]] = {}
"""Functions of NumPy by name, with its signatures; `numpy_rules` holds them. Movers also take lists of arrays."""


CHOOSING = ("maximum", "minimum", "fmax", "fmin")
"""Ufuncs that take one of their operands: the slope of the other is zero, whatever it is."""
COMPOSED: dict[str, Callable[..., Any]] = {}
"""Ufuncs of complex numbers that are not holomorphic, and `reduceat`. Filled by `numpy_rules`."""
NOT_HOLOMORPHIC = ("sign", "fabs", "maximum", "minimum", "fmax", "fmin")


def _slopes_of(ufunc: Any) -> tuple[Callable[..., Any] | None, ...] | None:
    name = getattr(ufunc, "__name__", "")
    if name in SLOPES and ufunc is getattr(np, name, None):
        return SLOPES[name]
    special = sys.modules.get("scipy.special")
    return SPECIAL[name] if name in SPECIAL and ufunc is getattr(special, name, None) else None


def _owned(args: Iterable[Any]) -> list[Any]:
    """Return arguments; for a reverse sweep, which reads them after f may have written to them, copies of arrays."""
    args = [lift(x) for x in args]
    if not any(isinstance(x, Traced) and isinstance(x.level, Tape) for x in args):
        return args
    return [x.copy() if isinstance(x, np.ndarray) or _sparse(x) else x for x in args]


def _add_at(ufunc: np.ufunc, x: Any, index: Any, item: Any = None) -> None:
    """Follow ufunc.at: sums, where an index may repeat, and others where none does."""
    name = f"numpy.{ufunc.__name__}.at"
    _check_key(index)
    if not isinstance(x, Traced):
        raise refused(f"{name} into a plain array", "Make the array with numpy.zeros_like(x)")
    size = x.size
    to = np.arange(size).reshape(x.shape)[index]
    if item is None or len(np.unique(to)) == to.size:
        found = np.copy(x)
        found[index] = ufunc(x[index], *([] if item is None else [item]))
    elif ufunc in (np.add, np.subtract):
        items = np.reshape(np.broadcast_to(item, to.shape), -1)
        sums = matrix_product(selection(to.ravel(), np.arange(to.size), (size, to.size)), items)
        found = ufunc(x, np.reshape(sums, x.shape))
    else:
        raise refused(f"{name} with an index that repeats", "Sums, numpy.add.at and numpy.subtract.at, are followed")
    x._overwrite(found)


def _as_scalar(found: Any) -> Any:
    """Return a result of which NumPy makes a scalar where it has no axes."""
    if isinstance(found, Traced) and found.ndim == 0:
        found.scalar = True
    return found


def _of_ufunc(ufunc: Any, method: str, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
    name = getattr(ufunc, "__name__", str(ufunc))
    if any(_sparse(x) for x in inputs):
        raise refused(f"numpy.{name} of a sparse matrix", "Products are written A @ x")
    inputs = [np.asarray(x) if isinstance(x, Sequence) else x for x in inputs]
    for x in inputs:
        if isinstance(x, Traced):
            current(x)
    if ufunc is np.matmul and method == "__call__" and not kwargs:
        return FUNCTIONS["matmul"](*inputs)
    same = {"reduce": REDUCTIONS, "accumulate": ACCUMULATIONS}.get(method, {}).get(name)
    if same is not None:
        first = {"axis": 0} if raw(inputs[0]).ndim or method == "accumulate" else {}
        return composite(f"numpy.{name}.{method}", FUNCTIONS[same], inputs, {**first, **kwargs})
    if method == "reduceat" and name in REDUCTIONS:
        return composite(f"numpy.{name}.reduceat", functools.partial(COMPOSED["reduceat"], ufunc), inputs, kwargs)
    if method == "outer" and not kwargs:
        a, b = (raw(x) for x in inputs)
        return ufunc(np.reshape(a, (*a.shape, *(1,) * b.ndim)), b)
    slopes = _slopes_of(ufunc)
    if slopes is None or method != "__call__" or kwargs:
        called = f"{name}{'' if method == '__call__' else '.' + method}"
        options = f" with {', '.join(f'{k}=' for k in kwargs)}" if kwargs else ""
        raise refused(f"The ufunc {called}{options}", "Write it with ufuncs and functions that are listed in the "
                      "reference, or pass pattern= and derivatives of your own")  # fmt: skip
    if name in COMPOSED and inputs[0].dtype.kind == "c":
        return COMPOSED[name](*inputs)
    level = level_of(*inputs)
    values = [raw_at(level, x) for x in inputs]
    with np.errstate(all="ignore"):
        y = ufunc(*values)
    if name in NOT_HOLOMORPHIC and any(getattr(x, "dtype", np.dtype(float)).kind == "c" for x in values):
        raise refused(f"numpy.{name} of complex numbers", "Use z.real and z.imag")
    if level.records:
        return wrapped(level, y, lambda v: level.ufunc(name, inputs, v))
    mine = [(x, slope) for x, slope in zip(inputs, slopes, strict=True) if isinstance(x, Traced) and x.level is level]
    if y.dtype.kind in "fc":  # bools have no minus, and slopes in float32 are not those of float64
        values = [v.astype(y.dtype) if getattr(v, "dtype", y.dtype) != y.dtype and v.dtype.kind in "bf" else v
                  for v in values]  # fmt: skip
    if level.structural and ufunc is np.multiply and len(mine) == 1:
        factor = values[1 if mine[0][0] is inputs[0] else 0]
        if isinstance(factor, np.ndarray) and factor.ndim:  # zeros of a constant array are zeros of the result
            return np.where(np.broadcast_to(factor != 0, y.shape), Traced(y, level.elementwise(
                y.shape, y.dtype, [(mine[0][0], lambda: 1)]), level), 0)  # fmt: skip

    by_constant = ufunc is np.multiply and not all(isinstance(x, Traced) for x in inputs)
    cuts = (True,) if by_constant or name in CHOOSING else ()

    def term(x: Traced, slope: Any) -> Term:
        return x, lambda: slope(y, *values), *cuts

    terms = [term(x, slope) for x, slope in mine if slope is not None]
    return wrapped(level, y, lambda v: level.elementwise(v.shape, v.dtype, terms), depends=bool(terms))


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Follow a function of NumPy, or refuse it."""
    module = getattr(func, "__module__", "") or ""
    name = getattr(func, "__name__", str(func))
    name = f"{module.split('.')[1]}.{name}" if module.startswith(("numpy.linalg", "numpy.fft")) else name
    if name in MOVERS:
        return MOVERS[name](*args, **kwargs)
    if name not in FUNCTIONS:
        raise refused(f"numpy.{name}", "Write it with functions that are listed in the reference")
    found = composite(f"numpy.{name}", FUNCTIONS[name], args, kwargs)
    return _as_scalar(found) if name in OF_SCALARS else found


def composite(name: str, function: Callable[..., Any], args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of `FUNCTIONS`, if it has these arguments."""
    args = _owned(args)
    given = {k: v for k, v in kwargs.items() if v is not np._NoValue and (v is not None or k not in ("where", "out"))}
    try:
        _signature(function).bind(*args, **given)
    except TypeError:
        options = ", ".join(f"{option}=" for option in given) or f"{len(args)} arguments"
        raise refused(f"{name} with {options}", "Write it with plain operations") from None
    if given.get("out") is not None:
        raise refused(f"{name} with out=", "Assign the result")
    for x in args:
        if isinstance(x, Traced):
            current(x)
    return function(*args, **given)


_signature = functools.cache(inspect.signature)
