"""Sparse products on a fixed pattern on a GPU, in turn with cuSPARSE's SpGEMMreuse: rows of ``gpu-numbers``.

Both make the structure once, outside of the time that is compared, and then compute values alone. cuSPARSE has no batch
of values: a sample of ours stands against one product of theirs. Before anything is timed the values change, and a row
says where cuSPARSE's product did not follow: hipSPARSE's kept the old one (ROCm/rocm-libraries#8913).
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.gpu_timing import measured, ratio
from benchmarks.harness import Row
from benchmarks.spgemm import difference
from benchmarks.workloads import poisson, prolongation, pruned_convolutions, random_rows
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, MissingDependencyError
from sparsebp.patterns import SparsityPattern
from sparsebp.products import ProductPlan, plan_product


class ProductPoint(NamedTuple):
    """A product, one of `PRODUCTS`, of this size, for values of a batch."""

    what: str
    product: str
    size: int
    batch: int


def _poisson(n: int) -> tuple[Any, Any]:
    fine = poisson(n, n)
    return fine, prolongation(fine)


PRODUCTS: dict[str, Callable[[int], tuple[Any, Any]]] = {
    "Poisson, A·P": _poisson,
    "random, 8 a row": lambda n: (random_rows(n, n, 8, seed=1), random_rows(n, n, 8, seed=2)),
    "pruned conv · pruned conv": lambda channels: pruned_convolutions(channels, channels // 2, keep=0.03),
}
"""The factors, SciPy's, by size: points of a line, rows, channels."""
SMALL = 16
"""Size of a product that is planned to load what plans."""


class _Planned(NamedTuple):
    plan: ProductPlan
    seconds: float  # that the plan took


@cache
def planned(product: str, size: int) -> _Planned:
    """Plan a product; all batches have the same plan."""
    a, b = (SparsityPattern.from_scipy(factor) for factor in PRODUCTS[product](size))
    start = time.perf_counter()
    plan = plan_product(a, b)
    return _Planned(plan, time.perf_counter() - start)


def measure_product(point: ProductPoint, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time a call of the plan beside cuSPARSE's product of one sample; say why not, where that cannot be had."""
    planned(point.product, SMALL)  # first, so that the clock of the other is for its plan alone
    plan, seconds = planned(point.product, point.size)
    a_data, b_data = (xp.asarray(_values((each.nnz, point.batch), seed=0)) for each in (plan.a, plan.b))
    ours = partial(plan, a_data, b_data, out=xp.empty((plan.pattern.nnz, point.batch), np.float32))
    sides: dict[str, Callable[[], object]] = {"time": ours}
    row: Row = {"strategy": plan.strategy, "multiplications": int(plan.products), "plan_seconds": seconds}
    try:
        first = (xp.ascontiguousarray(values[:, 0]) for values in (a_data, b_data))
        theirs = CusparseProduct(xp, plan.a, plan.b, *first)
    except (DeviceError, MissingDependencyError) as error:
        row["uncompared"] = f"{type(error).__name__}: {error}"
    else:
        row["cusparse_plan_seconds"] = theirs.seconds
        row["stale"] = is_stale(theirs, plan, a_data, b_data)
        sides["cusparse"] = theirs.values
    found = measured(sides, xp, rounds)
    row |= found | {"host": found["time"].get("host")}
    if "cusparse" in found and not row["stale"]:
        of_one = {**found["time"], "all": [taken / point.batch for taken in found["time"]["all"]]}
        row["cusparse_ratio"] = ratio(found["cusparse"], of_one)
    return row


def _values(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def is_stale(theirs: CusparseProduct, plan: ProductPlan, a_data: Array, b_data: Array) -> bool:
    """Multiply, change all values where they lie, and multiply again: is cuSPARSE's second product not ours?

    The first one must be, or nothing here can be believed.
    """
    xp = backend.namespace(a_data, b_data)

    def differs() -> float:
        theirs.values()
        return difference(_csr(plan.pattern, plan(a_data, b_data)[:, 0]), theirs.result())

    harness.refuse_difference("The product", "cuSPARSE", differs())
    for values, first in zip((a_data, b_data), theirs.data, strict=True):
        values[...] = xp.asarray(_values(values.shape, seed=1))
        first[...] = values[:, 0]
    return not differs() < harness.ALIKE


def _csr(pattern: SparsityPattern, values: Array) -> Any:
    import scipy.sparse as sp

    return sp.csr_array((backend.to_host(values), pattern.indices, pattern.indptr), shape=pattern.shape)


# cuSPARSE, through ctypes: CuPy has no SpGEMMreuse.

_LIBRARY = "cusparse64_12.dll" if sys.platform == "win32" else "libcusparse.so.12"
"""Of CUDA 12 and of CUDA 13, in which its version stayed."""
_INDEX_32, _BASE_ZERO, _REAL_32, _AS_IT_IS, _DEFAULT = 2, 0, 0, 0, 0
_ONE, _ZERO = ctypes.c_float(1), ctypes.c_float(0)


class CusparseProduct:
    """The product of two matrices of float32 by cuSPARSE: the structure once, then values on it.

    Parameters
    ----------
    xp
        CuPy; work goes to its current stream.
    a, b, a_data, b_data
        Patterns with 4-byte indices, and values, which are read where they lie.
    """

    def __init__(self, xp: ModuleType, a: SparsityPattern, b: SparsityPattern, a_data: Array, b_data: Array) -> None:
        if backend.is_host(xp):
            raise DeviceError("cuSPARSE multiplies on a GPU", expected="CuPy", got=xp.__name__)
        self._xp, self.shape, self.data = xp, (a.shape[0], b.shape[1]), (a_data, b_data)
        self._library, self._open = _load(xp), list[tuple[str, ctypes.c_void_p]]()
        start = time.perf_counter()
        self._handle = self._new("cusparseCreate", "cusparseDestroy")
        self._call("cusparseSetStream", self._handle, ctypes.c_void_p(xp.cuda.get_current_stream().ptr))
        self._indptr = xp.empty(self.shape[0] + 1, np.int32)
        self._matrices = [
            self._matrix(a.shape, *a.device_arrays(xp), a_data), self._matrix(b.shape, *b.device_arrays(xp), b_data),
            self._matrix(self.shape, self._indptr),
        ]  # fmt: skip
        self._plan = self._new("cusparseSpGEMM_createDescr", "cusparseSpGEMM_destroyDescr")
        self._find_structure()
        backend.synchronize(xp)
        self.seconds = time.perf_counter() - start

    def __del__(self) -> None:
        """Destroy the descriptors and the handle."""
        while getattr(self, "_open", None) and not sys.is_finalizing():
            name, item = self._open.pop()
            getattr(self._library, name)(item)

    def values(self) -> None:
        """Compute the values into the structure."""
        a, b, c = self._matrices
        self._call(
            "cusparseSpGEMMreuse_compute", self._handle, _AS_IT_IS, _AS_IT_IS, ctypes.byref(_ONE), a, b,
            ctypes.byref(_ZERO), c, _REAL_32, _DEFAULT, self._plan,
        )  # fmt: skip

    def result(self) -> Any:
        """Return a copy of the product as a SciPy CSR array."""
        import scipy.sparse as sp

        values, indices, indptr = map(backend.to_host, (self._values, self._indices, self._indptr))
        return sp.csr_array((values, indices, indptr), shape=self.shape)

    def _find_structure(self) -> None:
        """Go through the stages; the fourth and the fifth buffer must stay, each other one until the next stage."""
        first = self._stage("workEstimation", 1)
        _, third, fourth = self._stage("nnz", 3)
        del first
        rows, columns, nnz = (ctypes.c_int64() for _ in range(3))
        self._call("cusparseSpMatGetSize", self._matrices[2], *map(ctypes.byref, (rows, columns, nnz)))
        self._indices = self._xp.empty(nnz.value, np.int32)
        self._values = self._xp.empty(nnz.value, np.float32)
        arrays = map(_pointer, (self._indptr, self._indices, self._values))
        self._call("cusparseCsrSetPointers", self._matrices[2], *arrays)
        self._kept = [fourth, *self._stage("copy", 1)]
        del third

    def _stage(self, name: str, count: int) -> list[Array]:
        """Ask how large the buffers of a stage must be, and run it with them."""
        sizes = [ctypes.c_size_t() for _ in range(count)]

        def run(buffers: Sequence[Array | None]) -> None:
            told = [each for size, buffer in zip(sizes, buffers, strict=True)
                    for each in (ctypes.byref(size), _pointer(buffer))]  # fmt: skip
            self._call(
                f"cusparseSpGEMMreuse_{name}", self._handle, _AS_IT_IS, _AS_IT_IS, *self._matrices, _DEFAULT,
                self._plan, *told,
            )  # fmt: skip

        run([None] * count)
        buffers = [self._xp.empty(max(size.value, 1), np.uint8) for size in sizes]  # no pointer would be a question
        run(buffers)
        return buffers

    def _matrix(
        self, shape: tuple[int, int], indptr: Array, indices: Array | None = None, data: Array | None = None
    ) -> ctypes.c_void_p:
        numbers = map(ctypes.c_int64, (*shape, 0 if data is None else data.size))
        return self._new("cusparseCreateCsr", "cusparseDestroySpMat", *numbers, *map(_pointer, (indptr, indices, data)),
                         _INDEX_32, _INDEX_32, _BASE_ZERO, _REAL_32)  # fmt: skip

    def _new(self, create: str, destroy: str, *args: Any) -> ctypes.c_void_p:
        """Return what `create` makes; `destroy` ends it."""
        found = ctypes.c_void_p()
        self._call(create, ctypes.byref(found), *args)
        self._open.append((destroy, found))
        return found

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise DeviceError(f"{name} failed", expected="status 0", got=status,
                              remedy="See the status codes in cuSPARSE's documentation")  # fmt: skip


def _load(xp: ModuleType) -> Any:
    try:
        xp.cuda.Device().cusparse_handle  # noqa: B018  (makes CuPy load the library)
        return ctypes.CDLL(_LIBRARY)
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependencyError("cuSPARSE cannot be loaded", expected=_LIBRARY, got=str(error),
                                     remedy="Install CuPy with its CUDA libraries") from error  # fmt: skip


def _pointer(array: Array | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.data.ptr)
