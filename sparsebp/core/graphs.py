"""Recording work on the device as CUDA graphs: what may be recorded, and what a recording keeps alive."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import cublas
from sparsebp.core.backend import namespace
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError


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
    """Let `constant` of this thread use `recorder`."""
    before, _recording.recorder = getattr(_recording, "recorder", None), recorder
    try:
        yield
    finally:
        _recording.recorder = before


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
        self._cublas = cublas.Cublas(xp, workspaces=True)
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
        with recording(self), cublas.using(self._cublas), self._in_order():
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture work instead of running it."""
        first = self.streams[0]
        gc.collect()  # frees old graphs now: during the capture nobody may wait for the device
        self._xp.cuda.Device().synchronize()  # synchronize!
        self._xp.get_default_memory_pool().free_all_blocks()  # the graph has its own memory
        with (
            recording(self), cublas.using(self._cublas), first, self._xp.cuda.using_allocator(self._pool.malloc),
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
                              got=f"{size} bytes", remedy="Send it with sparsebp.core.graphs.constant")  # fmt: skip
        return ordinary(size)

    xp.cuda.set_pinned_memory_allocator(allocate)
    try:
        yield
    finally:
        xp.cuda.set_pinned_memory_allocator(ordinary)
