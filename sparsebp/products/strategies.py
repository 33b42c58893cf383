"""The strategies of products, one class each: when it fits, which arrays it keeps, which kernel runs."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd
from typing import Any, ClassVar

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.locks import cached_property
from sparsebp.kernels.operands import PAGE, Blocks, Columns, Pairs, Places, Rows, RowShapes, Runs, Terms
from sparsebp.kernels.spec import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.pattern import index_bytes, index_dtype
from sparsebp.products.symbolic import (
    MaskedProduct,
    SymbolicProduct,
    host_kernels,
    parts_of_numeric,
    parts_of_rows,
    row_cuts,
)

__all__ = [
    "OF_KINDS",
    "OF_KINDS_AND_STRUCTURE",
    "OF_STRUCTURE",
    "Filled",
    "Gather",
    "Identity",
    "Masked",
    "MaskedSums",
    "Positions",
    "Strategy",
    "StrategyOfKinds",
    "by_kinds",
]


class Strategy:
    """A way to compute C = A @ B for new values, considered for one product.

    Instances answer questions about one product: whether the strategy fits, which bytes and arrays it keeps. Arrays
    are made once it is chosen. A plan keeps only the class, which runs it.

    Attributes
    ----------
    name : str
        As `ProductPlan.strategy`.
    kernel : str
        The method of `sparsebp.kernels.spec.Kernels` that runs, unless `run` is overridden.
    reads : tuple
        Kernel arguments other than the values: tuples of `sparsebp.kernels.operands`, or names of single arrays.
    own_pattern : bool
        Whether C has a pattern that neither operand has.
    reads_columns : bool
        Whether an unbatched call reads the columns of A.
    """

    name: ClassVar[str]
    kernel: ClassVar[str]
    reads: ClassVar[tuple[Any, ...]] = ()
    own_pattern: ClassVar[bool] = True
    reads_columns: ClassVar[bool] = True

    def __init__(self, product: SymbolicProduct) -> None:
        self.product = product

    @property
    def fits(self) -> bool:
        """Whether the kernel can compute this product and is worth it; if not, it may write out of bounds."""
        return True

    @property
    def pattern(self) -> SparsityPattern:
        """C's pattern, built on first use."""
        return self.product.pattern

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, 0 if an operand has it."""
        return self.product.pattern_bytes

    @property
    def products(self) -> int:
        """Multiplications per sample."""
        return self.product.products

    @property
    def index_bytes(self) -> int:
        """Bytes of `arrays`, without copies of patterns made because index types differ."""
        return 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the kernel's arrays, by operand field; they precede those of the patterns."""
        return {}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return the arguments of `run` other than the values, from the arrays of the patterns and of the strategy."""
        return tuple(
            arrays[read] if isinstance(read, str) else read(*(arrays[name] for name in read._fields))
            for read in cls.reads
        )

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Compute `out` (nnz, B*) from values (nnz, B*)."""
        getattr(k, cls.kernel)(*operands, left, right, out)


class StrategyOfKinds(Strategy):
    """A strategy chosen by the kinds of A and B alone, without a symbolic phase.

    Attributes
    ----------
    quicker : tuple
        Strategies for these kinds that depend on the structure, and are preferred where they fit.
    """

    quicker: ClassVar[tuple[type[Strategy], ...]] = ()

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """Whether the strategy multiplies patterns of these kinds."""
        raise NotImplementedError

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        """Return the operand whose pattern C has, if ``own_pattern`` is False."""
        raise NotImplementedError

    @staticmethod
    def count(a: Any, b: Any) -> int:
        """Return the number of multiplications per sample."""
        return 0

    @property
    def fits(self) -> bool:
        return self.takes(self.product.a, self.product.b)

    @property
    def pattern(self) -> SparsityPattern:
        result: SparsityPattern = self.result(self.product.a, self.product.b)
        return result

    @property
    def pattern_bytes(self) -> int:
        return 0

    @property
    def products(self) -> int:
        return self.count(self.product.a, self.product.b)


def of_one_type(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return int64 copies of index arrays if their types differ, else nothing: the patterns' own arrays serve."""
    if len({array.dtype for array in arrays.values()}) == 1:
        return {}
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def rows_of_one_type(product: SymbolicProduct, **others: np.ndarray) -> dict[str, np.ndarray]:
    """Apply `of_one_type` to the fields of `Rows` and to others that the kernel reads with them."""
    a, b, c = product.a, product.b, product.pattern
    rows = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
    return of_one_type(rows | others)


# Gustavson's algorithm through a dense row of sums: keeps nothing per product, so it always fits.


class Accumulate(Strategy):
    """For products with too many terms to index."""

    name = "accumulate"
    kernel = "spgemm_accumulate"
    reads = (Rows, Columns)

    @property
    def index_bytes(self) -> int:
        return self.product.row_cuts.nbytes

    def arrays(self) -> dict[str, np.ndarray]:
        product = self.product
        columns = {"b_indices": product.b.indices, "c_indices": product.pattern.indices}
        return rows_of_one_type(product, **columns) | {"row_cuts": product.row_cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        return super().operands(a, b, dict(arrays) | {"n": b.shape[1]})


# A and B consist of small dense blocks (several unknowns per vertex): one place stands for a product of two blocks.
#
# Chosen for blocks of 2 × 2 on meshes (9-point and 27-point stencils), and of 2 × 2 to 6 × 6 on scattered graphs with 6
# entries per row: without a batch 2 to 8 times as fast as `SumPairs` or `Positions`, with an index of a tenth to a half
# of the bytes. With a batch of 16 it takes 1.3 to 2.2 times as long. Where blocks that adjoin form runs of 8 columns or
# more (3 × 3 on a 9-point stencil), `AddRuns` comes first: there blocks are 1.6 to 4 times as fast without a batch, and
# between 0.85 and 1.3 times with one.

SIZES = (6, 4, 3, 2, 1)
"""Rows or columns of a block: what fits in registers; others are cut into these."""
BLOCKS_LEAST = 8
"""Multiplications of a product of two blocks at least."""
WORTH = 10_000
"""Multiplications of the whole product at least: the kernel is compiled for the size of its blocks."""


class AddBlocks(Strategy):
    """Blocks (m, k) of A times blocks (k, n) of B; the symbolic phase sees a block as one entry."""

    name = "blocks"
    kernel = "spgemm_blocks"
    reads = (Rows, Blocks)

    @property
    def fits(self) -> bool:
        """The blocks are large enough, and there are enough of them."""
        if self.product.products < WORTH:
            return False
        m, k, n = self._size
        return m * k * n >= BLOCKS_LEAST

    @cached_property
    def _size(self) -> tuple[int, int, int]:
        """Sizes m, k, n of the blocks."""
        from sparsebp.kernels.host.sparse import symbolic

        (m, k), (inner, n) = (
            symbolic.find_blocks(p.indptr, p.indices, *p.shape) for p in (self.product.a, self.product.b)
        )
        return _cut(m), _cut(gcd(k, inner)), _cut(n)

    @cached_property
    def _of_blocks(self) -> SymbolicProduct:
        """The product of the patterns of blocks."""
        (m, k, n), product = self._size, self.product
        return SymbolicProduct(_blocks_of(product.a, m, k), _blocks_of(product.b, k, n))

    @property
    def products(self) -> int:
        """Multiplications per sample."""
        m, k, n = self._size
        return m * k * n * self._of_blocks.products

    @property
    def _nnz(self) -> int:
        m, _, n = self._size
        return m * n * self._of_blocks.nnz

    @cached_property
    def pattern(self) -> SparsityPattern:
        """C's pattern; an operand's object where it is the same."""
        from sparsebp.kernels.host.sparse import symbolic

        (m, _, n), shape, blocks = self._size, self.product.shape, self._of_blocks.pattern
        dtype = index_dtype(self._nnz, shape)
        indptr, indices = np.empty(shape[0] + 1, dtype), np.empty(self._nnz, dtype)
        symbolic.write_blocks(blocks.indptr, blocks.indices, m, n, indptr, indices)
        made = SparsityPattern._unchecked(indptr, indices, shape)
        return next((operand for operand in (self.product.a, self.product.b) if operand == made), made)

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, if it is not an operand's."""
        operands, shape = (self.product.a, self.product.b), self.product.shape
        known = any(p.nnz == self._nnz and p.shape == shape for p in operands)
        return 0 if known and self.pattern in operands else index_bytes(self._nnz, shape)

    @property
    def index_bytes(self) -> int:
        """Of `arrays`."""
        (m, k, n), blocks = self._size, self._of_blocks
        return blocks.position_bytes + blocks.product_ptr.nbytes + self._row_cuts.nbytes + m * k * n

    @cached_property
    def _row_cuts(self) -> np.ndarray:
        """Groups of m rows of C in parts of about equal work."""
        (m, k, n), blocks = self._size, self._of_blocks
        return parts_of_rows(m * k * n * blocks.product_ptr + m * n * blocks.c_indptr)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of `Blocks`, and `size`, whose shape gives the blocks' sizes."""
        a, b, c, blocks = self.product.a, self.product.b, self.pattern, self._of_blocks
        rows = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
        own = {"product_ptr": blocks.product_ptr, "positions": blocks.positions(blocks.position_dtype)}
        return of_one_type(rows) | own | {"row_cuts": self._row_cuts, "size": np.zeros(self._size, bool)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """`Rows` and `Blocks`."""
        return super().operands(a, b, dict(arrays) | dict(zip("mkn", arrays["size"].shape, strict=True)))


def _cut(size: int) -> int:
    """Return the largest size into which such blocks can be cut."""
    return next(part for part in SIZES if size % part == 0)


def _blocks_of(pattern: SparsityPattern, m: int, n: int) -> SparsityPattern:
    """Return the pattern of the blocks (m, n) that a pattern consists of."""
    first = pattern.indptr[::m].astype(np.int64)  # entries before every row of blocks
    block_ptr = first // (m * n)
    shift = np.repeat(first[:-1] - n * block_ptr[:-1], np.diff(block_ptr))
    corners = pattern.indices[n * np.arange(len(shift)) + shift]
    shape = (pattern.shape[0] // m, pattern.shape[1] // n)
    dtype = index_dtype(len(corners), shape)
    return SparsityPattern._unchecked(block_ptr.astype(dtype), (corners // n).astype(dtype), shape)


# A and B are full: one product of dense matrices per sample.


class Dense(StrategyOfKinds):
    """A batch of dense matrix products, run as a stack of one block."""

    name = "dense"

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        return bool(a.kind == b.kind == "dense" and a.nnz * b.nnz > 0)

    @staticmethod
    def count(a: Any, b: Any) -> int:
        return int(a.shape[0] * a.shape[1] * b.shape[1])

    @property
    def pattern(self) -> SparsityPattern:
        product = self.product
        same = next((operand for operand in (product.a, product.b) if operand.shape == product.shape), None)
        return same or SparsityPattern.dense(*product.shape)

    @property
    def pattern_bytes(self) -> int:
        (m, n), product = self.product.shape, self.product
        return 0 if product.shape in (product.a.shape, product.b.shape) else index_bytes(m * n, (m, n))

    @property
    def index_bytes(self) -> int:
        return np.dtype(np.int64).itemsize

    def arrays(self) -> dict[str, np.ndarray]:
        return {"zero": np.zeros(1, np.int64)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Any, ...]:
        return arrays["zero"], *a.shape, b.shape[1]

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        zero, m, inner, n = operands
        a, b = left.reshape(1, m, inner, -1), right.reshape(1, inner, n, -1)
        k.dense_matmul(a, zero, b, zero, out.reshape(1, m, n, -1), zero)


# Nearly full matrices, as in the upper levels of a tree over a chain: a dense product.

FILLED_SHARE = 1 / 8
"""Smallest share of a full product's terms for which the dense product is faster: measured from a twentieth on for a
few hundred rows and columns, ten to twenty times faster where nearly all terms exist."""
FILLED_LEAST = 100_000
"""Smallest number of terms: every entry, zeros included, is also written out once."""
NARROW = 32
"""Smallest number of rows and columns, for the same reason."""


class Filled(Accumulate):
    """Keeps nothing per product. Batches, and devices, sum as `Accumulate` does."""

    name = "filled"
    kernel = "spgemm_filled"

    @property
    def fits(self) -> bool:
        product = self.product
        return worth(product.a.shape[0], product.a.shape[1], product.b.shape[1], product.products)


def worth(m: int, k: int, n: int, products: int) -> bool:
    """Whether `products` terms of (m, k) @ (k, n) are enough for a dense product to pay off."""
    return min(m, k, n) >= NARROW and products >= max(FILLED_SHARE * m * k * n, FILLED_LEAST)


# Every entry of C is one product.


class Gather(Strategy):
    """Keeps the entries of A and B that each entry of C multiplies."""

    name = "gather"
    reads = ("a_index", "b_index")

    @property
    def fits(self) -> bool:
        return self.product.products == self.product.nnz

    @property
    def index_bytes(self) -> int:
        return 2 * self.product.pair_dtype.itemsize * self.product.products

    def arrays(self) -> dict[str, np.ndarray]:
        a_index, b_index = self.product.pairs()
        return {"a_index": a_index, "b_index": b_index}

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        a_index, b_index = operands
        k.gather_multiply(left, a_index, right, b_index, out)


# One operand is an identity: the other operand's values.


class Identity(StrategyOfKinds):
    """A copy; scans leave it out."""

    name = "identity"
    own_pattern = False

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        return "identity" in (a.kind, b.kind)

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        return b if a.kind == "identity" else a

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[bool]:
        return (cls.result(a, b) is b,)

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        out[...] = right if operands[0] else left


# Gustavson's algorithm with each product's place in its row of C kept.

INDEX_LIMIT = 2**30
"""Most bytes of an index of all products if no limit is given; beyond it, nothing is kept per product."""
MUCH = 2**26
"""Bytes of such an index that count."""
SUMMED = 8
"""Products per entry of C from which no index that counts is kept: `Accumulate` takes at most a quarter longer, where
the zeros and the reading of a row of sums are spread over so many products, and its plan has a fifth of the bytes."""


class Positions(Strategy):
    """No search: a product is two loads, a multiply-add and a store."""

    name = "positions"
    kernel = "spgemm_positions"
    reads = (Rows, Places)

    @property
    def fits(self) -> bool:
        product = self.product
        most = MUCH if product.products >= SUMMED * product.nnz else INDEX_LIMIT
        return product.products != product.nnz and product.position_bytes <= most

    @property
    def index_bytes(self) -> int:
        return self.product.position_bytes + self.product.product_ptr.nbytes + self.product.row_cuts.nbytes

    def arrays(self) -> dict[str, np.ndarray]:
        product = self.product
        own = {
            "product_ptr": product.product_ptr,
            "positions": product.positions(product.position_dtype),
            "row_cuts": product.row_cuts,
        }
        return own | rows_of_one_type(product)


# Every entry of C sums the list of its products: for short rows of B, and many products per entry.

LONE = 1.25
"""Mean number of products per entry of C below which a list saves no sum: most entries are a single product."""
LONG = 20
"""Mean length of B's rows, over all products, from which `Positions` is faster for such entries: by 10 to 25 %
without a batch, with an index of a fifth of the size that takes half the time to build."""


class SumPairs(Strategy):
    """One word per product names the entries of A and B; memory is written once per entry."""

    name = "pairs"
    kernel = "spgemm_pairs"
    reads = (Pairs,)

    @property
    def fits(self) -> bool:
        product = self.product
        if not product.has_short_rows or product.products == product.nnz:
            return False
        short = product.products < LONG * product.a.nnz or product.products >= LONE * product.nnz
        return short and self._list_bytes <= INDEX_LIMIT

    @cached_property
    def word_dtype(self) -> np.dtype:
        """32 bits where the bits that B's entries leave are enough for any row of A, else 64."""
        narrow = self.product.longest_row_of_a <= 1 << _shift(self.product.b, np.uint32)
        return np.dtype(np.uint32 if narrow else np.uint64)

    @property
    def index_bytes(self) -> int:
        tiles, _ = self._tiles
        return self._list_bytes + tiles.nbytes + self._cuts.nbytes

    @property
    def _list_bytes(self) -> int:
        """Bytes of the lists, which are most of the index."""
        return self.word_dtype.itemsize * self.product.products + 3 * np.dtype(np.uint16).itemsize * self.product.nnz

    @cached_property
    def _tiles(self) -> tuple[np.ndarray, np.ndarray]:
        """`Pairs.tiles`, without the numbers of lists, and the first row of every tile."""
        symbolic = host_kernels()
        product = self.product
        a, most = product.a, 2 + product.shape[0] + 2 * product.products // symbolic.MOST_PRODUCTS
        tiles, rows = np.zeros((most, 3 + symbolic.WRITTEN_OUT), np.int64), np.empty(most, np.int64)
        widest = 1 << _shift(product.b, self.word_dtype)
        structure = a.indptr, product.c_indptr, product.product_ptr, product.terms
        count = symbolic.cut_tiles(*structure, widest, tiles, rows)
        return tiles[:count].copy(), rows[:count].copy()

    @cached_property
    def _cuts(self) -> np.ndarray:
        """Tiles in parts of about equal work."""
        tiles, _ = self._tiles
        return row_cuts(tiles[:, 2] + tiles[:, 0], parts_of_numeric(self.product.products))

    def arrays(self) -> dict[str, np.ndarray]:
        product, (tiles, rows) = self.product, self._tiles
        order, starts, words = product.lists(tiles, rows, _shift(product.b, self.word_dtype), self.word_dtype)
        own = {"words": words, "order": order, "starts": starts, "lengths": product.terms}
        return own | {"tiles": tiles, "tile_cuts": self._cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        return super().operands(a, b, dict(arrays) | {"shift": _shift(b, arrays["words"].dtype)})


def _shift(b: SparsityPattern, dtype: Any) -> int:
    """Return the bit of a word where the entry of B begins."""
    return 32 if np.dtype(dtype) == np.uint64 else 32 - max((b.nnz - 1).bit_length(), 1)


# The rows of B consist of runs of neighbouring columns (channels-last): one offset per run, and vectors along it.
#
# A run of a row of B is also a run of every row of C to which that row contributes: C has all its columns, sorted. So
# the offset of its first column serves for all of them.

RUN_LENGTH = 8
"""Mean length of B's runs, over all products, from which vectors along the runs pay off."""


class AddRuns(Strategy):
    """Adds whole runs of B's rows to C."""

    name = "runs"
    kernel = "spgemm_runs"
    reads = (Rows, Runs)

    @property
    def fits(self) -> bool:
        product = self.product
        lengths = np.diff(product.b.indptr)
        rows = product.a.nnz if lengths.all() else np.count_nonzero(lengths[product.a.indices])  # a run each at least
        enough = product.products >= RUN_LENGTH * int(rows)
        return product.products == 0 or (
            enough and _has_runs(product.b) and product.products >= RUN_LENGTH * self._starts[1]
        )

    @property
    def index_bytes(self) -> int:
        start_ptr, _ = self._starts
        own = sum(array.nbytes for array in self._shapes.values()) + start_ptr.nbytes + self.product.row_cuts.nbytes
        return own + self.product.position_dtype.itemsize * int(start_ptr[-1])

    @cached_property
    def _shapes(self) -> dict[str, np.ndarray]:
        """The fields of `Runs` that depend on B alone, in B's index type."""
        symbolic = host_kernels()
        b = self.product.b
        shapes, runs_of_row = np.empty(b.shape[0], b.indptr.dtype), np.empty(b.shape[0], np.int64)
        symbolic.find_shapes(b.indptr, b.indices, shapes, runs_of_row)
        first = np.flatnonzero(np.diff(shapes, prepend=-1)) if b.shape[0] else np.empty(0, np.int64)
        run_ptr = np.concatenate(([0], np.cumsum(runs_of_row[first]))).astype(b.indptr.dtype)
        lengths = np.empty(int(run_ptr[-1]), b.indptr.dtype)
        symbolic.measure_runs(b.indptr, b.indices, first, lengths)
        return {"b_shape": shapes, "run_ptr": run_ptr, "run_lengths": lengths}

    @cached_property
    def _starts(self) -> tuple[np.ndarray, int]:
        """Where each row's starts of runs begin, and the number of runs over all products."""
        symbolic = host_kernels()
        a, shapes = self.product.a, self._shapes
        counts = np.zeros(a.shape[0] + 1, np.int64)
        pieces = symbolic.count_starts(a.indptr, a.indices, shapes["b_shape"], shapes["run_ptr"], counts[1:])
        return np.cumsum(counts), int(pieces)

    def arrays(self) -> dict[str, np.ndarray]:
        product, shapes, (start_ptr, _) = self.product, self._shapes, self._starts
        starts, cuts = product.starts_of_runs(tuple(shapes.values()), start_ptr), product.row_cuts
        own = {"start_ptr": start_ptr, "starts": starts, "row_cuts": cuts}
        return shapes | rows_of_one_type(product, **shapes) | own


def _has_runs(pattern: SparsityPattern) -> bool:
    """Whether any run is as long as the average must be: a quick test."""
    further, n = RUN_LENGTH - 1, pattern.indices
    return further <= 0 or bool((n[further:] - n[:-further] == further).any())


# B is diagonal, and the rows of A share a few shapes made of runs of columns: a convolution times a ReLU.

SCALE_RUNS_LEAST = 1 << 14
"""Smallest number of entries of A: below it, the call costs more than they do."""
LENGTH = 2
"""Smallest mean length of a run."""
MOST_COLUMNS = 2**30
"""Most columns of A: with gaps, column numbers still fit in 32 bits."""
MOST_SHAPES = 64
"""Most shapes; the search ends beyond."""
SCALE_RUNS_SHARE = 1 / 16
"""Most runs of all shapes, as a share of A's entries."""

GAP = 16
"""Columns left out after every page: a cache line of float32."""
PER_COLUMN = 16
"""Entries of A per column from which the values of B are copied."""


class ScaleRuns(Strategy):
    """Scales columns of A without reading A's column numbers."""

    name = "scale_runs"
    kernel = "scale_runs"
    own_pattern = False
    reads_columns = False

    @property
    def fits(self) -> bool:
        b = self.product.b
        return b == SparsityPattern.diagonal(b.shape[1]) and self._shapes is not None

    @property
    def pattern(self) -> SparsityPattern:
        return self.product.a

    @property
    def pattern_bytes(self) -> int:
        return 0

    @property
    def products(self) -> int:
        return self.product.a.nnz

    @property
    def index_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, np.ndarray]:
        return self._shapes or {}

    @cached_property
    def _shapes(self) -> dict[str, np.ndarray] | None:
        """`arrays`, None where they do not pay off."""
        a = self.product.a
        if a.nnz < SCALE_RUNS_LEAST or a.shape[1] > MOST_COLUMNS:
            return None
        try:
            symbolic = host_kernels()
        except ImportError:  # no Numba for this NumPy; the device kernel reads A's columns and needs none
            return None
        shape, first = np.empty(a.shape[0], np.int32), np.empty(a.shape[0], a.indices.dtype)
        examples = np.empty(MOST_SHAPES, np.int64)
        count = symbolic.find_row_shapes(a.indptr, a.indices, shape, first, examples)
        if count > MOST_SHAPES:
            return None
        examples = examples[:count].copy()
        entries = int((a.indptr[examples + 1] - a.indptr[examples]).sum())
        if entries > a.nnz // LENGTH:
            return None
        run_ptr, whole = np.empty(count + 1, np.int64), np.empty(count, np.int64)
        columns, ends = np.empty(entries, np.int32), np.empty(entries, np.int32)
        runs = symbolic.write_runs(a.indptr, a.indices, examples, run_ptr, whole, columns, ends)
        met = int(np.diff(run_ptr) @ np.bincount(shape, minlength=count))
        if runs > SCALE_RUNS_SHARE * a.nnz or LENGTH * met > a.nnz:
            return None
        columns, ends, gap = columns[:runs].copy(), ends[:runs].copy(), 0
        if a.nnz >= PER_COLUMN * a.shape[1] and not symbolic.cross_pages(shape, first, run_ptr, columns, ends, PAGE):
            gap = GAP
            first += first // PAGE * GAP
            columns += columns // PAGE * GAP
        found = {"shape": shape, "first": first, "run_ptr": run_ptr, "whole": whole}
        return found | {"run_columns": columns, "run_ends": ends, "gap": np.zeros(gap, bool)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        fields = dict(arrays) | {"indptr": arrays["a_indptr"], "gap": arrays["gap"].size}
        return arrays["a_indices"], RowShapes(*(fields[name] for name in RowShapes._fields))


# A diagonal operand scales the rows or columns of the other one, on its pattern.


class ScaleRows(StrategyOfKinds):
    """A is diagonal."""

    name = "scale_rows"
    reads = ("b_indptr",)
    own_pattern = False

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        return bool(a.kind == "diagonal")

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        return b

    @staticmethod
    def count(a: Any, b: Any) -> int:
        return int(b.nnz)

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        (indptr,) = operands
        k.scale_rows(indptr, right, left, out)


class ScaleColumns(StrategyOfKinds):
    """B is diagonal."""

    name = "scale_columns"
    kernel = "scale_columns"
    reads = ("a_indices",)
    own_pattern = False
    quicker = (ScaleRuns,)

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        return bool(b.kind == "diagonal")

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        return a

    @staticmethod
    def count(a: Any, b: Any) -> int:
        return int(a.nnz)


# B is a selection, at most one entry per row (max-pooling): an entry of A has at most one product.


class SelectColumns(Strategy):
    """One offset per entry of A, and no loop over rows of B."""

    name = "select_columns"
    kernel = "spgemm_select_columns"
    reads = (Terms,)

    @property
    def fits(self) -> bool:
        return self.product.a.kind != "selection" and self.product.b.kind == "selection"

    @property
    def index_bytes(self) -> int:
        product = self.product
        listed = self._dtype.itemsize * (2 * product.products + product.shape[0] + 1) if self._lists_products else 0
        return product.position_bytes + listed + product.row_cuts.nbytes

    @property
    def _lists_products(self) -> bool:
        """Whether some columns of A have no product, so that the products must be listed."""
        return self.product.b.nnz < self.product.b.shape[0]

    @property
    def _dtype(self) -> np.dtype:
        """Index type of listed products."""
        return np.promote_types(self.product.pair_dtype, index_dtype(self.product.nnz, self.product.shape))

    def arrays(self) -> dict[str, np.ndarray]:
        product = self.product
        a, b, c, dtype = product.a, product.b, product.pattern, self._dtype
        if self._lists_products:
            present = np.diff(b.indptr)[a.indices] > 0
            arrays = {
                "product_ptr": product.product_ptr.astype(dtype),
                "a_index": np.flatnonzero(present).astype(dtype),
                "b_index": b.indptr[a.indices[present]].astype(dtype),
            } | ({} if dtype == c.indptr.dtype else {"c_indptr": c.indptr.astype(dtype)})
        else:
            arrays = of_one_type({"product_ptr": a.indptr, "b_index": a.indices, "c_indptr": c.indptr})
        return arrays | {"positions": product.positions(product.position_dtype), "row_cuts": product.row_cuts}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        listed = {"product_ptr": arrays["a_indptr"], "a_index": None, "b_index": arrays["a_indices"]}
        return super().operands(a, b, listed | dict(arrays))


# C has the pattern of a mask.

LANDING = 0.5
"""Share of the products that land in the mask, up to which a list of them is faster than a dense row for all."""


class Masked(Strategy):
    """Keeps the entries of A and B that each product in the mask multiplies, and its offset in its row of C."""

    name = "masked"
    kernel = "spgemm_select_columns"
    reads = (Terms,)
    product: MaskedProduct

    @property
    def fits(self) -> bool:
        product = self.product
        return product.kept <= LANDING * product.products and self.index_bytes <= INDEX_LIMIT

    @property
    def products(self) -> int:
        return self.product.kept

    @cached_property
    def _dtype(self) -> np.dtype:
        product = self.product
        longest = index_dtype(max(product.kept, product.nnz), product.shape)
        return np.promote_types(product.pair_dtype, longest)

    @property
    def index_bytes(self) -> int:
        product = self.product
        each = 2 * self._dtype.itemsize + product.position_dtype.itemsize
        return each * product.kept + self._dtype.itemsize * len(product.kept_ptr) + self._cuts.nbytes

    @cached_property
    def _cuts(self) -> np.ndarray:
        return parts_of_rows(self.product.kept_ptr + self.product.c_indptr)

    def arrays(self) -> dict[str, np.ndarray]:
        product, dtype = self.product, self._dtype
        a_index, b_index, positions = product.kept_terms(dtype)
        own = {"product_ptr": product.kept_ptr.astype(dtype), "a_index": a_index, "b_index": b_index}
        return own | {"positions": positions, "row_cuts": self._cuts, "c_indptr": product.c_indptr.astype(dtype)}


class MaskedSums(Accumulate):
    """Sums all products in a dense row, of which the mask's entries are read: for many, or a mask of most of C."""

    name = "masked_sums"


# A is a selection, at most one entry per row: picks rows of B and scales them.


class SelectRows(Strategy):
    """Moves whole rows; nothing is indexed."""

    name = "select_rows"
    kernel = "spgemm_select_rows"
    reads = (Rows,)

    @property
    def fits(self) -> bool:
        return self.product.a.kind == "selection"

    def arrays(self) -> dict[str, np.ndarray]:
        return rows_of_one_type(self.product)


# To add a strategy, write a class above and name it in one of these tuples. `OF_KINDS` is tried first; `OF_STRUCTURE`
# is in the order of speed, fastest first.

OF_KINDS: tuple[type[StrategyOfKinds], ...] = (Identity, ScaleRows, ScaleColumns, Dense)
"""Chosen by the kinds of A and B alone: the first that takes them."""
OF_STRUCTURE: tuple[type[Strategy], ...] = (
    SelectRows, SelectColumns, Filled, AddRuns, AddBlocks, Gather, SumPairs, Positions, Accumulate,
)  # fmt: skip
"""Chosen by the structure of all other products; the last always fits."""
OF_KINDS_AND_STRUCTURE: tuple[type[Strategy], ...] = tuple(quicker for told in OF_KINDS for quicker in told.quicker)
"""Preferred to one of `OF_KINDS` where the structure allows it."""


def by_kinds(a: Any, b: Any) -> type[StrategyOfKinds] | None:
    """Return the strategy that the kinds of A and B determine, None if it depends on their structure."""
    return next((strategy for strategy in OF_KINDS if strategy.takes(a, b)), None)
