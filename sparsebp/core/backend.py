"""The only seam between NumPy and CuPy: namespace, device, dtype, transfer, pooled memory, cuBLAS, CUDA graphs.

No other module asks which library an array belongs to. CuPy is imported when a CuPy array or a GPU is first needed, so
the package works without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import math
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.errors import (
    DeviceError,
    DTypeError,
    LayoutError,
    MemoryLimitError,
    MissingDependencyError,
    ShapeError,
)
from sparsebp.core.locks import forkable_lock

FLOAT_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))


_PLAIN = {np.ndarray}


def namespace(*arrays: Array, **named: Array) -> ModuleType:
    """Return ``numpy`` or ``cupy``, the module of all arrays; NumPy if there are none.

    Keywords name the arrays in messages; wrap those that may be None in `given`.

    Raises
    ------
    DeviceError
        NumPy and CuPy arrays are mixed, or an argument is neither, masked, or a ``numpy.matrix``.
    """
    kinds = {*map(type, arrays), *map(type, named.values())}
    if kinds == _PLAIN:  # nearly always, and several times as fast
        return np
    cupy = sys.modules.get("cupy")
    if cupy is not None and len(kinds) == 1 and cupy.ndarray in kinds:  # nearly always on a device
        return cupy
    found = {_namespace_of(array) for array in arrays}
    found.update(_namespace_of(array, name) for name, array in named.items())
    if len(found) > 1:
        got = ", ".join(type(array).__module__.split(".")[0] for array in (*arrays, *named.values()))
        raise DeviceError("Arrays on the host and on a device are mixed", got=got,
                          expected="all arrays from NumPy or all from CuPy", remedy="Move them with "
                          "sparsebp.core.backend.to_device(...) or sparsebp.core.backend.to_host(...)")  # fmt: skip
    return found.pop() if found else np


def given(**named: Array | None) -> dict[str, Array]:
    """Return the arrays that are not None."""
    return {name: array for name, array in named.items() if array is not None}


def _namespace_of(array: Array, name: str = "An argument") -> ModuleType:
    if isinstance(array, (np.ndarray, np.generic)):
        check_plain(array, name)
        return np
    cupy = sys.modules.get("cupy")  # CuPy arrays only exist once CuPy has been imported
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy
    if is_sparse(array):
        raise DeviceError(f"{name} is a sparse matrix", expected="a NumPy or CuPy array",
                          got=f"{type(array).__module__}.{type(array).__qualname__}",
                          remedy="Pass its .toarray() where a dense array is meant")  # fmt: skip
    got = f"{type(array).__module__}.{type(array).__qualname__}"
    raise DeviceError(f"{name} is not an array", expected="a NumPy or CuPy array", got=got, remedy=array_remedy(array))


def array_remedy(value: Any) -> str:
    """Return how to make an array of something else; NumPy cannot read every tensor of PyTorch."""
    if getattr(value, "requires_grad", False):
        return "It requires grad: pass numpy.asarray(tensor.detach()), without its autograd graph"
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        return "Pass numpy.asarray(tensor.float()): NumPy has no bfloat16"
    return "Convert it with numpy.asarray(...), or cupy.from_dlpack(...) for another framework's device tensor"


def asarray(name: str, value: Any) -> Array:
    """Return `value` as an array: of CuPy if it is on a GPU, else of NumPy. bfloat16 becomes float32.

    Raises
    ------
    DeviceError
        An array is masked, or a tensor requires grad, or has values that NumPy cannot read.
    TypeError, ValueError
        NumPy's own: a ragged list, say.
    """
    if isinstance(value, np.ndarray):
        check_plain(value, name)
        return value
    try:
        if str(getattr(value, "dtype", "")) == "torch.bfloat16":  # NumPy has none
            value = value.float()
        return cupy().asarray(value) if has_device_memory(value) else np.asarray(value)
    except RuntimeError as error:
        raise DeviceError(f"{name} cannot be read as an array", expected="an array, or a tensor without autograd graph",
                          got=str(error), remedy=array_remedy(value)) from error  # fmt: skip


def has_device_memory(value: Any) -> bool:
    """Whether an object is an array on a GPU, of whatever library, that can be read."""
    try:
        return hasattr(value, "__cuda_array_interface__")
    except RuntimeError:  # of a tensor that requires grad
        return False


def is_half(value: Any) -> bool:
    """Whether an array or tensor is of float16 or bfloat16, whose values float32 and float64 have too."""
    return str(getattr(value, "dtype", "")).removeprefix("torch.") in ("float16", "bfloat16")


def is_sparse(value: Any) -> bool:
    """Whether `value` is a sparse matrix, of SciPy, CuPy or a library with the same attributes."""
    return isinstance(getattr(value, "format", None), str) and hasattr(value, "nnz") and hasattr(value, "shape")


def namespace_of_sparse(matrix: Any) -> ModuleType:
    """Return the module of a sparse matrix's arrays."""
    cupy = sys.modules.get("cupy")
    return cupy if cupy is not None and isinstance(getattr(matrix, "data", None), cupy.ndarray) else np


def check_plain(array: Any, name: str) -> None:
    """Refuse array types for which the same operations mean something else: kernels would silently drop masks."""
    if isinstance(array, np.ma.MaskedArray):
        remedy = "Pass array.filled(value)"
    elif isinstance(array, np.matrix):
        remedy = "Convert it with numpy.asarray(...)"
    else:
        return
    raise DeviceError(f"{name} is not a plain array", expected="a NumPy or CuPy array",
                      got=f"{type(array).__module__}.{type(array).__qualname__}", remedy=remedy)  # fmt: skip


def cupy() -> ModuleType:
    """Import and return CuPy, checking for a GPU.

    Raises
    ------
    MissingDependencyError
        CuPy is not installed.
    DeviceError
        CuPy is installed but sees no GPU.
    """
    try:
        import cupy as cp
    except ImportError as error:
        raise MissingDependencyError("CuPy is not installed, and the device kernels need it", remedy="Install the "
                                     "extra of your CUDA version: pip install 'sparsebp[cuda13]' or 'sparsebp[cuda12]'"
                                     ) from error  # fmt: skip
    try:
        count = cp.cuda.runtime.getDeviceCount()
    except cp.cuda.runtime.CUDARuntimeError as error:
        raise DeviceError("No GPU can be used", expected="a CUDA device", got=str(error),
                          remedy="Use device='cpu'") from error  # fmt: skip
    if count == 0:
        raise DeviceError("No GPU can be used", expected="a CUDA device", got="none", remedy="Use device='cpu'")
    return cp


def has_gpu() -> bool:
    """Whether CuPy is installed and sees a GPU."""
    try:
        cupy()
    except (MissingDependencyError, DeviceError):
        return False
    return True


def device_namespace(device: str) -> ModuleType:
    """Return the array module for ``device``: ``"cpu"`` or ``"cuda"``."""
    if isinstance(device, str) and device == "cpu":
        return np
    if isinstance(device, str) and device == "cuda":
        return cupy()
    raise DeviceError("Unknown device", expected="'cpu' or 'cuda'", got=repr(device))


def check_module(xp: ModuleType) -> ModuleType:
    """Check that an argument is ``numpy`` or ``cupy``, and return it."""
    if xp is not np and (xp is None or xp is not sys.modules.get("cupy")):
        raise DeviceError("xp is not an array module", expected="numpy or cupy", got=repr(xp)[:80])
    return xp


def device_of(array: Array) -> str:
    """Return the device of `array`: ``"cpu"`` or ``"cuda"``."""
    return "cpu" if namespace(array) is np else "cuda"


is_host: Callable[[ModuleType], bool] = functools.partial(operator.is_, np)
"""Whether `xp` is NumPy; asked often, so without a Python call."""


def device_number(xp: ModuleType) -> int | None:
    """Return the number of the current device of `xp`; None for NumPy."""
    return None if xp is np else int(xp.cuda.Device().id)


def on_device(xp: ModuleType, number: int | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the calling thread works on that device; every thread begins on the first one."""
    return contextlib.nullcontext() if number is None else xp.cuda.Device(number)


def device_attributes(xp: ModuleType) -> dict[str, int]:
    """Return the driver's attributes of the current device of `xp`; empty for NumPy."""
    return {} if xp is np else dict(xp.cuda.Device().attributes)


def device_memory(xp: ModuleType) -> int:
    """Return the bytes of memory of the current device of CuPy."""
    return int(xp.cuda.runtime.memGetInfo()[1])


def as_namespace(array: Array, xp: ModuleType) -> Array:
    """Return `array` as an array of `xp` on its current device, copied only if it lies elsewhere."""
    return to_host(array) if xp is np else xp.asarray(array)


def to_host(array: Array) -> np.ndarray:
    """Return `array` as a NumPy array; a device array is copied, and that synchronises."""
    xp = namespace(array)
    return array if xp is np else xp.asnumpy(array)  # synchronize!


def to_device(array: Array, device: str) -> Array:
    """Return `array` on ``"cpu"`` or ``"cuda"``, copied only if it lies elsewhere."""
    return as_namespace(array, device_namespace(device))


def synchronize(xp: ModuleType) -> None:
    """Wait for the current stream of `xp`'s device; does nothing for NumPy."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def streams(xp: ModuleType, count: int) -> list[contextlib.AbstractContextManager[Any]]:
    """Return contexts that each run work on their own stream, the first with the highest priority; no-ops for NumPy.

    They wait for the default stream and it for them, so that only work in different contexts runs concurrently.
    """
    if xp is np:
        return [contextlib.nullcontext() for _ in range(count)]
    greatest = 1 - count
    return [xp.cuda.Stream(priority=greatest + number) for number in range(count)]


def record(xp: ModuleType) -> Any:
    """Return an event after the current stream's work so far; None for NumPy."""
    if xp is np:
        return None
    event = xp.cuda.Event(disable_timing=True)
    event.record()
    return event


def wait(xp: ModuleType, event: Any) -> None:
    """Make the current stream wait for an event of another one; the host does not wait."""
    if event is not None:
        xp.cuda.get_current_stream().wait_event(event)


_recording = threading.local()


@contextlib.contextmanager
def recording(recorder: GraphRecorder) -> Iterator[None]:
    """Let `constant` and `matmul` of this thread use `recorder`."""
    before, _recording.recorder = getattr(_recording, "recorder", None), recorder
    try:
        yield
    finally:
        _recording.recorder = before


def copy(target: Array, source: Array) -> None:
    """Copy an array into another of its shape and dtype, both C-contiguous; on a device it is no kernel of CuPy's."""
    if type(target) is np.ndarray:
        target[...] = source
    else:
        target.data.copy_from_device_async(source.data, source.nbytes)


def constant(xp: ModuleType, host: np.ndarray) -> Array:
    """Return a host array's values on the current device of `xp`; `host` must not change afterwards.

    Recorded work sends them once; ``xp.asarray`` would send them again at every replay.
    """
    recorder = getattr(_recording, "recorder", None)
    return xp.asarray(host) if recorder is None or xp is np else recorder.constant(host)


def kept(xp: ModuleType, host: np.ndarray) -> Array:
    """Return a host array's values on the current device of `xp`, for use on any stream for any time.

    The host waits for them, so that no later work has to, on whatever stream or thread. They are sent on the legacy
    stream, to memory of its own: what was freed while others still read it is not overwritten early.
    """
    recorder = getattr(_recording, "recorder", None)
    if xp is np:
        return host
    if recorder is not None:  # the same, outside the graph's stream and memory
        return recorder.constant(host)
    with xp.cuda.using_allocator(xp.get_default_memory_pool().malloc), xp.cuda.Stream.null as stream:
        array = xp.asarray(host)
        stream.synchronize()  # synchronize!
    return array


def order_of(xp: ModuleType) -> int | None:
    """Return an identifier of the current stream; None for NumPy. Only one stream may reuse the same memory."""
    return None if xp is np else int(xp.cuda.get_current_stream().ptr)


def is_recorded() -> bool:
    """Whether this thread's work may be captured, to be replayed later with all its memory."""
    return getattr(_recording, "recorder", None) is not None


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``, on a GPU by cuBLAS without copies, also while work is recorded.

    `out`, where the product is written, is C-contiguous.
    """
    recorder = getattr(_recording, "recorder", None)
    if recorder is not None:
        return recorder.matmul(a, b, out)
    xp = namespace(a, b)
    return np.matmul(a, b, out=out) if xp is np else products(xp).matmul(a, b, out)


def float_dtype(dtype: Any) -> np.dtype:
    """Return `dtype` as float32 or float64, the dtypes of the kernels; DTypeError for any other."""
    try:
        resolved: Any = np.dtype(dtype)
    except TypeError:
        resolved = repr(dtype)
    if resolved not in FLOAT_DTYPES:
        raise DTypeError("Unsupported dtype", expected="float32 or float64", got=resolved)
    return resolved


def exact_floats(name: str, integers: np.ndarray, dtype: Any) -> np.ndarray:
    """Return integers or bools as floats of `dtype`; DTypeError if one of them might be rounded."""
    most = 2 ** (np.finfo(dtype).nmant + 1)
    if integers.size and not -most <= int(integers.min()) <= int(integers.max()) <= most:
        raise DTypeError(f"{name} holds integers that {np.dtype(dtype)} would round", expected=f"at most {most}",
                         got=integers.dtype, remedy=f"Convert {name} with .astype(...)")  # fmt: skip
    return integers.astype(dtype)


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        want is None or have == want for have, want in zip(shape, wanted, strict=True)
    )


def check_array(
    name: str, array: Array, *, dtype: Any = None, shape: tuple[int | None, ...] | None = None, contiguous: bool = True,
    written: bool = False,
) -> None:  # fmt: skip
    """Check one array argument; ``None`` in `shape` stands for any length, `written` for an array that is written to.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        The argument is not an array, or differs.
    """
    if type(array) is not np.ndarray:
        _namespace_of(array, name)
    if dtype is not None and array.dtype != dtype:
        raise DTypeError(f"{name} has the wrong dtype", expected=np.dtype(dtype), got=array.dtype, remedy="Convert it "
                         f"with {name}.astype({np.dtype(dtype).name!r}); nothing is converted silently")  # fmt: skip
    if shape is not None and array.shape != shape and not _fits(array.shape, shape):
        wanted = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ("," if len(shape) == 1 else "") + ")"
        raise ShapeError(f"{name} has the wrong shape", expected=wanted, got=array.shape)
    if contiguous and not array.flags.c_contiguous:
        raise LayoutError(f"{name} is not C-contiguous", expected="a C-contiguous array",
                          got=f"strides {array.strides} for shape {array.shape}",
                          remedy=f"Pass numpy.ascontiguousarray({name})")  # fmt: skip
    if written and not getattr(array.flags, "writeable", True):  # CuPy's arrays always are
        raise LayoutError(f"{name} is read-only", expected="a writeable array", got="flags.writeable = False")


# Matrix products on a GPU by cuBLAS's own entry points: CuPy refuses cuBLAS while a stream is captured, copies operands
# that cuBLAS can read in place, and takes longer on the host.

_WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on every captured stream: its documented size for the largest GPUs."""
_N, _T = 0, 1  # cublasOperation_t
_TYPES = {
    np.dtype(np.float32): (0, 68, ctypes.c_float(1), ctypes.c_float(0)),
    np.dtype(np.float64): (1, 70, ctypes.c_double(1), ctypes.c_double(0)),
}  # cudaDataType, cublasComputeType_t (no TF32), alpha and beta
_TF32 = 77  # cublasComputeType_t
_DEFAULT_ALGORITHM = -1

allow_tf32 = False
"""Whether cuBLAS may round the factors of a float32 product to TF32's eleven bits, for tensor cores; as
``torch.backends.cuda.matmul.allow_tf32``. A captured product keeps what was set when it was captured."""


class Operand(NamedTuple):
    """A row-major matrix, or a batch of them, in cuBLAS's terms (column-major): the operation, both strides."""

    operation: int
    leading: int
    stride: int


def operand(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Operand | None:
    """Return the `Operand` of a (rows, columns) or (batch, rows, columns) array; None if it must be copied."""
    rows, columns = shape[-2:]
    down, across = strides[-2] // itemsize, strides[-1] // itemsize
    batch = strides[0] // itemsize if len(shape) == 3 else 0
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return Operand(_N, max(down, columns) if rows > 1 else columns, batch)
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return Operand(_T, max(across, rows) if columns > 1 else rows, batch)
    return None


class Cublas:
    """A cuBLAS handle, for one thread at a time. With `workspaces`, every stream gets one, as capturing requires."""

    def __init__(self, xp: ModuleType, *, workspaces: bool = False) -> None:
        self._xp = xp
        self._workspaces: dict[int, Array] | None = {} if workspaces else None
        self._stream: int | None = None
        xp.cuda.Device().cublas_handle  # noqa: B018  (makes CuPy load the library)
        major = xp.cuda.runtime.runtimeGetVersion() // 1000
        name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise DeviceError("cuBLAS cannot be loaded", expected=name, got=str(error),
                              remedy="Install CuPy with its CUDA libraries") from error  # fmt: skip
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle), handle=False)

    def __del__(self) -> None:
        """Destroy the handle."""
        if getattr(self, "_handle", None) and not sys.is_finalizing():
            self._library.cublasDestroy_v2(self._handle)

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return ``a @ b`` for vectors, matrices, two batches of matrices, and batches times one matrix."""
        xp = self._xp
        if a.dtype != b.dtype or a.dtype not in _TYPES:
            raise DTypeError("These arrays have no product", expected="two arrays of float32, or two of float64",
                             got=f"{a.dtype} @ {b.dtype}")  # fmt: skip
        if a.ndim == 1 or b.ndim == 1:
            left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
            shape = (*(() if a.ndim == 1 else a.shape[:-1]), *(() if b.ndim == 1 else b.shape[-1:]))
            product = self.matmul(left, right, None if out is None else out.reshape(*left.shape[:-1], right.shape[-1]))
            return product.reshape(shape)
        if a.ndim > 2 and b.ndim == 2:
            rows = None if out is None else out.reshape(-1, b.shape[-1])
            return self.matmul(a.reshape(-1, a.shape[-1]), b, rows).reshape(*a.shape[:-1], b.shape[-1])
        if a.ndim > 3 or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
            raise ShapeError("These arrays have no product", expected="(…, m, k) @ (k, n), or (b, m, k) @ (b, k, n)",
                             got=f"{a.shape} @ {b.shape}")  # fmt: skip
        out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype) if out is None else out
        if out.size == 0 or a.shape[-1] == 0:
            out.fill(0)
            return out
        (a, first), (b, second) = self._readable(a), self._readable(b)
        kind, compute, one, zero = _TYPES[out.dtype]
        compute = _TF32 if allow_tf32 and out.dtype == np.float32 else compute
        rows, columns, inner = out.shape[-2], out.shape[-1], a.shape[-1]
        self._use_stream()
        # column-major, out is its own transpose: outᵀ = bᵀ aᵀ, and both factors are read in place
        sizes = (second.operation, first.operation, columns, rows, inner, ctypes.byref(one))
        pointers = tuple(ctypes.c_void_p(array.data.ptr) for array in (b, a, out))
        if out.ndim == 2:
            self._call(
                "cublasGemmEx", *sizes, pointers[0], kind, second.leading, pointers[1], kind, first.leading,
                ctypes.byref(zero), pointers[2], kind, columns, compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip
        else:
            long = ctypes.c_longlong
            self._call(
                "cublasGemmStridedBatchedEx", *sizes, pointers[0], kind, second.leading, long(second.stride),
                pointers[1], kind, first.leading, long(first.stride), ctypes.byref(zero), pointers[2], kind, columns,
                long(prod(out.shape[1:])), out.shape[0], compute, _DEFAULT_ALGORITHM,
            )  # fmt: skip
        return out

    def _readable(self, array: Array) -> tuple[Array, Operand]:
        found = operand(array.shape, array.strides, array.itemsize)
        if found is None:
            array = self._xp.ascontiguousarray(array)
            found = Operand(_N, array.shape[-1], array.shape[-2] * array.shape[-1])
        return array, found

    def _use_stream(self) -> None:
        """Select the current stream if it changed, and its workspace, which cuBLAS forgets with every change."""
        xp = self._xp
        pointer = xp.cuda.get_current_stream().ptr
        if pointer == self._stream:
            return
        if self._workspaces is not None and pointer not in self._workspaces:
            with xp.cuda.using_allocator(xp.get_default_memory_pool().malloc):
                self._workspaces[pointer] = xp.empty(_WORKSPACE, np.uint8)
        self._stream = None
        self._call("cublasSetStream_v2", ctypes.c_void_p(pointer))
        if self._workspaces is not None:
            workspace = ctypes.c_void_p(self._workspaces[pointer].data.ptr)
            self._call("cublasSetWorkspace_v2", workspace, ctypes.c_size_t(_WORKSPACE))
        self._stream = pointer

    def _call(self, name: str, *args: Any, handle: bool = True) -> None:
        status = getattr(self._library, name)(*((self._handle,) if handle else ()), *args)
        if status != 0:
            raise DeviceError(f"{name} failed", expected="status 0", got=status,
                              remedy="See the status codes in cuBLAS's documentation")  # fmt: skip


_own = threading.local()


def products(xp: ModuleType) -> Cublas:
    """Return the calling thread's handle for the current device."""
    handles = _own.__dict__.setdefault("handles", {})
    number = xp.cuda.runtime.getDevice()
    found: Cublas | None = handles.get(number)
    if found is None:
        found = handles[number] = Cublas(xp)
    return found


# A pool for large NumPy arrays.
#
# A training step allocates the same large arrays every time. The C library returns memory of that size to the system
# when it is freed, and the next step pays for thousands of page faults: as much time as the arithmetic, in a GRU of
# hidden size 20. Arrays from here return their memory to the pool when their last view dies. CuPy has its own pool.

SMALLEST = 1 << 18
"""Bytes below which the C library keeps freed memory itself."""
KEPT = 1 << 28
"""Most bytes of unused memory in the pool."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""


class _Memory(NamedTuple):
    """Bytes, and the first address in them that is a multiple of `ALIGNMENT`; NumPy takes microseconds to say it."""

    data: np.ndarray
    address: int

    @classmethod
    def new(cls, size: int) -> _Memory:
        """Allocate `size` bytes and room for the alignment."""
        data = np.empty(size + ALIGNMENT, np.uint8)
        return cls(data, -(-data.ctypes.data // ALIGNMENT) * ALIGNMENT)


class _Block:
    """Memory on loan: the base of a NumPy array and of all its views. Its end returns the memory."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: HostPool, memory: _Memory, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._pool, self._memory = pool, memory
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": (memory[1], False), "version": 3}

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class HostPool:
    """Free memory by size, at most `kept` bytes. Thread-safe."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self.free_bytes = 0
        self._free: dict[int, list[_Memory]] = {}
        self._lock = forkable_lock(self._forget)  # reentrant: garbage collection inside may return a block

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised C-contiguous array, like numpy.empty; MemoryLimitError if there is no memory."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            if size < SMALLEST:
                return np.empty(shape, dtype)
            with self._lock:
                same = self._free.get(size + ALIGNMENT)
                memory = same.pop() if same else None
                if memory is not None:
                    self.free_bytes -= size + ALIGNMENT
            if memory is None:
                memory = _Memory.new(size)
        except (MemoryError, ValueError, OverflowError) as error:  # ValueError: more than NumPy can count
            raise MemoryLimitError(f"An array of shape {tuple(shape)} does not fit in memory",
                                   expected="memory for its elements", got=f"{size} bytes of {dtype}",
                                   remedy="Use smaller batches, smaller inputs or less padding") from error  # fmt: skip
        return np.asarray(_Block(self, memory, tuple(shape), dtype))

    def release(self) -> int:
        """Release all free memory to the system; return its bytes."""
        with self._lock:
            freed, self.free_bytes = self.free_bytes, 0
            self._free.clear()
        return freed

    def _forget(self) -> None:
        """Start empty in a child process forked while another thread changed the pool."""
        self.free_bytes, self._free = 0, {}

    def give_back(self, memory: _Memory) -> None:
        """Take memory back; beyond `kept`, memory of the size first met is released."""
        size = memory[0].nbytes
        if size > self.kept:
            return
        with self._lock:
            self._free.setdefault(size, []).append(memory)
            self.free_bytes += size
            while self.free_bytes > self.kept:
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self.free_bytes -= self._free[oldest].pop().data.nbytes
                if not self._free[oldest]:
                    del self._free[oldest]


_HOST = HostPool()


def release() -> int:
    """Release the pool's unused memory to the system; return its bytes."""
    return _HOST.release()


def empty(xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array of `xp`; large NumPy arrays come from the pool."""
    if xp is np and 0 < math.prod(shape) * np.dtype(dtype).itemsize < SMALLEST:
        return np.empty(shape, dtype)
    return _HOST.empty(shape, dtype) if xp is np else xp.empty(shape, dtype)


# Reading from a device without waiting for work it is given afterwards.


class Reading:
    """The values of a C-contiguous array on their way to the host, as of the current stream's work so far.

    Later work of the device does not delay them: they go to pinned memory.
    """

    def __init__(self, array: Array) -> None:
        xp = namespace(array)
        self._array: Array = array
        self._event: Any = None
        if xp is np:
            self._host = array.copy()
            return
        memory = xp.cuda.alloc_pinned_memory(array.nbytes)
        self._host = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        array.get(out=self._host, blocking=False)
        self._event = record(xp)

    def __call__(self) -> np.ndarray:
        """Return the values; the host waits for them."""
        if self._event is not None:
            self._event.synchronize()  # synchronize!
            self._array = self._event = None
        return self._host

    def __del__(self) -> None:
        """Wait for the transfer, whose memory goes to others."""
        if getattr(self, "_event", None) is not None and not sys.is_finalizing():
            with contextlib.suppress(RuntimeError):  # the device has failed
                self()


# Work of a GPU, recorded once into a CUDA graph and replayed.
#
# CuPy captures its own kernels, ours, copies on the device and events between streams. It refuses cuBLAS while a stream
# is captured, so matrix products bypass it. Host transfers are refused here, except constants, which are sent at once.


class GraphRecorder:
    """Streams whose work can be captured, its graph, and all memory that the graph uses.

    The first stream has the highest priority. Work on another one begins by waiting for an event of the first (a fork),
    which waits for its end (a join).
    """

    def __init__(self, xp: ModuleType, count: int) -> None:
        self._xp = xp
        # non-blocking: an uncaptured wait for the default stream would end the capture
        self.streams = [xp.cuda.Stream(non_blocking=True, priority=1 - count + number) for number in range(count)]
        self._pool = xp.cuda.MemoryPool()  # lives as long as the graph, for it alone
        self._constants: list[tuple[np.ndarray, Array]] = []
        self._cublas = Cublas(xp, workspaces=True)
        self._graph: Any = None

    def __del__(self) -> None:
        """Wait for the work that uses this memory."""
        if not sys.is_finalizing():
            for stream in getattr(self, "streams", ()):
                with contextlib.suppress(RuntimeError):  # the device has failed
                    stream.synchronize()  # synchronize!

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run work as it would be captured, which compiles kernels and sets up libraries."""
        with recording(self), self._in_order():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture work instead of running it."""
        first = self.streams[0]
        gc.collect()  # frees old graphs now: during the capture nobody may wait for the device
        self._xp.cuda.Device().synchronize()  # synchronize!
        self._xp.get_default_memory_pool().free_all_blocks()  # the graph has its own memory
        with (
            recording(self), first, self._xp.cuda.using_allocator(self._pool.malloc),
            _no_transfers(self._xp), _no_collection(),
        ):  # fmt: skip
            first.begin_capture()
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture has ended for another reason
                    first.end_capture()
                raise
            graph = first.end_capture()
        graph.upload(first)
        self._graph = graph

    def replay(self) -> None:
        """Run the graph on the current stream."""
        with self._in_order():
            self._graph.launch(self.streams[0])

    def constant(self, host: np.ndarray) -> Array:
        """Send a host array to the device now, to memory that no recorded work reuses."""
        xp = self._xp
        with xp.cuda.using_allocator(xp.get_default_memory_pool().malloc), xp.cuda.Stream(non_blocking=True) as aside:
            array = xp.empty(host.shape, host.dtype)
            sent = np.ascontiguousarray(host)
            array.data.copy_from_host_async(sent.ctypes.data, sent.nbytes, aside)
            aside.synchronize()  # synchronize!
        self._constants.append((sent, array))
        return array

    def matmul(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return the matrix product by cuBLAS, on the current stream."""
        return self._cublas.matmul(a, b, out)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Work on the first stream, after the current stream's earlier work and before its later work."""
        current, first = self._xp.cuda.get_current_stream(), self.streams[0]
        first.wait_event(current.record())
        try:
            with first:
                yield
        finally:
            current.wait_event(first.record())


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Suspend garbage collection."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _no_transfers(xp: ModuleType) -> Iterator[None]:
    """Refuse host transfers of this thread: a replay would read CuPy's pinned buffer again, long reused."""
    here, ordinary = threading.get_ident(), xp.get_default_pinned_memory_pool().malloc

    def allocate(size: int) -> Any:
        if threading.get_ident() == here:
            raise DeviceError("Host data is sent while work is captured", expected="arrays on the device",
                              got=f"{size} bytes", remedy="Send it with sparsebp.core.backend.constant")  # fmt: skip
        return ordinary(size)

    xp.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        xp.cuda.set_pinned_memory_allocator(ordinary)
