"""What a strategy of a product is: when it fits, what it keeps, and how it runs. Each has a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.api import Kernels
from sparsebp.patterns import SparsityPattern
from sparsebp.products.symbolic import SymbolicProduct


class Strategy:
    """A way to compute C = A @ B for new values, considered for one product.

    What belongs to the product (whether the strategy fits, the bytes and arrays that it keeps) is asked of an object;
    the arrays are made when it has been chosen. How it runs belongs to the class, which is all that a plan keeps.

    Parameters
    ----------
    product
        What is known of the product.

    Attributes
    ----------
    name : str
        As `ProductPlan.strategy` says it, and by which `sparsebp.products.estimate` prices it.
    kernel : str
        The method of `sparsebp.kernels.api.Kernels` that runs, if `run` does not say it.
    reads : tuple
        What the kernel takes beside values: tuples of `sparsebp.kernels.operands`, or names of single arrays.
    own_pattern : bool
        Whether C's pattern is not that of an operand.
    reads_columns : bool
        Whether a call without a batch reads the columns of A.
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
        """Whether the kernel can compute this product, and is worth it; where not, it may write past its arrays."""
        return True

    @property
    def pattern(self) -> SparsityPattern:
        """C's pattern, made when it is first asked for."""
        return self.product.pattern

    @property
    def pattern_bytes(self) -> int:
        """Bytes of C's pattern, if it is not an operand's."""
        return self.product.pattern_bytes

    @property
    def products(self) -> int:
        """Multiplications a sample."""
        return self.product.products

    @property
    def index_bytes(self) -> int:
        """Bytes of `arrays`, but for copies of patterns whose index types differ."""
        return 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what the kernel reads beside the patterns, or in their place, by the names of the operands' fields."""
        return {}

    @classmethod
    def operands(cls, a: SparsityPattern, b: SparsityPattern, arrays: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return what `run` is given beside the values: of the patterns' `arrays` and the strategy's own."""
        return tuple(
            arrays[read] if isinstance(read, str) else read(*(arrays[name] for name in read._fields))
            for read in cls.reads
        )

    @classmethod
    def run(cls, k: Kernels, operands: Any, left: Array, right: Array, out: Array) -> None:
        """Compute `out` (nnz, B*) from values (nnz, B*)."""
        getattr(k, cls.kernel)(*operands, left, right, out)

    @staticmethod
    def estimated_bytes(shape: tuple[int, int], nnz: int, products: int) -> int:
        """Estimate `index_bytes` of a product of that `shape` that is not worked out."""
        return 0

    @staticmethod
    def least_bytes(products: int) -> int:
        """Return what so many products take at least; more than a limit, and nothing else is estimated."""
        return 0


class StrategyOfKinds(Strategy):
    """A strategy that is told by the kinds of A and B alone, with nothing worked out.

    Attributes
    ----------
    quicker : tuple
        Strategies for such kinds that depend on the structure besides, and are preferred where they fit.
    """

    quicker: ClassVar[tuple[type[Strategy], ...]] = ()

    @staticmethod
    def takes(a: Any, b: Any) -> bool:
        """Say whether it multiplies patterns of such kinds."""
        raise NotImplementedError

    @staticmethod
    def result(a: Any, b: Any) -> Any:
        """Return the operand whose pattern C has, if it has none of its own."""
        raise NotImplementedError

    @staticmethod
    def count(a: Any, b: Any) -> int:
        """Return the number of multiplications a sample."""
        return 0

    @property
    def fits(self) -> bool:
        """As `takes`."""
        return self.takes(self.product.a, self.product.b)

    @property
    def pattern(self) -> SparsityPattern:
        """That of an operand."""
        result: SparsityPattern = self.result(self.product.a, self.product.b)
        return result

    @property
    def pattern_bytes(self) -> int:
        """None: it is there."""
        return 0

    @property
    def products(self) -> int:
        """As `count`."""
        return self.count(self.product.a, self.product.b)


def of_one_type(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return int64 copies of index arrays if their types differ, else nothing: the patterns' own serve."""
    if len({array.dtype for array in arrays.values()}) == 1:
        return {}
    return {name: array.astype(np.int64) for name, array in arrays.items()}


def rows_of_one_type(product: SymbolicProduct, **others: np.ndarray) -> dict[str, np.ndarray]:
    """Return what `of_one_type` does for the fields of `Rows` and others that the kernel reads with them."""
    a, b, c = product.a, product.b, product.pattern
    rows = {"a_indptr": a.indptr, "a_indices": a.indices, "b_indptr": b.indptr, "c_indptr": c.indptr}
    return of_one_type(rows | others)
