"""The names: which module has what, and how they take CuPy's place in a process."""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import numpy as np

from strict_cupy import cublas, cusparse, device, functions, kernels, memory, surface
from strict_cupy.arrays import compute, ndarray
from strict_cupy.counts import note

H200 = {
    "MultiProcessorCount": 132, "ComputeCapabilityMajor": 9, "ComputeCapabilityMinor": 0, "WarpSize": 32,
    "MaxThreadsPerBlock": 1024, "MaxThreadsPerMultiProcessor": 2048, "MaxBlocksPerMultiprocessor": 32,
    "MaxRegistersPerBlock": 65536, "MaxRegistersPerMultiprocessor": 65536, "MaxSharedMemoryPerBlock": 49152,
    "MaxSharedMemoryPerBlockOptin": 232448, "MaxSharedMemoryPerMultiprocessor": 233472,
    "ReservedSharedMemoryPerBlock": 1024, "L2CacheSize": 62914560, "ClockRate": 1980000, "MemoryClockRate": 3201000,
    "GlobalMemoryBusWidth": 6144, "MaxGridDimX": 2**31 - 1, "MaxGridDimY": 65535, "MaxGridDimZ": 65535,
    "MaxBlockDimX": 1024, "MaxBlockDimY": 1024, "MaxBlockDimZ": 64, "CooperativeLaunch": 1, "PageableMemoryAccess": 0,
}  # fmt: skip
"""Attributes of the device, in CUDA's units: bytes, kHz, bits."""
MEMORY = 150_754_820_096
CUDA_VERSION = 13000
LIBRARIES = {f"libcublas.so.{CUDA_VERSION // 1000}": cublas.LIBRARY, "libcusparse.so.12": cusparse.LIBRARY}
"""What ``ctypes.CDLL`` finds by these names; cuSPARSE's version stayed 12 in CUDA 13."""


class Device:
    """As ``cupy.cuda.Device``."""

    cublas_handle, cusparse_handle = 0xC0B1A5, 0xC05E
    compute_capability = "90"

    def __init__(self, number: Any = None) -> None:
        self.id = device.current_device() if number is None else int(getattr(number, "id", number))
        self._before: list[int] = []

    attributes = property(lambda self: dict(H200))
    mem_info = property(lambda self: (MEMORY, MEMORY))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        self._before.append(device.current_device())
        device.set_device(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        device.set_device(self._before.pop())

    def use(self) -> None:
        """Make it the current one of this thread."""
        device.set_device(self.id)

    def synchronize(self) -> None:
        note("synchronized", "device")
        device.DEVICE.synchronize()


class Generator:
    """As ``cupy.random.Generator``, with NumPy's numbers."""

    def __init__(self, seed: Any) -> None:
        self._numpy = np.random.default_rng(seed)

    def _drawn(self, values: Any) -> ndarray:
        values = np.asarray(values)
        result = ndarray(values.shape, values.dtype)
        return compute("random", lambda: values, out=result)

    def random(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        return self._drawn(self._numpy.random(size, dtype))

    def standard_normal(self, size: Any = None, dtype: Any = np.float64, out: Any = None) -> ndarray:
        return self._drawn(self._numpy.standard_normal(size, dtype))

    def integers(self, low: int, high: Any = None, size: Any = None, dtype: Any = np.int64) -> ndarray:
        return self._drawn(self._numpy.integers(low, high, size, dtype))


def _module(name: str, **values: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []  # type: ignore[attr-defined]
    vars(module).update(values)
    return module


def _missing(module: ModuleType, real: str) -> Any:
    """Return what a module says of a name that it does not have: that CuPy has it may be."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"the stand-in for {real} has no {name}")

    return __getattr__


def _runtime() -> ModuleType:
    check = device.DEVICE.check

    def get_device_count() -> int:
        check()
        return device.DEVICE.count

    def get_device_properties(number: int) -> dict[str, Any]:
        return {
            "name": b"stand-in for an H200", "multiProcessorCount": 132, "major": 9, "minor": 0,
            "clockRate": H200["ClockRate"], "totalGlobalMem": MEMORY, "l2CacheSize": H200["L2CacheSize"],
        }  # fmt: skip

    def device_synchronize() -> None:
        Device().synchronize()

    return _module(
        "cupy.cuda.runtime", CUDARuntimeError=device.CUDARuntimeError, getDeviceCount=get_device_count,
        getDevice=device.current_device, setDevice=device.set_device, getDeviceProperties=get_device_properties,
        memGetInfo=lambda: (MEMORY, MEMORY), runtimeGetVersion=lambda: CUDA_VERSION,
        driverGetVersion=lambda: CUDA_VERSION, deviceSynchronize=device_synchronize,
        streamCaptureModeRelaxed=2,
    )  # fmt: skip


def _sparse() -> ModuleType:
    class csr_matrix:
        """As ``cupyx.scipy.sparse.csr_matrix``, of three arrays."""

        format = "csr"

        def __init__(self, arg1: Any, shape: Any = None, dtype: Any = None, copy: bool = False) -> None:
            self.data, self.indices, self.indptr = arg1
            if not all(isinstance(a, ndarray) and a.ndim == 1 for a in arg1):
                raise ValueError("data, indices, and indptr should be 1-D")
            self.shape, self.dtype = tuple(shape), self.data.dtype

        nnz = property(lambda self: self.data.size)

        def get(self, stream: Any = None) -> Any:
            import scipy.sparse

            return scipy.sparse.csr_matrix((self.data.get(), self.indices.get(), self.indptr.get()), self.shape)

        def sum(self) -> ndarray:
            found: ndarray = self.data.sum()
            return found

    return _module("cupyx.scipy.sparse", csr_matrix=csr_matrix)


def build() -> dict[str, ModuleType]:
    cuda = _module(
        "cupy.cuda", Device=Device, Stream=device.Stream, ExternalStream=device.ExternalStream, Event=device.Event,
        Graph=device.Graph, get_current_stream=device.current_stream, get_elapsed_time=device.get_elapsed_time,
        MemoryPool=memory.MemoryPool, MemoryPointer=memory.MemoryPointer, using_allocator=memory.using_allocator,
        UnownedMemory=memory.UnownedMemory,
        PinnedMemoryPool=memory.PinnedMemoryPool, alloc_pinned_memory=memory.alloc_pinned_memory,
        set_pinned_memory_allocator=memory.set_pinned_memory_allocator, runtime=_runtime(),
        is_available=lambda: True,
    )  # fmt: skip
    random = _module("cupy.random", default_rng=lambda seed=None: Generator(seed), Generator=Generator)
    testing = _module("cupy.testing", assert_allclose=_on_host(np.testing.assert_allclose),
                      assert_array_equal=_on_host(np.testing.assert_array_equal))  # fmt: skip
    sparse = _sparse()
    scipy = _module("cupyx.scipy", sparse=sparse)
    cupyx = _module("cupyx", scipy=scipy, empty_pinned=_pinned(np.empty), zeros_pinned=_pinned(np.zeros))
    names = {name: value for name, value in vars(functions).items() if name in functions.FUNCTIONS}
    dtypes = (
        "bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 intp dtype newaxis pi inf nan"
    )
    cupy = _module(
        "cupy", **names, **{name: getattr(np, name) for name in dtypes.split()}, ndarray=ndarray,
        ufunc=functions.ufunc, asnumpy=functions.asnumpy, cuda=cuda, random=random,
        testing=testing, RawModule=kernels.RawModule, RawKernel=kernels.RawKernel,
        get_default_memory_pool=memory.get_default_memory_pool,
        get_default_pinned_memory_pool=memory.get_default_pinned_memory_pool, __version__=f"{surface.VERSION}.0",
    )  # fmt: skip
    cupy.__getattr__ = functions.__getattr__  # type: ignore[method-assign]
    modules = {m.__name__: m for m in (cupy, cuda, cuda.runtime, random, testing, cupyx, scipy, sparse)}
    for name, module in modules.items():
        if name != "cupy":
            module.__getattr__ = _missing(module, name)  # type: ignore[method-assign]
    return modules


def _on_host(check: Any) -> Any:
    def compare(actual: Any, desired: Any, *args: Any, **kwargs: Any) -> None:
        check(functions.asnumpy(actual), functions.asnumpy(desired), *args, **kwargs)

    return compare


def _pinned(like: Any) -> Any:
    def new(shape: Any, dtype: Any = float, order: str = "C") -> np.ndarray:
        count = int(np.prod(shape, dtype=np.int64))
        held = memory.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
        host = np.frombuffer(held, dtype, count).reshape(shape, order=order)  # type: ignore[call-overload]
        if like is np.zeros:
            host[...] = 0
        return host

    return new


_installed: list[ModuleType] = []


def installed() -> bool:
    """Say whether the stand-in is in CuPy's place in this process."""
    return bool(_installed)


def install() -> ModuleType:
    """Put the stand-in in CuPy's place, for the rest of this process; return it.

    Raises
    ------
    RuntimeError
        CuPy itself has been imported already.
    """
    if _installed:
        return _installed[0]
    if "cupy" in sys.modules or "cupyx" in sys.modules:
        raise RuntimeError("CuPy is imported already; the stand-in takes its place only in a process of its own")
    modules = build()
    sys.modules.update(modules)
    load = ctypes.CDLL

    def loaded(name: Any, *args: Any, **kwargs: Any) -> Any:
        return LIBRARIES[name] if name in LIBRARIES else load(name, *args, **kwargs)

    ctypes.CDLL = loaded  # type: ignore[misc, assignment]
    _installed.append(modules["cupy"])
    return modules["cupy"]
