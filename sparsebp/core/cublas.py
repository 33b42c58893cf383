"""Dense products by cuBLAS, on the stream and in the arithmetic that CuPy has been told."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator, Sequence
from math import prod
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.backend import namespace
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, DTypeError, ShapeError


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``, on a GPU by cuBLAS without copies, also while work is recorded.

    `out`, where the product is written, is C-contiguous.
    """
    given: Cublas | None = getattr(_own, "given", None)
    if given is not None:
        return given.matmul(a, b, out)
    xp = namespace(a, b)
    return np.matmul(a, b, out=out) if xp is np else products(xp).matmul(a, b, out)


# Matrix products on a GPU by cuBLAS's own entry points: CuPy refuses cuBLAS while a stream is captured, copies operands
# that cuBLAS can read in place, and takes longer on the host.

_WORKSPACE = 32 << 20
"""Bytes of cuBLAS's workspace on every captured stream: its documented size for the largest GPUs."""
_TYPES = {
    np.dtype(np.float32): (0, 68, ctypes.c_float(1), ctypes.c_float(0)),
    np.dtype(np.float64): (1, 70, ctypes.c_double(1), ctypes.c_double(0)),
}  # cudaDataType, cublasComputeType_t (no TF32), alpha and beta
_TF32 = 77  # cublasComputeType_t
_DEFAULT_ALGORITHM = -1
_N, _T = 0, 1  # cublasOperation_t

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


@contextlib.contextmanager
def using(handle: Cublas) -> Iterator[None]:
    """Let products of this thread use `handle` in place of the thread's own."""
    before, _own.given = getattr(_own, "given", None), handle
    try:
        yield
    finally:
        _own.given = before


def products(xp: ModuleType) -> Cublas:
    """Return the calling thread's handle for the current device."""
    handles = _own.__dict__.setdefault("handles", {})
    number = xp.cuda.runtime.getDevice()
    found: Cublas | None = handles.get(number)
    if found is None:
        found = handles[number] = Cublas(xp)
    return found
