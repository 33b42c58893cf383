"""`plan_factor`, `FactorPlan` and `Factors`: LU factors of many matrices on one pattern.

    P A Q = L U

The plan holds the orders of rows and columns, P and Q, and the structure of L and U. A call computes the values of L
and U and nothing else; it exchanges no rows. So a plan suits all values for which the pivots of P and Q are large
enough, and every call checks that: one that would lose more than half of the digits raises `PivotError`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.core.check import Array, check_flag, check_integer
from sparsebp.core.errors import DeviceError, PatternError, PivotError, ShapeError, within_memory
from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import SparsityPattern, check_patterns, frozen
from sparsebp.products.product import ProductPlan, _as_columns, _check_values, plan_product

SYMMETRIC = 0.5
"""Share of entries with a partner across the diagonal from which a pattern is ordered as a symmetric one."""
THRESHOLD = 0.5
"""A symmetric order's pivot over the largest entry of its column, at least: large enough for residuals like those of
partial pivoting, small enough to leave most pivots on the diagonal."""
NAMED = 8
"""Samples that a message lists."""


def plan_factor(pattern: SparsityPattern, values: Array | None = None) -> FactorPlan:
    """Choose the order of elimination of the matrices on a pattern, and find the structure of their LU factors.

    Parameters
    ----------
    pattern
        A square pattern.
    values
        (nnz,) of float32 or float64 of NumPy: a matrix whose pivots are representative. Rows are exchanged as partial
        pivoting does for it. With None, pivots stay on the diagonal: for matrices that are diagonally dominant or
        positive definite, say.

    Returns
    -------
    FactorPlan

    Raises
    ------
    PatternError, ShapeError
        `pattern` is not a pattern, or not square; without `values`: it lacks an entry on the diagonal.
    DTypeError, DeviceError, LayoutError
        `values` is not such an array.
    PivotError
        `values` are of a singular matrix, or not finite.
    MemoryLimitError
        The system has no memory for the plan.

    Notes
    -----
    Columns are ordered by SuperLU (J. Demmel et al., "A supernodal approach to sparse partial pivoting", SIAM J. Matrix
    Anal. Appl. 20, 1999): by minimum degree where at least half of the entries have a partner across the diagonal,
    and then a pivot may be on the diagonal if it is half as large as its column's largest entry; else, and where the
    factors of `values` would not be accurate, by COLAMD with partial pivoting.
    """
    check_patterns(pattern=pattern)
    n, m = pattern.shape
    if n != m:
        raise ShapeError("Only square matrices have LU factors", expected="as many rows as columns", got=pattern.shape)
    if values is None:
        missing = np.setdiff1d(np.arange(n), pattern.indices[pattern.row_of_entry == pattern.indices])
        if len(missing):
            raise PatternError("The pattern lacks entries on the diagonal, where pivots are taken without values",
                               expected="a full diagonal", got=f"none in row {missing[0]}, {len(missing)} in all",
                               remedy="Pass values=, from which pivots are chosen")  # fmt: skip
    else:
        _check_on_host("values", values)
        backend.float_dtype(values.dtype)
        backend.check_array("values", values, shape=(pattern.nnz,))
        if not np.isfinite(values).all():
            raise PivotError("values are not finite", expected="finite numbers", got="NaN or infinity")
    with within_memory(f"The plan of the factors of a matrix of shape {pattern.shape} does not fit in memory",
                       "Reorder the matrix, or solve iteratively"):  # fmt: skip
        symmetric = values is None or _nearly_symmetric(pattern)
        plan = _lay_out(pattern, *_order(pattern, values, symmetric))
        if values is not None and symmetric:
            try:
                plan(values)
            except PivotError:  # rows of very different sizes, say: pivots are worth more than symmetry
                plan = _lay_out(pattern, *_order(pattern, values, symmetric=False))
        return plan


plans: WeakValueDictionary[int, FactorPlan] = WeakValueDictionary()
"""The plans that somebody keeps, by their numbers."""


@dataclass(frozen=True, eq=False)
class FactorPlan:
    """How matrices on one pattern are factorised, any number of times. Made by `plan_factor`.

    Attributes
    ----------
    pattern : SparsityPattern
        The matrices' pattern, (n, n).
    fill : int
        Values of L and U that are kept for each matrix, with zeros that fill up dense blocks.
    flops : int
        Floating-point operations for each matrix.
    panels : tuple
        `sparsebp.kernels.host.factor.Panels`, the structure of L and U.
    number : int
        Another one for every plan of this process: compiled graphs hold it in the plan's place.
    """

    pattern: SparsityPattern
    fill: int
    flops: int
    panels: Any = field(repr=False)
    number: int = field(init=False, repr=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        object.__setattr__(self, "panels", type(self.panels)(*map(frozen, self.panels)))
        plans[self.number] = self

    @cached_property
    def times_vector(self) -> ProductPlan:
        """The product of such a matrix and a vector, whose gradients are those of a solve."""
        n, pattern = self.pattern.shape[0], self.pattern
        pattern = SparsityPattern.diagonal(n) if pattern.kind == "identity" else pattern
        return plan_product(pattern, SparsityPattern.dense(n, 1))

    @property
    def rows(self) -> np.ndarray:
        """The row of every pivot, in the order of elimination: (n,) int32, read-only."""
        rows: np.ndarray = self.panels.rows
        return rows

    @property
    def columns(self) -> np.ndarray:
        """The column of every pivot, in the order of elimination: (n,) int32, read-only."""
        columns: np.ndarray = self.panels.order
        return columns

    def __call__(self, values: Array) -> Factors:
        """Factorise one matrix, or a batch.

        Parameters
        ----------
        values
            (nnz,) or (nnz, B) values on the pattern, float32 or float64, C-contiguous, of NumPy.

        Returns
        -------
        Factors
            Own copies: `values` may be overwritten.

        Raises
        ------
        PivotError
            Some sample is singular to working precision or not finite, or these pivots would lose more than half of
            its digits; `samples` of the error names all of them. A plan made with its own values may suit it.
        DeviceError
            `values` is an array of CuPy: factors are computed on the host alone.
        DTypeError, ShapeError, LayoutError
            `values` do not fit.
        """
        _check_on_host("values", values)
        _check_values("values", values, self.pattern.nnz)
        wide, factor = _as_columns(values), kernels.on_host().factor
        batch = wide.shape[1]
        lanes = factor.width(batch, values.dtype)
        blocks = -(-batch // lanes)
        with within_memory(f"{batch} factors of {self.fill} values each do not fit in memory", "Use smaller batches"):
            own = backend.empty(np, (blocks, self.pattern.nnz, lanes), values.dtype)
            data = backend.empty(np, (blocks, self.fill, lanes), values.dtype)
            growth, loss = np.zeros((2, batch), values.dtype)
            if self.pattern.shape[0] and batch:
                factor.factorise(self.panels, self.flops // 2, wide, own, data, growth, loss)
        self._check_pivots(values, growth, loss)
        return Factors(self, own, data, growth if values.ndim == 2 else growth[0])

    def _check_pivots(self, values: Array, growth: Array, loss: Array) -> None:
        """Refuse samples of which no digit, or less than half of them, would be right."""
        eps, batched = np.finfo(values.dtype).eps, values.ndim == 2
        most_loss, most_growth = 1 / (4 * eps * max(self.pattern.shape[0], 1) ** 0.5), eps**-0.5
        bad = np.flatnonzero(~((loss <= most_loss) & (growth <= most_growth)))
        if not len(bad):
            return
        which, again, where = "The matrix", "values", ""
        if batched:
            which, again = f"{len(bad)} of {len(loss)} matrices", f"values[:, {bad[0]}].copy()"
            where = ", in samples " + ", ".join(map(str, bad[:NAMED])) + (", …" if len(bad) > NAMED else "")
        raise PivotError(
            f"{which} cannot be factorised with the pivots of this plan",
            expected=f"terms of each pivot at most {most_loss:.2g} times the pivot, and terms of L U at most "
            f"{most_growth:.2g} times the matrix's entries",
            got=f"{loss[bad].max():.2g} and {growth[bad].max():.2g} times{where}",
            remedy=f"Plan again with these values, plan_factor(pattern, {again}); if that fails too, they are not "
            "finite, singular to working precision, or need rows and columns of about the same size",
            samples=map(int, bad) if batched else (),
        )  # fmt: skip

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor: arrays are read-only again."""
        return FactorPlan, (self.pattern, self.fill, self.flops, self.panels)


class Factors:
    """L and U of one matrix or of a batch. Made by calling a `FactorPlan`.

    Attributes
    ----------
    plan : FactorPlan
        The plan.
    batch : int or None
        B, or None for one matrix.
    dtype : numpy.dtype
        float32 or float64.
    growth : numpy.ndarray
        How much larger entries of L U are than those of the matrix, the largest of all rows: () or (B,). Rounding
        changes the matrix by about this many times the machine precision.
    """

    def __init__(self, plan: FactorPlan, values: Array, data: Array, growth: Array) -> None:
        self.plan, self.growth, self._values, self._data = plan, growth, values, data
        self.batch, self.dtype = len(growth) if growth.ndim else None, data.dtype

    @property
    def values(self) -> Array:
        """The values that were factorised, (nnz,) or (nnz, B): a copy."""
        blocks, nnz, lanes = self._values.shape
        wide = self._values.swapaxes(0, 1).reshape(nnz, blocks * lanes)
        return wide[:, 0].copy() if self.batch is None else wide[:, : self.batch].copy()

    def solve(self, b: Array, *, transposed: bool = False) -> Array:
        """Solve A x = b, or Aᵀ x = b.

        Parameters
        ----------
        b
            Of the factors' dtype, C-contiguous. For the factors of one matrix: (n,), or (n, K) for K right-hand sides.
            For a batch: (n, B), a right-hand side for each matrix, or (n,) for all.
        transposed
            Solve with Aᵀ.

        Returns
        -------
        numpy.ndarray
            x: (n,) or (n, K); for a batch (n, B).

        Raises
        ------
        DTypeError, ShapeError, LayoutError, DeviceError
            `b` does not fit.
        """
        transposed = check_flag("transposed", transposed)
        return self._solve(self._right_hand_side(b), transposed).reshape(self._shape(b))

    def refine(self, b: Array, x: Array, *, steps: int = 1, transposed: bool = False) -> Array:
        """Improve a solution by iterative refinement, with residuals in float64; x is not changed.

        Each step solves for the residual: ``x + solve(b - A x)`` (N. Higham, "Accuracy and Stability of Numerical
        Algorithms", 2nd ed., SIAM 2002, chapter 12).

        Parameters
        ----------
        b, x
            The right-hand side, and `solve`'s solution for it.
        steps
            Number of steps, at least 1.
        transposed
            As in `solve`.

        Returns
        -------
        numpy.ndarray
            The new x.
        """
        transposed, steps = check_flag("transposed", transposed), check_integer("steps", steps, 1)
        wide, dtype, pattern = self._right_hand_side(b), self.dtype, self.plan.pattern
        _check_on_host("x", x)
        backend.check_array("x", x, dtype=dtype, shape=self._shape(b))
        values = -_as_columns(self.values).astype(np.float64)
        if transposed:
            pattern, values = pattern.T, np.ascontiguousarray(values[pattern.transpose_permutation])
        double, found = wide.astype(np.float64), np.array(x).reshape(wide.shape)
        residual = np.empty_like(double)
        multiply = kernels.get(np).csr_matvec
        for _ in range(steps if found.size else 0):
            multiply(pattern.indptr, pattern.indices, values, found.astype(np.float64), residual, double)
            found += self._solve(residual.astype(dtype), transposed)
        return found.reshape(x.shape)

    def _solve(self, wide: Array, transposed: bool) -> Array:
        x = np.empty_like(wide)
        if x.size:
            kernels.on_host().factor.solve(self.plan.panels, self._data, wide, x, transposed)
        return x

    def _right_hand_side(self, b: Array) -> Array:
        """Check b and return it as columns."""
        _check_on_host("b", b)
        n = self.plan.pattern.shape[0]
        columns = self.batch
        if b.ndim not in (1, 2) or b.shape[0] != n or (b.ndim == 2 and columns is not None and b.shape[1] != columns):
            wanted = f"({n},), or ({n}, K)" if columns is None else f"({n}, {columns}), or ({n},) for all matrices"
            raise ShapeError("b does not fit the factors", expected=wanted, got=b.shape)
        backend.check_array("b", b, dtype=self.dtype)
        return _as_columns(b) if columns is None or b.ndim == 2 else np.repeat(b[:, None], columns, axis=1)

    def _shape(self, b: Array) -> tuple[int, ...]:
        return b.shape if self.batch is None else (len(b), self.batch)

    def __repr__(self) -> str:
        count = "one matrix" if self.batch is None else f"{self.batch} matrices"
        return f"Factors({count} on {self.plan.pattern}, {self.dtype})"


def _check_on_host(name: str, array: Array) -> None:
    if backend.namespace(**{name: array}) is not np:
        raise DeviceError(f"{name} is on a device, and factors are computed on the host", expected="an array of NumPy",
                          got=type(array).__module__, remedy=f"Pass sparsebp.backend.to_host({name})")  # fmt: skip


# The order of elimination, by SuperLU.


def _nearly_symmetric(pattern: SparsityPattern) -> bool:
    n, rows, columns = pattern.shape[0], pattern.row_of_entry.astype(np.int64), pattern.indices.astype(np.int64)
    pairs = np.intersect1d(rows * n + columns, columns * n + rows, assume_unique=True)
    return len(pairs) >= SYMMETRIC * pattern.nnz


def _order(pattern: SparsityPattern, values: Array | None, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every pivot."""
    from scipy.sparse.linalg import splu

    n, rows, columns = pattern.shape[0], pattern.row_of_entry, pattern.indices
    if n == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    options: dict[str, Any] = {"permc_spec": "MMD_AT_PLUS_A", "options": {"SymmetricMode": True}}
    if values is None:  # dominant diagonals: no other pivots
        data = np.where(rows == columns, 2.0 * n, -1.0)
        options["diag_pivot_thresh"] = 0.0
    else:
        data = values.astype(np.float64)
        options["diag_pivot_thresh"] = THRESHOLD
        if not symmetric:
            options = {"permc_spec": "COLAMD", "diag_pivot_thresh": 1.0}
    try:
        found = splu(pattern.to_scipy(data).tocsc(), **options)
    except RuntimeError as error:
        if "singular" not in str(error):
            raise
        raise PivotError("The matrix is singular", expected="values with pivots other than zero",
                         got="a column without any") from error  # fmt: skip
    order = np.argsort(found.perm_c).astype(np.int32)
    return (order if values is None else np.argsort(found.perm_r).astype(np.int32)), order


# The structure of L and U: the pattern of every row, then panels of rows.


def _lay_out(pattern: SparsityPattern, rows: np.ndarray, order: np.ndarray) -> FactorPlan:
    """Make the plan of an order."""
    factor, n, nnz = kernels.on_host().factor, len(rows), pattern.nnz
    entry_ptr, place = _running(np.diff(pattern.indptr)[rows]), np.empty(n, np.int32)
    place[order] = np.arange(n, dtype=np.int32)
    row_of = np.repeat(np.arange(n), np.diff(entry_ptr))
    source = (pattern.indptr[rows].astype(np.int64) - entry_ptr[:-1])[row_of] + np.arange(nnz)
    column_of = place[pattern.indices[source]]

    indptr, diagonal, indices = _fill(entry_ptr, column_of)
    first = _panels(indptr, diagonal, indices, factor.PANEL)
    count, sizes = len(first) - 1, np.diff(first)
    panel_of = np.repeat(np.arange(count), sizes)

    # Panels of L, of any of a panel's rows, are whole; columns of U are those of its last row, and of all others.
    row_of_fill = np.repeat(np.arange(n), np.diff(indptr))
    before = indices < first[panel_of[row_of_fill]]
    pairs = np.unique(panel_of[row_of_fill[before]] * count + panel_of[indices[before]])
    left_of, left = np.divmod(pairs, max(count, 1))
    own = np.bincount(left_of, sizes[left], count).astype(np.int64)
    right = diagonal[first[1:] - 1] + 1
    rest = indptr[first[1:]] - right
    column_ptr = _running(own + sizes + rest)
    columns = np.empty(column_ptr[-1], np.int64)
    columns[_ranges(column_ptr[:-1], own)] = _ranges(first[left], sizes[left])
    columns[_ranges(column_ptr[:-1] + own, sizes)] = np.arange(n)
    columns[_ranges(column_ptr[:-1] + own + sizes, rest)] = indices[_ranges(right, rest)]

    length = np.diff(column_ptr)
    keys, base = np.repeat(np.arange(count) * n, length) + columns, _running(length * sizes)  # keys ascend
    p = panel_of[row_of]
    slot = np.searchsorted(keys, p * n + column_of) - column_ptr[p]
    tail = rest[left] + sizes[left] / 2
    work = int((sizes[left_of] * sizes[left] * tail).sum() + (sizes**2 * rest / 2).sum())
    panels = factor.Panels(
        first=first, column_ptr=column_ptr, columns=columns, own=own, base=base,
        left_ptr=_running(np.bincount(left_of, minlength=count)), left=left,
        back=np.searchsorted(keys, left * n + first[left_of]) - column_ptr[left],
        entry_ptr=entry_ptr, source=source, target=base[p] + slot * sizes[p] + row_of - first[p], column=column_of,
        rows=rows, order=order,
    )  # fmt: skip
    short = ("first", "columns", "own", "left", "back", "column")
    narrow = {name: getattr(panels, name).astype(np.int32) for name in short}
    return FactorPlan(pattern, int(base[-1]), 2 * work, panels._replace(**narrow))


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``start … start + count - 1`` for every start, one behind the other."""
    return np.repeat(starts - _running(counts)[:-1], counts) + np.arange(counts.sum())


def _running(counts: np.ndarray) -> np.ndarray:
    """Return the running sum of counts, from 0."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _fill(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pattern of L + U: where rows begin, where each has its diagonal, and the columns."""
    n = len(indptr) - 1
    ends, cuts, marks = np.zeros((n + 1, 2), np.int64), np.zeros(n, np.int64), np.full(n, -1, np.int64)
    found, row = np.empty(n + 4 * len(indices), np.int32), 0
    fill_rows, indices = kernels.on_host().factor.fill_rows, indices.astype(np.int32)
    while (row := fill_rows(row, indptr.astype(np.int64), indices, ends, cuts, marks, found)) < n:
        found = np.concatenate((found, np.empty(len(found) + n, np.int32)))
    return ends[:, 0], ends[1:, 1] - 1, found[: ends[n, 0]].astype(np.int64)


def _panels(indptr: np.ndarray, diagonal: np.ndarray, indices: np.ndarray, most: int) -> np.ndarray:
    """Return the first row of every panel: rows that follow one another and have the same columns of U and rows of L.

    Row i + 1 has all columns of U that row i has if L has an entry in its column i, and L's rows likewise. So they are
    the same if there are as many.
    """
    n = len(diagonal)
    if n < 2:
        return np.arange(n + 1)
    right = indptr[1:] - diagonal - 1
    rows = np.repeat(np.arange(n), np.diff(indptr))
    below = np.bincount(indices[indices < rows], minlength=n)
    after, before = np.minimum(diagonal[:-1] + 1, len(indices) - 1), np.maximum(diagonal[1:] - 1, 0)
    joined = (right[:-1] > 0) & (indices[after] == np.arange(1, n)) & (diagonal[1:] > indptr[1:-1])
    joined &= (indices[before] == np.arange(n - 1)) & (right[1:] == right[:-1] - 1) & (below[1:] == below[:-1] - 1)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1))
    within = np.arange(n) - np.repeat(starts, np.diff(np.append(starts, n)))
    return np.append(np.flatnonzero(within % most == 0), n)
