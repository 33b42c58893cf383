"""B is diagonal, and the rows of A share few shapes made of runs of columns: a convolution times a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.operands import PAGE, RowShapes
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies.strategy import Strategy

LEAST = 1 << 14
"""Entries of A at least: below, a call costs more than they do."""
LENGTH = 2
"""Entries of a run at least, on average."""
MOST_COLUMNS = 2**30
"""Columns of A at most: with gaps, 32 bits hold them yet."""
MOST_SHAPES = 64
"""Shapes at most; beyond, looking for them ends."""
SHARE = 1 / 16
"""Runs of all shapes at most, of A's entries."""

GAP = 16
"""Columns left out behind every page, a line of the cache in float32."""
PER_COLUMN = 16
"""Entries of A at least a column for which values of B are copied."""


class ScaleRuns(Strategy):
    """Columns of A are scaled, and no column number of A is read."""

    name = "scale_runs"
    own_pattern = False
    reads_columns = False

    @property
    def fits(self) -> bool:
        """B is diagonal, and A has enough entries, few shapes, and long enough runs."""
        b = self.product.b
        return b == SparsityPattern.diagonal(b.shape[1]) and self._shapes is not None

    @property
    def pattern(self) -> SparsityPattern:
        """A's."""
        return self.product.a

    @property
    def pattern_bytes(self) -> int:
        """None: it is there."""
        return 0

    @property
    def products(self) -> int:
        """One an entry of A."""
        return self.product.a.nnz

    @property
    def index_bytes(self) -> int:
        """Of `arrays`."""
        return sum(array.nbytes for array in self.arrays().values())

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `RowShapes`, but for A's own; the length of `gap` tells it."""
        return self._shapes or {}

    @cached_property
    def _shapes(self) -> dict[str, np.ndarray] | None:
        """As `arrays`, None where they are not worth it."""
        a = self.product.a
        if a.nnz < LEAST or a.shape[1] > MOST_COLUMNS:
            return None
        try:
            from sparsebp.kernels.host.sparse import block_structure
        except ImportError:  # no Numba for this NumPy: a device's kernel, which reads A's columns, needs none
            return None
        shape, first = np.empty(a.shape[0], np.int32), np.empty(a.shape[0], a.indices.dtype)
        examples = np.empty(MOST_SHAPES, np.int64)
        count = block_structure.find_row_shapes(a.indptr, a.indices, shape, first, examples)
        if count > MOST_SHAPES:
            return None
        examples = examples[:count].copy()
        entries = int((a.indptr[examples + 1] - a.indptr[examples]).sum())
        if entries > a.nnz // LENGTH:
            return None
        run_ptr, whole = np.empty(count + 1, np.int64), np.empty(count, np.int64)
        columns, ends = np.empty(entries, np.int32), np.empty(entries, np.int32)
        runs = block_structure.write_runs(a.indptr, a.indices, examples, run_ptr, whole, columns, ends)
        met = int(np.diff(run_ptr) @ np.bincount(shape, minlength=count))
        if runs > SHARE * a.nnz or LENGTH * met > a.nnz:
            return None
        columns, ends, gap = columns[:runs].copy(), ends[:runs].copy(), 0
        if a.nnz >= PER_COLUMN * a.shape[1] and not block_structure.cross_pages(
            shape, first, run_ptr, columns, ends, PAGE
        ):
            gap = GAP
            first += first // PAGE * GAP
            columns += columns // PAGE * GAP
        found = {"shape": shape, "first": first, "run_ptr": run_ptr, "whole": whole}
        return found | {"run_columns": columns, "run_ends": ends, "gap": np.zeros(gap, bool)}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Any]) -> tuple[Any, ...]:
        """A's columns, for a batch, and `RowShapes`."""
        fields = dict(arrays) | {"indptr": arrays["a_indptr"], "gap": arrays["gap"].size}
        return arrays["a_indices"], RowShapes(*(fields[name] for name in RowShapes._fields))

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Scale columns of A."""
        indices, shapes = operands
        k.scale_runs(indices, shapes, left, right, out)
