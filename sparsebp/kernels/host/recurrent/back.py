"""The way back through any recurrent cell on the host: by the recursion, or by reduce-then-scan over chunks of steps.

Reduce-then-scan. The gradient that leaves a step into the past is an affine function of the one that comes in from the
future, ``c[t] = (c[t+1] + gy[t]) @ J[t]`` in row form. A chunk of steps is reduced to one such map of the state's n
values (H, or 2H of an LSTM), kept as n + 1 rows: row i < n is what unit vector i adds, row n the image of zero. All
rows obey the same recursion as a sample's gradient, so reducing a chunk is back-propagating n + 1 rows at once through
``J[t]``, of which only one exists at a time.

A cell brings two functions. `saved` is a tuple of what they read, the pointer to the state's last array first;
`previous` points to the sample's row of that array before the step; `at` is where its row begins at the step, in an
array (T, B, H). `states` is the number of arrays of H values that the cell's state consists of, 1 or 2.

step_back(saved, previous, at, hidden, j, g, out, beside, width)
    For units j … and the gradient g at their h, write the gradients at what the weights feed to `out`, `width` apart,
    the last ones those that the weights bring back; return what comes to the h before without weights. A second array
    of the state has its gradient `beside`, which is read and replaced.
step_map(saved, previous, at, hidden, w, width, rows, out, room)
    Take a map's rows, `states` parts of `width` each, one step into the past. There is room for
    ``states * hidden + MAP_ROOM`` rows of `width`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.dense.packed import product_of
from sparsebp.kernels.host.engine.parts import JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    advance,
    aligned_pointer,
    broadcast,
    device,
    filled,
    fma,
    lanes,
    load,
    load_n,
    pointer,
    store,
    store_n,
    store_up_to,
)
from sparsebp.kernels.host.recurrent.backward import chunk_start, finish_sums
from sparsebp.kernels.host.recurrent.common import (
    SAMPLES,
    blocks_of,
    clear,
    launch,
    multiply_add,
    pack_rows,
    padded_width,
)
from sparsebp.kernels.host.recurrent.forward import numbers_of_row, parts_of
from sparsebp.kernels.host.recurrent.wide import LEAST, wide_blocks_of, wide_rows
from sparsebp.kernels.operands import WeightSums

MAP_ROOM = 16
"""Rows of scratch that `step_map` may use beside those of a Jacobian."""


# ---- in Python -----------------------------------------------------------------------------------------------------


def back_propagate(
    backward: Any,
    wide: Any,
    reduce: Any,
    columns: int,
    saved: tuple[Any, ...],
    w_hh: np.ndarray,
    gy: np.ndarray | None,
    last: tuple[np.ndarray | None, ...],
    out: np.ndarray | None,
    initial: tuple[np.ndarray, ...],
    chunks: int,
    sums: WeightSums | None,
) -> None:
    """Back-propagate through a cell: the recursion, which is one chunk, or reduce-then-scan.

    The last chunk needs no map, as what comes into it is known; the first none, as nothing lies before it.

    Parameters
    ----------
    backward, wide, reduce
        The cell's kernels: parts of `back_part`, of `wide_back` and of `reduce_part`.
    columns
        Columns of `out`, in multiples of the hidden size.
    saved
        What forward left, an array (T, B, H) first: the first arguments of both.
    last
        The gradients (B, H) that come to the arrays of the last state; None stands for zero.
    out
        The gradients at what the weights feed, written, or None.
    initial
        The gradients (B, H) at the arrays of the state before the first step, written.
    sums
        What else is written, where it is not None.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        for array in () if sums is None else sums[2:]:
            if array is not None:
                array[...] = 0
        return
    none = np.empty((0, 0, 0), w_hh.dtype)  # one Numba specialisation serves both what is there and what is not
    incoming, out = none if gy is None else gy, none if out is None else out
    weights, size = pack_rows(w_hh), len(last) * hidden
    bounds = np.empty((chunks + 1, batch, size), w_hh.dtype)  # what comes into chunk c is entry c + 1, what leaves it c
    for number, array in enumerate(last):
        bounds[chunks, :, number * hidden : (number + 1) * hidden] = 0 if array is None else array
    work = 2 * steps * batch * w_hh.size

    def scan() -> None:
        """Compute from what comes into the last chunk but one, `bounds[chunks - 1]`, what comes into the others."""
        if chunks > 2:
            maps = np.empty((chunks - 2, batch, size + 1, size), w_hh.dtype)
            args = (*saved, weights, incoming, 1, chunks, maps)
            launch(reduce, (chunks - 2) * batch, _reducing(steps, batch, size, hidden), *args)
            _combine(maps, bounds)

    if hidden >= LEAST and sums is None:
        _recur_wide(wide, saved, w_hh, incoming, bounds, work, scan, out)
    else:
        x, before, room = none, none, np.empty((0, 0), w_hh.dtype)
        if sums is not None:
            gates, features = len(w_hh) // hidden, sums.x.shape[2]
            numbers = (features + hidden) * padded_width(len(w_hh), w_hh.dtype)
            numbers += numbers_of_row(gates, columns, hidden, w_hh.itemsize)
            x, before, room = sums.x, sums.before, np.empty((chunks * blocks_of(batch), numbers), w_hh.dtype)
        _recur(backward, (*saved, weights, incoming), bounds, work, scan, (out, x, before, room))
    if sums is not None:
        biases = (np.empty(0, w_hh.dtype) if bias is None else bias for bias in (sums.bias_ih, sums.bias_hh))
        finish_sums(gates, columns, room, sums.weight_ih, sums.weight_hh, *biases)
    for number, array in enumerate(initial):
        array[...] = bounds[0, :, number * hidden : (number + 1) * hidden]


def _recur(
    backward: Any, args: tuple[Any, ...], bounds: np.ndarray, work: int, scan: Callable[[], None],
    written: tuple[np.ndarray, ...],
) -> None:  # fmt: skip
    """Run the recursion in the last chunk, then, after the scan, in those before it."""
    chunks, batch = len(bounds) - 1, bounds.shape[1]
    team, groups = parts_of(blocks_of(batch), work // chunks)
    backward(team, groups, groups, *args, chunks - 1, bounds, *written)
    scan()
    if chunks > 1:
        blocks = blocks_of(batch)
        launch(backward, (chunks - 1) * blocks, work, blocks, *args, 0, bounds, *written)


def _recur_wide(
    wide: Any, saved: tuple[Any, ...], w_hh: np.ndarray, incoming: np.ndarray, bounds: np.ndarray, work: int,
    scan: Callable[[], None], out: np.ndarray,
) -> None:  # fmt: skip
    """The same for large hidden sizes, by products with packed weights."""
    chunks, batch, hidden = len(bounds) - 1, bounds.shape[1], w_hh.shape[1]
    packed, blocks = wide_rows(w_hh, len(w_hh) // hidden), wide_blocks_of(batch)
    args = blocks, product_of(w_hh.dtype), *saved, packed, incoming
    launch(wide, blocks, work // chunks, *args, chunks - 1, bounds, out)
    scan()
    if chunks > 1:
        launch(wide, (chunks - 1) * blocks, work, *args, 0, bounds, out)


def reduce_all(reduce: Any, saved: tuple[Any, ...], w_hh: np.ndarray, gy: np.ndarray | None, maps: np.ndarray) -> None:
    """Reduce all chunks of a sequence to affine maps; `reduce` and `saved` as in `back_propagate`.

    Parameters
    ----------
    maps
        (chunks, B, n + 1, n), written.
    """
    steps, batch, hidden = saved[0].shape
    if not batch:
        return
    incoming = np.empty((0, 0, 0), maps.dtype) if gy is None else gy
    chunks, work = len(maps), _reducing(steps, batch, maps.shape[3], hidden)
    launch(reduce, chunks * batch, work, *saved, pack_rows(w_hh), incoming, 0, chunks, maps)


def _reducing(steps: int, batch: int, size: int, hidden: int) -> int:
    """Return the operations of reducing all steps: of maps of `size` values, by as many products of H × H as arrays."""
    return 2 * steps * batch * size * size * hidden


# ---- in Numba: affine maps of chunks -------------------------------------------------------------------------------


@device
def map_rows(size: int) -> int:
    """Return how many scratch rows an affine map of `size` values takes: one more, in whole blocks."""
    return (size + SAMPLES) // SAMPLES * SAMPLES


@device
def start_map(rows: Any, states: int, hidden: int, width: int) -> None:
    """Set the rows to the identity map."""
    clear(rows, map_rows(states * hidden) * states * width)
    for k in range(states):
        for i in range(hidden):
            store_n(rows, (k * hidden + i) * states * width + k * width + i, filled(rows, 1.0), 1)


@device
def add_to_map(row: Any, hidden: int, gy: Any) -> None:
    """Add the gradient that arrives at a step, H numbers, to the map's constant row."""
    for j in range(0, hidden, lanes(row)):
        store(row, j, load(row, j) + load_n(gy, j, hidden - j))


@device
def multiply_map(rows: Any, jacobian: Any, hidden: int, width: int, out: Any) -> None:
    """``out = rows @ jacobian``: take a map of one state one step into the past. 2 · (H + 1) · H² FLOP."""
    clear(out, map_rows(hidden) * width)
    for first in range(0, map_rows(hidden), SAMPLES):
        at = first * width
        multiply_add(advance(rows, at), width, 1, 0, hidden, jacobian, width, width, advance(out, at), width)


@device
def store_map(rows: Any, states: int, hidden: int, width: int, out: Any) -> None:
    """Write the map's rows, one more than it has values, without their padding."""
    for i in range((states * hidden + 1) * states):  # a part of a row after the other
        for j in range(0, hidden, lanes(rows)):
            store_up_to(out, i * hidden + j, load(rows, i * width + j), hidden - j)


@numba.njit(**JIT)
def _combine(maps: Any, bounds: Any) -> None:
    """Apply the chunks' maps one after the other: what comes into every chunk, written into `bounds`.

    maps (chunks - 2, B, n + 1, n): of all chunks but the first and the last in time. bounds (chunks + 1, B, n), where
    entry chunks - 1, what leaves the last chunk, is read and entries chunks - 2 … 1 are written.
    """
    chunks, batch, size = maps.shape[0] + 2, bounds.shape[1], bounds.shape[2]
    m, v = pointer(maps), pointer(bounds)
    for c in range(chunks - 2, 0, -1):
        for b in range(batch):
            rows = advance(m, ((c - 1) * batch + b) * (size + 1) * size)
            incoming, outgoing = ((c + 1) * batch + b) * size, (c * batch + b) * size
            for j in range(0, size, lanes(m)):
                total = load_n(rows, size * size + j, size - j)
                for k in range(size):
                    total = fma(broadcast(v, incoming + k), load_n(rows, k * size + j, size - j), total)
                store_up_to(v, outgoing + j, total, size - j)


# ---- in Numba: a chunk -----------------------------------------------------------------------------------------------


@device
def reduce_part(
    step_map: Any, states: int, saved: Any, initial: Any, task: int, shape: Any, w: Any, gy: Any, first_chunk: int,
    chunks: int, maps: Any,
) -> None:  # fmt: skip
    """Reduce one chunk, from `first_chunk` on, of one sample to an affine map; theirs is the first entry of `maps`."""
    _, batch, hidden = shape
    size = states * hidden
    scratch = np.empty((2 * map_rows(size) * states + size + MAP_ROOM) * w.shape[1] + VECTOR_BYTES, w.dtype)
    target = advance(pointer(maps), task * (size + 1) * size)
    chunk = first_chunk + task // batch
    _reduce_chunk(step_map, states, saved, initial, shape, w, gy, chunk, chunks, task % batch, target, scratch)


@device
def _reduce_chunk(
    step_map: Any, states: int, saved: Any, initial: Any, shape: Any, w: Any, gy: Any, chunk: int, chunks: int, b: int,
    target: Any, scratch: Any,
) -> None:  # fmt: skip
    steps, batch, hidden = shape
    width, size = w.shape[1], states * hidden
    start, stop = chunk_start(chunk, chunks, steps), chunk_start(chunk + 1, chunks, steps)
    has_gy = gy.size > 0
    weights, incoming, step = pointer(w), pointer(gy), batch * hidden
    rows = aligned_pointer(scratch)
    other = advance(rows, map_rows(size) * states * width)
    room = advance(other, map_rows(size) * states * width)
    start_map(rows, states, hidden, width)
    for t in range(stop - 1, start - 1, -1):
        at = t * step + b * hidden
        if has_gy:
            add_to_map(advance(rows, size * states * width), hidden, advance(incoming, at))
        previous = advance(saved[0], at - step) if t > 0 else advance(initial, b * hidden)
        step_map(saved, previous, at, hidden, weights, width, rows, other, room)
        rows, other = other, rows
    store_map(rows, states, hidden, width, target)


# ---- in Numba: Jacobians ---------------------------------------------------------------------------------------------


@device
def write_row(gates: int, factors: Any, weights: Any, i: int, hidden: int, batch: int, out: Any) -> None:
    """Write row i of one step's block ``Σ w_hhᵀ · diag(factor)``: (H, B). factors (gates, H, B)."""
    square, plane = hidden * hidden, hidden * batch
    for j in range(hidden):
        at = j * hidden + i
        for b in range(0, batch, lanes(factors)):
            k, n = j * batch + b, batch - b
            value = broadcast(weights, at) * load_n(factors, k, n)
            for q in range(1, gates):
                value = fma(broadcast(weights, q * square + at), load_n(factors, q * plane + k, n), value)
            store_up_to(out, k, value, n)


@device
def write_jacobian(gates: int, factors: Any, w_hh: Any, t: int, out: Any) -> None:
    """Write one step's (H, H, B) block ``Σ w_hhᵀ · diag(factor)``, plus the diagonal of a factor beyond the gates.

    factors (gates or gates + 1, H, B).
    """
    _, hidden, batch = factors.shape
    plane = hidden * batch
    target, source, weights = advance(pointer(out), t * hidden * plane), pointer(factors), pointer(w_hh)
    for i in range(hidden):
        write_row(gates, source, weights, i, hidden, batch, target)
        if factors.shape[0] > gates:
            for b in range(0, batch, lanes(source)):
                k, n = i * batch + b, batch - b
                store_n(target, k, load_n(target, k, n) + load_n(source, gates * plane + k, n), n)
        target = advance(target, plane)
