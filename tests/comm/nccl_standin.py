"""A stand-in for CuPy and NCCL, for ranks of one process: streams are threads, and messages meet as NCCL lets them.

What is given to a stream runs there, in order, later. A send holds up its stream until the other end receives; the
first call of a communicator waits, on the host, for the other end's; counts and types that differ are an error.
"""

from __future__ import annotations

import ctypes
import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

SECONDS = 20.0  # for what would never come
_ids = itertools.count()
_local = threading.local()
_kept: list[np.ndarray] = []


class DeviceArray(np.ndarray):
    """An array whose memory NCCL is told by its address."""

    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))  # type: ignore[assignment]


def device(values: Any) -> DeviceArray:
    """Return an array with these values.

    Its memory stays: CuPy's pool gives it to nobody else before its stream has come past the end of the array.
    """
    _kept.append(np.array(values))
    return _kept[-1].view(DeviceArray)


class Event:
    """Where a stream was."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    done = property(lambda self: self.happened.is_set())


class Stream:
    """Work in its order, in a thread."""

    streams: dict[int, Stream] = {}  # noqa: RUF012

    def __init__(self, non_blocking: bool = False) -> None:
        self.non_blocking, self.ptr = non_blocking, next(_ids)
        self.errors: list[BaseException] = []
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        Stream.streams[self.ptr] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                if not self.errors:
                    work()
            except BaseException as error:
                self.errors.append(error)

    def give(self, work: Callable[[], None]) -> None:
        """Let the stream do something, later."""
        self._work.put(work)

    def record(self) -> Event:
        """Return where the stream is now."""
        event = Event()
        self._work.put(event.happened.set)
        return event

    def wait_event(self, event: Event) -> None:
        """Do nothing more before `event`."""
        self.give(lambda: _met(event.happened))

    def synchronize(self) -> None:
        """Wait on the host."""
        event = Event()
        self._work.put(event.happened.set)
        happened = event.happened.wait(SECONDS)
        if self.errors:
            raise self.errors[0]
        assert happened, "the stream hangs"

    def __enter__(self) -> Stream:
        _local.stack = [*getattr(_local, "stack", []), self]
        return self

    def __exit__(self, *args: object) -> None:
        _local.stack.pop()


def _met(event: threading.Event) -> None:
    assert event.wait(SECONDS), "nothing came"


def current_stream() -> Stream:
    """Return this thread's current stream."""
    if not getattr(_local, "stack", None):
        _local.stack = [Stream()]
    return _local.stack[-1]


def _add(a: Any, b: Any, out: Any) -> None:
    current_stream().give(lambda: np.add(a, b, out=out))


def _copyto(out: Any, a: Any) -> None:
    current_stream().give(lambda: np.copyto(out, a))


def _empty(shape: Any, dtype: Any) -> DeviceArray:
    return device(np.full(shape, -77, dtype))


CUPY = SimpleNamespace(
    add=_add, copyto=_copyto, empty=_empty, zeros=lambda shape, dtype: device(np.zeros(shape, dtype)),
    cuda=SimpleNamespace(Stream=Stream, get_current_stream=current_stream),
)  # fmt: skip


class World:
    """One binding of NCCL, that all ranks share."""

    NCCL_INT32, NCCL_INT64, NCCL_FLOAT32, NCCL_FLOAT64 = 2, 4, 7, 8
    SIZES = {2: 4, 4: 8, 7: 4, 8: 8}  # noqa: RUF012

    def __init__(self) -> None:
        self.made: dict[Any, threading.Barrier] = {}
        self.lock = threading.Lock()
        self.sent: dict[Any, queue.Queue[Any]] = defaultdict(queue.Queue)
        self.calls: list[tuple[str, int]] = []

    def get_unique_id(self) -> int:
        return next(_ids)

    def barrier(self, key: Any, size: int) -> None:
        """Wait for the others on the host."""
        with self.lock:
            barrier = self.made.setdefault(key, threading.Barrier(size))
        barrier.wait(SECONDS)

    def NcclCommunicator(self, size: int, unique: int, rank: int) -> Communicator:
        self.barrier(unique, size)
        return Communicator(self, size, unique, rank)

    def groupStart(self) -> None:
        _local.group = []

    def groupEnd(self) -> None:
        group, _local.group = _local.group, None
        for stream in {stream for stream, _, _ in group}:
            own = [(begin, end) for given, begin, end in group if given == stream]

            def work(own: list[Any] = own) -> None:
                for begin, _ in own:
                    begin()
                for _, end in reversed(own):  # a receive stands behind the send of the same step
                    end()

            Stream.streams[stream].give(work)


class Communicator:
    """As CuPy's, for the calls that are made."""

    def __init__(self, world: World, size: int, unique: int, rank: int) -> None:
        self.world, self.size, self.unique, self.rank, self.connected = world, size, unique, rank, False

    def rank_id(self) -> int:
        return self.rank

    def _call(self, name: str, stream: int, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self.world.calls.append((name, stream))
        if getattr(_local, "group", None) is not None:
            _local.group.append((stream, begin, end))
            return
        if not self.connected:
            self.connected = True
            self.world.barrier((self.unique, "connected"), self.size)
        Stream.streams[stream].give(begin)
        Stream.streams[stream].give(end)

    def send(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        taken = threading.Event()
        sent = self.world.sent[self.unique, self.rank, peer]
        self._call("send", stream, lambda: sent.put((ptr, count, kind, taken)), lambda: _met(taken))

    def recv(self, ptr: int, count: int, kind: int, peer: int, stream: int) -> None:
        sent = self.world.sent[self.unique, peer, self.rank]

        def take() -> None:
            source, number, other, taken = sent.get(timeout=SECONDS)
            assert (number, other) == (count, kind), "other data than the other end sends"
            ctypes.memmove(ptr, source, count * World.SIZES[kind])
            taken.set()

        self._call("recv", stream, lambda: None, take)

    def abort(self) -> None:
        self.world.calls.append(("abort", self.unique))

    def destroy(self) -> None:
        self.world.calls.append(("destroy", self.unique))
