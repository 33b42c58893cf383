"""Recurrences that are linear in the state on the host, element by element, and their gradients.

``h[t] = a[t] * h[t-1] + b[t]`` with given factors and terms, and the minGRU, which makes both of its projected input.
Bound by memory, so each direction is one pass. Time is the outer loop, so that rows are read in the order in which they
lie in memory, a tile of samples and units at a time: the row before is then still in a core's cache. A complex number
is a pair of reals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.math import sigmoid, tanh
from sparsebp.kernels.host.engine.simd import (
    advance,
    broadcast,
    clear,
    device,
    evens,
    fma,
    high_in_turn,
    intrinsic,
    lanes,
    load,
    load_up_to,
    low_in_turn,
    maximum,
    minimum,
    odds,
    pointer,
    store,
    store_up_to,
    where_positive,
)
from sparsebp.kernels.host.engine.threads import parallel, team
from sparsebp.kernels.spec import CANDIDATES

NARROWEST, WIDEST = 256, 8192
"""Numbers of a row in one tile: whole segments of memory at least, and at most what stays in the first two caches."""
PIECE = 64
"""Steps whose gradients at a constant factor are added up before they join the sum, so that little is lost of it."""


class Rows(NamedTuple):
    """An array over steps, samples and units: ``values[first + t * of_step + s * of_sample + unit * of_unit]``."""

    values: Array
    first: int
    of_step: int
    of_sample: int
    of_unit: int


class LinearRecurrenceKernels:
    """Host side of linear recurrences in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, h: Array
    ) -> None:
        """One pass over a and b."""
        if lengths is None and _is_one_row(a, h, pairs):
            a, b, h0, h = (_as_one_row(array) for array in (a, b, h0, h))
        form = (a.shape[2] < h.shape[2], pairs)
        _run(_forward, h.shape, 3, lengths, reverse, False, form, _rows(a, not form[0]), *map(_rows, (b, h0, h)))

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, ga: Array,
        gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """One pass back over a, h and gh."""
        if lengths is None and _is_one_row(a, h, pairs):
            a, h, gh, h0, ga, gb, gh0 = (_as_one_row(array) for array in (a, h, gh, h0, ga, gb, gh0))
        form, summed = (a.shape[2] < h.shape[2], pairs), len(ga) != len(h)
        pieces = np.zeros_like(ga) if summed else ga
        factors = _rows(a, not form[0])
        rows = (factors, factors, *map(_rows, (h0, h, gh, gh0, pieces, ga, gb)))
        _run(_backward, h.shape, 5, lengths, reverse, summed, form, *rows)

    def min_gru_forward(
        self, x: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool, h: Array
    ) -> None:
        """One pass over the projected input."""
        rows = (_rows(x), _rows(x, first=h.shape[2]), _rows(h0), _rows(h))
        _run(_forward, h.shape, 12, lengths, reverse, False, (CANDIDATES.index(nonlinearity),), *rows)

    def min_gru_backward(
        self, x: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool,
        gx: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """One pass back; the gate and the candidate are made again."""
        of_x, of_gx = ((_rows(array), _rows(array, first=h.shape[2])) for array in (x, gx))
        rows = (*of_x, *map(_rows, (h0, h, gh, gh0)), of_gx[0], *of_gx)
        _run(_backward, h.shape, 20, lengths, reverse, False, (CANDIDATES.index(nonlinearity),), *rows)


def _run(
    kernel: Any,
    sizes: tuple[int, ...],
    work: int,
    lengths: Array | None,
    reverse: bool,
    summed: bool,
    form: Any,
    *rows: Rows,
) -> None:
    """Run a kernel of so much work for each number of h, in parts of whole tiles."""
    steps, batch, width = sizes
    parts = parts_for(work * steps * batch * width)
    numbers = max(NARROWEST, min(WIDEST, batch * width // parts))
    if width > numbers:
        samples, block = 1, numbers // NARROWEST * NARROWEST
    else:
        samples, block = numbers // max(width, 1), max(width, 1)
    parts = min(parts, max(-(-batch // samples) * -(-width // block), 1))
    lengths = np.full(batch, steps, np.int64) if lengths is None else lengths
    kernel(team(parts), parts, ((steps, batch, width), (samples, block), lengths, reverse, summed, form), rows)


def _rows(array: Array, of_unit: bool = True, first: int = 0) -> Rows:
    """Return the rows of an array (T, B, W) or (B, W); those of an axis of length one are shared."""
    *steps, batch, width = array.shape
    of_step = batch * width if steps and steps[0] > 1 else 0
    return Rows(array.reshape(-1), first, of_step, width if batch > 1 else 0, int(of_unit))


def _is_one_row(a: Array, h: Array, pairs: bool) -> bool:
    """Whether the samples of a step can be taken as one: each has its factors, or all have one."""
    return a.shape[1:] in (h.shape[1:], (1, 1 + pairs))


def _as_one_row(array: Array) -> Array:
    """Return (T, B, W) as (T, 1, B·W), and (B, W) as (1, B·W)."""
    return array.reshape(*array.shape[:-2], 1, array.shape[-2] * array.shape[-1])


# The functions below are compiled: their arguments are rows, pointers, flags and bounds.
# mypy: disable-error-code="no-untyped-def"
#
# A flag that is a constant where a function is called costs nothing: LLVM inlines the function and drops the branch.


@intrinsic
def _of_form(typingctx, form, linear, min_gru):
    """Return one of two compiled functions, chosen when compiling: given factors have two flags, a minGRU a number."""
    chosen = linear if len(form) == 2 else min_gru
    return chosen(form, linear, min_gru), lambda context, builder, sig, args: context.get_dummy_value()


@parallel(**JIT)
def _forward(part, parts, run, rows):
    """Run some tiles; ``step(form, x, y, before, h, count)`` takes a row one step on; x and y give a and b."""
    (steps, batch, width), tile, lengths, reverse, _, form = run
    x, y, h0, h = rows
    step = _of_form(form, _linear_step, _min_gru_step)
    blocks = -(-width // tile[1])
    begin, end = span(part, parts, -(-batch // tile[0]) * blocks)
    for number in range(begin, end):
        first, unit = number // blocks * tile[0], number % blocks * tile[1]
        last, count = min(first + tile[0], batch), min(tile[1], width - unit)
        for i in range(steps):
            t = steps - 1 - i if reverse else i
            for s in range(first, last):
                now = _row(h, t, s, unit)
                if t < lengths[s]:
                    before = _before(h0, h, t, s, unit, lengths[s], reverse)
                    step(form, _row(x, t, s, unit), _row(y, t, s, unit), before, now, count)
                else:
                    clear(now, count)


@parallel(**JIT)
def _backward(part, parts, run, rows):
    """Run some tiles back; ``step(form, x, y, before, gh, carried, gx, summed, gy, count)`` runs one step of a row.

    `carried` is the gradient at the state before the step, which the step before reads, and that at h0 at the end. If
    gx is `summed` over the steps, they add to `pieces`.
    """
    (steps, batch, width), tile, lengths, reverse, summed, form = run
    x, y, h0, h, gh, carried, pieces, gx, gy = rows
    step = _of_form(form, _linear_step_back, _min_gru_step_back)
    blocks = -(-width // tile[1])
    begin, end = span(part, parts, -(-batch // tile[0]) * blocks)
    for number in range(begin, end):
        first, unit = number // blocks * tile[0], number % blocks * tile[1]
        last, count = min(first + tile[0], batch), min(tile[1], width - unit)
        for s in range(first, last):
            clear(_row(carried, 0, s, unit), count)
            if summed:
                clear(_row(gx, 0, s, unit), count)
        for i in range(steps):
            t = i if reverse else steps - 1 - i
            for s in range(first, last):
                to_x, to_y = _row(pieces if summed else gx, t, s, unit), _row(gy, t, s, unit)
                if t < lengths[s]:
                    before, own = _before(h0, h, t, s, unit, lengths[s], reverse), _row(carried, t, s, unit)
                    args = _row(x, t, s, unit), _row(y, t, s, unit), before, _row(gh, t, s, unit), own
                    step(form, *args, to_x, summed, to_y, count)
                else:
                    clear(to_y, count)
                    if not summed:
                        clear(to_x, count)
            if summed and (i % PIECE == PIECE - 1 or i == steps - 1):
                for s in range(first, last):
                    _join(_row(pieces, 0, s, unit), _row(gx, 0, s, unit), count)


@device
def _row(rows, t, s, unit):
    return advance(pointer(rows.values), rows.first + t * rows.of_step + s * rows.of_sample + unit * rows.of_unit)


@device
def _before(h0, h, t, s, unit, length, reverse):
    """Return the state before a step of a sample: that of the step before in the order of the recurrence, or h0."""
    if t == (length - 1 if reverse else 0):
        return _row(h0, 0, s, unit)
    return _row(h, t + 1 if reverse else t - 1, s, unit)


@numba.njit(**INNER_JIT)
def _join(piece, total, count):
    """Add a piece of a sum to it, and begin the next piece."""
    for i in range(count):
        total[i] += piece[i]
    clear(piece, count)


# Given factors and terms.


@numba.njit(**INNER_JIT)
def _linear_step(form, a, b, before, h, count):
    shared, pairs = form
    step = 2 * lanes(h) if pairs else lanes(h)
    whole = count // step * step
    if pairs:
        for i in range(0, whole, step):
            _step_pair(a, shared, b, before, h, i, step, True)
        if whole < count:
            _step_pair(a, shared, b, before, h, whole, count - whole, False)
    else:
        for i in range(0, whole, step):
            _step_vector(a, shared, b, before, h, i, step, True)
        if whole < count:
            _step_vector(a, shared, b, before, h, whole, count - whole, False)


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
def _linear_step_back(form, a, b, before, gh, carried, ga, added, gb, count):
    shared, pairs = form
    step = 2 * lanes(gb) if pairs else lanes(gb)
    whole = count // step * step
    if pairs:
        for i in range(0, whole, step):
            _back_pair(a, shared, before, gh, carried, ga, added, gb, i, step, True)
        if whole < count:
            _back_pair(a, shared, before, gh, carried, ga, added, gb, whole, count - whole, False)
    else:
        for i in range(0, whole, step):
            _back_vector(a, shared, before, gh, carried, ga, added, gb, i, step, True)
        if whole < count:
            _back_vector(a, shared, before, gh, carried, ga, added, gb, whole, count - whole, False)


@device
def _back_vector(a, shared, before, gh, carried, ga, added, gb, i, n, full):
    """``gb = gh + carried; ga = gb * before; carried = a * gb``."""
    factor = broadcast(a, 0) if shared else _take(a, i, n, full)
    g = _take(gh, i, n, full) + _take(carried, i, n, full)
    product = g * _take(before, i, n, full)
    if added:
        product = _take(ga, i, n, full) + product
    _put(gb, i, n, full, g)
    _put(ga, i, n, full, product)
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


# The minGRU: a = 1 - z, b = z * c with the gate z = σ(u) and the candidate c = c(v).


@numba.njit(**INNER_JIT)
def _min_gru_step(form, u, v, before, h, count):
    step = lanes(h)
    whole = count // step * step
    for i in range(0, whole, step):
        _min_gru_vector(form[0], u, v, before, h, i, step, True)
    if whole < count:
        _min_gru_vector(form[0], u, v, before, h, whole, count - whole, False)


@device
def _min_gru_vector(kind, u, v, before, h, i, n, full):
    """``h = before + z * (c - before)``."""
    z, state = sigmoid(_take(u, i, n, full)), _take(before, i, n, full)
    c, _ = _candidate(kind, _take(v, i, n, full))
    _put(h, i, n, full, fma(z, c - state, state))


@numba.njit(**INNER_JIT)
def _min_gru_step_back(form, u, v, before, gh, carried, gu, added, gv, count):
    step = lanes(gu)
    whole = count // step * step
    for i in range(0, whole, step):
        _min_gru_back(form[0], u, v, before, gh, carried, gu, gv, i, step, True)
    if whole < count:
        _min_gru_back(form[0], u, v, before, gh, carried, gu, gv, whole, count - whole, False)


@device
def _min_gru_back(kind, u, v, before, gh, carried, gu, gv, i, n, full):
    """``g = gh + carried; gu = g (c - before) z (1 - z); gv = g z c'(v); carried = (1 - z) g``."""
    z = sigmoid(_take(u, i, n, full))
    c, slope = _candidate(kind, _take(v, i, n, full))
    g = _take(gh, i, n, full) + _take(carried, i, n, full)
    gz, rest = g * z, 1.0 - z
    _put(gu, i, n, full, gz * (c - _take(before, i, n, full)) * rest)
    _put(gv, i, n, full, gz * slope)
    _put(carried, i, n, full, rest * g)


@device
def _candidate(kind, v):
    """Return c(v) and its slope, for a function by its place in `CANDIDATES`."""
    one = maximum(0.0 * v, 1.0)  # in all lanes, also those of NaN
    if kind == 0:
        return v, one
    if kind == 1:
        c = tanh(v)
        return c, 1.0 - c * c
    s = sigmoid(minimum(0.0, v))  # 1/2 where v >= 0
    slope, rising = s * (1.0 - s), 1.0 - where_positive(-1.0 * v, one)
    return s + maximum(0.0, v), where_positive(-1.0 * v, slope) + rising + 0.0 * slope  # NaN at a NaN


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
