"""Linear recurrences whose states stay in registers: few states, or states that do not lie side by side in memory.

The rows of `recurrence` read the state before a step from memory. Few numbers a step then cost what that takes, and
arrays whose last axis is time would have to be copied. Here a group of chains, one in each lane, goes through a block
of steps at a time: what it reads is first put into rows of that many numbers in the first cache, transposed where time
is the contiguous axis. Strides in memory are any.

Up to `NARROW` states are summed in double precision, whatever the dtype. All others take the operations of the rows of
`recurrence`: bitwise equal results.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.engine.compile import INNER_APART, INNER_JIT, JIT, span
from sparsebp.kernels.host.engine.shuffles import put_row, put_turned, take_row, take_turned
from sparsebp.kernels.host.engine.simd import (
    advance,
    clear,
    device,
    fma,
    keep_alive,
    lanes,
    load,
    pointer,
    prefetch,
    put_number,
    select_positive,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel

NARROW = 8
"""States up to which sums are in double precision."""
BLOCK = 64
"""Steps of a block, and of a piece of a sum over the steps."""
ACROSS = 8
"""Groups of chains next to each other that go through the steps together."""


class Rows(NamedTuple):
    """An array over steps, samples and units: ``values[first + t * of_step + s * of_sample + unit * of_unit]``."""

    values: Array
    first: int
    of_step: int
    of_sample: int
    of_unit: int


def strided(array: Array) -> Rows:
    """Return the rows of an array (T, B, H) or (B, H) where it lies: of reals, two of a complex number, or of flags."""
    array = array if array.ndim == 3 else array[None]
    values = array[:1, :1, :1].reshape(-1)
    if array.dtype.kind in "bc":
        values = values.view(np.uint8 if array.dtype.kind == "b" else values.real.dtype)
    apart = (step // values.itemsize if n > 1 else 0 for n, step in zip(array.shape, array.strides, strict=True))
    return Rows(values, 0, *apart)


# The functions below are compiled: their arguments are rows, pointers, flags and bounds. Chain number c of a group is
# unit ``first + c`` of a sample; callers swap samples and units as they like.
# mypy: disable-error-code="no-untyped-def,assignment"


@parallel(**JIT)
def forward(part, parts, run, like, ends, reset, rows):
    """Run some groups; `like` has the dtype of the sums, `ends` the steps of every chain or nothing."""
    _, batch, width = run[0]
    if batch * width == 1:
        _forward_alone(run, ends, reset, rows[0], rows[1], rows[2], rows[3])
    else:
        _forward_groups(part, parts, run, like, ends, reset, rows[0], rows[1], rows[2], rows[3])


@numba.njit(**INNER_JIT)
def _forward_groups(part, parts, run, like, ends, reset, a, b, h0, h):
    (steps, batch, width), across, pairs, reverse, resets = run
    size = lanes(pointer(like))
    row = 2 * size if pairs else size
    room = np.zeros((2 * (BLOCK + size) + across) * row + BLOCK * size, like.dtype)
    factors = pointer(room)
    terms = advance(factors, (BLOCK + size) * row)
    states, keep = advance(terms, (BLOCK + size) * row), advance(terms, (BLOCK + size + across) * row)
    groups, blocks = -(-width // size), -(-steps // BLOCK)
    tiles, limited, ahead = -(-groups // across), len(ends) > 0, -BLOCK if reverse else BLOCK
    begin, end = span(part, parts, batch * tiles)
    for number in range(begin, end):
        s, low = number // tiles, number % tiles * across
        high = min(low + across, groups)
        for group in range(low, high):
            first = group * size
            state = advance(states, (group - low) * row)
            take(state, pairs, at_row(h0, 0, s, first), 0, h0.of_unit, min(size, width - first), 1, 0)
        for block in range(blocks):
            t = (blocks - 1 - block if reverse else block) * BLOCK
            count = min(BLOCK, steps - t)
            for group in range(low, high):
                first = group * size
                n, state = min(size, width - first), advance(states, (group - low) * row)
                moving = a.of_step != 0 or limited
                rows_of_a = count if moving else 1
                take(factors, pairs, at_row(a, t, s, first), a.of_step, a.of_unit, n, rows_of_a, ahead * a.of_step)
                take(terms, pairs, at_row(b, t, s, first), b.of_step, b.of_unit, n, count, ahead * b.of_step)
                if resets:
                    _take_flags(keep, size, at_row(reset, t, s, first), reset.of_step, reset.of_unit, n, count)
                if limited:
                    for c in range(n):
                        for i in range(max(ends[s * width + first + c] - t, 0), count):
                            _set(factors, i, c, pairs, 1.0)
                            _set(terms, i, c, pairs, 0.0)
                            keep[i * size + c] = 1.0
                if pairs:
                    _run_pairs(factors, moving, terms, keep, resets, state, reverse, count)
                else:
                    _run(factors, moving, terms, keep, resets, state, reverse, count)
                if limited:
                    _clear_beyond(terms, pairs, ends, s * width + first, n, t, count)
                put(at_row(h, t, s, first), pairs, terms, h.of_step, h.of_unit, n, count, ahead * h.of_step)
    keep_alive(room)


@parallel(**JIT)
def backward(part, parts, run, like, ends, reset, rows):
    """Run some groups back; with `summed`, of factors that all steps share, ga has one row, the sum over the steps."""
    _, batch, width = run[0]
    if batch * width == 1:
        _backward_alone(run, ends, reset, rows[0], rows[1], rows[2], rows[3], rows[4], rows[5], rows[6])
    else:
        _backward_groups(part, parts, run, like, ends, reset, rows[0], rows[1], rows[2], rows[3], rows[4], rows[5],
                         rows[6])  # fmt: skip


@numba.njit(**INNER_JIT)
def _backward_groups(part, parts, run, like, ends, reset, a, h0, h, gh, gh0, ga, gb):
    (steps, batch, width), across, pairs, reverse, resets, summed = run
    size = lanes(pointer(like))
    row = 2 * size if pairs else size
    room = np.zeros((3 * (BLOCK + size) + 2 * across) * row + BLOCK * size, like.dtype)
    factors = pointer(room)
    befores = advance(factors, (BLOCK + size) * row)
    grads = advance(befores, (BLOCK + size) * row)
    states = advance(grads, (BLOCK + size) * row)
    sums, keep = advance(states, across * row), advance(states, 2 * across * row)
    groups, blocks = -(-width // size), -(-steps // BLOCK)
    tiles, limited, ahead = -(-groups // across), len(ends) > 0, BLOCK if reverse else -BLOCK
    begin, end = span(part, parts, batch * tiles)
    for number in range(begin, end):
        s, low = number // tiles, number % tiles * across
        high = min(low + across, groups)
        clear(states, 2 * across * row)
        for block in range(blocks):
            # Blocks begin at the end, so that pieces of sums are those of `recurrence`.
            last = steps - block * BLOCK
            count = min(BLOCK, last)
            t = block * BLOCK if reverse else last - count
            for group in range(low, high):
                first = group * size
                n = min(size, width - first)
                moving = a.of_step != 0 or limited
                rows_of_a = count if moving else 1
                take(factors, pairs, at_row(a, t, s, first), a.of_step, a.of_unit, n, rows_of_a, ahead * a.of_step)
                take(grads, pairs, at_row(gh, t, s, first), gh.of_step, gh.of_unit, n, count, ahead * gh.of_step)
                edge = t + count == steps if reverse else t == 0
                skipped, start = 1 if edge and not reverse else 0, t + 1 if reverse else max(t - 1, 0)
                there = count - 1 if edge else count
                if there:
                    to = advance(befores, skipped * row)
                    take(to, pairs, at_row(h, start, s, first), h.of_step, h.of_unit, n, there, ahead * h.of_step)
                if edge:
                    to = advance(befores, (count - 1) * row if reverse else 0)
                    take(to, pairs, at_row(h0, 0, s, first), 0, h0.of_unit, n, 1, 0)
                if resets:
                    _take_flags(keep, size, at_row(reset, t, s, first), reset.of_step, reset.of_unit, n, count)
                if limited:
                    for c in range(n):
                        own = ends[s * width + first + c] - t
                        for i in range(max(own, 0), count):
                            _set(factors, i, c, pairs, 1.0)
                            _set(grads, i, c, pairs, 0.0)
                            _set(befores, i, c, pairs, 0.0)
                            keep[i * size + c] = 1.0
                        if reverse and 0 < own <= count:
                            to = advance(befores, (own - 1) * row + c)
                            take(to, pairs, at_row(h0, 0, s, first + c), 0, 0, 1, 1, 0)
                place = (group - low) * row
                carried, total = advance(states, place), advance(sums, place)
                if pairs:
                    _back_pairs(factors, moving, befores, grads, keep, resets, carried, total, summed, reverse, count)
                else:
                    _back(factors, moving, befores, grads, keep, resets, carried, total, summed, reverse, count)
                if limited:
                    _clear_beyond(grads, pairs, ends, s * width + first, n, t, count)
                    _clear_beyond(befores, pairs, ends, s * width + first, n, t, count)
                put(at_row(gb, t, s, first), pairs, grads, gb.of_step, gb.of_unit, n, count, ahead * gb.of_step)
                if not summed:
                    put(at_row(ga, t, s, first), pairs, befores, ga.of_step, ga.of_unit, n, count, ahead * ga.of_step)
        for group in range(low, high):
            first, place = group * size, (group - low) * row
            n = min(size, width - first)
            put(at_row(gh0, 0, s, first), pairs, advance(states, place), 0, gh0.of_unit, n, 1, 0)
            if summed:
                put(at_row(ga, 0, s, first), pairs, advance(sums, place), 0, ga.of_unit, n, 1, 0)
    keep_alive(room)


@device
def at_row(rows, t, s, unit):
    """Return the pointer to a number."""
    return advance(pointer(rows.values), rows.first + t * rows.of_step + s * rows.of_sample + unit * rows.of_unit)


@device
def _end(ends, chain, steps):
    return ends[chain] if len(ends) > 0 else steps


# Rows of a block in the first cache. A complex row is one of real parts and one of imaginary ones.


@numba.njit(**INNER_APART)
def take(out, pairs, source, of_step, of_chain, n, count, ahead):
    """Write so many steps of n chains as rows. What lies `ahead` is read soon: the same of the next block."""
    size = lanes(out)
    if of_step == (2 if pairs else 1):  # the reals of a chain follow each other
        reals = 2 * count if pairs else count
        for i in range(0, reals, size):
            _ask(source, i + ahead, of_chain, n)
            take_turned(advance(source, i), of_chain, n, reals - i, advance(out, i * size))
    elif pairs:
        for i in range(count):
            for c in range(n):
                at = i * of_step + c * of_chain
                put_number(out, 2 * i * size + c, source[at])
                put_number(out, (2 * i + 1) * size + c, source[at + 1])
    elif of_chain == 1:
        for i in range(count):
            take_row(source, i * of_step, n, out, i * size)
    else:
        for c in range(n):
            for i in range(count):
                put_number(out, i * size + c, source[i * of_step + c * of_chain])


@numba.njit(**INNER_APART)
def put(target, pairs, rows, of_step, of_chain, n, count, ahead):
    """Write rows to where the steps of n chains are; `ahead` as of `take`."""
    size = lanes(rows)
    if of_step == (2 if pairs else 1):
        reals = 2 * count if pairs else count
        for i in range(0, reals, size):
            _ask(target, i + ahead, of_chain, n)
            put_turned(advance(target, i), of_chain, n, reals - i, advance(rows, i * size))
    elif pairs:
        for i in range(count):
            for c in range(n):
                at = i * of_step + c * of_chain
                put_number(target, at, rows[2 * i * size + c])
                put_number(target, at + 1, rows[(2 * i + 1) * size + c])
    elif of_chain == 1:
        for i in range(count):
            put_row(target, i * of_step, n, rows, i * size)
    else:
        for c in range(n):
            for i in range(count):
                put_number(target, i * of_step + c * of_chain, rows[i * size + c])


@device
def _ask(values, offset, of_chain, n):
    """Ask for a number of each of n chains: a processor foresees few lines that lie as far apart."""
    for c in range(n):
        prefetch(values, offset + c * of_chain)


@numba.njit(**INNER_APART)
def _take_flags(keep, size, source, of_step, of_chain, n, count):
    """Write 0 for a reset and 1 for none."""
    for i in range(count):
        flags, row = advance(source, i * of_step), advance(keep, i * size)
        if of_chain == 1:  # a loop of its own: LLVM makes vectors of it
            for c in range(n):
                row[c] = 0.0 if flags[c] else 1.0
        else:
            for c in range(n):
                row[c] = 0.0 if flags[c * of_chain] else 1.0


@device
def _set(rows, i, c, pairs, value):
    """Set a real number of a row, or the complex one with that real part."""
    size = lanes(rows)
    put_number(rows, (2 * i if pairs else i) * size + c, value)
    if pairs:
        put_number(rows, (2 * i + 1) * size + c, 0.0)


@numba.njit(**INNER_APART)
def _clear_beyond(rows, pairs, ends, chain, n, t, count):
    """Write zeros for the steps beyond the end of each of n chains."""
    for c in range(n):
        for i in range(max(ends[chain + c] - t, 0), count):
            _set(rows, i, c, pairs, 0.0)


# A block of steps, from its first or from its last one.


@numba.njit(**INNER_JIT)
def _run(a, moving, b, keep, resets, states, reverse, count):
    """``h = a * h + b``, in place of b."""
    size, state = lanes(b), load(states, 0)
    for i in range(count):
        at = (count - 1 - i if reverse else i) * size
        term = load(b, at)
        state = fma(load(a, at if moving else 0), state, term)
        if resets:  # not a product with 0: factors may be NaN, too
            state = select_positive(load(keep, at), state, term)
        store(b, at, state)
    store(states, 0, state)


@numba.njit(**INNER_JIT)
def _run_pairs(a, moving, b, keep, resets, states, reverse, count):
    """The same in complex numbers."""
    size, re, im = lanes(b), load(states, 0), load(states, lanes(states))
    for i in range(count):
        place = count - 1 - i if reverse else i
        at = 2 * place * size
        from_a = at if moving else 0
        x, y, old, b_re, b_im = load(a, from_a), load(a, from_a + size), re, load(b, at), load(b, at + size)
        re, im = fma(x, re, b_re) - y * im, fma(x, im, fma(y, old, b_im))
        if resets:
            flag = load(keep, place * size)
            re, im = select_positive(flag, re, b_re), select_positive(flag, im, b_im)
        store(b, at, re)
        store(b, at + size, im)
    store(states, 0, re)
    store(states, size, im)


@numba.njit(**INNER_JIT)
def _back(a, moving, befores, gh, keep, resets, states, sums, summed, reverse, count):
    """``g = gh + carried`` replaces gh; ``carried = a * g``, ``g * before`` replaces `befores`, or is added up."""
    size, carried, piece = lanes(gh), load(states, 0), zeros(gh)
    for i in range(count):
        at = (i if reverse else count - 1 - i) * size
        g = load(gh, at) + carried
        product, carried = g * load(befores, at), load(a, at if moving else 0) * g
        if resets:
            flag = load(keep, at)
            product, carried = select_positive(flag, product, 0.0), select_positive(flag, carried, 0.0)
        store(gh, at, g)
        if summed:
            piece = piece + product
        else:
            store(befores, at, product)
    store(states, 0, carried)
    if summed:
        store(sums, 0, load(sums, 0) + piece)


@numba.njit(**INNER_JIT)
def _back_pairs(a, moving, befores, gh, keep, resets, states, sums, summed, reverse, count):
    """The same in complex numbers, in PyTorch's convention: products with the conjugates of `before` and a."""
    size, c_re, c_im = lanes(gh), load(states, 0), load(states, lanes(states))
    piece_re, piece_im = zeros(gh), zeros(gh)
    for i in range(count):
        place = i if reverse else count - 1 - i
        at = 2 * place * size
        re, im = load(befores, at), load(befores, at + size)
        of_re, of_im = load(gh, at) + c_re, load(gh, at + size) + c_im
        ga_re, ga_im = fma(of_re, re, of_im * im), of_im * re - of_re * im
        from_a = at if moving else 0
        x, y = load(a, from_a), load(a, from_a + size)
        c_re, c_im = fma(x, of_re, y * of_im), x * of_im - y * of_re
        if resets:
            flag = load(keep, place * size)
            ga_re, ga_im = select_positive(flag, ga_re, 0.0), select_positive(flag, ga_im, 0.0)
            c_re, c_im = select_positive(flag, c_re, 0.0), select_positive(flag, c_im, 0.0)
        store(gh, at, of_re)
        store(gh, at + size, of_im)
        if summed:
            piece_re, piece_im = piece_re + ga_re, piece_im + ga_im
        else:
            store(befores, at, ga_re)
            store(befores, at + size, ga_im)
    store(states, 0, c_re)
    store(states, size, c_im)
    if summed:
        store(sums, 0, load(sums, 0) + piece_re)
        store(sums, size, load(sums, size) + piece_im)


# One chain: numbers in double precision, read and written where they lie.


@numba.njit(**INNER_JIT)
def _forward_alone(run, ends, reset, a, b, h0, h):
    """Run the only chain."""
    (steps, _, _), _, pairs, reverse, resets = run
    apart = a.of_step, b.of_step, h.of_step, reset.of_step
    _forward_chain(pointer(a.values), pointer(b.values), pointer(h0.values), pointer(h.values), pointer(reset.values),
                   apart, pairs, reverse, resets, steps, _end(ends, 0, steps))  # fmt: skip


@numba.njit(**INNER_JIT)
def _backward_alone(run, ends, reset, a, h0, h, gh, gh0, ga, gb):
    """Run the only chain back."""
    (steps, _, _), _, pairs, reverse, resets, summed = run
    apart = a.of_step, h.of_step, gh.of_step, ga.of_step, gb.of_step, reset.of_step
    _backward_chain(pointer(a.values), pointer(h.values), pointer(gh.values), pointer(h0.values), pointer(reset.values),
                    pointer(ga.values), pointer(gb.values), pointer(gh0.values), apart,
                    (pairs, reverse, resets, summed), steps, _end(ends, 0, steps))  # fmt: skip


@numba.njit(**INNER_JIT)
def _forward_chain(a, b, h0, h, reset, apart, pairs, reverse, resets, steps, end):
    of_a, of_b, of_h, of_reset = apart
    first, way = (end - 1, -1) if reverse else (0, 1)
    re, im = np.float64(h0[0]), np.float64(h0[1]) if pairs else 0.0
    for i in range(end):
        t = first + way * i
        clears = resets and reset[t * of_reset] != 0
        b_re = np.float64(b[t * of_b])
        if pairs:
            x, y, old = np.float64(a[t * of_a]), np.float64(a[t * of_a + 1]), re
            b_im = np.float64(b[t * of_b + 1])
            re = b_re if clears else fma(x, re, b_re) - y * im
            im = b_im if clears else fma(x, im, fma(y, old, b_im))
            put_number(h, t * of_h + 1, im)
        else:
            re = b_re if clears else fma(np.float64(a[t * of_a]), re, b_re)
        put_number(h, t * of_h, re)
    for t in range(end, steps):
        _zero(h, t * of_h, pairs)


@numba.njit(**INNER_JIT)
def _backward_chain(a, h, gh, h0, reset, ga, gb, gh0, apart, flags, steps, end):
    of_a, of_h, of_gh, of_ga, of_gb, of_reset = apart
    pairs, reverse, resets, summed = flags
    first, way = (end - 1, -1) if reverse else (0, 1)
    c_re, c_im, total_re, total_im = 0.0, 0.0, 0.0, 0.0
    for i in range(end - 1, -1, -1):
        t = first + way * i
        before = advance(h, (t - way) * of_h) if i else h0
        re, g_re = np.float64(before[0]), np.float64(gh[t * of_gh]) + c_re
        if pairs:
            im, g_im = np.float64(before[1]), np.float64(gh[t * of_gh + 1]) + c_im
            x, y = np.float64(a[t * of_a]), np.float64(a[t * of_a + 1])
            ga_re, ga_im = fma(g_re, re, g_im * im), g_im * re - g_re * im
            c_re, c_im = fma(x, g_re, y * g_im), x * g_im - y * g_re
            put_number(gb, t * of_gb + 1, g_im)
        else:
            ga_re, ga_im, c_re = g_re * re, 0.0, np.float64(a[t * of_a]) * g_re
        if resets and reset[t * of_reset]:
            ga_re, ga_im, c_re, c_im = 0.0, 0.0, 0.0, 0.0
        put_number(gb, t * of_gb, g_re)
        if summed:
            total_re, total_im = total_re + ga_re, total_im + ga_im
        else:
            put_number(ga, t * of_ga, ga_re)
            if pairs:
                put_number(ga, t * of_ga + 1, ga_im)
    put_number(gh0, 0, c_re)
    if pairs:
        put_number(gh0, 1, c_im)
    if summed:
        put_number(ga, 0, total_re)
        if pairs:
            put_number(ga, 1, total_im)
    for t in range(end, steps):
        _zero(gb, t * of_gb, pairs)
        if not summed:
            _zero(ga, t * of_ga, pairs)


@device
def _zero(target, at, pairs):
    put_number(target, at, 0.0)
    if pairs:
        put_number(target, at + 1, 0.0)
