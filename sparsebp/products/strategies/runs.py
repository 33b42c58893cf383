"""The rows of B are runs of neighbouring columns (channels-last): one place stands for a run, vectors for numbers.

A run of a row of B is a run of every row of C that the row takes part in: C has all columns of it, sorted. So the place
of its first column stands for all of them.
"""

from __future__ import annotations

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.kernels.operands import Rows, Runs
from sparsebp.patterns import SparsityPattern
from sparsebp.products.strategies.strategy import Strategy, rows_of_one_type

RUN_LENGTH = 8
"""Mean length of B's runs, over all products, from which vectors along the runs pay."""


class AddRuns(Strategy):
    """Whole runs of B's rows are added to C."""

    name = "runs"
    kernel = "spgemm_runs"
    reads = (Rows, Runs)

    @property
    def fits(self) -> bool:
        """The runs are long enough, on average over all products."""
        product = self.product
        lengths = np.diff(product.b.indptr)
        rows = product.a.nnz if lengths.all() else np.count_nonzero(lengths[product.a.indices])  # a run each at least
        enough = product.products >= RUN_LENGTH * int(rows)
        return product.products == 0 or (
            enough and _has_runs(product.b) and product.products >= RUN_LENGTH * self._starts[1]
        )

    @property
    def index_bytes(self) -> int:
        """Of the fields of `Runs`."""
        start_ptr, _ = self._starts
        own = sum(array.nbytes for array in self._shapes.values()) + start_ptr.nbytes + self.product.row_cuts.nbytes
        return own + self.product.position_dtype.itemsize * int(start_ptr[-1])

    @cached_property
    def _shapes(self) -> dict[str, np.ndarray]:
        """What `Runs` says of B alone, as arrays of its index type."""
        from sparsebp.kernels.host.sparse import structure

        b = self.product.b
        shapes, runs_of_row = np.empty(b.shape[0], b.indptr.dtype), np.empty(b.shape[0], np.int64)
        structure.find_shapes(b.indptr, b.indices, shapes, runs_of_row)
        first = np.flatnonzero(np.diff(shapes, prepend=-1)) if b.shape[0] else np.empty(0, np.int64)
        run_ptr = np.concatenate(([0], np.cumsum(runs_of_row[first]))).astype(b.indptr.dtype)
        lengths = np.empty(int(run_ptr[-1]), b.indptr.dtype)
        structure.measure_runs(b.indptr, b.indices, first, lengths)
        return {"b_shape": shapes, "run_ptr": run_ptr, "run_lengths": lengths}

    @cached_property
    def _starts(self) -> tuple[np.ndarray, int]:
        """Where each row's starts of runs begin, and of how many runs all products consist."""
        from sparsebp.kernels.host.sparse import structure

        a, shapes = self.product.a, self._shapes
        counts = np.zeros(a.shape[0] + 1, np.int64)
        pieces = structure.count_starts(a.indptr, a.indices, shapes["b_shape"], shapes["run_ptr"], counts[1:])
        return np.cumsum(counts), int(pieces)

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `Runs`."""
        product, shapes, (start_ptr, _) = self.product, self._shapes, self._starts
        starts, cuts = product.starts_of_runs(tuple(shapes.values()), start_ptr), product.row_cuts
        own = {"start_ptr": start_ptr, "starts": starts, "row_cuts": cuts}
        return shapes | rows_of_one_type(product, **shapes) | own


def _has_runs(pattern: SparsityPattern) -> bool:
    """Say whether any run may be as long as all must be on average, which is quickly looked at."""
    further, n = RUN_LENGTH - 1, pattern.indices
    return further <= 0 or bool((n[further:] - n[:-further] == further).any())
