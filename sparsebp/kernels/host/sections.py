"""Cascades of second-order sections on the host, and their gradients: a step of a section is a real 2 × 2 matrix.

In the transposed direct form II, as in SciPy, a section with x and y at a step and the state (z, w) has

    y = b0 x + z,   z' = b1 x - a1 y + w,   w' = b2 x - a2 y.

A group of chains, one in each lane, goes through a block of steps in the first cache, one section after the other; of
a single chain, the lanes are its sections. The way back runs each block forward again from the states before it, which
the forward has kept. All is in float64.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.host.chains import BLOCK, at_row, put, strided, take
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT, parts_for, span
from sparsebp.kernels.host.engine.shuffles import shift_in
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    copy,
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
"""Chains of a group."""


def run(x: Array, sos: Array, states: Array, y: Array) -> None:
    """Run all sections over x and write y, both (T, B, W) with any strides: B · W chains.

    sos (S, 6) has b0, b1, b2, 1, a1 and a2. states (groups, blocks + 1, S, 2, LANES), float64, has z and w of all
    sections of a group before every block of `BLOCK` steps, and after the last one; the first are given. Groups of
    `LANES` chains are of one of the B each.
    """
    parts = max(1, min(parts_for(10 * len(sos) * x.size), len(states)))
    _forward(team(parts), parts, x.shape, sos, states, strided(x), strided(y))


def run_back(
    gy: Array, x: Array, sos: Array, states: Array, adjoint: Array, gx: Array, sums: Array
) -> None:  # fmt: skip
    """Write gx, and to `sums` (groups, S, 5, LANES), zeros, every chain's gradients at b0, b1, b2, a1 and a2.

    adjoint (groups, S, 2, LANES): the gradient at the last states, then that at the first ones.
    """
    parts = max(1, min(parts_for(25 * len(sos) * x.size), len(states)))
    _backward(team(parts), parts, x.shape, sos, states, adjoint, strided(gy), strided(x), strided(gx), sums)


# The functions below are compiled: their arguments are rows, pointers and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**JIT)
def _forward(part, parts, sizes, sos, states, x, y):
    steps, batch, width = sizes
    room, of_one = np.zeros((BLOCK + LANES) * LANES), np.zeros((BLOCK + 4 * LANES + 6) * LANES)
    tables, rows, blocks, own = pointer(of_one), pointer(room), -(-steps // BLOCK), 2 * len(sos) * LANES
    for i in range(2 * LANES):  # of `_run_alone`: the sections that have begun after i steps
        for k in range(i // 2 + 1):
            tables[(6 + i) * LANES + k] = 1.0
    across = -(-width // LANES)
    begin, end = span(part, parts, batch * across)
    for group in range(begin, end):
        s, first = group // across, group % across * LANES
        n, state = min(LANES, width - first), advance(pointer(states), group * (blocks + 1) * own)
        for block in range(blocks):
            t = block * BLOCK
            count = min(BLOCK, steps - t)
            copy(advance(state, own), state, own)
            state = advance(state, own)
            source, target = at_row(x, t, s, first), at_row(y, t, s, first)
            if n == 1 and len(sos) <= LANES:
                _run_alone(pointer(sos), state, len(sos), source, x.of_step, target, y.of_step, tables, count)
                continue
            take(rows, False, source, x.of_step, x.of_unit, n, count, BLOCK * x.of_step)
            for k in range(len(sos)):
                _run(advance(pointer(sos), 6 * k), advance(state, 2 * k * LANES), rows, rows, count)
            put(target, False, rows, y.of_step, y.of_unit, n, count, BLOCK * y.of_step)
    keep_alive(room)
    keep_alive(of_one)


# With u at a step, z' = a1 z + a2 z_before + (c1 u + c2 u_before), where a1 and a2 have the other sign: from z to z'
# there is one product, and from z_before two in two steps.


@numba.njit(**INNER_JIT)
def _run(c, state, x, y, count):
    """Run a section over a block."""
    size, z, w, before = lanes(state), load(state, 0), load(state, lanes(state)), zeros(state)
    b0, a1, a2 = c[0], -c[4], -c[5]
    c1, c2 = c[1] + a1 * b0, c[2] + a2 * b0
    for i in range(count):
        u = load(x, i * size)
        added = fma(c1, u, w)
        store(y, i * size, fma(b0, u, z))
        z, before, w = fma(a1, z, fma(a2, before, added)), z, c2 * u
    store(state, 0, z)
    store(state, size, fma(a2, before, w))


@numba.njit(**INNER_JIT)
def _run_alone(c, state, order, x, of_x, y, of_y, tables, count):
    """Run up to `LANES` sections of a single chain: lane k has section k, 2k steps behind the first."""
    size, lag = lanes(state), 2 * (order - 1)
    stairs, outputs = advance(tables, 6 * size), advance(tables, (6 + 2 * LANES) * size)
    for k in range(order):
        b0, a1, a2 = c[6 * k], -c[6 * k + 4], -c[6 * k + 5]
        tables[k], tables[size + k], tables[2 * size + k] = b0, a1, a2
        tables[3 * size + k], tables[4 * size + k] = c[6 * k + 1] + a1 * b0, c[6 * k + 2] + a2 * b0
        tables[5 * size + k], outputs[k] = state[2 * k * size], state[(2 * k + 1) * size]
    b0, a1, a2 = load(tables, 0), load(tables, size), load(tables, 2 * size)
    c1, c2, z, w = load(tables, 3 * size), load(tables, 4 * size), load(tables, 5 * size), load(outputs, 0)
    before = last = out = zeros(state)
    for i in range(count + lag):
        u = shift_in(np.float64(x[i * of_x]) if i < count else 0.0, last)
        last, out = out, fma(b0, u, z)
        store(outputs, i * size, out)
        next_z, next_before, next_w = fma(a1, z, fma(a2, before, fma(c1, u, w))), z, c2 * u
        if i < lag or i >= count:  # lanes that have not begun, or are done, keep their states
            running = load(stairs, min(i, lag) * size)
            if i >= count:
                running = running - load(stairs, (i - count) * size)
            next_z, next_w = select_positive(running, next_z, z), select_positive(running, next_w, w)
            next_before = select_positive(running, next_before, before)
        z, before, w = next_z, next_before, next_w
    for i in range(count):
        put_number(y, i * of_y, outputs[(i + lag) * size + order - 1])
    store(tables, 0, z)
    store(tables, size, fma(a2, before, w))
    for k in range(order):
        state[2 * k * size], state[(2 * k + 1) * size] = tables[k], tables[size + k]


@parallel(**JIT)
def _backward(part, parts, sizes, sos, states, adjoint, gy, x, gx, sums):
    steps, batch, width = sizes
    order, blocks, own = len(sos), -(-steps // BLOCK), 2 * len(sos) * LANES
    size = (BLOCK + LANES) * LANES
    room = np.zeros((order + 2) * size + own)
    inputs, grads = pointer(room), advance(pointer(room), (order + 1) * size)
    again = advance(grads, size)
    across = -(-width // LANES)
    begin, end = span(part, parts, batch * across)
    for group in range(begin, end):
        s, first = group // across, group % across * LANES
        n, before = min(LANES, width - first), advance(pointer(states), group * (blocks + 1) * own)
        back, total = advance(pointer(adjoint), group * own), advance(pointer(sums), group * 5 * order * LANES)
        for block in range(blocks - 1, -1, -1):
            t = block * BLOCK
            count = min(BLOCK, steps - t)
            copy(again, advance(before, block * own), own)
            take(inputs, False, at_row(x, t, s, first), x.of_step, x.of_unit, n, count, -BLOCK * x.of_step)
            take(grads, False, at_row(gy, t, s, first), gy.of_step, gy.of_unit, n, count, -BLOCK * gy.of_step)
            for k in range(order):
                u = advance(inputs, k * size)
                _run(advance(pointer(sos), 6 * k), advance(again, 2 * k * LANES), u, advance(u, size), count)
            for k in range(order - 1, -1, -1):
                u, adjoints = advance(inputs, k * size), advance(back, 2 * k * LANES)
                to = advance(total, 5 * k * LANES)
                _back(advance(pointer(sos), 6 * k), adjoints, u, advance(u, size), grads, to, count)
            put(at_row(gx, t, s, first), False, grads, gx.of_step, gx.of_unit, n, count, -BLOCK * gx.of_step)
    keep_alive(room)


@numba.njit(**INNER_JIT)
def _back(c, adjoint, x, y, grads, sums, count):
    """Run a section back over a block, the gradients at y replaced by those at x. p and q: those at z' and w'."""
    size, p, q = lanes(x), load(adjoint, 0), load(adjoint, lanes(x))
    b0, b1, b2, a1, a2 = c[0], c[1], c[2], -c[4], -c[5]
    g0 = g1 = g2 = g3 = g4 = zeros(x)
    for i in range(count - 1, -1, -1):
        u, out = load(x, i * size), load(y, i * size)
        g = fma(a1, p, fma(a2, q, load(grads, i * size)))
        store(grads, i * size, fma(b0, g, fma(b1, p, b2 * q)))
        g0, g1, g2, g3, g4 = fma(g, u, g0), fma(p, u, g1), fma(q, u, g2), fma(p, out, g3), fma(q, out, g4)
        p, q = g, p
    store(adjoint, 0, p)
    store(adjoint, size, q)
    store(sums, 0, load(sums, 0) + g0)
    store(sums, size, load(sums, size) + g1)
    store(sums, 2 * size, load(sums, 2 * size) + g2)
    store(sums, 3 * size, load(sums, 3 * size) - g3)
    store(sums, 4 * size, load(sums, 4 * size) - g4)
