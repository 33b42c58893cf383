"""Weights in panels: the columns of up to three vectors, row after row, so that a product reads them in one stream.

With rows as long as all gates, the pieces of a panel are thousands of bytes apart, fall into a few sets of the caches
and drive each other out; a third of the time of a step of 128 units went there.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba.core import types

from sparsebp.kernels.host.dense.packed import panel_of
from sparsebp.kernels.host.engine.parts import INNER_JIT
from sparsebp.kernels.host.engine.simd import (
    VECTOR_BYTES,
    WORD,
    advance,
    broadcast,
    device,
    fma,
    intrinsic,
    lanes,
    load,
    store,
    zeros,
)
from sparsebp.kernels.host.recurrent.common import SAMPLES
from sparsebp.kernels.host.recurrent.forward import (
    gate_at,
    pack_biases,
    padded,
    part_at,
    room_for_weights,
    row_of_columns,
)
from sparsebp.kernels.host.recurrent.tiles import multiply_1, multiply_2, multiply_3


@intrinsic
def _unknown(typingctx: Any, value: Any) -> Any:
    """Return a number of which the compiler does not know that it is a constant.

    With a constant step between rows LLVM does several turns of a tile's loop at once, for which there are not enough
    registers.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(WORD, [WORD]), "", "=r,0", [args[0]], False)

    return types.int64(types.int64), codegen


@numba.njit(**INNER_JIT)
def _pack_matrix(w: Any, gates: int, columns: int, hidden: int, of_input: bool, out: Any) -> None:
    """Write w (gates·H, K) in panels."""
    depth, count = w.shape[1], VECTOR_BYTES // w.itemsize
    vectors = padded(gates * hidden, w.itemsize) // count
    before = 0 if of_input else part_at(columns - gates, gates, hidden, w.itemsize)
    at = 0
    while at < vectors:
        low, panel = at * count, panel_of(vectors - at) * count
        for part in range(gates):
            gate = gate_at(part, gates, columns) if of_input else part
            begin = part_at(part if of_input else columns - gates + part, gates, hidden, w.itemsize) - before - low
            for j in range(max(0, -begin), min(hidden, panel - begin)):
                source = w[gate * hidden + j]
                for k in range(depth):
                    out[low * depth + k * panel + begin + j] = source[k]
        at += panel // count


@numba.njit(**INNER_JIT)
def pack(gates: int, columns: int, w_ih: Any, b_ih: Any, b_hh: Any, w_hh: Any) -> Any:
    """Return panels of the input's weights, of the state's, and the row of biases; parts are where `part_at` says."""
    hidden, features = w_hh.shape[1], w_ih.shape[1]
    row = padded(gates * hidden, w_hh.itemsize)
    out = room_for_weights(features + hidden, row, row_of_columns(gates, columns, hidden, w_hh.itemsize), w_hh)
    _pack_matrix(w_ih, gates, columns, hidden, True, out)
    _pack_matrix(w_hh, gates, columns, hidden, False, out[features * row :])
    pack_biases(gates, columns, b_ih, b_hh, hidden, out[(features + hidden) * row :])
    return out


@device
def multiply_panels(
    x: Any, x_stride: int, rows: int, depth: int, w: Any, width: int, out: Any, out_stride: int
) -> None:
    """``out[s] += Σ_k x[s, k] · w[k]`` for so many rows; `width` numbers of each, w in panels.

    Rows of `out` are there up to a multiple of four: where there are fewer, the last one is computed again.
    """
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        panel = panel_of(vectors - at)
        weights, step = advance(w, at * count * depth), _unknown(panel * count)
        for s in range(0, rows, SAMPLES):
            last, source = rows - 1 - s, advance(x, s * x_stride)
            r1, r2, r3 = min(1, last) * x_stride, min(2, last) * x_stride, min(3, last) * x_stride
            target = advance(out, s * out_stride + at * count)
            if panel == 3:
                multiply_3(source, r1, r2, r3, depth, weights, step, target, out_stride)
            elif panel == 2:
                multiply_2(source, r1, r2, r3, depth, weights, step, target, out_stride)
            else:
                multiply_1(source, r1, r2, r3, depth, weights, step, target, out_stride)
        at += panel


@device
def multiply_panels_by_row(x: Any, depth: int, w: Any, width: int, out: Any) -> None:
    """The same of one row; two panels of three vectors at a time, so six chains of multiply-adds."""
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        left, weights, target = vectors - at, advance(w, at * count * depth), advance(out, at * count)
        if left >= 6 and left != 7:
            _row_of_two_panels(x, depth, weights, target)
            at += 6
        else:
            panel = panel_of(left)
            _row_of_panel(x, depth, weights, panel, target)
            at += panel


@device
def multiply_panels_by_pair(x: Any, x_stride: int, depth: int, w: Any, width: int, out: Any, out_stride: int) -> None:
    """The same of two rows; two panels of three vectors at a time, so twelve chains."""
    count = lanes(x)
    vectors, at = width // count, 0
    while at < vectors:
        left, weights, target = vectors - at, advance(w, at * count * depth), advance(out, at * count)
        if left >= 6 and left != 7:
            _pair_of_two_panels(x, x_stride, depth, weights, target, out_stride)
            at += 6
        else:
            panel = panel_of(left)
            _row_of_panel(x, depth, weights, panel, target)
            _row_of_panel(advance(x, x_stride), depth, weights, panel, advance(target, out_stride))
            at += panel


@device
def _pair_of_two_panels(x: Any, x_stride: int, depth: int, w: Any, out: Any, out_stride: int) -> None:
    count = lanes(x)
    a0, b0, c0, d0, e0, f0 = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
    a1, b1, c1, d1, e1, f1 = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
    other = advance(w, 3 * count * depth)
    for k in range(depth):
        v0, v1, i = broadcast(x, k), broadcast(x, x_stride + k), 3 * k * count
        row = load(w, i)
        a0, a1 = fma(v0, row, a0), fma(v1, row, a1)
        row = load(w, i + count)
        b0, b1 = fma(v0, row, b0), fma(v1, row, b1)
        row = load(w, i + 2 * count)
        c0, c1 = fma(v0, row, c0), fma(v1, row, c1)
        row = load(other, i)
        d0, d1 = fma(v0, row, d0), fma(v1, row, d1)
        row = load(other, i + count)
        e0, e1 = fma(v0, row, e0), fma(v1, row, e1)
        row = load(other, i + 2 * count)
        f0, f1 = fma(v0, row, f0), fma(v1, row, f1)
    _add_6(out, count, a0, b0, c0, d0, e0, f0)
    _add_6(advance(out, out_stride), count, a1, b1, c1, d1, e1, f1)


@device
def _row_of_two_panels(x: Any, depth: int, w: Any, out: Any) -> None:
    count = lanes(x)
    a, b, c = zeros(x), zeros(x), zeros(x)
    d, e, f = zeros(x), zeros(x), zeros(x)
    other = advance(w, 3 * count * depth)
    for k in range(depth):
        v, i = broadcast(x, k), 3 * k * count
        a, b, c = fma(v, load(w, i), a), fma(v, load(w, i + count), b), fma(v, load(w, i + 2 * count), c)
        d, e = fma(v, load(other, i), d), fma(v, load(other, i + count), e)
        f = fma(v, load(other, i + 2 * count), f)
    _add_6(out, count, a, b, c, d, e, f)


@device
def _row_of_panel(x: Any, depth: int, w: Any, panel: int, out: Any) -> None:
    count = lanes(x)
    if panel == 3:
        a, b, c = zeros(x), zeros(x), zeros(x)
        for k in range(depth):
            v, i = broadcast(x, k), 3 * k * count
            a, b, c = fma(v, load(w, i), a), fma(v, load(w, i + count), b), fma(v, load(w, i + 2 * count), c)
        _add(out, 0, a)
        _add(out, count, b)
        _add(out, 2 * count, c)
        return
    for part in range(panel):
        a = zeros(x)
        for k in range(depth):
            a = fma(broadcast(x, k), load(w, (k * panel + part) * count), a)
        _add(out, part * count, a)


@device
def _add_6(out: Any, count: int, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> None:
    _add(out, 0, a)
    _add(out, count, b)
    _add(out, 2 * count, c)
    _add(out, 3 * count, d)
    _add(out, 4 * count, e)
    _add(out, 5 * count, f)


@device
def _add(out: Any, at: int, value: Any) -> None:
    store(out, at, load(out, at) + value)
