"""The benchmark of sparse products: targets, bytes and peers."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
from numpy.testing import assert_allclose

from benchmarks import harness, spgemm
from benchmarks.workloads import Pair
from sparsebp import SparsityPattern
from sparsebp.core.errors import MissingDependencyError
from sparsebp.products.product import candidates_of_structure, plan_by


def matrix(m: int, n: int, seed: int) -> sp.csr_array:
    return sp.random_array((m, n), density=0.2, format="csr", dtype=np.float32, rng=np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("measured", "targets", "outcome"),
    [
        ({"scipy": 25.0, "mkl_numeric": 6.0}, {"scipy": 25, "mkl_numeric": 6}, "met"),
        ({"scipy": 26.0, "mkl_numeric": 5.9}, {"scipy": 25, "mkl_numeric": 6}, "missed: MKL numeric-only"),
        ({"scipy": 24.0}, {"scipy": 25, "mkl_numeric": 6}, "missed: SciPy"),
        ({"scipy": 25.0}, {"scipy": 25, "mkl_numeric": 6}, "met; MKL numeric-only not measured"),
        ({"scipy": 1.0}, {}, None),
    ],
)
def test_targets_are_judged_by_the_median(
    measured: dict[str, float], targets: dict[str, float], outcome: str | None
) -> None:
    row = {f"{side}_ratio": {"median": times} for side, times in measured.items()}
    assert spgemm.judge_spgemm(row, targets)["met"] == outcome


@pytest.mark.parametrize("strategy", ["positions", "pairs"])
def test_every_array_of_a_call_is_counted_once(strategy: str) -> None:
    a, b = matrix(30, 40, 0), matrix(40, 20, 1)
    ways = candidates_of_structure(SparsityPattern.from_scipy(a), SparsityPattern.from_scipy(b))
    plan = plan_by(next(way for way in ways if way.name == strategy))
    out = plan(a.data, b.data)
    indices = 4 * (31 + a.nnz + 41 + 31) if strategy == "positions" else 0  # pairs tell where, without the patterns
    arrays = sum(array.nbytes for array in plan.arrays.values())
    assert spgemm.bytes_moved(plan, a.data, b.data, out) == 4 * (a.nnz + b.nnz + len(out)) + indices + arrays


def test_the_copy_rate_is_a_rate() -> None:
    assert 1e8 < harness.copy_bandwidth(1, repeats=1) < 1e13


def test_mkl_computes_values_into_the_structure_that_it_keeps() -> None:
    if spgemm.load() is None:
        pytest.skip("MKL is not installed")
    a, b = matrix(50, 60, 0), matrix(60, 40, 1)
    product = spgemm.MklProduct(a, b)
    product.fresh()
    assert_allclose(product.result().toarray(), (a @ b).toarray(), rtol=1e-5)
    product._kept[2][:] = 2  # the values of A, in place
    product.values()
    a.data[:] = 2
    assert_allclose(product.result().toarray(), (a @ b).toarray(), rtol=1e-5)


def test_missing_peers_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spgemm, "load", lambda: None)
    monkeypatch.setattr(harness, "optional", lambda name: None)
    notes: list[str] = []
    (scipy,) = spgemm.sparse_peers(notes.append)
    assert [note.split(":")[0] for note in notes] == ["MKL", "GraphBLAS"]
    a, b = matrix(5, 6, 0), matrix(6, 4, 1)
    assert_allclose(scipy(Pair("", a, b, {}))["scipy"]().toarray(), (a @ b).toarray())
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[peers\]"):
        spgemm.MklProduct(a, b)
    with spgemm.using_threads_too(1):
        pass
