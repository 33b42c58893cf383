"""The kernels of RNN, GRU and LSTM on the host: each cell's equations, in the frames of `forward` and `backward`.

The LSTM. In row form a gradient (gh | gc) at the state (h, c) of a step first becomes one at c alone, ``d = gc + gh · o
(1 - t²)`` with t = tanh(c). From there it goes to c[t-1] as ``d · f``, and to h[t-1] as ``Σ (d · factor) @ W`` over i,
f and g and ``(gh · t o (1 - o)) @ W_o``: two of the four blocks of the Jacobian are diagonal, and of the dense ones,
the one from h is the one from c scaled, but for W_o. So a row of a chunk's map takes two products of H × H, and no
Jacobian of 2H × 2H is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np

from sparsebp.core import threads
from sparsebp.core.check import Array, Nonlinearity
from sparsebp.kernels.host import forward as host_forward
from sparsebp.kernels.host.backward import (
    LEAST,
    back_part,
    back_propagate,
    map_rows,
    multiply_map,
    reduce_all,
    reduce_part,
    wide_back,
    wide_blocks_of,
    wide_forward,
    wide_weights,
    write_jacobian,
    write_row,
)
from sparsebp.kernels.host.dense import product_of
from sparsebp.kernels.host.engine import math
from sparsebp.kernels.host.engine.compile import INNER_JIT, JIT
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
    load_n,
    load_up_to,
    pointer,
    store,
    store_n,
    store_up_to,
    where_within,
    zeros,
)
from sparsebp.kernels.host.engine.threads import ALONE, in_parts, team
from sparsebp.kernels.host.forward import (
    SAMPLES,
    WORTH_THREADS,
    blocks_of,
    forward_part,
    item_of,
    launch,
    multiply_add,
    pack,
    pack_rows,
    padded_width,
    part_at,
    parts_of,
    set_bias,
    weights_of,
)
from sparsebp.kernels.operands import WeightSums

# Recurrent kernels of the GRU (BPPSA Eq. 10 and 11) on the host; see `forward` for the layout, `backward` for the scan.


@device
def _gru_cell(extra: None, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    inner = load(z, part_at(3, 3, apart, item_of(z)) + j)
    v, reset, update, new = host_forward.gru(
        load(z, j), load(z, apart + j), load(z, 2 * apart + j), inner, load(state, j)
    )
    store(state, j, v)
    n = hidden - j
    store_up_to(kept[0], at + j, v, n)
    saved = advance(kept[1], 4 * at + j)
    store_up_to(saved, 0, reset, n)
    store_up_to(saved, hidden, update, n)
    store_up_to(saved, 2 * hidden, new, n)
    store_up_to(saved, 3 * hidden, inner, n)


@numba.njit(**INNER_JIT)
def gru_run_part(part: int, parts: int, x: Any, features: int, w: Any, h0: Any, h: Any, gates: Any) -> None:
    """Run a part's samples forward, see `forward_part`."""
    kept = (pointer(h), pointer(gates))
    forward_part(_gru_cell, 3, 4, None, part, parts, h.shape, x, features, w, (pointer(h0),), kept)


@numba.njit(**JIT)
def _gru_forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, b_hn: Any, h0: Any, h: Any, gates: Any
) -> None:
    w = pack(3, 4, w_ih, b_ih, b_hh, w_hh)
    set_bias(w, w_ih.shape[1], 3, 3, b_hn)
    in_parts(gru_run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, h, gates))


@numba.njit(**INNER_JIT)
def _gru_forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, h: Any, gates: Any
) -> None:
    kept = (pointer(h), pointer(gates))
    wide_forward(_gru_cell, 3, 4, None, block, blocks, product, h.shape, x, w_ih, w_hh, bias, (pointer(h0),), kept)


@numba.njit(**JIT)
def _gru_forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_gru_forward_wide_part, team, parts, args)


@device
def _gru_factors(saved: Any, previous: Any, at: int, hidden: int, j: int) -> Any:
    """Return the diagonals of Eq. 11 for hidden units j …: at N, R, Z and M, and the direct one, z.

    In the paper's terms N: j6·j7, R: j2·j3·j6·j7, Z: j9·j10, M: j5·j6·j7, with j2 = r(1 - r), j3 = M, j5 = r,
    j6 = 1 - n², j7 = 1 - z, j9 = z(1 - z), j10 = h[t-1] - n.
    """
    gate, n = advance(saved[1], 4 * at + j), hidden - j
    reset, update = load_up_to(gate, 0, n), load_up_to(gate, hidden, n)
    new, inner = load_up_to(gate, 2 * hidden, n), load_up_to(gate, 3 * hidden, n)
    keep = 1.0 - update
    to_n = keep * fma(new, -1.0 * new, 1.0)
    to_m = to_n * reset
    to_r = to_m * (1.0 - reset) * inner
    to_z = update * keep * (load_up_to(previous, j, n) - new)
    return to_n, to_r, to_z, to_m, update


@device
def _gru_step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    to_n, to_r, to_z, to_m, direct = _gru_factors(saved, previous, at, hidden, j)
    store(out, 0, to_n * g)
    store(out, apart, to_r * g)
    store(out, 2 * apart, to_z * g)
    store(out, part_at(3, 3, apart, item_of(out)), to_m * g)
    return direct * g


@numba.njit(**INNER_JIT)
def gru_back_part_of(
    part: int, groups: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
    x: Any, before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    saved = pointer(h), pointer(gates)
    back_part(
        _gru_step_back,
        3,
        4,
        1,
        saved,
        pointer(h0),
        part,
        groups,
        h.shape,
        w,
        gy,
        first_chunk,
        bounds,
        ga,
        x,
        before,
        sums,
    )


@numba.njit(**JIT)
def _gru_backward(team: int, parts: int, *args: Any) -> None:
    in_parts(gru_back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _gru_backward_wide_part(
    task: int, blocks: int, product: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any,
    ga: Any,
) -> None:  # fmt: skip
    saved = pointer(h), pointer(gates)
    wide_back(_gru_step_back, 3, 4, saved, pointer(h0), task, blocks, product, h.shape, w, gy, first_chunk, bounds, ga)


@numba.njit(**JIT)
def _gru_backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_gru_backward_wide_part, team, parts, args)


@device
def _gru_step_map(
    saved: Any, previous: Any, at: int, hidden: int, w: Any, width: int, rows: Any, out: Any, room: Any
) -> None:
    """Multiply by the row form of Eq. 11, ``Σ diag(factor) @ W + diag(z)``, formed with 6·H² FLOP.

    The factored form would cost three products a row of the map instead of one; forming it once serves H + 1 rows.
    """
    count, jacobian, factors = lanes(w), room, advance(room, hidden * width)
    for j in range(0, width, count):
        _, to_r, to_z, to_m, direct = _gru_factors(saved, previous, at, hidden, j)
        store(factors, j, to_r)
        store(factors, width + j, to_z)
        store(factors, 2 * width + j, to_m)
        store(factors, 3 * width + j, direct)
    gate = hidden * width
    for k in range(hidden):
        to_r, to_z, to_m = broadcast(factors, k), broadcast(factors, width + k), broadcast(factors, 2 * width + k)
        for j in range(0, width, count):
            i = k * width + j
            value = to_r * load(w, i)
            value = fma(to_z, load(w, gate + i), value)
            store(jacobian, i, fma(to_m, load(w, 2 * gate + i), value))
        i = k * width + k
        store_n(jacobian, i, load_n(jacobian, i, 1) + broadcast(factors, 3 * width + k), 1)
    multiply_map(rows, jacobian, hidden, width, out)


@numba.njit(**INNER_JIT)
def _gru_reduce_part(
    task: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any
) -> None:
    saved = pointer(h), pointer(gates)
    reduce_part(_gru_step_map, 1, saved, pointer(h0), task, h.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _gru_reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_gru_reduce_part, team, parts, args)


@numba.njit(**INNER_JIT)
def _gru_jacobians_part(t: int, h: Any, h0: Any, gates: Any, w_hh: Any, out: Any) -> None:
    _, batch, hidden = h.shape
    factors = np.empty((4, hidden, batch), h.dtype)
    for b in range(batch):
        for j in range(hidden):
            previous = h[t - 1, b, j] if t > 0 else h0[b, j]
            reset, update = gates[t, b, j], gates[t, b, hidden + j]
            new, inner = gates[t, b, 2 * hidden + j], gates[t, b, 3 * hidden + j]
            to_m = (1.0 - update) * (1.0 - new * new) * reset
            factors[0, j, b] = to_m * (1.0 - reset) * inner
            factors[1, j, b] = update * (1.0 - update) * (previous - new)
            factors[2, j, b] = to_m
            factors[3, j, b] = update
    write_jacobian(3, factors, w_hh, t, out)


@numba.njit(**JIT)
def _gru_jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_gru_jacobians_part, team, parts, args)


class GruKernels:
    """The kernels ``gru_*`` of `sparsebp.kernels.spec.Kernels` in Numba."""

    def gru_forward(
        self, x: np.ndarray, w_hh: np.ndarray, b_hn: np.ndarray, h0: np.ndarray, h: np.ndarray, gates: np.ndarray,
        w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None,
    ) -> None:  # fmt: skip
        """6·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(3, 4, w_ih, b_ih, b_hh, w_hh)
            weights[2][3 * (len(weights[2]) // 4) :][:hidden] = b_hn
            launch(
                _gru_forward_wide, blocks, 6 * h.size * hidden, blocks, product_of(h.dtype), x, *weights, h0, h, gates
            )
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _gru_forward(*parts_of(blocks_of(batch), 6 * h.size * hidden), x, *weights, w_hh, b_hn, h0, h, gates)

    def gru_backward(
        self, h: np.ndarray, h0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None,
        grad_h_n: np.ndarray | None, ga: np.ndarray | None, gh0: np.ndarray, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """Parallel over blocks of samples, and over chunks."""
        saved = (h, h0, gates)
        back_propagate(
            _gru_backward, _gru_backward_wide, _gru_reduce, 4, saved, w_hh, gy, (grad_h_n,), ga, (gh0,), chunks, sums
        )

    def gru_maps(
        self, h: np.ndarray, h0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None,
        maps: np.ndarray,
    ) -> None:  # fmt: skip
        """Parallel over samples and chunks."""
        reduce_all(_gru_reduce, (h, h0, gates), w_hh, gy, maps)

    def gru_jacobians(
        self, h: np.ndarray, h0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, out: np.ndarray
    ) -> None:
        """5·T·H²·B FLOP, T·H²·B numbers written."""
        if h.shape[1]:
            launch(_gru_jacobians, len(h), 5 * out.size, h, h0, gates, w_hh, out)


GATES = 4
PLANES = 9
"""Diagonals that a materialised Jacobian consists of: four gates to h, three to c, and c to both."""


@device
def _lstm_cell(
    extra: None, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any
) -> None:
    seen, value, enter, keep, new, show = host_forward.lstm(
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
def lstm_run_part(
    part: int, parts: int, x: Any, features: int, w: Any, h0: Any, c0: Any, h: Any, c: Any, gates: Any
) -> None:
    """Run a part's samples forward, see `forward_part`."""
    initial, kept = (pointer(h0), pointer(c0)), (pointer(h), pointer(c), pointer(gates))
    forward_part(_lstm_cell, GATES, GATES, None, part, parts, h.shape, x, features, w, initial, kept)


@numba.njit(**JIT)
def _lstm_forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, c0: Any, h: Any, c: Any,
    gates: Any,
) -> None:  # fmt: skip
    w = pack(GATES, GATES, w_ih, b_ih, b_hh, w_hh)
    in_parts(lstm_run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, c0, h, c, gates))


@numba.njit(**INNER_JIT)
def _lstm_forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, c0: Any, h: Any, c: Any,
    gates: Any,
) -> None:  # fmt: skip
    initial, kept = (pointer(h0), pointer(c0)), (pointer(h), pointer(c), pointer(gates))
    wide_forward(_lstm_cell, GATES, GATES, None, block, blocks, product, h.shape, x, w_ih, w_hh, bias, initial, kept)


@numba.njit(**JIT)
def _lstm_forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_lstm_forward_wide_part, team, parts, args)


@device
def _lstm_factors(saved: Any, previous: Any, at: int, hidden: int, j: int) -> Any:
    """Return the diagonals of a step for hidden units j ….

    Those from c to the pre-activations of i, f and g, the one from h to that of o, the one from h to c, and the one
    from c to the c before. saved: c and the gates; previous: c before the step.
    """
    gate, n = advance(saved[1], GATES * at + j), hidden - j
    enter, keep = load_up_to(gate, 0, n), load_up_to(gate, hidden, n)
    new, show = load_up_to(gate, 2 * hidden, n), load_up_to(gate, 3 * hidden, n)
    seen = math.tanh(load_up_to(saved[0], at + j, n))
    to_i = new * enter * (1.0 - enter)
    to_f = load_up_to(previous, j, n) * keep * (1.0 - keep)
    to_g = enter * fma(new, -1.0 * new, 1.0)
    to_o = seen * show * (1.0 - show)
    to_c = show * fma(seen, -1.0 * seen, 1.0)
    return to_i, to_f, to_g, to_o, to_c, keep


@device
def _lstm_step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    to_i, to_f, to_g, to_o, to_c, keep = _lstm_factors(saved, previous, at, hidden, j)
    d = fma(g, to_c, load(beside, 0))
    store(out, 0, to_i * d)
    store(out, apart, to_f * d)
    store(out, 2 * apart, to_g * d)
    store(out, 3 * apart, to_o * g)
    store(beside, 0, d * keep)
    return zeros(out)


@numba.njit(**INNER_JIT)
def lstm_back_part_of(
    part: int, groups: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
    x: Any, before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    saved = pointer(c), pointer(gates)
    back_part(
        _lstm_step_back, GATES, GATES, 2, saved, pointer(c0), part, groups, c.shape, w, gy, first_chunk, bounds, ga, x,
        before, sums,
    )  # fmt: skip


@numba.njit(**JIT)
def _lstm_backward(team: int, parts: int, *args: Any) -> None:
    in_parts(lstm_back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _lstm_backward_wide_part(
    task: int, blocks: int, product: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any,
    ga: Any,
) -> None:  # fmt: skip
    saved, shape = (pointer(c), pointer(gates)), c.shape
    wide_back(
        _lstm_step_back, GATES, GATES, saved, pointer(c0), task, blocks, product, shape, w, gy, first_chunk, bounds, ga
    )


@numba.njit(**JIT)
def _lstm_backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_lstm_backward_wide_part, team, parts, args)


@device
def _lstm_step_map(
    saved: Any, previous: Any, at: int, hidden: int, w: Any, width: int, rows: Any, out: Any, room: Any
) -> None:
    """Multiply by the blocks from c and by W_o, see the module. 4·(2H + 1)·H² FLOP, and 6·H² to form the blocks."""
    count = lanes(w)
    blocks = room  # (2H, padded): Σ diag(factor) @ W over i, f and g; below it W_o
    fed = advance(blocks, 2 * hidden * width)  # of four rows: (d | gh · t o (1 - o))
    factors = advance(fed, 2 * SAMPLES * width)
    for j in range(0, width, count):
        to_i, to_f, to_g, to_o, to_c, keep = _lstm_factors(saved, previous, at, hidden, j)
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
def _lstm_reduce_part(
    task: int, c: Any, c0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any
) -> None:
    saved = pointer(c), pointer(gates)
    reduce_part(_lstm_step_map, 2, saved, pointer(c0), task, c.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _lstm_reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_lstm_reduce_part, team, parts, args)


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
        to_i, to_f, to_g, to_o, to_c, keep = _lstm_factors((pointer(c), pointer(gates)), previous, at, hidden, j)
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
def _lstm_jacobians_part(t: int, c: Any, c0: Any, gates: Any, w_hh: Any, out: Any) -> None:
    _, batch, hidden = c.shape
    factors = np.empty((PLANES, hidden, batch), c.dtype)
    room = np.empty(PLANES * (hidden + VECTOR_BYTES) + VECTOR_BYTES, c.dtype)
    for b in range(batch):
        _write_diagonals(t, b, c, c0, gates, room, factors)
    _write_jacobian(t, factors, w_hh, out)


@numba.njit(**JIT)
def _lstm_jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_lstm_jacobians_part, team, parts, args)


class LstmKernels:
    """The kernels ``lstm_*`` of `sparsebp.kernels.spec.Kernels` in Numba."""

    def lstm_forward(
        self, x: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, c0: np.ndarray, h: np.ndarray, c: np.ndarray,
        gates: np.ndarray, w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None,
    ) -> None:  # fmt: skip
        """8·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        work = 2 * GATES * h.size * hidden
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(GATES, GATES, w_ih, b_ih, b_hh, w_hh)
            launch(_lstm_forward_wide, blocks, work, blocks, product_of(h.dtype), x, *weights, h0, c0, h, c, gates)
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _lstm_forward(*parts_of(blocks_of(batch), work), x, *weights, w_hh, h0, c0, h, c, gates)

    def lstm_backward(
        self, c: np.ndarray, c0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None,
        grad_h_n: np.ndarray | None, grad_c_n: np.ndarray | None, ga: np.ndarray | None, gh0: np.ndarray,
        gc0: np.ndarray, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """Parallel over blocks of samples, and over chunks."""
        last, initial = (grad_h_n, grad_c_n), (gh0, gc0)
        back_propagate(
            _lstm_backward,
            _lstm_backward_wide,
            _lstm_reduce,
            GATES,
            (c, c0, gates),
            w_hh,
            gy,
            last,
            ga,
            initial,
            chunks,
            sums,
        )

    def lstm_maps(
        self, c: np.ndarray, c0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None,
        maps: np.ndarray,
    ) -> None:  # fmt: skip
        """Parallel over samples and chunks."""
        reduce_all(_lstm_reduce, (c, c0, gates), w_hh, gy, maps)

    def lstm_jacobians(
        self, c: np.ndarray, c0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, out: np.ndarray
    ) -> None:
        """14·T·H²·B FLOP, 2·T·H·(H + 1)·B numbers written."""
        if c.shape[1]:
            launch(_lstm_jacobians, len(c), 7 * out.size, c, c0, gates, w_hh, out)


# Recurrent kernels of the Elman RNN (BPPSA Eq. 9) on the host; see `forward` for the layout, `backward` for the scan.

INPUT_WEIGHTS = 1 << 17
"""Bytes of the input's weights up to which steps project the input as they go."""


@device
def _rnn_cell(relu: bool, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    v = host_forward.rnn(relu, zeros(z), load(z, j))
    store(state, j, v)
    store_up_to(kept[0], at + j, v, hidden - j)


@numba.njit(**INNER_JIT)
def rnn_run_part(part: int, parts: int, x: Any, features: int, w: Any, h0: Any, relu: bool, h: Any) -> None:
    """Run a part's samples forward, see `forward_part`."""
    kept = (pointer(h),)
    forward_part(_rnn_cell, 1, 1, relu, part, parts, h.shape, x, features, w, (pointer(h0),), kept)


@numba.njit(**JIT)
def _rnn_forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, relu: bool, h: Any
) -> None:
    w = pack(1, 1, w_ih, b_ih, b_hh, w_hh)
    in_parts(rnn_run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, relu, h))


@numba.njit(**INNER_JIT)
def _rnn_forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, relu: bool, h: Any
) -> None:
    kept = (pointer(h),)
    wide_forward(_rnn_cell, 1, 1, relu, block, blocks, product, h.shape, x, w_ih, w_hh, bias, (pointer(h0),), kept)


@numba.njit(**JIT)
def _rnn_forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_rnn_forward_wide_part, team, parts, args)


@device
def _slope(h: Any, relu: bool, g: Any) -> Any:
    """Return g · f' at the output h: relu ``h > 0``, or NaN; tanh ``1 - h²``."""
    return where_within(h, 0.0, np.inf, g) if relu else g * fma(h, -1.0 * h, 1.0)


@device
def _rnn_step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    h, relu = saved
    store(out, 0, _slope(load_up_to(h, at + j, hidden - j), relu, g))
    return zeros(out)


@numba.njit(**INNER_JIT)
def rnn_back_part_of(
    part: int, groups: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, bounds: Any, gz: Any, x: Any,
    before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    back_part(
        _rnn_step_back, 1, 1, 1, (pointer(h), relu), pointer(h), part, groups, h.shape, w, gy, first_chunk, bounds, gz,
        x, before, sums,
    )  # fmt: skip


@numba.njit(**JIT)
def _rnn_backward(team: int, parts: int, *args: Any) -> None:
    in_parts(rnn_back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _rnn_backward_wide_part(
    task: int, blocks: int, product: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, bounds: Any, gz: Any
) -> None:
    saved = (pointer(h), relu)
    wide_back(_rnn_step_back, 1, 1, saved, pointer(h), task, blocks, product, h.shape, w, gy, first_chunk, bounds, gz)


@numba.njit(**JIT)
def _rnn_backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_rnn_backward_wide_part, team, parts, args)


@device
def _rnn_step_map(
    saved: Any, previous: Any, at: int, hidden: int, w: Any, width: int, rows: Any, out: Any, room: Any
) -> None:
    """Multiply by ``diag(f') @ w_hh``."""
    h, relu = saved
    for k in range(hidden):
        value = broadcast(h, at + k)
        for j in range(0, width, lanes(out)):
            store(room, k * width + j, _slope(value, relu, load(w, k * width + j)))
    multiply_map(rows, room, hidden, width, out)


@numba.njit(**INNER_JIT)
def _rnn_reduce_part(task: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any) -> None:
    reduce_part(_rnn_step_map, 1, (pointer(h), relu), pointer(h), task, h.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _rnn_reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_rnn_reduce_part, team, parts, args)


@numba.njit(**INNER_JIT)
def _rnn_jacobians_part(t: int, h: Any, w_hh: Any, relu: bool, out: Any) -> None:
    _, batch, hidden = h.shape
    slopes = np.empty((1, hidden, batch), h.dtype)
    for b in range(batch):
        for j in range(hidden):
            value = h[t, b, j]
            slopes[0, j, b] = (0.0 if value <= 0.0 else 1.0) if relu else 1.0 - value * value
    write_jacobian(1, slopes, w_hh, t, out)


@numba.njit(**JIT)
def _rnn_jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_rnn_jacobians_part, team, parts, args)


class RnnKernels:
    """The kernels ``rnn_*`` of `sparsebp.kernels.spec.Kernels` in Numba."""

    MOST_INPUTS = 1 << 31

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """As many as leave the weights in a core's second cache; of large states, panels stay in the first one."""
        return INPUT_WEIGHTS // (gates * padded_width(hidden, f"f{itemsize}") * itemsize) if hidden < LEAST else 1 << 31

    def sums_for(self, gates: int, hidden: int, features: int, itemsize: int) -> tuple[int, int]:
        """Sums are a block's."""
        inside = hidden < LEAST and features <= self.projected_inputs(gates, hidden, itemsize)
        return (features if inside else 0), SAMPLES

    def rnn_forward(
        self, x: np.ndarray, w_hh: np.ndarray, h0: np.ndarray, nonlinearity: Nonlinearity, h: np.ndarray,
        w_ih: np.ndarray | None, b_ih: np.ndarray | None, b_hh: np.ndarray | None,
    ) -> None:  # fmt: skip
        """2·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        work, relu = 2 * h.size * hidden, nonlinearity == "relu"
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(1, 1, w_ih, b_ih, b_hh, w_hh)
            launch(_rnn_forward_wide, blocks, work, blocks, product_of(h.dtype), x, *weights, h0, relu, h)
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _rnn_forward(*parts_of(blocks_of(batch), work), x, *weights, w_hh, h0, relu, h)

    def rnn_backward(
        self, h: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None, grad_h_n: np.ndarray | None,
        nonlinearity: Nonlinearity, gz: np.ndarray | None, gh0: np.ndarray, chunks: int, sums: WeightSums | None,
    ) -> None:  # fmt: skip
        """Parallel over blocks of samples, and over chunks."""
        saved = (h, nonlinearity == "relu")
        back_propagate(
            _rnn_backward, _rnn_backward_wide, _rnn_reduce, 1, saved, w_hh, gy, (grad_h_n,), gz, (gh0,), chunks, sums
        )

    def rnn_maps(
        self, h: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None, nonlinearity: Nonlinearity, maps: np.ndarray
    ) -> None:
        """Parallel over samples and chunks."""
        reduce_all(_rnn_reduce, (h, nonlinearity == "relu"), w_hh, gy, maps)

    def rnn_jacobians(self, h: np.ndarray, w_hh: np.ndarray, nonlinearity: Nonlinearity, out: np.ndarray) -> None:
        """T·H²·B multiplications and as many numbers written."""
        if h.shape[1]:
            launch(_rnn_jacobians, len(h), out.size, h, w_hh, nonlinearity == "relu", out)


# Runs over the rows of sequences of several lengths: all stretches in one call, forward and back.
#
# A stretch is some steps with the same samples, whose rows are one array (steps, samples, features); between two of
# them sequences end. `rnn`, `gru` and `lstm` bring what runs one: the numbers are those of a call for each.

Cuts = Sequence[tuple[int, int, int]]
"""Of each stretch the first row, the steps and the samples, the first ones of the batch; in the order of time."""


def takes(hidden: int) -> bool:
    """Say whether there are so few hidden units that these kernels are the ones to take."""
    return hidden < LEAST


def forward(
    kind: str, cuts: Cuts, x: Array, w_hh: Array, b_hh: Array | None, projection: Sequence[Array | None],
    states: tuple[Array, ...], gates: Array | None, last: tuple[Array, ...],
) -> None:  # fmt: skip
    """Run a cell over x (N, I), or its projection (N, gates·H); all arrays C-contiguous and of one dtype.

    Parameters
    ----------
    kind
        ``"rnn_tanh"``, ``"rnn_relu"``, ``"gru"`` or ``"lstm"``.
    b_hh
        Bias of the recursion (gates·H,) or None; of it a GRU adds b_hn in every step, however x is projected.
    projection
        weight_ih and both biases, as the kernels of one run take them; None for an x that is projected.
    states, gates
        Arrays (N, H) for each of the state's, and gates (N, 4H) of a GRU or an LSTM, written.
    last
        The state before each sample's first step (B, H), which becomes that after its last one.
    """
    weights = (*weights_of(w_hh, *projection), w_hh)
    helpers, table = _team_and_table(cuts, w_hh)
    if kind == "gru":
        hidden = w_hh.shape[1]
        b_hn = np.zeros(hidden, x.dtype) if b_hh is None else b_hh[2 * hidden :]
        _run_gru(helpers, table, x, *weights, b_hn, *states, gates, *last)
    elif kind == "lstm":
        _run_lstm(helpers, table, x, *weights, *states, gates, *last)
    else:
        _run_rnn(helpers, table, x, *weights, kind == "rnn_relu", *states, *last)


def backward(
    kind: str, cuts: Cuts, w_hh: Array, start: tuple[Array, ...], states: tuple[Array, ...], gates: Array | None,
    gy: Array | None, ga: Array, arriving: tuple[Array, ...],
) -> None:  # fmt: skip
    """Take gradients back through `forward`, each stretch by the recursion.

    Parameters
    ----------
    start
        The state before each sample's first step (B, H).
    gy
        What arrives at h (N, H), or None.
    ga
        The gradients at what the weights feed (N, columns·H), written.
    arriving
        The gradients at the state after each sample's last step (B, H), which become those at `start`.
    """
    none = np.empty((0, w_hh.shape[1]), w_hh.dtype)
    helpers, table = _team_and_table(cuts, w_hh)
    args = pack_rows(w_hh), none if gy is None else gy, ga
    if kind == "gru":
        _back_gru(helpers, table, *states, *start, gates, *args, *arriving)
    elif kind == "lstm":
        _back_lstm(helpers, table, states[1], start[1], gates, *args, *arriving)
    else:
        _back_rnn(helpers, table, *states, kind == "rnn_relu", *args, *arriving)


def _team_and_table(cuts: Cuts, w_hh: Array) -> tuple[int, np.ndarray]:
    """Return the team for the stretch of most work, and a row for each: it, and in how many parts it is cut."""
    most, each = threads.count(), 2 * w_hh.size
    parts = [
        min(blocks_of(batch), most) if steps * batch * each >= WORTH_THREADS else 1 for _, steps, batch in cuts
    ]  # fmt: skip
    table = np.array([(*cut, count) for cut, count in zip(cuts, parts, strict=True)], np.int64)
    return team(max(parts)), table


# ---- in Numba --------------------------------------------------------------------------------------------------------


@numba.njit(**INNER_JIT)
def _steps(rows: Any, cut: Any) -> Any:
    """Return the rows of a stretch as (steps, samples, numbers): a view; nothing where there are no rows at all."""
    if len(rows) == 0:
        return np.empty((0, 0, 0), rows.dtype)
    first, steps, batch = cut[0], cut[1], cut[2]
    return rows[first : first + steps * batch].reshape((steps, batch, rows.shape[1]))


@numba.njit(**INNER_JIT)
def _before(cuts: Any, number: int, start: Any, rows: Any) -> Any:
    """Return the state before the first step of a stretch: rows of `start`, or of the last step of the one before."""
    batch = cuts[number, 2]
    if number == 0:
        return start[:batch]
    first = cuts[number, 0] - cuts[number - 1, 2]
    return rows[first : first + batch]


@numba.njit(**INNER_JIT)
def _keep_last(rows: Any, cut: Any, last: Any) -> None:
    """Write the state after the last step of a stretch to its samples' rows."""
    end, batch = cut[0] + cut[1] * cut[2], cut[2]
    last[:batch] = rows[end - batch : end]


@numba.njit(**JIT)
def _run_rnn(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, relu: bool, h: Any, last: Any
) -> None:
    w = pack(1, 1, w_ih, b_ih, b_hh, w_hh)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last, relu, _steps(h, cut))
        in_parts(rnn_run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last)


@numba.njit(**JIT)
def _run_gru(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, b_hn: Any, h: Any, gates: Any, last: Any
) -> None:
    w = pack(3, 4, w_ih, b_ih, b_hh, w_hh)
    set_bias(w, w_ih.shape[1], 3, 3, b_hn)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last, _steps(h, cut), _steps(gates, cut))
        in_parts(gru_run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last)


@numba.njit(**JIT)
def _run_lstm(
    team: int, cuts: Any, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h: Any, c: Any, gates: Any, last_h: Any,
    last_c: Any,
) -> None:  # fmt: skip
    w = pack(GATES, GATES, w_ih, b_ih, b_hh, w_hh)
    for n in range(len(cuts)):
        cut, parts = cuts[n], cuts[n, 3]
        written = _steps(h, cut), _steps(c, cut), _steps(gates, cut)
        args = (parts, _steps(x, cut), w_ih.shape[1], w, last_h, last_c, *written)
        in_parts(lstm_run_part, team if parts > 1 else ALONE, parts, args)
        _keep_last(h, cut, last_h)
        _keep_last(c, cut, last_c)


@numba.njit(**JIT)
def _back_rnn(team: int, cuts: Any, h: Any, relu: bool, w: Any, gy: Any, gz: Any, arriving: Any) -> None:
    none, sums = np.empty((0, 0, 0), h.dtype), np.empty((0, 0), h.dtype)
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, h.shape[1]), h.dtype)
        bounds[1] = arriving[:batch]
        args = (parts, _steps(h, cut), relu, w, _steps(gy, cut), 0, bounds, _steps(gz, cut), none, none, sums)
        in_parts(rnn_back_part_of, team if parts > 1 else ALONE, parts, args)
        arriving[:batch] = bounds[0]


@numba.njit(**JIT)
def _back_gru(team: int, cuts: Any, h: Any, start: Any, gates: Any, w: Any, gy: Any, ga: Any, arriving: Any) -> None:
    none, sums = np.empty((0, 0, 0), h.dtype), np.empty((0, 0), h.dtype)
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, h.shape[1]), h.dtype)
        bounds[1] = arriving[:batch]
        saved = (_steps(h, cut), _before(cuts, n, start, h), _steps(gates, cut))
        args = (parts, *saved, w, _steps(gy, cut), 0, bounds, _steps(ga, cut), none, none, sums)
        in_parts(gru_back_part_of, team if parts > 1 else ALONE, parts, args)
        arriving[:batch] = bounds[0]


@numba.njit(**JIT)
def _back_lstm(
    team: int, cuts: Any, c: Any, start: Any, gates: Any, w: Any, gy: Any, ga: Any, at_h: Any, at_c: Any
) -> None:
    none, sums, hidden = np.empty((0, 0, 0), c.dtype), np.empty((0, 0), c.dtype), c.shape[1]
    for n in range(len(cuts) - 1, -1, -1):
        cut, batch, parts = cuts[n], cuts[n, 2], cuts[n, 3]
        bounds = np.empty((2, batch, 2 * hidden), c.dtype)
        bounds[1, :, :hidden] = at_h[:batch]
        bounds[1, :, hidden:] = at_c[:batch]
        saved = (_steps(c, cut), _before(cuts, n, start, c), _steps(gates, cut))
        args = (parts, *saved, w, _steps(gy, cut), 0, bounds, _steps(ga, cut), none, none, sums)
        in_parts(lstm_back_part_of, team if parts > 1 else ALONE, parts, args)
        at_h[:batch] = bounds[0, :, :hidden]
        at_c[:batch] = bounds[0, :, hidden:]
