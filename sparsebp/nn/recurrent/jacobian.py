"""Transposed Jacobians of recurrent layers, materialised: for inspection, tests and the general scan engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import MemoryLimitError
from sparsebp.jacobians.jacobian import DEFAULT_MEMORY_LIMIT
from sparsebp.nn.recurrent.cells import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.saved import Tape, Weights
from sparsebp.patterns import SparsityPattern


def layer_jacobian_t(
    cell: CellMath, tapes: Sequence[Tape], weights: Sequence[Weights], lengths: Lengths | None, mask: Array | None,
    memory_limit: int | None,
) -> Any:  # fmt: skip
    """Return the transposed Jacobian of one layer's output with respect to its input, all steps and directions."""
    # The block of input step s and output step t is `A_s J_{s+1} … J_t` with A_s the transposed Jacobian of h[s] with
    # respect to x[s], and J the hidden ones.
    steps, batch, features = tapes[0].x.shape
    hidden, directions = tapes[0].h.shape[2], len(tapes)
    states = sum(array.shape[2] for array in cell.unprojected(tapes[0], weights[0])[1].states)
    xp = backend.namespace(tapes[0].x)
    # The blocks, their copy in the pattern's order, and one direction's.
    entries = batch * steps * features * steps * (2 * directions * hidden + states)
    check_jacobian_room(entries, tapes[0].x, directions * hidden, memory_limit)
    blocks = xp.empty((batch, steps, features, steps, directions, hidden), dtype=tapes[0].x.dtype)
    for direction, (tape, w) in enumerate(zip(tapes, weights, strict=True)):
        run = _direction_blocks(cell, tape, w)
        blocks[:, :, :, :, direction] = _reversed(run, lengths) if direction else run
    if lengths is not None:  # the output past a sample's end is 0
        past = ~lengths.valid[:, :, 0].T
        xp.copyto(blocks, blocks.dtype.type(0), where=past[:, None, None, :, None, None])
    if mask is not None:
        blocks *= xp.moveaxis(mask, 1, 0)[:, :, :, None, None, None]
    return sequence_jacobian_t(blocks, bidirectional=directions == 2)


INDEX_BYTES = 24
"""For each entry of a layer's Jacobian: its column, and the integers that say where its value is fetched from."""


def check_jacobian_room(numbers: int, x: Array, width: int, memory_limit: int | None) -> None:
    """Raise MemoryLimitError if so many numbers of the dtype of x (T, B, features), and indices, exceed the limit.

    `width` is that of a step's output.
    """
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    steps, batch, features = x.shape
    need = numbers * x.dtype.itemsize + INDEX_BYTES * (steps * (steps + 1) // 2 * features * width)
    if need > limit:
        raise MemoryLimitError(
            "The whole layer's Jacobian would need too much memory", expected=f"at most {limit} bytes",
            got=f"{need} bytes for T = {steps}, B = {batch}",
            remedy="Use input_grad, which multiplies with it without building it, or raise memory_limit",
        )  # fmt: skip


def sequence_jacobian_t(blocks: Array, bidirectional: bool = False) -> Any:
    """Return the transposed Jacobian with blocks (B, T, I, T, directions, H), on the layer's sequence pattern."""
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import sequence_pattern

    xp, (batch, steps, features, _, _, hidden) = backend.namespace(blocks), blocks.shape
    pattern = sequence_pattern(steps, features, hidden, bidirectional=bidirectional)
    entry = xp.asarray(pattern.row_of_entry.astype(np.int64) * pattern.shape[1] + pattern.indices)
    return TransposedJacobian(pattern, xp.ascontiguousarray(blocks.reshape(batch, -1)[:, entry].T))


def _direction_blocks(cell: CellMath, tape: Tape, weights: Weights) -> Array:
    """Return (B, T, I, T, H): input step and feature, output step and unit, in the order of the run."""
    core, tape, w_hh = cell.unprojected(tape, weights)
    xp = backend.namespace(tape.h)
    steps, batch, hidden = tape.h.shape
    hidden_t = _dense(core.jacobians(tape, w_hh), core.pattern(hidden))
    input_t = xp.einsum("gi,tgnb->tbin", weights.weight_ih, core.input_factors(tape))
    features, size = input_t.shape[2:]
    blocks = xp.zeros((batch, steps, features, steps, size), dtype=tape.h.dtype)
    for t in range(steps):
        if t > 0:
            blocks[:, :t, :, t] = blocks[:, :t, :, t - 1] @ hidden_t[t][:, None]
        blocks[:, t, :, t] = input_t[t]
    of_h = blocks[..., :hidden]
    return of_h if weights.weight_hr is None else of_h @ weights.weight_hr.T


def _dense(values: Array, pattern: SparsityPattern) -> Array:
    """Return the values on a pattern (T, nnz, B) as matrices (T, B, n, n)."""
    xp = backend.namespace(values)
    steps, _, batch = values.shape
    rows, columns = pattern.shape
    out = xp.zeros((steps, batch, rows * columns), dtype=values.dtype)
    out[:, :, xp.asarray(pattern.row_of_entry.astype(np.int64) * columns + pattern.indices)] = values.swapaxes(1, 2)
    return out.reshape(steps, batch, rows, columns)


def _reversed(blocks: Array, lengths: Lengths | None) -> Array:
    """Reverse both time axes of the blocks of a reverse run."""
    if lengths is None:
        return blocks[:, ::-1, :, ::-1]
    xp = backend.namespace(blocks)
    order = lengths.reversed.T
    samples = lengths.samples[:, None]
    blocks = blocks[samples, order]
    return xp.moveaxis(xp.moveaxis(blocks, 3, 1)[samples, order], 1, 3)
