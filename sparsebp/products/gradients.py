"""The gradients of a product on a fixed pattern: the same terms as forward, added up at A's entries or at B's.

With C = A @ B every term of the forward multiplies one entry a of A with one entry b of B and adds to one entry c of C.
The gradient at A's values is the sum over the same terms of ``gc[c] * b``, that at B's of ``a * gc[c]``: products of
``gc @ Bᵀ`` outside of A's pattern, which a general product would compute as well, are never formed.
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.kernels.operands import Terms
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.sparsity import SparsityPattern
from sparsebp.patterns.validate import index_dtype
from sparsebp.products.strategies.dense import Dense
from sparsebp.products.symbolic import SymbolicProduct, parts_of_rows

Operand = Literal["a", "b"]


class ProductGradients:
    """The way back of one product; its index is made at the first gradient of each operand.

    Parameters
    ----------
    a, b, c
        The patterns of C = A @ B.
    strategy
        That of its plan.

    Raises
    ------
    OptionError
        A or B is an identity: its values are ones by definition, and the product passes over them.
    """

    def __init__(self, a: SparsityPattern, b: SparsityPattern, c: SparsityPattern, strategy: str) -> None:
        if strategy == "identity":
            raise OptionError(
                "A product with an identity has no gradient at its values", expected="patterns whose values count",
                got=f"{a} @ {b}", remedy="Use SparsityPattern.diagonal(n) for a diagonal with values",
            )  # fmt: skip
        self._a, self._b, self._c = a, b, c
        self._dense = strategy == Dense.name

    def at_a(self, c_data: Array, b_data: Array) -> Array:
        """Return the gradient at A's values, of the gradient at C's and of B's values.

        Parameters
        ----------
        c_data, b_data
            Values on C's and on B's pattern: (nnz,) or (nnz, B) each, of one dtype, C-contiguous, of one library.

        Returns
        -------
        Array
            (nnz of A,) if neither has a batch, else (nnz of A, B): of every sample, also where A's values are shared.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            An array does not fit.
        """
        return self._run("a", ("c_data", c_data, self._c), ("b_data", b_data, self._b), self._a)

    def at_b(self, a_data: Array, c_data: Array) -> Array:
        """Return the gradient at B's values, of A's values and of the gradient at C's; as `at_a`."""
        return self._run("b", ("a_data", a_data, self._a), ("c_data", c_data, self._c), self._b)

    def _run(
        self, operand: Operand, left: tuple[str, Array, SparsityPattern], right: tuple[str, Array, SparsityPattern],
        target: SparsityPattern,
    ) -> Array:  # fmt: skip
        (left_name, left_data, _), (right_name, right_data, _) = left, right
        xp = backend.namespace(**{left_name: left_data, right_name: right_data})
        for name, data, pattern in (left, right):
            backend.float_dtype(data.dtype)
            if data.ndim not in (1, 2) or data.shape[0] != pattern.nnz:
                raise ShapeError(f"{name} does not fit its pattern", expected=f"({pattern.nnz},) or ({pattern.nnz}, B)",
                                 got=data.shape, remedy="Pass one value per entry, the batch last")  # fmt: skip
            backend.check_array(name, data)
        batches = {data.shape[1] for data in (left_data, right_data) if data.ndim == 2}
        if len(batches) > 1 or left_data.dtype != right_data.dtype:
            error = ShapeError if len(batches) > 1 else DTypeError
            raise error("The values do not go together", expected="one dtype and one batch size",
                        got=f"{left_name} {left_data.shape} {left_data.dtype}, "
                            f"{right_name} {right_data.shape} {right_data.dtype}",
                        remedy="Pass values of the same samples, of one dtype")  # fmt: skip
        out = xp.empty((target.nnz, *batches), dtype=left_data.dtype)
        if out.size:
            wide = [data if data.ndim == 2 else data[:, None] for data in (left_data, right_data, out)]
            if self._dense:
                self._multiply(xp, operand, *wide)
            else:
                terms = (self._terms_of_a if operand == "a" else self._terms_of_b).on(xp)
                kernels.get(xp).spgemm_select_columns(Terms(*terms), *wide)
        return out

    def _multiply(self, xp: ModuleType, operand: Operand, left: Array, right: Array, out: Array) -> None:
        """Write ``gc @ Bᵀ`` or ``Aᵀ @ gc`` where everything is dense, so that no term is formed in vain."""
        (m, k), n = self._a.shape, self._b.shape[1]
        if operand == "a":
            sizes, right = (m, n, k), _transposed(xp, self._b, right)
        else:
            sizes, left = (k, m, n), _transposed(xp, self._a, left)
        Dense.run(kernels.get(xp), (*self._block.on(xp), *sizes), left, right, out)

    @cached_property
    def _block(self) -> DeviceCopies:
        """The number of the one block."""
        return DeviceCopies(frozen(np.zeros(1, np.int64)))

    # ---- the terms, listed by the rows of the operand that they are added to -----------------------------------------

    @cached_property
    def _terms_of_a(self) -> DeviceCopies:
        """Entry c of C times entry b of B, in the order of the forward."""
        a, b = self._a, self._b
        counts, before = self._counts
        a_of, within = _spread(counts)
        return self._listed(a, before[a.indptr], _at(self._c_of, before[:-1], a_of, within),
                            b.indptr[a.indices[a_of]] + within, a_of - a.indptr[a.row_of_entry[a_of]])  # fmt: skip

    @cached_property
    def _terms_of_b(self) -> DeviceCopies:
        """Entry a of A times entry c of C; row k of B takes part through the entries of A's column k."""
        a, b = self._a, self._b
        counts, before = self._counts
        by_column = a.transpose_permutation  # A's entries column by column: by the rows of B
        entry, within = _spread(counts[by_column])
        a_of = by_column[entry]
        ends = np.concatenate(([0], np.cumsum(counts[by_column])))
        return self._listed(b, ends[a.T.indptr], a_of, _at(self._c_of, before[:-1], a_of, within), within)

    def _listed(
        self, target: SparsityPattern, product_ptr: np.ndarray, first: np.ndarray, second: np.ndarray,
        positions: np.ndarray,
    ) -> DeviceCopies:  # fmt: skip
        """Return the fields of `Terms`."""
        dtype = index_dtype(max(len(first), self._a.nnz, self._b.nnz, self._c.nnz), (0, 0))
        longest = int(np.diff(target.indptr).max(initial=0))
        narrow = np.uint16 if longest <= 2**16 else np.uint32
        arrays = (product_ptr.astype(dtype), first.astype(dtype), second.astype(dtype), target.indptr.astype(dtype),
                  positions.astype(narrow), parts_of_rows(product_ptr + target.indptr.astype(np.int64)))  # fmt: skip
        return DeviceCopies(*map(frozen, arrays))

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Terms of every entry of A, and of those before it, (nnz of A + 1,)."""
        counts = np.diff(self._b.indptr).astype(np.int64)[self._a.indices]
        return counts, np.concatenate(([0], np.cumsum(counts)))

    @cached_property
    def _c_of(self) -> np.ndarray:
        """Entry of C that every term is added to, in the order of the forward."""
        product = SymbolicProduct(self._a, self._b)
        positions = product.positions(product.position_dtype)
        return np.repeat(self._c.indptr[:-1].astype(np.int64), np.diff(product.product_ptr)) + positions


def _spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every one of ``counts[i]`` terms of i its i, and its number among them."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _at(c_of: np.ndarray, before: np.ndarray, a_of: np.ndarray, within: np.ndarray) -> np.ndarray:
    """Return the entry of C of the terms number `within` of the entries `a_of`."""
    return c_of[before[a_of] + within]


def _transposed(xp: ModuleType, pattern: SparsityPattern, data: Array) -> Array:
    """Return values on `pattern` in the order of its transpose."""
    return data[backend.constant(xp, pattern.transpose_permutation)]
