"""Products of matrices that consist of small dense blocks, on the host (block Gustavson).

One place stands for a product of two blocks. The block of A stays in registers while it meets the blocks of B's rows,
and a row of a block is one vector. Every sum takes its products in the order of Gustavson's algorithm. A kernel is
compiled for each size of blocks that is met; with a batch, where a vector holds samples, one serves all sizes.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.blocks import add_product, take_block
from sparsebp.kernels.host.engine.parts import INNER_JIT, INNER_SERIAL, JIT, SERIAL, parts_for
from sparsebp.kernels.host.engine.samples import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.team import in_parts, team
from sparsebp.kernels.host.sparse.csr import row_pointers
from sparsebp.kernels.operands import Blocks, Rows


class BlockKernels:
    """Host side of `spgemm_blocks`."""

    def spgemm_blocks(self, rows: Rows, blocks: Blocks, a_data: Array, b_data: Array, out: Array) -> None:
        """Add every product of blocks to its place in C."""
        batch = out.shape[1]
        parts = parts_for((blocks.positions.size * blocks.m * blocks.k * blocks.n + out.shape[0]) * batch)
        arguments = (team(parts), len(blocks.row_cuts) - 1, *rows, *blocks, *flat(a_data, b_data, out))
        if batch == 1:
            _blocks(*arguments, (0,) * blocks.m, (0,) * blocks.k, (0,) * blocks.n)
        else:
            _blocks_of_samples(*arguments)


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**JIT)
def _blocks(team, parts, *args):
    in_parts(_part, team, parts, (Rows(*args[:4]), Blocks(*args[4:10]), Values(*args[10:16]), *args[16:]))


@numba.njit(**INNER_JIT)
def _part(part, arrays, blocks, values, m, k, n):
    rows, v = row_pointers(arrays), pointers(values)
    product_ptr, positions = simd.pointer(blocks.product_ptr), simd.pointer(blocks.positions)
    for g in range(blocks.row_cuts[part], blocks.row_cuts[part + 1]):
        begin, width = _row(rows.a_indptr, g * len(m))
        base, c_width = _row(rows.c_indptr, g * len(m))
        target = simd.advance(v.out, base)
        for i in range(len(m) * c_width):
            target[i] = 0
        p = product_ptr[g]
        for e in range(0, width, len(k)):
            first, b_width = _row(rows.b_indptr, rows.a_indices[begin + e])
            left = take_block(simd.advance(v.a, begin + e), width, m, k)
            right, at = simd.advance(v.b, first), simd.advance(positions, p)
            count = b_width // len(n)
            for q in range(count):
                c = simd.advance(target, np.int64(at[q]) * len(n))
                add_product(c, c_width, left, simd.advance(right, q * len(n)), b_width, m, k, n)
            p += count


@simd.device
def _row(indptr, r):
    """Return where row r begins, and how many entries it has."""
    begin = np.int64(indptr[r])
    return begin, np.int64(indptr[r + 1]) - begin


@numba.njit(**SERIAL)
def _blocks_of_samples(team, parts, *args):
    in_parts(_part_of_samples, team, parts, (Rows(*args[:4]), Blocks(*args[4:10]), Values(*args[10:])))


@numba.njit(**INNER_SERIAL)
def _part_of_samples(part, arrays, blocks, values):
    rows, v = row_pointers(arrays), pointers(values)
    at = simd.pointer(blocks.product_ptr), simd.pointer(blocks.positions)
    size = blocks.m, blocks.k, blocks.n
    for g in range(blocks.row_cuts[part], blocks.row_cuts[part + 1]):
        if v.a_batched and v.b_batched:
            _group(rows, at, size, v, g, True, True)
        elif v.a_batched:
            _group(rows, at, size, v, g, True, False)
        else:
            _group(rows, at, size, v, g, False, True)


@simd.device
def _group(rows, at, size, v, g, a_batched, b_batched):
    """Rows of C with one list of columns, a vector of samples at a time."""
    width = simd.lanes(v.out)
    for s in range(0, v.batch, width):
        if v.batch - s >= width:
            _samples(rows, at, size, v, g, s, a_batched, b_batched, True)
        else:
            _samples(rows, at, size, v, g, s, a_batched, b_batched, False)


@simd.device
def _samples(rows, at, size, v, g, s, a_batched, b_batched, full):
    (product_ptr, positions), (m, k, n) = at, size
    a, b, out, batch, left_over = v.a, v.b, v.out, v.batch, v.batch - s
    begin, width = _row(rows.a_indptr, g * m)
    base, c_width = _row(rows.c_indptr, g * m)
    zero = simd.zeros(out)
    for i in range(base, base + m * c_width):
        put(out, i, batch, s, left_over, full, zero)
    p = product_ptr[g]
    for e in range(begin, begin + width, k):
        first, b_width = _row(rows.b_indptr, rows.a_indices[e])
        for q in range(first, first + b_width, n):
            c = base + np.int64(positions[p]) * n
            for r in range(m):
                for j in range(n):
                    i = c + r * c_width + j
                    total = take(out, i, batch, s, left_over, True, full)
                    for u in range(k):
                        left = take(a, e + r * width + u, batch, s, left_over, a_batched, full)
                        right = take(b, q + u * b_width + j, batch, s, left_over, b_batched, full)
                        total = simd.fma(left, right, total)
                    put(out, i, batch, s, left_over, full, total)
            p += 1
