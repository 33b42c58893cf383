"""Exponentially weighted means of values with gaps on the host, one pass over memory.

The weight of all values before one, relative to its own, depends on the gaps alone. So with ``k = 1 / (weight + 1)`` at
a value x and 0 in a gap, a mean is the linear recurrence ``m' = (1 - k) m + k x``, whose factors do not wait for m. A
group of chains goes through a block of steps in the first cache, one in each lane. All is in float64.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.chains import BLOCK, at_row, put, strided, take
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    absolute,
    fma,
    keep_alive,
    lanes,
    load,
    pointer,
    put_number,
    select_positive,
    store,
    zeros,
)
from sparsebp.kernels.host.engine.threads import parallel, team

LANES = VECTOR_BYTES // 8


def run(x: Array, alpha: float, adjust: bool, ignore_na: bool, least: int, y: Array) -> None:
    """Write the means of x to y, both (T, B, W) with any strides: B · W chains.

    The options are those of `sparsebp.ewm`; before `least` values there is NaN.
    """
    decay = 1 - alpha
    form = decay, 1.0 if ignore_na else decay, 0.0 if adjust else 1 / alpha, max(least, 1) - 0.5
    groups = x.shape[1] * -(-x.shape[2] // LANES)
    parts = max(1, min(parts_for(12 * x.size), groups))
    _run(team(parts), parts, x.shape, form, strided(x), strided(y))


# The functions below are compiled. `form`: by what the weight of older values shrinks at the next value, and at each
# step of a gap; the weight of all that is behind a value, or 0 for the sum of theirs; and the number of values from
# which on there is a mean, less a half.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _run(part, parts, sizes, form, x, y):
    steps, batch, width = sizes
    room = np.zeros((BLOCK + LANES + 4) * LANES)
    rows, across = pointer(room[4 * LANES :]), -(-width // LANES)
    begin, end = span(part, parts, batch * across)
    for group in range(begin, end):
        s, first = group // across, group % across * LANES
        n = min(LANES, width - first)
        if batch * width == 1:
            _run_alone(form, at_row(x, 0, 0, 0), x.of_step, at_row(y, 0, 0, 0), y.of_step, steps)
            continue
        room[: 4 * LANES] = 0
        for t in range(0, steps, BLOCK):
            count = min(BLOCK, steps - t)
            take(rows, False, at_row(x, t, s, first), x.of_step, x.of_unit, n, count, BLOCK * x.of_step)
            _run_block(form, pointer(room), rows, count)
            put(at_row(y, t, s, first), False, rows, y.of_step, y.of_unit, n, count, BLOCK * y.of_step)
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _run_block(form, states, rows, count):
    """Run a block of steps in place."""
    decay, in_gap, behind, least = form
    size = lanes(rows)
    mean, weight, shrunk, values = load(states, 0), load(states, size), load(states, 2 * size), load(states, 3 * size)
    same = zeros(rows) + behind
    for i in range(count):
        x = load(rows, i * size)
        there = absolute(x) + 1.0  # positive, but for NaN
        total = fma(shrunk, weight, 1.0)
        share = select_positive(there, 1.0 / total, 0.0)
        mean = fma(1.0 - share, mean, select_positive(there, share * x, 0.0))
        weight = select_positive(there, same if behind > 0 else total, weight)
        shrunk = select_positive(there, decay, shrunk * in_gap)
        values = values + select_positive(there, 1.0, 0.0)
        store(rows, i * size, select_positive(values - least, mean, np.nan))
    store(states, 0, mean)
    store(states, size, weight)
    store(states, 2 * size, shrunk)
    store(states, 3 * size, values)


@numba.njit(**INNER_JIT)
def _run_alone(form, x, of_x, y, of_y, steps):
    """Run the only chain."""
    decay, in_gap, behind, least = form
    mean, weight, shrunk, values = 0.0, 0.0, 0.0, 0
    for t in range(steps):
        u = np.float64(x[t * of_x])
        there = not np.isnan(u)
        total = fma(shrunk, weight, 1.0)
        share = 1.0 / total if there else 0.0
        mean = fma(1.0 - share, mean, share * u if there else 0.0)
        weight = (behind if behind > 0 else total) if there else weight
        shrunk = decay if there else shrunk * in_gap
        values += there
        put_number(y, t * of_y, mean if values > least else np.nan)
