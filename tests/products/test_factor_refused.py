"""Matrices without factors, and arguments that do not fit: what is refused, and by which message."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import structural_rank

from matrices import of_mask
from products.factor_gallery import backward_error, laplacian, pattern_of
from sparsebp import SparsityPattern, plan_factor
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, OptionError, PatternError, PivotError, ShapeError
from strategies import reals, seeds, sizes


def test_matrices_that_are_not_hermitian_are_refused():
    pattern, good = SparsityPattern.dense(2, 2), np.array([4, 1 + 1j, 1 - 1j, 5])
    for kind in ("cholesky", "ldlt"):
        plan = plan_factor(pattern, kind=kind)
        x = plan(sp.csr_array(good.reshape(2, 2))).solve(good[:2])
        np.testing.assert_allclose(good.reshape(2, 2) @ x, good[:2])
        with pytest.raises(PivotError, match=r"not Hermitian.* in row 0, column 1"):
            plan(sp.csr_array(np.array([[4, 1 + 1j], [1 + 1j, 5]])))
        with pytest.raises(PivotError, match=r"not Hermitian.*\(5\+1j\) in row 1, in sample 1") as caught:
            plan(np.stack([good, good + np.array([0, 0, 0, 1j])], axis=1))
        assert caught.value.samples == (1,)
    with pytest.raises(PivotError, match=r"not positive definite.*first in row 1"):
        plan_factor(pattern, kind="cholesky")(np.array([1, 2j, -2j, 1]))
    for wrong, message in ((np.array([1, 1j, 1j, -1]), "singular"), (np.array([1, np.nan * 1j, 0, 1]), "not finite")):
        with pytest.raises(PivotError, match=message):
            plan_factor(pattern)(wrong)
    with pytest.raises(PivotError, match=r"row 1"):
        plan_factor(pattern)(np.stack([good, np.array([1, 1, 0, 0j])], axis=1))


SINGULAR: dict[str, Callable[[], Any]] = {
    "zero": lambda: np.zeros((3, 3)) * sp.eye_array(3),
    "no entries": lambda: sp.csr_array((4, 4)),
    "a zero row": lambda: [[1.0, 2.0], [0.0, 0.0]],
    "a zero column": lambda: [[1.0, 0.0], [2.0, 0.0]],
    "structurally": lambda: [[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]],
    "equal rows": lambda: [[1.0, 2.0, 3.0], [4.0, 5.0, 7.0], [1.0, 2.0, 3.0]],
    "Neumann": lambda: laplacian(8, 8) - sp.diags_array(laplacian(8, 8).sum(axis=1)),
    "rank one": lambda: np.outer([1.0, 3.0, 7.0], [0.1, 0.3, 0.7]),
    "NaN": lambda: [[1.0, np.nan], [0.0, 1.0]],
    "infinite": lambda: [[1.0, 0.0], [np.inf, 1.0]],
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_values_are_refused(name):
    """By the plan, or by its call."""
    pattern, values = pattern_of(SINGULAR[name]())
    with pytest.raises(PivotError) as caught:
        plan_factor(pattern, values)(values)
    assert caught.value.samples == ()


NAMED = {
    "zero": "row 0",
    "no entries": "row 0",
    "a zero row": "row 1",
    "a zero column": "column 1",
    "structurally": "row [12]",
    "equal rows": "row [02], a combination",
    "Neumann": r"row \d+, a combination",
    "rank one": "row [012], a combination",
    "NaN": "nan.*, first in row 0, column 1",
    "infinite": "inf.*, first in row 1, column 0",
}


@pytest.mark.parametrize("name", SINGULAR)
@pytest.mark.parametrize("way", ["pattern", "matrix", "batch"])
def test_messages_name_a_row_of_singular_values(name, way):
    """At planning, and at a call of a plan that was made for others."""
    matrix = sp.csr_array(SINGULAR[name]())
    with pytest.raises(PivotError, match=NAMED[name]) as caught:
        if way == "matrix":
            plan_factor(matrix)(matrix)
        else:
            pattern, values = pattern_of(matrix + sp.csr_array(np.zeros(matrix.shape)))
            pattern = SparsityPattern.dense(*matrix.shape)
            plan, values = plan_factor(pattern), pattern.values_of(matrix)
            good = plan.pattern.values_of(sp.csr_array(np.eye(len(plan.rows))))
            plan(np.stack([good, values, good], axis=1) if way == "batch" else values)
    assert "nan times" not in str(caught.value)
    assert caught.value.samples == ((1,) if way == "batch" else ())


def test_a_row_that_depends_on_others_is_found_among_many():
    matrix = sp.lil_array(laplacian(15, 15) + 0.1 * sp.eye_array(225))
    matrix[17] = matrix[40] + 2 * matrix[100]
    plan = plan_factor(sp.csr_array(matrix + 0.01 * sp.eye_array(225)))
    with pytest.raises(PivotError, match=r"singular to working precision.*row (17|40|100), a combination"):
        plan(matrix)


@given(n=sizes(1, 40), per_row=st.sampled_from([1.5, 2.5, 4.0]), symmetric=st.booleans(), seed=seeds)
@settings(max_examples=60)
def test_structures_without_a_pivot_for_each_row_are_named(n, per_row, symmetric, seed):
    """SuperLU may crash on them. The rank is SciPy's; the row that is named is one too many."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n, n)) < per_row / n
    mask |= mask.T & symmetric
    mask[np.arange(n), rng.integers(n, size=n)] = True  # no row is empty, no column
    mask[rng.integers(n, size=n), np.arange(n)] = True
    matrix = sp.csr_array(rng.standard_normal((n, n)) * mask)
    if structural_rank(matrix) == n:
        try:
            plan_factor(matrix)(matrix)
        except PivotError as error:
            assert "no column left" not in str(error)
        return
    with pytest.raises(PivotError, match=r"no column left for the pivot of row \d+") as caught:
        plan_factor(matrix)
    row = int(re.search(r"row (\d+)", str(caught.value))[1])
    assert structural_rank(matrix[np.arange(n) != row]) == structural_rank(matrix)


def test_cholesky_factors_of_matrices_want_both_triangles():
    """An array of values is read above the diagonal alone; a triangle of zeros in a matrix would go unseen."""
    matrix = sp.csr_array(laplacian(3, 3))
    plan = plan_factor(matrix, kind="cholesky")
    noisy = matrix.copy()
    noisy.data *= 1 + 1e-14 * np.random.default_rng(0).standard_normal(noisy.nnz)
    np.testing.assert_allclose(plan(noisy).solve(np.ones(9)), plan(matrix).solve(np.ones(9)))
    for wrong in (sp.tril(matrix), sp.triu(matrix), matrix + sp.csr_array(([0.1], ([0], [1])), shape=(9, 9))):
        with pytest.raises(PivotError, match=r"not symmetric.* in row 0, column 1, .* across"):
            plan(wrong)


INDEFINITE: dict[str, Callable[[], Any]] = {
    "indefinite": lambda: [[1.0, 2.0], [2.0, 1.0]],
    "negative": lambda: -laplacian(3, 5),
    "semidefinite": lambda: laplacian(8, 8) - sp.diags_array(laplacian(8, 8).sum(axis=1)),
    "rank one": lambda: np.outer([1.0, 3.0, 7.0], [1.0, 3.0, 7.0]),
    "zero": lambda: sp.csr_array((np.zeros(3), np.arange(3), np.arange(4)), shape=(3, 3)),
    "almost zero": lambda: [[1.0, 1.0], [1.0, 1 + 1e-16]],
    "NaN": lambda: [[1.0, np.nan], [np.nan, 1.0]],
    "infinite": lambda: [[np.inf, 0.0], [0.0, 1.0]],
    "infinite pivot": lambda: [[1.0, 1e200], [1e200, 1.0]],
}


@pytest.mark.parametrize("name", INDEFINITE)
def test_values_that_are_not_positive_definite_are_refused(name):
    """Alone and in a batch of good ones."""
    pattern, values = pattern_of(INDEFINITE[name]())
    plan = plan_factor(pattern, kind="cholesky")
    with pytest.raises(PivotError, match=r"not positive definite to working precision.*first in row"):
        plan(values)
    good = np.where(pattern.row_of_entry == pattern.indices, 9.0, 1.0 / pattern.shape[0])
    batch = np.stack([good, good, values, good], axis=1)
    with pytest.raises(PivotError, match=r"1 of 4 matrices .* samples 2, first in row") as caught:
        plan(batch)
    assert caught.value.samples == (2,)


def test_the_first_pivot_that_is_not_positive_is_named():
    pattern, values = pattern_of(sp.block_diag([laplacian(3, 3), [[1.0, 3.0], [3.0, 2.0]], np.eye(2)]))
    with pytest.raises(PivotError, match=r"first in row (9|10)"):
        plan_factor(pattern, kind="cholesky")(values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bad_samples_are_named_and_spare_the_others(dtype):
    """Zero pivots, NaN anywhere, overflow: those samples and no others."""
    pattern, values = pattern_of(laplacian(6, 6))
    batch, plan = np.repeat(values[:, None], 21, axis=1).astype(dtype), plan_factor(pattern)
    good = plan(batch)
    batch[:, 3] = 0
    batch[0, 8], batch[-1, 9], batch[1, 20] = np.nan, np.nan, np.nan
    batch[:, 11] *= np.finfo(dtype).max
    with pytest.raises(PivotError, match="5 of 21 matrices cannot be factorised") as caught:
        plan(batch)
    assert caught.value.samples == (3, 8, 9, 11, 20)
    assert "3, 8, 9, 11, 20" in str(caught.value)
    kept = [s for s in range(21) if s not in caught.value.samples]
    b = np.ones((36, 21), dtype)
    fewer = plan(np.ascontiguousarray(batch[:, kept])).solve(b[:, : len(kept)].copy())
    np.testing.assert_array_equal(fewer, good.solve(b)[:, kept])


@pytest.mark.parametrize("kind", ["lu", "cholesky", "ldlt"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ends_of_a_dtype_are_named(kind, dtype):
    """At the bound itself, where a row's sum alone overflows, and of a definite matrix with one small pivot."""
    numbers = np.finfo(dtype)
    low = numbers.tiny / numbers.eps
    for matrix in (low * np.eye(3), numbers.max / 4 * (0.9 + 0.1 * np.eye(5))):
        with pytest.raises(PivotError, match=r"near an end of .* in row 0"):
            plan_factor(SparsityPattern.dense(*matrix.shape), kind=kind)(matrix.astype(dtype).ravel())
    pattern, values = SparsityPattern.dense(2, 2), np.array([low / 2, low**0.5 / 2, low**0.5 / 2, 1], dtype)
    if kind == "cholesky":
        with pytest.raises(PivotError, match=r"near an end of .* in row 0"):
            plan_factor(pattern, kind=kind)(values)
    else:
        plan_factor(pattern, kind=kind)(values)


def test_nan_above_the_diagonal_is_refused():
    """No pivot depends on it."""
    pattern = of_mask(np.triu(np.ones((5, 5))))
    plan = plan_factor(pattern)
    for at in range(pattern.nnz):
        values = np.ones((pattern.nnz, 9))
        values[at, 4] = np.nan
        with pytest.raises(PivotError) as caught:
            plan(values)
        assert caught.value.samples == (4,)
        with pytest.raises(PivotError):
            plan(np.ascontiguousarray(values[:, 4]))


@given(exponent=st.integers(1, 300), dtype=reals)
def test_other_pivots_are_refused_before_digits_are_lost(exponent, dtype):
    """[[p, 1], [1, 1]] with p on the diagonal: right while p is not too small, refused then, and well planned anew."""
    pivot = dtype.type(10.0**-exponent)
    pattern, values = SparsityPattern.dense(2, 2), np.array([pivot, 1, 1, 1], dtype)
    eps, b = float(np.finfo(dtype).eps), np.array([1, 2], dtype)
    matrix = values.reshape(2, 2)
    try:
        factors = plan_factor(pattern)(values)
    except PivotError as error:
        assert pivot < 2 * eps**0.5
        assert "Plan again with these values" in str(error) or not pivot
        x = plan_factor(pattern, values)(values).solve(b)
        assert backward_error(matrix, x, b) <= 4 * eps
    else:
        assert backward_error(matrix, factors.solve(b), b) <= 4 * eps**0.5
        assert backward_error(matrix, factors.refine(b, factors.solve(b), steps=3), b) <= 4 * eps


def test_a_plan_with_values_takes_their_pivots():
    """And a batch with other values is refused by name."""
    small, large = np.array([1e-12, 1.0, 1.0, 1e-12]), np.array([1.0, 0.5, 0.5, 1.0])
    pattern, batch = SparsityPattern.dense(2, 2), np.stack([small, large, small], axis=1)
    plan = plan_factor(pattern, large)
    assert plan(large).growth < 3
    with pytest.raises(PivotError, match=r"2 of 3 matrices .* samples 0, 2\..*values\[:, 0\]") as caught:
        plan(batch)
    assert caught.value.samples == (0, 2)
    assert plan_factor(pattern, small)(small).growth < 3


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [1, 2, 3], np.arange(3.0), "METIS", 3])
def test_what_is_no_order_is_refused(order):
    with pytest.raises(OptionError, match="order"):
        plan_factor(SparsityPattern.dense(3, 3), order=order)


def test_wrong_plans():
    square = SparsityPattern.dense(3, 3)
    for error, pattern, values in [
        (PatternError, np.eye(3), None), (ShapeError, SparsityPattern.dense(3, 4), None),
        (PatternError, of_mask([[1, 1], [1, 0]]), None), (ShapeError, square, np.ones(8)),
        (ShapeError, square, np.ones((9, 1))), (DTypeError, square, np.ones(9, int)),
        (LayoutError, square, np.ones(18)[::2]), (DTypeError, square, [1.0] * 9),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(pattern, values)
    for error, pattern, values, kind in [
        (OptionError, square, None, "Cholesky"), (OptionError, square, np.ones(9), "cholesky"),
        (PatternError, of_mask([[1, 1], [0, 1]]), None, "cholesky"),
        (PatternError, of_mask(np.kron([[1, 1], [0, 1]], np.ones((3, 3)))), None, "cholesky"),
        (PatternError, of_mask([[1, 1], [1, 0]]), None, "cholesky"),
        (OptionError, square, np.ones(9), "ldlt"), (PatternError, of_mask([[1, 1], [1, 0]]), None, "ldlt"),
        (PatternError, of_mask([[1, 1, 0], [0, 1, 0], [0, 1, 1]]), None, "ldlt"),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(pattern, values, kind=kind)
    for error, options in [
        (OptionError, {"signs": [1, 1, 1]}), (OptionError, {"regularize": 1e-8, "kind": "cholesky"}),
        (ShapeError, {"signs": [1, 1], "kind": "ldlt"}), (OptionError, {"signs": [1, 2, 1], "kind": "ldlt"}),
        (OptionError, {"regularize": -1.0, "kind": "ldlt"}), (OptionError, {"regularize": "1", "kind": "ldlt"}),
    ]:  # fmt: skip
        with pytest.raises(error):
            plan_factor(square, **options)


def test_wrong_arguments():
    plan = plan_factor(SparsityPattern.dense(3, 3))
    values = (np.ones((3, 3)) + 9 * np.eye(3)).ravel()
    one, batch = plan(values), plan(np.repeat(values[:, None], 2, axis=1))
    for error, call in [
        (ShapeError, lambda: plan(np.ones(8))), (ShapeError, lambda: plan(np.ones((9, 2, 1)))),
        (DTypeError, lambda: plan(np.ones(9, np.float16))), (LayoutError, lambda: plan(np.ones(18)[::2])),
        (DTypeError, lambda: plan([1.0] * 9)),
        (ShapeError, lambda: one.solve(np.ones(4))), (ShapeError, lambda: one.solve(np.ones((3, 1, 1)))),
        (DTypeError, lambda: one.solve(np.ones(3, np.float32))), (LayoutError, lambda: one.solve(np.ones(6)[::2])),
        (DTypeError, lambda: one.solve([1.0] * 3)), (ShapeError, lambda: batch.solve(np.ones((3, 3)))),
        (ShapeError, lambda: one.refine(np.ones(3), np.ones((3, 1)))),
        (DTypeError, lambda: one.refine(np.ones(3), np.ones(3, np.float32))),
        (ShapeError, lambda: batch.refine(np.ones(3), np.ones(3))),
        (OptionError, lambda: one.refine(np.ones(3), np.ones(3), steps=0)),
        (OptionError, lambda: one.solve(np.ones(3), transposed=1)), (OptionError, lambda: one.solve(np.ones(3), "C")),
        (OptionError, lambda: plan(values, out=batch)), (OptionError, lambda: plan(values, out=1)),
        (OptionError, lambda: plan(values.astype(np.float32), out=one)),
        (OptionError, lambda: plan_factor(plan.pattern)(values, out=one)),
    ]:  # fmt: skip
        with pytest.raises(error):
            call()


def test_arrays_on_a_device_are_refused(monkeypatch):
    class Device:
        dtype, shape, ndim = np.dtype(float), (9,), 1

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=Device, __name__="cupy"))
    plan = plan_factor(SparsityPattern.dense(3, 3))
    factors = plan((np.ones((3, 3)) + np.eye(3)).ravel())
    for call in (lambda: plan_factor(plan.pattern, Device()), lambda: plan(Device()), lambda: factors.solve(Device())):
        with pytest.raises(DeviceError, match="is on a device, and factors are computed on the host"):
            call()
