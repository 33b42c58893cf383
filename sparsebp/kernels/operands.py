"""Arrays that travel together, through the checks to the kernels of host and device; all are C-contiguous.

`WeightSums` is of a recurrence. The others are index arrays, from a product's plan: of C = A @ B with A (m, k) and
B (k, n). ``index`` is int32 or int64, the same in all tuples of a call; ``position`` is uint16 or uint32. Every one of
them but `Rows` and `RowShapes` ends with what the host shares its work by: `row_cuts` (n_parts + 1,) int64 splits the
rows of C (of `Pairs`, tiles) into parts of about equal work, fixed by the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from sparsebp.core.types import Array


class Rows(NamedTuple):
    """Gustavson's algorithm: entries of A name rows of B, whose sum is a row of C.

    Attributes
    ----------
    a_indptr, a_indices, b_indptr, c_indptr
        Of the patterns: (m + 1,), (nnz_a,), (k + 1,), (m + 1,) index.
    """

    a_indptr: Array
    a_indices: Array
    b_indptr: Array
    c_indptr: Array


PAGE = 1024
"""Columns behind which `RowShapes` may leave a gap."""


class RowShapes(NamedTuple):
    """Rows of A that share few shapes, each of which is runs of neighbouring columns, counted from the row's first.

    Attributes
    ----------
    indptr
        (m + 1,) index: A's.
    shape, first
        (m,) int32, (m,) index: number of every row's shape, and its first column (0 where it has no entries).
    run_ptr, whole
        (n_shapes + 1,), (n_shapes,) int64: shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``. Those
        before ``whole[s]`` can be gone through four entries at a time: what is beyond the run's end is of the same row
        of A, and there are as many columns up to the row's last one.
    run_columns, run_ends
        (n_runs,) int32: the column where the run begins, and how many entries the row has up to the run's end.
    gap
        Where it is not 0, `first` and `run_columns` are of columns that are numbered with so many left out behind every
        `PAGE`: the values of B are copied to such places first. Channels of as many bytes as a page of memory, or
        several, would all compete for the same few places of the innermost cache.
    """

    indptr: Array
    shape: Array
    first: Array
    run_ptr: Array
    whole: Array
    run_columns: Array
    run_ends: Array
    gap: int


class Places(NamedTuple):
    """Where every product lands.

    Products of row r are numbered in the order of Gustavson's algorithm (entries k of row r of A, for each the
    entries q of row ``a_indices[k]`` of B), from ``product_ptr[r]`` on.

    Attributes
    ----------
    product_ptr
        (m + 1,) int64.
    positions
        (n_products,) position: product p of row r is added to entry ``c_indptr[r] + positions[p]`` of C.
    """

    product_ptr: Array
    positions: Array
    row_cuts: Array


class Terms(NamedTuple):
    """Products of single entries, those of row r of C from ``product_ptr[r]`` to ``product_ptr[r + 1] - 1``.

    Attributes
    ----------
    product_ptr, c_indptr
        (m + 1,) index.
    a_index, b_index
        (n_products,) index: which entries of A and B are multiplied. Where `a_index` is None, product p belongs to
        entry p of A.
    positions
        (n_products,) position, as in `Places`.
    """

    product_ptr: Array
    a_index: Array | None
    b_index: Array
    c_indptr: Array
    positions: Array
    row_cuts: Array


class Runs(NamedTuple):
    """Rows of B as runs of neighbouring columns, each of which is a run of C as well.

    Rows of B with the same shape have the same columns. Entries of a row of A that follow one another and name rows of
    one shape form a group.

    Attributes
    ----------
    b_shape
        (k,) index: number of every row's shape.
    run_ptr, run_lengths
        (n_shapes + 1,), (n_runs,) index: shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``, which
        cut a row of B into pieces of ``run_lengths[u]`` entries.
    start_ptr, starts
        (m + 1,) int64, (n_starts,) position: for every group of row r and every run of its shape, from
        ``start_ptr[r]`` on, where in the row of C the run begins.
    """

    b_shape: Array
    run_ptr: Array
    run_lengths: Array
    start_ptr: Array
    starts: Array
    row_cuts: Array


class Blocks(NamedTuple):
    """A consists of dense blocks (m, k), B of blocks (k, n), and so C of blocks (m, n), in grids.

    Attributes
    ----------
    product_ptr
        (rows of C / m + 1,) int64: products of blocks before each m rows of C.
    positions
        (n_block_products,) position: product p of a group of rows, in the order of Gustavson's algorithm, is added to
        the block with that number of the group's blocks of C.
    m, k, n
        Sizes of the blocks, Python ints.
    row_cuts
        Groups of m rows of C in parts of about equal work.
    """

    product_ptr: Array
    positions: Array
    m: int
    k: int
    n: int
    row_cuts: Array


class Pairs(NamedTuple):
    """For every entry of C the pairs of entries of A and B whose products it is the sum of, in Gustavson's order.

    Entries of C are cut into tiles of neighbours, whose entries of A lie near each other. Within a tile, the lists
    stand in the order of their lengths, the shortest first.

    Attributes
    ----------
    words
        (n_products,) uint32 or uint64: the low `shift` bits are an entry of A, counted from the tile's first one, the
        others an entry of B.
    order
        (nnz_c,) uint16: whose list comes next, counted from the tile's first entry of C.
    starts, lengths
        (nnz_c,) uint16: where in the words of its tile the list of each entry of C begins, and how many words it has.
    tiles
        (n_tiles + 1, 11) int64, for every tile, and behind the last: its first entry of C, its first entry of A, its
        first word, and how many of its lists have 1, 2, … 8 words.
    shift
        A Python int.
    tile_cuts
        (n_parts + 1,) int64: tiles in parts of about equal work.
    """

    words: Array
    order: Array
    starts: Array
    lengths: Array
    tiles: Array
    shift: int
    tile_cuts: Array


class Columns(NamedTuple):
    """The columns of B and C, where no place is kept.

    Attributes
    ----------
    b_indices, c_indices
        Of the patterns: (nnz_b,), (nnz_c,) index.
    n
        Number of columns, a Python int.
    """

    b_indices: Array
    c_indices: Array
    n: int
    row_cuts: Array


class WeightSums(NamedTuple):
    """The weight gradients of a recurrence, for its backward to sum as it goes: what weights multiply, and the outputs.

    Attributes
    ----------
    x
        (T, B, I): the input.
    before
        (T, B, H): the state before each step, h0 and then all of h but the last.
    weight_ih, weight_hh
        (gH, I) and (gH, H), written; gates as in torch.nn.
    bias_ih, bias_hh
        (gH,) each, written, or None.
    """

    x: Array
    before: Array
    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None
