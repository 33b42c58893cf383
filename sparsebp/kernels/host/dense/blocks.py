"""One small dense block times another or times a vector: the loops that the kernels of `dense` and `dense_chain` share.

With a batch, one vector holds as many samples as fit, and a tile of 4 rows x 2 columns of the result stays in
registers. Shared blocks have their columns side by side instead, so there a vector holds columns. In a tile that
reaches over the edge the last row or column is computed several times, alike, which spares every special case.

Numba does not notice changes of this file in what it has cached: delete ``__pycache__`` after editing it.
"""

from __future__ import annotations

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.samples import put, take

# The functions below are inlined into compiled ones: their arguments are pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@simd.device
def tile(a, b, b_columns, b_first, b_batch, b_lane, b_wide, out, i, rows, j, k, n, batch, lane, full):
    """4 rows (i ...) x 2 columns (j ...) of ``out = a @ b`` for one lane block of per-sample `a`.

    The columns of `b` that belong to j ... begin at `b_first` of its `b_columns`; it may be scratch with a batch of its
    own.
    """
    left = batch - lane
    second = min(1, n - 1 - j)
    i1, i2, i3, j1 = min(i + 1, rows - 1), min(i + 2, rows - 1), min(i + 3, rows - 1), j + second
    c00 = c01 = c10 = c11 = c20 = c21 = c30 = c31 = simd.zeros(a)
    for l in range(k):
        at = l * b_columns + b_first
        b0 = take(b, at, b_batch, b_lane, left, b_wide, full)
        b1 = take(b, at + second, b_batch, b_lane, left, b_wide, full)
        a0 = take(a, i * k + l, batch, lane, left, True, full)
        a1 = take(a, i1 * k + l, batch, lane, left, True, full)
        a2 = take(a, i2 * k + l, batch, lane, left, True, full)
        a3 = take(a, i3 * k + l, batch, lane, left, True, full)
        c00, c01 = simd.fma(a0, b0, c00), simd.fma(a0, b1, c01)
        c10, c11 = simd.fma(a1, b0, c10), simd.fma(a1, b1, c11)
        c20, c21 = simd.fma(a2, b0, c20), simd.fma(a2, b1, c21)
        c30, c31 = simd.fma(a3, b0, c30), simd.fma(a3, b1, c31)
    _put_pair(out, i * n + j, i * n + j1, batch, lane, left, full, c00, c01)
    _put_pair(out, i1 * n + j, i1 * n + j1, batch, lane, left, full, c10, c11)
    _put_pair(out, i2 * n + j, i2 * n + j1, batch, lane, left, full, c20, c21)
    _put_pair(out, i3 * n + j, i3 * n + j1, batch, lane, left, full, c30, c31)


@simd.device
def _put_pair(out, entry, other, batch, lane, left, full, value, other_value):
    put(out, entry, batch, lane, left, full, value)
    put(out, other, batch, lane, left, full, other_value)


@simd.device
def shared_rows(a, b, out, first, last, k, width):
    """Rows first ... last of ``out = a @ b``, `a` shared; a row of `b` or `out` is `width` numbers side by side."""
    step = simd.lanes(a)
    whole = width - width % step
    for i in range(first, last, 4):
        for w in range(0, whole, step):
            _shared_strip(a, b, out, i, last, k, width, w, True)
        if whole < width:
            _shared_strip(a, b, out, i, last, k, width, whole, False)


@simd.device
def _shared_strip(a, b, out, i, last, k, width, w, full):
    """4 rows (i ...) x one vector of columns (w ...) of ``out = a @ b`` for a shared `a`."""
    left = width - w
    i1, i2, i3 = min(i + 1, last - 1), min(i + 2, last - 1), min(i + 3, last - 1)
    c0 = c1 = c2 = c3 = simd.zeros(a)
    for l in range(k):
        right = take(b, l, width, w, left, True, full)
        c0 = simd.fma(simd.broadcast(a, i * k + l), right, c0)
        c1 = simd.fma(simd.broadcast(a, i1 * k + l), right, c1)
        c2 = simd.fma(simd.broadcast(a, i2 * k + l), right, c2)
        c3 = simd.fma(simd.broadcast(a, i3 * k + l), right, c3)
    put(out, i, width, w, left, full, c0)
    put(out, i1, width, w, left, full, c1)
    put(out, i2, width, w, left, full, c2)
    put(out, i3, width, w, left, full, c3)


@simd.device
def _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, wide, full):
    """``out = a @ x + add`` for one lane block; `x` may be scratch that holds `x_batch` samples an entry."""
    left = batch - lane
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        c0 = c1 = c2 = c3 = simd.zeros(a)
        if has_add:
            c0, c1 = take(add, i, batch, lane, left, True, full), take(add, i1, batch, lane, left, True, full)
            c2, c3 = take(add, i2, batch, lane, left, True, full), take(add, i3, batch, lane, left, True, full)
        for j in range(k):
            value = take(x, j, x_batch, x_lane, left, True, full)
            c0 = simd.fma(take(a, i * k + j, batch, lane, left, wide, full), value, c0)
            c1 = simd.fma(take(a, i1 * k + j, batch, lane, left, wide, full), value, c1)
            c2 = simd.fma(take(a, i2 * k + j, batch, lane, left, wide, full), value, c2)
            c3 = simd.fma(take(a, i3 * k + j, batch, lane, left, wide, full), value, c3)
        put(out, i, batch, lane, left, full, c0)
        put(out, i1, batch, lane, left, full, c1)
        put(out, i2, batch, lane, left, full, c2)
        put(out, i3, batch, lane, left, full, c3)


@simd.device
def _single_matvec(a, x, add, has_add, out, m, k, zero):
    """``out = a @ x + add`` for a batch of one: four rows at a time, so that four sums run side by side."""
    for i in range(0, m, 4):
        i1, i2, i3 = min(i + 1, m - 1), min(i + 2, m - 1), min(i + 3, m - 1)
        c0 = c1 = c2 = c3 = zero
        if has_add:
            c0, c1, c2, c3 = add[i], add[i1], add[i2], add[i3]
        for j in range(k):
            value = x[j]
            c0 += a[i * k + j] * value
            c1 += a[i1 * k + j] * value
            c2 += a[i2 * k + j] * value
            c3 += a[i3 * k + j] * value
        out[i], out[i1], out[i2], out[i3] = c0, c1, c2, c3


@simd.device
def matvec_of_block(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, wide, zero):
    """``out = a @ x + add`` for the lane block that begins at `lane`; a batch of one is a block of its own kind."""
    full = batch - lane >= simd.lanes(a)
    if batch == 1:
        _single_matvec(a, x, add, has_add, out, m, k, zero)
    elif wide and full:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, True, True)
    elif wide:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, True, False)
    elif full:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, False, True)
    else:
        _lanes_matvec(a, x, x_batch, x_lane, add, has_add, out, m, k, batch, lane, False, False)
