"""Sparse matrices at every door that takes values on a pattern, or a pattern: in any order, with entries missing."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from matrices import dense, of_mask
from sparsebp import SparsityPattern, plan_factor, plan_product
from sparsebp.core import backend
from sparsebp.core.errors import DeviceError, DTypeError, PatternError, ShapeError
from sparsebp.patterns import plan_concatenation
from sparsebp.products import plan_addition, plan_assembly
from strategies import seeds, sizes

FORMATS = ("csr", "csc", "coo", "lil", "dok", "bsr", "dia")


def disguised(matrix: Any, rng: np.random.Generator) -> Any:
    """Return CSR of the same matrix with duplicates, in a wrong order, with spare elements, and a flag that lies."""
    coo = sp.coo_array(matrix)
    order = rng.permutation(np.repeat(np.arange(coo.nnz), 2))
    rows, columns, values = coo.row[order], coo.col[order], coo.data[order] / 2
    by_row = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=coo.shape[0]))])
    spare = np.append(values[by_row], values.dtype.type(7)), np.append(columns[by_row], 0)
    found = sp.csr_array((*spare, indptr), shape=coo.shape) if coo.nnz else sp.csr_array(coo)
    found.has_canonical_format = True
    return found


@given(m=sizes(0, 9), n=sizes(0, 9), dtype=st.sampled_from(["float32", "float64", "int64", "bool"]), seed=seeds)
def test_values_of_a_matrix_in_the_order_of_the_pattern(m, n, dtype, seed):
    rng = np.random.default_rng(seed)
    mask = rng.random((m, n)) < 0.5
    matrix = (rng.integers(-3, 4, (m, n)) * mask).astype(dtype)
    pattern = of_mask(mask | (rng.random((m, n)) < 0.2))
    kinds = [sp.csr_array(matrix).asformat(name) for name in FORMATS if m * n or name != "bsr"]
    if dtype.startswith("float"):
        kinds.append(disguised(matrix, rng))
    for given_matrix in (*kinds, sp.csr_matrix(matrix)):
        values = pattern.values_of(given_matrix)
        assert values.dtype == dtype and values.shape == (pattern.nnz,)
        np.testing.assert_array_equal(dense(pattern, values), matrix)
    missing = np.argwhere(dense(pattern) == 0)
    for row, column in missing[:1]:
        more = sp.lil_array(matrix.astype(float))
        more[row, column] = 7
        with pytest.raises(PatternError, match=rf"outside.*Got 7\.0 in row {row}, column {column}, 1 in all"):
            pattern.values_of(more.tocsc())


def test_a_matrix_on_the_very_pattern_shares_its_values():
    matrix = sp.random_array((20, 30), density=0.2, format="csr", rng=0)
    matrix.sum_duplicates()
    pattern = SparsityPattern.from_scipy(matrix)
    assert np.shares_memory(pattern.values_of(matrix), matrix.data)
    wide = SparsityPattern([0, 1, 2], [5, 2**62], (2, 2**62 + 1))
    other = sp.csr_array((np.ones(1), [2**62], [0, 0, 1]), shape=wide.shape)
    np.testing.assert_array_equal(wide.values_of(other), [0, 1])
    for wrong, error in ((np.ones((20, 30)), PatternError), (matrix.T, ShapeError), (None, PatternError)):
        with pytest.raises(error):
            pattern.values_of(wrong)


@given(m=sizes(1, 8), k=sizes(1, 8), n=sizes(1, 8), seed=seeds)
def test_products_of_matrices_in_any_order(m, k, n, seed):
    rng = np.random.default_rng(seed)
    a, b, c = (rng.standard_normal(s) * (rng.random(s) < 0.5) for s in ((m, k), (k, n), (m, n)))
    ways = [(sp.csr_array(x), sp.csc_array(x), disguised(x, rng)) for x in (a, b)]
    plan = plan_product(sp.csc_array(a), disguised(b, rng))
    assert plan is plan_product(plan.a, plan.b)
    for left in (*ways[0], plan.a.values_of(sp.csr_array(a))):
        for right in (*ways[1], plan.b.values_of(sp.csr_array(b))):
            np.testing.assert_allclose(dense(plan.pattern, plan(left, right)), a @ b, atol=1e-12)
    batch = np.stack([plan.a.values_of(ways[0][0])] * 3, axis=1)
    assert plan(batch, ways[1][2]).shape == (plan.pattern.nnz, 3)
    on_c = sp.csc_array(c * (dense(plan.pattern) != 0))
    np.testing.assert_allclose(
        plan.gradients.at_a(on_c, ways[1][2]), plan.gradients.at_a(plan.pattern.values_of(on_c), ways[1][2]), atol=1e-12
    )
    rows, columns = plan.a.row_of_entry, plan.a.indices
    expected = (on_c.toarray() @ b.T)[rows, columns]
    np.testing.assert_allclose(plan.gradients.at_a(on_c, sp.coo_array(b)), expected, atol=1e-12)


def test_every_other_door():
    rng = np.random.default_rng(0)
    a = np.triu(rng.standard_normal((5, 5))) + 5 * np.eye(5)
    mixed, pattern = disguised(a, rng), of_mask(a)
    total = plan_addition(mixed, sp.eye_array(5))
    np.testing.assert_allclose(dense(total.pattern, total(sp.csc_array(a), sp.eye_array(5))), a + np.eye(5))
    side = plan_concatenation(mixed, sp.csc_array(a))
    np.testing.assert_allclose(dense(side.pattern, side(mixed, sp.coo_array(a))), np.hstack([a, a]))
    assembly = plan_assembly([0, 1, 0], [2, 0, 2], (2, 3))
    grad = sp.coo_array(([5.0, 7.0], ([1, 0], [0, 2])), shape=(2, 3))
    np.testing.assert_array_equal(assembly.vjp(grad), [7, 5, 7])
    jacobian = sb.TransposedJacobian(pattern, mixed)
    np.testing.assert_allclose(jacobian.to_dense(), a)
    scan = sb.plan_scan([pattern, pattern])
    np.testing.assert_allclose(scan(np.ones(5), [mixed, sp.csc_array(a)])[-1], a @ a @ np.ones(5))
    identity = plan_product(SparsityPattern.identity(5), pattern)
    np.testing.assert_array_equal(dense(pattern, identity(sp.eye_array(5), mixed)), a)
    with pytest.raises(PatternError, match="ones by definition"):
        identity(2 * sp.eye_array(5), mixed)


def test_no_message_advises_unordered_values():
    plan = plan_product(SparsityPattern.dense(2, 2), SparsityPattern.dense(2, 2))
    for call in (lambda: backend.namespace(sp.eye_array(2)), lambda: plan_assembly([0], [0], (1, 1))(sp.eye_array(1))):
        with pytest.raises(DTypeError, match=r"sparse matrix.*\.toarray\(\)"):
            call()
    with pytest.raises(PatternError, match=r"a is not a pattern.*sparse matrix"):
        plan_product(np.eye(2), plan.a)
    for complain in (
        lambda: plan(sp.eye_array(2, dtype=int), np.ones(4)),
        lambda: plan(1j * sp.eye_array(2), np.ones(4)),
    ):
        with pytest.raises(DTypeError, match=r"float32 or float64|one dtype for both"):
            complain()


@pytest.mark.gpu
def test_matrices_of_cupy():
    try:
        cp = backend.cupy()
    except (ImportError, DeviceError) as error:
        pytest.skip(f"no GPU: {error}")
    from cupyx.scipy.sparse import csr_matrix

    rng = np.random.default_rng(0)
    host = sp.random_array((6, 6), density=0.4, format="csr", rng=rng)
    host.sum_duplicates()
    pattern = SparsityPattern.from_scipy(host)
    for matrix in (host, disguised(host, rng)):
        end = matrix.indptr[-1]
        given_matrix = csr_matrix(
            tuple(map(cp.asarray, (matrix.data[:end], matrix.indices[:end], matrix.indptr))), shape=(6, 6)
        )
        values = pattern.values_of(given_matrix)
        assert backend.namespace(values) is cp
        np.testing.assert_allclose(backend.to_host(values), host.data)
        plan = plan_product(given_matrix, given_matrix)
        np.testing.assert_allclose(
            dense(plan.pattern, backend.to_host(plan(given_matrix, given_matrix))), (host @ host).toarray()
        )


# ---- plans in other threads and processes ----------------------------------------------------------------------------


def test_one_plan_in_many_threads_at_once():
    """Nothing that a plan keeps is written by a call."""
    matrix = sp.csr_array(sp.random_array((60, 60), density=0.08, rng=0) + 3 * sp.eye_array(60))
    product, factor, b = plan_product(matrix, matrix), plan_factor(matrix), np.arange(60.0)

    def compute(k: float) -> tuple[np.ndarray, ...]:
        fit = sb.least_squares(lambda x: matrix @ x - k, np.zeros(60), lambda x: matrix)
        return product(k * matrix, matrix), factor(k * matrix).solve(b), fit.x

    scales = [1.0, 2.0, 3.0, 4.0]
    expected, found, together = [*map(compute, scales)], [[] for _ in scales], threading.Barrier(len(scales))

    def run(number: int) -> None:
        together.wait()
        found[number].extend(compute(scales[number]) for _ in range(10))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(scales))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results, wanted in zip(found, expected, strict=True):
        assert len(results) == 10
        for result in results:
            for array, other in zip(result, wanted, strict=True):
                np.testing.assert_array_equal(array, other)


def test_values_may_change_after_a_call_and_plans_travel():
    matrix = sp.csr_array(sp.random_array((30, 30), density=0.1, rng=0) + 3 * sp.eye_array(30))
    matrix.sum_duplicates()
    plan, b = plan_factor(matrix), np.arange(30.0)
    values = plan.pattern.values_of(matrix).copy()
    factors = plan(values)
    x = factors.solve(b)
    values[:] = np.nan
    np.testing.assert_array_equal(factors.solve(b), x)
    readable = matrix.copy()
    readable.data.flags.writeable = False
    again, copies = pickle.loads(pickle.dumps((plan, plan(readable))))
    np.testing.assert_array_equal(again(readable).solve(b), plan(readable).solve(b))
    np.testing.assert_array_equal(copies.solve(b), plan(readable).solve(b))
    product = plan_product(matrix, matrix)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(product))(readable, readable), product(readable, readable))


FORKS = """
import os
import numpy as np, scipy.sparse as sp, sparsebp as sb

matrix = sp.csr_array(sp.random_array((200, 200), density=0.03, rng=0) + 3 * sp.eye_array(200))
product, factor, b = sb.plan_product(matrix, matrix), sb.plan_factor(matrix), np.arange(200.0)
batch = np.ascontiguousarray(factor.pattern.values_of(matrix)[:, None] * np.arange(1.0, 33))
expected = product(matrix, matrix), factor(batch).solve(b)
child = os.fork()
found = product(matrix, matrix), factor(batch).solve(b)
same = all((x == y).all() for x, y in zip(found, expected))
if child == 0:
    os._exit(0 if same else 1)
assert same and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_plans_work_in_a_forked_process():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
