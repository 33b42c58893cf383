"""Recurrences that are linear in the state on the host, element by element, and their gradients.

``h[t] = a[t] * h[t-1] + b[t]`` with given factors and terms, and the minGRU and minLSTM, which make both of their
projected input.
Bound by memory, so each direction is one pass. Time is the outer loop, so that rows are read in the order in which they
lie in memory, a tile of samples and units at a time: the row before is then still in a core's cache. A complex number
is a pair of reals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array
from sparsebp.kernels.checks import CANDIDATES, parts_of
from sparsebp.kernels.host import chains
from sparsebp.kernels.host.chains import ACROSS, NARROW, Rows, strided
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, MAX_PARTS, VECTOR_GRAIN, WORTH, parts_for, span
from sparsebp.kernels.host.engine.math import exp, sigmoid, tanh
from sparsebp.kernels.host.engine.shuffles import evens, high_in_turn, low_in_turn, odds
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    absolute,
    advance,
    broadcast,
    clear,
    copy,
    device,
    fma,
    intrinsic,
    keep_alive,
    lanes,
    load,
    load_up_to,
    maximum,
    minimum,
    pointer,
    prefetch,
    store,
    store_up_to,
    where_positive,
)
from sparsebp.kernels.host.engine.threads import parallel, team
from sparsebp.kernels.host.engine.tiles import add_outer, multiply

NARROWEST, WIDEST = 256, 8192
"""Numbers of a row in one tile: whole segments of memory at least, and at most what stays in the first two caches."""
PIECE = 64
"""Steps whose gradients at a constant factor are added up before they join the sum, so that little is lost of it."""
LEAST = 16
"""Reals of a row from which rows are faster than chains."""
AHEAD = 4
"""Steps that rows are asked for before they are read on the way back."""
BLOCK_ROWS, MOST_GROUPS = 256, 32
"""Rows that are multiplied together, and stay in the second cache; groups of samples that the threads share."""


class LinearRecurrenceKernels:
    """Host side of linear recurrences in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, reset: Array | None, reverse: bool, h: Array
    ) -> None:
        """One pass over a and b."""
        resets, run = reset is not None, _lay_out(h, lengths, reset, False, a, b, h0, h)
        if run.by_rows:
            form = (run.rows[0].of_unit == 0, run.pairs)
            _run(_forward, run.sizes, 3, lengths, resets, reverse, False, form, *run.rows, run.reset)
        else:
            run.run_chains(chains.forward, 3, reverse, resets)

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, reset: Array | None, reverse: bool,
        ga: Array, gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """One pass back over a, h and gh."""
        resets, summed = reset is not None, len(ga) != len(h)
        run = _lay_out(h, lengths, reset, summed, a, h0, h, gh, gh0, ga, gb)
        if not run.by_rows:
            run.run_chains(chains.backward, 5, reverse, resets, summed)
            return
        (factors, *others, to_a, to_b), (_, batch, width) = run.rows, run.sizes
        pieces = Rows(np.zeros(batch * width, to_a.values.dtype), 0, 0, width, 1) if summed else to_a
        rows, form = (factors, factors, *others, pieces, to_a, to_b, run.reset), (factors.of_unit == 0, run.pairs)
        _run(_backward, run.sizes, 5, lengths, resets, reverse, summed, form, *rows)

    def min_gru_forward(
        self, x: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool, h: Array
    ) -> None:
        """One pass over the projected input."""
        gates = parts_of(x, h)
        rows = (_rows(x), _rows(x, first=(gates - 1) * h.shape[2]), _rows(h0), _rows(h))
        form = CANDIDATES.index(nonlinearity), gates, h.shape[2]
        _run(_forward, h.shape, 12, lengths, False, reverse, False, form, *rows, NO_RESET)

    def min_gru_backward(
        self, x: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool,
        gx: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """One pass back; the gate and the candidate are made again."""
        gates = parts_of(x, h)
        of_x, of_gx = ((_rows(array), _rows(array, first=(gates - 1) * h.shape[2])) for array in (x, gx))
        rows = (*of_x, *map(_rows, (h0, h, gh, gh0)), of_gx[0], *of_gx)
        form = CANDIDATES.index(nonlinearity), gates, h.shape[2]
        _run(_backward, h.shape, 20, lengths, False, reverse, False, form, *rows, NO_RESET)


def gated_forward(
    x: Array, w: Array, bias: Array | None, nonlinearity: str, p: Array, h: Array,
) -> None:  # fmt: skip
    """Project x (T, B, I), and run a minGRU (two gates) or a minLSTM (three) over it where it was just written.

    w (gH, I) and bias (gH,) as in `sparsebp.nn`; p (T, B, gH), the projection, is written, and so is h (T + 1, B, H),
    the states, behind ``h[0]``. All C-contiguous and of one dtype.
    """
    width, room, samples = h.shape[2], _padded(len(w), x.shape[2], w.dtype), _samples_of(h.shape[1])
    room[:-1, : len(w)], room[-1, : len(w)] = w.T, 0 if bias is None else bias
    parts = min(parts_for(2 * len(x) * x.shape[1] * w.size), -(-x.shape[1] // samples))
    form = CANDIDATES.index(nonlinearity), len(w) // width, width
    _project_forward(team(parts), parts, form, samples, x, room, p, h)


def gated_backward(
    x: Array, p: Array, h: Array, gh: Array, nonlinearity: str, carried: Array, gp: Array | None,
    grads: tuple[Array, Array | None] | None, through: tuple[Array, Array] | None = None, again: bool = False,
) -> None:  # fmt: skip
    """Write the gradients of `gated_forward` from gh (T, B, H), or (1, B, H) for all steps.

    `carried` (B, H) is the gradient at the last state, then that at the initial one. gp is None or the gradient at p,
    `grads` None or those at w and bias, `through` None or w and the gradient at x. Each block of gp is multiplied with
    x and with w where it was just written. With `again` gp is given, and multiplied alone: the same sums.
    """
    width, columns, samples = h.shape[2], p.shape[2], _samples_of(h.shape[1])
    groups, form = -(-x.shape[1] // samples), (CANDIDATES.index(nonlinearity), columns // width, width)
    w, gx = (_wide(through[0]), through[1]) if through else (h[0, :0], p[:0])  # p may have no step, h has one
    parts = min(parts_for(2 * x.size * columns), groups)
    sums = np.zeros((groups, *_padded(columns, x.shape[2], x.dtype).shape))  # in double precision, as they are long
    into = p[:0] if gp is None else gp
    _project_backward(
        team(parts), parts, form, samples, x, p, h, _rows(gh), carried, into, again, grads is not None, sums, w, gx
    )
    if grads is not None:
        total = sums.sum(axis=0)
        grads[0][...] = total[:-1, :columns].T
        if grads[1] is not None:
            grads[1][...] = total[-1, :columns]


def lru_forward(
    x: Array, a: Array, into: Array, out: Array, d: Array, h0: Array, h: Array, y: Array
) -> None:  # fmt: skip
    """Run ``h[t] = a h[t-1] + into x[t]`` and ``y[t] = out h[t] + d x[t]``, a block of steps at a time.

    x and y (T, B, I), a (2N,), into (2N, I), out (I, 2N), d (I,), h0 (B, 2N) and h (T, B, 2N), where two reals are a
    complex number. All C-contiguous and of one dtype.
    """
    batch, samples = x.shape[1], _samples_of(x.shape[1])
    parts = min(parts_for(4 * x.size * len(a)), -(-batch // samples))
    _lru_forward(team(parts), parts, samples, x, a, _wide(into.T), _wide(out.T), _wide(d[None])[0], h0, h, y)


def lru_backward(
    gy: Array, a: Array, out: Array, h0: Array, h: Array, ends: Array, at_end: Array, carried: Array, gb: Array
) -> Array:  # fmt: skip
    """Write the gradients of `lru_forward` at ``into x`` (T, B, 2N), and at the initial state to `carried`; return a's.

    `at_end` (B, 2N) is a gradient at the state after as many steps as `ends` (B,) says.
    """
    batch, samples = gy.shape[1], _samples_of(gy.shape[1])
    groups = -(-batch // samples)
    carried[...], sums = 0, np.zeros((groups, len(a)))
    parts = min(parts_for(2 * gy.size * len(a)), groups)
    _lru_backward(team(parts), parts, samples, gy, a, _wide(out), h0, h, ends, at_end, carried, gb, sums)
    return sums.sum(axis=0).astype(a.dtype)


def _wide(w: Array) -> Array:
    """Return a matrix with rows rounded up to whole vectors by zeros."""
    wide = _padded(w.shape[1], len(w) - 1, w.dtype)
    wide[:, : w.shape[1]] = w
    return wide


def _samples_of(batch: int) -> int:
    """Return the samples of a group: the same for any number of threads, as are then the sums over the groups."""
    return max(min(8, batch // 2), -(-batch // MOST_GROUPS), 1)


def _padded(columns: int, features: int, dtype: np.dtype) -> Array:
    """Return zeros (features + 1, columns), rows rounded up to whole vectors: weights and, last, the bias."""
    count = VECTOR_BYTES // dtype.itemsize
    return np.zeros((features + 1, -(-columns // count) * count), dtype)


def _run(
    kernel: Any,
    sizes: tuple[int, ...],
    work: int,
    lengths: Array | None,
    resets: bool,
    reverse: bool,
    summed: bool,
    form: Any,
    *rows: Rows,
) -> None:
    """Run a kernel of so much work for each number of h, in parts of whole tiles."""
    steps, batch, width = sizes
    parts, samples, block = _divide(work * steps * batch * width, threads.count() == 1, batch, width)
    if 0 < rows[3].of_step < rows[3].of_sample:  # of h: the steps of a sample follow each other
        samples, parts = 1, min(parts, max(batch * -(-width // block), 1))
    lengths = np.full(batch, steps, np.int64) if lengths is None else lengths
    kernel(team(parts), parts, ((steps, batch, width), (samples, block), lengths, resets, reverse, summed, form), rows)


def _divide(work: int, alone: bool, batch: int, width: int) -> tuple[int, int, int]:
    """Return into how many parts so much work is split, and the samples and the numbers of a row in one tile."""
    parts = 1 if alone or work < WORTH else min(MAX_PARTS, work // VECTOR_GRAIN)  # as `parts_for`
    numbers = max(NARROWEST, min(WIDEST, batch * width // parts))
    if width > numbers:
        samples, block = 1, numbers // NARROWEST * NARROWEST
    else:
        samples, block = numbers // max(width, 1), max(width, 1)
    return min(parts, max(-(-batch // samples) * -(-width // block), 1)), samples, block


divide = numba.njit(**INNER_JIT)(_divide)
"""The same for compiled functions."""


class _Layout(NamedTuple):
    """How a linear recurrence of given factors is run: by rows of units, or by chains of numbers.

    Attributes
    ----------
    by_rows
        Which of both.
    pairs
        Whether numbers are complex, and take two of a row's reals.
    sizes
        T, B and W: of rows, in reals; of chains, samples and units may be exchanged, or joined in one axis.
    rows, reset
        The arrays.
    ends
        The steps of every chain, or nothing: all have T. Rows go by the samples' lengths.
    """

    by_rows: bool
    pairs: bool
    sizes: tuple[int, int, int]
    rows: list[Rows]
    reset: Rows
    ends: Array

    def run_chains(self, kernel: Any, work: int, reverse: bool, resets: bool, *flags: bool) -> None:
        """Run a kernel of chains, of so much work for each number."""
        steps, batch, width = self.sizes
        values = self.rows[0].values
        like = np.empty(0, np.float64 if batch * width <= NARROW else values.dtype)
        work *= steps * batch * width * (1 + self.pairs)
        parts = 1 if threads.count() == 1 or work < WORTH else min(MAX_PARTS, work // VECTOR_GRAIN)
        groups = -(-width // (VECTOR_BYTES // like.itemsize))
        across = max(1, min(ACROSS, batch * groups // parts))
        parts = max(1, min(parts, batch * -(-groups // across)))
        run = (self.sizes, across, self.pairs, reverse, resets, *flags)
        kernel(team(parts), parts, run, like, self.ends, self.reset, tuple(self.rows))


def _lay_out(h: Array, lengths: Array | None, reset: Array | None, summed: bool, *arrays: Array) -> _Layout:
    """Choose rows where units lie side by side; they may share factors and resets, and do the latter if `summed`."""
    (steps, batch, hidden), pairs = h.shape, h.dtype.kind == "c"
    rows, sizes = [strided(array) for array in arrays], h.shape
    rows.append(NO_RESET if reset is None else strided(reset))
    joined = _joined(rows, batch, hidden)
    if joined and lengths is None:
        rows, sizes = joined, (steps, 1, batch * hidden)
    one = 1 + pairs
    if batch * hidden > NARROW and sizes[2] * one >= LEAST and _lie_in_rows(rows, one, summed):
        factors, *others, flags = rows
        rows = [factors._replace(of_unit=factors.of_unit // one), *(each._replace(of_unit=1) for each in others)]
        return _Layout(True, pairs, (steps, sizes[1], sizes[2] * one), rows, flags, NO_ENDS)
    ends = NO_ENDS if lengths is None else np.repeat(lengths, hidden)
    if joined:
        rows, sizes = joined, (steps, 1, batch * hidden)
    elif batch > hidden:
        rows = [each._replace(of_sample=each.of_unit, of_unit=each.of_sample) for each in rows]
        sizes, ends = (steps, hidden, batch), ends if lengths is None else np.tile(lengths, hidden)
    return _Layout(False, pairs, sizes, rows[:-1], rows[-1], ends)


def _lie_in_rows(rows: list[Rows], one: int, summed: bool) -> bool:
    """Whether units lie side by side, `one` real each. The first, factors, and the last, resets, may be shared."""
    factors, *others, flags = rows
    apart = factors.of_unit in (0, one) and all(each.of_unit == one for each in others)
    return apart and (flags.of_unit == 0 or (flags.of_unit == 1 and not summed))


def _joined(rows: list[Rows], batch: int, hidden: int) -> list[Rows] | None:
    """Return rows whose units are those of all samples; None where these are not equally far apart."""
    if batch == 1:
        return rows
    if hidden == 1:
        return [each._replace(of_sample=0, of_unit=each.of_sample) for each in rows]
    if all(each.of_sample == hidden * each.of_unit for each in rows):
        return [each._replace(of_sample=0) for each in rows]
    return None


NO_RESET, NO_ENDS = strided(np.zeros((1, 1, 1), bool)), np.empty(0, np.int64)


def _rows(array: Array, first: int = 0) -> Rows:
    """Return the rows of a C-contiguous array (T, B, W) or (B, W); those of an axis of length one are shared."""
    *steps, batch, width = array.shape
    of_step = batch * width if steps and steps[0] > 1 else 0
    return Rows(array.reshape(-1), first, of_step, width if batch > 1 else 0, 1)


# The functions below are compiled: their arguments are rows, pointers, flags and bounds.
# mypy: disable-error-code="no-untyped-def"
#
# A flag that is a constant where a function is called costs nothing: LLVM inlines the function and drops the branch.


@intrinsic
def _of_form(typingctx, form, linear, min_gru):
    """Return one of two compiled functions, by the form: given factors have two flags, a minGRU three numbers."""
    chosen = linear if len(form) == 2 else min_gru
    return chosen(form, linear, min_gru), lambda context, builder, sig, args: context.get_dummy_value()


@parallel(**JIT)
def _forward(part, parts, run, rows):
    """Run some tiles; ``step(form, x, y, before, h, count)`` takes a row one step on; x and y give a and b."""
    (steps, batch, width), tile, lengths, resets, reverse, _, form = run
    x, y, h0, h, reset = rows
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
                if t >= lengths[s]:
                    clear(now, count)
                elif resets and reset.of_unit == 0 and _row(reset, t, s, 0)[0]:
                    copy(now, _row(y, t, s, unit), count)
                else:
                    before = _before(h0, h, t, s, unit, lengths[s], reverse)
                    step(form, _row(x, t, s, unit), _row(y, t, s, unit), before, now, count)
                    if resets and reset.of_unit:
                        _begin_anew(form, _row(reset, t, s, 0), unit, _row(y, t, s, unit), now, count)


@parallel(**JIT)
def _backward(part, parts, run, rows):
    """Run some tiles back; ``step(form, x, y, before, gh, carried, gx, summed, gy, count)`` runs one step of a row.

    `carried` is the gradient at the state before the step, which the step before reads, and that at h0 at the end. If
    gx is `summed` over the steps, they add to `pieces`.
    """
    (steps, batch, width), tile, lengths, resets, reverse, summed, form = run
    x, y, h0, h, gh, carried, pieces, gx, gy, reset = rows
    step = _of_form(form, _linear_step_back, _min_gru_step_back)
    blank = _of_form(form, _blank, _blank_gates)
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
                if t >= lengths[s]:
                    clear(to_y, count)
                    if not summed:
                        blank(form, to_x, count)
                elif resets and reset.of_unit == 0 and _row(reset, t, s, 0)[0]:
                    _cut(_row(gh, t, s, unit), _row(carried, t, s, unit), to_y, count)
                    if not summed:
                        clear(to_x, count)
                else:
                    before, own = _before(h0, h, t, s, unit, lengths[s], reverse), _row(carried, t, s, unit)
                    args = _row(x, t, s, unit), _row(y, t, s, unit), before, _row(gh, t, s, unit), own
                    step(form, *args, to_x, summed, to_y, count)
                    if resets and reset.of_unit:
                        _cut_units(form, _row(reset, t, s, 0), unit, own, to_x, count)
            if summed and (i % PIECE == PIECE - 1 or i == steps - 1):
                for s in range(first, last):
                    _join(_row(pieces, 0, s, unit), _row(gx, 0, s, unit), count)


@numba.njit(**INNER_JIT)
def _cut(gh, carried, gy, count):
    """Write the gradient at the terms of a step whose state before does not matter."""
    for i in range(count):
        gy[i] = gh[i] + carried[i]
    clear(carried, count)


@numba.njit(**INNER_JIT)
def _begin_anew(form, flags, unit, terms, h, count):
    """Write the terms of the numbers that are reset; of given factors, whose form says whether two reals are one."""
    for i in range(count):
        if flags[(unit + i) // 2 if form[1] else unit + i]:
            h[i] = terms[i]


@numba.njit(**INNER_JIT)
def _cut_units(form, flags, unit, carried, gx, count):
    """Clear the gradients at the state before and at the factors, of the numbers that are reset."""
    for i in range(count):
        if flags[(unit + i) // 2 if form[1] else unit + i]:
            carried[i] = gx[i] = 0


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
def _blank(form, gx, count):
    clear(gx, count)


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


# The minGRU: a = 1 - z, b = z * c with the gate z = σ(u) and the candidate c = c(v). A minLSTM has two gates in place
# of u, `width` numbers apart: z = i / (i + f). A form is the candidate's place in `CANDIDATES`, the gates, the width.


@numba.njit(**INNER_JIT)
def _blank_gates(form, gu, count):
    _, gates, width = form
    clear(gu, count)
    if gates == 3:
        clear(advance(gu, width), count)


@numba.njit(**INNER_JIT)
def _min_gru_step(form, u, v, before, h, count):
    kind, gates, width = form
    if gates == 2:
        _step_units(kind, 2, u, v, width, before, h, count)
    else:
        _step_units(kind, 3, u, v, width, before, h, count)


@device
def _step_units(kind, gates, u, v, width, before, h, count):
    step = lanes(h)
    whole = count // step * step
    for i in range(0, whole, step):
        _min_gru_vector(kind, gates, u, v, width, before, h, i, step, True)
    if whole < count:
        _min_gru_vector(kind, gates, u, v, width, before, h, whole, count - whole, False)


@device
def _min_gru_vector(kind, gates, u, v, width, before, h, i, n, full):
    """``h = before + z * (c - before)``."""
    state = _take(before, i, n, full)
    c, _ = _candidate(kind, _take(v, i, n, full))
    if gates == 2:
        z = sigmoid(_take(u, i, n, full))
    else:
        z, _, _, _ = _shared(_take(u, i, n, full), _take(u, width + i, n, full))
    _put(h, i, n, full, fma(z, c - state, state))


@numba.njit(**INNER_JIT)
def _min_gru_step_back(form, u, v, before, gh, carried, gu, added, gv, count):
    kind, gates, width = form
    if gates == 2:
        _step_units_back(kind, 2, u, v, width, before, gh, carried, gu, gv, count)
    else:
        _step_units_back(kind, 3, u, v, width, before, gh, carried, gu, gv, count)


@device
def _step_units_back(kind, gates, u, v, width, before, gh, carried, gu, gv, count):
    step = lanes(gu)
    whole = count // step * step
    for i in range(0, whole, step):
        _min_gru_back(kind, gates, u, v, width, before, gh, carried, gu, gv, i, step, True)
    if whole < count:
        _min_gru_back(kind, gates, u, v, width, before, gh, carried, gu, gv, whole, count - whole, False)


@device
def _min_gru_back(kind, gates, u, v, width, before, gh, carried, gu, gv, i, n, full):
    """``g = gh + carried; gu = g (c - before) z (1 - z); gv = g z c'(v); carried = (1 - z) g``."""
    c, slope = _candidate(kind, _take(v, i, n, full))
    g = _take(gh, i, n, full) + _take(carried, i, n, full)
    through = c - _take(before, i, n, full)
    if gates == 2:
        z = sigmoid(_take(u, i, n, full))
        rest = 1.0 - z
        gz = g * z
        _put(gu, i, n, full, gz * through * rest)
    else:
        z, rest, shut_i, shut_f = _shared(_take(u, i, n, full), _take(u, width + i, n, full))
        gz = g * z
        through = gz * through * rest
        _put(gu, i, n, full, through * shut_i)
        _put(gu, width + i, n, full, -1.0 * through * shut_f)
    _put(gv, i, n, full, gz * slope)
    _put(carried, i, n, full, rest * g)


@device
def _shared(p_i, p_f):
    """Return ``i / (i + f)``, ``f / (i + f)``, 1 - i and 1 - f, of the inputs of the gates i and f."""
    # Both may be as small as they like: below e⁻⁶⁰ a gate is eˣ, and both are scaled alike.
    shift = minimum(0.0, maximum(p_i, p_f) + 60.0)
    i, shut_i = _gate(p_i - shift)
    f, shut_f = _gate(p_f - shift)
    share = 1.0 / (i + f)
    return i * share, f * share, shut_i, shut_f


@device
def _gate(p):
    """Return σ(p) and 1 - σ(p), both with small relative error."""
    small = exp(-1.0 * absolute(p))
    large = 1.0 / (1.0 + small)
    small = small * large
    return small + where_positive(p, large - small), small + where_positive(-1.0 * p, large - small)


# The same with the projection p = W x + b: a group of samples goes through a block of steps, whose rows of p, or whose
# gradients at p, are multiplied while they are in the cache.


@parallel(**JIT)
def _project_forward(part, parts, form, samples, x, w, p, h):
    steps, batch, features = x.shape
    _, gates, width = form
    columns, row = p.shape[2], w.shape[1]
    size = max(1, BLOCK_ROWS // samples)
    room = np.empty((size * samples + 3) * row, x.dtype)  # products have four rows
    tile, bias = pointer(room), advance(pointer(w), features * row)
    begin, end = span(part, parts, -(-batch // samples))
    for group in range(begin, end):
        first = group * samples
        count = min(samples, batch - first)
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            rows = (stop - start) * count
            for r in range(rows + 3):
                copy(advance(tile, r * row), bias, row)
            own = advance(pointer(x), (start * batch + first) * features)
            _project(own, rows, count, batch, features, pointer(w), row, tile)
            u = tile
            for t in range(start, stop):
                for at in range(t * batch + first, t * batch + first + count):
                    before, now = advance(pointer(h), at * width), advance(pointer(h), (at + batch) * width)
                    _ask(x, (at + size * batch) * features, features)
                    _min_gru_step(form, u, advance(u, (gates - 1) * width), before, now, width)
                    copy(advance(pointer(p), at * columns), u, columns)
                    u = advance(u, row)
    keep_alive(room)


@device
def _ask(values, offset, count):
    """Ask for numbers that are read soon, wherever that is."""
    for i in range(0, count, 16):
        prefetch(pointer(values), offset + i)


@device
def _project(x, rows, count, batch, depth, w, width, out):
    """Add ``x @ w`` to `out`, with up to three rows more; x: the first row of a block of `count` of `batch` samples."""
    for r in range(0, rows, 4):
        place = _place(r, rows, count, batch)
        r1 = (_place(r + 1, rows, count, batch) - place) * depth
        r2 = (_place(r + 2, rows, count, batch) - place) * depth
        r3 = (_place(r + 3, rows, count, batch) - place) * depth
        multiply(advance(x, place * depth), r1, r2, r3, depth, w, width, width, advance(out, r * width), width)


@device
def _place(r, rows, count, batch):
    """Return how many rows of all samples row r of a block lies behind its first; the last one's for those behind."""
    r = min(r, rows - 1)
    return r // count * batch + r % count


@parallel(**JIT)
def _project_backward(part, parts, form, samples, x, p, h, gh, carried, gp, again, summed, sums, w, gx):
    steps, batch, features = x.shape
    _, gates, width = form
    columns, row, wide = p.shape[2], sums.shape[2], w.shape[1]
    size = max(1, BLOCK_ROWS // samples)
    room, one = np.zeros((size * samples + 3) * row, x.dtype), np.zeros((features + 1) * row, x.dtype)
    four = np.empty(4 * wide, x.dtype)
    tile, piece = pointer(room), pointer(one)
    begin, end = span(part, parts, -(-batch // samples))
    for group in range(begin, end):
        first = group * samples
        count = min(samples, batch - first)
        for stop in range(steps, 0, -size):
            start, gu = max(0, stop - size), tile
            for t in range(stop - 1, start - 1, -1):
                for s in range(first, first + count):
                    at = t * batch + s
                    _ask(x, at * features, features)
                    if again:
                        copy(gu, advance(pointer(gp), at * columns), columns)
                        gu = advance(gu, row)
                        continue
                    _ask(p, (at - AHEAD * batch) * columns, columns)
                    _ask(h, (at - AHEAD * batch) * width, width)
                    _ask(gh.values, gh.first + (t - AHEAD) * gh.of_step + s * gh.of_sample, width)
                    u, before = advance(pointer(p), at * columns), advance(pointer(h), at * width)
                    v, gv = advance(u, (gates - 1) * width), advance(gu, (gates - 1) * width)
                    own = advance(pointer(carried), s * width)
                    _min_gru_step_back(form, u, v, before, _row(gh, t, s, 0), own, gu, False, gv, width)
                    if len(gp):
                        copy(advance(pointer(gp), at * columns), gu, columns)
                    gu = advance(gu, row)
            if summed:
                last = advance(pointer(x), ((stop - 1) * batch + first) * features)
                add_outer(last, features, batch, count, stop - start, tile, row, row, piece)
                bias = advance(piece, features * row)
                for j in range(0, row, lanes(tile)):
                    total = load(bias, j)
                    for r in range((stop - start) * count):
                        total = total + load(tile, r * row + j)
                    store(bias, j, total)
                _join(piece, advance(pointer(sums), group * (features + 1) * row), (features + 1) * row)
            if len(gx):
                gu, left, to_x = tile, 0, pointer(four)
                for t in range(stop - 1, start - 1, -1):
                    for s in range(first, first + count):
                        if left == 0:
                            clear(to_x, 4 * wide)
                            multiply(gu, row, 2 * row, 3 * row, columns, pointer(w), wide, wide, to_x, wide)
                            gu, left = advance(gu, 4 * row), 4
                        copy(advance(pointer(gx), (t * batch + s) * features), to_x, features)
                        to_x, left = advance(to_x, wide), left - 1
                        if left == 0:
                            to_x = pointer(four)
    keep_alive(room)
    keep_alive(one)
    keep_alive(four)


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


# The linear recurrent unit, whose states are projected of x and projected to y.


@parallel(**JIT)
def _lru_forward(part, parts, samples, x, a, into, out, d, h0, h, y):
    steps, batch, features = x.shape
    width, row, narrow = h.shape[2], into.shape[1], out.shape[1]
    size = max(1, BLOCK_ROWS // samples)
    room = np.empty((size * samples + 3) * (row + narrow), x.dtype)
    tile = pointer(room)
    of_y = advance(tile, (size * samples + 3) * row)
    begin, end = span(part, parts, -(-batch // samples))
    for group in range(begin, end):
        first = group * samples
        count = min(samples, batch - first)
        for start in range(0, steps, size):
            rows = (min(start + size, steps) - start) * count
            clear(tile, (rows + 3) * row)
            clear(of_y, (rows + 3) * narrow)
            at = start * batch + first
            _project(advance(pointer(x), at * features), rows, count, batch, features, pointer(into), row, tile)
            for r in range(rows):
                at = start * batch + first + _place(r, rows, count, batch)
                now = advance(pointer(h), at * width)
                before = advance(now, -batch * width) if at >= batch else advance(pointer(h0), at * width)
                _linear_step((False, True), pointer(a), advance(tile, r * row), before, now, width)
                _ask(x, (at + size * batch) * features, features)
            at = start * batch + first
            _project(advance(pointer(h), at * width), rows, count, batch, width, pointer(out), narrow, of_y)
            for r in range(rows):
                at = (start * batch + first + _place(r, rows, count, batch)) * features
                source, target = advance(pointer(x), at), advance(pointer(y), at)
                for i in range(0, features, lanes(tile)):
                    left = features - i
                    value = fma(load(pointer(d), i), load_up_to(source, i, left), load(of_y, r * narrow + i))
                    store_up_to(target, i, value, left)
    keep_alive(room)


@parallel(**JIT)
def _lru_backward(part, parts, samples, gy, a, out, h0, h, ends, at_end, carried, gb, sums):
    steps, batch, features = gy.shape
    width, row = h.shape[2], out.shape[1]
    size = max(1, BLOCK_ROWS // samples)
    room, one = np.empty((size * samples + 3) * row, gy.dtype), np.zeros(width, gy.dtype)
    tile, piece = pointer(room), pointer(one)
    begin, end = span(part, parts, -(-batch // samples))
    for group in range(begin, end):
        first = group * samples
        count = min(samples, batch - first)
        for stop in range(steps, 0, -size):
            start = max(0, stop - size)
            rows = (stop - start) * count
            clear(tile, (rows + 3) * row)
            at = (start * batch + first) * features
            _project(advance(pointer(gy), at), rows, count, batch, features, pointer(out), row, tile)
            for r in range(rows - 1, -1, -1):
                t, s = start + r // count, first + r % count
                at, gh, own = (t * batch + s) * width, advance(tile, r * row), advance(pointer(carried), s * width)
                _ask(h, at - AHEAD * batch * width, width)
                _ask(gb, at - AHEAD * batch * width, width)
                _ask(gy, ((t - size) * batch + s) * features, features)
                if ends[s] == t + 1:
                    for i in range(width):
                        gh[i] += at_end[s, i]
                before = advance(pointer(h), at - batch * width) if t else advance(pointer(h0), at)
                target = advance(pointer(gb), at)
                factor = pointer(a)
                _linear_step_back((False, True), factor, factor, before, gh, own, piece, True, target, width)
            _join(piece, advance(pointer(sums), group * width), width)
    keep_alive(room)
    keep_alive(one)
