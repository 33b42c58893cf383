"""Recurrent kernels of the GRU (BPPSA Eq. 10 and 11) on the host; see `common` for the layout, `back` for the scan."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.dense.packed import product_of
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    advance,
    broadcast,
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
)
from sparsebp.kernels.host.engine.team import in_parts
from sparsebp.kernels.host.recurrent import cells
from sparsebp.kernels.host.recurrent.back import (
    back_propagate,
    multiply_map,
    reduce_all,
    reduce_part,
    write_jacobian,
)
from sparsebp.kernels.host.recurrent.backward import back_part
from sparsebp.kernels.host.recurrent.common import blocks_of, launch
from sparsebp.kernels.host.recurrent.forward import (
    forward_part,
    item_of,
    pack,
    part_at,
    parts_of,
    set_bias,
    weights_of,
)
from sparsebp.kernels.host.recurrent.wide import LEAST, wide_back, wide_blocks_of, wide_forward, wide_weights
from sparsebp.kernels.operands import WeightSums


@device
def _cell(extra: None, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    inner = load(z, part_at(3, 3, apart, item_of(z)) + j)
    v, reset, update, new = cells.gru(load(z, j), load(z, apart + j), load(z, 2 * apart + j), inner, load(state, j))
    store(state, j, v)
    n = hidden - j
    store_up_to(kept[0], at + j, v, n)
    saved = advance(kept[1], 4 * at + j)
    store_up_to(saved, 0, reset, n)
    store_up_to(saved, hidden, update, n)
    store_up_to(saved, 2 * hidden, new, n)
    store_up_to(saved, 3 * hidden, inner, n)


@numba.njit(**INNER_JIT)
def run_part(part: int, parts: int, x: Any, features: int, w: Any, h0: Any, h: Any, gates: Any) -> None:
    """Run a part's samples forward, see `forward_part`."""
    kept = (pointer(h), pointer(gates))
    forward_part(_cell, 3, 4, None, part, parts, h.shape, x, features, w, (pointer(h0),), kept)


@numba.njit(**JIT)
def _forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, b_hn: Any, h0: Any, h: Any, gates: Any
) -> None:
    w = pack(3, 4, w_ih, b_ih, b_hh, w_hh)
    set_bias(w, w_ih.shape[1], 3, 3, b_hn)
    in_parts(run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, h, gates))


@numba.njit(**INNER_JIT)
def _forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, h: Any, gates: Any
) -> None:
    kept = (pointer(h), pointer(gates))
    wide_forward(_cell, 3, 4, None, block, blocks, product, h.shape, x, w_ih, w_hh, bias, (pointer(h0),), kept)


@numba.njit(**JIT)
def _forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_forward_wide_part, team, parts, args)


@device
def _factors(saved: Any, previous: Any, at: int, hidden: int, j: int) -> Any:
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
def _step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    to_n, to_r, to_z, to_m, direct = _factors(saved, previous, at, hidden, j)
    store(out, 0, to_n * g)
    store(out, apart, to_r * g)
    store(out, 2 * apart, to_z * g)
    store(out, part_at(3, 3, apart, item_of(out)), to_m * g)
    return direct * g


@numba.njit(**INNER_JIT)
def back_part_of(
    part: int, groups: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any, ga: Any,
    x: Any, before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    saved = pointer(h), pointer(gates)
    back_part(
        _step_back, 3, 4, 1, saved, pointer(h0), part, groups, h.shape, w, gy, first_chunk, bounds, ga, x, before, sums
    )


@numba.njit(**JIT)
def _backward(team: int, parts: int, *args: Any) -> None:
    in_parts(back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _backward_wide_part(
    task: int, blocks: int, product: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, bounds: Any,
    ga: Any,
) -> None:  # fmt: skip
    saved = pointer(h), pointer(gates)
    wide_back(_step_back, 3, 4, saved, pointer(h0), task, blocks, product, h.shape, w, gy, first_chunk, bounds, ga)


@numba.njit(**JIT)
def _backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_backward_wide_part, team, parts, args)


@device
def _step_map(
    saved: Any, previous: Any, at: int, hidden: int, w: Any, width: int, rows: Any, out: Any, room: Any
) -> None:
    """Multiply by the row form of Eq. 11, ``Σ diag(factor) @ W + diag(z)``, formed with 6·H² FLOP.

    The factored form would cost three products a row of the map instead of one; forming it once serves H + 1 rows.
    """
    count, jacobian, factors = lanes(w), room, advance(room, hidden * width)
    for j in range(0, width, count):
        _, to_r, to_z, to_m, direct = _factors(saved, previous, at, hidden, j)
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
def _reduce_part(
    task: int, h: Any, h0: Any, gates: Any, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any
) -> None:
    saved = pointer(h), pointer(gates)
    reduce_part(_step_map, 1, saved, pointer(h0), task, h.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_reduce_part, team, parts, args)


@numba.njit(**INNER_JIT)
def _jacobians_part(t: int, h: Any, h0: Any, gates: Any, w_hh: Any, out: Any) -> None:
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
def _jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_jacobians_part, team, parts, args)


class GruKernels:
    """The kernels ``gru_*`` of `sparsebp.kernels.api.Kernels` in Numba."""

    def gru_forward(
        self,
        x: np.ndarray,
        w_hh: np.ndarray,
        b_hn: np.ndarray,
        h0: np.ndarray,
        h: np.ndarray,
        gates: np.ndarray,
        w_ih: np.ndarray | None,
        b_ih: np.ndarray | None,
        b_hh: np.ndarray | None,
    ) -> None:
        """6·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(3, 4, w_ih, b_ih, b_hh, w_hh)
            weights[2][3 * (len(weights[2]) // 4) :][:hidden] = b_hn
            launch(_forward_wide, blocks, 6 * h.size * hidden, blocks, product_of(h.dtype), x, *weights, h0, h, gates)
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _forward(*parts_of(blocks_of(batch), 6 * h.size * hidden), x, *weights, w_hh, b_hn, h0, h, gates)

    def gru_backward(
        self,
        h: np.ndarray,
        h0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        ga: np.ndarray | None,
        gh0: np.ndarray,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """Parallel over blocks of samples, and over chunks."""
        saved = (h, h0, gates)
        back_propagate(_backward, _backward_wide, _reduce, 4, saved, w_hh, gy, (grad_h_n,), ga, (gh0,), chunks, sums)

    def gru_maps(
        self,
        h: np.ndarray,
        h0: np.ndarray,
        gates: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        maps: np.ndarray,
    ) -> None:
        """Parallel over samples and chunks."""
        reduce_all(_reduce, (h, h0, gates), w_hh, gy, maps)

    def gru_jacobians(
        self, h: np.ndarray, h0: np.ndarray, gates: np.ndarray, w_hh: np.ndarray, out: np.ndarray
    ) -> None:
        """5·T·H²·B FLOP, T·H²·B numbers written."""
        if h.shape[1]:
            launch(_jacobians, len(h), 5 * out.size, h, h0, gates, w_hh, out)
