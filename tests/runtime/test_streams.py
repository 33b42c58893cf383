"""Device streams, with arrays of the host and on a GPU."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest

import orders
from sparsebp import nn, optim
from sparsebp.core import backend, graphs, threads
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.streams import TwoStreams
from sparsebp.schedule.builders import conventional, out_of_order
from strict_cupy.modules import build


def test_what_streams_work_on_is_kept_until_both_are_done(monkeypatch):
    model = orders.mlp()
    order = orders.order_for(model, streams=2, fusion="backward")
    executor = PlainExecutor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), order)
    executor._two = TwoStreams(build()["cupy"])
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
    executor = PlainExecutor(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters()), order)
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
    with graphs.streams(np, 2)[1]:
        assert graphs.record(np) is None
    graphs.wait(np, None)


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("schedule", ["ooo", "conventional"])
def test_two_streams_of_a_gpu(schedule):
    cp = backend.cupy()
    losses = []
    for order in ("conventional", schedule):
        model = orders.conv().to("cuda")
        built = orders.order_for(model, out_of_order if order == "ooo" else conventional, fusion="backward")
        executor = PlainExecutor(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters(), 0.01), built)
        steps = []
        for _ in range(5):
            steps += executor.step([(cp.asarray(orders.IMAGES), cp.asarray(orders.CLASSES))])
        steps += executor.flush()
        executor.close()
        losses.append([step.loss for step in steps])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
