"""The stand-in for CuPy refuses the same calls as CuPy and CUDA, and runs work in a legal order."""

from __future__ import annotations

import importlib.util
import time

import numpy as np
import pytest

from strict_cupy import counted, installed, surface
from strict_cupy.device import DEVICE, CUDARuntimeError

REFUSED = [
    (lambda cp, a, host: np.asarray(a), TypeError, "Implicit conversion"),
    (lambda cp, a, host: a + host, TypeError, "Unsupported type"),
    (lambda cp, a, host: host + a, TypeError, "Unsupported type"),
    (lambda cp, a, host: a.__iadd__(host), TypeError, "Unsupported type"),
    (lambda cp, a, host: np.add(a, host), TypeError, "Unsupported type"),
    (lambda cp, a, host: a @ host, TypeError, "Unsupported type"),
    (lambda cp, a, host: cp.where(a > 0, a, host), TypeError, "Unsupported type"),
    (lambda cp, a, host: cp.concatenate([a, host]), TypeError, "Only cupy arrays"),
    (lambda cp, a, host: a.__setitem__(slice(None), host), ValueError, "non-scalar numpy.ndarray"),
    (lambda cp, a, host: cp.ascontiguousarray(host), TypeError, "incorrect type"),
    (lambda cp, a, host: cp.sum(a, where=a > 0), TypeError, "where"),
    (lambda cp, a, host: a.max(initial=0), TypeError, "initial"),
    (lambda cp, a, host: cp.add(a, a, where=a > 0), TypeError, "Wrong arguments"),
    (lambda cp, a, host: cp.sum(host), TypeError, "Unsupported type|expected cupy"),
    (lambda cp, a, host: cp.nanpercentile(a, 3), AttributeError, "nanpercentile"),
    (lambda cp, a, host: bool(a), ValueError, "ambiguous"),
    (lambda cp, a, host: list(cp.asarray(3.0)), TypeError, "0-d"),
    (lambda cp, a, host: a.item(0), TypeError, "argument"),
    (lambda cp, a, host: cp.array(["text"]), ValueError, "Unsupported dtype"),
    (lambda cp, a, host: hash(a), TypeError, "unhashable"),
]


@pytest.fixture
def cp():
    if not installed():
        pytest.skip("only on the stand-in")
    import cupy

    return cupy


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_refused_as_by_cupy(cp, call, error, words):
    with pytest.raises(error, match=words):
        call(cp, cp.ones((2, 2)), np.ones((2, 2)))


@gpu
def test_numbers_are_taken(cp):
    a = cp.ones(2, np.float32)
    for number in (2, 2.0, np.float32(2), np.int64(2)):
        assert (a * number).tolist() == [2, 2] and (number * a).tolist() == [2, 2]
    assert (a * np.float64(2)).dtype == np.float64 and (a * 2.0).dtype == np.float32
    a[...] = np.float32(3)
    a[1] = 4
    assert a.tolist() == [3, 4]


@gpu
def test_what_the_host_reads_is_counted(cp):
    with counted() as counts:
        a = cp.asarray(np.arange(4.0))
        total = float((a * a).sum())
    assert total == 14
    assert (counts.h2d, counts.h2d_bytes, counts.d2h, counts.host_reads) == (1, 32, 1, 1)
    assert counts.launched == {"cupy.multiply": 1, "cupy.sum": 1} and counts.ours == 0 and counts.theirs == 2


@gpu
def test_a_wait_that_is_missing_is_seen(cp):
    first, second = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    with first:
        a = cp.zeros(3)
        ready = first.record()
        a += 1
        written = first.record()
    for event, expected in ((ready, [0, 0, 0]), (written, [1, 1, 1])):
        second.wait_event(event)
        with second:
            assert (a + 0).tolist() == expected
    with first:
        b = cp.full(3, 12345.0)
    with second:
        assert b.tolist() != [12345] * 3


@gpu
def test_streams_wait_for_the_default_one_unless_they_say_no(cp):
    a = cp.zeros(3)
    a += 1
    with cp.cuda.Stream():
        assert a.tolist() == [1, 1, 1]
    b = cp.full(3, 54321.0)
    with cp.cuda.Stream(non_blocking=True):
        assert b.tolist() != [54321] * 3


@gpu
def test_memory_that_is_freed_is_given_to_the_next(cp):
    cp.get_default_memory_pool().free_all_blocks()
    a = cp.ones(7)
    pointer, a = a.data.ptr, None
    with cp.cuda.Stream():
        assert cp.empty(7).data.ptr != pointer
    b = cp.empty(7)
    assert b.data.ptr == pointer and np.isnan(b.get()).all()


def capture(cp, work, pool=None):
    stream = cp.cuda.Stream(non_blocking=True)
    with cp.cuda.using_allocator((pool or cp.cuda.MemoryPool()).malloc), stream:
        stream.begin_capture()
        work(stream)
        return stream.end_capture()


@gpu
def test_a_graph_runs_its_work_again_on_the_same_memory(cp):
    a, out, pool = cp.arange(3.0), cp.zeros(3), cp.cuda.MemoryPool()
    cp.cuda.Device().synchronize()

    def work(stream):
        b = a * 2
        out[...] = b + out

    graph = capture(cp, work, pool)
    assert out.tolist() == [0, 0, 0]  # nothing has run
    with counted() as counts:
        graph.launch()
        a += 1
        graph.launch()
    assert out.tolist() == [2, 6, 10] and counts.graphs == 2 and counts.launched == {"cupy.add": 1}


@gpu
def test_a_graph_forks_and_joins(cp):
    a, other = cp.zeros(3), cp.cuda.Stream(non_blocking=True)
    pool = cp.cuda.MemoryPool()
    cp.cuda.Device().synchronize()

    def work(stream, join=True):
        begun = stream.record()
        other.wait_event(begun)
        with other:
            a[1:] += 1
        if join:
            stream.wait_event(other.record())
        a[:1] += 2

    graph = capture(cp, work, pool)
    graph.launch()
    assert a.tolist() == [2, 1, 1]
    with pytest.raises(CUDARuntimeError, match="Unjoined"):
        capture(cp, lambda stream: work(stream, join=False), pool)


@gpu
@pytest.mark.parametrize(
    ("work", "error", "words"),
    [
        (lambda cp, a, stream: a.get(), RuntimeError, "D2H transfers are disallowed"),
        (lambda cp, a, stream: float(a.sum()), RuntimeError, "D2H"),
        (lambda cp, a, stream: cp.asarray(np.ones(3)), RuntimeError, "H2D"),
        (lambda cp, a, stream: a[[0, 1]], RuntimeError, "H2D"),
        (lambda cp, a, stream: a[a > 0], RuntimeError, "D2H"),
        (lambda cp, a, stream: a @ a, NotImplementedError, "cuBLAS"),
        (lambda cp, a, stream: cp.concatenate([a] * 9), RuntimeError, "H2D"),
        (lambda cp, a, stream: stream.synchronize(), CUDARuntimeError, "CaptureUnsupported"),
        (lambda cp, a, stream: cp.cuda.Device().synchronize(), CUDARuntimeError, "CaptureUnsupported"),
        (lambda cp, a, stream: stream.record().synchronize(), CUDARuntimeError, "CapturedEvent"),
    ],
)  # fmt: skip
def test_refused_while_work_is_captured(cp, work, error, words):
    a = cp.ones(3)
    with pytest.raises(error, match=words):
        capture(cp, lambda stream: work(cp, a, stream))
    DEVICE.forget()  # the capture was left open


@gpu
def test_memory_of_the_default_pool_is_refused_in_a_capture(cp):
    stream = cp.cuda.Stream(non_blocking=True)
    with stream, pytest.raises(RuntimeError, match="default pool"):
        stream.begin_capture()
        cp.ones(3)
    DEVICE.forget()
    with pytest.raises(RuntimeError, match="legacy"):
        cp.cuda.Stream.null.begin_capture()


@gpu
def test_a_wait_for_uncaptured_work_ends_a_capture(cp):
    event = cp.cuda.get_current_stream().record()
    with pytest.raises(CUDARuntimeError, match="Isolation"):
        capture(cp, lambda stream: stream.wait_event(event))
    DEVICE.forget()


@gpu
def test_times_are_those_of_events_that_have_been_waited_for(cp):
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    cp.ones(3)
    stop.record()
    with pytest.raises(CUDARuntimeError, match="NotReady"):
        cp.cuda.get_elapsed_time(start, stop)
    stop.synchronize()
    assert cp.cuda.get_elapsed_time(start, stop) > 0


@gpu
def test_an_idle_device_reaches_an_event_when_it_is_recorded(cp):
    """So the host's own work between two events counts, as that of a peer that is timed with them."""
    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    time.sleep(0.01)
    stop.record()
    stop.synchronize()
    assert cp.cuda.get_elapsed_time(start, stop) > 5


def test_nobody_imports_it_by_accident():
    found = importlib.util.find_spec("cupy") if not installed() else None
    assert found is None or "strict" not in str(found.origin)


def test_its_surface_is_cupys():
    if installed():
        return
    cupy = pytest.importorskip("cupy", reason="CuPy is not here to compare with")
    if not cupy.__version__.startswith(surface.VERSION):
        pytest.skip(f"CuPy {cupy.__version__} may differ from {surface.VERSION}")
    assert surface.describe(cupy).splitlines() == surface.FILE.read_text().splitlines()
