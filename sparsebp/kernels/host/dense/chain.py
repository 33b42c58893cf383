"""Chains of small dense blocks on the host, run with a vector or reduced to one affine map; batch last.

A chain is sequential, and its samples are independent: a task is one lane block of one chunk, whatever the number of
threads.
"""

from __future__ import annotations

from sparsebp.kernels.host.dense.blocks import matvec_of_block, shared_rows, tile
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.parts import SERIAL
from sparsebp.kernels.host.engine.samples import put, take
from sparsebp.kernels.host.engine.team import parallel

# The functions below are compiled: their arguments are arrays and flags.
# mypy: disable-error-code="no-untyped-def"


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
