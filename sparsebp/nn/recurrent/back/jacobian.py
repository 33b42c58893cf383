"""Transposed Jacobians of recurrent layers, materialised: for inspection, tests and the general scan engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.types import Array
from sparsebp.jacobians.api import DEFAULT_MEMORY_LIMIT
from sparsebp.nn.recurrent.cell_math import CellMath
from sparsebp.nn.recurrent.lengths import Lengths
from sparsebp.nn.recurrent.tape import Tape, Weights
from sparsebp.patterns import SparsityPattern


def hidden_jacobians_t(cell: CellMath, tape: Tape, weights: Weights) -> list[Any]:
    """Return a `TransposedJacobian` of the state, per sample, for every step of `tape`, all views of one array."""
    from sparsebp.jacobians import hidden_elements

    return hidden_elements(*cell.state_jacobians(tape, weights))


def layer_jacobian_t(
    cell: CellMath, tapes: Sequence[Tape], weights: Sequence[Weights], lengths: Lengths | None, mask: Array | None,
    memory_limit: int | None,
) -> Any:  # fmt: skip
    """Return the transposed Jacobian of one layer's output with respect to its input, all steps and directions.

    The block of input step s and output step t is ``A_s J_{s+1} … J_t`` with A_s the transposed Jacobian of h[s] with
    respect to x[s], and J the hidden ones.

    Raises
    ------
    MemoryLimitError
        The need is beyond `memory_limit` bytes (None: `DEFAULT_MEMORY_LIMIT`); said before anything is allocated.
    """
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import sequence_pattern

    steps, batch, features = tapes[0].x.shape
    hidden, directions = tapes[0].h.shape[2], len(tapes)
    states = sum(array.shape[2] for array in cell.core_of(tapes[0], weights[0])[1].states)
    xp = backend.namespace(tapes[0].x)
    entries = batch * steps * features * steps * (2 * directions * hidden + states)
    need = entries * tapes[0].x.dtype.itemsize  # the blocks, their copy in the pattern's order, a direction's
    limit = DEFAULT_MEMORY_LIMIT if memory_limit is None else memory_limit
    if need > limit:
        raise MemoryLimitError(
            "The whole layer's Jacobian would need too much memory",
            expected=f"at most {limit} bytes",
            got=f"{need} bytes for T = {steps}, B = {batch}",
            remedy="Use input_grad, which multiplies with it without building it, or raise memory_limit",
        )
    blocks = xp.empty((batch, steps, features, steps, directions, hidden), dtype=tapes[0].x.dtype)
    for direction, (tape, w) in enumerate(zip(tapes, weights, strict=True)):
        run = _direction_blocks(cell, tape, w)
        blocks[:, :, :, :, direction] = _reversed(run, lengths) if direction else run
    if mask is not None:
        blocks *= xp.moveaxis(mask, 1, 0)[:, :, :, None, None, None]
    pattern = sequence_pattern(steps, features, hidden, bidirectional=directions == 2)
    entry = xp.asarray(pattern.row_of_entry.astype(np.int64) * pattern.shape[1] + pattern.indices)
    return TransposedJacobian(pattern, xp.ascontiguousarray(blocks.reshape(batch, -1)[:, entry].T))


def _direction_blocks(cell: CellMath, tape: Tape, weights: Weights) -> Array:
    """Return (B, T, I, T, H): input step and feature, output step and unit, in the order of the run."""
    core, tape, w_hh = cell.core_of(tape, weights)
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
    """Bring blocks from the order of a reverse run to that of time, on both time axes."""
    if lengths is None:
        return blocks[:, ::-1, :, ::-1]
    xp = backend.namespace(blocks)
    order = lengths.reversed.T
    samples = lengths.samples[:, None]
    blocks = blocks[samples, order]
    return xp.moveaxis(xp.moveaxis(blocks, 3, 1)[samples, order], 1, 3)
