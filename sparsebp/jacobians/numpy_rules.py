"""NumPy's functions on traced arrays, made of the four kinds of operation that `sparsebp.jacobians.tracing` follows.

Ufuncs are elementwise, by their slopes. `MOVES` holds functions that move elements: they run as they are, on arrays of
any kind. The others are written out, under NumPy's names and with its signatures, which say what they do.
"""

from __future__ import annotations

import functools
import math
import string
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sparsebp.jacobians import tracing
from sparsebp.jacobians.index_sets import Sets
from sparsebp.jacobians.tracing import (
    Traced,
    careful_einsum,
    current,
    elementwise,
    finite,
    level_of,
    lift,
    matrix_product,
    moved,
    raw,
    raw_at,
    refused,
    selection,
    wrapped,
)

# mypy: disable-error-code="call-overload"

# Ufuncs. Slopes by operand, of the result y and the operands; None: zero.

_ERF = 2 / math.sqrt(math.pi)


def _exponent(b: Any) -> Any:
    """Return b - 1, and 0 instead where b is 0: the factor b makes it zero, even at 0."""
    if isinstance(b, (np.ndarray, np.generic)):
        b = np.asarray(b)
        return np.where(b == 0, 0, b - 1).astype(b.dtype)
    return b - 1 if isinstance(b, Traced) or b else 0


def _reciprocal(b: Any) -> Any:
    return math.copysign(math.inf, b) if isinstance(b, (int, float)) and not b else 1 / b


def _log_or_zero(a: Any) -> Any:
    return np.where(a == 0, 0, np.log(np.where(a == 0, 1, a)))


def _special(name: str) -> Any:
    import scipy.special

    return getattr(scipy.special, name)


def _first(y: Any, a: Any, b: Any) -> Any:
    return np.where(a == b, 0.5, np.heaviside(a - b, 0.5))  # as PyTorch: half of the slope each at a tie


def _second(y: Any, a: Any, b: Any) -> Any:
    return _first(y, b, a)


def _first_number(y: Any, a: Any, b: Any) -> Any:
    return np.where(np.isnan(b), 1, np.where(np.isnan(a), 0, _first(y, a, b)))


def _second_number(y: Any, a: Any, b: Any) -> Any:
    return 1 - _first_number(y, a, b)


tracing.SLOPES |= {
    "positive": (lambda y, a: 1,),
    "negative": (lambda y, a: -1,),
    "conjugate": (lambda y, a: 1,),
    "absolute": (lambda y, a: np.sign(a),),
    "fabs": (lambda y, a: np.sign(a),),
    "square": (lambda y, a: 2 * a,),
    "sqrt": (lambda y, a: 0.5 / y,),
    "cbrt": (lambda y, a: 1 / (3 * y * y),),
    "reciprocal": (lambda y, a: -y * y,),
    "exp": (lambda y, a: y,),
    "exp2": (lambda y, a: y * math.log(2),),
    "expm1": (lambda y, a: np.exp(a),),
    "log": (lambda y, a: 1 / a,),
    "log2": (lambda y, a: 1 / (a * math.log(2)),),
    "log10": (lambda y, a: 1 / (a * math.log(10)),),
    "log1p": (lambda y, a: 1 / (1 + a),),
    "sin": (lambda y, a: np.cos(a),),
    "cos": (lambda y, a: -np.sin(a),),
    "tan": (lambda y, a: 1 + y * y,),
    "arcsin": (lambda y, a: 1 / np.sqrt(1 - a * a),),
    "arccos": (lambda y, a: -1 / np.sqrt(1 - a * a),),
    "arctan": (lambda y, a: 1 / (1 + a * a),),
    "sinh": (lambda y, a: np.cosh(a),),
    "cosh": (lambda y, a: np.sinh(a),),
    "tanh": (lambda y, a: 1 - y * y,),
    "arcsinh": (lambda y, a: 1 / np.sqrt(a * a + 1),),
    "arccosh": (lambda y, a: 1 / (np.sqrt(a - 1) * np.sqrt(a + 1)),),  # of complex numbers too, where one root is wrong
    "arctanh": (lambda y, a: 1 / (1 - a * a),),
    **dict.fromkeys(("deg2rad", "radians"), (lambda y, a: math.pi / 180,)),
    **dict.fromkeys(("rad2deg", "degrees"), (lambda y, a: 180 / math.pi,)),
    **dict.fromkeys(("sign", "floor", "ceil", "trunc", "rint"), (None,)),
    "add": (lambda y, a, b: 1, lambda y, a, b: 1),
    "subtract": (lambda y, a, b: 1, lambda y, a, b: -1),
    "multiply": (lambda y, a, b: b, lambda y, a, b: a),
    "divide": (lambda y, a, b: _reciprocal(b), lambda y, a, b: -y / b),
    **dict.fromkeys(("power", "float_power"), (lambda y, a, b: b * a ** _exponent(b),
                                              lambda y, a, b: y * _log_or_zero(a))),
    "arctan2": (lambda y, a, b: b / (a * a + b * b), lambda y, a, b: -a / (a * a + b * b)),
    "hypot": (lambda y, a, b: a / y, lambda y, a, b: b / y),
    "maximum": (_first, _second),
    "minimum": (_second, _first),
    "fmax": (_first_number, _second_number),
    "fmin": (lambda y, a, b: _first_number(y, -a, -b), lambda y, a, b: _second_number(y, -a, -b)),
    "logaddexp": (lambda y, a, b: np.exp(a - y), lambda y, a, b: np.exp(b - y)),
    "logaddexp2": (lambda y, a, b: np.exp2(a - y), lambda y, a, b: np.exp2(b - y)),
    "copysign": (lambda y, a, b: np.sign(a) * np.copysign(1, b), None),
    "fmod": (lambda y, a, b: 1, lambda y, a, b: np.rint((y - a) / b)),
    "remainder": (lambda y, a, b: 1, lambda y, a, b: -np.floor_divide(a, b)),
    "floor_divide": (None, None),
    "heaviside": (None, lambda y, a, b: np.where(a == 0, 1, 0)),
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and",
                     "logical_or", "logical_xor"), (None, None)),
    **dict.fromkeys(("logical_not", "isfinite", "isinf", "isnan", "signbit"), (None,)),
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor"), (None, None)), "invert": (None,),  # of bools
}  # fmt: skip
tracing.SPECIAL |= {
    "expit": (lambda y, a: y * (1 - y),),
    "logit": (lambda y, a: 1 / (a * (1 - a)),),
    "log_expit": (lambda y, a: _special("expit")(-a),),
    "erf": (lambda y, a: _ERF * np.exp(-a * a),),
    "erfc": (lambda y, a: -_ERF * np.exp(-a * a),),
    "ndtr": (lambda y, a: np.exp(-a * a / 2) / math.sqrt(2 * math.pi),),
    "gammaln": (lambda y, a: _special("psi")(a),),
    "gamma": (lambda y, a: y * _special("psi")(a),),
    "xlogy": (lambda y, a, b: np.log(b), lambda y, a, b: a / b),
}

# Functions of NumPy that move elements: which arguments hold them. They run on numbers of elements.

_ALL = object()
_OF_LISTS = ("concatenate", "stack", "hstack", "vstack", "dstack", "column_stack", "block")
MOVES: dict[str, Any] = {
    **dict.fromkeys(
        ("reshape", "transpose", "matrix_transpose", "ravel", "squeeze", "expand_dims", "swapaxes", "moveaxis",
         "rollaxis", "flip", "fliplr", "flipud", "rot90", "roll", "repeat", "tile", "take", "diagonal", "diag",
         "diagflat", "tril", "triu", "broadcast_to", "delete", "split", "array_split", "hsplit", "vsplit", "dsplit",
         "resize", "pad", "copy", "take_along_axis", "concatenate", "stack", "hstack", "vstack", "dstack",
         "column_stack", "block", "unstack"), (0,)),
    **dict.fromkeys(("compress", "extract"), (1,)),
    "append": (0, 1),
    "insert": (0, 2),
    **dict.fromkeys(("atleast_1d", "atleast_2d", "atleast_3d", "meshgrid", "broadcast_arrays"), _ALL),
}  # fmt: skip


def _moving(name: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: _move(name, getattr(np, name), args, kwargs)


def _move(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    where = range(len(args)) if MOVES[name] is _ALL else MOVES[name]
    found: list[Traced] = []

    def arrays_of(x: Any, deep: bool = True) -> Any:
        """Return an argument with its arrays lifted: itself, or those in a list of them."""
        if name in _OF_LISTS and isinstance(x, (list, tuple)) and (deep or name == "block"):
            return [arrays_of(item, deep=False) for item in x]
        return lift(x)

    args = tuple(arrays_of(x) if i in where else x for i, x in enumerate(args))

    def visit(x: Any) -> None:
        if isinstance(x, (list, tuple)):
            for item in x:
                visit(item)
        elif isinstance(x, Traced):
            found.append(current(x))

    for place in where:
        if place < len(args):
            visit(args[place])
    if not found or any(isinstance(args[i], Traced) for i in range(len(args)) if i not in where) or any(
            isinstance(x, Traced) for x in kwargs.values()):  # fmt: skip
        raise refused(f"numpy.{name} with an argument other than its arrays that depends on x", "Use numpy.where")
    if name == "pad" and (args[2:] or [kwargs.get("mode", "constant")])[0] not in (
            "constant", "edge", "wrap", "reflect", "symmetric"):  # fmt: skip
        raise refused("numpy.pad in this mode", "Use mode='constant', 'edge', 'wrap', 'reflect' or 'symmetric'")
    if {"A", "K"} & {x for x in (*args, *kwargs.values()) if isinstance(x, str)}:
        raise refused(f"numpy.{name} in an order that depends on memory", "Use order='C' or 'F'")
    if unknown := {"out", "reflect_type", "stat_length", "end_values"} & kwargs.keys():
        raise refused(f"numpy.{name} with {', '.join(unknown)}=", "Write it without")
    level = level_of(*found)
    operands = [x for x in found if x.level is level]
    options = {k: v for k, v in kwargs.items() if k not in ("constant_values", "dtype", "casting")}

    def with_arrays(at: Callable[[Any], Any]) -> list[Any]:
        """Return the arguments with each array replaced."""

        def mapped(x: Any) -> Any:
            return [mapped(item) for item in x] if isinstance(x, (list, tuple)) else at(x)

        return [mapped(x) if i in where else x for i, x in enumerate(args)]

    def choice(*given: Any, part: int | None = None) -> Any:
        left = iter(given)
        found = func(*with_arrays(lambda x: next(left) if isinstance(x, Traced) and x.level is level
                                  else np.zeros(np.shape(x), given[0].dtype)), **options)  # fmt: skip
        return found if part is None else found[part]

    values = func(*with_arrays(lambda x: raw_at(level, x)), **kwargs)
    if isinstance(values, (list, tuple)):
        return type(values)(moved(v, operands, functools.partial(choice, part=i)) for i, v in enumerate(values))
    return moved(values, operands, choice, view=_view(name, values, args, kwargs))


def _view(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return how tangents move without an index, for the most frequent functions."""
    shape = np.shape(value)
    if name in ("reshape", "ravel", "squeeze", "expand_dims") and not kwargs.keys() & {"order", "copy"} and (
            name != "reshape" or len(args) < 3) and (name != "ravel" or len(args) < 2):  # fmt: skip
        return lambda t: t.reshape(len(t), *shape), lambda adjoint: np.reshape(adjoint, args[0].shape)
    if name == "transpose":
        ndim = len(shape)
        axes = (args[1:] or (kwargs.get("axes"),))[0]
        axes = range(ndim)[::-1] if axes is None else [a % ndim for a in np.atleast_1d(axes)]
        back = tuple(np.argsort(axes))
        return lambda t: t.transpose(0, *(a + 1 for a in axes)), lambda adjoint: np.transpose(adjoint, back)
    return None


# Functions that are linear, contractions, or made of others: with NumPy's signature, and operations on traced arrays.


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    if any(not -ndim <= a < ndim for a in axes):
        raise np.exceptions.AxisError(f"axis {axis} is out of bounds for an array of {ndim} axes")
    return tuple(a % ndim for a in axes)


def _check_real(name: str, x: Any) -> None:
    if (x if isinstance(x, Traced) else np.asarray(x)).dtype.kind == "c":
        raise refused(f"numpy.{name} of complex numbers", "Use z.real and z.imag")


def _last(x: Any, axes: tuple[int, ...]) -> Any:
    """Return an array with some axes made one, behind all others."""
    kept = [a for a in range(np.ndim(x)) if a not in axes]
    moved = np.transpose(x, (*kept, *axes))
    return np.reshape(moved, (*(x.shape[a] for a in kept), math.prod(x.shape[a] for a in axes)))


def _keep(y: Any, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> Any:
    """Return a reduction with axes of length 1 again."""
    return np.reshape(y, [1 if a in axes else n for a, n in enumerate(shape)]) if keepdims else y


def sum_of(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False,
           where: Any = True) -> Any:  # fmt: skip
    a = a if where is True else np.where(where, a, np.zeros((), a.dtype))
    axes, level = _axes(axis, a.ndim), level_of(a)
    shape = tuple(1 if i in axes else n for i, n in enumerate(a.shape))

    def structure() -> Any:
        numbers = _last(np.arange(a.size).reshape(a.shape), axes)
        size = math.prod(numbers.shape[:-1])
        return selection(np.repeat(np.arange(size), numbers.shape[-1]), numbers.ravel(), (size, a.size))

    value = np.sum(raw_at(level, a), axis=axes, dtype=dtype)
    found = wrapped(level, value, lambda v: level.linear(
        a, v.shape, v.dtype, lambda t: t.sum(axis=tuple(i + 1 for i in axes)),
        lambda adjoint: np.broadcast_to(np.reshape(adjoint, shape), a.shape), structure))  # fmt: skip
    return _keep(found, a.shape, axes, keepdims)


def mean(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False,
         where: Any = True) -> Any:  # fmt: skip
    count: Any = math.prod(a.shape[i] for i in _axes(axis, a.ndim))
    if where is not True:
        count = np.sum(np.broadcast_to(where, a.shape), axis=axis, keepdims=keepdims)
    return sum_of(a, axis, dtype, out, keepdims, where) / count


def var(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: bool = False) -> Any:
    _check_real("var", a)
    count = math.prod(a.shape[i] for i in _axes(axis, a.ndim))
    return sum_of(np.square(a - mean(a, axis, keepdims=True)), axis, dtype, out, keepdims) / (count - ddof)


def std(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: Any = 0, keepdims: bool = False) -> Any:
    return np.sqrt(var(a, axis, dtype, out, ddof, keepdims))


def _factors(a: Any, dtype: Any) -> Any:
    """Return an array of the dtype in which NumPy multiplies its elements: of bools, integers."""
    dtype = np.dtype(np.prod(np.empty(0, a.dtype)).dtype if dtype is None else dtype)
    return a if a.dtype == dtype else a.astype(dtype)


def product_of(a: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False,
               where: Any = True) -> Any:  # fmt: skip
    a = a if where is True else np.where(where, a, np.ones((), a.dtype))
    a, axes = _factors(a, dtype), _axes(axis, a.ndim)
    x = _last(a, axes)
    while x.shape[-1] > 1:  # halves times halves: exact where factors are zero
        half = x.shape[-1] // 2
        x = np.concatenate([x[..., :half] * x[..., half : 2 * half], x[..., 2 * half :]], axis=-1)
    return _keep(x[..., 0] if x.shape[-1] else np.ones(x.shape[:-1], a.dtype), a.shape, axes, keepdims)


def _extreme(name: str) -> Any:
    def extreme(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        _check_real(name, a)
        axes, level = _axes(axis, a.ndim), level_of(a)
        value = getattr(np, name)(raw_at(level, a), axis=axes, keepdims=True)
        if level.records:
            return wrapped(level, value, lambda v: level.jump(name))
        at = a == value  # where the extreme is: ties share the slope, as in PyTorch's amax
        found = sum_of(np.where(at, a, 0), axes, keepdims=True) / np.sum(at, axis=axes, dtype=a.dtype, keepdims=True)
        found = Traced(raw(value), found.carried, level) if level.depth == level_of(found).depth else found
        return found if keepdims else np.reshape(found, [n for i, n in enumerate(a.shape) if i not in axes])

    return extreme


max_of, min_of = _extreme("max"), _extreme("min")


def ptp(a: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
    return max_of(a, axis, keepdims=keepdims) - min_of(a, axis, keepdims=keepdims)


def _line(a: Any, axis: Any) -> tuple[Any, int]:
    """Return an array with an axis to go along; without one, or a number, all elements."""
    return (np.reshape(a, -1), 0) if axis is None or not a.ndim else (a, _axes(axis, a.ndim)[0])


def cumsum(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    a, axis = _line(a, axis)
    level = level_of(a)
    value = np.cumsum(raw_at(level, a), axis=axis, dtype=dtype)
    if isinstance(level, Sets):
        return wrapped(level, value, lambda v: cumprod(a, axis).carried)

    def structure() -> Any:
        lines = np.moveaxis(np.arange(a.size).reshape(a.shape), axis, 0).reshape(a.shape[axis], -1)
        Sets.check(a.size * (a.shape[axis] + 1) // 2)
        to, of = np.tril_indices(len(lines))
        return selection(lines[to].ravel(), lines[of].ravel(), (a.size, a.size))

    return wrapped(level, value, lambda v: level.linear(
        a, v.shape, v.dtype, lambda t: np.cumsum(t, axis=axis + 1),
        lambda adjoint: np.flip(np.cumsum(np.flip(adjoint, axis), axis=axis), axis), structure))  # fmt: skip


def cumprod(a: Any, axis: Any = None, dtype: Any = None, out: Any = None) -> Any:
    a, axis = _line(_factors(a, dtype), axis)
    x, step = np.moveaxis(a, axis, 0), 1
    while step < len(x):  # each element times the product of those before it: log n multiplications
        x = np.concatenate([x[:step], x[step:] * x[:-step]])
        step *= 2
    return np.moveaxis(x, 0, axis)


def diff(a: Any, n: int = 1, axis: int = -1, prepend: Any = None, append: Any = None) -> Any:
    a = raw(lift(a))
    if prepend is not None or append is not None:
        one = [1 if k == axis % a.ndim else size for k, size in enumerate(a.shape)]
        prepend, append = (None if end is None else raw(lift(end)) for end in (prepend, append))
        prepend, append = (np.broadcast_to(end, one) if end is not None and end.ndim == 0 else end
                           for end in (prepend, append))  # fmt: skip
        a = np.concatenate([part for part in (prepend, a, append) if part is not None], axis)
    x, step = np.moveaxis(a, axis, 0), np.not_equal if a.dtype == bool else np.subtract
    for _ in range(n):
        x = step(x[1:], x[:-1])
    return np.moveaxis(x, 0, axis)


def ediff1d(ary: Any) -> Any:
    return diff(np.reshape(ary, -1))


def numpy_gradient(f: Any, *spacing: Any, axis: Any = None) -> Any:
    steps = spacing or (1.0,)
    if any(np.ndim(h) for h in steps):
        raise refused("numpy.gradient on uneven points", "Write its differences")
    axes = _axes(axis, f.ndim)
    found = []
    for a, h in zip(axes, steps if len(steps) == len(axes) else steps * len(axes), strict=True):
        x = np.moveaxis(f, a, 0)
        whole = [(x[1:2] - x[:1]) / h, (x[2:] - x[:-2]) / (2 * h), (x[-1:] - x[-2:-1]) / h]
        found.append(np.moveaxis(np.concatenate(whole), 0, a))
    return found[0] if len(found) == 1 else tuple(found)


def trapezoid(y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    y = np.moveaxis(y, axis, -1)
    d = dx if x is None else np.diff(x) if np.ndim(x) == 1 else np.moveaxis(np.diff(x, axis=axis), axis, -1)
    return sum_of(d * (y[..., 1:] + y[..., :-1]) / 2, -1)


def clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None) -> Any:
    low, high = a_min if min is None else min, a_max if max is None else max
    for bound, limit in ((low, np.maximum), (high, np.minimum)):
        a = a if bound is None else limit(a, bound)
    return a


def where(condition: Any, x: Any, y: Any) -> Any:
    sides = [v for v in (condition, x, y) if isinstance(v, Traced)]
    level = level_of(*sides)
    value = np.where(*(raw_at(level, v) for v in (condition, x, y)))
    depends = any(isinstance(v, Traced) and v.level is level for v in (x, y))
    return wrapped(level, value, lambda v: level.select(condition, x, y, v.shape, v.dtype), depends=depends)


def numpy_select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    for condition, choice in zip(condlist[::-1], choicelist[::-1], strict=True):
        default = np.where(condition, choice, default)
    return default


def nothing_like(name: str) -> Any:
    def like(a: Any, *fill: Any, dtype: Any = None, shape: Any = None, **_: Any) -> Any:
        level = level_of(a, *fill)
        made = np.zeros(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)
        x: Any = Traced(made, None, level)
        if isinstance(raw_at(level, a), Traced):  # an array that the level below can write to as well
            x.value = np.zeros_like(a.value, dtype=made.dtype, shape=made.shape)
        x.carried = level.nothing(made.shape, made.dtype)
        if name in ("ones_like", "full_like"):
            x[...] = 1 if name == "ones_like" else fill[0]
        return x

    return like


def sort(a: Any, axis: Any = -1, kind: Any = None) -> Any:
    a, axis = (np.reshape(a, -1), 0) if axis is None else (a, _axes(axis, a.ndim)[0])
    level = level_of(a)
    value = raw_at(level, a)
    if isinstance(level, Sets):  # any element may come to any place
        all_of: Any = np.broadcast_to(sum_of(a, axis, keepdims=True), a.shape)
        return Traced(np.sort(value, axis), all_of.carried, level)
    if isinstance(value, Traced):
        raise refused("A second derivative of numpy.sort", "Pass the gradient to sparse_jacobian")
    if level.records:
        return wrapped(level, value, lambda v: level.jump("sort"))
    return np.take_along_axis(a, np.argsort(value, axis, kind="stable"), axis)


def _index(name: str) -> Any:
    """Follow a function that is constant between jumps: it carries nothing, but still depends on x."""

    def found(a: Any, *args: Any, **kwargs: Any) -> Any:
        level = level_of(a)
        return wrapped(level, getattr(np, name)(raw_at(level, a), *args, **kwargs),
                       lambda v: level.jump(name), depends=False)  # fmt: skip

    return found


def _fft(name: str) -> Any:
    def transform(a: Any, n: Any = None, axis: int = -1, norm: Any = None) -> Any:
        function, axis = getattr(np.fft, name), _axes(axis, a.ndim)[0]
        size = n or (2 * (a.shape[axis] - 1) if name == "irfft" else a.shape[axis])
        a = _resized(a, size // 2 + 1 if name == "irfft" else size, axis)
        level = level_of(a)
        value = function(raw_at(level, a), size, axis, norm)
        if isinstance(level, Sets):
            total = sum_of(a, axis, keepdims=True)
            return wrapped(level, value, lambda v: level.elementwise(v.shape, v.dtype, [(total, lambda: 1)]))

        def pull(adjoint: Any) -> Any:
            """Return the product with the transposed matrix; of the whole transforms, they are symmetric."""
            if name == "rfft":
                return np.fft.fft(_resized(adjoint, size, axis), size, axis, norm)
            if name != "irfft":
                return function(adjoint, size, axis, norm)
            twice = np.full((a.shape[axis], *(1,) * (a.ndim - axis - 1)), 2.0)
            twice[0] = twice[size / 2 == np.arange(len(twice))] = 1
            inverse = {None: "forward", "backward": "forward", "forward": "backward"}.get(norm, norm)
            return np.conjugate(np.fft.rfft(adjoint, size, axis, inverse)) * twice

        return wrapped(level, value, lambda v: level.linear(
            a, v.shape, v.dtype, lambda t: function(t, size, axis + 1, norm), pull, None))  # fmt: skip

    return transform


def _resized(a: Any, size: int, axis: int) -> Any:
    """Return an array with another length: cut, or with zeros behind."""
    if size <= a.shape[axis]:
        return a if size == a.shape[axis] else a[(slice(None),) * axis + (slice(size),)]
    return np.pad(a, [(0, size - n if k == axis else 0) for k, n in enumerate(a.shape)])


def _part(name: str) -> Any:
    def part(val: Any) -> Any:
        if val.dtype.kind != "c":
            return val if name != "imag" else np.zeros(val.shape, val.dtype)
        level = level_of(val)
        function = getattr(np, name)
        value = function(raw_at(level, val))

        def structure() -> Any:
            n = np.arange(val.size)
            return selection(n, n, (val.size, val.size))

        def pull(adjoint: Any) -> Any:
            return np.conjugate(adjoint) if name == "conjugate" else adjoint * (1 if name == "real" else -1j)

        return wrapped(level, value, lambda v: level.linear(val, v.shape, v.dtype, function, pull, structure))

    return part


def absolute(z: Any) -> Any:
    """Return the absolute value of complex numbers, with a slope of 0 at 0, as of real ones."""
    a, b = np.real(z), np.imag(z)
    away = (a != 0) | (b != 0)
    return np.where(away, np.hypot(np.where(away, a, 1), b), 0)


def angle(z: Any, deg: bool = False) -> Any:
    found = np.arctan2(np.imag(z), np.real(z))
    return found * (180 / math.pi) if deg else found


# Contractions.


def einsum(subscripts: Any, *operands: Any, optimize: Any = False) -> Any:
    if not isinstance(subscripts, str):
        raise refused("numpy.einsum with lists of labels", "Pass a string")
    given, arrow, out = subscripts.replace(" ", "").partition("->")
    labels = given.split(",")
    arrays = [raw(lift(x)) for x in operands]
    dots = max((np.ndim(x) - len(names.replace("...", "")) for x, names in zip(arrays, labels, strict=True)
                if "..." in names), default=0)  # fmt: skip
    spare = "".join(c for c in string.ascii_letters if c not in subscripts + "Z")[:dots]
    for k, names in enumerate(labels):
        mine = np.ndim(arrays[k]) - len(names.replace("...", ""))
        labels[k] = names.replace("...", spare[dots - mine :])
    if not arrow:
        letters = "".join(labels)
        out = spare + "".join(sorted(c for c in set(letters) if letters.count(c) == 1 and c not in spare))
    out = out.replace("...", spare)
    sizes: dict[str, int] = {}
    for x, names in zip(arrays, labels, strict=True):
        own = dict(zip(names, np.shape(x), strict=True))
        if [own[c] for c in names] != list(np.shape(x)):
            raise refused(f"numpy.einsum with a repeated label, {names!r}, for axes of an array {np.shape(x)}",
                          "Give a label to axes of one length")  # fmt: skip
        for c, n in own.items():
            sizes[c] = n if sizes.get(c, 1) == 1 else sizes[c]
    for k, names in enumerate(labels):  # axes of 1 that others broadcast
        kept = [c for c, n in zip(names, np.shape(arrays[k]), strict=True) if n == sizes[c] or n != 1]
        if len(kept) < len(names):
            arrays[k], labels[k] = np.reshape(arrays[k], [sizes[c] for c in kept]), "".join(kept)
    while len(arrays) > 1:
        rest = out + "".join(labels[2:])
        first = out if len(arrays) == 2 else "".join(dict.fromkeys(c for c in labels[0] + labels[1] if c in rest))
        arrays[:2], labels[:2] = [contract(arrays[0], labels[0], arrays[1], labels[1], first)], [first]
    x, names = _reduced(arrays[0], labels[0], out)
    return np.transpose(x, [names.index(c) for c in out])


def _reduced(x: Any, names: str, wanted: str) -> tuple[Any, str]:
    """Take diagonals of repeated labels, and sum over labels that are not wanted."""
    for c in dict.fromkeys(names):
        while names.count(c) > 1:
            i, j = names.index(c), names.rindex(c)
            x = np.diagonal(x, axis1=i, axis2=j)
            names = "".join(n for k, n in enumerate(names) if k not in (i, j)) + c
    lonely = tuple(k for k, c in enumerate(names) if c not in wanted)
    return (np.sum(x, axis=lonely) if lonely else x), "".join(c for c in names if c in wanted)


def contract(a: Any, a_names: str, b: Any, b_names: str, out: str) -> Any:
    """Return einsum of two arrays."""
    a, a_names = _reduced(a, a_names, out + b_names)
    b, b_names = _reduced(b, b_names, out + a_names)
    if not (isinstance(a, Traced) or isinstance(b, Traced)):
        return np.einsum(f"{a_names},{b_names}->{out}", a, b)
    level = level_of(a, b)
    sizes: dict[str, int] = {}
    for c, n in (*zip(a_names, np.shape(a), strict=True), *zip(b_names, np.shape(b), strict=True)):
        if sizes.setdefault(c, n) != n:
            raise ValueError(f"operands of shapes {np.shape(a)} and {np.shape(b)} do not fit: {sizes[c]} and {n}")
    if "Z" in out + a_names + b_names:
        raise refused("numpy.einsum with the label Z", "Use another letter")
    value = np.einsum(f"{a_names},{b_names}->{out}", raw_at(level, a), raw_at(level, b), optimize=True)
    operands = [x if isinstance(x, Traced) and x.level is level else raw_at(level, x) for x in (a, b)]
    return wrapped(level, value, lambda v: level.contract(operands, [a_names, b_names], out, v.shape, v.dtype))


def matmul(x1: Any, x2: Any) -> Any:
    a, b = raw(lift(x1)), raw(lift(x2))
    if not (a.ndim and b.ndim):
        raise ValueError("matmul: an operand has no axis")
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    names = "efghlmnopqrstuvw"[: len(lead)]
    sides: list[Any] = []
    for x, two in ((a, "ij" if a.ndim > 1 else "j"), (b, "jk" if b.ndim > 1 else "j")):
        own, x_full = x.shape[:-2], x
        if own and own != lead[len(lead) - len(own) :]:
            own, x_full = lead, np.broadcast_to(x, (*lead, *x.shape[-2:]))
        sides += [x_full, names[len(names) - len(own) :] + two]
    a_side, a_names, b_side, b_names = sides
    return contract(a_side, a_names, b_side, b_names, names + ("i" if a.ndim > 1 else "") + ("k" if b.ndim > 1 else ""))


def dot(a: Any, b: Any) -> Any:
    a, b = raw(lift(a)), raw(lift(b))
    if not (a.ndim and b.ndim):
        return a * b
    return matmul(a, b) if b.ndim < 3 and a.ndim < 3 else tensordot(a, b, ([a.ndim - 1], [b.ndim - 2]))


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    a, b = raw(lift(a)), raw(lift(b))
    if isinstance(axes, (int, np.integer)):
        axes = (range(a.ndim - axes, a.ndim), range(axes))
    left, right = (tuple(x) if isinstance(x, Iterable) else (x,) for x in axes)
    letters = "abcdefghijklmnopqrstuvwxy"
    a_names, b_names = list(letters[: a.ndim]), list(letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(left, right, strict=True):
        b_names[j % b.ndim] = a_names[i % a.ndim]
    shared = {a_names[i % a.ndim] for i in left}
    out = "".join(c for c in (*a_names, *b_names) if c not in shared)
    return contract(a, "".join(a_names), b, "".join(b_names), out)


def inner(a: Any, b: Any) -> Any:
    a, b = raw(lift(a)), raw(lift(b))
    return tensordot(a, b, ([-1], [-1])) if a.ndim and b.ndim else a * b


def outer(a: Any, b: Any, out: Any = None) -> Any:
    return np.reshape(raw(lift(a)), (-1, 1)) * np.reshape(raw(lift(b)), -1)


def vdot(a: Any, b: Any) -> Any:
    _check_real("vdot", a)
    return matmul(np.reshape(a, -1), np.reshape(b, -1))


def kron(a: Any, b: Any) -> Any:
    a, b = raw(lift(a)), raw(lift(b))
    ndim = max(a.ndim, b.ndim)
    (m, n) = ((1,) * (ndim - x.ndim) + x.shape for x in (a, b))
    pairs = np.reshape(a, [k for one in m for k in (one, 1)]) * np.reshape(b, [k for one in n for k in (1, one)])
    return np.reshape(pairs, [i * j for i, j in zip(m, n, strict=True)])


def convolve(a: Any, v: Any, mode: str = "full") -> Any:
    a, v = np.atleast_1d(raw(lift(a)), raw(lift(v)))
    a, v = (v, a) if len(v) > len(a) else (a, v)
    k, n = len(v), len(a)
    padded = np.pad(a, k - 1)
    full = sum((padded[k - 1 - i : k - 1 - i + n + k - 1] * v[i] for i in range(1, k)), padded[k - 1 :] * v[0])
    start, length = {"full": (0, n + k - 1), "same": ((k - 1) // 2, n), "valid": (k - 1, n - k + 1)}[mode]
    return full[start : start + length]


def trace(a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    return sum_of(np.diagonal(a, offset, axis1, axis2), -1)


def norm(x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    vectors = x.ndim == 1 if axis is None else not isinstance(axis, tuple)
    if x.dtype.kind == "c":
        x = np.abs(x)
    if vectors and ord in (math.inf, -math.inf):
        return (max_of if ord > 0 else min_of)(np.abs(x), -1 if axis is None else axis, keepdims=keepdims)
    if vectors and isinstance(ord, (int, float)) and ord not in (0, 2):
        return sum_of(np.abs(x) ** ord, -1 if axis is None else axis, keepdims=keepdims) ** (1 / ord)
    if ord not in (None, 2, "fro") or (ord == 2 and not vectors) or (ord == "fro" and vectors):
        raise refused(f"numpy.linalg.norm with ord={ord!r}", "Write the norm with sums")
    return np.sqrt(sum_of(np.square(x), axis, keepdims=keepdims))


def solve(a: Any, b: Any) -> Any:
    a, b = raw(lift(a)), raw(lift(b))
    if b.ndim == 1:
        return solve(a, b[:, None])[..., 0]
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (x if x.shape[:-2] == lead else np.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    level = level_of(a, b)
    matrix, (n, k) = raw_at(level, a), b.shape[-2:]
    if level.records:
        return wrapped(level, b, lambda v: level.jump("linalg.solve"))
    if matrix is not a:  # x = x0 + A0⁻¹ (b - A x0), with A0 and x0 constant: the right value and the right slope
        start = np.ones(b.shape) if isinstance(level, Sets) else np.linalg.solve(matrix, raw_at(level, b))
        return start + solve(matrix, b - a @ start)  # ones, since no zero of x0 is one for all x

    def push(t: np.ndarray) -> np.ndarray:
        columns = np.linalg.solve(matrix, t)
        with np.errstate(all="ignore"):
            if not finite(columns):
                columns = careful_einsum("p...jk,...ij->p...ik", t, np.linalg.inv(matrix), True)
        return columns

    def structure() -> Any:
        from scipy.sparse import csr_array, eye_array, kron

        blocks = math.prod(lead)
        Sets.check(blocks * n * n * k)
        block = kron(csr_array(np.ones((n, n), bool)), eye_array(k, dtype=bool), format="csr")
        return kron(eye_array(blocks, dtype=bool), block, format="csr")

    value = np.ones(b.shape) if isinstance(level, Sets) else np.linalg.solve(matrix, raw_at(level, b))
    pull = lambda adjoint: np.linalg.solve(np.swapaxes(matrix, -1, -2), adjoint)  # noqa: E731
    return wrapped(level, value, lambda v: level.linear(b, v.shape, v.dtype, push, pull, structure))


def inv(a: Any) -> Any:
    return solve(a, np.eye(a.shape[-1], dtype=a.dtype))


def det(a: Any) -> Any:
    n = a.shape[-1]
    if n > 3:
        sign, log = slogdet(a)
        return sign * np.exp(log)
    if n < 2:
        return a[..., 0, 0] if n else np.ones(a.shape[:-2], a.dtype)
    r, s = a[..., 0, :], a[..., 1, :]
    if n == 2:
        return r[..., 0] * s[..., 1] - r[..., 1] * s[..., 0]
    return sum_of(cross(r, s) * a[..., 2, :], -1)


def slogdet(a: Any) -> Any:
    """Return sign and logarithm; the slope of the latter is the transposed inverse."""
    level = level_of(a)
    matrix = raw_at(level, a)
    if level.records:
        return wrapped(level, a[..., 0, 0], lambda v: level.jump("linalg.slogdet"))
    if isinstance(level, Sets):
        total = sum_of(a, (-2, -1))
        return SLOGDET(np.ones(total.shape), total)
    sign, log = np.linalg.slogdet(matrix)
    slope = np.swapaxes(np.linalg.inv(matrix), -1, -2)
    return SLOGDET(sign, log + sum_of(slope * (a - matrix), (-2, -1)))


SLOGDET: Any = type(np.linalg.slogdet(np.eye(1)))


def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None) -> Any:
    axisa, axisb, axisc = (axisa, axisb, axisc) if axis is None else (axis,) * 3
    a, b = np.moveaxis(raw(lift(a)), axisa, -1), np.moveaxis(raw(lift(b)), axisb, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise refused("numpy.cross of vectors in a plane", "Write x[0] * y[1] - x[1] * y[0]")
    parts = [a[..., i] * b[..., j] - a[..., j] * b[..., i] for i, j in ((1, 2), (2, 0), (0, 1))]
    return np.moveaxis(np.stack(parts, axis=-1), -1, axisc)


def nan_to_num(x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None, neginf: Any = None) -> Any:
    _check_real("nan_to_num", x)
    if not copy:
        raise refused("numpy.nan_to_num with copy=False", "Assign the result")
    ends = np.finfo(x.dtype)
    infinite = np.isinf(x)
    for mask, value in ((np.isnan(x), nan), (infinite & (x > 0), ends.max if posinf is None else posinf),
                        (infinite & (x < 0), ends.min if neginf is None else neginf)):  # fmt: skip
        x = np.where(mask, np.asarray(value, x.dtype), x)
    return x


def polyval(p: Any, x: Any) -> Any:
    p, x = raw(lift(p)), raw(lift(x))
    y = np.zeros_like(x)
    for k in range(len(p)):
        y = y * x + p[k]
    return y


def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    if isinstance(x, Traced):
        raise refused("numpy.bincount of numbers that depend on x", "Its weights may")
    x = np.asarray(x)
    size = max(minlength, int(x.max(initial=-1)) + 1)
    if x.ndim != 1 or x.shape != weights.shape or x.min(initial=0) < 0 or x.dtype.kind not in "iu":
        raise ValueError(f"bincount: {x.dtype} of shape {x.shape}, with weights of shape {weights.shape}")
    return matrix_product(selection(x, np.arange(len(x)), (size, len(x))), weights).astype(float)


def reduceat(ufunc: Any, array: Any, indices: Any, axis: int = 0) -> Any:
    if isinstance(indices, Traced):
        raise refused(f"numpy.{ufunc.__name__}.reduceat with indices that depend on x", "Use constant ones")
    x, starts = np.moveaxis(array, axis, 0), np.asarray(indices)
    ends = np.maximum(np.append(starts[1:], len(x)), starts + 1)
    if starts.ndim != 1 or (len(starts) and not 0 <= starts.min() <= starts.max() < len(x)):
        raise IndexError(f"index out of bounds for {len(x)} elements in reduceat")
    if ufunc is np.add:
        rows = np.repeat(np.arange(len(starts)), ends - starts)
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(ends - starts) - ends, ends - starts)
        sums = matrix_product(selection(rows, columns, (len(starts), len(x))), np.reshape(x, (len(x), -1)))
        found = np.reshape(sums, (len(starts), *x.shape[1:]))
    else:
        found = np.stack([ufunc.reduce(x[a:b]) for a, b in zip(starts.tolist(), ends.tolist(), strict=True)])
    return np.moveaxis(found, 0, axis)


def interp(x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None) -> Any:
    value = raw_at(level_of(x, xp, fp), x)
    if any(isinstance(points, Traced) for points in (value, xp, fp)):
        raise refused("A second derivative of numpy.interp, or its points", "Write the function with numpy.where")

    def slope() -> Any:
        at = np.clip(np.searchsorted(xp, value, side="right") - 1, 0, len(xp) - 2)
        inside = (value >= xp[0]) & (value <= xp[-1])
        return np.where(inside, (np.diff(fp) / np.diff(xp))[at], 0)

    return elementwise(np.interp(value, xp, fp, left, right), [(x, slope)])


def about(name: str) -> Any:
    """Follow what asks for a shape or a dtype alone."""
    return lambda a, *args: getattr(np, name)(np.empty(a.shape, a.dtype), *args)


tracing.FUNCTIONS |= {
    "sum": sum_of, "prod": product_of, "mean": mean, "var": var, "std": std, "ptp": ptp, "max": max_of, "amax": max_of,
    "min": min_of, "amin": min_of, "cumsum": cumsum, "cumprod": cumprod, "diff": diff, "ediff1d": ediff1d,
    "gradient": numpy_gradient, "trapezoid": trapezoid, "clip": clip, "where": where, "sort": sort,
    "einsum": einsum, "dot": dot, "tensordot": tensordot, "inner": inner, "outer": outer, "vdot": vdot,
    "kron": kron, "convolve": convolve, "trace": trace, "interp": interp, "real": _part("real"), "imag": _part("imag"),
    "angle": angle, "cross": cross, "nan_to_num": nan_to_num,
    "polyval": polyval, "bincount": bincount, "linalg.det": det, "linalg.slogdet": slogdet,
    "linalg.norm": norm, "linalg.solve": solve, "linalg.inv": inv, "matmul": matmul,
    **{name: nothing_like(name) for name in ("zeros_like", "empty_like", "ones_like", "full_like")},
    **{name: _index(name) for name in ("argmax", "argmin", "argsort", "all", "any", "round")},
    **{name: about(name) for name in ("shape", "ndim", "size", "iscomplexobj", "isrealobj", "result_type")},
    **{f"fft.{name}": _fft(name) for name in ("fft", "ifft", "rfft", "irfft")},
}  # fmt: skip
tracing.COMPOSED |= {"conjugate": _part("conjugate"), "absolute": absolute, "reduceat": reduceat}
tracing.MOVERS |= {**{name: _moving(name) for name in MOVES}, "select": numpy_select}
