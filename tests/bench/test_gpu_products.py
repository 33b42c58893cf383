"""Sparse products beside cuSPARSE's, on the stand-in: structure once, values that change, and what it must be given."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import pytest

import strict_cupy
from backends import make_backend, needs_numba
from benchmarks import gpu_products
from benchmarks.gpu_derivatives import DerivativePoint, measure_derivative
from benchmarks.gpu_products import CusparseProduct, ProductPoint, measure_product, planned
from sparsebp.core.errors import DeviceError, SparseBPError
from strict_cupy.cusparse import LIBRARY

pytestmark = pytest.mark.gpu
ONCE = {"rounds": 1, "least_rounds": 1, "warmup": 1, "copies": 2}


@pytest.fixture
def cupy() -> Any:
    needs_numba("products are planned with it")
    return make_backend("gpu").xp


@pytest.fixture
def library(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's, with nothing open."""
    if not strict_cupy.installed():
        pytest.skip("what the stand-in alone has")
    monkeypatch.setattr(LIBRARY, "_open", {})
    return LIBRARY


def product_of(cupy: Any, name: str = "random, 8 a row") -> tuple[CusparseProduct, Any]:
    """Return cuSPARSE's product of random values, and the plan of ours."""
    plan = planned(name, 16).plan
    data = [
        cupy.asarray(np.random.default_rng(nnz).standard_normal(nnz, np.float32)) for nnz in (plan.a.nnz, plan.b.nnz)
    ]
    return CusparseProduct(cupy, plan.a, plan.b, *data), plan


@pytest.mark.parametrize("name", gpu_products.PRODUCTS)
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_compares_a_sample_with_cusparses_product(name: str, batch: int, cupy: Any) -> None:
    row = measure_product(ProductPoint("spgemm", name, 16, batch), cupy, ONCE)
    assert row["stale"] is False and "uncompared" not in row
    assert row["multiplications"] == planned(name, 16).plan.products
    expected = row["cusparse"]["all"][0] * batch / row["time"]["all"][0]
    assert row["cusparse_ratio"]["median"] == pytest.approx(expected)
    for side in ("time", "cusparse"):
        assert row[side]["queued"] and {"host", "hertz"} <= row[side].keys()
    assert row["plan_seconds"] > 0 and row["cusparse_plan_seconds"] > 0


def test_a_derivative_is_compared_with_the_hosts(cupy: Any) -> None:
    row = measure_derivative(DerivativePoint("derivative", 30), cupy, ONCE)
    assert row["host_loops_ratio"]["median"] > 0 and "CUDA kernels" in row["strategy"]


@pytest.mark.parametrize("name", gpu_products.PRODUCTS)
def test_values_that_change_change_the_product(name: str, cupy: Any) -> None:
    import scipy.sparse as sp

    theirs, plan = product_of(cupy, name)
    for _ in range(3):
        theirs.values()
        a, b = (sp.csr_array((values.get(), pattern.indices, pattern.indptr), pattern.shape)
                for values, pattern in zip(theirs.data, (plan.a, plan.b), strict=True))  # fmt: skip
        np.testing.assert_allclose(theirs.result().toarray(), (a @ b).toarray(), rtol=1e-4, atol=1e-5)
        theirs.data[0][...] = theirs.data[0] * 2 + 1
        theirs.data[1][...] = 3 - theirs.data[1]


def test_a_library_that_keeps_old_values_is_told(library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "stale", True)
    row = measure_product(ProductPoint("spgemm", "Poisson, A·P", 8, 3), cupy, ONCE)
    assert row["stale"] is True and "cusparse_ratio" not in row and row["cusparse"]["median"] > 0


def test_a_product_that_is_wrong_from_the_start_is_not_timed(
    library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_products, "_ONE", ctypes.c_float(1.5))
    with pytest.raises(SparseBPError, match="differs from cuSPARSE's"):
        measure_product(ProductPoint("spgemm", "Poisson, A·P", 8, 1), cupy, ONCE)


def test_without_the_library_ours_is_measured_alone(library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_products, "_LIBRARY", "libcusparse.so.0")
    row = measure_product(ProductPoint("spgemm", "Poisson, A·P", 8, 1), cupy, ONCE)
    assert row["uncompared"].startswith("MissingDependencyError: cuSPARSE cannot be loaded")
    assert row["time"]["median"] > 0 and "cusparse" not in row and "stale" not in row


def test_everything_is_destroyed(library: Any, cupy: Any) -> None:
    theirs, _ = product_of(cupy)
    assert len(library._open) == 5
    del theirs
    gc.collect()
    assert not library._open


def test_buffers_that_it_still_needs_must_stay(library: Any, cupy: Any) -> None:
    theirs, _ = product_of(cupy)
    theirs.values()
    theirs._kept = []
    gc.collect()
    with pytest.raises(RuntimeError, match="given buffer 4"):
        theirs.values()


def test_buffers_must_be_as_large_as_asked_for(library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = cupy.empty
    monkeypatch.setattr(cupy, "empty", lambda n, dtype: empty(n - (dtype is np.uint8), dtype))
    with pytest.raises(RuntimeError, match="given buffer 1, of 512 bytes"):
        product_of(cupy)


@pytest.mark.parametrize(("constant", "wrong", "status"), [
    ("_INDEX_32", 3, 10), ("_REAL_32", 4, 3), ("_AS_IT_IS", 1, 10), ("_DEFAULT", 3, 10),
])  # fmt: skip
def test_arguments_are_those_that_cusparse_knows(
    constant: str, wrong: int, status: int, library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_products, constant, wrong)
    with pytest.raises(DeviceError, match=f"failed.*{status}"):
        product_of(cupy)


@pytest.mark.parametrize("left_out", ["workEstimation", "nnz", "copy"])
def test_stages_come_in_their_order(left_out: str, library: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, f"cusparseSpGEMMreuse_{left_out}", lambda *args: 0)
    with pytest.raises(DeviceError, match=r"cusparse\w+ failed.*3"):
        product_of(cupy)[0].values()


def test_other_matrices_need_a_structure_of_their_own(library: Any, cupy: Any) -> None:
    theirs, _ = product_of(cupy)
    theirs._matrices = [*theirs._matrices[1::-1], theirs._matrices[2]]
    with pytest.raises(DeviceError, match=r"cusparseSpGEMMreuse_compute failed.*3"):
        theirs.values()


def test_on_the_host_there_is_no_peer() -> None:
    needs_numba("products are planned with it")
    row = measure_product(ProductPoint("spgemm", "Poisson, A·P", 8, 2), np, {"rounds": 1, "least_rounds": 1})
    assert "cuSPARSE multiplies on a GPU" in row["uncompared"] and row["time"]["median"] > 0
