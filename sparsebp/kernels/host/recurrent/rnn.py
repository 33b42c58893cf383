"""Recurrent kernels of the Elman RNN (BPPSA Eq. 9) on the host; see `common` for the layout, `back` for the scan."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.core.types import Nonlinearity
from sparsebp.kernels.host.dense.packed import product_of
from sparsebp.kernels.host.engine.parts import INNER_JIT, JIT
from sparsebp.kernels.host.engine.simd import (
    broadcast,
    device,
    fma,
    lanes,
    load,
    load_up_to,
    pointer,
    store,
    store_up_to,
    where_within,
    zeros,
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
from sparsebp.kernels.host.recurrent.common import (
    SAMPLES,
    blocks_of,
    launch,
    padded_width,
)
from sparsebp.kernels.host.recurrent.forward import forward_part, pack, parts_of, weights_of
from sparsebp.kernels.host.recurrent.wide import LEAST, wide_back, wide_blocks_of, wide_forward, wide_weights
from sparsebp.kernels.operands import WeightSums

INPUT_WEIGHTS = 1 << 17
"""Bytes of the input's weights up to which steps project the input as they go."""


@device
def _cell(relu: bool, z: Any, apart: int, state: Any, width: int, j: int, hidden: int, at: int, kept: Any) -> None:
    v = cells.rnn(relu, zeros(z), load(z, j))
    store(state, j, v)
    store_up_to(kept[0], at + j, v, hidden - j)


@numba.njit(**INNER_JIT)
def run_part(part: int, parts: int, x: Any, features: int, w: Any, h0: Any, relu: bool, h: Any) -> None:
    """Run a part's samples forward, see `forward_part`."""
    kept = (pointer(h),)
    forward_part(_cell, 1, 1, relu, part, parts, h.shape, x, features, w, (pointer(h0),), kept)


@numba.njit(**JIT)
def _forward(
    team: int, parts: int, x: Any, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any, h0: Any, relu: bool, h: Any
) -> None:
    w = pack(1, 1, w_ih, b_ih, b_hh, w_hh)
    in_parts(run_part, team, parts, (parts, x, w_ih.shape[1], w, h0, relu, h))


@numba.njit(**INNER_JIT)
def _forward_wide_part(
    block: int, blocks: int, product: int, x: Any, w_ih: Any, w_hh: Any, bias: Any, h0: Any, relu: bool, h: Any
) -> None:
    kept = (pointer(h),)
    wide_forward(_cell, 1, 1, relu, block, blocks, product, h.shape, x, w_ih, w_hh, bias, (pointer(h0),), kept)


@numba.njit(**JIT)
def _forward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_forward_wide_part, team, parts, args)


@device
def _slope(h: Any, relu: bool, g: Any) -> Any:
    """Return g · f' at the output h: relu ``h > 0``, or NaN; tanh ``1 - h²``."""
    return where_within(h, 0.0, np.inf, g) if relu else g * fma(h, -1.0 * h, 1.0)


@device
def _step_back(
    saved: Any, previous: Any, at: int, hidden: int, j: int, g: Any, out: Any, beside: Any, apart: int
) -> Any:
    h, relu = saved
    store(out, 0, _slope(load_up_to(h, at + j, hidden - j), relu, g))
    return zeros(out)


@numba.njit(**INNER_JIT)
def back_part_of(
    part: int, groups: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, bounds: Any, gz: Any, x: Any,
    before: Any, sums: Any,
) -> None:  # fmt: skip
    """Take a part's samples back, see `back_part`."""
    back_part(
        _step_back, 1, 1, 1, (pointer(h), relu), pointer(h), part, groups, h.shape, w, gy, first_chunk, bounds, gz, x,
        before, sums,
    )  # fmt: skip


@numba.njit(**JIT)
def _backward(team: int, parts: int, *args: Any) -> None:
    in_parts(back_part_of, team, parts, args)


@numba.njit(**INNER_JIT)
def _backward_wide_part(
    task: int, blocks: int, product: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, bounds: Any, gz: Any
) -> None:
    saved = (pointer(h), relu)
    wide_back(_step_back, 1, 1, saved, pointer(h), task, blocks, product, h.shape, w, gy, first_chunk, bounds, gz)


@numba.njit(**JIT)
def _backward_wide(team: int, parts: int, *args: Any) -> None:
    in_parts(_backward_wide_part, team, parts, args)


@device
def _step_map(
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
def _reduce_part(task: int, h: Any, relu: bool, w: Any, gy: Any, first_chunk: int, chunks: int, maps: Any) -> None:
    reduce_part(_step_map, 1, (pointer(h), relu), pointer(h), task, h.shape, w, gy, first_chunk, chunks, maps)


@numba.njit(**JIT)
def _reduce(team: int, parts: int, *args: Any) -> None:
    in_parts(_reduce_part, team, parts, args)


@numba.njit(**INNER_JIT)
def _jacobians_part(t: int, h: Any, w_hh: Any, relu: bool, out: Any) -> None:
    _, batch, hidden = h.shape
    slopes = np.empty((1, hidden, batch), h.dtype)
    for b in range(batch):
        for j in range(hidden):
            value = h[t, b, j]
            slopes[0, j, b] = (0.0 if value <= 0.0 else 1.0) if relu else 1.0 - value * value
    write_jacobian(1, slopes, w_hh, t, out)


@numba.njit(**JIT)
def _jacobians(team: int, parts: int, *args: Any) -> None:
    in_parts(_jacobians_part, team, parts, args)


class RnnKernels:
    """The kernels ``rnn_*`` of `sparsebp.kernels.api.Kernels` in Numba."""

    MOST_INPUTS = 1 << 31

    def projected_inputs(self, gates: int, hidden: int, itemsize: int) -> int:
        """As many as leave the weights in a core's second cache; of large states, panels stay in the first one."""
        return INPUT_WEIGHTS // (gates * padded_width(hidden, f"f{itemsize}") * itemsize) if hidden < LEAST else 1 << 31

    def sums_for(self, gates: int, hidden: int, features: int, itemsize: int) -> tuple[int, int]:
        """Sums are a block's."""
        inside = hidden < LEAST and features <= self.projected_inputs(gates, hidden, itemsize)
        return (features if inside else 0), SAMPLES

    def rnn_forward(
        self,
        x: np.ndarray,
        w_hh: np.ndarray,
        h0: np.ndarray,
        nonlinearity: Nonlinearity,
        h: np.ndarray,
        w_ih: np.ndarray | None,
        b_ih: np.ndarray | None,
        b_hh: np.ndarray | None,
    ) -> None:
        """2·T·B·H² FLOP, sequential in T, parallel over blocks of samples."""
        _, batch, hidden = h.shape
        work, relu = 2 * h.size * hidden, nonlinearity == "relu"
        if batch and hidden >= LEAST:
            blocks, weights = wide_blocks_of(batch), wide_weights(1, 1, w_ih, b_ih, b_hh, w_hh)
            launch(_forward_wide, blocks, work, blocks, product_of(h.dtype), x, *weights, h0, relu, h)
        elif batch:
            weights = weights_of(w_hh, w_ih, b_ih, b_hh)
            _forward(*parts_of(blocks_of(batch), work), x, *weights, w_hh, h0, relu, h)

    def rnn_backward(
        self,
        h: np.ndarray,
        w_hh: np.ndarray,
        gy: np.ndarray | None,
        grad_h_n: np.ndarray | None,
        nonlinearity: Nonlinearity,
        gz: np.ndarray | None,
        gh0: np.ndarray,
        chunks: int,
        sums: WeightSums | None,
    ) -> None:
        """Parallel over blocks of samples, and over chunks."""
        saved = (h, nonlinearity == "relu")
        back_propagate(_backward, _backward_wide, _reduce, 1, saved, w_hh, gy, (grad_h_n,), gz, (gh0,), chunks, sums)

    def rnn_maps(
        self, h: np.ndarray, w_hh: np.ndarray, gy: np.ndarray | None, nonlinearity: Nonlinearity, maps: np.ndarray
    ) -> None:
        """Parallel over samples and chunks."""
        reduce_all(_reduce, (h, nonlinearity == "relu"), w_hh, gy, maps)

    def rnn_jacobians(self, h: np.ndarray, w_hh: np.ndarray, nonlinearity: Nonlinearity, out: np.ndarray) -> None:
        """T·H²·B multiplications and as many numbers written."""
        if h.shape[1]:
            launch(_jacobians, len(h), out.size, h, w_hh, nonlinearity == "relu", out)
