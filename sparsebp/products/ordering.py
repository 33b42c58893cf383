"""In which order rows and columns are eliminated: minimum degree, nested dissection, or one that is given; and pivots.

Orders of minimum degree are those of SuperLU (J. Demmel et al., "A supernodal approach to sparse partial pivoting",
SIAM J. Matrix Anal. Appl. 20, 1999), by an incomplete factorisation that drops all but the diagonal: its order is that
of a whole one, and it takes hardly any time. Pivots away from the diagonal are those of its whole factorisation.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, get_args

import numpy as np

from sparsebp import kernels
from sparsebp.core.check import Array, check_choice
from sparsebp.core.errors import MissingDependencyError, OptionError, PatternError, PivotError
from sparsebp.core.threads import one_blas_thread
from sparsebp.patterns.pattern import SparsityPattern
from sparsebp.products.elimination import ranges, running

Order = Literal["minimum_degree", "nested_dissection", "natural"]
SYMMETRIC = 0.5
"""Share of entries with a partner across the diagonal from which a pattern is ordered as a symmetric one."""
THRESHOLD = 0.5
"""A symmetric order's pivot over the largest entry of its column, at least: large enough for residuals like those of
partial pivoting, small enough to leave most pivots on the diagonal."""
LARGE = 20_000
"""Multiply-adds for each row, at least, from which nested dissection is worth a try: it takes less than they do."""
INDEPENDENT = "rows and columns that are linearly independent"

_METIS = find_spec("pymetis") is not None


def check_order(order: Any, n: int) -> Any:
    """Return the name of an order, or a permutation as an array of int64; None stands for itself."""
    if order is None or isinstance(order, str):
        return order if order is None else check_choice("order", order, get_args(Order))
    found = np.asarray(order)
    if found.dtype.kind not in "iu" or found.shape != (n,) or not np.array_equal(np.sort(found), np.arange(n)):
        raise OptionError("order is no order of the rows and columns", got=order,
                          expected=f"a permutation of 0 … {n - 1}, or one of {', '.join(get_args(Order))}")  # fmt: skip
    return found.astype(np.int64)


def nearly_symmetric(pattern: SparsityPattern) -> bool:
    """Say whether enough entries have a partner across the diagonal."""
    n, rows, columns = pattern.shape[0], pattern.row_of_entry.astype(np.int64), pattern.indices.astype(np.int64)
    pairs = np.intersect1d(rows * n + columns, columns * n + rows, assume_unique=True)
    return len(pairs) >= SYMMETRIC * pattern.nnz


def order_pivots(pattern: SparsityPattern, values: Array, symmetric: bool, given: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the column of every pivot that these values want; `given`: `check_order`'s."""
    matrix = pattern.to_scipy(values.astype(np.result_type(values, np.float64)))
    options: dict[str, Any] = {"permc_spec": "COLAMD", "diag_pivot_thresh": 1.0}
    if symmetric:
        options = {"permc_spec": "MMD_AT_PLUS_A", "diag_pivot_thresh": THRESHOLD, "options": {"SymmetricMode": True}}
    before = np.arange(len(pattern.indptr) - 1)
    if given is not None:
        options["permc_spec"], before = "NATURAL", _named_order(pattern.to_scipy(np.ones(pattern.nnz)), given)
        matrix = matrix[before][:, before]
    rows, order = _superlu(matrix, options)
    rows, order = before[rows].astype(np.int32), before[order].astype(np.int32)
    if symmetric:
        post = _postorder(pattern.to_scipy(np.ones(pattern.nnz)), rows, order)
        rows, order = rows[post], order[post]
    return rows, order


def order_diagonal(pattern: SparsityPattern, given: Any, symmetric: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of elimination of a full diagonal, and where blocks of rows with the same columns begin in it.

    One row and column is ordered for each block: those of a block are equal in every step of elimination. `given`:
    `check_order`'s, a permutation is taken as it is but for the postorder; `symmetric`: the pattern has to be.
    """
    from scipy.sparse import csr_array

    n, indptr, indices = pattern.shape[0], pattern.indptr, pattern.indices
    head, sizes = np.arange(n), np.ones(n, np.int64)
    if n and not isinstance(given, np.ndarray):
        keys = np.random.default_rng(0).integers(2**63, size=n, dtype=np.uint64)
        _, first, block = np.unique(np.add.reduceat(keys[indices], indptr[:-1]), return_index=True, return_inverse=True)
        count = np.zeros(n, np.int64)
        count[first] = np.bincount(block)
        arrays = (indptr, indices, first[block], count, np.full(n, -1))
        if len(first) < n and kernels.on_host().elimination.made_of_blocks(*arrays):
            head, sizes = first[block], count
    heads = np.flatnonzero(head == np.arange(n))
    number = np.full(n, -1, np.int64)
    number[heads] = np.arange(len(heads))
    columns = number[indices[ranges(indptr[heads].astype(np.int64), np.diff(indptr)[heads])]]
    rows = np.repeat(np.arange(len(heads)), np.diff(indptr)[heads])[columns >= 0]
    shape, begins = (len(heads),) * 2, running(np.bincount(rows, minlength=len(heads)))
    columns = columns[columns >= 0]
    blocks = csr_array((np.ones(len(columns)), columns, begins), shape=shape)
    if symmetric:
        there = blocks.T.tocsr()
        if not (np.array_equal(there.indptr, blocks.indptr) and np.array_equal(there.indices, blocks.indices)):
            raise PatternError("The pattern of a Cholesky factor is not symmetric", got=pattern,
                               expected="an entry (j, i) for every entry (i, j)",
                               remedy='Keep zeros as entries, or pass kind="lu"')  # fmt: skip
    order = _named_order(blocks, "minimum_degree" if given is None else given)
    order = order[_postorder(blocks, order, order)]
    if given is None and _METIS and (most := _work(blocks, order)) > LARGE * len(order):
        other = _named_order(blocks, "nested_dissection")
        other = other[_postorder(blocks, other, other)]
        order = other if _work(blocks, other) < most else order
    place = np.empty(len(heads), np.int64)
    place[order] = np.arange(len(heads))
    return np.argsort(place[number[head]], kind="stable").astype(np.int32), running(sizes[heads[order]])


def _work(matrix: Any, order: np.ndarray) -> float:
    """Return the multiply-adds of LU factors with the pattern of A + Aᵀ, nearly; the order is a postorder."""
    structure, matrix = kernels.on_host().elimination, matrix[order][:, order]
    both = (matrix + matrix.T).tocsr()
    count = structure.column_counts(both.indptr, both.indices, structure.parents(both.indptr, both.indices))
    return float(np.square(count, dtype=np.float64).sum())


def _named_order(matrix: Any, given: Any) -> np.ndarray:
    """Return an order of rows and columns of a CSR matrix of ones."""
    n = matrix.shape[0]
    if isinstance(given, np.ndarray):
        return given
    if given == "natural" or n < 2:
        return np.arange(n)
    if given == "minimum_degree":
        return _minimum_degree(matrix)
    if not _METIS:
        raise MissingDependencyError("Nested dissection needs METIS", expected="the package pymetis", got="none",
                                     remedy="pip install pymetis")  # fmt: skip
    from pymetis import CSRAdjacency, nested_dissection

    both = (matrix + matrix.T).tocsr()
    both.setdiag(0)
    both.eliminate_zeros()
    return np.asarray(nested_dissection(CSRAdjacency(both.indptr, both.indices))[0], np.int64)


def _minimum_degree(matrix: Any) -> np.ndarray:
    from scipy.sparse import eye_array
    from scipy.sparse.linalg import spilu

    matrix = (matrix + eye_array(matrix.shape[0])).tocsc()
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    matrix.data = np.where(matrix.indices == rows, 2.0 * matrix.shape[0], -1.0)  # dominant: no other pivots
    with one_blas_thread():
        found = spilu(matrix, drop_tol=1, fill_factor=1, drop_rule="basic", permc_spec="MMD_AT_PLUS_A",
                      diag_pivot_thresh=0.0, options={"SymmetricMode": True})  # fmt: skip
    return np.argsort(found.perm_c)


def _postorder(matrix: Any, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return where each row comes best: SuperLU leaves rows with the same columns scattered in its symmetric mode."""
    structure, matrix = kernels.on_host().elimination, matrix[rows][:, order]
    both = (matrix + matrix.T).tocsr()
    found: np.ndarray = structure.postorder(structure.parents(both.indptr, both.indices))
    return found


def scipys(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of SciPy, also in a block of `sparsebp.solvers.used_by_scipy`, which puts ours in its place."""
    found: Callable[..., Any] = getattr(function, "of_scipy", function)
    return found


def _superlu(matrix: Any, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    from scipy.sparse.linalg import splu

    if matrix.shape[0] == 0:
        return np.zeros(0, np.int32), np.zeros(0, np.int32)
    if missing := missing_pivot(matrix):  # SuperLU may read what is not there, and crash
        raise PivotError("The matrix is singular", expected=INDEPENDENT, got=missing)
    try:
        with one_blas_thread():  # its values may become subnormal
            found = scipys(splu)(matrix.tocsc(), **options)
    except RuntimeError as error:  # of some singular matrices SuperLU says no more than that it failed
        raise PivotError("The matrix is singular", expected=INDEPENDENT,
                         got=why_singular(matrix, np.finfo(matrix.dtype).eps) or error) from error  # fmt: skip
    return np.argsort(found.perm_r).astype(np.int32), np.argsort(found.perm_c).astype(np.int32)


def missing_pivot(matrix: Any) -> str:
    """Name a row of a CSR matrix that cannot have a pivot other than 0 in a column of its own, as words; "" if none."""
    there, n = matrix.data != 0, matrix.shape[0]
    rows, columns = np.repeat(np.arange(n), np.diff(matrix.indptr))[there], matrix.indices[there]
    for line, places in (("row", rows), ("column", columns)):
        counts = np.bincount(places, minlength=n)
        if not counts.all():
            return f"no value other than 0 in {line} {np.argmin(counts)}"
    if np.count_nonzero(rows == columns) == n:
        return ""
    indptr = running(np.bincount(rows, minlength=n))
    column_of, row_of, at, stack = np.full((4, n), -1)
    visited = np.zeros(n, np.int64)
    arrays = (column_of, row_of, indptr[:-1].copy(), at, visited, stack)
    row = kernels.on_host().elimination.match_rows(indptr, columns, *arrays)
    return "" if row < 0 else f"no column left for the pivot of row {row}: too many rows share too few columns"


def why_singular(matrix: Any, eps: float) -> str:
    """Name a row or column that makes a CSR matrix singular in a precision, as words; "" if none is found."""
    from scipy.sparse import diags_array
    from scipy.sparse.linalg import splu

    if missing := missing_pivot(matrix):
        return missing
    matrix, n, rng = matrix.astype(np.result_type(matrix, np.float64)), matrix.shape[0], np.random.default_rng(0)
    scale = -np.frexp(abs(matrix).max(axis=1).toarray().ravel())[1]
    matrix = diags_array(np.ldexp(1.0, np.minimum(scale, np.finfo(float).maxexp - 1))) @ matrix
    for change in (0, 1e-7):  # an exactly singular matrix has no factors, a neighbour of it has
        nearby = matrix + diags_array(change * rng.random(n))
        try:
            weights = scipys(splu)(nearby.tocsc()).solve(rng.standard_normal(n).astype(matrix.dtype), trans="T")
        except RuntimeError:
            continue
        if change or abs(weights @ matrix).max() <= 10 * n * eps * abs(weights).max():
            return f"row {np.argmax(abs(weights))}, a combination of other rows"
        break
    return ""
