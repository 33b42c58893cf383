"""Concat against torch, and matrices side by side against NumPy."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.jacobians import TransposedJacobian
from sparsebp.patterns import SparsityPattern, plan_concatenation
from strategies import csr_patterns, normal, reals, seeds, sizes


def test_gy_is_not_written_to():
    layer = nn.Concat(nn.Identity(), nn.Identity())
    _, saved = layer.forward(np.ones((2, 3), np.float32))
    gy = np.ones((2, 6), np.float32)
    np.testing.assert_array_equal(layer.input_grad(gy, saved), np.full((2, 3), 2))
    np.testing.assert_array_equal(gy, 1)


@given(
    first=csr_patterns(columns=sizes(0, 7)), others=st.lists(sizes(0, 7), max_size=3), batch=sizes(0, 5),
    shared=st.lists(st.booleans(), min_size=4, max_size=4), dtype=reals, seed=seeds,
)  # fmt: skip
def test_side_by_side(first, others, batch, shared, dtype, seed):
    rng = np.random.default_rng(seed)
    rows = first[2][0]
    patterns = [SparsityPattern(*first)]
    for columns in others:
        there = rng.random((rows, columns)) < 0.5
        indptr = np.concatenate([[0], np.cumsum(there.sum(axis=1))])
        patterns.append(SparsityPattern(indptr, np.nonzero(there)[1], (rows, columns)))
    data = [normal(rng, (p.nnz,) if one else (p.nnz, batch), dtype) for p, one in zip(patterns, shared, strict=False)]
    plan = plan_concatenation(*patterns)
    assert plan is plan_concatenation(*patterns)
    SparsityPattern(plan.pattern.indptr, plan.pattern.indices, plan.pattern.shape)  # canonical
    whole = TransposedJacobian(plan.pattern, plan(*data))
    assert whole.dtype == dtype and (whole.batch is None) == all(shared[: len(patterns)])
    for b in range(1 if whole.batch is None else whole.batch):
        parts = [TransposedJacobian(p, d).to_dense(b) for p, d in zip(patterns, data, strict=True)]
        np.testing.assert_array_equal(whole.to_dense(b), np.concatenate(parts, axis=1))


def test_what_does_not_fit_is_refused():
    diagonal = SparsityPattern.diagonal(3)
    with pytest.raises(ShapeError, match="one number of rows"):
        plan_concatenation(diagonal, SparsityPattern.diagonal(2))
    with pytest.raises(ShapeError, match="one number of rows"):
        plan_concatenation()
    plan = plan_concatenation(diagonal, diagonal)
    with pytest.raises(ShapeError, match="do not fit the parts"):
        plan(np.ones(3), np.ones(2))
    with pytest.raises(DTypeError, match="different dtypes"):
        plan(np.ones(3), np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="batch sizes"):
        plan(np.ones((3, 2)), np.ones((3, 4)))


@pytest.mark.parametrize("kind", [nn.Concat, nn.Sum])
@pytest.mark.parametrize("order", ["input first", "weights first", "both at once"])
def test_branches_compute_what_both_gradients_need_once(order, kind, monkeypatch):
    """As two streams do: I and W of one forward, in any order or at the same time."""
    rng = np.random.default_rng(0)
    layer = kind(nn.Identity(), nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1, rng=1)))
    x = rng.standard_normal((2, 2, 4, 4)).astype(np.float32)
    y, saved = layer.forward(x)
    gy = rng.standard_normal(y.shape).astype(np.float32)
    want = layer.input_grad(gy, layer.forward(x)[1]), layer.weight_grad(gy, layer.forward(x)[1])
    calls = []
    inner = nn.Conv2d.input_grad
    monkeypatch.setattr(nn.Conv2d, "input_grad", lambda *a: calls.append(threading.get_ident()) or inner(*a))
    gradients = layer.gradients(gy, saved)
    with ThreadPoolExecutor(2) as pool:
        jobs = [gradients.input_grad, gradients.weight_grad]
        futures = [pool.submit(job) for job in (reversed(jobs) if order == "weights first" else jobs)]
        if order != "both at once":
            futures[0].result()
        got = sorted((future.result() for future in futures), key=lambda result: isinstance(result, dict))
    assert len(calls) == 1
    np.testing.assert_array_equal(got[0], want[0])
    for name, grad in want[1].items():
        np.testing.assert_array_equal(got[1][name], grad)
