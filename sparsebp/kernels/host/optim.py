"""Optimizer updates on the host: the rules, number by number, and one call for lists of arrays.

Every rule rounds as torch.optim's tensor operations do, one after the other, so that float32 results stay together
over many steps: where those fuse a multiplication and an addition, `fma` stands here, and nowhere else. `at` holds the
addresses of parameter, gradient and buffers, `o` the options, as in `sparsebp.kernels.spec`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types

from sparsebp.core import backend
from sparsebp.core.check import Array, UpdateRule
from sparsebp.core.errors import DeviceError
from sparsebp.kernels.checks import OPTIONAL_BUFFERS, UPDATE_BUFFERS
from sparsebp.kernels.host.engine import shipped
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, lower_bound, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    absolute,
    address,
    advance,
    device,
    filled,
    fma,
    intrinsic,
    lanes,
    load_up_to,
    maximum,
    minimum,
    pointer,
    square_root,
    store_up_to,
    word_at,
)
from sparsebp.kernels.host.engine.threads import ALONE, in_parts, parallel, team
from sparsebp.kernels.operands import momenta

# Compiled functions have no annotations: their arguments are pointers and numbers.
# mypy: disable-error-code="no-untyped-def"

_momenta = numba.njit(**INNER_JIT)(momenta)


@device
def _gradient(p, g, i, left, decay, maximize):
    """Return the gradient that the rule sees: negated to go uphill, with the decay added."""
    grad = load_up_to(g, i, left)
    if maximize != 0.0:
        grad = grad * -1.0
    if decay != 0.0:  # 0 * infinity would turn an infinite parameter into NaN
        grad = fma(load_up_to(p, i, left), decay, grad)
    return grad


@device
def _lerp(old, new, weight, like):
    """Go from `old` towards `new`, from the nearer end, as torch.lerp."""
    if abs(weight) < 0.5:
        return fma(new - old, weight, old)
    return fma(new - old, filled(like, weight) - 1.0, new)


@device
def _mean_square(old, grad, keep):
    return fma(grad * (1.0 - keep), grad, old * keep)


def _sgd(like, at, o, step, low, high):
    p, g, v = address(at[0], like), address(at[1], like), address(at[2], like)
    lr, momentum, fresh, decay, nesterov, maximize = -o[0], o[1], 1.0 - o[2], o[3], o[4], o[5]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        if at[2] != 0:
            # the first buffer is the gradient itself, undampened
            buffer = grad if step == 1 else fma(grad, fresh, load_up_to(v, i, left) * momentum)
            store_up_to(v, i, buffer, left)
            grad = fma(buffer, momentum, grad) if nesterov != 0.0 else buffer
        store_up_to(p, i, fma(grad, lr, load_up_to(p, i, left)), left)


def _adam(like, at, o, step, low, high):
    p, g, m, v, top = (
        address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like), address(at[4], like),
    )  # fmt: skip
    lr, beta1, beta2, eps, decay, decoupled, maximize = o[0], o[1], o[2], o[3], o[4], o[5], o[6]
    step_size = -(lr / (1.0 - beta1 ** np.float64(step)))
    root = np.sqrt(1.0 - beta2 ** np.float64(step))
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        if at[4] != 0:
            square = maximum(load_up_to(top, i, left), square)
            store_up_to(top, i, square, left)
        store_up_to(p, i, param + mean * step_size / (square_root(square) / root + eps), left)


def _nadam(like, at, o, step, low, high):
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, decoupled, maximize, momentum_decay = o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]
    count = np.float64(step)
    now, then, product = _momenta(beta1, momentum_decay, count)
    of_grad, of_mean = -lr * (1.0 - now) / (1.0 - product), -lr * then / (1.0 - product * then)
    correction = 1.0 - beta2**count
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        root = square_root(square / correction) + eps
        store_up_to(p, i, param + grad * of_grad / root + mean * of_mean / root, left)


def _radam(like, at, o, step, low, high):
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, decoupled, maximize = o[0], o[1], o[2], o[3], o[4], o[5], o[6]
    count = np.float64(step)
    correction1, correction2 = 1.0 - beta1**count, 1.0 - beta2**count
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * count * beta2**count / correction2
    rectified, rectifier = length > 5.0, 1.0  # else the variance is not known well enough
    if rectified:
        rectifier = ((length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)) ** 0.5
    scale = correction2**0.5
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        change = mean / correction1 * lr
        if rectified:
            change = change * (scale / (square_root(square) + eps)) * rectifier
        store_up_to(p, i, param - change, left)


def _adamax(like, at, o, step, low, high):
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, maximize = o[0], o[1], o[2], o[3], o[4], o[5]
    step_size = -(lr / (1.0 - beta1 ** np.float64(step)))
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        largest = maximum(load_up_to(v, i, left) * beta2, absolute(grad) + eps)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, largest, left)
        store_up_to(p, i, load_up_to(p, i, left) + mean * step_size / largest, left)


def _adagrad(like, at, o, step, low, high):
    p, g, s = address(at[0], like), address(at[1], like), address(at[2], like)
    lr, eps, decay, maximize = -(o[0] / (1.0 + (step - 1) * o[1])), o[2], o[3], o[4]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        total = fma(grad, grad, load_up_to(s, i, left))
        store_up_to(s, i, total, left)
        store_up_to(p, i, load_up_to(p, i, left) + grad * lr / (square_root(total) + eps), left)


def _adadelta(like, at, o, _, low, high):
    p, g, s, d = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, rho, eps, decay, maximize = -o[0], o[1], o[2], o[3], o[4]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        square, moved = _mean_square(load_up_to(s, i, left), grad, rho), load_up_to(d, i, left)
        delta = square_root(moved + eps) / square_root(square + eps) * grad
        store_up_to(s, i, square, left)
        store_up_to(d, i, _mean_square(moved, delta, rho), left)
        store_up_to(p, i, fma(delta, lr, load_up_to(p, i, left)), left)


def _rmsprop(like, at, o, _, low, high):
    p, g, s, b, a = (
        address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like), address(at[4], like),
    )  # fmt: skip
    lr, alpha, eps, decay, momentum, maximize = -o[0], o[1], o[2], o[3], o[4], o[5]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        square = _mean_square(load_up_to(s, i, left), grad, alpha)
        store_up_to(s, i, square, left)
        if at[4] != 0:  # centered: the variance
            mean = _lerp(load_up_to(a, i, left), grad, 1.0 - alpha, a)
            store_up_to(a, i, mean, left)
            square = fma(mean * -1.0, mean, square)
        root, param = square_root(square) + eps, load_up_to(p, i, left)
        if at[3] != 0:
            buffer = load_up_to(b, i, left) * momentum + grad / root
            store_up_to(b, i, buffer, left)
            store_up_to(p, i, fma(buffer, lr, param), left)
        else:
            store_up_to(p, i, param + grad * lr / root, left)


def _scale(like, at, o, _, low, high):
    p = address(at[0], like)
    for i in range(low, high, lanes(p)):
        store_up_to(p, i, load_up_to(p, i, high - i) * o[0], high - i)


def _clamp(like, at, o, _, low, high):
    p = address(at[0], like)
    for i in range(low, high, lanes(p)):
        store_up_to(p, i, maximum(-o[0], minimum(o[0], load_up_to(p, i, high - i))), high - i)


RULES: dict[str, Any] = {
    "sgd": _sgd,
    "adam": _adam,
    "nadam": _nadam,
    "radam": _radam,
    "adamax": _adamax,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "scale": _scale,
    "clamp": _clamp,
}


# Lists of arrays inside compiled code: one call for all parameters of a network, without a Python step for each.
#
# Numba has no cheap list of arrays, and asking NumPy for an address takes a microsecond. So compiled code is told where
# the list *objects* are (`id`), and reads the items from CPython's structure of a list (``PyListObject``), their type,
# dtype, shape, flags and address from NumPy's of an array (``PyArrayObject_fields``, part of its binary interface).
# Lists that do not hold plain arrays that fit are looked at once more in Python, which finds the words for the error.
#
# Work is split over the concatenation of all arrays, so that large and small ones share the threads evenly.

GRAIN = 64
"""Numbers: where an array is cut, it is cut at a multiple of it."""

_HEAD = object.__basicsize__
_ITEMS = _HEAD + 8
"""Where a list keeps the pointer to its items, in bytes from its beginning, behind their number."""
_TYPE, _DATA, _NDIM, _SHAPE, _DTYPE, _FLAGS = _HEAD - 8, _HEAD, _HEAD + 8, _HEAD + 16, _HEAD + 40, _HEAD + 48
"""Where an array keeps things, in bytes from its beginning; the type is the last field of every object's head."""
_READ, _WRITE = 0x101, 0x501
"""Flags that an array must have: C-contiguous, aligned, and writeable."""
_OPTIONAL = 1 << 40
"""Not one of an array's flags: None may stand here."""


def lists_of(columns: Sequence[Sequence[Any]], check: Callable[[], Any]) -> tuple[list[list[Any]], bool]:
    """Return sequences of arrays as lists, and whether they have been checked and need no look by compiled code.

    Parameters
    ----------
    columns
        Sequences of equal length, at least 1. Arrays at the same place have the same shape, and all have one dtype.
    check
        Called if anything looks wrong: raises the error, or returns because all is well (subclasses of arrays, say).

    Raises
    ------
    DeviceError
        The arrays live on a device.
    """
    first = columns[0][0]
    trusted = type(first) is not np.ndarray or first.dtype.char not in "fd" or len(set(map(len, columns))) > 1
    if trusted:
        check()
        if not backend.is_host(backend.namespace(first)):  # all are of one namespace
            raise DeviceError("An array belongs to another namespace than these kernels", expected="numpy.ndarray",
                              got=type(first).__name__, remedy="Take the kernels with kernels.get(xp)")  # fmt: skip
    return [column if type(column) is list else list(column) for column in columns], trusted


@cache
def _wanted(dtype: str, access: str) -> np.ndarray:
    """Return the addresses of the type, the dtype and None, then the flags that each column needs.

    `access` has a letter for each column: ``r``, its arrays are read; ``w``, they are written; ``o``, they are written,
    and None may stand in their place.
    """
    flags = {"r": _READ, "w": _WRITE, "o": _WRITE | _OPTIONAL}
    return np.array([id(np.ndarray), id(np.dtype(dtype)), id(None), *(flags[letter] for letter in access)], np.int64)


@device
def _entry(items, i):
    """Return where the object at a place of a list is."""
    return word_at(word_at(items + _ITEMS) + 8 * i)


@numba.njit(**JIT)
def _read(lists, wanted, trusted, addresses, begins, rows):
    """Write the addresses of a list of lists of arrays.

    addresses (n, columns) has 0 for None; begins (n + 1,) says where each array begins in the concatenation of its
    column, rows (n,) the lengths of first axes, 1 for arrays without axes. False, with tables half written, at the
    first entry that is not as wanted, unless `trusted`.
    """
    n, columns = addresses.shape
    array_type, dtype, none = wanted[0], wanted[1], wanted[2]
    begins[0] = 0
    for i in range(n):
        first, ndim, size = _entry(_entry(lists, 0), i), np.int64(0), np.int64(1)
        for column in range(columns):
            entry = _entry(_entry(lists, column), i)
            flags = wanted[3 + column]
            if entry == none and flags >= _OPTIONAL:
                addresses[i, column] = 0
                continue
            if not trusted:  # nothing behind the head may be read before the type is known
                if word_at(entry + _TYPE) != array_type or word_at(entry + _DTYPE) != dtype:
                    return False
                flags &= _WRITE
                if word_at(entry + _FLAGS) & flags != flags:
                    return False
                if (word_at(entry + _NDIM) ^ word_at(first + _NDIM)) & 0xFFFF != 0:
                    return False
            if column == 0:
                ndim = word_at(first + _NDIM) & 0xFFFF
                for axis in range(ndim):
                    size *= word_at(word_at(first + _SHAPE) + 8 * axis)
                rows[i] = word_at(word_at(first + _SHAPE)) if ndim > 0 else 1
            elif not trusted:
                for axis in range(ndim):
                    if word_at(word_at(entry + _SHAPE) + 8 * axis) != word_at(word_at(first + _SHAPE) + 8 * axis):
                        return False
            addresses[i, column] = word_at(entry + _DATA)
        begins[i + 1] = begins[i] + size
    return True


@numba.njit(**INNER_JIT)
def entry_at(begins, position):
    """Return the array in which `position` of the concatenation lies."""
    return lower_bound(begins, 1, len(begins) - 1, position + 1) - 1


# Optimizer updates on the host: one pass over memory for all parameters together.
#
# The work of a number is the same wherever it falls, so results depend neither on the number of threads nor on which
# parameters are updated in one call. The rules are above.

_ACCESS = {
    rule: "wr" + "".join("o" if name in OPTIONAL_BUFFERS else "w" for name in names)
    for rule, names in UPDATE_BUFFERS.items()
}
_WORTH_THREADS = 1 << 20  # moved numbers: some 60 µs
_ALIGN_FROM = 4096  # numbers, smaller arrays are not aligned
Check = Callable[[], None]
CHUNK = 1 << 14  # numbers that one partial sum of squares covers at most, see `chunk_rows`


class OptimizerKernels:
    """Optimizers' part of `sparsebp.kernels.spec.Kernels` on the host; shapes and dtypes are stated there."""

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: np.ndarray,
        steps: np.ndarray,
        check: Check,
    ) -> None:
        """Update all parameters in place."""
        _run(rule, (params, grads, *buffers), _ACCESS[rule], options, steps, check)

    def scale_arrays(self, arrays: Sequence[Array], factor: float, check: Check) -> None:
        """Multiply all arrays by one number, in place."""
        _run_on_all("scale", arrays, factor, check)

    def clip_arrays(self, arrays: Sequence[Array], squares: Array, max_norm: float, check: Check) -> None:
        """Multiply all arrays by a factor below 1, if the norm asks for it."""
        norm = math.sqrt(squares.sum())
        factor = max_norm / (norm + 1e-6)
        self.scale_arrays(arrays, factor if math.isfinite(norm) and factor < 1 else 1.0, check)

    def clamp_arrays(self, arrays: Sequence[Array], limit: float, check: Check) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays."""
        _run_on_all("clamp", arrays, limit, check)

    def square_sums(self, arrays: Sequence[Array], out: Array, check: Check) -> None:
        """Sum of the squares of each array, in float64: of its chunks, then of those in order."""
        if not arrays:
            return
        n, (lists, trusted) = len(arrays), lists_of((arrays,), check)
        tables = addresses, begins, rows = np.empty((n, 1), np.int64), np.empty(n + 1, np.int64), np.empty(n, np.int64)
        wanted = _wanted(arrays[0].dtype.char, "r")
        if not _read(id(lists), wanted, trusted, *tables):
            check()
            _read(id(lists), wanted, True, *tables)
        lengths, chunks = np.empty(n, np.int64), np.empty(n + 1, np.int64)
        _cut_chunks(begins, rows, lengths, chunks)
        sums, like = np.empty(int(chunks[-1])), arrays[0].dtype.type(1)
        work = int(begins[-1])
        parts = 1 if work < _WORTH_THREADS else parts_for(work)
        _chunk_sums(team(parts), parts, addresses, begins, like, lengths, chunks, sums)
        add_chunks(chunks, sums, out)

    def join_arrays(self, arrays: Sequence[Array], out: Array) -> None:
        """Copy all arrays to one."""
        if arrays:
            np.concatenate([array.reshape(-1) for array in arrays], out=out)


def _run(
    rule: str, columns: Sequence[Sequence[Any]], access: str, options: np.ndarray,
    steps: np.ndarray, check: Check,
) -> None:  # fmt: skip
    if not columns[0]:
        check()
        return
    (lists, trusted), dtype = lists_of(columns, check), columns[0][0].dtype
    args = rule_address(rule, dtype), dtype.type(1), id(lists), _wanted(dtype.char, access), options, steps
    work = _update(ALONE, 0, trusted, *args)
    if work < 0:
        check()
        work = _update(ALONE, 0, True, *args)
    if work > 0:
        parts = parts_for(work)
        _update(team(parts), parts, True, *args)


def _run_on_all(rule: str, arrays: Sequence[Array], value: float, check: Check) -> None:
    options, steps = np.full((len(arrays), 1), value), np.zeros(len(arrays), np.int64)
    _run(rule, (arrays,), "w", options, steps, check)


@numba.njit(**INNER_JIT)
def update_range(rule, like, addresses, begins, options, steps, low, high):
    """Apply the rule at an address to the numbers from `low` to `high` of the concatenation."""
    if low == high:
        return
    for i in range(entry_at(begins, low), len(begins) - 1):
        if begins[i] >= high:
            return
        size = begins[i + 1] - begins[i]
        # both neighbours of a cut round it down alike
        first = max(low - begins[i], 0) // GRAIN * GRAIN
        last = size if high >= begins[i + 1] else (high - begins[i]) // GRAIN * GRAIN
        at, middle = advance(pointer(addresses), i * addresses.shape[1]), first
        o = advance(pointer(options), i * options.shape[1])
        if last - first >= _ALIGN_FROM:
            # a vector that straddles two cache lines costs two accesses: go on from a line's beginning
            width = lanes(address(at[0], like))
            middle += -at[0] % VECTOR_BYTES * width // VECTOR_BYTES
        if middle > first:
            _apply(rule, like, at, o, steps[i], first, middle)
        _apply(rule, like, at, o, steps[i], middle, last)


@intrinsic
def _apply(typingctx: Any, rule: Any, like: Any, at: Any, o: Any, step: Any, first: Any, last: Any) -> Any:
    """Call the rule at an address for the numbers from `first` to `last` of one array."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [arg.type for arg in args[1:]])
        builder.call(builder.inttoptr(args[0], function.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, *_rule_types(like)), codegen


def _rule_types(like: Any) -> tuple[Any, ...]:
    """Return the types of a rule's arguments."""
    word = types.int64
    return like, types.CPointer(word), types.CPointer(types.float64), word, word, word


@cache
def rule_address(rule: str, dtype: np.dtype) -> int:
    """Return where a rule's code is: compiled alone, as hardly a program uses more than one or two."""
    kept = shipped.cfunc(types.void(*_rule_types(numba.from_dtype(dtype))), RULES[rule], **JIT)
    _compiled.append(kept)
    return int(kept.address or 0)


_compiled: list[Any] = []


@numba.njit(**JIT)
def _update(team, parts, trusted, rule, like, lists, wanted, options, steps):
    """Update all parameters in so many parts; with 0 in one, unless the work is worth waking other threads.

    Return 0, or without an update the numbers that would move, if they are worth it, or -1 if `_read` says False.
    """
    n, columns = len(options), len(wanted) - 3
    addresses, begins = np.empty((n, columns), np.int64), np.empty(n + 1, np.int64)
    if not _read(lists, wanted, trusted, addresses, begins, np.empty(n, np.int64)):
        return -1
    work = begins[n] * columns
    if parts == 0 and work >= _WORTH_THREADS:
        return work
    in_parts(_update_part, team, max(parts, 1), (max(parts, 1), rule, like, addresses, begins, options, steps))
    return 0


@numba.njit(**INNER_JIT)
def _update_part(part, parts, rule, like, addresses, begins, options, steps):
    low, high = span(part, parts, begins[-1])
    update_range(rule, like, addresses, begins, options, steps, low, high)


# ---- sums of squares: a partial sum for each chunk of an array, added in order ---------------------------------------


@numba.njit(fastmath={"reassoc", "contract"}, **INNER_JIT)
def square_sum(values):
    """Return the sum of the squares of a chunk."""
    total = 0.0
    for i in range(len(values)):
        value = np.float64(values[i])
        total += value * value
    return total


@numba.njit(**INNER_JIT)
def chunk_rows(width):
    """Return how many rows of `width` numbers a chunk holds; 0: a row is longer than a chunk."""
    return CHUNK // max(width, 1)


@numba.njit(**JIT)
def _cut_chunks(begins, rows, lengths, chunks):
    """Write the length of each array's chunks, whole rows where they fit, and at which number its chunks begin."""
    chunks[0] = 0
    for i in range(len(rows)):
        size = begins[i + 1] - begins[i]
        width = size // max(rows[i], 1)
        lengths[i] = chunk_rows(width) * width
        if lengths[i] == 0:
            lengths[i] = CHUNK
        chunks[i + 1] = chunks[i] - (-size // lengths[i])


@parallel(**JIT)
def _chunk_sums(part, parts, addresses, begins, like, lengths, chunks, sums):
    """Work on some chunks; array i has those from ``chunks[i]`` on."""
    low, high = span(part, parts, len(sums))
    for chunk in range(low, high):
        i = entry_at(chunks, chunk)
        size, first = begins[i + 1] - begins[i], (chunk - chunks[i]) * lengths[i]
        values = numba.carray(address(addresses[i, 0], like), size)
        sums[chunk] = square_sum(values[first : min(first + lengths[i], size)])


@numba.njit(**JIT)
def add_chunks(chunks, sums, out):
    """Add the sums of each array's chunks, in order."""
    for i in range(len(out)):
        total = 0.0
        for chunk in range(chunks[i], chunks[i + 1]):
            total += sums[chunk]
        out[i] = total
