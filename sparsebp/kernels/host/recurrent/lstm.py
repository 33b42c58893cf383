"""Recurrent kernels of the LSTM on the host; see `common` for the layout, `back` for the scan.

In row form a gradient (gh | gc) at the state (h, c) of a step first becomes one at c alone,
``d = gc + gh · o (1 - t²)`` with t = tanh(c). From there it goes to c[t-1] as ``d · f``, and to h[t-1] as
``Σ (d · factor) @ W`` over i, f and g and ``(gh · t o (1 - o)) @ W_o``: two of the four blocks of the Jacobian are
diagonal, and of the dense ones, the one from h is the one from c scaled, but for W_o. So a row of a chunk's map takes
two products of H × H, and no Jacobian of 2H × 2H is formed.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.dense.packed import product_of
from sparsebp.kernels.host.engine import functions
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    copy,
    device,
    fma,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    zeros,
)
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.recurrent import cells
from sparsebp.kernels.host.recurrent.back import (
    back_propagate,
    map_rows,
    reduce_all,
    reduce_part,
    write_row,
)
from sparsebp.kernels.host.recurrent.backward import back_part
from sparsebp.kernels.host.recurrent.common import (
    SAMPLES,
    blocks_of,
    launch,
    multiply_add,
)
from sparsebp.kernels.host.recurrent.forward import forward_part, pack, parts_of, weights_of
from sparsebp.kernels.host.recurrent.wide import LEAST, wide_back, wide_blocks_of, wide_forward, wide_weights
from sparsebp.kernels.operands import WeightSums

GATES = 4
PLANES = 9
"""Diagonals that a materialised Jacobian consists of: four gates to h, three to c, and c to both."""


@device
def _cell(extra: None, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    seen, value, enter, keep, new, show = cells.lstm(
        load(z, j), load(z, apart + j), load(z, 2 * apart + j), load(z, 3 * apart + j), load(state, width + j)
    )
    store(state, j, seen)
    store(state, width + j, value)
    n = hidden - j
    store_up_to(kept[0], at + j, seen, n)
    store_up_to(kept[1], at + j, value, n)
    saved = advance(kept[2], GATES * at + j)
    store_up_to(saved, 0, enter, n)
    store_up_to(saved, hidden, keep, n)
    store_up_to(saved, 2 * hidden, new, n)
    store_up_to(saved, 3 * hidden, show, n)


@numba.njit(**INNER_JIT)
def run_part(
    part: int, parts: int, x: Any, features: int, w: Any, h0: Any, c0: Any, h: Any, c: Any, gates: Any
) -> None:
    """Run a part's samples forward, see `forward_part`."""
    initial, kept = (pointer(h0), pointer(c0)), (pointer(h), pointer(c), pointer(gates))
    forward_part(_cell, GATES, GATES, None, part, parts, h.shape, x, features, w, initial, kept)


@numba.njit(**JIT)
def _forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, c0: Any, h: Any, c: Any,
    gates: Any,
) -> None:  # fmt: skip
    w = pack(GATES, GATES, w_ih, b_ih, b_hh, w_hh)
    in_parts(run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, c0, h, c, gates))


@numba.njit(**INNER_JIT)
def _forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, c0: Any, h: Any, c: Any,
    gates: Any,
) -> None:  # fmt: skip
    initial, kept = (pointer(h0), pointer(c0)), (pointer(h), pointer(c), pointer(gates))
    wide_forward(_cell, GATES, GATES, None, block, blocks, product, h.shape, x, w_ih, w_hh, bias, initial, kept)


@numba.njit(**JIT)
def _forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_forward_wide_part, team, parts, args)


@device
def _factors(saved: Any, previous: Any, at: int, hidden: int, j: int) -> Any:
    """Return the diagonals of a step for hidden units j ….

    Those from c to the pre-activations of i, f and g, the one from h to that of o, the one from h to c, and the one
    from c to the c before. saved: c and the gates; previous: c before the step.
    """
    gate, n = advance(saved[1], GATES * at + j), hidden - j
    enter, keep = load_up_to(gate, 0, n), load_up_to(gate, hidden, n)
    new, show = load_up_to(gate, 2 * hidden, n), load_up_to(gate, 3 * hidden, n)
    seen = functions.tanh(load_up_to(saved[0], at + j, n))
    to_i = new * enter * (1.0 - enter)
    to_f = load_up_to(previous, j, n) * keep * (1.0 - keep)
    to_g = enter * fma(new, -1.0 * new, 1.0)
    to_o = seen * show * (1.0 - show)
    to_c = show * fma(seen, -1.0 * seen, 1.0)
    return to_i, to_f, to_g, to_o, to_c, keep


@device
def _step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    to_i, to_f, to_g, to_o, to_c, keep = _factors(saved, previous, at, hidden, j)
    d = fma(g, to_c, load(beside, 0))
    store(out, 0, to_i * d)
    store(out, apart, to_f * d)
    store(out, 2 * apart, to_g * d)
    store(out, 3 * apart, to_o * g)
    store(beside, 0, d * keep)
    return zeros(out)


@numba.njit(**INNER_JIT)
def back_part_of(
    part: int, groups: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
    x: Any, before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    saved = pointer(c), pointer(gates)
    back_part(
        _step_back, GATES, GATES, 2, saved, pointer(c0), part, groups, c.shape, w, gy, first_chunk, bounds, ga, x,
        before, sums,
    )  # fmt: skip


@numba.njit(**JIT)
def _backward(team: int, parts: int, *args: Any) -> None:
    in_parts(back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _backward_wide_part(
    task: int, blocks: int, product: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any,
    ga: Any,
) -> None:  # fmt: skip
    saved, shape = (pointer(c), pointer(gates)), c.shape
    wide_back(
        _step_back, GATES, GATES, saved, pointer(c0), task, blocks, product, shape, w, gy, first_chunk, bounds, ga
    )


@numba.njit(**JIT)
def _backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_backward_wide_part, team, parts, args)


@device
def _step_map(
    saved: Any, previous: Any, at: int, hidden: int, w: Any, width: int, rows: Any, out: Any, room: Any
) -> None:
    """Multiply by the blocks from c and by W_o, see the module. 4·(2H + 1)·H² FLOP, and 6·H² to form the blocks."""
    count = lanes(w)
    blocks = room  # (2H, padded): Σ diag(factor) @ W over i, f and g; below it W_o
    fed = advance(blocks, 2 * hidden * width)  # of four rows: (d | gh · t o (1 - o))
    factors = advance(fed, 2 * SAMPLES * width)
    for j in range(0, width, count):
        to_i, to_f, to_g, to_o, to_c, keep = _factors(saved, previous, at, hidden, j)
        store(factors, j, to_i)
        store(factors, width + j, to_f)
        store(factors, 2 * width + j, to_g)
        store(factors, 3 * width + j, to_o)
        store(factors, 4 * width + j, to_c)
        store(factors, 5 * width + j, keep)
    gate = hidden * width
    for k in range(hidden):
        to_i, to_f, to_g = broadcast(factors, k), broadcast(factors, width + k), broadcast(factors, 2 * width + k)
        for i in range(k * width, (k + 1) * width, count):
            value = to_i * load(w, i)
            value = fma(to_f, load(w, gate + i), value)
            store(blocks, i, fma(to_g, load(w, 2 * gate + i), value))
            store(blocks, gate + i, load(w, 3 * gate + i))
    for first in range(0, map_rows(2 * hidden), SAMPLES):
        for s in range(SAMPLES):
            for j in range(0, width, count):
                row, place = (first + s) * 2 * width + j, s * 2 * width + j
                gh = load(rows, row)
                d = fma(gh, load(factors, 4 * width + j), load(rows, row + width))
                store(fed, place, d)
                store(fed, place + width, gh * load(factors, 3 * width + j))
                store(out, row, zeros(out))
                store(out, row + width, d * load(factors, 5 * width + j))
        target = advance(out, first * 2 * width)
        multiply_add(fed, 2 * width, 2, width, hidden, blocks, width, width, target, 2 * width)


@numba.njit(**INNER_JIT)
def _reduce_part(
    task: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any
) -> None:
    saved = pointer(c), pointer(gates)
    reduce_part(_step_map, 2, saved, pointer(c0), task, c.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_reduce_part, team, parts, args)


@device
def _write_diagonals(t: int, b: int, c: Any, c0: Any, gates: Any, room: Any, out: Any) -> None:
    """Write one sample's diagonals of a step to its places in out (PLANES, H, B); room holds as many rows, padded."""
    _, batch, hidden = c.shape
    rows = aligned_pointer(room)
    count = lanes(rows)
    width = (hidden + count - 1) // count * count
    at = (t * batch + b) * hidden
    previous = advance(pointer(c), at - batch * hidden) if t > 0 else advance(pointer(c0), b * hidden)
    for j in range(0, width, count):
        to_i, to_f, to_g, to_o, to_c, keep = _factors((pointer(c), pointer(gates)), previous, at, hidden, j)
        store(rows, j, to_c * to_i)
        store(rows, width + j, to_c * to_f)
        store(rows, 2 * width + j, to_c * to_g)
        store(rows, 3 * width + j, to_o)
        store(rows, 4 * width + j, to_i)
        store(rows, 5 * width + j, to_f)
        store(rows, 6 * width + j, to_g)
        store(rows, 7 * width + j, to_c * keep)
        store(rows, 8 * width + j, keep)
    for plane in range(PLANES):
        for j in range(hidden):
            out[plane, j, b] = rows[plane * width + j]


@device
def _write_jacobian(t: int, factors: Any, w_hh: Any, out: Any) -> None:
    """Write one step's values: a dense row of h to h and to c for each h before, two diagonal entries for each c."""
    _, hidden, batch = factors.shape
    plane = hidden * batch
    weights, source = pointer(w_hh), pointer(factors)
    target = advance(pointer(out), t * 2 * (hidden + 1) * plane)
    for i in range(hidden):
        write_row(GATES, source, weights, i, hidden, batch, target)
        write_row(GATES - 1, advance(source, GATES * plane), weights, i, hidden, batch, advance(target, plane))
        target = advance(target, 2 * plane)
    for i in range(hidden):
        copy(target, advance(source, (PLANES - 2) * plane + i * batch), batch)
        copy(advance(target, batch), advance(source, (PLANES - 1) * plane + i * batch), batch)
        target = advance(target, 2 * batch)


@numba.njit(**INNER_JIT)
def _jacobians_part(t: int, c: Any, c0: Any, gates: Any, w_hh: Any, out: Any) -> None:
    _, batch, hidden = c.shape
    factors = np.empty((PLANES, hidden, batch), c.dtype)
    room = np.empty(PLANES * (hidden + VECTOR_BYTES) + VECTOR_BYTES, c.dtype)
    for b in range(batch):
        _write_diagonals(t, b, c, c0, gates, room, factors)
    _write_jacobian(t, factors, w_hh, out)


@numba.njit(**JIT)
def _jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_jacobians_part, team, parts, args)


class LstmKernels:
    """The kernels ``lstm_*`` of `sparsebp.kernels.api.Kernels` in Numba."""

    def lstm_forward(
        self,
        x: np.ndarray,
        w_hh: np.ndarray,
        h0: np.ndarray,
        c0: np.ndarray,
        h: np.ndarray,
        c: np.ndarray,
        gates: np.ndarray,
        w_ih: np.ndarray | None,
        b_ih: np.ndarray | None,
        b_hh: np.ndarray | None,
    ) -> None:
        """8·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        work = 2 * GATES * h.size * hidden
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(GATES, GATES, w_ih, b_ih, b_hh, w_hh)
            launch(_forward_wide, blocks, work, blocks, product_of(h.dtype), x, *weights, h0, c0, h, c, gates)
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _forward(*parts_of(blocks_of(batch), work), x, *weights, w_hh, h0, c0, h, c, gates)

    def lstm_backward(
        self,
        c: np.ndarray,
        c0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        grad_c_n: np.ndarray | None,
        ga: np.ndarray | None,
        gh0: np.ndarray,
        gc0: np.ndarray,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """Parallel over blocks of samples, and over chunks."""
        last, initial = (grad_h_n, grad_c_n), (gh0, gc0)
        back_propagate(
            _backward, _backward_wide, _reduce, GATES, (c, c0, gates), w_hh, gy, last, ga, initial, chunks, sums
        )

    def lstm_maps(
        self,
        c: np.ndarray,
        c0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        maps: np.ndarray,
    ) -> None:
        """Parallel over samples and chunks."""
        reduce_all(_reduce, (c, c0, gates), w_hh, gy, maps)

    def lstm_jacobians(
        self, c: np.ndarray, c0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, out: np.ndarray
    ) -> None:
        """14·T·H²·B FLOP, 2·T·H·(H + 1)·B numbers written."""
        if c.shape[1]:
            launch(_jacobians, len(c), 7 * out.size, c, c0, gates, w_hh, out)
