"""Work of a GPU, recorded once into a CUDA graph and replayed (CuPy's stream capture, with what that leaves open).

CuPy captures its own kernels, ours, copies on the device and events between streams. It refuses cuBLAS while a stream
is captured, so matrix products go to cuBLAS past CuPy; and what it sends from the host would be read again from a
buffer that is long in other hands, so such transfers are refused here, but for constants, which are sent at once.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.backend import Cublas
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError


class GraphRecorder:
    """Streams whose work can be captured, the graph of it, and all memory that the graph uses."""

    # xp: CuPy.
    # count: Number of streams, the first one of the highest priority. What runs on a further one begins with a wait for
    # an event of the first (a fork), and the first waits for its end (a join).
    # streams: The streams, contexts in which work is given to them.

    def __init__(self, xp: ModuleType, count: int) -> None:
        self._xp = xp
        # They do not wait for the default stream by themselves: a wait that is not captured would end the capture.
        self.streams = [xp.cuda.Stream(non_blocking=True, priority=1 - count + number) for number in range(count)]
        self._pool = xp.cuda.MemoryPool()  # lives as long as the graph, and serves nobody else
        self._constants: list[tuple[np.ndarray, Array]] = []
        self._cublas = Cublas(xp, workspaces=True)
        self._graph: Any = None

    def __del__(self) -> None:
        """Wait for what uses the memory that goes now."""
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
        """Run work now, as it would be captured: kernels are compiled and libraries set up."""
        with backend.recording(self), self._in_order():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture work in place of running it."""
        first = self.streams[0]
        gc.collect()  # old graphs go now: not during the capture, where nobody may wait for the device
        self._xp.cuda.Device().synchronize()  # synchronize!
        self._xp.get_default_memory_pool().free_all_blocks()  # the graph has memory of its own
        with (
            backend.recording(self), first, self._xp.cuda.using_allocator(self._pool.malloc),
            _no_transfers(self._xp), _no_collection(),
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


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def _no_transfers(xp: ModuleType) -> Iterator[None]:
    """Refuse transfers from the host that this thread begins: CuPy takes a pinned buffer for each."""
    here, ordinary = threading.get_ident(), xp.get_default_pinned_memory_pool().malloc

    def allocate(size: int) -> Any:
        if threading.get_ident() == here:
            raise DeviceError("Data of the host is sent while work is captured", expected="arrays on the device",
                              got=f"{size} bytes", remedy="Send it with sparsebp.core.backend.constant")  # fmt: skip
        return ordinary(size)

    xp.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        xp.cuda.set_pinned_memory_allocator(ordinary)
