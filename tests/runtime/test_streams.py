"""Device streams: which waits for which event, on a recording namespace and on a GPU."""

from __future__ import annotations

import contextlib
import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core import backend, threads
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.streams import TwoStreams
from sparsebp.schedule.builders import conventional, out_of_order


class FakeDevice:
    """What `backend` uses of ``cupy.cuda``; notes who recorded and who waited."""

    def __init__(self):
        self.notes, self.current = [], threading.local()
        device = self

        class Stream:
            def __init__(self, priority=0):
                self.priority = priority

            def __enter__(self):
                device.current.stream = self

            def __exit__(self, *_):
                device.current.stream = None

            def wait_event(self, event):
                device.notes.append(("wait", self.priority, event))

        class Device(contextlib.nullcontext):
            id = 0

        class Event:
            def __init__(self, disable_timing):
                self.stream = None

            def record(self):
                self.stream = device.current.stream.priority
                device.notes.append(("record", self.stream, self))

        self.xp = SimpleNamespace(
            cuda=SimpleNamespace(
                Stream=Stream, Event=Event, get_current_stream=lambda: device.current.stream,
                Device=Device,
            )
        )  # fmt: skip


@pytest.mark.parametrize("build", [out_of_order, conventional])
def test_streams_wait_for_each_others_events(build):
    model, twin = orders.conv(), orders.conv()
    options = {"streams": 2, "fusion": "backward"} if build is conventional else {"regions": 2}
    order = orders.order_for(model, build, **options)
    device = FakeDevice()
    opt, twin_opt = (optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    executor = Executor(model, nn.CrossEntropyLoss(), opt, order)
    executor._two = TwoStreams(device.xp)
    finished = []
    for _ in range(3):
        finished += executor.step([(orders.IMAGES, orders.CLASSES)])
    finished += executor.flush()
    executor.close()
    assert all(step.held is None for step in finished) and len(finished) == 3
    recorded = {id(event) for kind, _, event in device.notes if kind == "record"}
    waited = [(stream, event) for kind, stream, event in device.notes if kind == "wait"]
    assert {stream for stream, _ in waited} == {-1, 0}
    assert all(id(event) in recorded and event.stream != stream for stream, event in waited)
    reference = Executor(twin, nn.CrossEntropyLoss(), twin_opt, orders.order_for(twin, fusion="none"))
    for _ in range(3):
        reference.step([(orders.IMAGES, orders.CLASSES)])
    orders.assert_same(orders.state_of(model, opt), orders.state_of(twin, twin_opt))


def test_what_streams_work_on_is_kept_until_both_are_done(monkeypatch):
    model = orders.mlp()
    order = orders.order_for(model, streams=2, fusion="backward")
    executor = Executor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), order)
    executor._two = TwoStreams(FakeDevice().xp)
    kept, wait = [], TwoStreams._wait

    def spy(self, step, event, current):
        wait(self, step, event, current)
        if event == -1:
            kept.append(len(step.held))

    monkeypatch.setattr(TwoStreams, "_wait", spy)
    executor.step([(orders.IMAGES, orders.CLASSES)])
    executor.close()
    assert kept == [3 + 3 + 5]  # W and U of three stages, I of five


def test_a_forgotten_executor_ends_its_thread():
    model = orders.mlp()
    order = orders.order_for(model, streams=2)
    executor = Executor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), order)
    executor.step([(orders.IMAGES, orders.CLASSES)])
    thread = executor._two._thread
    assert thread.is_alive()
    del executor
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(threads.most_threads() < 2, reason="needs two threads")
def test_kernels_of_threads_side_by_side_enter_no_parallel_region():
    from sparsebp.kernels.host.engine.compile import parts_for

    many = parts_for(10**9)
    with threads.serial_kernels():
        assert parts_for(10**9) == 1
        assert threads.thread_counts()["kernels"] == 1
        with threads.serial_kernels():
            pass
        assert threads.serial()
        other = []
        thread = threading.Thread(target=lambda: other.append(parts_for(10**9)))
        thread.start()
        thread.join()
    assert other == [many] and parts_for(10**9) == many > 1


def test_the_host_has_no_streams():
    with backend.streams(np, 2)[1]:
        assert backend.record(np) is None
    backend.wait(np, None)


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("schedule", ["ooo", "conventional"])
def test_two_streams_of_a_gpu(schedule):
    cp = backend.cupy()
    losses = []
    for order in ("conventional", schedule):
        model = orders.conv().to("cuda")
        built = orders.order_for(model, out_of_order if order == "ooo" else conventional, fusion="backward")
        executor = Executor(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.01), built)
        steps = []
        for _ in range(5):
            steps += executor.step([(cp.asarray(orders.IMAGES), cp.asarray(orders.CLASSES))])
        steps += executor.flush()
        executor.close()
        losses.append([step.loss for step in steps])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
