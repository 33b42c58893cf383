"""Sparse direct solves with SciPy's signatures, on plans that are kept by pattern.

`spsolve`, `splu` and `factorized` take what those of `scipy.sparse.linalg` take and return what they return. The order
of elimination and the structure of the factors are found when a pattern is seen first; matrices on that pattern, or in
one of the last few, are then factorised alone.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_integer
from sparsebp.core.errors import DeviceError, DTypeError, PivotError, ShapeError
from sparsebp.core.locks import forkable_lock
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.products.factor import MODEST, FactorPlan, Factors, Trans, plan_and_factor
from sparsebp.products.ordering import missing_pivot, scipys

PLANS = 16
"""Plans that are kept at most."""
WORSE = 8.0
"""How many times as large as at its planning a plan's growth may be: pivots are chosen again for larger ones."""
_ORDERS = ("NATURAL", "MMD_ATA", "MMD_AT_PLUS_A", "COLAMD")  # SuperLU's, by number


class CacheInfo(NamedTuple):
    """What became of the matrices that `spsolve`, `splu` and `factorized` were given in this process.

    Attributes
    ----------
    hits, misses
        Matrices on a pattern with a plan, and on another one.
    replanned
        Hits whose values wanted other pivots than the plan's: it was made again.
    passed_on
        Matrices that SciPy factorised: singular to working precision, not finite, or with options of SuperLU.
    maxsize, currsize
        Plans that are kept at most, and are kept.
    """

    hits: int
    misses: int
    replanned: int
    passed_on: int
    maxsize: int
    currsize: int


@dataclass
class _Kept:
    plan: FactorPlan
    growth: float


class SingularMatrixError(PivotError, RuntimeError):
    """A matrix has no factors. A RuntimeError, as SciPy's, and a `PivotError`."""


class _Plans:
    """The last plans, most recent first."""

    def __init__(self) -> None:
        self.clear()
        self.lock = forkable_lock(self.clear)

    def clear(self) -> None:
        self.kept: list[_Kept] = []
        self.hits = self.misses = self.replanned = self.passed_on = 0

    def find(self, indptr: Array, indices: Array) -> _Kept | None:
        """Return the plan of a pattern, given as the arrays of a matrix, which need not be canonical."""
        with self.lock:
            kept = list(self.kept)
        for one in kept:
            there = one.plan.pattern
            if np.array_equal(there.indptr, indptr) and np.array_equal(there.indices, indices):
                return one
        return None

    def keep(self, one: _Kept) -> None:
        """Put a plan first, and in the place of another one of its pattern."""
        pattern = one.plan.pattern
        with self.lock:
            if self.kept and self.kept[0] is one:
                return
            same = self.find(pattern.indptr, pattern.indices)
            self.kept = [one, *(other for other in self.kept if other is not same)][:PLANS]

    def count(self, name: str) -> None:
        with self.lock:
            setattr(self, name, getattr(self, name) + 1)

    def factors(self, pattern_of: Callable[[], SparsityPattern], found: _Kept | None, values: Array) -> Factors:
        """Factorise values on the pattern of a plan, or of a new one."""
        self.count("misses" if found is None else "hits")
        if found is not None:
            try:
                factors = found.plan(values)
            except PivotError:
                pass
            else:
                if factors.growth <= max(MODEST, WORSE * found.growth):
                    self.keep(found)
                    return factors
            self.count("replanned")
        plan, factors = plan_and_factor(pattern_of() if found is None else found.plan.pattern, values)
        self.keep(_Kept(plan, float(factors.growth)))
        return factors


_plans = _Plans()


def cache_info() -> CacheInfo:
    """Return what became of the matrices so far.

    Examples
    --------
    >>> import numpy as np, scipy.sparse as sp
    >>> from sparsebp import solvers
    >>> A = sp.csr_array([[3.0, 1.0], [0.0, 2.0]])
    >>> solvers.cache_clear()
    >>> x, y = solvers.spsolve(A, np.ones(2)), solvers.spsolve(2 * A, np.ones(2))
    >>> solvers.cache_info()
    CacheInfo(hits=1, misses=1, replanned=0, passed_on=0, maxsize=16, currsize=1)
    """
    with _plans.lock:
        numbers = _plans.hits, _plans.misses, _plans.replanned, _plans.passed_on
        return CacheInfo(*numbers, PLANS, len(_plans.kept))


def cache_clear() -> None:
    """Forget all plans, and what became of the matrices so far."""
    with _plans.lock:
        _plans.clear()


class SparseLU:
    """The factors of one matrix, as `splu` returns them: ``Pr @ A @ Pc = L @ U``.

    Attributes
    ----------
    shape : tuple of int
        (n, n).
    nnz : int
        Values of L and U that are kept.
    """

    def __init__(self, factors: Factors, transposed: bool) -> None:
        # transposed: the factors are those of Aᵀ, whose rows are the columns that A is stored by
        self._factors, self._transposed = factors, transposed
        self.shape, self.nnz = factors.plan.pattern.shape, factors.plan.fill

    @property
    def perm_r(self) -> Array:
        """Where each row of A comes in the factors, (n,) int32."""
        plan = self._factors.plan
        return _places(plan.columns if self._transposed else plan.rows)

    @property
    def perm_c(self) -> Array:
        """Where each column of A comes in the factors, (n,) int32."""
        plan = self._factors.plan
        return _places(plan.rows if self._transposed else plan.columns)

    @property
    def L(self) -> Any:
        """L, with ones on its diagonal, a `scipy.sparse.csc_array`: computed when it is read."""
        return self._triangles()[0]

    @property
    def U(self) -> Any:
        """U, a `scipy.sparse.csc_array`: computed when it is read."""
        return self._triangles()[1]

    def _triangles(self) -> tuple[Any, Any]:
        from scipy.sparse import diags_array

        lower, upper = self._factors.triangles()
        if self._transposed:  # Aᵀ = L U, so A = (Uᵀ D⁻¹) (D Lᵀ)
            diagonal = upper.diagonal()
            lower, upper = upper.T @ diags_array(1 / diagonal), diags_array(diagonal) @ lower.T
            lower.setdiag(1)
        return lower.tocsc(), upper.tocsc()

    def solve(self, rhs: Any, trans: Trans = "N") -> Array:
        """Solve A x = rhs; with ``trans="T"`` Aᵀ x = rhs, with ``"H"`` Aᴴ x = rhs.

        Parameters
        ----------
        rhs
            (n,), or (n, K) for K right-hand sides: an array of numbers.
        trans
            ``"N"``, ``"T"`` or ``"H"``, in either case.

        Returns
        -------
        numpy.ndarray
            x, of rhs's shape, in Fortran's order as SuperLU's; complex if A or rhs is; a `numpy.matrix` if rhs is one.

        Raises
        ------
        ShapeError, OptionError
            `rhs` does not fit; another `trans`.
        DTypeError
            `rhs` holds no numbers, or some that the factors' dtype would round: float64 for factors in float32, say.
        """
        trans = cast(Trans, trans.upper() if isinstance(trans, str) else trans)
        check_choice("trans", trans, ("N", "T", "H"))
        b, dtype = _right_hand_side(rhs, self.shape[0]), self._factors.dtype
        x = np.asfortranarray(_solve(lambda same: self._solve(same, trans), b, dtype))
        return x.view(np.matrix) if isinstance(rhs, np.matrix) else x

    def _solve(self, b: Array, trans: Trans) -> Array:
        if not self._transposed:
            x = self._factors.solve(b, trans)
        elif trans == "H":
            x = np.conj(self._factors.solve(np.conj(b)))
        else:
            x = self._factors.solve(b, "T" if trans == "N" else "N")
        if np.isfinite(x).all() or not np.isfinite(b).all():
            return x
        matrix = self._factors.plan.pattern.to_scipy(self._factors.values)  # another order may not overflow
        error = PivotError("The solution is not finite", expected="finite numbers", got="others")
        found: Array = _pass_on(matrix.T if self._transposed else matrix, error).solve(b, trans)
        return found

    def __repr__(self) -> str:
        return f"SparseLU(shape={self.shape}, nnz={self.nnz}, {self._factors.dtype})"


def spsolve(A: Any, b: Any, permc_spec: str | None = None, use_umfpack: bool = True) -> Any:
    """Solve A x = b: `scipy.sparse.linalg.spsolve` on a plan that is kept.

    Parameters
    ----------
    A
        (n, n), a sparse matrix in any format, or an array. As in SciPy's function, bools and integers of 16 bits or
        less count as float32, others as float64.
    b
        (n,) or (n, K): an array or a sparse matrix.
    permc_spec, use_umfpack
        Of SciPy's function: `permc_spec` is checked, and x is the same for every order.

    Returns
    -------
    numpy.ndarray or sparse matrix
        (n,) if b has one column; else of b's shape, sparse if b is, or in Fortran's order.

    Raises
    ------
    ShapeError, DTypeError
        A is not square, b does not fit, or one of them holds no numbers, or longer ones than float64.
    OptionError
        SuperLU has no such order.

    Warns
    -----
    scipy.sparse.linalg.MatrixRankWarning
        A is exactly singular, and x is NaN. The message names a row; with
        ``warnings.simplefilter("error", MatrixRankWarning)`` it is an error. With several columns of a sparse b it is
        one as it is, `SingularMatrixError`, as SciPy's. Or A is singular to working precision, and x is the solution
        for a matrix that is as near: `splu` and `factorized` warn of that as well.

    See Also
    --------
    cache_info : How often a plan was found.
    used_by_scipy : Lets other packages' calls of SciPy's function come here.
    """
    from scipy.sparse import issparse
    from scipy.sparse.linalg import MatrixRankWarning

    n = _order_of(A)
    _permutation(permc_spec)
    sparse = backend.is_sparse(b)
    right = _right_hand_side(b.toarray() if sparse else b, n)
    columns = right.shape[1] if right.ndim == 2 else 1
    right, A = right.reshape(n) if columns == 1 else right, _as_compressed(A)
    if np.promote_types(A.dtype, right.dtype) not in (np.float32, np.complex64):
        A = A.astype(np.promote_types(A.dtype, np.float64), copy=False)
    try:
        x = _solve(_factorise(A).solve, right, A.dtype)
    except SingularMatrixError as error:
        if sparse and columns > 1:  # as SciPy, which factorises then
            raise
        warnings.warn(f"Matrix is exactly singular: {error}", MatrixRankWarning, stacklevel=_stacklevel(2))
        x = np.full(right.shape, np.nan, np.promote_types(A.dtype, right.dtype))
    if not sparse or columns == 1:
        return x
    from scipy.sparse import csc_array

    kind = type(A) if issparse(A) else csc_array
    return kind(csc_array(x))


def splu(
    A: Any, permc_spec: str | None = None, diag_pivot_thresh: float | None = None, relax: int | None = None,
    panel_size: int | None = None, options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Factorise a sparse matrix: `scipy.sparse.linalg.splu` on a plan that is kept.

    Parameters
    ----------
    A
        (n, n), as `spsolve` takes it. It may be changed afterwards.
    permc_spec, diag_pivot_thresh, relax, panel_size, options
        Of SuperLU. A call with ``permc_spec="NATURAL"``, ``diag_pivot_thresh=0`` or `options` asks for certain pivots,
        and goes to SciPy; all else has no meaning here.

    Returns
    -------
    SparseLU
        With SuperLU's `solve`, `shape`, `nnz`, `perm_r`, `perm_c`, `L` and `U`. Or SciPy's own object, where it
        factorises.

    Raises
    ------
    RuntimeError
        A is exactly singular: `SingularMatrixError`, which is a `PivotError` too and names a row.
    ShapeError, DTypeError
        A is not square, or does not hold numbers.
    OptionError
        SuperLU has no such order.
    """
    _order_of(A)
    A, permc_spec = _as_compressed(A), _permutation(permc_spec)
    if permc_spec == "NATURAL" or diag_pivot_thresh == 0 or options:
        return _pass_on(A, None, permc_spec=permc_spec, diag_pivot_thresh=diag_pivot_thresh, options=options or {})
    return _factorise(A)


def _factorise(A: Any) -> Any:
    """Factorise a square matrix in CSR or CSC; return a `SparseLU`, or what SciPy makes of it."""
    from scipy.sparse import csc_array, csr_array

    transposed, end = A.format == "csc", int(A.indptr[-1])
    indices, values = A.indices[:end], A.data[:end]
    found = _plans.find(A.indptr, indices)
    if found is None:
        A = (csc_array if transposed else csr_array)((values, indices, A.indptr), A.shape, copy=True)  # without flags
        A.sum_duplicates()
        indices, values = A.indices, A.data
        found = _plans.find(A.indptr, indices)
    values = np.ascontiguousarray(values)
    try:
        factors = _plans.factors(lambda: SparsityPattern(A.indptr, indices, A.shape), found, values)
    except PivotError as error:
        return _pass_on(A, error)
    if _has_small_pivot(factors):
        _warn_if_rounding(factors.plan.pattern.to_scipy(factors.values), "a pivot is rounding alone")
    return SparseLU(factors, transposed)


def factorized(A: Any) -> Callable[[Any], Array]:
    """Return a function that solves A x = b: `scipy.sparse.linalg.factorized` on a plan that is kept.

    Parameters
    ----------
    A
        (n, n), as `splu` takes it.

    Returns
    -------
    callable
        Takes b, (n,) or (n, K), and returns x.
    """
    solve: Callable[[Any], Array] = splu(A).solve
    return solve


def _pass_on(A: Any, error: PivotError | None, **options: Any) -> Any:
    """Let SuperLU factorise a matrix, if there are factors; `error`: what our plan says of it."""
    from scipy.sparse.linalg import splu as theirs

    _plans.count("passed_on")
    if reason := missing_pivot(A.tocsr()):  # SuperLU may read what is not there, and crash
        raise SingularMatrixError("Factor is exactly singular", expected="rows that are linearly independent",
                                  got=reason) from error  # fmt: skip
    try:
        found = scipys(theirs)(A.tocsc(), **options)
    except RuntimeError as failed:
        if error is None:
            raise
        raise SingularMatrixError(f"{failed}: {error}") from failed
    if error is not None and np.isfinite(A.data).all():
        _warn_if_rounding(A, error)
    return found


def _has_small_pivot(factors: Factors) -> bool:
    """Say whether some pivot may be rounding alone, by the largest entries of its row and of its column."""
    plan, sizes = factors.plan, abs(factors.values)
    n, pattern = len(plan.rows), plan.pattern
    if n == 0:
        return False
    with np.errstate(over="ignore"):  # of pivots near the largest number
        pivots = abs(factors.pivots()) / float(np.finfo(factors.dtype).eps) ** 0.75
    small = pivots <= np.maximum.reduceat(sizes, pattern.indptr[:-1])[plan.rows]
    if not small.any():
        return False
    largest = np.zeros(n, sizes.dtype)
    np.maximum.at(largest, pattern.indices, sizes)
    return bool((small & (pivots <= largest[plan.columns])).any())


def _stacklevel(level: int) -> int:
    """Return `level` of the stack for `warnings.warn`, one more where the caller called SciPy's name for a function."""
    return level + (sys._getframe(level).f_globals.get("__name__") == "scipy.sparse.linalg._dsolve.linsolve")


def _warn_if_rounding(A: Any, reason: Any) -> None:
    """Warn of a sparse matrix whose solutions change by their own size when the last digits of its values do.

    Unlike the size of a pivot, that does not depend on how rows and columns are scaled; rounding does.
    """
    from scipy.sparse.linalg import MatrixRankWarning

    A = A.tocsc()
    if _is_rounding(A) and _is_rounding(_equilibrated(A)):
        warnings.warn(
            f"Matrix is singular to working precision: {reason}", MatrixRankWarning, stacklevel=_stacklevel(5)
        )


def _is_rounding(A: Any) -> bool:
    """Say whether a CSC matrix and its neighbours have different solutions, in SuperLU's arithmetic."""
    from scipy.sparse.linalg import splu

    def solution(matrix: Any) -> Array:
        factors = scipys(splu)(matrix)
        x: Array = factors.solve(b)
        for _ in range(2):
            x += factors.solve(b - matrix @ x)
        return x

    rng, near, eps = np.random.default_rng(0), A.copy(), np.finfo(A.dtype).eps
    b = rng.standard_normal((A.shape[0], 2)).astype(A.dtype)
    b[:, 1] *= abs(A).max(axis=1).toarray().ravel()  # as rows are scaled, and not
    with np.errstate(all="ignore"):
        try:
            x = solution(A)
            for _ in range(4):  # one neighbour may have the same pivot by chance
                near.data = A.data * (1 + 8 * eps * rng.choice(np.array([-1, 1], eps.dtype), len(A.data)))
                if (~(abs(x - solution(near)) <= abs(x) / 2)).any(axis=0).all():
                    return True
        except RuntimeError:  # it is singular, or a neighbour
            return True
    return False


def _equilibrated(A: Any) -> Any:
    """Return a CSC matrix with rows and columns times powers of two: the geometric mean of each is about 1."""
    found, rows, columns = A.copy(), A.indices, np.repeat(np.arange(A.shape[0]), np.diff(A.indptr))
    with np.errstate(divide="ignore"):
        sizes = np.frexp(abs(A.data))[1].astype(float)
    there, scale = A.data != 0, np.zeros(A.nnz)
    for lines in (rows, columns) * 5:
        sums = np.bincount(lines[there], (sizes + scale)[there], A.shape[0])
        scale -= np.rint(sums / np.maximum(np.bincount(lines[there], minlength=A.shape[0]), 1))[lines]
    parts = found.data.view(found.data.real.dtype).reshape(A.nnz, -1)
    np.ldexp(parts, scale.astype(np.int32)[:, None], out=parts)
    return found


def _order_of(A: Any) -> int:
    shape = np.shape(A) if not backend.is_sparse(A) else tuple(A.shape)
    if len(shape) != 2 or shape[0] != shape[1]:
        raise ShapeError("matrix must be square", expected="as many rows as columns", got=shape)
    return int(shape[0])


def _permutation(permc_spec: Any) -> str | None:
    """Return SuperLU's name of an order, given by name or number; it crashes at some that it does not know."""
    if permc_spec is None:
        return None
    if isinstance(permc_spec, str):
        return check_choice("permc_spec", permc_spec.upper(), _ORDERS)
    return _ORDERS[check_integer("permc_spec", permc_spec, 0, len(_ORDERS) - 1)]


def _as_compressed(A: Any) -> Any:
    """Return a matrix in CSR or CSC, of floats or complex numbers."""
    from scipy.sparse import csc_array, issparse

    if backend.is_sparse(A) and backend.namespace_of_sparse(A) is not np:
        raise DeviceError("A is on a device, and factors are computed on the host", expected="a matrix of SciPy",
                          got=type(A).__module__, remedy="Pass A.get()")  # fmt: skip
    if not issparse(A):
        A = A.to_scipy_sparse() if hasattr(A, "to_scipy_sparse") else np.asarray(A)
    wanted = _floats(A.dtype)
    if not (issparse(A) and A.format in ("csr", "csc")):
        A = csc_array(A)
    return A if A.dtype == wanted else A.astype(wanted)


def _floats(dtype: Any) -> np.dtype:
    """Return in which dtype a matrix is factorised: the first one that rounds no number of fewer bits, as in SciPy."""
    dtype = np.dtype(dtype)
    if dtype.kind in "biufc":
        for found in "fdFD":
            if np.can_cast(dtype, found):
                return np.dtype(found)
    raise DTypeError("A does not hold such numbers as are factorised", got=dtype,
                     expected="integers, or real or complex numbers of at most double precision")  # fmt: skip


def _right_hand_side(b: Any, n: int) -> Array:
    found = np.asarray(b)
    if found.dtype.kind not in "biufc":
        sparse = backend.is_sparse(b)
        raise DTypeError("The right-hand side is sparse" if sparse else "The right-hand side does not hold numbers",
                         expected="an array" if sparse else "integers, floats or complex numbers", got=found.dtype,
                         remedy="Pass b.toarray()" if sparse else None)  # fmt: skip
    if found.ndim not in (1, 2) or len(found) != n:
        raise ShapeError("The right-hand side does not fit the matrix", expected=f"({n},) or ({n}, K)", got=found.shape)
    return found


def _solve(solve: Callable[[Array], Array], b: Array, dtype: np.dtype) -> Array:
    """Call a solver of right-hand sides in one dtype."""
    if b.dtype.kind == "c" and dtype.kind != "c":
        real, imaginary = (_solve(solve, part, dtype) for part in (b.real, b.imag))
        return real + 1j * imaginary
    if not np.can_cast(b.dtype, dtype):
        raise DTypeError("The factors' dtype would round the right-hand side", expected=dtype, got=b.dtype,
                         remedy="Factorise A.astype(float)")  # fmt: skip
    return solve(np.ascontiguousarray(b, dtype))


def _places(order: Array) -> Array:
    places = np.empty(len(order), np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    return places
