"""One small dense block times another or times a vector: the loops that the kernels of `dense` and `dense_chain` share.

With a batch, one vector holds as many samples as fit, and a tile of 4 rows x 2 columns of the result stays in
registers. Shared blocks have their columns side by side instead, so there a vector holds columns. In a tile that
reaches over the edge the last row or column is computed several times, which avoids special cases.

Numba's cache does not notice changes of this file: delete ``__pycache__`` after editing it.
"""

from __future__ import annotations

from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.compile import SERIAL
from sparsebp.kernels.host.engine.simd import put, take
from sparsebp.kernels.host.engine.threads import parallel

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
    """``out = a @ x + add`` for the lane block that begins at `lane`; a batch of one has a separate form."""
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


# Chains of small dense blocks on the host, run with a vector or reduced to one affine map; batch last.
#
# A chain is sequential, and its samples are independent: a task is one lane block of one chunk, whatever the number of
# threads.

# The functions below are compiled: their arguments are arrays and flags.


@parallel(**SERIAL)
def run_chains(task, tasks, a, chunk_ptr, x, add, has_add, out):
    """Run ``v = a[s] @ v + add[s]; out[s] = v`` along the chunks; a task is one lane block of one chunk."""
    _, n, batch = out.shape
    wide = a.shape[3] == batch
    a_all, x_all, add_all, out_all = simd.pointer(a), simd.pointer(x), simd.pointer(add), simd.pointer(out)
    ptr = simd.pointer(chunk_ptr)
    a_size = n * n * (batch if wide else 1)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    zero = a.dtype.type(0)
    chunk = task // blocks
    lane = (task - chunk * blocks) * width
    vector = simd.advance(x_all, chunk * n * batch)
    for s in range(ptr[chunk], ptr[chunk + 1]):
        block = simd.advance(a_all, s * a_size)
        plus, target = simd.advance(add_all, s * n * batch), simd.advance(out_all, s * n * batch)
        matvec_of_block(block, vector, batch, lane, plus, has_add, target, n, n, batch, lane, wide, zero)
        vector = target


@parallel(**SERIAL)
def reduce_matrices(task, tasks, a, chunk_ptr, out, scratch):
    """Products of the chunks' matrices; a task is one lane block of one chunk, with one row of `scratch`."""
    _, n, _, batch = out.shape
    a_all, out_all, ptr = simd.pointer(a), simd.pointer(out), simd.pointer(chunk_ptr)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    size = n * n * batch
    chunk = task // blocks
    lane = (task - chunk * blocks) * width
    left = batch - lane
    product, spare = simd.advance(out_all, chunk * size), simd.advance(simd.pointer(scratch), task * scratch.shape[1])
    first, last = ptr[chunk], ptr[chunk + 1]
    for i in range(n * n):
        if first < last:
            value = take(a_all, first * n * n + i, batch, lane, left, True, False)
        else:  # an empty chunk is the identity
            value = simd.zeros(a_all) + a.dtype.type(1 if i % (n + 1) == 0 else 0)
        put(product, i, batch, lane, left, False, value)
    for s in range(first + 1, last):
        block = simd.advance(a_all, s * size)
        if batch == 1:
            for i in range(n * n):
                spare[i] = product[i]
            shared_rows(block, spare, product, 0, n, n, n)
        elif left >= width:
            _multiply_in_place(block, product, spare, n, batch, lane, True)
        else:
            _multiply_in_place(block, product, spare, n, batch, lane, False)


@simd.device
def _multiply_in_place(a, product, spare, n, batch, lane, full):
    """``product = a @ product`` for one lane block, two columns at a time: a new column needs only its old self."""
    width = simd.lanes(a)
    left = batch - lane
    for j in range(0, n, 2):
        j1 = min(j + 1, n - 1)
        for l in range(n):
            simd.store(spare, 2 * l * width, take(product, l * n + j, batch, lane, left, True, full))
            simd.store(spare, (2 * l + 1) * width, take(product, l * n + j1, batch, lane, left, True, full))
        for i in range(0, n, 4):
            tile(a, spare, 2, 0, width, 0, True, product, i, n, j, n, n, batch, lane, full)


@parallel(**SERIAL)
def reduce_vectors(task, tasks, a, chunk_ptr, add, out, scratch):
    """Vectors of the chunks' affine maps; a task is one lane block of one chunk, with one row of `scratch`."""
    _, n, batch = out.shape
    wide = a.shape[3] == batch
    a_all, add_all, out_all, ptr = simd.pointer(a), simd.pointer(add), simd.pointer(out), simd.pointer(chunk_ptr)
    width = simd.lanes(a_all)
    blocks = (batch + width - 1) // width
    a_size = n * n * (batch if wide else 1)
    zero = a.dtype.type(0)
    spare_batch = 1 if batch == 1 else width
    chunk = task // blocks
    lane = (task - chunk * blocks) * width
    left = batch - lane
    vector, spare = (
        simd.advance(out_all, chunk * n * batch),
        simd.advance(simd.pointer(scratch), task * scratch.shape[1]),
    )
    first, last = ptr[chunk], ptr[chunk + 1]
    for i in range(n):
        value = simd.zeros(a_all)
        if first < last:
            value = take(add_all, first * n + i, batch, lane, left, True, False)
        put(vector, i, batch, lane, left, False, value)
    for s in range(first + 1, last):
        for i in range(n):
            put(spare, i, spare_batch, 0, left, False, take(vector, i, batch, lane, left, True, False))
        block, plus = simd.advance(a_all, s * a_size), simd.advance(add_all, s * n * batch)
        matvec_of_block(block, spare, spare_batch, 0, plus, True, vector, n, n, batch, lane, wide, zero)
