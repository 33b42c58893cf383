"""Linear recurrences on the host: ``h[t] = a[t] * h[t-1] + b[t]`` element by element, and their gradients.

Bound by memory, so each direction is one pass. Time is the outer loop, so that rows are read in the order in which they
lie in memory, a tile of samples and units at a time: the row before is then still in a core's cache. A complex number
is a pair of reals.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    advance,
    broadcast,
    clear,
    device,
    evens,
    fma,
    high_in_turn,
    lanes,
    load,
    load_up_to,
    low_in_turn,
    odds,
    pointer,
    store,
    store_up_to,
)
from sparsebp.kernels.host.engine.threads import parallel, team

NARROWEST, WIDEST = 256, 8192
"""Numbers of a row in one tile: whole segments of memory at least, and at most what stays in the first two caches."""
PIECE = 64
"""Steps whose gradients at a constant factor are added up before they join the sum, so that little is lost of it."""


class LinearRecurrenceKernels:
    """Host side of linear recurrences in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, h: Array
    ) -> None:
        """One pass over a and b."""
        steps, batch, width = h.shape
        if lengths is None and _is_one_row(a, batch, width, pairs):
            a, b, h0, h = (_as_one_row(array) for array in (a, b, h0, h))
        lengths = np.full(h.shape[1], steps, np.int64) if lengths is None else lengths
        parts, *tile = _tiles(h, 3 * h.size)
        _forward(team(parts), parts, a, b, h0, lengths, pairs, reverse, *tile, h)

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, ga: Array,
        gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """One pass back over a, h and gh."""
        steps, batch, width = h.shape
        if lengths is None and _is_one_row(a, batch, width, pairs):
            a, h, gh, h0, ga, gb, gh0 = (_as_one_row(array) for array in (a, h, gh, h0, ga, gb, gh0))
        lengths = np.full(h.shape[1], steps, np.int64) if lengths is None else lengths
        parts, *tile = _tiles(h, 5 * h.size)
        pieces = np.zeros((1, *h0.shape) if len(ga) < steps else (0, 0, 0), h.dtype)
        _backward(team(parts), parts, a, h, gh, h0, lengths, pairs, reverse, *tile, pieces, ga, gb, gh0)


def _is_one_row(a: Array, batch: int, width: int, pairs: bool) -> bool:
    """Whether the samples of a step can be taken as one: each has its factors, or all have one."""
    return a.shape[1:] in ((batch, width), (1, 1 + pairs))


def _as_one_row(array: Array) -> Array:
    """Return (T, B, W) as (T, 1, B·W), and (B, W) as (1, B·W)."""
    return array.reshape(*array.shape[:-2], 1, array.shape[-2] * array.shape[-1])


def _tiles(h: Array, work: int) -> tuple[int, int, int]:
    """Return the number of parts, and how many samples, and numbers of a sample's row, a tile has."""
    _, batch, width = h.shape
    parts = parts_for(work)
    numbers = max(NARROWEST, min(WIDEST, batch * width // parts))
    if width > numbers:
        samples, block = 1, numbers // NARROWEST * NARROWEST
    else:
        samples, block = numbers // max(width, 1), max(width, 1)
    return min(parts, max(-(-batch // samples) * -(-width // block), 1)), samples, block


# The functions below are compiled: their arguments are arrays, pointers, flags and bounds.
# mypy: disable-error-code="no-untyped-def"
#
# A flag that is a constant where a function is called costs nothing: LLVM inlines the function and drops the branch.


@parallel(**JIT)
def _forward(part, parts, a, b, h0, lengths, pairs, reverse, samples, block, h):
    steps, batch, width = h.shape
    of_step, of_sample, shared = _strides(a, width)
    blocks = -(-width // block)
    begin, end = span(part, parts, -(-batch // samples) * blocks)
    for tile in range(begin, end):
        first, unit = tile // blocks * samples, tile % blocks * block
        count = min(block, width - unit)
        for i in range(steps):
            t = steps - 1 - i if reverse else i
            for s in range(first, min(first + samples, batch)):
                at = (t * batch + s) * width + unit
                now = advance(pointer(h), at)
                if t >= lengths[s]:
                    clear(now, count)
                    continue
                before = _before(pointer(h0), pointer(h), t, s, at, unit, lengths, reverse, batch, width)
                factor = advance(pointer(a), t * of_step + s * of_sample + (0 if shared else unit))
                _step(factor, shared, pairs, advance(pointer(b), at), before, now, count)


@parallel(**JIT)
def _backward(part, parts, a, h, gh, h0, lengths, pairs, reverse, samples, block, pieces, ga, gb, gh0):
    """The gradient at the state before a step, ``a * gb``, is kept in gh0 until the step before reads it."""
    steps, batch, width = h.shape
    of_step, of_sample, shared = _strides(a, width)
    summed = len(ga) != steps
    blocks = -(-width // block)
    begin, end = span(part, parts, -(-batch // samples) * blocks)
    for tile in range(begin, end):
        first, unit = tile // blocks * samples, tile % blocks * block
        last, count = min(first + samples, batch), min(block, width - unit)
        for s in range(first, last):
            clear(advance(pointer(gh0), s * width + unit), count)
            if summed:
                clear(advance(pointer(ga), s * width + unit), count)
        for i in range(steps):
            t = i if reverse else steps - 1 - i
            for s in range(first, last):
                at, row = (t * batch + s) * width + unit, s * width + unit
                now = advance(pointer(gb), at)
                if t >= lengths[s]:
                    clear(now, count)
                    if not summed:
                        clear(advance(pointer(ga), at), count)
                    continue
                before = _before(pointer(h0), pointer(h), t, s, at, unit, lengths, reverse, batch, width)
                factor = advance(pointer(a), t * of_step + s * of_sample + (0 if shared else unit))
                incoming, carried = advance(pointer(gh), at), advance(pointer(gh0), row)
                if summed:
                    piece = advance(pointer(pieces), row)
                    _step_back(factor, shared, pairs, before, incoming, carried, piece, True, now, count)
                else:
                    out = advance(pointer(ga), at)
                    _step_back(factor, shared, pairs, before, incoming, carried, out, False, now, count)
            if summed and (i % PIECE == PIECE - 1 or i == steps - 1):
                for s in range(first, last):
                    row = s * width + unit
                    _join(advance(pointer(pieces), row), advance(pointer(ga), row), count)


@numba.njit(**INNER_JIT)
def _strides(a, width):
    """Return how far apart factors of two steps and of two samples lie, and whether a sample's units share them."""
    steps, batch, own = a.shape
    return batch * own if steps > 1 else 0, own if batch > 1 else 0, own < width


@device
def _before(h0, h, t, s, at, unit, lengths, reverse, batch, width):
    """Return the state before a step of a sample: that of the step before in the order of the recurrence, or h0."""
    if t == (lengths[s] - 1 if reverse else 0):
        return advance(h0, s * width + unit)
    return advance(h, at + batch * width if reverse else at - batch * width)


@numba.njit(**INNER_JIT)
def _step(a, shared, pairs, b, before, h, count):
    if pairs and shared:
        _step_pairs(a, True, b, before, h, count)
    elif pairs:
        _step_pairs(a, False, b, before, h, count)
    elif shared:
        _step_numbers(a, True, b, before, h, count)
    else:
        _step_numbers(a, False, b, before, h, count)


@device
def _step_numbers(a, shared, b, before, h, count):
    step = lanes(h)
    whole = count // step * step
    for i in range(0, whole, step):
        _step_vector(a, shared, b, before, h, i, step, True)
    if whole < count:
        _step_vector(a, shared, b, before, h, whole, count - whole, False)


@device
def _step_pairs(a, shared, b, before, h, count):
    step = 2 * lanes(h)
    whole = count // step * step
    for i in range(0, whole, step):
        _step_pair(a, shared, b, before, h, i, step, True)
    if whole < count:
        _step_pair(a, shared, b, before, h, whole, count - whole, False)


@device
def _step_vector(a, shared, b, before, h, i, n, full):
    """``h = a * before + b``."""
    factor = broadcast(a, 0) if shared else _take(a, i, n, full)
    _put(h, i, n, full, fma(factor, _take(before, i, n, full), _take(b, i, n, full)))


@device
def _step_pair(a, shared, b, before, h, i, n, full):
    """The same in complex numbers."""
    x, y = (broadcast(a, 0), broadcast(a, 1)) if shared else _take_pair(a, i, n, full)
    re, im = _take_pair(before, i, n, full)
    b_re, b_im = _take_pair(b, i, n, full)
    _put_pair(h, i, n, full, fma(x, re, b_re) - y * im, fma(x, im, fma(y, re, b_im)))


@numba.njit(**INNER_JIT)
def _step_back(a, shared, pairs, before, gh, carried, ga, added, gb, count):
    """Run one step of a row back; products are added to `ga` if `added`, else written."""
    if pairs and shared:
        _back_pairs(a, True, before, gh, carried, ga, added, gb, count)
    elif pairs:
        _back_pairs(a, False, before, gh, carried, ga, added, gb, count)
    elif shared:
        _back_numbers(a, True, before, gh, carried, ga, added, gb, count)
    else:
        _back_numbers(a, False, before, gh, carried, ga, added, gb, count)


@device
def _back_numbers(a, shared, before, gh, carried, ga, added, gb, count):
    step = lanes(gb)
    whole = count // step * step
    for i in range(0, whole, step):
        _back_vector(a, shared, before, gh, carried, ga, added, gb, i, step, True)
    if whole < count:
        _back_vector(a, shared, before, gh, carried, ga, added, gb, whole, count - whole, False)


@device
def _back_pairs(a, shared, before, gh, carried, ga, added, gb, count):
    step = 2 * lanes(gb)
    whole = count // step * step
    for i in range(0, whole, step):
        _back_pair(a, shared, before, gh, carried, ga, added, gb, i, step, True)
    if whole < count:
        _back_pair(a, shared, before, gh, carried, ga, added, gb, whole, count - whole, False)


@device
def _back_vector(a, shared, before, gh, carried, ga, added, gb, i, n, full):
    """``gb = gh + carried; ga = gb * before; carried = a * gb``."""
    factor = broadcast(a, 0) if shared else _take(a, i, n, full)
    g = _take(gh, i, n, full) + _take(carried, i, n, full)
    product = g * _take(before, i, n, full)
    _put(gb, i, n, full, g)
    _put(ga, i, n, full, _take(ga, i, n, full) + product if added else product)
    _put(carried, i, n, full, factor * g)


@device
def _back_pair(a, shared, before, gh, carried, ga, added, gb, i, n, full):
    """The same in complex numbers, in PyTorch's convention: products with the conjugates of `before` and `a`."""
    x, y = (broadcast(a, 0), broadcast(a, 1)) if shared else _take_pair(a, i, n, full)
    re, im = _take_pair(before, i, n, full)
    of_re, of_im = _take_pair(gh, i, n, full)
    c_re, c_im = _take_pair(carried, i, n, full)
    of_re, of_im = of_re + c_re, of_im + c_im
    ga_re, ga_im = fma(of_re, re, of_im * im), of_im * re - of_re * im
    if added:
        sum_re, sum_im = _take_pair(ga, i, n, full)
        ga_re, ga_im = sum_re + ga_re, sum_im + ga_im
    _put_pair(gb, i, n, full, of_re, of_im)
    _put_pair(ga, i, n, full, ga_re, ga_im)
    _put_pair(carried, i, n, full, fma(x, of_re, y * of_im), x * of_im - y * of_re)


@numba.njit(**INNER_JIT)
def _join(piece, total, count):
    """Add a piece of a sum to it, and begin the next piece."""
    for i in range(count):
        total[i] += piece[i]
    clear(piece, count)


@device
def _take(source, i, n, full):
    """Return a vector of numbers, of which `n` exist."""
    return load(source, i) if full else load_up_to(source, i, n)


@device
def _put(target, i, n, full, value):
    if full:
        store(target, i, value)
    else:
        store_up_to(target, i, value, n)


@device
def _take_pair(source, i, n, full):
    """Return the real and the imaginary parts of a vector of complex numbers, of whose reals `n` exist."""
    step = lanes(source)
    low, high = _take(source, i, n, full), _take(source, i + step, n - step, full)
    return evens(low, high), odds(low, high)


@device
def _put_pair(target, i, n, full, re, im):
    step = lanes(target)
    _put(target, i, n, full, low_in_turn(re, im))
    _put(target, i + step, n - step, full, high_in_turn(re, im))
