"""The graph recorder's calls to CuPy and cuBLAS, in order; tests/train has the real ones."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from sparsebp.core import backend
from sparsebp.core.backend import GraphRecorder
from sparsebp.core.errors import DeviceError


class Pointed(np.ndarray):
    """An array in memory that CuPy's pointers would name."""

    @property
    def data(self):
        def copy(address, size, stream):
            ctypes.memmove(self.ctypes.data, address, size)

        return SimpleNamespace(ptr=self.ctypes.data, copy_from_host_async=copy)


class Library:
    """cuBLAS that notes its calls; `status` is what it returns."""

    def __init__(self, notes):
        self.notes, self.status = notes, 0

    def __getattr__(self, name):
        def call(*arguments):
            self.notes.append(name.removeprefix("cublas").removesuffix("_v2"))
            return self.status

        return call


class Device:
    """What the recorder uses of CuPy; `notes` has what was done, on which stream and with which memory."""

    def __init__(self):
        self.notes, self.allocators, self.current, device = [], ["default"], [], self
        self.library = Library(self.notes)

        class Stream:
            count = 0

            def __init__(self, name=None, non_blocking=False, priority=0):
                Stream.count += 1
                self.name, self.ptr, self.priority = name or f"stream {Stream.count}", Stream.count, priority

            def __enter__(self):
                device.current.append(self)
                return self

            def __exit__(self, *_):
                device.current.pop()

            def record(self):
                device.notes.append(f"record {self.name}")
                return self.name

            def wait_event(self, event):
                device.notes.append(f"{self.name} waits for {event}")

            def synchronize(self):
                device.notes.append("synchronize")

            def begin_capture(self):
                device.notes.append("begin")

            def end_capture(self):
                device.notes.append("end")
                return SimpleNamespace(
                    upload=lambda stream: device.notes.append("upload"),
                    launch=lambda stream: device.notes.append(f"launch {stream.name}"),
                )

        class Pool:
            def malloc(self, size):
                raise NotImplementedError

            def free_all_blocks(self):
                device.notes.append("free")

        @contextlib.contextmanager
        def using_allocator(malloc):
            device.allocators.append("default" if malloc.__self__ is self.pool else "own")
            try:
                yield
            finally:
                device.allocators.pop()

        self.pool, self.pinned = Pool(), SimpleNamespace(malloc="pinned")
        self.current.append(Stream("null"))
        self.cuda = SimpleNamespace(
            Stream=Stream, MemoryPool=Pool, using_allocator=using_allocator,
            Device=lambda: SimpleNamespace(cublas_handle=1, synchronize=lambda: self.notes.append("wait for all")),
            get_current_stream=lambda: self.current[-1], runtime=SimpleNamespace(runtimeGetVersion=lambda: 13000),
            set_pinned_memory_allocator=lambda allocate: setattr(self, "allocate", allocate),
        )  # fmt: skip

    def empty(self, shape, dtype):
        self.notes.append(f"{self.allocators[-1]} memory on {self.current[-1].name}")
        return np.empty(shape, dtype).view(Pointed)

    def get_default_memory_pool(self):
        return self.pool

    def get_default_pinned_memory_pool(self):
        return self.pinned


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(backend.ctypes, "CDLL", lambda name: device.library)
    return device


def test_streams_have_priorities(device):
    recorder = GraphRecorder(device, 2)
    assert [stream.priority for stream in recorder.streams] == [-1, 0]
    assert device.notes == ["Create"] and not recorder.captured


def test_a_capture_and_its_replay(device):
    recorder = GraphRecorder(device, 1)
    first = recorder.streams[0].name
    device.notes.clear()
    with recorder.running():
        assert device.current[-1] is recorder.streams[0]
    assert device.notes == ["record null", f"{first} waits for null", f"record {first}", f"null waits for {first}"]
    device.notes.clear()
    with recorder.capturing():
        device.empty(3, np.float32)
        with pytest.raises(DeviceError, match="sent while work is captured"):
            device.allocate(8)
    assert device.allocate == "pinned" and recorder.captured
    assert device.notes == ["wait for all", "free", "begin", f"own memory on {first}", "end", "upload"]
    device.notes.clear()
    recorder.replay()
    assert device.notes[2] == f"launch {first}" and len(device.notes) == 5


def test_a_capture_that_fails_is_ended(device):
    recorder = GraphRecorder(device, 1)
    with pytest.raises(ValueError, match="of a layer"), recorder.capturing():
        raise ValueError("of a layer")
    assert device.notes[-1] == "end" and not recorder.captured and device.allocate == "pinned"
    assert [stream.name for stream in device.current] == ["null"] and device.allocators == ["default"]


def test_a_constant_has_memory_that_the_graph_does_not_reuse(device):
    recorder = GraphRecorder(device, 1)
    host = np.arange(12, dtype=np.int64).reshape(3, 4)[:, ::2]
    with recorder.capturing():
        device.notes.clear()
        found = backend.constant(device, host)
        assert device.notes[0].startswith("default memory on stream") and device.notes[1:] == ["synchronize"]
        assert device.notes[0] != f"default memory on {recorder.streams[0].name}"
    np.testing.assert_array_equal(found, host)


def test_products_set_the_stream_and_its_workspace(device):
    recorder = GraphRecorder(device, 2)
    a = np.zeros((2, 3), np.float32).view(Pointed)
    with recorder.running():
        for stream in recorder.streams:
            with stream:
                device.notes.clear()
                assert backend.matmul(a, a.T).shape == (2, 2)
                assert device.notes[-3:] == ["SetStream", "SetWorkspace", "GemmEx"]
                device.notes.clear()
                backend.matmul(a, a.T)
                assert [note for note in device.notes if "memory" not in note] == ["GemmEx"]
        assert backend.matmul(a[None], a.T[None]).shape == (1, 2, 2)
        assert device.notes[-1] == "GemmStridedBatchedEx"
    assert len(recorder._cublas._workspaces) == 2
    device.library.status = 13
    with pytest.raises(DeviceError, match="cublasSetStream_v2 failed"), recorder.running(), recorder.streams[1]:
        backend.matmul(a, a.T)
    with pytest.raises(DeviceError, match="cublasSetStream_v2 failed"), recorder.running():  # it is not taken as set
        backend.matmul(a, a.T)


def test_a_library_that_is_not_there(device, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(backend.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"cuBLAS cannot be loaded.*cublas"):
        GraphRecorder(device, 1)


def test_cupy_has_what_is_used():
    cupy = pytest.importorskip("cupy")
    for owner, names in (
        (cupy.cuda.Stream, "begin_capture end_capture record wait_event synchronize"),
        (cupy.cuda.Graph, "launch upload"), (cupy.cuda.MemoryPool, "malloc free_all_blocks"),
        (cupy.cuda.MemoryPointer, "copy_from_host_async ptr"), (cupy.cuda.Device, "cublas_handle"),
        (cupy.cuda, "using_allocator set_pinned_memory_allocator get_current_stream"),
        (cupy, "get_default_memory_pool get_default_pinned_memory_pool"), (cupy.cuda.runtime, "runtimeGetVersion"),
    ):  # fmt: skip
        assert all(hasattr(owner, name) for name in names.split())
