"""Products of a few rows with packed weights, and sums of outer products: what recurrent steps consist of.

Each works on a tile that stays in registers: four rows by up to three vectors, of which each vector of weights that is
loaded serves four multiply-adds and each number that is broadcast three. Every result is one chain of multiply-adds in
the order of its terms, whatever tile it falls into, and for one row as for four.
"""

from __future__ import annotations

from typing import Any

from sparsebp.kernels.host.dense.packed import panel_of
from sparsebp.kernels.host.engine.simd import advance, broadcast, device, fma, lanes, load, store, zeros


@device
def multiply(
    x: Any, r1: int, r2: int, r3: int, depth: int, w: Any, w_stride: int, width: int, out: Any, out_stride: int
) -> None:
    """``out[s] += Σ_k x[r_s + k] · w[k]`` for four rows that begin at x and r1, r2 and r3 behind it.

    w (depth, w_stride) and the rows of `out`, of which whole vectors up to `width` are used. 8 · depth · width FLOP.
    """
    count = lanes(x)
    j = 0
    while j < width:
        panel = panel_of((width - j) // count)
        target, weights = advance(out, j), advance(w, j)
        if panel == 3:
            multiply_3(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        elif panel == 2:
            multiply_2(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        else:
            multiply_1(x, r1, r2, r3, depth, weights, w_stride, target, out_stride)
        j += panel * count


@device
def multiply_3(x: Any, r1: int, r2: int, r3: int, depth: int, w: Any, w_stride: int, out: Any, stride: int) -> None:
    """`multiply`, for a tile of three vectors."""
    count = lanes(x)
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    b0, b1, b2, b3 = zeros(x), zeros(x), zeros(x), zeros(x)
    c0, c1, c2, c3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa, wb, wc = load(row, 0), load(row, count), load(row, 2 * count)
        row = advance(row, w_stride)
        v = broadcast(x, k)
        a0, b0, c0 = fma(v, wa, a0), fma(v, wb, b0), fma(v, wc, c0)
        v = broadcast(x, r1 + k)
        a1, b1, c1 = fma(v, wa, a1), fma(v, wb, b1), fma(v, wc, c1)
        v = broadcast(x, r2 + k)
        a2, b2, c2 = fma(v, wa, a2), fma(v, wb, b2), fma(v, wc, c2)
        v = broadcast(x, r3 + k)
        a3, b3, c3 = fma(v, wa, a3), fma(v, wb, b3), fma(v, wc, c3)
    _add_4(out, 0, stride, a0, a1, a2, a3)
    _add_4(out, count, stride, b0, b1, b2, b3)
    _add_4(out, 2 * count, stride, c0, c1, c2, c3)


@device
def multiply_2(x: Any, r1: int, r2: int, r3: int, depth: int, w: Any, w_stride: int, out: Any, stride: int) -> None:
    """`multiply`, for a tile of two vectors."""
    count = lanes(x)
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    b0, b1, b2, b3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa, wb = load(row, 0), load(row, count)
        row = advance(row, w_stride)
        v0, v1, v2, v3 = broadcast(x, k), broadcast(x, r1 + k), broadcast(x, r2 + k), broadcast(x, r3 + k)
        a0, a1, a2, a3 = fma(v0, wa, a0), fma(v1, wa, a1), fma(v2, wa, a2), fma(v3, wa, a3)
        b0, b1, b2, b3 = fma(v0, wb, b0), fma(v1, wb, b1), fma(v2, wb, b2), fma(v3, wb, b3)
    _add_4(out, 0, stride, a0, a1, a2, a3)
    _add_4(out, count, stride, b0, b1, b2, b3)


@device
def multiply_1(x: Any, r1: int, r2: int, r3: int, depth: int, w: Any, w_stride: int, out: Any, stride: int) -> None:
    """`multiply`, for a tile of one vector."""
    a0, a1, a2, a3 = zeros(x), zeros(x), zeros(x), zeros(x)
    row = w
    for k in range(depth):
        wa = load(row, 0)
        row = advance(row, w_stride)
        a0, a1 = fma(broadcast(x, k), wa, a0), fma(broadcast(x, r1 + k), wa, a1)
        a2, a3 = fma(broadcast(x, r2 + k), wa, a2), fma(broadcast(x, r3 + k), wa, a3)
    _add_4(out, 0, stride, a0, a1, a2, a3)


@device
def _add(out: Any, at: int, value: Any) -> None:
    store(out, at, load(out, at) + value)


@device
def _add_4(out: Any, at: int, stride: int, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    _add(out, at, v0)
    _add(out, at + stride, v1)
    _add(out, at + 2 * stride, v2)
    _add(out, at + 3 * stride, v3)


@device
def multiply_row(x: Any, depth: int, w: Any, w_stride: int, width: int, out: Any) -> None:
    """The same of one row; six chains at a time."""
    count = lanes(x)
    j = 0
    while j + 6 * count <= width:
        a, b, c, d, e, f = zeros(x), zeros(x), zeros(x), zeros(x), zeros(x), zeros(x)
        row = advance(w, j)
        for k in range(depth):
            v = broadcast(x, k)
            a, b, c = fma(v, load(row, 0), a), fma(v, load(row, count), b), fma(v, load(row, 2 * count), c)
            d, e = fma(v, load(row, 3 * count), d), fma(v, load(row, 4 * count), e)
            f = fma(v, load(row, 5 * count), f)
            row = advance(row, w_stride)
        _add(out, j, a)
        _add(out, j + count, b)
        _add(out, j + 2 * count, c)
        _add(out, j + 3 * count, d)
        _add(out, j + 4 * count, e)
        _add(out, j + 5 * count, f)
        j += 6 * count
    while j + 3 * count <= width:
        a, b, c = zeros(x), zeros(x), zeros(x)
        row = advance(w, j)
        for k in range(depth):
            v = broadcast(x, k)
            a, b, c = fma(v, load(row, 0), a), fma(v, load(row, count), b), fma(v, load(row, 2 * count), c)
            row = advance(row, w_stride)
        _add(out, j, a)
        _add(out, j + count, b)
        _add(out, j + 2 * count, c)
        j += 3 * count
    while j < width:
        a = zeros(x)
        row = advance(w, j)
        for k in range(depth):
            a = fma(broadcast(x, k), load(row, 0), a)
            row = advance(row, w_stride)
        _add(out, j, a)
        j += count


@device
def add_outer(x: Any, x_row: int, features: int, a: Any, a_row: int, rows: int, width: int, out: Any) -> None:
    """``out[i] += Σ_r x[r·x_row + i] · a[r·a_row …]``.

    out (features, width), of whole vectors. 2 · rows · features · width FLOP. Where no four features are left the last
    is taken several times: the same sum, written again.
    """
    count = lanes(x)
    j = 0
    while j < width:  # outside: a panel of `a` stays in the first cache, whatever the features
        wide, values = panel_of((width - j) // count), advance(a, j)
        for i in range(0, features, 4):
            i1, i2, i3 = min(i + 1, features - 1), min(i + 2, features - 1), min(i + 3, features - 1)
            o0, o1, o2, o3 = i * width + j, i1 * width + j, i2 * width + j, i3 * width + j
            d1, d2, d3, of_x = i1 - i, i2 - i, i3 - i, advance(x, i)
            if wide == 3:
                _outer_3(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
            elif wide == 2:
                _outer_2(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
            else:
                _outer_1(of_x, x_row, d1, d2, d3, values, a_row, rows, out, o0, o1, o2, o3)
        j += wide * count


@device
def _outer_3(
    x: Any, x_row: int, d1: int, d2: int, d3: int, a: Any, a_row: int, rows: int, out: Any, o0: int, o1: int, o2: int,
    o3: int,
) -> None:  # fmt: skip
    n = lanes(x)
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    b0, b1, b2, b3 = load(out, o0 + n), load(out, o1 + n), load(out, o2 + n), load(out, o3 + n)
    c0, c1, c2, c3 = load(out, o0 + 2 * n), load(out, o1 + 2 * n), load(out, o2 + 2 * n), load(out, o3 + 2 * n)
    for _ in range(rows):
        wa, wb, wc = load(a, 0), load(a, n), load(a, 2 * n)
        v = broadcast(x, 0)
        a0, b0, c0 = fma(v, wa, a0), fma(v, wb, b0), fma(v, wc, c0)
        v = broadcast(x, d1)
        a1, b1, c1 = fma(v, wa, a1), fma(v, wb, b1), fma(v, wc, c1)
        v = broadcast(x, d2)
        a2, b2, c2 = fma(v, wa, a2), fma(v, wb, b2), fma(v, wc, c2)
        v = broadcast(x, d3)
        a3, b3, c3 = fma(v, wa, a3), fma(v, wb, b3), fma(v, wc, c3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)
    _store_4(out, o0 + n, o1 + n, o2 + n, o3 + n, b0, b1, b2, b3)
    _store_4(out, o0 + 2 * n, o1 + 2 * n, o2 + 2 * n, o3 + 2 * n, c0, c1, c2, c3)


@device
def _outer_2(
    x: Any, x_row: int, d1: int, d2: int, d3: int, a: Any, a_row: int, rows: int, out: Any, o0: int, o1: int, o2: int,
    o3: int,
) -> None:  # fmt: skip
    n = lanes(x)
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    b0, b1, b2, b3 = load(out, o0 + n), load(out, o1 + n), load(out, o2 + n), load(out, o3 + n)
    for _ in range(rows):
        wa, wb = load(a, 0), load(a, n)
        v0, v1, v2, v3 = broadcast(x, 0), broadcast(x, d1), broadcast(x, d2), broadcast(x, d3)
        a0, a1, a2, a3 = fma(v0, wa, a0), fma(v1, wa, a1), fma(v2, wa, a2), fma(v3, wa, a3)
        b0, b1, b2, b3 = fma(v0, wb, b0), fma(v1, wb, b1), fma(v2, wb, b2), fma(v3, wb, b3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)
    _store_4(out, o0 + n, o1 + n, o2 + n, o3 + n, b0, b1, b2, b3)


@device
def _outer_1(
    x: Any, x_row: int, d1: int, d2: int, d3: int, a: Any, a_row: int, rows: int, out: Any, o0: int, o1: int, o2: int,
    o3: int,
) -> None:  # fmt: skip
    a0, a1, a2, a3 = load(out, o0), load(out, o1), load(out, o2), load(out, o3)
    for _ in range(rows):
        wa = load(a, 0)
        a0, a1 = fma(broadcast(x, 0), wa, a0), fma(broadcast(x, d1), wa, a1)
        a2, a3 = fma(broadcast(x, d2), wa, a2), fma(broadcast(x, d3), wa, a3)
        x, a = advance(x, x_row), advance(a, a_row)
    _store_4(out, o0, o1, o2, o3, a0, a1, a2, a3)


@device
def _store_4(out: Any, o0: int, o1: int, o2: int, o3: int, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    store(out, o0, v0)
    store(out, o1, v1)
    store(out, o2, v2)
    store(out, o3, v3)
