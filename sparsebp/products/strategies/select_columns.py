"""B is a selection, at most one entry a row (max-pooling, say): an entry of A makes one product at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.kernels.operands import Terms
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_dtype
from sparsebp.products.strategies.strategy import Strategy, of_one_type


class SelectColumns(Strategy):
    """A position an entry of A, and no loop over rows of B."""

    name = "select_columns"
    kernel = "spgemm_select_columns"
    reads = (Terms,)

    @property
    def fits(self) -> bool:
        """B is a selection, and A is none."""
        return self.product.a.kind != "selection" and self.product.b.kind == "selection"

    @property
    def index_bytes(self) -> int:
        """Of places, and of products that must be listed."""
        product = self.product
        listed = self._dtype.itemsize * (2 * product.products + product.shape[0] + 1) if self._lists_products else 0
        return product.position_bytes + listed + product.row_cuts.nbytes

    @property
    def _lists_products(self) -> bool:
        """Whether the selection leaves columns of A without a product, so that the products must be listed."""
        return self.product.b.nnz < self.product.b.shape[0]

    @property
    def _dtype(self) -> np.dtype:
        """Index type of listed products."""
        return np.promote_types(self.product.pair_dtype, index_dtype(self.product.nnz, self.product.shape))

    def arrays(self) -> dict[str, np.ndarray]:
        """The fields of `Terms`, but for those that the patterns serve for."""
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
        """Return `Terms`: without a list of its own, product p is entry p of A times the entry in the row it names."""
        listed = {"product_ptr": arrays["a_indptr"], "a_index": None, "b_index": arrays["a_indices"]}
        return super().operands(a, b, listed | dict(arrays))
