"""Tuples of arrays that kernels of host and device take, and the checking functions made from the rows of `spec`.

`WeightSums` belongs to a recurrence. The other tuples hold index arrays of a product's plan, for C = A @ B with
A (M, K) and B (K, N); their dtypes and shapes are in the notation of `sparsebp.kernels.spec`. All but `Rows` and
`RowShapes` end with the host's division of work: `row_cuts` splits the rows of C (of `Pairs`, tiles) into parts of
about equal work, fixed by the plan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sparsebp.core.backend import FLOAT_DTYPES, INDEX_DTYPES
from sparsebp.core.check import Array

T = TypeVar("T", bound=Any)

# NAdam's momenta, as plain numbers: the host kernels compile this function.

_TERMS = 52
"""Terms of a series whose k-th term is below 2⁻ᵏ."""


def momenta(beta1: float, momentum_decay: float, step: float) -> tuple[float, float, float]:
    """Return NAdam's momentum of a step, of the next one, and the product of all up to this one.

    Step i has the momentum β₁ (1 − q^i / 2) with q = 0.96^momentum_decay, so the product needs the sum of
    log(1 − q^i / 2), which is −Σₖ 2⁻ᵏ/k Σᵢ q^(ki), and the inner sum is geometric. So no state is carried between
    steps. Numerators and denominators of the inner sums, 1 − q^(kn) and 1 − q^k, grow from term to term without
    cancellation.
    """
    slope = momentum_decay * math.log(0.96)
    q, last = math.exp(slope), math.exp(slope * step)
    first_gap, all_gaps = -math.expm1(slope), -math.expm1(slope * step)
    total, power, gap, gaps = 0.0, 1.0, 0.0, 0.0
    for k in range(1, _TERMS + 1):
        power *= 0.5 * q
        gap, gaps = first_gap + q * gap, all_gaps + last * gaps
        total -= power / k * (gaps / gap if first_gap > 0.0 else step)
    product = beta1**step * math.exp(total)
    return beta1 * (1.0 - 0.5 * last), beta1 * (1.0 - 0.5 * last * q), product


_OPERANDS: dict[str, tuple[tuple[str, ...], list[str]]] = {}
"""Names of the fields and the stated arrays, by the tuples' names."""


def laid_out(arrays: str) -> Callable[[T], T]:
    """State dtypes and shapes of a tuple's arrays in the notation of `sparsebp.kernels.spec`."""

    def state(cls: T) -> T:
        stated = [array.strip() for array in arrays.split(";")]
        _OPERANDS[cls.__name__] = cls._fields, stated
        cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Notes", "-----", "; ".join(stated)])
        return cls

    return state


@laid_out("a_indptr (M + 1) index; a_indices (NnzA) index; b_indptr (K + 1) index; c_indptr (M + 1) index")
class Rows(NamedTuple):
    """Gustavson's algorithm: entries of A name rows of B, whose sum is a row of C. The arrays are the patterns'."""

    a_indptr: Array
    a_indices: Array
    b_indptr: Array
    c_indptr: Array


PAGE = 1024
"""Columns after which `RowShapes` may leave a gap."""


@laid_out(
    """indptr (M + 1) index; shape (M) int32; first (M) index; run_ptr (Shapes + 1) int64;
    whole (Shapes) int64; run_columns (Runs) int32; run_ends (Runs) int32"""
)
class RowShapes(NamedTuple):
    """Rows of A that share few shapes. A shape is runs of neighbouring columns, counted from the row's first.

    Attributes
    ----------
    indptr
        A's.
    shape, first
        Number of every row's shape, and its first column (0 where it has no entries).
    run_ptr, whole
        Shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``. Those before ``whole[s]`` can be processed
        four entries at a time: entries beyond the run's end belong to the same row of A, and there are as many columns
        up to the row's last one.
    run_columns, run_ends
        The column where the run begins, and the number of the row's entries up to the run's end.
    gap
        If not 0, `first` and `run_columns` count columns with this many skipped after every `PAGE`, and the values of B
        are copied to such places first: channels that are a multiple of a memory page would all compete for the same
        few sets of the first cache.
    """

    indptr: Array
    shape: Array
    first: Array
    run_ptr: Array
    whole: Array
    run_columns: Array
    run_ends: Array
    gap: int


@laid_out("product_ptr (M + 1) int64; positions (Products) position; row_cuts (Parts + 1) int64")
class Places(NamedTuple):
    """The place of every product in C.

    Products of row r are numbered in the order of Gustavson's algorithm (entries k of row r of A, for each the
    entries q of row ``a_indices[k]`` of B), from ``product_ptr[r]`` on. Product p of row r is added to entry
    ``c_indptr[r] + positions[p]`` of C.
    """

    product_ptr: Array
    positions: Array
    row_cuts: Array


@laid_out(
    """product_ptr (M + 1) index; a_index (Products) index?; b_index (Products) index;
    c_indptr (M + 1) index; positions (Products) position; row_cuts (Parts + 1) int64"""
)
class Terms(NamedTuple):
    """Products of single entries; row r of C has those from ``product_ptr[r]`` to ``product_ptr[r + 1] - 1``.

    Attributes
    ----------
    a_index, b_index
        The entries of A and B that are multiplied. If `a_index` is None, product p belongs to entry p of A.
    positions
        As in `Places`.
    """

    product_ptr: Array
    a_index: Array | None
    b_index: Array
    c_indptr: Array
    positions: Array
    row_cuts: Array


@laid_out(
    """b_shape (K) index; run_ptr (Shapes + 1) index; run_lengths (Runs) index; start_ptr (M + 1) int64;
    starts (Starts) position; row_cuts (Parts + 1) int64"""
)
class Runs(NamedTuple):
    """Rows of B as runs of neighbouring columns, each of which is also a run of C.

    Rows of B with the same shape have the same columns. Entries of a row of A that follow one another and name rows of
    one shape form a group.

    Attributes
    ----------
    b_shape
        Number of every row's shape.
    run_ptr, run_lengths
        Shape s has the runs u from ``run_ptr[s]`` to ``run_ptr[s + 1] - 1``, of ``run_lengths[u]`` entries each.
    start_ptr, starts
        For every group of row r and every run of its shape, from ``start_ptr[r]`` on, the place in the row of C where
        the run begins.
    """

    b_shape: Array
    run_ptr: Array
    run_lengths: Array
    start_ptr: Array
    starts: Array
    row_cuts: Array


@laid_out("product_ptr (M // m + 1) int64; positions (Products) position; row_cuts (Parts + 1) int64")
class Blocks(NamedTuple):
    """A consists of dense blocks (m, k), B of blocks (k, n), and so C of blocks (m, n), in grids.

    Attributes
    ----------
    product_ptr
        Products of blocks before each m rows of C.
    positions
        Product p of a group of rows, in the order of Gustavson's algorithm, is added to the block with that number of
        the group's blocks of C.
    row_cuts
        Groups of m rows of C in parts of about equal work.
    """

    product_ptr: Array
    positions: Array
    m: int
    k: int
    n: int
    row_cuts: Array


@laid_out(
    """words (Products) word; order (NnzC) uint16; starts (NnzC) uint16; lengths (NnzC) uint16;
    tiles (Tiles + 1, 11) int64; tile_cuts (Parts + 1) int64"""
)
class Pairs(NamedTuple):
    """For every entry of C the pairs of entries of A and B whose products are summed, in Gustavson's order.

    Entries of C are cut into tiles of neighbours, whose entries of A lie near each other. Within a tile, the lists
    are sorted by length, shortest first.

    Attributes
    ----------
    words
        The low `shift` bits are an entry of A, counted from the tile's first one, the others an entry of B.
    order
        The entry of C whose list comes next, counted from the tile's first one.
    starts, lengths
        For each entry of C, where in its tile's words its list begins, and the number of its words.
    tiles
        For every tile, and one past the last: its first entry of C, its first entry of A, its first word, and the
        number of its lists with 1, 2, … 8 words.
    tile_cuts
        Tiles in parts of about equal work.
    """

    words: Array
    order: Array
    starts: Array
    lengths: Array
    tiles: Array
    shift: int
    tile_cuts: Array


@laid_out("b_indices (NnzB) index; c_indices (NnzC) index; row_cuts (Parts + 1) int64")
class Columns(NamedTuple):
    """The columns of B and C, for kernels that store no places, and their number n."""

    b_indices: Array
    c_indices: Array
    n: int
    row_cuts: Array


@laid_out(
    """x (T, B, I) real; before (T, B, H) real; weight_ih (G * H, I) real written;
    weight_hh (G * H, H) real written; bias_ih (G * H) real? written; bias_hh (G * H) real? written"""
)
class WeightSums(NamedTuple):
    """The weight gradients of a recurrence, summed by its backward, and the arrays that the weights multiply.

    `x` is the input; `before` the state before each step: h0, then h without its last step. The weights have G gates,
    in the order of torch.nn.
    """

    x: Array
    before: Array
    weight_ih: Array
    weight_hh: Array
    bias_ih: Array | None
    bias_hh: Array | None


# A row of the table, and the function that is made from it.
#
# Checks look at dtypes, shapes and layout, never at values: that would cost a pass over the data (on a device a
# synchronisation) at every call. Index values are checked where a pattern is made.

_CLASSES: dict[str, tuple[np.dtype, ...]] = {
    "real": FLOAT_DTYPES,
    "number": (*FLOAT_DTYPES, np.dtype(np.complex64), np.dtype(np.complex128)),
    "index": INDEX_DTYPES,
    "position": (np.dtype(np.uint16), np.dtype(np.uint32)),
    "word": (np.dtype(np.uint32), np.dtype(np.uint64)),
    "winner": (np.dtype(np.uint8), np.dtype(np.int32)),
}
"""Names for one of some dtypes, the same for all arrays of a call."""
