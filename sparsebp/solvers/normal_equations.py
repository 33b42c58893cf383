"""The damped normal equations ``(Jᵀ J + D) h = -Jᵀ f``: by factors that are planned once, or by iterations on J itself.

Both kinds take J's values and f, say the gradient and the diagonal of Jᵀ J, take D, and solve.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sparsebp import kernels
from sparsebp.core.check import Array
from sparsebp.core.errors import PivotError
from sparsebp.patterns.pattern import SparsityPattern, part_of
from sparsebp.products.factor import FactorPlan, plan_factor
from sparsebp.products.product import ProductPlan, plan_product

PLANS = 8
"""Patterns of J whose plans are kept."""
FULL = 0.3
"""Share of entries from which J counts as dense, and the BLAS forms Jᵀ J: measured for 100 to 1000 columns."""
LONG = 8
"""A row of J is long if it alone adds this many times as many entries to Jᵀ J as J and its diagonal have."""

COLUMNS = 64
"""Of an inverse that are solved for together."""


class NormalPlan(NamedTuple):
    """A plan of Jᵀ J and its factors.

    A long row e of J stands in ``[[S + D, c eᵀ], [c e, -c²]]``, where S is of the other rows: eᵀ e, which has n²
    entries, is never formed. c makes the sum of c |e| about 1, so that growth is not mistaken for a loss of digits.

    Attributes
    ----------
    short
        The pattern of J without long rows, with a further row for each empty column, so that S has a full diagonal.
    kept, long
        Entries of J in `short`, and those in long rows; None if there are no long rows.
    number
        Which of the long rows each entry of `long` is in.
    transposed
        The order of the entries of the transpose of `short`: as wide as an address, NumPy takes these in half the time.
    product
        Of S; None where J counts as dense.
    places
        Where the entries of S are among those of `factor`; None: they are all.
    border
        Where entries of long rows are among those of `factor`, above and below the diagonal.
    diagonal, ends
        The places of D, and of -c².
    factor
        Cholesky factors, LDLᵀ factors if there are long rows.
    """

    short: SparsityPattern
    kept: np.ndarray | None
    long: np.ndarray | None
    number: np.ndarray
    transposed: np.ndarray
    product: ProductPlan | None
    places: np.ndarray | None
    border: np.ndarray | None
    diagonal: np.ndarray
    ends: np.ndarray
    factor: FactorPlan


_NONE = np.zeros(0, np.int64)


@lru_cache(maxsize=PLANS)
def plan_normal_equations(pattern: SparsityPattern) -> NormalPlan:
    """Plan Jᵀ J and its factors; kept for further fits on the same pattern."""
    m, n = pattern.shape
    lengths = np.diff(pattern.indptr).astype(np.int64)
    long = lengths**2 > LONG * (pattern.nnz + n)
    if not long.any() and 0 < FULL * m * n <= pattern.nnz:
        whole = plan_factor(SparsityPattern.dense(n, n), kind="cholesky")
        return NormalPlan(pattern, None, None, _NONE, _NONE, None, None, None, np.arange(n) * (n + 1), _NONE, whole)
    of_long = long[pattern.row_of_entry]
    short = part_of(pattern, ~of_long) if long.any() else pattern
    empty = np.flatnonzero(np.bincount(short.indices, minlength=n) == 0)
    if len(empty):
        indptr = np.append(short.indptr, short.nnz + 1 + np.arange(len(empty)))
        short = SparsityPattern(indptr, np.append(short.indices, empty), (m + len(empty), n))
    product, transposed = plan_product(short.T, short), short.transpose_permutation.astype(np.intp)
    inner = product.pattern
    diagonal = np.flatnonzero(inner.row_of_entry == inner.indices)
    if not long.any():
        factor = plan_factor(inner, kind="cholesky")
        return NormalPlan(short, None, None, _NONE, transposed, product, None, None, diagonal, _NONE, factor)
    k, own = int(long.sum()), np.flatnonzero(of_long)
    rows, columns = inner.row_of_entry.astype(np.int64), inner.indices.astype(np.int64)
    number, across = (np.cumsum(long) - 1)[pattern.row_of_entry[own]], pattern.indices[own].astype(np.int64)
    beyond, ends = n + number, n + np.arange(k)
    keys = [r * (n + k) + c for r, c in ((rows, columns), (across, beyond), (beyond, across), (ends, ends))]
    every = np.sort(np.concatenate(keys))
    bordered = SparsityPattern(np.searchsorted(every, np.arange(n + k + 1) * (n + k)), every % (n + k), (n + k, n + k))
    places, above, below, at_ends = (np.searchsorted(every, key) for key in keys)
    # S alone may be singular: its last pivots, which would show it, come after the long rows
    order = plan_factor(inner, kind="cholesky").columns
    order = np.concatenate([order[: max(n - k, 0)], ends, order[max(n - k, 0) :]])
    factor = plan_factor(bordered, kind="ldlt", order=order, signs=np.where(np.arange(n + k) < n, 1, -1))
    return NormalPlan(short, np.flatnonzero(~of_long), own, number, transposed, product, places,
                      np.stack([above, below]), places[diagonal], at_ends, factor)  # fmt: skip


class Factored:
    """The equations by factors.

    Parameters
    ----------
    pattern
        Of J.
    dtype
        Of all values.
    """

    exact = True

    def __init__(self, pattern: SparsityPattern, dtype: Any) -> None:
        self.pattern, self.dtype, self.n = pattern, np.dtype(dtype), pattern.shape[1]
        self.plan = plan_normal_equations(pattern)
        self._values = np.zeros(self.plan.factor.pattern.nnz, dtype)
        self.beyond = len(self.plan.ends)
        self._normal = self._values if self.plan.places is None else np.empty(len(self.plan.places), dtype)

    def update(self, values: Array, f: Array) -> tuple[Array, Array]:
        """Take J and f; return the gradient and the diagonal of Jᵀ J."""
        plan, short = self.plan, self.plan.short
        if plan.product is None:
            j = self._filled(values)
            with np.errstate(over="ignore", invalid="ignore"):
                kernels.dense(np).matmul(j.T, j, self._normal.reshape(self.n, self.n))
            self._own = self._normal[plan.diagonal]
            self._gradient = kernels.dense(np).matmul(f[None], j)[0].copy()
            return self._gradient, self._own
        mine = values if plan.kept is None else values[plan.kept]
        given, right = (np.append(a, np.zeros(size - len(a), self.dtype)) if size > len(a) else a
                        for a, size in ((mine, short.nnz), (f, short.shape[0])))  # fmt: skip
        transposed = np.take(given, plan.transposed)
        plan.product(transposed, given, out=self._normal)
        gradient = _times(short.T, transposed, right)
        if plan.places is None:
            sums = self._own = self._normal[plan.diagonal]
        else:
            self._values[plan.places] = self._normal
            sums = self._own = self._values[plan.diagonal]
        if plan.long is not None:
            long, number = values[plan.long], plan.number
            rows, columns = self.pattern.row_of_entry[plan.long], self.pattern.indices[plan.long]
            sizes, sums = np.zeros(self.beyond, self.dtype), sums.copy()
            with np.errstate(over="ignore", invalid="ignore"):
                np.add.at(sizes, number, abs(long))
                np.add.at(sums, columns, long * long)
                np.add.at(gradient, columns, long * f[rows])
                c = np.where(np.isfinite(sizes) & (sizes > 0), np.ldexp(self.dtype.type(1), -np.frexp(sizes)[1]), 1)
                self._values[plan.border], self._values[plan.ends] = c[number] * long, -c * c
        self._gradient = gradient
        return gradient, sums

    def _filled(self, values: Array) -> Array:
        """Return J as a dense matrix."""
        if self.pattern.kind == "dense":
            return values.reshape(self.pattern.shape)
        found = np.zeros(self.pattern.shape, self.dtype)
        found[self.pattern.row_of_entry, self.pattern.indices] = values
        return found

    def damp(self, diagonal: Array) -> None:
        """Take D."""
        self._values[self.plan.diagonal] = self._own + diagonal

    def solve(self) -> Array | None:
        """Return h, or None where the matrix has no factors."""
        return self._solve(self._values, -self._gradient)

    def solve_free(self, fixed: Array, step: Array) -> Array | None:
        """Return the best change of a step in the unknowns that are not fixed, zeros elsewhere."""
        pattern = self.plan.factor.pattern
        held = np.append(fixed, np.zeros(self.beyond, bool))
        values = np.where(held[pattern.row_of_entry] | held[pattern.indices], 0, self._values)
        values[self.plan.diagonal[fixed]] = 1
        return self._solve(values, np.where(fixed, 0, -self._gradient - self.times(step)))

    def inverse(self, chosen: Array) -> Array | None:
        """Return rows and columns of (Jᵀ J)⁻¹, or None where it has no factors."""
        self.damp(np.zeros(self.n, self.dtype))
        try:
            factors = self.plan.factor(self._values)
        except PivotError:
            return None
        found = np.empty((len(chosen), len(chosen)), self.dtype)
        for first in range(0, len(chosen), COLUMNS):
            some = chosen[first : first + COLUMNS]
            units = np.zeros((self.n + self.beyond, len(some)), self.dtype)
            units[some, np.arange(len(some))] = 1
            found[:, first : first + COLUMNS] = factors.refine(units, factors.solve(units))[chosen]
        return found

    def _solve(self, values: Array, right: Array) -> Array | None:
        try:
            factors = self.plan.factor(values)
        except PivotError:
            return None
        if not self.beyond:
            return factors.solve(right)
        wide = self._widened(right)
        return factors.refine(wide, factors.solve(wide))[: self.n]

    def times(self, step: Array) -> Array:
        """Return (Jᵀ J + D) times a step."""
        pattern = self.plan.factor.pattern
        along = _times(pattern, self._values, self._widened(step))
        if not self.beyond:
            return along
        along[self.n :] /= -self._values[self.plan.ends]
        again = _times(pattern, self._values, np.append(np.zeros(self.n, self.dtype), along[self.n :]))
        return (along + again)[: self.n]

    def _widened(self, a: Array) -> Array:
        """Return numbers with zeros for the unknowns of long rows."""
        return np.append(a, np.zeros(self.beyond, self.dtype)) if self.beyond else a


class Iterated:
    """The equations by LSMR, for Jacobians whose factors do not fit in memory: J is all that is stored.

    D. Fong, M. Saunders, "LSMR: An Iterative Algorithm for Sparse Least-Squares Problems", SIAM J. Sci. Comput. 33,
    2011, on J over √D, with columns scaled to norm 1.

    Parameters
    ----------
    pattern, dtype
        Of J.
    options
        Of `scipy.sparse.linalg.lsmr`.
    """

    exact = False

    def __init__(self, pattern: SparsityPattern, dtype: Any, options: dict[str, Any]) -> None:
        self.pattern, self.dtype = pattern, np.dtype(dtype)
        near = 1e-5 if self.dtype == np.float32 else 1e-10
        self.options = {"atol": near, "btol": near} | options

    def update(self, values: Array, f: Array) -> tuple[Array, Array]:
        """Take J and f; return the gradient and the diagonal of Jᵀ J."""
        self._f, self._values, self._transposed = f, values, values[self.pattern.transpose_permutation]
        self._sums = np.zeros(self.pattern.shape[1], self.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            np.add.at(self._sums, self.pattern.indices, values * values)
        return self._back(f), self._sums

    def damp(self, diagonal: Array) -> None:
        """Take D."""
        self._diagonal = diagonal

    def solve(self) -> Array | None:
        """Return h."""
        n = self.pattern.shape[1]
        return self.solve_free(np.zeros(n, bool), np.zeros(n, self.dtype))

    def solve_free(self, fixed: Array, step: Array) -> Array | None:
        """Return the best change of a step in the unknowns that are not fixed, zeros elsewhere."""
        from scipy.sparse.linalg import LinearOperator, lsmr

        m, n = self.pattern.shape
        root, scale = np.sqrt(self._diagonal), np.where(fixed, 0, 1 / np.sqrt(self._sums + self._diagonal))
        operator = LinearOperator(
            (m + n, n), lambda z: np.append(self._along(scale * z), root * scale * z),
            rmatvec=lambda y: scale * (self._back(y[:m]) + root * y[m:]), dtype=np.float64,
        )  # fmt: skip
        right = -np.append(self._f + self._along(step), root * step).astype(np.float64)
        found: Array = lsmr(operator, right, **self.options)[0]
        return (scale * found).astype(self.dtype)

    def times(self, step: Array) -> Array:
        """Return (Jᵀ J + D) times a step."""
        product: Array = self._back(self._along(step)) + self._diagonal * step
        return product

    def _along(self, step: Array) -> Array:
        return _times(self.pattern, self._values, step)

    def _back(self, f: Array) -> Array:
        return _times(self.pattern.T, self._transposed, f)


def _times(pattern: SparsityPattern, values: Array, x: Array) -> Array:
    """Return the product of a matrix with a vector."""
    out = np.empty((pattern.shape[0], 1), values.dtype)
    x = np.ascontiguousarray(x, values.dtype)
    kernels.get(np).csr_matvec(pattern.indptr, pattern.indices, values[:, None], x[:, None], out)
    return out[:, 0]
