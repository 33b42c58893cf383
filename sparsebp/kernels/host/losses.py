"""Softmax, cross-entropy and losses of elements on the host, with their gradients: in vectors, few passes over memory.

A loss of elements is a function of vectors, ``f(x, t, w, a) -> (loss, slope)``: prediction, target, weight of a
positive target and constant. Compiled code is given it as activations are (`activations`).
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import LOSS_FUNCTIONS, Array
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.math import decay, log1p
from sparsebp.kernels.host.engine.simd import (
    absolute,
    advance,
    copysign,
    device,
    filled,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    load,
    load_n,
    load_wide,
    maximum,
    minimum,
    pointer,
    select_positive,
    store,
    store_n,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, split, team
from sparsebp.kernels.host.pointwise import _total

_EXP_WEIGHT = 8  # an exponential in a vector costs about as much as this many multiply-adds
_LOSS_WEIGHT = 12  # so does a loss of an element
_FLUSH = 1024  # numbers that the lanes of a vector add up before double precision takes over
_WIDTH = 512  # numbers side by side whose softmax is taken together
_BLOCK = 2048  # elements whose losses have one sum, for any number of threads
_PLACES: dict[str, tuple[int, ...]] = {name: (0,) * (place + 1) for place, name in enumerate(LOSS_FUNCTIONS)}


class LossKernels:
    """Host side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def softmax(self, x: Array, log: bool, out: Array) -> None:
        """Rows one by one; along another axis than the last, side by side."""
        if x.shape[2] == 1:
            _softmax_rows(*split(x.size * _EXP_WEIGHT), x, log, out)
        else:
            blocks = -(-x.shape[2] // _WIDTH)
            parts = max(min(parts_for(x.size * _EXP_WEIGHT), len(x) * blocks), 1)
            _softmax_planes(team(parts), parts, x, blocks, log, out)

    def softmax_grad(self, gy: Array, y: Array, log: bool, out: Array) -> None:
        """As `softmax`."""
        if y.shape[2] == 1:
            _grad_rows(*split(y.size * _EXP_WEIGHT), gy, y, log, out)
        else:
            blocks = -(-y.shape[2] // _WIDTH)
            parts = max(min(parts_for(y.size * _EXP_WEIGHT), len(y) * blocks), 1)
            _grad_planes(team(parts), parts, gy, y, blocks, log, out)

    def softmax_cross_entropy(
        self, logits: Array, target: Array, losses: Array, grad: Array, mean: Array | None
    ) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        scale = grad.dtype.type(1 if mean is None else 1 / len(losses))
        _softmax_cross_entropy(*split(logits.size * _EXP_WEIGHT), logits, target, losses, grad, scale)
        if mean is not None:  # of few numbers, half of the time of `mean`, and as exact
            mean[...] = np.add.reduce(losses, dtype=np.float64) / len(losses)

    def element_loss(
        self, prediction: Array, target: Array, weight: Array | None, counts: Array | None, function: str,
        constant: float, divisor: float, losses: Array | None, slopes: Array, value: Array | None,
    ) -> None:  # fmt: skip
        """Every element's loss and slope; blocks of elements have a sum each."""
        sums = np.empty(-(-len(slopes) // _BLOCK))
        number, kept = slopes.dtype.type, losses is not None
        some = [(slopes if array is None else array, array is not None) for array in (weight, counts)]
        how = _PLACES[function], number(constant), number(1 / divisor)
        given = prediction, target, *some[0], *some[1], *how, losses if kept else slopes, kept
        _element_loss(*split(_LOSS_WEIGHT * len(slopes)), *given, slopes, sums)
        if value is not None:
            value[...] = np.add.reduce(sums) / divisor


# The functions below are compiled: their arguments are arrays, vectors, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_APART)
def _largest(row, n, room):
    """Return the largest number of a row; a NaN may be passed over."""
    step, top = lanes(row), row[0]
    whole, best = n // step * step, filled(row, top)
    for i in range(0, whole, step):
        best = maximum(best, load(row, i))
    store(room, 0, best)
    for lane in range(step):
        top = room[lane] if room[lane] > top else top
    for i in range(whole, n):
        top = row[i] if row[i] > top else top
    return top


@numba.njit(**INNER_APART)
def _exponentials(row, top, n, out, room):
    """Write ``exp(row - top)``, and return its sum; top is the largest, and any NaN makes the sum one."""
    step, total = lanes(row), 0.0
    for begin in range(0, n, _FLUSH):
        size = min(n - begin, _FLUSH)
        source, target, whole = advance(row, begin), advance(out, begin), size // step * step
        a = zeros(row)
        for i in range(0, whole, step):
            e = decay(load(source, i) - top)
            store(target, i, e)
            a = a + e
        total += _total(a, room)
        if whole < size:
            store_n(target, whole, decay(load_n(source, whole, size - whole) - top), size - whole)
            for i in range(whole, size):
                total += np.float64(target[i])
    return total


@numba.njit(**INNER_JIT)
def _scale(row, factor, again, n):
    """Multiply a row by two numbers, one after the other."""
    step = lanes(row)
    whole = n // step * step
    for i in range(0, whole, step):
        store(row, i, load(row, i) * factor * again)
    for i in range(whole, n):
        row[i] = row[i] * factor * again


@numba.njit(**INNER_JIT)
def _shift(row, top, logarithm, n, out):
    """Write ``(row - top) - logarithm``."""
    step = lanes(row)
    whole = n // step * step
    for i in range(0, whole, step):
        store(out, i, (load(row, i) - top) - logarithm)
    for i in range(whole, n):
        out[i] = (row[i] - top) - logarithm


@parallel(**JIT)
def _softmax_rows(part, parts, x, log, out):
    low, high = span(part, parts, x.shape[0])
    n, number = x.shape[1], x.dtype.type
    room = np.empty(lanes(pointer(x)), x.dtype)
    for r in range(low, high):
        row, target = advance(pointer(x), r * n), advance(pointer(out), r * n)
        top = _largest(row, n, pointer(room))
        total = _exponentials(row, top, n, target, pointer(room))
        if log:
            _shift(row, top, number(np.log(total)), n, target)
        else:
            _scale(target, number(1.0 / total), number(1), n)
    keep_alive(room)


@parallel(**JIT)
def _grad_rows(part, parts, gy, y, log, out):
    low, high = span(part, parts, y.shape[0])
    n, number = y.shape[1], y.dtype.type
    room, step = np.empty(lanes(pointer(y)), y.dtype), lanes(pointer(y))
    for r in range(low, high):
        left, row, target = advance(pointer(gy), r * n), advance(pointer(y), r * n), advance(pointer(out), r * n)
        total, whole = 0.0, n // step * step
        for begin in range(0, whole, _FLUSH):
            a = zeros(row)
            for i in range(begin, min(begin + _FLUSH, whole), step):
                a = a + load(left, i) if log else fma(load(left, i), load(row, i), a)
            total += _total(a, pointer(room))
        for i in range(whole, n):
            total += np.float64(left[i] if log else left[i] * row[i])
        s = number(total)
        for i in range(0, whole, step):
            g, v = load(left, i), load(row, i)
            store(target, i, g - decay(v) * s if log else v * (g - s))
        if whole < n:
            g, v = load_n(left, whole, n - whole), load_n(row, whole, n - whole)
            store_n(target, whole, g - decay(v) * s if log else v * (g - s), n - whole)
    keep_alive(room)


# Along another axis than the last: a block of `_WIDTH` numbers side by side has its maxima and sums in scratch.


@parallel(**JIT)
def _softmax_planes(part, parts, x, blocks, log, out):
    outer, n, size = x.shape
    low, high = span(part, parts, outer * blocks)
    tops, sums = np.empty(_WIDTH, x.dtype), np.empty(_WIDTH, x.dtype)
    top, total, step = pointer(tops), pointer(sums), lanes(pointer(x))
    for unit in range(low, high):
        begin = unit % blocks * _WIDTH
        at, width = unit // blocks * n * size + begin, min(size - begin, _WIDTH)
        source, target, whole = advance(pointer(x), at), advance(pointer(out), at), width // step * step
        for i in range(width):
            top[i], total[i] = source[i], 0
        for c in range(1, n):
            row = advance(source, c * size)
            for i in range(0, whole, step):
                store(top, i, maximum(load(row, i), load(top, i)))
            for i in range(whole, width):
                top[i] = row[i] if row[i] > top[i] else top[i]
        for c in range(n):
            row, place = advance(source, c * size), advance(target, c * size)
            for i in range(0, whole, step):
                e = decay(load(row, i) - load(top, i))
                store(place, i, e)
                store(total, i, load(total, i) + e)
            if whole < width:
                rest = width - whole
                e = decay(load_n(row, whole, rest) - load_n(top, whole, rest))
                store_n(place, whole, e, rest)
                store_n(total, whole, load_n(total, whole, rest) + e, rest)
        for i in range(width):
            total[i] = np.log(total[i]) if log else x.dtype.type(1) / total[i]
        for c in range(n):
            row, place = advance(source, c * size), advance(target, c * size)
            for i in range(0, whole, step):
                if log:
                    store(place, i, (load(row, i) - load(top, i)) - load(total, i))
                else:
                    store(place, i, load(place, i) * load(total, i))
            for i in range(whole, width):
                place[i] = (row[i] - top[i]) - total[i] if log else place[i] * total[i]
    keep_alive(tops)
    keep_alive(sums)


@parallel(**JIT)
def _grad_planes(part, parts, gy, y, blocks, log, out):
    outer, n, size = y.shape
    low, high = span(part, parts, outer * blocks)
    sums, step = np.empty(_WIDTH, y.dtype), lanes(pointer(y))
    total = pointer(sums)
    for unit in range(low, high):
        begin = unit % blocks * _WIDTH
        at, width = unit // blocks * n * size + begin, min(size - begin, _WIDTH)
        whole, rest = width // step * step, width % step
        for i in range(width):
            total[i] = 0
        for c in range(n):
            left, row = advance(pointer(gy), at + c * size), advance(pointer(y), at + c * size)
            for i in range(0, whole, step):
                a, g = load(total, i), load(left, i)
                store(total, i, a + g if log else fma(g, load(row, i), a))
            for i in range(whole, width):
                total[i] += left[i] if log else left[i] * row[i]
        for c in range(n):
            left, row = advance(pointer(gy), at + c * size), advance(pointer(y), at + c * size)
            target = advance(pointer(out), at + c * size)
            for i in range(0, whole, step):
                g, v, s = load(left, i), load(row, i), load(total, i)
                store(target, i, g - decay(v) * s if log else v * (g - s))
            if rest:
                g, v, s = load_n(left, whole, rest), load_n(row, whole, rest), load_n(total, whole, rest)
                store_n(target, whole, g - decay(v) * s if log else v * (g - s), rest)
    keep_alive(sums)


@parallel(**JIT)
def _softmax_cross_entropy(part, parts, logits, target, losses, grad, scale):
    low, high = span(part, parts, len(logits))
    classes, number = logits.shape[1], logits.dtype.type
    labels, loss = pointer(target), pointer(losses)
    room = np.empty(lanes(pointer(logits)), logits.dtype)
    for r in range(low, high):
        row, slope = advance(pointer(logits), r * classes), advance(pointer(grad), r * classes)
        label = labels[r]
        if label < 0 or label >= classes:
            for c in range(classes):
                slope[c] = np.nan
            loss[r] = np.nan
            continue
        top = _largest(row, classes, pointer(room))
        total = _exponentials(row, top, classes, slope, pointer(room))
        loss[r] = number(np.log(total)) - (row[label] - top)
        factor = number(1.0 / total)
        own = (slope[label] * factor - number(1)) * scale
        _scale(slope, factor, scale, classes)
        slope[label] = own
    keep_alive(room)


# Losses of elements.


@device
def _squared(x, t, w, a):
    d = x - t
    return d * d, d + d


@device
def _sign(d):
    """Return 1 or -1 with the sign of d, and d itself if it is 0 or NaN."""
    return copysign(select_positive(absolute(d), 1.0, d), d)


@device
def _distance(x, t, w, a):
    d = x - t
    return absolute(d), _sign(d)


@device
def _smooth_l1(x, t, w, beta):
    d = x - t
    size = absolute(d)
    near = beta - size
    return (
        select_positive(near, 0.5 * size * size / beta, size - 0.5 * beta),
        select_positive(near, d / beta, _sign(d)),
    )


@device
def _huber(x, t, w, delta):
    d = x - t
    size = absolute(d)
    losses = select_positive(delta - size, 0.5 * size * size, delta * (size - 0.5 * delta))
    return losses, minimum(delta, maximum(-delta, d))


@device
def _bce_with_logits(x, t, w, a):
    z, rest = decay(x), 1.0 - t
    softplus = maximum(0.0, -1.0 * x) + log1p(z)  # -log σ(x)
    sigmoid = select_positive(x, z, 1.0) / (1.0 + z)  # σ(-x)
    return fma(rest, x, softplus * w), rest - sigmoid * w


@intrinsic
def _of_function(typingctx, function, squared, distance, smooth_l1, huber, bce_with_logits):
    """Return one of the compiled functions: the number of zeros in `function` says which, from 1 on."""
    functions = squared, distance, smooth_l1, huber, bce_with_logits
    chosen = functions[len(function) - 1]
    return chosen(function, *functions), lambda context, builder, sig, args: context.get_dummy_value()


@numba.njit(**INNER_APART)
def _sum_wide(values, n, room):
    """Return the sum of numbers in double precision."""
    step = lanes(room)
    whole = n // (4 * step) * 4 * step
    a = b = c = d = zeros(room)
    for i in range(0, whole, 4 * step):
        a, b = a + load_wide(values, i), b + load_wide(values, i + step)
        c, d = c + load_wide(values, i + 2 * step), d + load_wide(values, i + 3 * step)
    total = _total((a + b) + (c + d), room)
    for i in range(whole, n):
        total += np.float64(values[i])
    return total


@parallel(**JIT)
def _element_loss(
    part, parts, prediction, target, weight, weighted, counts, counted, function, constant, factor, losses, kept,
    slopes, sums,
):  # fmt: skip
    f = _of_function(function, _squared, _distance, _smooth_l1, _huber, _bce_with_logits)
    low, high = span(part, parts, len(sums))
    block, room = np.empty(_BLOCK, slopes.dtype), np.empty(lanes(pointer(sums)))
    one, step = filled(pointer(block), 1.0), lanes(pointer(block))
    for b in range(low, high):
        begin = b * _BLOCK
        n = min(len(slopes) - begin, _BLOCK)
        x, t = advance(pointer(prediction), begin), advance(pointer(target), begin)
        u, w = advance(pointer(weight), begin), advance(pointer(counts), begin)
        out, slope = advance(pointer(losses), begin) if kept else pointer(block), advance(pointer(slopes), begin)
        whole = n // step * step
        for i in range(0, whole, step):
            value, at = f(load(x, i), load(t, i), load(w, i) if counted else one, constant)
            if weighted:
                value, at = value * load(u, i), at * load(u, i)
            store(out, i, value)
            store(slope, i, at * factor)
        if whole < n:
            rest = n - whole
            value, at = f(load_n(x, whole, rest), load_n(t, whole, rest), load_n(w, whole, rest) if counted else one,
                          constant)  # fmt: skip
            if weighted:
                value, at = value * load_n(u, whole, rest), at * load_n(u, whole, rest)
            store_n(out, whole, value, rest)
            store_n(slope, whole, at * factor, rest)
        sums[b] = _sum_wide(out, n, pointer(room))
    keep_alive(block)
    keep_alive(room)
