"""The numeric phase of sparse products on the host: a kernel for each strategy.

`pairs`: every entry of C is summed in a register from the list of its products. For C with many products an entry and
for short rows of B: nothing is added to memory, no loop is as short as a row of B, and one word tells both entries that
a product multiplies. A branch that is guessed wrong costs as much as ten products, so without a batch a tile's entries
are visited in the order of how many products they have, as their lists stand: loops then hardly change their length.
With a batch they are visited as they lie in C, and so is most of B.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.host_pool import empty
from sparsebp.kernels.host.dense.products import DenseKernels
from sparsebp.kernels.host.engine import simd
from sparsebp.kernels.host.engine.blocks import add_product, take_block
from sparsebp.kernels.host.engine.compile import INNER_JIT, INNER_SERIAL, JIT, SERIAL, parts_for, row_at, share, span
from sparsebp.kernels.host.engine.simd import Values, flat, pointers, put, take
from sparsebp.kernels.host.engine.threads import in_parts, parallel, team
from sparsebp.kernels.host.sparse.csr import row_pointers, scale_entries, whole
from sparsebp.kernels.operands import Blocks, Columns, Pairs, Places, Rows, Runs, Terms

# Products that keep nothing per product, on the host: a dense row collects the sums (Gustavson's algorithm).
#
# For products too many to index, and where C has far fewer entries than there are products: then the columns of B, read
# again and again, stay in the cache, while an index of every product would come from memory.


class AccumulateKernels:
    """Host side of `spgemm_accumulate`."""

    def spgemm_accumulate(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Values of C = A @ B through a dense row of sums, one a part of the rows."""
        products = len(rows.a_indices) * len(b_data) // max(len(rows.b_indptr) - 1, 1)  # on average
        batch = out.shape[1]
        parts = parts_for((products + len(out)) * batch, vectors=batch > 1)
        _accumulate(team(parts), len(columns.row_cuts) - 1, *rows, *columns, *flat(a_data, b_data, out))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _accumulate(team, parts, *args):
    in_parts(_accumulate_part, team, parts, (Rows(*args[:4]), Columns(*args[4:8]), Values(*args[8:])))


@numba.njit(**INNER_SERIAL)
def _accumulate_part(part, rows, columns, values):
    width = simd.lanes(simd.pointer(values.out))
    sums = np.empty(columns.n * (1 if values.batch == 1 else width) + width, values.out.dtype)
    _with_sums(part, rows, columns, values, sums)


@numba.njit(**INNER_SERIAL)
def _with_sums(part, arrays, columns, values, sums):
    rows, v, low, high = row_pointers(arrays), pointers(values), columns.row_cuts[part], columns.row_cuts[part + 1]
    b_indices, c_indices = simd.pointer(columns.b_indices), simd.pointer(columns.c_indices)
    if v.batch == 1:
        _accumulate_rows_of_one(rows, b_indices, c_indices, simd.pointer(sums), v, low, high)
        return
    row = simd.aligned_pointer(sums)
    if v.a_batched and v.b_batched:
        _accumulate_rows(rows, b_indices, c_indices, row, v, True, True, low, high)
    elif v.a_batched:
        _accumulate_rows(rows, b_indices, c_indices, row, v, True, False, low, high)
    else:
        _accumulate_rows(rows, b_indices, c_indices, row, v, False, True, low, high)


@simd.device
def _accumulate_rows_of_one(rows, b_indices, c_indices, row, v, low, high):
    a_indptr, a_indices, b_indptr, c_indptr = rows
    width = simd.lanes(v.out)
    for r in range(low, high):
        begin, end = c_indptr[r], c_indptr[r + 1]
        for i in range(begin, end):
            row[c_indices[i]] = 0
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m, value = a_indices[k], v.a[k]
            first = b_indptr[m]
            length = b_indptr[m + 1] - first
            right, at = simd.advance(v.b, first), simd.advance(b_indices, first)
            whole = length - length % 4
            for q in range(0, whole, 4):
                j0, j1, j2, j3 = at[q], at[q + 1], at[q + 2], at[q + 3]
                r0, r1, r2, r3 = right[q], right[q + 1], right[q + 2], right[q + 3]
                row[j0] += value * r0
                row[j1] += value * r1
                row[j2] += value * r2
                row[j3] += value * r3
            for q in range(whole, length):
                row[at[q]] += value * right[q]
        whole = end - (end - begin) % width
        for i in range(begin, whole, width):
            simd.store(v.out, i, simd.load_at(row, c_indices, i))
        for i in range(whole, end):
            v.out[i] = row[c_indices[i]]


@simd.device
def _accumulate_rows(rows, b_indices, c_indices, row, v, a_batched, b_batched, low, high):
    width = simd.lanes(v.out)
    for r in range(low, high):
        s = 0
        while s + width <= v.batch:
            _accumulate_row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, True)
            s += width
        if s < v.batch:
            _accumulate_row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, False)


@simd.device
def _accumulate_row(rows, b_indices, c_indices, row, v, a_batched, b_batched, r, s, full):
    """One row of C for one block of samples; a column has a whole vector of sums."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
    batch, n, width, zero = v.batch, v.batch - s, simd.lanes(v.out), simd.zeros(v.out)
    for i in range(c_indptr[r], c_indptr[r + 1]):
        simd.store(row, c_indices[i] * width, zero)
    for k in range(a_indptr[r], a_indptr[r + 1]):
        m = a_indices[k]
        left = take(v.a, k, batch, s, n, a_batched, full)
        for q in range(b_indptr[m], b_indptr[m + 1]):
            j = b_indices[q] * width
            simd.store(row, j, simd.fma(left, take(v.b, q, batch, s, n, b_batched, full), simd.load(row, j)))
    for i in range(c_indptr[r], c_indptr[r + 1]):
        put(v.out, i, batch, s, n, full, simd.load(row, c_indices[i] * width))


# Products of matrices that consist of small dense blocks, on the host (block Gustavson).
#
# One place stands for a product of two blocks. The block of A stays in registers while it meets the blocks of B's rows,
# and a row of a block is one vector. Every sum takes its products in the order of Gustavson's algorithm. A kernel is
# compiled for each size of blocks that is met; with a batch, where a vector holds samples, one serves all sizes.


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


@numba.njit(**JIT)
def _blocks(team, parts, *args):
    in_parts(_blocks_part, team, parts, (Rows(*args[:4]), Blocks(*args[4:10]), Values(*args[10:16]), *args[16:]))


@numba.njit(**INNER_JIT)
def _blocks_part(part, arrays, blocks, values, m, k, n):
    rows, v = row_pointers(arrays), pointers(values)
    product_ptr, positions = simd.pointer(blocks.product_ptr), simd.pointer(blocks.positions)
    for g in range(blocks.row_cuts[part], blocks.row_cuts[part + 1]):
        begin, width = _blocks_row(rows.a_indptr, g * len(m))
        base, c_width = _blocks_row(rows.c_indptr, g * len(m))
        target = simd.advance(v.out, base)
        for i in range(len(m) * c_width):
            target[i] = 0
        p = product_ptr[g]
        for e in range(0, width, len(k)):
            first, b_width = _blocks_row(rows.b_indptr, rows.a_indices[begin + e])
            left = take_block(simd.advance(v.a, begin + e), width, m, k)
            right, at = simd.advance(v.b, first), simd.advance(positions, p)
            count = b_width // len(n)
            for q in range(count):
                c = simd.advance(target, np.int64(at[q]) * len(n))
                add_product(c, c_width, left, simd.advance(right, q * len(n)), b_width, m, k, n)
            p += count


@simd.device
def _blocks_row(indptr, r):
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
    begin, width = _blocks_row(rows.a_indptr, g * m)
    base, c_width = _blocks_row(rows.c_indptr, g * m)
    zero = simd.zeros(out)
    for i in range(base, base + m * c_width):
        put(out, i, batch, s, left_over, full, zero)
    p = product_ptr[g]
    for e in range(begin, begin + width, k):
        first, b_width = _blocks_row(rows.b_indptr, rows.a_indices[e])
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


# Products of nearly full sparse matrices on the host: written out with their zeros, dense ones are multiplied.
#
# A multiply-add of these takes a twentieth of one that looks up where it belongs, so this pays long before all entries
# are there. Sums run in the same order, and a zero changes none: results are bitwise equal to `spgemm_accumulate`'s.
# But a zero times an infinity or a NaN would be a NaN where the product of sparse matrices has nothing to add: values
# that are not all finite are summed entry by entry.

_ONE = np.zeros(1, np.int64)
"""The number of the only matrix of a stack."""


class FilledKernels(AccumulateKernels, DenseKernels):
    """Host side of `spgemm_filled`."""

    def spgemm_filled(self, rows: Rows, columns: Columns, a_data: Array, b_data: Array, out: Array) -> None:
        """Values of C = A @ B by a product of dense matrices; with a batch, through dense rows of sums.

        With a batch a place is looked up once for a vector of samples, and nothing is left to gain.
        """
        if out.shape[1] != 1:  # none among them: a value an entry would be read and written that is not there
            self.spgemm_accumulate(rows, columns, a_data, b_data, out)
            return
        m, k, n = len(rows.a_indptr) - 1, len(rows.b_indptr) - 1, columns.n
        left, right = empty(np, (1, m, k, 1), out.dtype), empty(np, (1, k, n, 1), out.dtype)
        finite = _fill(rows.a_indptr, rows.a_indices, a_data, left)
        if not (finite and _fill(rows.b_indptr, columns.b_indices, b_data, right)):
            self.spgemm_accumulate(rows, columns, a_data, b_data, out)
            return
        full = len(out) == m * n
        result = out.reshape(1, m, n, 1) if full else empty(np, (1, m, n, 1), out.dtype)
        self.dense_matmul(left, _ONE, right, _ONE, result, _ONE)
        if not full:
            parts = parts_for(len(out))
            _read(team(parts), parts, rows.c_indptr, columns.c_indices, result, out.reshape(-1))


def _fill(indptr: Array, indices: Array, data: Array, matrix: Array) -> bool:
    """Write the values on a pattern to a dense matrix (1, m, n, 1); say whether all are finite."""
    parts = parts_for(matrix.size)
    strange = np.zeros(parts, np.int64)
    _write(team(parts), parts, indptr, indices, data.reshape(-1), matrix, strange)
    return not strange.any()


# The functions below are compiled: their arguments are index arrays, values (nnz,), dense matrices, sizes.


@parallel(**SERIAL)
def _write(part, parts, indptr, indices, data, matrix, strange):
    ptr, columns, values, (count, width) = (
        simd.pointer(indptr),
        simd.pointer(indices),
        simd.pointer(data),
        matrix.shape[1:3],
    )
    low, high = span(part, parts, count)
    whole, found = simd.pointer(matrix), False
    for r in range(low, high):
        row = simd.advance(whole, r * width)
        simd.clear(row, width)
        for e in range(ptr[r], ptr[r + 1]):
            value = values[e]
            row[columns[e]] = value
            found |= value - value != 0
    strange[part] = found


@parallel(**SERIAL)
def _read(part, parts, indptr, indices, matrix, out):
    ptr, columns, values, (count, width) = (
        simd.pointer(indptr),
        simd.pointer(indices),
        simd.pointer(out),
        matrix.shape[1:3],
    )
    low, high = span(part, parts, count)
    whole = simd.pointer(matrix)
    for r in range(low, high):
        row = simd.advance(whole, r * width)
        for e in range(ptr[r], ptr[r + 1]):
            values[e] = row[columns[e]]


IN_ONE_SUM = 8
"""Products up to which an entry's are added one after the other; of more, product t goes to lane t % 4, those that are
left over to the first. The same for a sample alone and for one of a batch: results depend on values only."""


class PairKernels:
    """Host side of `spgemm_pairs`."""

    def spgemm_pairs(self, pairs: Pairs, a_data: Array, b_data: Array, out: Array) -> None:
        """Sum every entry of C from its pairs."""
        batch = out.shape[1]
        parts = parts_for((pairs.words.size + out.shape[0]) * batch, vectors=batch > 1)
        _pairs(team(parts), len(pairs.tile_cuts) - 1, *pairs, *flat(a_data, b_data, out), out.dtype.type(0))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.


@numba.njit(**SERIAL)
def _pairs(team, parts, *args):
    in_parts(_pairs_part, team, parts, (Pairs(*args[:7]), Values(*args[7:13]), args[13]))


@numba.njit(**INNER_SERIAL)
def _pairs_part(part, pairs, values, zero):
    v, words, shift, tiles = (
        pointers(values),
        simd.pointer(pairs.words),
        np.uint64(pairs.shift),
        simd.pointer(pairs.tiles),
    )
    order, starts, lengths = simd.pointer(pairs.order), simd.pointer(pairs.starts), simd.pointer(pairs.lengths)
    width, a_step = pairs.tiles.shape[1], v.batch if v.a_batched else 1
    line, last = 64 // pairs.words.itemsize, len(pairs.tiles) - 1
    for t in range(pairs.tile_cuts[part], pairs.tile_cuts[part + 1]):
        tile = simd.advance(tiles, t * width)
        begin, entries = tile[0], tile[width] - tile[0]
        a, out = simd.advance(v.a, tile[1] * a_step), simd.advance(v.out, begin * v.batch)
        here = Values(a, v.b, out, v.batch, v.a_batched, v.b_batched)
        own, n = simd.advance(words, tile[2]), simd.advance(lengths, begin)
        if v.batch == 1:
            _tile_of_one(own, simd.advance(order, begin), n, simd.advance(tile, 3), shift, here, entries, zero)
            continue
        at = simd.advance(starts, begin)
        _fetch(words, tile[width + 2], tile[2 * width + 2] if t + 1 < last else tile[width + 2], line)
        if v.a_batched and v.b_batched:
            _tile(own, at, n, shift, here, entries, True, True)
        elif v.a_batched:
            _tile(own, at, n, shift, here, entries, True, False)
        else:
            _tile(own, at, n, shift, here, entries, False, True)


@simd.device
def _fetch(words, begin, end, line):
    """Ask for the words of the next tile, which are then not met in the order in which they stand."""
    for p in range(begin, end, line):
        simd.prefetch(words, p)


@simd.device
def _pairs_add(total, words, p, shift, mask, a, b):
    """Return `total` and product p."""
    word = np.uint64(words[p])
    return simd.fma(a[word & mask], b[word >> shift], total)


@simd.device
def _tile_of_one(p, order, lengths, counts, shift, v, entries, zero):
    """One tile: entries with up to `IN_ONE_SUM` products, written out, and those with more."""
    mask = (np.uint64(1) << shift) - np.uint64(1)
    a, b, out = v.a, v.b, v.out
    p, e = _lists_of(1, counts, p, order, 0, shift, mask, a, b, out, zero)
    p, e = _lists_of(2, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(3, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(4, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(5, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(6, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(7, counts, p, order, e, shift, mask, a, b, out, zero)
    p, e = _lists_of(8, counts, p, order, e, shift, mask, a, b, out, zero)
    while e < entries:
        c = order[e]
        n = np.int64(lengths[c])
        out[c] = _long_sum(p, n, shift, mask, a, b, zero)
        p = simd.advance(p, n)
        e += 1


@simd.device
def _lists_of(n, counts, p, order, e, shift, mask, a, b, out, zero):
    """Sum the lists of n words, a constant; return the next place."""
    for _ in range(counts[n - 1]):
        s = _pairs_add(zero, p, 0, shift, mask, a, b)
        for q in range(1, n):  # written out, as n is known where this is called
            s = _pairs_add(s, p, q, shift, mask, a, b)
        out[order[e]] = s
        p = simd.advance(p, n)
        e += 1
    return p, e


@simd.device
def _long_sum(p, n, shift, mask, a, b, zero):
    """Return the sum of more products in four lanes: one would wait for each addition."""
    s0 = s1 = s2 = s3 = zero
    whole = n - n % 4
    for t in range(0, whole, 4):
        s0 = _pairs_add(s0, p, t, shift, mask, a, b)
        s1 = _pairs_add(s1, p, t + 1, shift, mask, a, b)
        s2 = _pairs_add(s2, p, t + 2, shift, mask, a, b)
        s3 = _pairs_add(s3, p, t + 3, shift, mask, a, b)
    for t in range(whole, n):
        s0 = _pairs_add(s0, p, t, shift, mask, a, b)
    return (s0 + s1) + (s2 + s3)


@simd.device
def _tile(words, starts, lengths, shift, v, entries, a_batched, b_batched):
    """One tile for all samples, two vectors at a time while both are whole."""
    width, s = simd.lanes(v.out), 0
    while s + 2 * width <= v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, True, True)
        s += 2 * width
    if s + width <= v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, True, False)
        s += width
    if s < v.batch:
        _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, False, False)


@simd.device
def _block(words, starts, lengths, shift, v, entries, a_batched, b_batched, s, full, two):
    """One or two vectors of samples, the products of every entry in the same lanes as without a batch."""
    zero, further, n = simd.zeros(v.out), s + simd.lanes(v.out), v.batch - s
    for c in range(entries):
        p, terms, one, other = simd.advance(words, starts[c]), np.int64(lengths[c]), zero, zero
        if terms <= IN_ONE_SUM:
            for t in range(terms):
                one = _add_samples(one, p, t, shift, v, a_batched, b_batched, s, full)
                if two:
                    other = _add_samples(other, p, t, shift, v, a_batched, b_batched, further, True)
        else:
            one = _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, s, full)
            if two:
                other = _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, further, True)
        put(v.out, c, v.batch, s, n, full, one)
        if two:
            put(v.out, c, v.batch, further, n, True, other)


@simd.device
def _long_sum_of_samples(p, terms, shift, v, a_batched, b_batched, s, full):
    s0 = s1 = s2 = s3 = simd.zeros(v.out)
    whole = terms - terms % 4
    for t in range(0, whole, 4):
        s0 = _add_samples(s0, p, t, shift, v, a_batched, b_batched, s, full)
        s1 = _add_samples(s1, p, t + 1, shift, v, a_batched, b_batched, s, full)
        s2 = _add_samples(s2, p, t + 2, shift, v, a_batched, b_batched, s, full)
        s3 = _add_samples(s3, p, t + 3, shift, v, a_batched, b_batched, s, full)
    for t in range(whole, terms):
        s0 = _add_samples(s0, p, t, shift, v, a_batched, b_batched, s, full)
    return (s0 + s1) + (s2 + s3)


@simd.device
def _add_samples(total, words, p, shift, v, a_batched, b_batched, s, full):
    """Return `total` and product p of the samples from s on."""
    mask, n, word = (np.uint64(1) << shift) - np.uint64(1), v.batch - s, np.uint64(words[p])
    left = take(v.a, np.int64(word & mask), v.batch, s, n, a_batched, full)
    return simd.fma(left, take(v.b, np.int64(word >> shift), v.batch, s, n, b_batched, full), total)


# Numeric phase of sparse products on a kept structure, on the host.
#
# Gustavson's algorithm with the output position of every product known beforehand: no search, no accumulator array, no
# allocation, and a fixed order of sums. Rows are split into the parts that the plan has fixed. With a batch, one vector
# holds as many samples as fit; the positions of a row are read once per block of samples, the first time from memory,
# then from the cache.


class PositionKernels:
    """Host side of `spgemm_positions`."""

    def spgemm_positions(self, rows: Rows, places: Places, a_data: Array, b_data: Array, out: Array) -> None:
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``."""
        batch = out.shape[1]
        parts = parts_for((places.positions.size + out.shape[0]) * batch, vectors=batch > 1)
        arguments = (*rows, *places, *flat(a_data, b_data, out))
        _positions(team(parts), len(places.row_cuts) - 1, *arguments)


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.


@numba.njit(**SERIAL)
def _positions(team, parts, *args):
    in_parts(_positions_part, team, parts, (Rows(*args[:4]), Places(*args[4:7]), Values(*args[7:])))


@numba.njit(**INNER_SERIAL)
def _positions_part(part, arrays, places, values):
    rows, v = row_pointers(arrays), pointers(values)
    product_ptr, positions = simd.pointer(places.product_ptr), simd.pointer(places.positions)
    low, high = places.row_cuts[part], places.row_cuts[part + 1]
    if v.batch == 1:
        _positions_rows_of_one(rows, product_ptr, positions, v, low, high)
    elif v.a_batched and v.b_batched:
        _positions_rows(rows, product_ptr, positions, v, True, True, low, high)
    elif v.a_batched:
        _positions_rows(rows, product_ptr, positions, v, True, False, low, high)
    else:
        _positions_rows(rows, product_ptr, positions, v, False, True, low, high)


@simd.device
def _positions_rows_of_one(rows, product_ptr, positions, v, low, high):
    a_indptr, a_indices, b_indptr, c_indptr = rows
    line = simd.lanes(v.out)  # about a cache line
    last = a_indptr[high] - 1
    for r in range(low, high):
        base, p = c_indptr[r], product_ptr[r]
        row = simd.advance(v.out, base)
        for i in range(c_indptr[r + 1] - base):
            row[i] = 0
        below = c_indptr[r + 1]
        for k in range(a_indptr[r], a_indptr[r + 1]):
            m, value = a_indices[k], v.a[k]
            begin = b_indptr[m]
            length = b_indptr[m + 1] - begin
            # Rows of B are short and anywhere, and those of C too many to stay in a cache: the hardware cannot guess.
            upcoming = b_indptr[a_indices[k + 4 if k + 4 < last else last]]
            simd.prefetch(v.b, upcoming)
            simd.prefetch(v.b, upcoming + line)
            for q in range(0, length, line):
                simd.prefetch_written(v.out, below + q)
            below += length
            right, at = simd.advance(v.b, begin), simd.advance(positions, p)
            whole = length - length % 4
            for q in range(0, whole, 4):  # loads first: nothing tells the compiler that `row` overlaps none of them
                i0, i1, i2, i3 = at[q], at[q + 1], at[q + 2], at[q + 3]
                r0, r1, r2, r3 = right[q], right[q + 1], right[q + 2], right[q + 3]
                row[i0] += value * r0
                row[i1] += value * r1
                row[i2] += value * r2
                row[i3] += value * r3
            for q in range(whole, length):
                row[at[q]] += value * right[q]
            p += length


@simd.device
def _positions_rows(rows, product_ptr, positions, v, a_batched, b_batched, low, high):
    width = simd.lanes(v.out)
    for r in range(low, high):
        for s in range(0, v.batch, width):
            if v.batch - s >= width:
                _positions_row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, True)
            else:
                _positions_row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, False)


@simd.device
def _positions_row(rows, product_ptr, positions, v, a_batched, b_batched, r, s, full):
    """One row of the product for one block of samples."""
    a_indptr, a_indices, b_indptr, c_indptr = rows
    a, b, out, batch = v.a, v.b, v.out, v.batch
    n, base, p = batch - s, c_indptr[r], product_ptr[r]
    zero = simd.zeros(out)
    for i in range(base, c_indptr[r + 1]):
        put(out, i, batch, s, n, full, zero)
    for k in range(a_indptr[r], a_indptr[r + 1]):
        m = a_indices[k]
        left = take(a, k, batch, s, n, a_batched, full)
        begin = b_indptr[m]
        length = b_indptr[m + 1] - begin
        for q in range(length):
            c = base + positions[p + q]
            right = take(b, begin + q, batch, s, n, b_batched, full)
            put(out, c, batch, s, n, full, simd.fma(left, right, take(out, c, batch, s, n, True, full)))
        p += length


# Products whose right operand has long runs of neighbouring columns, on the host.
#
# A run of a row of B is added to a run of C, so one position stands for all of it, and vectors take the place of
# single numbers. Rows of B with the same columns (the channels of a pixel, in a channels-last convolution) meet in one
# go: the sums stay in registers while the entries of A that name those rows follow one another, in the order of
# Gustavson's algorithm, so every sum has the order that it has there.


class RunKernels:
    """Host side of `spgemm_runs`."""

    def spgemm_runs(self, rows: Rows, runs: Runs, a_data: Array, b_data: Array, out: Array) -> None:
        """Add every run of B's rows, scaled, to where it starts in its row of C."""
        products = len(rows.a_indices) * len(b_data) // max(len(rows.b_indptr) - 1, 1)  # on average
        parts = parts_for(products * out.shape[1])
        _runs(team(parts), len(runs.row_cuts) - 1, *rows, *runs, *flat(a_data, b_data, out))


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.


@numba.njit(**SERIAL)
def _runs(team, parts, *args):
    in_parts(_runs_part, team, parts, (Rows(*args[:4]), Runs(*args[4:10]), Values(*args[10:])))


@numba.njit(**INNER_SERIAL)
def _runs_part(part, arrays, runs, values):
    rows, v, low, high = row_pointers(arrays), pointers(values), runs.row_cuts[part], runs.row_cuts[part + 1]
    at = (
        simd.pointer(runs.b_shape),
        simd.pointer(runs.run_ptr),
        simd.pointer(runs.run_lengths),
        simd.pointer(runs.start_ptr),
        simd.pointer(runs.starts),
    )
    if v.batch == 1 or not v.a_batched:
        _runs_rows(rows, at, v, False, True, low, high)
    elif v.b_batched:
        _runs_rows(rows, at, v, True, True, low, high)
    else:
        _runs_rows(rows, at, v, True, False, low, high)


@simd.device
def _runs_rows(rows, runs, v, a_batched, b_batched, low, high):
    a_indptr, a_indices, _, c_indptr = rows
    b_shape, run_ptr, run_lengths, start_ptr, starts = runs
    out, batch = v.out, v.batch
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base, place = c_indptr[r], start_ptr[r]
        for i in range(base * batch, c_indptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_indptr[r + 1] * batch - i)
        k, end = a_indptr[r], a_indptr[r + 1]
        while k < end:
            shape = b_shape[a_indices[k]]
            stop = k + 1
            while stop < end and b_shape[a_indices[stop]] == shape:
                stop += 1
            begin = 0
            for u in range(run_ptr[shape], run_ptr[shape + 1]):
                length, c = run_lengths[u], base + starts[place]
                if a_batched:
                    _add_entries(rows, v, k, stop, begin, c, length, b_batched)
                else:
                    _add_run(rows, v, k, stop, begin, simd.advance(out, c * batch), length * batch)
                place += 1
                begin += length
            k = stop


@simd.device
def _add_run(rows, v, k, stop, begin, target, length):
    """``target[j] += sum over entries of a[entry] * row of B [begin + j]``; `a` is shared, or of one sample."""
    a, b, a_indices, b_indptr = v.a, v.b, rows.a_indices, rows.b_indptr
    width = simd.lanes(target)
    j = 0
    while j + 8 * width <= length:
        j1, j2, j3 = j + width, j + 2 * width, j + 3 * width
        j4, j5, j6, j7 = j + 4 * width, j + 5 * width, j + 6 * width, j + 7 * width
        s0, s1, s2, s3 = simd.load(target, j), simd.load(target, j1), simd.load(target, j2), simd.load(target, j3)
        s4, s5, s6, s7 = simd.load(target, j4), simd.load(target, j5), simd.load(target, j6), simd.load(target, j7)
        for e in range(k, stop):
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(factor, simd.load(row, j), s0)
            s1 = simd.fma(factor, simd.load(row, j1), s1)
            s2 = simd.fma(factor, simd.load(row, j2), s2)
            s3 = simd.fma(factor, simd.load(row, j3), s3)
            s4 = simd.fma(factor, simd.load(row, j4), s4)
            s5 = simd.fma(factor, simd.load(row, j5), s5)
            s6 = simd.fma(factor, simd.load(row, j6), s6)
            s7 = simd.fma(factor, simd.load(row, j7), s7)
        simd.store(target, j, s0)
        simd.store(target, j1, s1)
        simd.store(target, j2, s2)
        simd.store(target, j3, s3)
        simd.store(target, j4, s4)
        simd.store(target, j5, s5)
        simd.store(target, j6, s6)
        simd.store(target, j7, s7)
        j += 8 * width
    while j + 2 * width <= length:
        j1 = j + width
        s0, s1 = simd.load(target, j), simd.load(target, j1)
        for e in range(k, stop):
            factor, row = simd.broadcast(a, e), simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(factor, simd.load(row, j), s0)
            s1 = simd.fma(factor, simd.load(row, j1), s1)
        simd.store(target, j, s0)
        simd.store(target, j1, s1)
        j += 2 * width
    while j + width <= length:
        s0 = simd.load(target, j)
        for e in range(k, stop):
            row = simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(simd.broadcast(a, e), simd.load(row, j), s0)
        simd.store(target, j, s0)
        j += width
    if j < length:
        n = length - j
        s0 = simd.load_n(target, j, n)
        for e in range(k, stop):
            row = simd.advance(b, (b_indptr[a_indices[e]] + begin) * v.batch)
            s0 = simd.fma(simd.broadcast(a, e), simd.load_n(row, j, n), s0)
        simd.store_n(target, j, s0, n)


@simd.device
def _add_entries(rows, v, k, stop, begin, c, length, b_batched):
    """The same for values of A per sample: entry by entry of the run, a block of samples at a time."""
    a, b, out, batch, a_indices, b_indptr = v.a, v.b, v.out, v.batch, rows.a_indices, rows.b_indptr
    width = simd.lanes(out)
    s = 0
    while s + width <= batch:
        q = 0
        while q + 4 <= length:
            s0, s1 = whole(out, c + q, batch, s), whole(out, c + q + 1, batch, s)
            s2, s3 = whole(out, c + q + 2, batch, s), whole(out, c + q + 3, batch, s)
            for e in range(k, stop):
                factor, at = whole(a, e, batch, s), b_indptr[a_indices[e]] + begin + q
                s0 = simd.fma(factor, take(b, at, batch, s, width, b_batched, True), s0)
                s1 = simd.fma(factor, take(b, at + 1, batch, s, width, b_batched, True), s1)
                s2 = simd.fma(factor, take(b, at + 2, batch, s, width, b_batched, True), s2)
                s3 = simd.fma(factor, take(b, at + 3, batch, s, width, b_batched, True), s3)
            put(out, c + q, batch, s, width, True, s0)
            put(out, c + q + 1, batch, s, width, True, s1)
            put(out, c + q + 2, batch, s, width, True, s2)
            put(out, c + q + 3, batch, s, width, True, s3)
            q += 4
        while q < length:
            _add_entry(rows, v, k, stop, begin + q, c + q, s, b_batched, True)
            q += 1
        s += width
    if s < batch:
        for q in range(length):
            _add_entry(rows, v, k, stop, begin + q, c + q, s, b_batched, False)


@simd.device
def _add_entry(rows, v, k, stop, offset, c, s, b_batched, full):
    batch, n = v.batch, v.batch - s
    total = take(v.out, c, batch, s, n, True, full)
    for e in range(k, stop):
        right = take(v.b, rows.b_indptr[rows.a_indices[e]] + offset, batch, s, n, b_batched, full)
        total = simd.fma(take(v.a, e, batch, s, n, True, full), right, total)
    put(v.out, c, batch, s, n, full, total)


# Products with selections, matrices of at most one entry a row, on the host.
#
# A selection on the left picks rows of B and scales them: the entries of a row of C lie side by side as they do in B,
# so whole vectors are moved and nothing is indexed. A selection on the right (max-pooling, say) sends every entry of A
# to one place in its row of C: one position an entry of A, and no loop over rows of B.


class SelectionKernels:
    """Host side of `spgemm_select_rows` and `spgemm_select_columns`."""

    def spgemm_select_rows(self, rows: Rows, a_data: Array, b_data: Array, out: Array) -> None:
        """Row r of C is row ``a_indices[k]`` of B times the one value of A in that row."""
        parts = parts_for(out.size)
        _select_rows(team(parts), parts, *rows, *flat(a_data, b_data, out), len(out), parts)

    def spgemm_select_columns(self, terms: Terms, a_data: Array, b_data: Array, out: Array) -> None:
        """Add product p of row r to ``out[c_indptr[r] + positions[p]]``."""
        batch, indexed = out.shape[1], terms.a_index is not None
        given = terms if indexed else terms._replace(a_index=terms.b_index)
        parts = parts_for((terms.positions.size + out.shape[0]) * batch, vectors=batch > 1)
        arguments = (*given, *flat(a_data, b_data, out), indexed)
        _select_columns(team(parts), len(terms.row_cuts) - 1, *arguments)


# The functions below are compiled: their arguments are tuples of flat arrays or pointers, sizes and flags.


@numba.njit(**SERIAL)
def _select_rows(team, parts, *args):
    in_parts(_select_rows_part, team, parts, (Rows(*args[:4]), Values(*args[4:10]), args[10], args[11]))


@numba.njit(**INNER_SERIAL)
def _select_rows_part(part, rows, values, nnz, parts):
    low, high = row_at(rows.c_indptr, share(part, parts, nnz)), row_at(rows.c_indptr, share(part + 1, parts, nnz))
    a_indptr, a_indices, b_indptr, c_indptr = row_pointers(rows)
    v = pointers(values)
    for r in range(low, high):
        k = a_indptr[r]
        if k == a_indptr[r + 1]:
            continue
        begin = b_indptr[a_indices[k]]
        length = b_indptr[a_indices[k] + 1] - begin
        scale_entries(v, k, begin, c_indptr[r], length)


@numba.njit(**SERIAL)
def _select_columns(team, parts, *args):
    in_parts(_select_columns_part, team, parts, (Terms(*args[:6]), Values(*args[6:12]), args[12]))


@numba.njit(**INNER_SERIAL)
def _select_columns_part(part, terms, values, indexed):
    v, low, high = pointers(values), terms.row_cuts[part], terms.row_cuts[part + 1]
    at = (
        simd.pointer(terms.product_ptr),
        simd.pointer(terms.a_index),
        simd.pointer(terms.b_index),
        simd.pointer(terms.c_indptr),
        simd.pointer(terms.positions),
    )
    if v.batch == 1:
        _columns_of_one(at, indexed, v, low, high)
    elif v.a_batched and v.b_batched:
        _columns(at, indexed, v, True, True, low, high)
    elif v.a_batched:
        _columns(at, indexed, v, True, False, low, high)
    else:
        _columns(at, indexed, v, False, True, low, high)


@simd.device
def _columns_of_one(terms, indexed, v, low, high):
    product_ptr, a_index, b_index, c_indptr, positions = terms
    a, b = v.a, v.b
    for r in range(low, high):
        base = c_indptr[r]
        row = simd.advance(v.out, base)
        for i in range(c_indptr[r + 1] - base):
            row[i] = 0
        if indexed:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[a_index[p]] * b[b_index[p]]
        else:
            for p in range(product_ptr[r], product_ptr[r + 1]):
                row[positions[p]] += a[p] * b[b_index[p]]


@simd.device
def _columns(terms, indexed, v, a_batched, b_batched, low, high):
    product_ptr, a_index, b_index, c_indptr, positions = terms
    out, batch = v.out, v.batch
    width = simd.lanes(out)
    zero = simd.zeros(out)
    for r in range(low, high):
        base = c_indptr[r]
        for i in range(base * batch, c_indptr[r + 1] * batch, width):
            simd.store_up_to(out, i, zero, c_indptr[r + 1] * batch - i)
        for p in range(product_ptr[r], product_ptr[r + 1]):
            k = a_index[p] if indexed else p
            q, c = b_index[p], base + positions[p]
            s = 0
            while s + width <= batch:
                _select_add(v, k, q, c, s, a_batched, b_batched, True)
                s += width
            if s < batch:
                _select_add(v, k, q, c, s, a_batched, b_batched, False)


@simd.device
def _select_add(v, k, q, c, s, a_batched, b_batched, full):
    batch, n = v.batch, v.batch - s
    left, right = take(v.a, k, batch, s, n, a_batched, full), take(v.b, q, batch, s, n, b_batched, full)
    put(v.out, c, batch, s, n, full, simd.fma(left, right, take(v.out, c, batch, s, n, True, full)))
