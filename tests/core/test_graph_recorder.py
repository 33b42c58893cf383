"""The graph recorder on the stand-in for CuPy, which runs what was captured and refuses what CUDA refuses."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebp.core import cublas, graphs
from sparsebp.core.errors import DeviceError
from sparsebp.core.graphs import GraphRecorder
from strict_cupy import counted, memory
from strict_cupy.cublas import LIBRARY
from strict_cupy.device import DEVICE, Graph
from strict_cupy.modules import build


@pytest.fixture
def cp(monkeypatch):
    """The stand-in, in nobody's place."""
    monkeypatch.setattr(cublas.ctypes, "CDLL", lambda name: LIBRARY)
    yield build()["cupy"]
    DEVICE.synchronize()
    DEVICE.forget()


def test_streams_have_priorities(cp):
    recorder = GraphRecorder(cp, 2)
    assert [stream.priority for stream in recorder.streams] == [-1, 0]
    assert not recorder.captured


def test_a_capture_and_its_replay_come_between_the_work_around_them(cp, monkeypatch):
    uploaded = []
    monkeypatch.setattr(Graph, "upload", lambda graph, stream: uploaded.append(stream))
    recorder, free = GraphRecorder(cp, 1), cp.get_default_memory_pool().free_bytes
    current = cp.cuda.Stream(non_blocking=True)  # waits for nothing by itself
    with current:
        a, out = cp.zeros(3), cp.zeros(3)
        a += 1
        with recorder.running():
            assert cp.cuda.get_current_stream() == recorder.streams[0]
            out += a
        assert out.tolist() == [1] * 3
        cp.zeros(5)
        assert free() > 0
        with counted() as counts, recorder.capturing():
            assert free() == 0  # the graph has its own memory
            b = a * 2
            out += b
            with pytest.raises(DeviceError, match="sent while work is captured"):
                cp.asarray(np.ones(3))
        assert recorder.captured and uploaded == recorder.streams and counts.log[0][:2] == ("synchronized", "device")
        assert out.tolist() == [1] * 3  # captured, not run
        for number in range(2):
            a += 1
            recorder.replay()
            assert out.tolist() == [5 + 6 * number] * 3
        assert cp.asarray(np.ones(3)).tolist() == [1] * 3  # the host may send again


def test_a_capture_that_fails_is_ended(cp):
    recorder, current = GraphRecorder(cp, 1), cp.cuda.get_current_stream()
    with pytest.raises(ValueError, match="of a layer"), recorder.capturing():
        raise ValueError("of a layer")
    assert not DEVICE.captures and not recorder.captured and cp.cuda.get_current_stream() == current
    assert memory._current.allocator is None and memory._pinned_allocator == [memory._pinned_pool.malloc]


def test_a_constant_has_memory_that_the_graph_does_not_reuse(cp):
    recorder, out = GraphRecorder(cp, 1), cp.zeros(6)
    host, used = np.arange(12.0).reshape(3, 4)[:, ::2], cp.get_default_memory_pool().used_bytes
    before = used()
    with recorder.capturing():
        found = graphs.constant(cp, host)
        with cp.cuda.Stream(non_blocking=True):  # there before anything is replayed
            assert found.tolist() == host.tolist()
        out += found.reshape(6)
        address = found.data.ptr
        del found
        out += cp.full(6, 100.0)
        assert cp.full(6, 10.0).data.ptr != address
    assert used() > before  # nobody else's: it is kept as long as the graph
    for number in (1, 2):
        recorder.replay()
        assert out.tolist() == [number * (value + 100) for value in host.ravel()]


def test_products_set_the_stream_and_its_workspace(cp, monkeypatch):
    recorder, calls = GraphRecorder(cp, 2), []
    for name in ("cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx", "cublasGemmStridedBatchedEx"):
        method = getattr(LIBRARY, name)
        monkeypatch.setattr(LIBRARY, name, lambda *a, name=name, method=method: (calls.append(name[6:]), method(*a))[1])
    a = cp.ones((2, 3))
    with recorder.running():
        for stream in recorder.streams:
            with stream:
                for wanted in (["SetStream_v2", "SetWorkspace_v2", "GemmEx"], ["GemmEx"]):
                    calls.clear()
                    cublas.matmul(a, a.T)
                    assert calls == wanted
        assert cublas.matmul(a[None], a.T[None]).shape == (1, 2, 2)
        assert calls[-1] == "GemmStridedBatchedEx"
    assert len(recorder._cublas._workspaces) == 2
    monkeypatch.setattr(LIBRARY, "cublasSetStream_v2", lambda *_: 13)
    with pytest.raises(DeviceError, match="cublasSetStream_v2 failed"), recorder.running(), recorder.streams[1]:
        cublas.matmul(a, a.T)
    with pytest.raises(DeviceError, match="cublasSetStream_v2 failed"), recorder.running():  # it is not taken as set
        cublas.matmul(a, a.T)


@pytest.mark.parametrize(("allowed", "wanted"), [(False, [68, 68, 70]), (True, [77, 77, 70])])
def test_tf32_is_asked_for_in_float32_if_it_is_allowed(cp, monkeypatch, allowed, wanted):
    computes = []
    for name in ("cublasGemmEx", "cublasGemmStridedBatchedEx"):
        method = getattr(LIBRARY, name)
        monkeypatch.setattr(LIBRARY, name, lambda *a, method=method: (computes.append(a[-2]), method(*a))[1])
    assert cublas.allow_tf32 is False
    monkeypatch.setattr(cublas, "allow_tf32", allowed)
    single = cp.ones((2, 3), np.float32)
    with GraphRecorder(cp, 1).running():
        for a, b in ((single, single.T), (single[None], single.T[None]), (cp.ones((2, 3)), cp.ones((3, 2)))):
            cublas.matmul(a, b)
    assert computes == wanted


def test_a_library_that_is_not_there(cp, monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(cublas.ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"cuBLAS cannot be loaded.*cublas"):
        GraphRecorder(cp, 1)


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
