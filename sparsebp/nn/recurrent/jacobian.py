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
from sparsebp.nn.recurrent.runs import gate_gradients, jacobians, unprojected
from sparsebp.nn.recurrent.saved import RecurrentSaved, SavedRun, Weights
from sparsebp.patterns import SparsityPattern, hidden_pattern


def padded(cell: CellMath, saved: RecurrentSaved, run: int) -> SavedRun:
    """Return a run over all steps of all samples, in which no gradient flows from past a sample's end."""
    one, lengths = saved.runs[run], saved.lengths
    if lengths is None or not one.segments:
        return one
    packed, batch = lengths.packed, len(one.h0)

    def spread(rows: Array) -> Array:
        return packed.spread(rows, 0)

    def with_start(states: Array) -> Array:
        return np.concatenate((states[:batch, 0][packed.back][None], spread(states[batch:])))

    gates = None if one.gates is None else spread(one.gates)
    found = SavedRun(spread(one.x), tuple(map(with_start, one.states)), gates)
    cell.close(found, lengths)
    return found


def state_jacobians(k: Any, cell: CellMath, saved: SavedRun, weights: Weights) -> tuple[Array, SparsityPattern]:
    """Return the transposed Jacobians of the state after each step with respect to the one before, and their pattern.

    The values are (T, nnz, B). With a projection, which mixes the units, they are dense in (h, c).
    """
    inner, folded = unprojected(saved, weights)
    _, batch, hidden = inner.h.shape
    values, pattern = jacobians(k, cell, inner, folded.weight_hh), cell.pattern(hidden)
    if weights.weight_hr is None:
        return values, pattern
    xp, w_hr, steps = backend.namespace(inner.h), weights.weight_hr, len(inner.h)
    size = len(w_hr) + hidden
    states = xp.empty((steps, size, 2 * hidden, batch), dtype=inner.h.dtype)  # columns: m and c after the step
    factors = _input_factors(k, cell, inner, folded.weight_hh)
    states[:, : len(w_hr)] = xp.einsum("gp,tgnb->tpnb", weights.weight_hh, factors)
    below = pattern.nnz - 2 * hidden  # where the rows of c begin, of two entries each
    states[:, len(w_hr) :] = 0
    for part in range(2):
        rows = xp.arange(hidden)
        states[:, len(w_hr) + rows, part * hidden + rows] = values[:, below + part :: 2]
    out = xp.empty((steps, size, size, batch), dtype=inner.h.dtype)
    out[:, :, : len(w_hr)] = xp.einsum("trmb,pm->trpb", states[:, :, :hidden], w_hr)
    out[:, :, len(w_hr) :] = states[:, :, hidden:]
    return out.reshape(steps, size * size, batch), hidden_pattern(size)


def _input_factors(k: Any, cell: CellMath, saved: SavedRun, w_hh: Array) -> Array:
    """Return (T, gH, n, B): transposed Jacobian of the state after a step with respect to ``W_ih x`` at it."""
    # Gate rows as in torch; the n columns are the state's arrays one after the other.
    xp, parts = backend.namespace(saved.h), []
    eye = xp.tile(xp.eye(saved.h.shape[2], dtype=saved.h.dtype), (cell.gates, 1))
    for own in range(len(cell.states)):
        at = tuple((xp.ones_like if own == other else xp.zeros_like)(saved.h) for other in range(len(cell.states)))
        ga = gate_gradients(k, cell, saved, w_hh, at)
        rows = cell.to_torch_order(xp.moveaxis(cell.input_part(ga), 2, 0))  # (gH, T, B)
        parts.append(eye[None, :, :, None] * xp.moveaxis(rows, 0, 1)[:, :, None])
    return parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=2)


def layer_jacobian_t(
    k: Any, cell: CellMath, runs: Sequence[tuple[SavedRun, Weights]], lengths: Lengths | None, mask: Array | None,
    memory_limit: int | None,
) -> Any:  # fmt: skip
    """Return the transposed Jacobian of one layer's output with respect to its input, all steps and directions."""
    # The block of input step s and output step t is `A_s J_{s+1} … J_t` with A_s the transposed Jacobian of h[s] with
    # respect to x[s], and J the hidden ones.
    first, weights = runs[0]
    steps, batch, features = first.x.shape
    hidden, directions = first.h.shape[2], len(runs)
    states = sum(array.shape[2] for array in unprojected(first, weights)[0].states)
    xp = backend.namespace(first.x)
    # The blocks, their copy in the pattern's order, and one direction's.
    entries = batch * steps * features * steps * (2 * directions * hidden + states)
    check_jacobian_room(entries, first.x, directions * hidden, memory_limit)
    blocks = xp.empty((batch, steps, features, steps, directions, hidden), dtype=first.x.dtype)
    for direction, (saved, w) in enumerate(runs):
        run = _direction_blocks(k, cell, saved, w)
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


def _direction_blocks(k: Any, cell: CellMath, saved: SavedRun, weights: Weights) -> Array:
    """Return (B, T, I, T, H): input step and feature, output step and unit, in the order of the run."""
    saved, folded = unprojected(saved, weights)
    xp = backend.namespace(saved.h)
    steps, batch, hidden = saved.h.shape
    hidden_t = _dense(jacobians(k, cell, saved, folded.weight_hh), cell.pattern(hidden))
    input_t = xp.einsum("gi,tgnb->tbin", weights.weight_ih, _input_factors(k, cell, saved, folded.weight_hh))
    features, size = input_t.shape[2:]
    blocks = xp.zeros((batch, steps, features, steps, size), dtype=saved.h.dtype)
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
