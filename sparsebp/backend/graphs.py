"""Work of a GPU, recorded once into a CUDA graph and replayed (CuPy's stream capture, with what that leaves open).

CuPy captures its own kernels, ours, copies on the device and events between streams. It refuses cuBLAS while a stream
is captured, so matrix products go to cuBLAS past CuPy; and what it sends from the host would be read again from a
buffer that is long in other hands, so such transfers are refused here, but for constants, which are sent at once.
"""

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

from sparsebp import backend
from sparsebp.core.errors import DeviceError, ShapeError
from sparsebp.core.types import Array

_WORKSPACE = 32 << 20
"""Bytes for cuBLAS on every stream, what its documentation asks for on the largest GPUs."""
_N, _T = 0, 1  # cublasOperation_t
_TYPES = {np.dtype(np.float32): (0, 68, ctypes.c_float), np.dtype(np.float64): (1, 70, ctypes.c_double)}
# cudaDataType, cublasComputeType_t (no TF32) and the type of alpha and beta
_DEFAULT_ALGORITHM = -1


class GraphRecorder:
    """Streams whose work can be captured, the graph of it, and all memory that the graph uses.

    Parameters
    ----------
    xp
        CuPy.
    count
        Number of streams, the first one of the highest priority. What runs on a further one begins with a wait for an
        event of the first (a fork), and the first waits for its end (a join).

    Attributes
    ----------
    streams
        The streams, contexts in which work is given to them.

    Raises
    ------
    DeviceError
        cuBLAS cannot be loaded, or refuses.
    """

    def __init__(self, xp: ModuleType, count: int) -> None:
        self._xp = xp
        # They do not wait for the default stream by themselves: a wait that is not captured would end the capture.
        self.streams = [xp.cuda.Stream(non_blocking=True, priority=1 - count + number) for number in range(count)]
        self._pool = xp.cuda.MemoryPool()  # lives as long as the graph, and serves nobody else
        self._constants: list[tuple[np.ndarray, Array]] = []
        self._cublas = Cublas(xp)
        self._graph: Any = None

    @property
    def captured(self) -> bool:
        """Whether there is a graph to replay."""
        return self._graph is not None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run work now, as it would be captured: kernels are compiled and libraries set up."""
        with backend.recording(self), self._in_order():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture work in place of running it.

        Raises
        ------
        DeviceError
            The work sends something from the host.
        RuntimeError
            It does something else that cannot be captured: CuPy's and the CUDA runtime's error. Nothing has run.
        """
        first = self.streams[0]
        self._xp.get_default_memory_pool().free_all_blocks()  # the graph has memory of its own
        with (
            backend.recording(self), first, self._xp.cuda.using_allocator(self._pool.malloc),
            _no_transfers(self._xp),
        ):  # fmt: skip
            first.begin_capture()
            try:
                yield
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture is over, for whichever reason
                    first.end_capture()
                raise
            graph = first.end_capture()
        graph.upload(first)
        self._graph = graph

    def replay(self) -> None:
        """Give the graph's work to the current stream."""
        with self._in_order():
            self._graph.launch(self.streams[0])

    def constant(self, host: np.ndarray) -> Array:
        """Return the values of a host array on the device, sent now, in memory that no recorded work reuses."""
        xp = self._xp
        with xp.cuda.using_allocator(xp.get_default_memory_pool().malloc), xp.cuda.Stream(non_blocking=True) as aside:
            array = xp.empty(host.shape, host.dtype)
            sent = np.ascontiguousarray(host)
            array.data.copy_from_host_async(sent.ctypes.data, sent.nbytes, aside)
            aside.synchronize()  # synchronize!
        self._constants.append((sent, array))
        return array

    def matmul(self, a: Array, b: Array) -> Array:
        """Return the matrix product by cuBLAS, on the current stream."""
        return self._cublas.matmul(a, b)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Work on the first stream, behind what the current one has been given and before what it will be."""
        current, first = self._xp.cuda.get_current_stream(), self.streams[0]
        first.wait_event(current.record())
        try:
            with first:
                yield
        finally:
            current.wait_event(first.record())


class Operand(NamedTuple):
    """A row-major matrix, or a batch of them, as cuBLAS (column-major) takes it: the operation, both strides."""

    operation: int
    leading: int
    stride: int


def operand(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Operand | None:
    """Return how cuBLAS reads a (rows, columns) or (batch, rows, columns) array; None if only a copy can be read."""
    rows, columns = shape[-2:]
    down, across = strides[-2] // itemsize, strides[-1] // itemsize
    batch = strides[0] // itemsize if len(shape) == 3 else 0
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        return Operand(_N, max(down, columns) if rows > 1 else columns, batch)
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return Operand(_T, max(across, rows) if columns > 1 else rows, batch)
    return None


class Cublas:
    """Matrix products by cuBLAS's own entry points, with a handle and a workspace for every stream that captures.

    Parameters
    ----------
    xp
        CuPy.

    Raises
    ------
    DeviceError
        The library cannot be loaded, or refuses.
    """

    def __init__(self, xp: ModuleType) -> None:
        self._xp = xp
        xp.cuda.Device().cublas_handle  # noqa: B018  (CuPy loads the library)
        major = xp.cuda.runtime.runtimeGetVersion() // 1000
        name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise DeviceError(
                "cuBLAS cannot be loaded", expected=name, got=str(error), remedy="Install CuPy with its CUDA libraries"
            ) from error
        self._handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.byref(self._handle), handle=False)
        self._workspaces: dict[int, Array] = {}

    def __del__(self) -> None:
        """Give the handle back."""
        if getattr(self, "_handle", None) and not sys.is_finalizing():
            self._library.cublasDestroy_v2(self._handle)

    def matmul(self, a: Array, b: Array) -> Array:
        """Return ``a @ b`` for vectors, matrices, two batches of matrices, and batches times one matrix.

        Raises
        ------
        ShapeError
            The batches differ, or have several axes.
        """
        xp = self._xp
        if a.ndim == 1 or b.ndim == 1:
            left, right = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
            shape = (*(() if a.ndim == 1 else a.shape[:-1]), *(() if b.ndim == 1 else b.shape[-1:]))
            return self.matmul(left, right).reshape(shape)
        if a.ndim > 2 and b.ndim == 2:
            return self.matmul(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[-1])
        if a.ndim > 3 or a.shape[:-2] != b.shape[:-2]:
            raise ShapeError("Products of these batches are not captured", expected="one batch axis, of one length",
                             got=f"{a.shape} @ {b.shape}", remedy="Train with graph=False")  # fmt: skip
        out = xp.empty((*a.shape[:-1], b.shape[-1]), a.dtype)
        if out.size == 0 or a.shape[-1] == 0:
            out.fill(0)
            return out
        (a, first), (b, second) = self._readable(a), self._readable(b)
        kind, compute, scalar = _TYPES[out.dtype]
        rows, columns, inner = out.shape[-2], out.shape[-1], a.shape[-1]
        one, zero = scalar(1), scalar(0)
        self._use_stream()
        # Column-major, out is its own transpose: outᵀ = bᵀ aᵀ, and both factors are read as they lie.
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
        """Set the current stream, which forgets the workspace, and the stream's own workspace."""
        xp = self._xp
        pointer = xp.cuda.get_current_stream().ptr
        if pointer not in self._workspaces:
            with xp.cuda.using_allocator(xp.get_default_memory_pool().malloc):
                self._workspaces[pointer] = xp.empty(_WORKSPACE, np.uint8)
        self._call("cublasSetStream_v2", ctypes.c_void_p(pointer))
        workspace = ctypes.c_void_p(self._workspaces[pointer].data.ptr)
        self._call("cublasSetWorkspace_v2", workspace, ctypes.c_size_t(_WORKSPACE))

    def _call(self, name: str, *args: Any, handle: bool = True) -> None:
        status = getattr(self._library, name)(*((self._handle,) if handle else ()), *args)
        if status != 0:
            raise DeviceError(f"{name} failed", expected="status 0", got=status, remedy="Train with graph=False")


@contextlib.contextmanager
def _no_transfers(xp: ModuleType) -> Iterator[None]:
    """Refuse transfers from the host that this thread begins: CuPy takes a pinned buffer for each."""
    here, ordinary = threading.get_ident(), xp.get_default_pinned_memory_pool().malloc

    def allocate(size: int) -> Any:
        if threading.get_ident() == here:
            raise DeviceError("Data of the host is sent while work is captured", expected="arrays on the device",
                              got=f"{size} bytes", remedy="Send it with sparsebp.backend.constant")  # fmt: skip
        return ordinary(size)

    xp.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        xp.cuda.set_pinned_memory_allocator(ordinary)
