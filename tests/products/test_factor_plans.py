"""Orders of elimination, and the structure of factors."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from matrices import dense, of_mask
from products.factor_gallery import GALLERY, Array, assert_as_small_as_superlu, either_way, laplacian, line, pattern_of
from sparsebp import SparsityPattern, plan_factor
from sparsebp.products import elimination, ordering
from strategies import seeds, sizes


def test_plans_of_equal_input_are_equal():
    pattern, values = pattern_of(GALLERY["network with sources"]())
    plans = [plan_factor(pattern, values) for _ in range(2)]
    for first, second in zip(plans[0].panels, plans[1].panels, strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_plan_can_be_copied():
    """Its copy computes the same, and its arrays are read-only too."""
    pattern, values = pattern_of(GALLERY["saddle point"]())
    plan, b = plan_factor(pattern, values), np.ones(pattern.shape[0])
    copy = pickle.loads(pickle.dumps(plan))
    np.testing.assert_array_equal(copy(values).solve(b), plan(values).solve(b))
    assert not any(array.flags.writeable for array in copy.panels[:-2])


def eliminated(mask: Array) -> Array:
    """Return where L + U has entries."""
    filled = mask.copy()
    for k in range(len(mask)):
        filled[k + 1 :, k + 1 :] |= np.outer(filled[k + 1 :, k], filled[k, k + 1 :])
    return filled


@given(n=sizes(0, 33), density=st.sampled_from([0.05, 0.1, 0.2, 0.4]), block=st.sampled_from([1, 1, 3, 5]),
       symmetric=st.booleans(), half=st.booleans(), seed=seeds)  # fmt: skip
@either_way
def test_structure(n, density, block, symmetric, half, seed):
    """Against elimination of a matrix of booleans: U is exact but for few zeros where rows of a supernode differ, L
    fills up panels, and every panel has what it reads."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, n)) < density
    mask = (mask | mask.T if symmetric or half else mask) | np.eye(n, dtype=bool)
    mask, n = np.kron(mask, np.ones((block, block), bool)), n * block
    spare, few = seed % 3 / 4, seed % 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(elimination, "SPARE", spare)
        patch.setattr(elimination, "FEW", few)
        plan = plan_factor(of_mask(mask), kind="cholesky" if half else "lu")
    filled, at = eliminated(mask[np.ix_(plan.rows, plan.columns)]), plan.panels
    for after in np.unique(at.after):  # the supernodes' rows have the columns of their last one
        begin, end = at.first[np.searchsorted(at.after, after)], at.first[after]
        own, before = slice(begin, end), filled.copy()
        filled[own, begin:] |= (np.arange(n) < end)[begin:] | filled[end - 1, begin:]
        filled[begin:, own] |= ((np.arange(n) < end)[begin:] | filled[begin:, end - 1])[:, None]
        entries = filled[own, begin:].sum() + filled[end:, own].sum()
        assert (filled ^ before).sum() <= max(spare * entries, few)
    np.testing.assert_array_equal(eliminated(filled), filled)
    columns = [set(at.columns[at.column_ptr[p] : at.column_ptr[p + 1]].tolist()) for p in range(len(at.own))]
    for p, own in enumerate(at.own):
        rows, lefts = range(at.first[p], at.first[p + 1]), at.left[at.left_ptr[p] : at.left_ptr[p + 1]]
        assert 1 <= len(rows) <= 4
        kept = at.columns[at.column_ptr[p] : at.column_ptr[p + 1]]
        assert sorted(columns[p]) == kept.tolist() and [*kept[own : own + len(rows)]] == [*rows]
        for row in rows:
            assert {*np.flatnonzero(filled[row, rows[0] if half else 0 :]) + (rows[0] if half else 0)} <= columns[p]
            assert {*np.flatnonzero(filled[row, rows[-1] + 1 :]) + rows[-1] + 1} == {*kept[own + len(rows) :]}
        whole = [c for q in lefts for c in range(at.first[q], at.first[q + 1])]
        assert [*kept[:own]] == ([] if half else whole)
        for q in lefts:
            assert {c for c in columns[q] if c >= (rows[0] if half else at.first[q + 1])} <= columns[p]
        assert {*np.flatnonzero(filled[rows[0] : rows[-1] + 1, : rows[0]].any(axis=0))} <= {*whole}
    assert [at.tasks[0], at.tasks[-1]] == [0, len(at.own)] and (np.diff(at.tasks) > 0).all()
    assert plan.fill == at.base[-1] == sum(len(c) * r for c, r in zip(columns, np.diff(at.first), strict=True))


@given(n=sizes(0, 40), density=st.sampled_from([0.0, 0.02, 0.05, 0.1, 0.3]), seed=seeds)
def test_supernodes_of_a_tree_are_those_of_all_entries(n, density, seed):
    """A symmetric pattern has the same supernodes, found from its elimination tree or row by row."""
    mask = np.random.default_rng(seed).random((n, n)) < density
    pattern = of_mask(mask | mask.T | np.eye(n, dtype=bool))
    order, _ = ordering.order_diagonal(pattern, None, symmetric=True)
    place, heads = np.argsort(order).astype(np.int32), np.arange(n + 1)
    tree, rows = (elimination._supernodes(pattern, order, place, heads, symmetric) for symmetric in (True, False))
    for name, one, other in zip(tree._fields, tree, rows, strict=True):
        np.testing.assert_array_equal(one, other, name)


@pytest.mark.parametrize("given_values", [False, True])
@pytest.mark.parametrize("order", ["natural", "minimum_degree", "nested_dissection", "permutation"])
@pytest.mark.parametrize("name", ["grid", "unsymmetric", "saddle point", "empty", "one"])
def test_orders_that_are_asked_for(name, order, given_values):
    """Every order gives solutions as accurate as SuperLU's; one without fill is kept as it is."""
    if order == "nested_dissection":
        pytest.importorskip("pymetis")
    rng = np.random.default_rng(0)
    matrix = {
        "grid": lambda: laplacian(9, 7), "empty": lambda: sp.csr_array((0, 0)), "one": lambda: sp.csr_array([[3.0]]),
        "unsymmetric": lambda: sp.random_array((40, 40), density=0.1, rng=rng) + 9 * sp.eye_array(40),
        "saddle point": lambda: sp.block_array([[sp.eye_array(20), np.ones((20, 3)) * rng.random((20, 3))],
                                                [rng.random((3, 20)), None]]),
    }[name]()  # fmt: skip
    if name == "saddle point" and not given_values:
        return
    pattern, values = pattern_of(matrix)
    n = pattern.shape[0]
    wanted = rng.permutation(n) if order == "permutation" else order
    plan = plan_factor(pattern, values if given_values else None, order=wanted)
    b = rng.standard_normal(n)
    assert_as_small_as_superlu(dense(pattern, values), plan(values).solve(b), b)
    if name == "grid" and order in ("natural", "permutation"):
        assert plan.fill > plan_factor(pattern).fill


def test_nested_dissection_where_it_saves_work(monkeypatch):
    """Large matrices get the order that takes fewer operations: of a cube nested dissection, of a line another."""
    pytest.importorskip("pymetis")
    monkeypatch.setattr(ordering, "LARGE", 0)
    for matrix in (laplacian(9, 9, 9), line(50)):
        pattern, _ = pattern_of(matrix)
        degree, dissected = (
            plan_factor(pattern, order=order).flops for order in ("minimum_degree", "nested_dissection")
        )
        assert dissected != degree
        assert plan_factor(pattern).flops == min(degree, dissected)


def test_pivots_on_the_diagonal_where_they_are_good():
    """An arrow pattern fills up if its head goes first, which partial pivoting would have here."""
    n = 50
    matrix = sp.lil_array((n, n))
    matrix.setdiag(1.0)
    matrix[n - 1], matrix[:, n - 1] = 0.5, 1.5
    matrix[n - 1, n - 1] = 99.0
    pattern, values = pattern_of(matrix)
    plan = plan_factor(pattern, values)
    assert plan.fill < 4 * n and list(plan.rows) == list(plan.columns)
    values[pattern.row_of_entry == pattern.indices] = 1e-6
    plan = plan_factor(pattern, values)
    assert list(plan.rows) != list(plan.columns)
    assert plan(values).growth < 100  # 1e6 on the diagonal


def test_orders_and_sizes():
    """Rows and columns are permutations, and L + U of a line has no entry that the line has not."""
    pattern, values = pattern_of(line(50))
    for plan in (plan_factor(pattern), plan_factor(pattern, values)):
        assert sorted(plan.rows) == sorted(plan.columns) == [*range(50)]
        assert pattern.nnz <= plan.fill <= pattern.nnz + 4
        assert plan.flops > 0
        assert "148" in repr(plan) and "one matrix" in repr(plan(values))


def test_rows_of_very_different_sizes_are_ordered_for_their_pivots():
    """The order of minimum degree, with pivots near the diagonal, loses all digits of this matrix."""
    matrix = sp.csr_array([[1e11, -2e11, -1e11], [10, 20, -10], [0, 0, 2e-25]])
    pattern = SparsityPattern.from_scipy(matrix)
    factors = plan_factor(pattern, matrix.data)(matrix.data)
    np.testing.assert_allclose(factors.solve(matrix @ [1.0, 2, 3]), [1, 2, 3], rtol=1e-12)
