"""`plan_factor`, `FactorPlan` and `Factors`: LU or Cholesky factors of many matrices on one pattern.

    P A Q = L U,    or, for symmetric positive definite matrices,    P A Pᵀ = Uᵀ U

The plan holds the orders of rows and columns, P and Q, and the structure of L and U. A call computes the values of L
and U and nothing else; it exchanges no rows. So a plan suits all values for which the pivots of P and Q are large
enough, and every call checks that: one that would lose more than half of the digits raises `PivotError`.
"""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from sparsebp import kernels
from sparsebp.core import backend, host_pool
from sparsebp.core.check import Array, check_choice, check_flag, check_integer
from sparsebp.core.errors import DeviceError, OptionError, PatternError, PivotError, ShapeError, within_memory
from sparsebp.core.locks import cached_property
from sparsebp.core.threads import one_blas_thread
from sparsebp.patterns.pattern import SparsityPattern, frozen, not_finite, structure_of
from sparsebp.products.product import ProductPlan, _as_columns, _check_values, plan_product

SYMMETRIC = 0.5
"""Share of entries with a partner across the diagonal from which a pattern is ordered as a symmetric one."""
THRESHOLD = 0.5
"""A symmetric order's pivot over the largest entry of its column, at least: large enough for residuals like those of
partial pivoting, small enough to leave most pivots on the diagonal."""
SPARE = 4
"""Entries of L that two rows of one panel have together at most, if their columns differ."""
NAMED = 8
"""Samples that a message lists."""
INDEFINITE = "not positive definite to working precision"
INDEPENDENT = "rows and columns that are linearly independent"

Kind = Literal["lu", "cholesky"]


def plan_factor(pattern: Any, values: Any = None, *, kind: Kind = "lu") -> FactorPlan:
    """Choose the order of elimination of the matrices on a pattern, and find the structure of their factors.

    Parameters
    ----------
    pattern
        A square pattern; or a sparse matrix of SciPy, whose values are `values` for LU factors where none are given.
    values
        (nnz,) of float32 or float64 of NumPy, or a sparse matrix on the pattern: a matrix whose pivots are
        representative. Rows are exchanged as partial pivoting does for it. With a pattern and None, pivots stay on the
        diagonal: for matrices that are diagonally dominant or positive definite, say.
    kind
        ``"lu"``, or ``"cholesky"`` for symmetric positive definite matrices, on a symmetric pattern and without
        `values`: half of the memory and of the operations. Values above the diagonal are read, and taken for those
        below.

    Returns
    -------
    FactorPlan

    Raises
    ------
    PatternError, ShapeError
        `pattern` is neither, or not square; without `values`: it lacks an entry on the diagonal; for Cholesky
        factors: it is not symmetric.
    OptionError
        An unknown `kind`, or ``kind="cholesky"`` with `values`.
    DTypeError, DeviceError, LayoutError
        `values` is not such an array.
    PivotError
        `values` are of a singular matrix, or not finite. The message names a row.
    MemoryLimitError
        The system has no memory for the plan.

    Notes
    -----
    Columns are ordered by SuperLU (J. Demmel et al., "A supernodal approach to sparse partial pivoting", SIAM J. Matrix
    Anal. Appl. 20, 1999): by minimum degree where at least half of the entries have a partner across the diagonal,
    and then a pivot may be on the diagonal if it is half as large as its column's largest entry; else, and where the
    factors of `values` would not be accurate, by COLAMD with partial pivoting. Without `values`, rows and columns with
    the same pattern are ordered as one: matrices of blocks are planned in the time that one of numbers takes.
    """
    check_choice("kind", kind, ("lu", "cholesky"))
    given, pattern = pattern, structure_of("pattern", pattern)
    if values is None and kind == "lu" and pattern is not given:
        values = given
    values = _values_of(pattern, values)
    n, m = pattern.shape
    if n != m:
        raise ShapeError("Only square matrices have factors", expected="as many rows as columns", got=pattern.shape)
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
        if wrong := not_finite(pattern, values):
            raise PivotError("values are not finite", expected="finite numbers", got=wrong)
    if values is not None and kind == "cholesky":
        raise OptionError("Cholesky factors need no values for their plan", expected="None, or kind='lu'", got="values")
    with within_memory(f"The plan of the factors of a matrix of shape {pattern.shape} does not fit in memory",
                       "Reorder the matrix, or solve iteratively"):  # fmt: skip
        if values is None:
            order, heads = _order(pattern, kind)
            return _lay_out(pattern, order, order, heads, kind == "cholesky")
        if _nearly_symmetric(pattern):
            with contextlib.suppress(
                PivotError
            ):  # rows of very different sizes, say: pivots are worth more than symmetry
                plan = _lay_out(pattern, *_pivot_order(pattern, values, symmetric=True))
                plan(values)
                return plan
        return _lay_out(pattern, *_pivot_order(pattern, values, symmetric=False))


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
        `sparsebp.kernels.host.sparse.factor.Panels`, the structure of L and U.
    number : int
        Another one for every plan of this process: compiled graphs hold it in the plan's place.
    """

    pattern: SparsityPattern
    fill: int
    flops: int
    panels: Any = field(repr=False)
    number: int = field(init=False, repr=False, default_factory=itertools.count().__next__)

    def __post_init__(self) -> None:
        object.__setattr__(self, "panels", type(self.panels)(*map(frozen, self.panels[:-1]), self.panels.half))
        plans[self.number] = self

    @property
    def kind(self) -> Kind:
        """``"lu"`` or ``"cholesky"``."""
        return "cholesky" if self.panels.half else "lu"

    @cached_property
    def read(self) -> np.ndarray:
        """The entry whose value counts in each entry's place, (nnz,): Cholesky's is on the diagonal or above."""
        pattern, own = self.pattern, np.arange(self.pattern.nnz)
        above = pattern.indices >= pattern.row_of_entry
        return own if self.kind == "lu" else np.where(above, own, pattern.transpose_permutation)

    def check_symmetric(self, values: Array) -> None:
        """Check that a matrix given as such is symmetric if Cholesky factors are asked for: (nnz,), or (nnz, B)."""
        if self.kind == "lu":
            return
        pattern, wide = self.pattern, _as_columns(values)
        diagonal = abs(wide[pattern.row_of_entry == pattern.indices]) ** 0.5
        size = diagonal[pattern.row_of_entry] * diagonal[pattern.indices]
        apart = abs(wide - wide[pattern.transpose_permutation]) > np.finfo(wide.dtype).eps ** 0.5 * size
        for entry in np.flatnonzero(apart.any(axis=1))[:1]:
            values = wide[[entry, pattern.transpose_permutation[entry]], np.argmax(apart[entry])]
            got = (
                f"{values[0]} in row {pattern.row_of_entry[entry]}, column {pattern.indices[entry]}, {values[1]} across"
            )
            raise PivotError("The matrix is not symmetric", expected="equal values across the diagonal", got=got,
                             remedy='Store both triangles, or pass kind="lu"')  # fmt: skip

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

    def __call__(self, values: Any) -> Factors:
        """Factorise one matrix, or a batch.

        Parameters
        ----------
        values
            (nnz,) or (nnz, B) values on the pattern, float32 or float64, C-contiguous, of NumPy. Or a sparse matrix
            whose entries lie on the pattern, in any order: see `SparsityPattern.values_of`; integers count as float64,
            and for Cholesky factors both triangles are stored.

        Returns
        -------
        Factors
            Own copies: `values` may be overwritten.

        Raises
        ------
        PivotError
            Some sample is singular to working precision or not finite, or these pivots would lose more than half of
            its digits; `samples` of the error names all of them. A plan made with its own values may suit it. Or a
            matrix for Cholesky factors is not symmetric.
        PatternError
            A matrix has an entry other than zero outside the pattern.
        DeviceError
            `values` is an array of CuPy: factors are computed on the host alone.
        DTypeError, ShapeError, LayoutError
            `values` do not fit.
        """
        given, values = values, _values_of(self.pattern, values)
        if values is not given:
            self.check_symmetric(values)
        _check_on_host("values", values)
        _check_values("values", values, self.pattern.nnz)
        wide, factor = _as_columns(values), kernels.on_host().factor
        batch = wide.shape[1]
        lanes = factor.width(batch, values.dtype)
        blocks = -(-batch // lanes)
        with within_memory(f"{batch} factors of {self.fill} values each do not fit in memory", "Use smaller batches"):
            own = host_pool.empty(np, (blocks, self.pattern.nnz, lanes), values.dtype)
            data = host_pool.empty(np, (blocks, self.fill, lanes), values.dtype)
            growth, loss = np.zeros((2, batch), values.dtype)
            if self.pattern.shape[0] and batch:
                factor.factorise(self.panels, self.flops // 2, wide, own, data, growth, loss)
        self._check_pivots(values, data, growth, loss)
        return Factors(self, own, data, growth if values.ndim == 2 else growth[0])

    def _check_pivots(self, values: Array, data: Array, growth: Array, loss: Array) -> None:
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
        first, samples = values[:, bad[0]] if batched else values, map(int, bad) if batched else ()
        definite = self.kind == "cholesky"
        if wrong := not_finite(self.pattern, first[self.read], where):
            raise PivotError(f"{which} cannot be factorised: not finite{', so ' + INDEFINITE if definite else ''}",
                             expected="finite numbers", got=wrong, samples=samples)  # fmt: skip
        inverse = data[bad[0] // data.shape[2], self._pivot_places, bad[0] % data.shape[2]]
        with np.errstate(over="ignore", invalid="ignore"):
            if definite:
                lost = first[self.pattern.row_of_entry == self.pattern.indices][self.rows] * inverse * inverse
            else:
                largest = np.zeros(len(self.rows), first.dtype)
                np.maximum.at(largest, self.pattern.row_of_entry, abs(first))
                lost = largest[self.rows] * abs(inverse)
        worst = np.flatnonzero(~(lost <= most_loss))[:1]
        if definite:
            raise PivotError(
                f"{which} cannot be factorised: {INDEFINITE}",
                expected=f"pivots larger than {1 / most_loss:.2g} times the diagonal's entries",
                got=f"another{where}" + "".join(f", first in row {self.rows[k]}" for k in worst),
                remedy='Symmetric matrices that are not positive definite have LU factors, kind="lu"', samples=samples,
            )  # fmt: skip
        if reason := _why_singular(self.pattern.to_scipy(first), eps):
            raise PivotError(f"{which} cannot be factorised: singular to working precision", expected=INDEPENDENT,
                             got=f"{reason}{where}", samples=samples)  # fmt: skip
        k = worst[0] if len(worst) else np.argmax(lost)
        times = f"{loss[bad[0]]:.2g} and {growth[bad[0]]:.2g} times" if np.isfinite(lost[k]) else "a pivot of 0"
        raise PivotError(
            f"{which} cannot be factorised with the pivots of this plan",
            expected=f"terms of each pivot at most {most_loss:.2g} times the pivot, and terms of L U at most "
            f"{most_growth:.2g} times the matrix's entries",
            got=f"{times}, first in row {self.rows[k]}, column {self.columns[k]}{where}",
            remedy=f"Plan again with these values, plan_factor(pattern, {again}); if that fails too, scale rows and "
            "columns to about the same size",
            samples=samples,
        )  # fmt: skip

    @cached_property
    def _pivot_places(self) -> np.ndarray:
        """Where the reciprocals of the pivots are among the values of L and U, in the order of elimination."""
        panels = self.panels
        sizes = np.diff(panels.first)
        within = np.arange(len(self.rows)) - np.repeat(panels.first[:-1], sizes)
        columns = np.repeat(panels.own, sizes) + within
        places: np.ndarray = np.repeat(panels.base[:-1], sizes) + columns * np.repeat(sizes, sizes) + within
        return places

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

        `solve` is a `matvec` of `scipy.sparse.linalg.LinearOperator`, as `SuperLU.solve` is.

        Parameters
        ----------
        b
            Of the factors' dtype, or integers, which are converted to it. For the factors of one matrix: (n,),
            contiguous, or (n, K) for K right-hand sides. For a batch: (n, B), a right-hand side for each matrix, or
            (n,) for all. A sparse matrix counts as a dense one: x is dense.
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
        transposed, b = check_flag("transposed", transposed), self._right_hand_side(b)
        return self._solve(self._as_columns(b), transposed).reshape(self._shape(b))

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
        b, dtype, pattern = self._right_hand_side(b), self.dtype, self.plan.pattern
        _check_on_host("x", x)
        backend.check_array("x", x, dtype=dtype, shape=self._shape(b))
        wide = self._as_columns(b)
        values = -_as_columns(self.values).astype(np.float64)
        if self.plan.kind == "cholesky":
            below = (pattern.row_of_entry > pattern.indices)[:, None]
            values = np.where(below, values[pattern.transpose_permutation], values)
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

    def _right_hand_side(self, b: Any) -> Array:
        """Check b and return it as a C-contiguous array of the factors' dtype."""
        b = b.toarray() if backend.is_sparse(b) else b
        _check_on_host("b", b)
        n = self.plan.pattern.shape[0]
        columns = self.batch
        if b.ndim not in (1, 2) or b.shape[0] != n or (b.ndim == 2 and columns is not None and b.shape[1] != columns):
            wanted = f"({n},), or ({n}, K)" if columns is None else f"({n}, {columns}), or ({n},) for all matrices"
            raise ShapeError("b does not fit the factors", expected=wanted, got=b.shape)
        if b.dtype.kind in "biu":
            b = backend.exact_floats("b", b, self.dtype)
        backend.check_array("b", b, dtype=self.dtype, contiguous=b.ndim == 1)
        return np.ascontiguousarray(b)

    def _as_columns(self, b: Array) -> Array:
        """Return the right-hand sides of all matrices."""
        return _as_columns(b) if self.batch is None or b.ndim == 2 else np.repeat(b[:, None], self.batch, axis=1)

    def _shape(self, b: Array) -> tuple[int, ...]:
        return b.shape if self.batch is None else (len(b), self.batch)

    def __repr__(self) -> str:
        count = "one matrix" if self.batch is None else f"{self.batch} matrices"
        return f"Factors({count} on {self.plan.pattern}, {self.dtype})"


def _check_on_host(name: str, array: Array) -> None:
    if backend.namespace(**{name: array}) is not np:
        raise DeviceError(f"{name} is on a device, and factors are computed on the host", expected="an array of NumPy",
                          got=type(array).__module__, remedy=f"Pass sparsebp.backend.to_host({name})")  # fmt: skip


def _values_of(pattern: SparsityPattern, given: Any) -> Any:
    """Return a sparse matrix's values on the pattern, integers as float64, as `splu` takes them; else what is given."""
    if type(given) is np.ndarray or not backend.is_sparse(given):
        return given
    values = pattern.values_of(given)
    return backend.exact_floats("The matrix", values, np.float64) if values.dtype.kind in "biu" else values


# The order of elimination, by SuperLU.


def _nearly_symmetric(pattern: SparsityPattern) -> bool:
    n, rows, columns = pattern.shape[0], pattern.row_of_entry.astype(np.int64), pattern.indices.astype(np.int64)
    pairs = np.intersect1d(rows * n + columns, columns * n + rows, assume_unique=True)
    return len(pairs) >= SYMMETRIC * pattern.nnz


def _pivot_order(pattern: SparsityPattern, values: Array, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every pivot that these values want."""
    options: dict[str, Any] = {"permc_spec": "COLAMD", "diag_pivot_thresh": 1.0}
    if symmetric:
        options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": THRESHOLD, "options": {"SymmetricMode": True}}
    rows, order = _superlu(pattern.to_scipy(values.astype(np.float64)), options)
    if symmetric:
        post = _postorder(pattern.to_scipy(np.ones(pattern.nnz)), rows, order)
        rows, order = rows[post], order[post]
    return rows, order


def _postorder(matrix: Any, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return where each row comes best: SuperLU leaves rows with the same columns scattered in its symmetric mode."""
    matrix = matrix[rows][:, order]
    both = (matrix + matrix.T).tocsr()
    found: np.ndarray = kernels.on_host().factor.postorder(both.indptr, both.indices)
    return found


def _superlu(matrix: Any, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import splu

    if matrix.shape[0] == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    if missing := _missing_pivot(matrix):  # SuperLU may read what is not there, and crash
        raise PivotError("The matrix is singular", expected=INDEPENDENT, got=missing)
    try:
        with one_blas_thread():  # its values may become subnormal
            found = splu(matrix.tocsc(), **options)
    except RuntimeError as error:  # of some singular matrices SuperLU says no more than that it failed
        raise PivotError("The matrix is singular", expected=INDEPENDENT,
                         got=_why_singular(matrix, np.finfo(matrix.dtype).eps) or error) from error  # fmt: skip
    return np.argsort(found.perm_r).astype(np.int32), np.argsort(found.perm_c).astype(np.int32)


def _missing_pivot(matrix: Any) -> str:
    """Name a row of a CSR matrix that cannot have a pivot other than 0 in a column of its own, as words; "" if none."""
    there, n = matrix.data != 0, matrix.shape[0]
    rows, columns = np.repeat(np.arange(n), np.diff(matrix.indptr))[there], matrix.indices[there]
    for line, places in (("row", rows), ("column", columns)):
        counts = np.bincount(places, minlength=n)
        if not counts.all():
            return f"no value other than 0 in {line} {np.argmin(counts)}"
    if np.count_nonzero(rows == columns) == n:
        return ""
    indptr = _running(np.bincount(rows, minlength=n))
    column_of, row_of, at, stack = np.full((4, n), -1)
    visited = np.zeros(n, np.int64)
    arrays = (column_of, row_of, indptr[:-1].copy(), at, visited, stack)
    row = kernels.on_host().factor.match_rows(indptr, columns, *arrays)
    return "" if row < 0 else f"no column left for the pivot of row {row}: too many rows share too few columns"


def _why_singular(matrix: Any, eps: float) -> str:
    """Name a row or column that makes a CSR matrix singular in a precision, as words; "" if none is found."""
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import splu

    if missing := _missing_pivot(matrix):
        return missing
    matrix, n, rng = matrix.astype(np.float64), matrix.shape[0], np.random.default_rng(0)
    matrix = diags_array(1 / abs(matrix).max(axis=1).toarray().ravel()) @ matrix
    for change in (0, 1e-7):  # an exactly singular matrix has no factors, a neighbour of it has
        nearby = matrix + diags_array(change * rng.random(n))
        try:
            weights = splu(nearby.tocsc()).solve(rng.standard_normal(n), trans="T")
        except RuntimeError:
            continue
        if change or abs(weights @ matrix).max() <= 10 * n * eps * abs(weights).max():
            return f"row {np.argmax(abs(weights))}, a combination of other rows"
        break
    return ""


def _order(pattern: SparsityPattern, kind: Kind) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of elimination of a full diagonal, and where blocks of rows with the same columns begin in it.

    SuperLU orders one row and column for each block: those of a block are equal in every step of elimination.
    """
    from scipy.sparse import csr_array

    n, indptr, indices = pattern.shape[0], pattern.indptr, pattern.indices
    head, sizes = np.arange(n), np.ones(n, np.int64)
    if n:
        keys = np.random.default_rng(0).integers(2**63, size=n, dtype=np.uint64)
        _, first, block = np.unique(np.add.reduceat(keys[indices], indptr[:-1]), return_index=True, return_inverse=True)
        count = np.zeros(n, np.int64)
        count[first] = np.bincount(block)
        arrays = (indptr, indices, first[block], count, np.full(n, -1))
        if len(first) < n and kernels.on_host().factor.made_of_blocks(*arrays):
            head, sizes = first[block], count
    heads = np.flatnonzero(head == np.arange(n))
    number = np.full(n, -1, np.int64)
    number[heads] = np.arange(len(heads))
    columns = number[indices[_ranges(indptr[heads].astype(np.int64), np.diff(indptr)[heads])]]
    rows = np.repeat(np.arange(len(heads)), np.diff(indptr)[heads])[columns >= 0]
    columns = columns[columns >= 0]
    data = np.where(rows == columns, 2.0 * n, -1.0)  # dominant: no other pivots
    blocks = csr_array((data, columns, _running(np.bincount(rows, minlength=len(heads)))), shape=(len(heads),) * 2)
    if kind == "cholesky":
        there = blocks.T.tocsr()
        if not (np.array_equal(there.indptr, blocks.indptr) and np.array_equal(there.indices, blocks.indices)):
            raise PatternError("The pattern of a Cholesky factor is not symmetric", got=pattern,
                               expected="an entry (j, i) for every entry (i, j)",
                               remedy='Keep zeros as entries, or pass kind="lu"')  # fmt: skip
    options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": 0.0, "options": {"SymmetricMode": True}}
    order = _superlu(blocks, options)[1]
    blocks.data = np.ones(blocks.nnz)
    order = order[_postorder(blocks, order, order)]
    place = np.empty(len(heads), np.int64)
    place[order] = np.arange(len(heads))
    return np.argsort(place[number[head]], kind="stable").astype(np.int32), _running(sizes[heads[order]])


# The structure of L and U: the pattern of every block of rows, then panels of rows.


def _lay_out(
    pattern: SparsityPattern, rows: np.ndarray, order: np.ndarray, heads: np.ndarray | None = None, half: bool = False
) -> FactorPlan:
    """Make the plan of an order; `heads`: where blocks of rows and columns begin, if any are larger than one."""
    factor, n, nnz = kernels.on_host().factor, len(rows), pattern.nnz
    heads = np.arange(n + 1) if heads is None else heads
    place, widths = np.empty(n, np.int32), np.diff(heads)
    place[order] = np.arange(n, dtype=np.int32)

    # Blocks are the unknowns of an elimination; supernodes are blocks that follow one another and have the same columns
    # of U and rows of L; panels are pieces of supernodes.
    indptr, diagonal, indices = _fill_blocks(pattern, rows, place, heads)
    pairs = _pairs(indptr, diagonal, indices, widths)
    if len(pairs):
        heads = np.delete(heads, pairs + 1)
        widths = np.diff(heads)
        indptr, diagonal, indices = _fill_blocks(pattern, rows, place, heads)
    starts = _supernodes(indptr, diagonal, indices)
    node_of_block = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    begins = heads[starts]  # the first row of every supernode
    within = np.arange(n) - np.repeat(begins[:-1], np.diff(begins))
    first = np.append(np.flatnonzero(within % factor.PANEL == 0), n)
    count, sizes = len(first) - 1, np.diff(first)
    panel_ptr = np.searchsorted(first, begins)  # the first panel of every supernode
    node = np.repeat(np.arange(len(starts) - 1), np.diff(panel_ptr))

    # Supernodes of L, of any of a panel's rows, are whole; columns of U are those of its last row, and of all others.
    row_of_fill = np.repeat(np.arange(len(widths)), np.diff(indptr))
    before = np.flatnonzero(indices < row_of_fill)
    low, high = (np.searchsorted(first, x, "right") - 1 for x in (heads[:-1], heads[1:] - 1))
    low, many = low[row_of_fill[before]], (high - low + 1)[row_of_fill[before]]
    keys = _ranges(low, many) * count + np.repeat(node_of_block[indices[before]], many)
    keys = np.unique(np.concatenate((keys, np.arange(count) * count + node)))
    left_of, node_left = np.divmod(keys, max(count, 1))
    begin = panel_ptr[node_left]
    many = np.where(node_left == node[left_of], left_of, panel_ptr[node_left + 1]) - begin
    left, left_of = _ranges(begin, many), np.repeat(left_of, many)

    last = starts[1:] - 1
    right = _ranges(diagonal[last] + 1, indptr[last + 1] - diagonal[last] - 1)
    node_of_right = np.repeat(np.arange(len(last)), indptr[last + 1] - diagonal[last] - 1)
    tails = _ranges(heads[indices[right]], widths[indices[right]])
    tail_ptr = _running(np.bincount(node_of_right, widths[indices[right]], len(last)).astype(np.int64))
    own = np.zeros(count, np.int64) if half else np.bincount(left_of, sizes[left], count).astype(np.int64)
    square, tail = begins[node + 1] - first[:-1], np.diff(tail_ptr)[node]
    column_ptr = _running(own + square + tail)
    columns = np.empty(column_ptr[-1], np.int32)
    if not half:
        columns[_ranges(column_ptr[:-1], own)] = _ranges(first[left], sizes[left])
    columns[_ranges(column_ptr[:-1] + own, square)] = _ranges(first[:-1], square)
    columns[_ranges(column_ptr[:-1] + own + square, tail)] = tails[_ranges(tail_ptr[node], tail)]

    base, left_ptr = _running(np.diff(column_ptr) * sizes), _running(np.bincount(left_of, minlength=count))
    kept = (nnz + n) // 2 if half else nnz
    entry_ptr, source, target = np.zeros(n + 1, np.int64), np.empty(kept, np.int64), np.empty(kept, np.int64)
    column, back, left = np.empty(kept, np.int32), np.empty(len(left), np.int32), left.astype(np.int32)
    factor.locate(pattern.indptr, pattern.indices, rows, place, first, column_ptr, columns, base, left_ptr, left, half,
                  np.empty(n, np.int64), entry_ptr, source, target, column, back)  # fmt: skip
    panels = factor.Panels(
        first=first.astype(np.int32), column_ptr=column_ptr, columns=columns, own=own.astype(np.int32), base=base,
        left_ptr=left_ptr, left=left, back=back, entry_ptr=entry_ptr, source=source, target=target, column=column,
        rows=rows, order=order, half=half,
    )  # fmt: skip
    rest = square + tail - sizes
    later = np.diff(column_ptr)[left] - back if half else rest[left] + sizes[left] / 2
    work = int((sizes[left_of] * sizes[left] * later).sum() + (sizes**2 * rest / 2).sum())
    return FactorPlan(pattern, int(base[-1]), 2 * work, panels)


def _ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return ``start … start + count - 1`` for every start, one behind the other."""
    return np.repeat(starts - _running(counts)[:-1], counts) + np.arange(counts.sum())


def _running(counts: np.ndarray) -> np.ndarray:
    """Return the running sum of counts, from 0."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _fill_blocks(
    pattern: SparsityPattern, rows: np.ndarray, place: np.ndarray, heads: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `_fill` of the pattern of blocks, which are empty or full."""
    number, lengths = np.repeat(np.arange(len(heads) - 1), np.diff(heads)), np.diff(pattern.indptr)[rows]
    source = _ranges(pattern.indptr[rows].astype(np.int64), lengths)
    return _fill(_running(lengths)[heads], number[place[pattern.indices[source]]])


def _pairs(indptr: np.ndarray, diagonal: np.ndarray, indices: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return single rows that make a panel with the next one although their columns differ.

    A panel takes a multiple of another in about the time of twenty entries. So two rows are one panel where that adds
    few zeros, as in a band; not more, since they cost memory in a batch.
    """
    n = len(diagonal)
    if n < 2:
        return np.zeros(0, np.int64)
    left, right = diagonal - indptr[:-1], indptr[1:] - diagonal - 1
    good = (widths[:-1] == 1) & (widths[1:] == 1) & _linked(indptr, diagonal, indices)
    good &= (right[:-1] > 1) & (right[1:] == right[:-1]) & (left[:-1] + left[1:] - 1 <= SPARE)
    at = np.flatnonzero(good)
    run = np.flatnonzero(np.diff(at, prepend=-2) > 1)
    return at[(np.arange(len(at)) - np.repeat(run, np.diff(np.append(run, len(at))))) % 2 == 0]


def _linked(indptr: np.ndarray, diagonal: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Say of all rows but the last whether the next one has an entry of L in their column, and they of U in its."""
    n = len(diagonal)
    after, before = np.minimum(diagonal[:-1] + 1, len(indices) - 1), np.maximum(diagonal[1:] - 1, 0)
    there = (diagonal[:-1] + 1 < indptr[1:-1]) & (indices[after] == np.arange(1, n))
    linked: np.ndarray = there & (diagonal[1:] > indptr[1:-1]) & (indices[before] == np.arange(n - 1))
    return linked


def _fill(indptr: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pattern of L + U: where rows begin, where each has its diagonal, and the columns."""
    n = len(indptr) - 1
    ends, cuts, marks = np.zeros((n + 1, 2), np.int64), np.zeros(n, np.int64), np.full(n, -1, np.int64)
    found, row = np.empty(n + 4 * len(indices), np.int32), 0
    fill_rows, indices = kernels.on_host().factor.fill_rows, indices.astype(np.int32)
    while (row := fill_rows(row, indptr.astype(np.int64), indices, ends, cuts, marks, found)) < n:
        found = np.concatenate((found, np.empty(len(found) + n, np.int32)))
    return ends[:, 0], ends[1:, 1] - 1, found[: ends[n, 0]].astype(np.int64)


def _supernodes(indptr: np.ndarray, diagonal: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Return the first block of every supernode, and the number of blocks.

    Row i + 1 has all columns of U that row i has if L has an entry in its column i, and L's rows likewise. So they are
    the same if there are as many.
    """
    n = len(diagonal)
    if n < 2:
        return np.arange(n + 1)
    right = indptr[1:] - diagonal - 1
    rows = np.repeat(np.arange(n), np.diff(indptr))
    below = np.bincount(indices[indices < rows], minlength=n)
    joined = _linked(indptr, diagonal, indices)
    joined &= (right[1:] == right[:-1] - 1) & (below[1:] == below[:-1] - 1)
    return np.concatenate(([0], np.flatnonzero(~joined) + 1, [n]))
