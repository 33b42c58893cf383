"""`spsolve`, `splu` and `factorized` against SciPy's, and SciPy's own solvers on them."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import inspect
import pickle
import types
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import solve_ivp

import sparsebp as sb
from sparsebp import solvers
from sparsebp.core.errors import DTypeError, OptionError, PivotError, ShapeError
from sparsebp.solvers import direct, scipy_hooks
from strategies import seeds, sizes

FORMATS = ["csr", "csc", "coo", "lil", "dok", "bsr", "dia", "dense"]
DTYPES = [np.float32, np.float64, np.complex64, np.complex128, np.int64, np.int8, np.bool_]


@pytest.fixture(autouse=True)
def _no_plans():
    solvers.cache_clear()


def numbers(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    if np.dtype(dtype).kind in "biu":
        return rng.integers(0, 2 if dtype is np.bool_ else 4, shape).astype(dtype)
    found = rng.standard_normal(shape)
    return (found + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else found).astype(dtype)


def regular(rng: np.random.Generator, n: int, density: float, dtype: Any) -> sp.csr_array:
    """Return a matrix with a large entry in every row and column."""
    found = sp.random_array((n, n), density=density, rng=rng, data_sampler=lambda size: numbers(rng, size, dtype))
    peaks = sp.coo_array((np.full(n, 9), (np.arange(n), rng.permutation(n))), shape=(n, n))
    return sp.csr_array((found + peaks).astype(dtype) if dtype is not np.bool_ else peaks.astype(dtype))


def in_format(matrix: sp.csr_array, kind: str, rng: np.random.Generator) -> Any:
    if kind == "dense":
        return matrix.toarray()
    if kind in ("csr", "csc") and matrix.nnz:  # columns in any order
        found = matrix.asformat(kind).copy()
        for i in range(len(found.indptr) - 1):
            part = slice(found.indptr[i], found.indptr[i + 1])
            order = rng.permutation(part.stop - part.start)
            found.indices[part], found.data[part] = found.indices[part][order], found.data[part][order]
        found.has_sorted_indices = found.has_canonical_format = bool(rng.integers(2))  # flags that may be wrong
        return found
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sp.SparseEfficiencyWarning)
        return matrix.asformat(kind)


def assert_solves(matrix: Any, x: np.ndarray, b: np.ndarray) -> None:
    """The residual is a few roundings of its terms, in the precision of x."""
    wide = np.asarray(matrix, np.complex128)
    scale = abs(wide) @ abs(x.astype(np.complex128)) + abs(b)
    assert (abs(wide @ x - b) <= 200 * np.finfo(x.dtype).eps * scale.max(axis=0, initial=0)).all()


@settings(max_examples=150)
@given(n=sizes(0, 30), density=st.sampled_from([0.0, 0.05, 0.3]), kind=st.sampled_from(FORMATS),
       dtype=st.sampled_from(DTYPES), of_b=st.sampled_from(DTYPES), columns=st.sampled_from([None, 1, 3, "sparse"]),
       seed=seeds)  # fmt: skip
def test_solutions_shapes_and_dtypes_are_scipys(n, density, kind, dtype, of_b, columns, seed):
    """For every format, dtype and kind of right-hand side; on the second call by a plan that was kept."""
    rng = np.random.default_rng(seed)
    matrix = regular(rng, n, density, dtype)
    shape = (n,) if columns is None else (n, 2 if columns == "sparse" else columns)
    b = numbers(rng, shape, of_b)
    b = sp.csc_array(b) if columns == "sparse" else b
    solvers.cache_clear()
    given_matrix, right = in_format(matrix, kind, rng), b.toarray() if columns == "sparse" else b
    for _ in range(2):
        x = solvers.spsolve(given_matrix, b)
        assert sp.issparse(x) == (columns == "sparse")
        plain = x.toarray() if sp.issparse(x) else x
        assert_solves(matrix.toarray(), plain.reshape(right.shape), right)
    assert solvers.cache_info()[:4] == (1, 1, 0, 0)
    if n:
        expected = theirs.spsolve(matrix.tocsc(), b)
        assert expected.shape == x.shape and expected.dtype == x.dtype
        assert sp.issparse(x) or expected.flags.f_contiguous == x.flags.f_contiguous


@given(n=sizes(1, 30), dtype=st.sampled_from([np.float32, np.float64, np.complex64, np.complex128]),
       kind=st.sampled_from(["csr", "csc"]), trans=st.sampled_from("NTH"), seed=seeds)  # fmt: skip
def test_factors_are_permuted_triangles(n, dtype, kind, trans, seed):
    """Pr A Pc = L U with ones on the diagonal of L; solves with A, Aᵀ and Aᴴ."""
    rng = np.random.default_rng(seed)
    matrix = regular(rng, n, 0.2, dtype).asformat(kind)
    lu, dense = solvers.splu(matrix), matrix.toarray()
    rows, columns = np.argsort(lu.perm_r), np.argsort(lu.perm_c)
    lower, upper = lu.L.toarray(), lu.U.toarray()
    np.testing.assert_array_equal(lower, np.tril(lower, -1) + np.eye(n))
    np.testing.assert_array_equal(upper, np.triu(upper))
    eps = np.finfo(dtype).eps
    assert (abs(dense[np.ix_(rows, columns)] - lower @ upper) <= 50 * eps * (abs(lower) @ abs(upper) + 9)).all()
    b = numbers(rng, (n, 2), dtype)
    assert_solves({"N": dense, "T": dense.T, "H": dense.conj().T}[trans], lu.solve(b, trans), b)
    assert lu.shape == (n, n) and lu.nnz >= n and str(np.dtype(dtype)) in repr(lu)


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_have_the_dtype_and_solutions_the_order_of_superlus(dtype):
    matrix = sp.csc_array(np.diag(np.arange(1, 4)).astype(dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PendingDeprecationWarning)
        column = np.matrix("1; 2; 3", np.int8)
    for b in (np.ones(3, np.float32), np.ones((3, 2), np.int8), np.ones((3, 1), np.float32), column):
        x, expected = solvers.splu(matrix).solve(b, "t"), theirs.splu(matrix).solve(b, "t")
        assert type(x) is type(expected) and x.dtype == expected.dtype
        assert x.flags.f_contiguous == expected.flags.f_contiguous


def test_longer_numbers_than_double_precision_are_refused():
    if np.longdouble == np.float64:
        pytest.skip("long double is double here")
    matrix, b = sp.csc_array(np.eye(2)), np.ones(2)
    for dtype in (np.longdouble, np.clongdouble):
        for call in (lambda: solvers.spsolve(matrix.astype(dtype), b), lambda: solvers.splu(matrix.astype(dtype)),  # noqa: B023
                     lambda: solvers.spsolve(matrix, b.astype(dtype))):  # fmt: skip  # noqa: B023
            with pytest.raises(TypeError):
                call()


def test_real_factors_take_complex_right_hand_sides():
    matrix, b = sp.csr_array([[3.0, 1.0], [0.0, 2.0]]), np.array([1 + 2j, 3j])
    for x in (solvers.spsolve(matrix, b), solvers.splu(matrix).solve(b), solvers.factorized(matrix)(b)):
        np.testing.assert_allclose(x, np.linalg.solve(matrix.toarray(), b), rtol=1e-15)


def test_plans_are_kept_by_pattern():
    """The last few; values that want other pivots make a plan again, and its solutions stay accurate."""
    rng = np.random.default_rng(0)
    matrices = [regular(rng, n, 0.1, float) for n in range(5, 6 + direct.PLANS)]
    for matrix in matrices:
        solvers.splu(matrix)
    assert solvers.cache_info() == (0, len(matrices), 0, 0, direct.PLANS, direct.PLANS)
    solvers.splu(2 * matrices[-1])
    solvers.splu(matrices[0])  # the first to be forgotten
    assert solvers.cache_info()[:2] == (1, len(matrices) + 1)

    solvers.cache_clear()
    matrix, b = sp.csr_array([[4.0, 1.0, 0.5], [1.0, 4.0, 1.0], [0.5, 1.0, 4.0]]), np.ones(3)
    solvers.spsolve(matrix, b)
    for small in (1e-3, 1e-9, 1e-17, 0.0):
        changed = matrix.copy()
        changed.setdiag(small)
        x = solvers.spsolve(changed, b)
        np.testing.assert_allclose(x, np.linalg.solve(changed.toarray(), b), rtol=1e-14)
    info = solvers.cache_info()
    assert info.hits == 4 and 1 <= info.replanned <= 4 and info.currsize == 1


def test_what_is_factorised_is_a_copy():
    """A matrix may change, be read-only, and keeps its own order of columns."""
    matrix = sp.csr_array(([1.0, 2.0, 5.0], [1, 0, 1], [0, 2, 3]), shape=(2, 2))
    matrix.data.flags.writeable = matrix.indices.flags.writeable = False
    lu, indices = solvers.splu(matrix), matrix.indices.copy()
    x = lu.solve([1.0, 1.0])
    matrix.data.flags.writeable = True
    matrix.data[:] = 7
    np.testing.assert_array_equal(lu.solve([1.0, 1.0]), x)
    np.testing.assert_array_equal(matrix.indices, indices)
    np.testing.assert_allclose(x, [0.4, 0.2], rtol=1e-15)


SINGULAR = {
    "a zero row": [[1.0, 2.0], [0.0, 0.0]], "too few columns": [[1.0, 0, 0], [1.0, 0, 0], [0, 1.0, 1.0]],
    "no entries": [[0.0]],
}  # fmt: skip


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_singular_matrices_give_scipys_warning_or_an_error(name, kind):
    matrix, n = sp.csr_array(SINGULAR[name]).asformat(kind), len(SINGULAR[name])
    with pytest.warns(theirs.MatrixRankWarning, match=r"exactly singular.*(row|column) \d"):
        assert np.isnan(solvers.spsolve(matrix, np.ones((n, 2)))).all()
    for error in (RuntimeError, PivotError, ValueError):
        with pytest.raises(error, match=r"exactly singular.*(row|column) \d"):
            solvers.splu(matrix)
    with warnings.catch_warnings(), pytest.raises(theirs.MatrixRankWarning):
        warnings.simplefilter("error")
        solvers.spsolve(matrix, np.ones(n))


def test_matrices_that_are_singular_but_for_rounding_have_scipys_solutions():
    """A consistent system of a Neumann problem, say, whose solution is one up to a constant; with a warning."""
    steps = sp.diags_array([-1.0, 1.0], offsets=[0, 1], shape=(49, 50))
    matrix = (steps.T @ sp.diags_array(np.random.default_rng(0).uniform(1, 2, 49)) @ steps).tocsc()
    b = np.sin(np.arange(50))
    b -= b.mean()
    with pytest.warns(theirs.MatrixRankWarning, match="singular to working precision"):
        x = solvers.spsolve(matrix, b)
    np.testing.assert_array_equal(x, theirs.splu(matrix).solve(b))
    assert solvers.cache_info().passed_on == 1


@pytest.mark.parametrize("kind", ["csr", "csc"])
def test_pivots_of_rounding_alone_give_a_warning_and_small_ones_of_regular_matrices_none(kind):
    """Rows that are combinations of others, also where rounding becomes a multiplier; rows and columns of any size."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        n = int(rng.integers(2, 30))
        matrix = regular(rng, n, 0.2, float)
        sizes = [sp.diags_array(10.0 ** rng.uniform(-60, 60, n)) for _ in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            sized = sizes[0] @ (matrix + rng.choice([0, 20]) * sp.eye_array(n)) @ sizes[1]
            solvers.spsolve(sized.asformat(kind), np.ones(n))
        singular = matrix.tolil()
        singular[n - 1] = 0.1 * singular[0]
        with warnings.catch_warnings(record=True) as ours:
            warnings.simplefilter("always")
            solvers.spsolve(singular.asformat(kind), rng.standard_normal(n))
        assert [one.category for one in ours] == [theirs.MatrixRankWarning]


@pytest.mark.parametrize("options", [{"permc_spec": "natural"}, {"permc_spec": 0}, {"diag_pivot_thresh": 0.0},
                                     {"options": {"SymmetricMode": True}}])  # fmt: skip
def test_pivots_that_are_asked_for_are_superlus(options):
    matrix = sp.csc_array([[4.0, 1.0], [1.0, 3.0]])
    assert isinstance(solvers.splu(matrix, **options), theirs.SuperLU)
    np.testing.assert_allclose(solvers.spsolve(matrix, [1.0, 2.0], permc_spec="NATURAL", use_umfpack=False),
                               [1 / 11, 7 / 11], rtol=1e-15)  # fmt: skip


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_do_not_stay_in_a_plan(value):
    matrix = sp.csr_array([[4.0, 1.0], [1.0, 3.0]])
    x = solvers.spsolve(matrix, [1.0, 2.0])
    wrong = matrix.copy()
    wrong.data[0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", theirs.MatrixRankWarning)
        assert not np.isfinite(value) and not np.allclose(solvers.spsolve(wrong, [1.0, 2.0]), x)
    np.testing.assert_array_equal(solvers.spsolve(matrix, [1.0, 2.0]), x)


def test_wrong_arguments():
    square, lu = sp.eye_array(3).tocsr(), solvers.splu(sp.eye_array(3))
    for error, call in [
        (ShapeError, lambda: solvers.spsolve(sp.csr_array((2, 3)), np.ones(2))),
        (ShapeError, lambda: solvers.splu(np.ones(3))), (ShapeError, lambda: solvers.spsolve(square, np.ones(4))),
        (ShapeError, lambda: lu.solve(np.ones((3, 1, 1)))), (ShapeError, lambda: lu.solve(3.0)),
        (DTypeError, lambda: solvers.spsolve(np.array([["a"]]), np.ones(1))),
        (DTypeError, lambda: solvers.spsolve(square, np.array(list("abc")))),
        (DTypeError, lambda: solvers.splu(square.astype(np.float32)).solve(np.ones(3))),
        (DTypeError, lambda: lu.solve(square)), (OptionError, lambda: lu.solve(np.ones(3), "C")),
        (OptionError, lambda: solvers.spsolve(square, np.ones(3), "COLAMB")),
        (OptionError, lambda: solvers.splu(square, "MY_PERMC")),  # SciPy's crashes
        (OptionError, lambda: solvers.splu(square, 4)),
    ]:  # fmt: skip
        with pytest.raises(error):
            call()


@pytest.mark.parametrize("method", ["BDF", "Radau"])
def test_scipys_integrators_use_kept_plans(method):
    n = 40
    lines = sp.diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(n, n), format="csc") * n

    def solve() -> Any:
        return solve_ivp(lambda t, u: lines @ u - u**3, (0, 1), np.linspace(0, 1, n), method=method,
                         jac=lambda t, u: lines - sp.diags_array(3 * u * u, format="csc"))  # fmt: skip

    expected = solve()
    assert solvers.cache_info().misses == 0
    with solvers.used_by_scipy():
        found = solve()
        info = solvers.cache_info()
    assert info.hits > 5 * info.misses > 0
    np.testing.assert_allclose(found.y[:, -1], expected.y[:, -1], rtol=1e-9)
    solve()
    assert solvers.cache_info() == info


def test_whoever_holds_scipys_functions_uses_ours_in_a_block_alone():
    """In this thread, under any name, in closures, classes and tables; errors end a block, and blocks are nested."""
    matrix, b = sp.csc_array([[4.0, 1.0], [1.0, 3.0]]), np.ones(2)

    class Solver:
        factor = staticmethod(theirs.splu)

    def within(factor: Any) -> Any:
        def call(given: Any) -> Any:
            return factor(given)

        return call

    holders = [within(theirs.splu), Solver.factor, {"lu": theirs.splu}["lu"], functools.partial(theirs.splu, A=matrix)]
    with pytest.raises(ZeroDivisionError), solvers.used_by_scipy():
        with solvers.used_by_scipy():
            theirs.spsolve(matrix, b)
        later: dict[str, Any] = {}
        exec("from scipy.sparse.linalg import splu", later)
        for factor in (*holders[:3], later["splu"], lambda given: holders[3]()):
            assert isinstance(factor(matrix), solvers.SparseLU)
            with concurrent.futures.ThreadPoolExecutor() as other:
                assert isinstance(other.submit(factor, matrix).result(), theirs.SuperLU)
        assert solvers.cache_info()[:2] == (5, 1)
        assert isinstance(theirs.splu(matrix, permc_spec="NATURAL"), theirs.SuperLU)
        assert solvers.splu(matrix).solve(b).shape == (2,)
        raise ZeroDivisionError
    assert all(isinstance(factor(matrix), theirs.SuperLU) for factor in (*holders[:3], later["splu"]))
    assert not vars(theirs.splu)


@pytest.mark.parametrize("name", ["spsolve", "splu", "factorized"])
def test_functions_of_scipy_remain_the_same_objects_in_a_block(name):
    original = getattr(theirs, name)
    signature, pickled = inspect.signature(original), pickle.dumps(original)
    with solvers.used_by_scipy():
        assert getattr(theirs, name) is original is pickle.loads(pickled) is copy.deepcopy(original)
        assert pickle.dumps(original) == pickled and inspect.signature(original) == signature
        assert original.__code__.co_name == name
    assert inspect.signature(original) == signature


def test_warnings_in_a_block_are_those_of_its_caller():
    with warnings.catch_warnings(record=True) as warned, solvers.used_by_scipy():
        warnings.simplefilter("always")
        theirs.spsolve(sp.csc_array((3, 3)), np.ones(3))
    solved = [one for one in warned if one.category is theirs.MatrixRankWarning]
    assert [one.filename for one in solved] == [__file__]


def test_an_interrupt_leaves_no_block_open_and_modules_that_are_loaded_again_are_found(monkeypatch):
    matrix, code = sp.csc_array(2 * np.eye(3)), theirs.splu.__code__

    def interrupted(function: Any) -> None:
        enter(function)
        raise KeyboardInterrupt

    with solvers.used_by_scipy():
        pass
    enter = scipy_hooks._Exchanged.enter
    with monkeypatch.context() as patched:
        patched.setattr(scipy_hooks._Exchanged, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt), solvers.used_by_scipy():
            pass
    assert isinstance(theirs.splu(matrix), theirs.SuperLU) and theirs.splu.__code__ is code
    again = types.FunctionType(code, theirs.splu.__globals__, "splu", theirs.splu.__defaults__)
    monkeypatch.setattr(theirs, "splu", again)
    with solvers.used_by_scipy():
        assert isinstance(theirs.splu(matrix), solvers.SparseLU)
    assert isinstance(theirs.splu(matrix), theirs.SuperLU) and again.__code__ is code


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("batch", [1, 9])
def test_parts_of_a_complex_reciprocal_are_not_flushed(dtype, batch):
    """Up to where they may be, plans solve; beyond, they refuse, and SciPy solves."""
    numbers = np.finfo(dtype)
    dense = np.array([[1 + 0.01j, 0.3], [0.2, 1 - 0.01j]])
    for scale in (0.1 * numbers.eps / numbers.tiny, 10 * numbers.eps / numbers.tiny, numbers.max / 100):
        matrix = sp.csc_array((dense * scale).astype(dtype))
        b = (matrix @ np.ones(2, dtype)).astype(dtype)
        np.testing.assert_allclose(solvers.spsolve(matrix, b), 1, rtol=20 * numbers.eps)
        plan = sb.plan_factor(sb.SparsityPattern.dense(2, 2))
        values = np.repeat(matrix.toarray().reshape(4, 1), batch, axis=1)
        if scale < numbers.eps / numbers.tiny:
            np.testing.assert_allclose(plan(values).solve(np.repeat(b[:, None], batch, 1)), 1, rtol=20 * numbers.eps)
        else:
            with pytest.raises(PivotError, match="near an end"):
                plan(values)


def test_threads_share_plans():
    rng = np.random.default_rng(0)
    matrices = [regular(rng, n, 0.1, float) for n in (20, 30, 40)]

    def solve(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            matrix = matrices[rng.integers(3)] * rng.uniform(1, 2)
            b = rng.standard_normal(matrix.shape[0])
            assert_solves(matrix.toarray(), solvers.spsolve(matrix, b), b)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(solve, range(8)))
    info = solvers.cache_info()
    assert info.hits + info.misses == 160 and info.currsize == 3


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_pivots_that_are_too_large_for_a_reciprocal(dtype):
    """Their reciprocals are flushed to zero: SciPy solves."""
    size = np.finfo(dtype).max / 20
    matrix = sp.csc_array(np.array([[8, 2], [2, 9]], dtype) * size)
    x = solvers.spsolve(matrix, np.array([10, 11], dtype) * size)
    np.testing.assert_allclose(x, [1, 1], rtol=1e-5)
    assert solvers.cache_info().passed_on == 1


@settings(max_examples=60)
@given(n=sizes(2, 30), wide=st.integers(1, 3), largest=st.sampled_from([3, 20, 150, 300]),
       kind=st.sampled_from(["csr", "csc"]), singular=st.booleans(), seed=seeds)  # fmt: skip
def test_ill_scaled_and_singular_bands_are_solved_where_scipy_solves(n, wide, largest, kind, singular, seed):
    """With residuals of SciPy's size, over the sizes of the matrix and x; a warning where x is not finite."""
    rng, wide = np.random.default_rng(seed), min(wide, n - 1)
    lines = {o: rng.standard_normal(n - abs(o)) for o in range(-wide, wide + 1)}
    matrix = sp.lil_array(sp.diags_array(list(lines.values()), offsets=list(lines)))
    if singular:
        matrix[n - 1] = 3 * matrix[0]
    matrix = matrix.asformat(kind)
    matrix.data *= 1.0 if singular else 10.0 ** -rng.uniform(0, largest, matrix.nnz)
    b = rng.standard_normal(n)
    with warnings.catch_warnings(record=True) as ours:
        warnings.simplefilter("always", theirs.MatrixRankWarning)
        x = solvers.spsolve(matrix, b)
    with warnings.catch_warnings(record=True) as warned, np.errstate(all="ignore"):
        warnings.simplefilter("always")
        try:
            expected = theirs.spsolve(matrix, b)
        except RuntimeError:  # SuperLU fails
            return
    if ours or warned:
        assert singular or largest > 100 or not ours
        assert np.isnan(x).all() or all("working precision" in str(one.message) for one in ours)
        return
    assert np.isfinite(x).all() or not np.isfinite(expected).all()
    if np.isfinite(x).all() and np.isfinite(expected).all():
        found, least = (abs(b - matrix @ v).max() / (abs(matrix).sum(axis=1).max() * abs(v).max() + abs(b).max())
                        for v in (x, expected))  # fmt: skip
        assert found <= 10 * max(least, np.finfo(float).eps)


def test_sparse_columns_of_a_singular_matrix_are_refused_as_by_scipy():
    singular = sp.csc_array([[1.0, 1.0], [1.0, 1.0]])
    for call in (lambda: solvers.spsolve(singular, sp.eye_array(2, format="csc")), lambda: theirs.inv(singular)):
        with solvers.used_by_scipy(), pytest.raises(RuntimeError, match="singular"):
            call()


def test_blocks_that_end_elsewhere_and_out_of_turn():
    """In another thread, as a generator's may, and interleaved."""
    code = theirs.splu.__code__

    def holds() -> Any:
        with solvers.used_by_scipy():
            yield

    first = holds()
    next(first)
    with concurrent.futures.ThreadPoolExecutor() as other:
        other.submit(first.close).result()
    assert theirs.splu.__code__ is code
    one, two = holds(), holds()
    next(one), next(two)
    one.close()
    assert isinstance(theirs.splu(sp.eye_array(2, format="csc")), solvers.SparseLU)
    two.close()
    with concurrent.futures.ThreadPoolExecutor() as other:
        block = holds()
        other.submit(next, block).result()
        assert isinstance(theirs.splu(sp.eye_array(2, format="csc")), theirs.SuperLU)
        other.submit(block.close).result()
    assert theirs.splu.__code__ is code


@pytest.mark.parametrize("size", [1e308, 5e-309])
@pytest.mark.parametrize("other", [0.0, 1.0])
def test_sizes_near_the_ends_of_a_dtype_are_superlus(size, other):
    matrix = sp.csc_array([[size, 0.0, other], [other, 4.0, 0.5], [0.5 * other, 1.0, 3.0]])
    np.testing.assert_array_equal(solvers.spsolve(matrix, np.ones(3)), theirs.splu(matrix).solve(np.ones(3)))


@given(n=sizes(1, 12), exponent=st.integers(-1000, 1018), of_b=st.integers(-1000, 1000), seed=seeds)
def test_matrices_of_any_size_have_the_digits_of_others(n, exponent, of_b, seed):
    """Times a power of two, also where our plans refuse them, and where solutions would be flushed."""
    rng = np.random.default_rng(seed)
    matrix, b = regular(rng, n, 0.3, float), rng.standard_normal(n)
    if not -1000 < of_b - exponent < 1000:
        of_b = exponent
    sized = matrix.copy()
    sized.data = np.ldexp(matrix.data, exponent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = solvers.spsolve(sized, np.ldexp(b, of_b))
    assert_solves(matrix.toarray(), np.ldexp(x, exponent - of_b), b)
