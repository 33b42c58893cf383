"""LU and Cholesky factors on a kept pattern: against SciPy's SuperLU, matrix by matrix."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, cg, eigsh, gmres

from matrices import dense, of_mask
from products.factor_gallery import (
    DEFINITE,
    GALLERY,
    Array,
    assert_as_small_as_superlu,
    backward_error,
    complex_matrices,
    either_way,
    kinds,
    laplacian,
    mirrored,
    pattern_of,
)
from sparsebp import SparsityPattern, kernels, plan_factor
from sparsebp.core.errors import DTypeError, PivotError
from sparsebp.kernels.host.sparse.panels import by_sample
from strategies import reals, seeds, sizes
from thread_counts import assert_same_for_any_number_of_threads


@settings(max_examples=300)
@given(
    n=sizes(0, 33), density=st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0]), batch=st.sampled_from([1, 2, 3, 8, 9, 17]),
    way=st.sampled_from(["general", "dominant", "cholesky"]), block=st.sampled_from([1, 1, 2, 3, 9]),
    transposed=st.booleans(), dtype=reals, seed=seeds,
)  # fmt: skip
@either_way
def test_random_matrices(n, density, batch, way, block, transposed, dtype, seed):
    """Dominant diagonals without values, general matrices with them; samples that differ; one by one bitwise equal.

    Entries may be dense blocks, whose rows are numbered at random.
    """
    rng, dominant = np.random.default_rng(seed), way != "general"
    n -= n % block
    mask = np.kron(rng.random((n // block,) * 2) < density, np.ones((block, block), bool))
    shuffled = rng.permutation(n)
    mask = mask[np.ix_(shuffled, shuffled)]
    mask |= mask.T & (way == "cholesky")
    mask[np.arange(n), np.arange(n) if dominant else rng.permutation(n)] = True
    pattern = of_mask(mask)
    representative = rng.standard_normal(pattern.nnz)
    values = (representative[:, None] * (1 + 0.1 * rng.random((pattern.nnz, batch)))).astype(dtype)
    if dominant:
        values[pattern.row_of_entry == pattern.indices] += 4 * n
    if way == "cholesky":
        values = mirrored(pattern, values)
        plan = plan_factor(pattern, kind="cholesky")
        assert plan.fill <= plan_factor(pattern).fill
    else:
        plan = plan_factor(pattern, None if dominant else np.ascontiguousarray(values[:, 0]))
    b = rng.standard_normal((n, batch)).astype(dtype)
    matrices = dense(pattern, values, batch).swapaxes(1, 2) if transposed else dense(pattern, values, batch)
    try:
        factors = plan(values)
    except PivotError as error:  # these pivots are not those of the other samples
        assert error.samples and 0 not in error.samples
        assert not dominant
        return
    x = factors.solve(b, transposed=transposed)
    refined = factors.refine(b, x, transposed=transposed)
    assert x.dtype == refined.dtype == dtype and x.shape == refined.shape == (n, batch)
    eps = float(np.finfo(dtype).eps)
    for s in {0, batch // 2, batch - 1}:
        one = plan(np.ascontiguousarray(values[:, s]))
        np.testing.assert_array_equal(one.solve(np.ascontiguousarray(b[:, s]), transposed=transposed), x[:, s])
        assert one.growth == factors.growth[s]
        error = backward_error(matrices[s], x[:, s], b[:, s])
        assert error <= 4 * (n + 1) * eps * max(1.0, factors.growth[s])
        if s == 0 or dominant:  # its own pivots
            assert_as_small_as_superlu(matrices[s], x[:, s], b[:, s])
            assert_as_small_as_superlu(matrices[s], refined[:, s], b[:, s])


@settings(max_examples=200)
@given(n=sizes(0, 33), density=st.sampled_from([0.0, 0.1, 0.3, 1.0]), batch=st.sampled_from([None, 1, 3, 8, 9, 17]),
       kind=kinds, trans=st.sampled_from("NTH"), triangle=st.sampled_from(["both", "lower", "upper"]),
       dtype=st.sampled_from([np.complex64, np.complex128]), seed=seeds)  # fmt: skip
@either_way
def test_complex_matrices(n, density, batch, kind, trans, triangle, dtype, seed):
    """With A, Aᵀ and Aᴴ, one right-hand side for each matrix of a batch, or nine of one matrix."""
    rng = np.random.default_rng(seed)
    matrices = complex_matrices(rng, n, density, kind, batch or 1, dtype)
    mask = (matrices != 0).any(axis=0)
    if kind == "ldlt":
        mask = {"both": mask, "lower": np.tril(mask), "upper": np.triu(mask)}[triangle]
    pattern = of_mask(mask)
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    factors = plan_factor(pattern, kind=kind)(values if batch else values[:, 0].copy())
    np.testing.assert_array_equal(factors.values.reshape(values.shape), values)
    b = (rng.standard_normal((n, batch or 9)) + 1j * rng.standard_normal((n, batch or 9))).astype(dtype)
    x = factors.solve(b, trans)
    refined = factors.refine(b, x, trans)
    assert x.dtype == refined.dtype == dtype and factors.growth.dtype == x.real.dtype
    for s in range(b.shape[1]):
        matrix = matrices[s if batch else 0].astype(complex)
        matrix = {"N": matrix, "T": matrix.T, "H": matrix.conj().T}[trans]
        for found in (x, refined):
            assert backward_error(matrix, found[:, s], b[:, s]) <= 4 * (n + 1) * np.finfo(dtype).eps
        if batch:
            one = plan_factor(pattern, kind=kind)(np.ascontiguousarray(values[:, s]))
            np.testing.assert_array_equal(one.solve(np.ascontiguousarray(b[:, s]), trans), x[:, s])


@pytest.mark.parametrize(
    "name", ["Helmholtz", "network with sources", "rows and columns permuted", "sparse 2", "dense"]
)
def test_complex_values_choose_pivots(name):
    """As partial pivoting does for them, and residuals like SuperLU's."""
    matrix = sp.csr_array(GALLERY[name]()).astype(complex)
    matrix.data *= np.exp(1j * np.random.default_rng(0).random(matrix.nnz))
    b = np.arange(1.0, 1 + matrix.shape[0]) * (1 + 2j)
    factors = plan_factor(matrix)(matrix)
    assert_as_small_as_superlu(matrix.toarray(), factors.solve(b), b)
    assert_as_small_as_superlu(matrix.toarray().conj().T, factors.solve(b, "H"), b)


@given(n=sizes(1, 20), columns=st.sampled_from([0, 1, 2, 9, 16]), kind=kinds, transposed=st.booleans(), dtype=reals,
       seed=seeds)  # fmt: skip
@either_way
def test_many_right_hand_sides_of_one_matrix(n, columns, kind, transposed, dtype, seed):
    """Each column as if it were alone; refinement too."""
    rng = np.random.default_rng(seed)
    mask = (rng.random((n, n)) < 0.3) | np.eye(n, dtype=bool)
    pattern = of_mask(mask | mask.T)
    values = mirrored(pattern, rng.random(pattern.nnz).astype(dtype))
    values[pattern.row_of_entry == pattern.indices] += n
    factors = plan_factor(pattern, kind=kind)(values)
    b = rng.standard_normal((n, columns)).astype(dtype)
    x = factors.solve(b, transposed=transposed)
    refined = factors.refine(b, x, steps=2, transposed=transposed)
    assert x.shape == refined.shape == b.shape
    for k in range(columns):
        one = np.ascontiguousarray(b[:, k])
        np.testing.assert_array_equal(factors.solve(one, transposed=transposed), x[:, k])
        np.testing.assert_array_equal(
            factors.refine(one, np.ascontiguousarray(x[:, k]), steps=2, transposed=transposed), refined[:, k]
        )


def test_one_right_hand_side_for_a_batch():
    pattern, values = pattern_of(laplacian(5, 5))
    batch = np.ascontiguousarray(values[:, None] * np.array([1.0, 2.0, 3.0]))
    factors, b = plan_factor(pattern)(batch), np.arange(25.0)
    x = factors.solve(b)
    np.testing.assert_array_equal(x, factors.solve(np.repeat(b[:, None], 3, axis=1)))
    np.testing.assert_allclose(x[:, 0], 2 * x[:, 1])
    np.testing.assert_array_equal(factors.refine(b, x), factors.refine(np.repeat(b[:, None], 3, axis=1), x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "lu") for name in GALLERY] + [(name, kind) for kind in ("cholesky", "ldlt") for name in DEFINITE],
)
def test_gallery(name, kind, transposed):
    pattern, values = pattern_of(GALLERY[name]())
    factors = plan_factor(pattern, values if kind == "lu" else None, kind=kind)(values)
    matrix = dense(pattern, values).T if transposed else dense(pattern, values)
    b = np.random.default_rng(1).standard_normal(len(matrix))
    x = factors.solve(b, transposed=transposed)
    assert_as_small_as_superlu(matrix, x, b)
    assert_as_small_as_superlu(matrix, factors.refine(b, x, transposed=transposed), b)


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "lu") for name in ("line of 1000", "square of 40", "cube of 11", "saddle point", "sparse 2", "dense")]
    + [(name, "cholesky") for name in ("square of 40", "cube of 11", "definite blocks", "definite")]
    + [(name, "ldlt") for name in ("square of 40", "cube of 11", "definite blocks", "definite")],
)
def test_batches_of_larger_matrices(name, kind):
    """As one by one, in both dtypes: panels of every size and groups of them."""
    pattern, values = pattern_of(GALLERY[name]())
    plan, rng = plan_factor(pattern, values if kind == "lu" else None, kind=kind), np.random.default_rng(0)
    for dtype in (np.float32, np.float64):
        batch = (values[:, None] * (1 + 1e-3 * rng.random((pattern.nnz, 19)))).astype(dtype)
        batch = mirrored(pattern, batch) if kind != "lu" else batch
        b = rng.standard_normal((pattern.shape[0], 19)).astype(dtype)
        factors = plan(batch)
        x = factors.solve(b)
        np.testing.assert_array_equal(factors.values, batch)
        for s in (0, 7, 18):
            one = plan(np.ascontiguousarray(batch[:, s])).solve(np.ascontiguousarray(b[:, s]))
            np.testing.assert_array_equal(x[:, s], one)
            assert backward_error(dense(pattern, batch[:, s]), one, b[:, s]) < 100 * np.finfo(dtype).eps


@settings(max_examples=100)
@given(n=sizes(1, 12), kind=kinds, batch=st.sampled_from([None, 1, 3, 9, 17]), of_a=st.floats(-1, 1),
       of_b=st.floats(-1, 1), trans=st.sampled_from("NTH"), seed=seeds,
       dtype=st.sampled_from([np.float32, np.float64, np.complex64, np.complex128]))  # fmt: skip
@example(n=1, kind="lu", batch=None, of_a=-0.9375, of_b=0.0, trans="N", seed=2, dtype=np.float64)  # is nearly flushed
@either_way
def test_powers_of_two_change_no_digit(n, kind, batch, of_a, of_b, trans, seed, dtype):
    """Of factors, solutions and refined ones, up to the ends of the dtype, where matrices are refused."""
    rng, numbers = np.random.default_rng(seed), np.finfo(dtype)
    matrices, columns = complex_matrices(rng, n, 0.3, kind, batch or 1, np.complex128), batch or 3
    matrices = (matrices if numbers.dtype != dtype else matrices.real + np.eye(n) * 4 * n).astype(dtype)
    pattern = of_mask((matrices != 0).any(axis=0))
    values = np.ascontiguousarray(matrices[:, pattern.row_of_entry, pattern.indices].T)
    b = rng.standard_normal((n, columns)).astype(dtype) * dtype(1 if numbers.dtype == dtype else 1 + 2j)
    plan, solver = plan_factor(pattern, kind=kind), kernels.on_host().factor_solve
    room = numbers.maxexp - 12
    k, m = round(of_a * room / 2) * 2, round(of_b * room)  # Cholesky factors have the root
    m = m if abs(m - k) < room else k

    def sized(a: Array, exponent: int) -> Array:
        return solver.scaled(a, np.full(a.shape[1], exponent))

    def factors(values: Array) -> Any:
        return plan(values if batch else values[:, 0].copy())

    good = factors(values)
    try:
        found = factors(sized(values, k))
    except PivotError as error:
        assert "near an end of" in str(error)
        of_parts = numbers.nmant if kind == "lu" and numbers.dtype != dtype else 0  # of complex reciprocals
        assert k > numbers.maxexp - 20 - of_parts or k < numbers.minexp + numbers.nmant
        return
    x, expected = found.solve(sized(b, m), trans), good.solve(b, trans)
    tiny = numbers.tiny * 2.0**-numbers.nmant if abs(x).max() < numbers.tiny / numbers.eps else numbers.tiny
    assert (abs(x - sized(expected, m - k)) <= tiny).all()
    refined = sized(found.refine(sized(b, m), x, trans), k - m)
    for s in range(columns):
        matrix = {"N": lambda a: a, "T": lambda a: a.T, "H": lambda a: a.conj().T}[trans](matrices[s if batch else 0])
        assert backward_error(matrix, refined[:, s], b[:, s]) <= 4 * (n + 1) * numbers.eps
    np.testing.assert_array_equal(found.growth, good.growth)


@pytest.mark.parametrize("dtype", [np.int8, np.int64, bool])
def test_integers_are_right_hand_sides_and_matrices(dtype):
    """As SciPy takes them: LinearOperator asks its function for a result of int8 zeros."""
    matrix = sp.csr_array(np.array([[4, 1, 0], [1, 3, 1], [0, 1, 2]]))
    factors = plan_factor(matrix)(matrix)
    assert factors.dtype == np.float64
    b = np.array([1, 0, 1], dtype)
    np.testing.assert_array_equal(factors.solve(b), factors.solve(b.astype(float)))
    single = plan_factor(matrix)(matrix.astype(np.float32))
    assert single.solve(b).dtype == np.float32
    if dtype == np.int64:
        for refuses, most in ((single, 2**24), (factors, 2**53)):
            refuses.solve(np.full(3, most))
            with pytest.raises(DTypeError, match="would round"):
                refuses.solve(np.array([0, 0, most + 1]))


def test_factors_precondition_scipys_solvers():
    matrix = laplacian(9, 9)
    factors = plan_factor(matrix, kind="cholesky")(matrix)
    inverse = LinearOperator(matrix.shape, factors.solve, lambda b: factors.solve(b, transposed=True))
    assert inverse.dtype == np.float64
    b = np.arange(81.0)
    for solver in (cg, gmres):
        _, code = solver(matrix + 0.01 * sp.eye_array(81), b, M=inverse, maxiter=5)
        assert code == 0
    np.testing.assert_allclose(inverse @ matrix.toarray(), np.eye(81), atol=1e-12)
    np.testing.assert_allclose(inverse.T @ (matrix @ b), b, atol=1e-12)
    np.testing.assert_allclose(abs(eigsh(matrix, k=3, sigma=0, OPinv=inverse)[0]), eigsh(matrix, k=3, sigma=0)[0])


def test_sparse_right_hand_sides_are_dense_ones():
    matrix = sp.csr_array(laplacian(4, 3))
    factors, b = plan_factor(matrix)(matrix), np.eye(12)[:, ::3]
    for kind in (sp.csr_array, sp.csc_array, sp.coo_matrix):
        x = factors.solve(kind(b))
        assert type(x) is np.ndarray
        np.testing.assert_array_equal(x, factors.solve(np.ascontiguousarray(b)))
    np.testing.assert_array_equal(factors.solve(np.asfortranarray(b)), factors.solve(np.ascontiguousarray(b)))


@given(n=sizes(1, 12), seed=seeds)
def test_matrices_in_any_order(n, seed):
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n)) * (rng.random((n, n)) < 0.4) + n * np.eye(n)[rng.permutation(n)]
    b = rng.standard_normal(n)
    coo, order = sp.coo_array(matrix), rng.permutation(np.count_nonzero(matrix))
    mixed = sp.coo_array((coo.data[order], (coo.row[order], coo.col[order])), coo.shape)
    plan = plan_factor(mixed)
    fewer = mixed.tocsr()
    fewer.data[:: 2 * n] *= 1 + 1e-3
    for given_matrix in (mixed, sp.csc_array(matrix), sp.lil_array(matrix)):
        np.testing.assert_array_equal(plan(given_matrix).values, plan.pattern.values_of(sp.csr_array(matrix)))
        assert backward_error(matrix, plan(given_matrix).solve(b), b) < 1e-13
    assert backward_error(fewer.toarray(), plan_factor(mixed, fewer)(fewer).solve(b), b) < 1e-13


def test_values_above_the_diagonal_are_those_that_cholesky_reads():
    pattern, values = pattern_of(laplacian(5, 4))
    plan, b = plan_factor(pattern, kind="cholesky"), np.ones(20)
    factors, other = plan(values), np.where(pattern.row_of_entry > pattern.indices, np.nan, values)
    x, found = factors.solve(b), plan(other)
    np.testing.assert_array_equal(found.solve(b), x)
    np.testing.assert_array_equal(found.refine(b, x), factors.refine(b, x))


@pytest.mark.parametrize("batch", [None, 5, 64])
@pytest.mark.parametrize(("name", "kind"), [("cube of 11", "cholesky"), ("cube of 11", "lu")])
def test_any_number_of_threads(name, kind, batch):
    pattern, values = pattern_of(GALLERY[name]())
    if batch:
        values = values[:, None] * (1 + 0.01 * np.random.default_rng(0).random((pattern.nnz, batch)))
    plan, b = plan_factor(pattern, kind=kind), np.ones((pattern.shape[0], *values.shape[1:]))

    def run() -> list[Array]:
        factors = plan(values)
        x = factors.solve(b)
        return [x, factors.solve(b, transposed=True), factors.refine(b, x), np.asarray(factors.growth)]

    assert_same_for_any_number_of_threads(run)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
def test_wide_supernodes_of_one_matrix(kind, dtype):
    """Of 13 rows and more, whose multiples are taken many at a time: bitwise as in a batch, on any threads."""
    pattern, _ = pattern_of(sp.kron(laplacian(6, 5), np.ones((13, 13))))
    rng, n, diagonal = np.random.default_rng(0), pattern.shape[0], pattern.row_of_entry == pattern.indices
    values = rng.standard_normal(pattern.nnz).astype(dtype)
    values = values if values.dtype.kind != "c" else values + 1j * rng.standard_normal(pattern.nnz)
    values[diagonal] = 4 * 65 * (rng.choice([-1, 1], n) if kind == "ldlt" else 1)
    plan, b = plan_factor(pattern, kind=kind), rng.standard_normal(n).astype(dtype)
    assert np.bincount(plan.panels.after).max() >= 20
    both = plan(np.stack([values, values], axis=1))
    expected = both.solve(b)[:, 0]
    matrix = pattern.to_scipy(plan.whole_values(values)).toarray()
    assert_as_small_as_superlu(matrix, expected, b)

    def run() -> list[Array]:
        one = plan(values)
        np.testing.assert_array_equal(one._data[0, :, 0], by_sample(both._data)[0, :, 0])
        assert one.growth == both.growth[0]
        return [one.solve(b)]

    assert_same_for_any_number_of_threads(run)


@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
def test_threads_share_a_plan(kind):
    """Each with its own factors, whose memory it uses again, of one matrix or a batch; values change meanwhile."""
    pattern, values = pattern_of(GALLERY["cube"]())
    plan, b = plan_factor(pattern, kind=kind), np.ones((pattern.shape[0], 9))
    expected = [plan(scale * values).solve(b[:, 0].copy()) for scale in range(1, 5)]

    def work(number: int) -> None:
        batch = number % 2 == 1
        mine = np.repeat(values[:, None], 9, axis=1) if batch else values.copy()
        right, factors = b if batch else b[:, 0].copy(), None
        for _ in range(10):
            for k in range(4):
                mine[:] = (k + 1) * (values[:, None] if batch else values)
                factors = plan(mine, out=factors)
                mine[:] = np.nan
                x = factors.solve(right)
                np.testing.assert_array_equal(x[:, 4] if batch else x, expected[k])

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_factors_own_their_values():
    """Values may be overwritten, read-only or of an earlier shape; solving changes neither b nor x."""
    pattern, values = pattern_of(laplacian(7, 5))
    plan, b, before = plan_factor(pattern), np.ones(35), values.copy()
    values.flags.writeable = b.flags.writeable = False
    factors = plan(values)
    plan(np.ones((pattern.nnz, 3)) * (1 + 99 * (pattern.row_of_entry == pattern.indices))[:, None])
    x = factors.solve(b)
    x.flags.writeable = False
    refined = factors.refine(b, x)
    values.flags.writeable = True
    values[:] = np.nan
    np.testing.assert_array_equal(factors.refine(b, x), refined)
    np.testing.assert_array_equal(factors.values, before)
    np.testing.assert_array_equal(plan(before).solve(b), x)
    assert not plan.rows.flags.writeable and not plan.columns.flags.writeable


@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("batch", [None, 0, 1, 2])
def test_empty(n, batch, kind):
    shape = () if batch is None else (batch,)
    plan = plan_factor(SparsityPattern.diagonal(n), kind=kind)
    assert plan.kind == kind
    factors = plan(2 * np.ones((n, *shape)))
    b = np.ones((n, *shape))
    x = factors.solve(b)
    np.testing.assert_allclose(x, b / 2, rtol=1e-15)
    np.testing.assert_allclose(factors.refine(b, x), x, rtol=1e-15)
    assert factors.growth.shape == shape
