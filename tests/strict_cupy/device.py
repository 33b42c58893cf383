"""What a device does with work: streams, events, capture and graphs.

Every piece of work is a node that knows which others come before it: the one before it on its stream, events that the
stream waits for, and, for a stream that CUDA calls blocking, the default stream's. Nothing runs when it is asked for.
When the host waits for something, that and what must come before it runs, and nothing else: where a wait is missing,
the reader finds memory that nobody has written yet. ``Device.late = False`` runs everything at once, in the order of
the calls, which shows the opposite mistake, and gives errors where they arise.

While a stream is captured its work is noted and does not run; a graph runs it at each launch, on the memory that it was
captured with.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from strict_cupy.counts import note

ERRORS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: ("cudaErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing one"),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
}  # fmt: skip
"""The status codes that are met here, with CUDA's names and words."""


class CUDARuntimeError(RuntimeError):
    """As ``cupy.cuda.runtime.CUDARuntimeError``: `status` is CUDA's code."""

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(": ".join(ERRORS[status]))


class Node:
    """A piece of work; `before` has what comes first, `run` what it does, None when that is done.

    `reached`: when an idle device comes to it, which is when it is asked for; None where it has work to do before.
    """

    __slots__ = ("before", "reached", "run", "stamp")

    def __init__(self, run: Callable[[], None] | None, before: Iterable[Node]) -> None:
        self.run = run
        self.before = [node for node in before if node.run is not None]
        self.stamp: float | None = None
        self.reached: float | None = None


class Capture:
    """What is being captured: work in the order of the calls, and the streams that take part."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.nodes: list[Node] = []
        self.tails: dict[int, list[Node]] = {origin: []}
        self.broken = False


class Device:
    """What devices do with work, and all of its state; a test of several devices raises `count`."""

    def __init__(self) -> None:
        self.late = True
        self.count = 1
        self.lock = threading.RLock()
        self.sticky: int | None = None
        self.tails: dict[int, list[Node]] = {0: []}
        self.blocking: set[int] = {0}
        self.captures: dict[int, Capture] = {}
        self.destroyed: set[int] = set()
        self.streams = 0

    # ---- streams -----------------------------------------------------------------------------------------------------

    def new_stream(self, blocking: bool) -> int:
        """Return the pointer of a new stream."""
        with self.lock:
            self.check()
            self.streams += 1
            pointer = 0x5000 + 16 * self.streams
            self.tails[pointer] = []
            if blocking:
                self.blocking.add(pointer)
            return pointer

    def tail(self, stream: int) -> list[Node]:
        """Return what work that is given to `stream` now comes behind."""
        capture = self.captures.get(stream)
        if capture is not None:
            return capture.tails[stream]
        found = list(self.tails[stream])
        if stream == 0:
            for other in self.blocking - {0}:
                found += self.tails[other]
        elif stream in self.blocking:
            found += self.tails[0]
        return [node for node in found if node.run is not None]

    def submit(self, run: Callable[[], None], stream: int, what: str, name: str, size: int = 0) -> Node:
        """Give work to a stream; `what`, `name` and `size` are for the counters."""
        with self.lock:
            self.check()
            if stream in self.destroyed:
                raise CUDARuntimeError(400)
            note(what, name, size)
            capture = self.captures.get(stream)
            if capture is not None:
                node = Node(run, capture.tails[stream])
                capture.nodes.append(node)
                capture.tails[stream] = [node]
                return node
            if stream == 0 and any(other in self.blocking for other in self.captures):
                self.break_captures()
                raise CUDARuntimeError(906)
            node = Node(run, self.tail(stream))
            self.tails[stream] = [node]
            if not self.late:
                self.finish([node])
            return node

    def wait_for(self, stream: int, nodes: list[Node], of: Capture | None) -> None:
        """Let `stream` wait for what an event has noted; `of` is the capture that the event was recorded in."""
        with self.lock:
            self.check()
            here = self.captures.get(stream)
            if of is not None and here is None:
                if of.origin not in self.captures or self.captures[of.origin] is not of:
                    raise CUDARuntimeError(1)
                self.captures[stream] = of  # it takes part from now on
                of.tails[stream] = list(nodes)
            elif here is not of:
                here.broken = True
                raise CUDARuntimeError(905)
            elif here is not None:
                here.tails[stream] = [*here.tails[stream], *nodes]
            else:
                self.tails[stream] = [*(n for n in self.tails[stream] if n.run is not None), *nodes]

    # ---- the host waits ----------------------------------------------------------------------------------------------

    def finish(self, nodes: Iterable[Node]) -> None:
        """Run these and what must come before them."""
        stack = [node for node in nodes if node.run is not None]
        while stack:
            node = stack[-1]
            if node.run is None:
                stack.pop()
                continue
            first = [other for other in node.before if other.run is not None]
            if first:
                stack += first
                continue
            stack.pop()
            run, node.run, node.before = node.run, None, []
            node.stamp = time.perf_counter() if node.reached is None else node.reached
            run()

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for a stream, or for all of them."""
        with self.lock:
            self.check()
            if stream in self.captures or (stream is None and self.captures):
                self.captures[stream if stream is not None else next(iter(self.captures))].broken = True
                raise CUDARuntimeError(900)
            for each in list(self.tails) if stream is None else [stream]:
                self.finish(self.tail(each))
            self.check()

    def read(self, stream: int) -> None:
        """Wait for a stream whose result is read."""
        with self.lock:
            self.check()
            self.finish(self.tail(stream))
            self.check()

    # ---- capture -----------------------------------------------------------------------------------------------------

    def begin_capture(self, stream: int) -> None:
        """Note the work of `stream` from now on in place of running it."""
        with self.lock:
            self.check()
            if stream in self.captures:
                raise CUDARuntimeError(900)
            self.captures[stream] = Capture(stream)

    def end_capture(self, stream: int) -> list[Node]:
        """Return the captured work, in an order that keeps what comes before what."""
        with self.lock:
            capture = self.captures.get(stream)
            if capture is None or capture.origin != stream:
                raise CUDARuntimeError(1)
            for other in [each for each, found in self.captures.items() if found is capture]:
                del self.captures[other]
            if capture.broken:
                raise CUDARuntimeError(901)
            reached: set[int] = set()
            stack = list(capture.tails[stream])
            while stack:
                node = stack.pop()
                if id(node) not in reached:
                    reached.add(id(node))
                    stack += node.before
            if len(reached) != len(capture.nodes):
                raise CUDARuntimeError(904)
            return capture.nodes

    def break_captures(self) -> None:
        """Note in every capture that something was done that it forbids."""
        for capture in self.captures.values():
            capture.broken = True

    def launch_graph(self, nodes: list[Node], stream: int) -> None:
        """Give all work of a graph to a stream; inside, it is ordered as it was captured, and not more."""
        with self.lock:
            self.check()
            note("graphs")
            begin = self.tail(stream)
            made: dict[int, Node] = {}
            last: list[Node] = []
            for node in nodes:
                made[id(node)] = copy = Node(node.run, begin)
                copy.before += [made[id(other)] for other in node.before]
                last.append(copy)
            self.tails[stream] = [Node(lambda: None, [*begin, *last])]
            if not self.late:
                self.finish(self.tails[stream])

    # ---- errors that stay --------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has broken the device, at every call from then on, as CUDA does."""
        if self.sticky is not None:
            raise CUDARuntimeError(self.sticky)

    def forget(self) -> None:
        """Forget all work, of a test that has ended; memory stays."""
        with self.lock:
            self.captures.clear()
            for stream in self.tails:
                self.tails[stream] = []


DEVICE = Device()


class _Current(threading.local):
    """Of a thread: its device, its stream on each device, and the streams to go back to, with their devices."""

    device = 0

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self.stack: list[tuple[int, Any]] = []


_current = _Current()


def current_device() -> int:
    """Return the number of the calling thread's device: 0 in every new thread, as CUDA has it."""
    return _current.device


def set_device(number: int) -> None:
    """Make a device the calling thread's."""
    DEVICE.check()
    if not 0 <= number < DEVICE.count:
        raise CUDARuntimeError(101)
    _current.device = number


def current_stream(device_id: int = -1) -> Any:
    return _current.streams.get(_current.device if device_id == -1 else device_id) or Stream.null


class Event:
    """As ``cupy.cuda.Event``."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        DEVICE.check()
        self._timing = not disable_timing
        self._nodes: list[Node] = []
        self._marker: Node | None = None
        self._capture: Capture | None = None

    def record(self, stream: Any = None) -> None:
        pointer = (current_stream() if stream is None else stream).ptr
        with DEVICE.lock:
            DEVICE.check()
            self._capture = DEVICE.captures.get(pointer)
            self._nodes = list(DEVICE.tail(pointer))
            self._marker = None
            if self._timing and self._capture is None:
                self._marker = Node(lambda: None, self._nodes)
                if all(node.reached is not None for node in self._marker.before):
                    self._marker.reached = time.perf_counter()  # the host's own work between two events takes time too
                DEVICE.tails[pointer] = self._nodes = [self._marker]

    def synchronize(self) -> None:
        note("synchronized", "event")
        with DEVICE.lock:
            DEVICE.check()
            if self._capture is not None:
                self._capture.broken = True
                raise CUDARuntimeError(907)
            DEVICE.finish(self._nodes)
            DEVICE.check()

    @property
    def done(self) -> bool:
        """Whether what it notes is done."""
        DEVICE.check()
        if self._capture is not None:
            raise CUDARuntimeError(907)
        return all(node.run is None for node in self._nodes)


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return milliseconds between two events that have been waited for."""
    DEVICE.check()
    if start_event._marker is None or end_event._marker is None:
        raise CUDARuntimeError(400)
    first, last = start_event._marker.stamp, end_event._marker.stamp
    if first is None or last is None:
        raise CUDARuntimeError(600)
    return max(1e3 * (last - first), 1e-3)


class Graph:
    """As ``cupy.cuda.Graph``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "currently this class cannot be initiated by the user and must be created via stream capture"
        )

    @classmethod
    def of(cls, nodes: list[Node]) -> Graph:
        """Return the graph of captured work."""
        graph = cls.__new__(cls)
        graph._nodes = nodes
        return graph

    def launch(self, stream: Any = None) -> None:
        DEVICE.launch_graph(self._nodes, (current_stream() if stream is None else stream).ptr)

    def upload(self, stream: Any = None) -> None:
        """Do nothing: there is nowhere to upload it."""
        DEVICE.check()


class Stream:
    """As ``cupy.cuda.Stream``."""

    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        if ptds and not null:
            raise NotImplementedError("the stand-in has no default stream of a thread")
        self.ptr = 0 if null else DEVICE.new_stream(not non_blocking)
        self.device_id = -1 if null else current_device()
        self.priority = 0 if priority is None else max(-5, min(0, priority))  # as CUDA clamps it
        self.is_non_blocking = non_blocking and not null

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """Wrap a foreign stream by the protocol that CuPy 14 takes; a wrapper that ends destroys the stream, as there.

        (CuPy's `Stream.__del__` does not ask whose the stream is.)
        """
        _, pointer = obj.__cuda_stream__()
        found = cls.__new__(cls)
        found.ptr, found.device_id, found.priority, found.is_non_blocking = pointer, current_device(), 0, False
        if pointer:
            DEVICE.tails.setdefault(pointer, [])
            weakref.finalize(found, DEVICE.destroyed.add, pointer).atexit = False
        return found

    def _matched(self) -> int:
        """Return the current device, which must be the stream's."""
        number = current_device() if self.device_id == -1 else self.device_id
        if number != current_device():
            raise RuntimeError(
                f"The device that the stream is created on ({number}) does not match with the current device "
                f"({current_device()})"
            )
        return number

    def __enter__(self) -> Stream:
        number = self._matched()
        _current.stack.append((number, _current.streams.get(number)))
        _current.streams[number] = self
        return self

    def __exit__(self, *args: object) -> None:
        number, before = _current.stack.pop()
        _current.streams[number] = before

    def use(self) -> Stream:
        _current.streams[self._matched()] = self
        return self

    def synchronize(self) -> None:
        note("synchronized", "stream")
        DEVICE.synchronize(self.ptr)

    @property
    def done(self) -> bool:
        """Whether all that it has been given is done."""
        DEVICE.check()
        return not DEVICE.tail(self.ptr)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        DEVICE.wait_for(self.ptr, event._nodes, event._capture)

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        DEVICE.begin_capture(self.ptr)

    def end_capture(self) -> Graph:
        return Graph.of(DEVICE.end_capture(self.ptr))

    def is_capturing(self) -> bool:
        return self.ptr in DEVICE.captures


class ExternalStream(Stream):
    """As ``cupy.cuda.ExternalStream``, which CuPy 14 warns of."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn("ExternalStream is deprecated. Use Stream.from_external()", DeprecationWarning, stacklevel=2)
        DEVICE.tails.setdefault(ptr, [])
        self.ptr, self.device_id, self.priority, self.is_non_blocking = ptr, device_id, 0, False


Stream.null = Stream(null=True)
