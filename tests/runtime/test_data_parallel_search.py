"""Reverse first-k with measured costs: one k on all ranks, and the numbers of one worker."""

from __future__ import annotations

import time

import pytest

import replicas as rep
from sparsebp import nn
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.runtime.replicas import ReverseFirstKExecutor, TimedReplica
from sparsebp.schedule import Action


def work(transport, sharded=False, clip_norm=None, samples=23, epochs=2):
    model = rep.mlp()
    optimizer = rep.OPTIMIZERS["adam"](model.parameters())
    executor = ReverseFirstKExecutor(
        model, nn.CrossEntropyLoss(), optimizer, transport, sharded=sharded, clip_norm=clip_norm, steps=3
    )
    steps = rep.batches_of(samples, 6, 1, epochs)
    losses, norms = rep.run(executor, steps, rep.INPUTS, executor.own)
    executor.gather_state(everywhere=True)
    return rep.state_of(model, optimizer), losses, norms, executor


@pytest.mark.parametrize(("size", "sharded", "clip_norm"), [(1, False, None), (2, True, None), (3, False, 0.05)])
def test_equal_to_one_worker(size, sharded, clip_norm):
    want = rep.alone(rep.mlp, rep.OPTIMIZERS["adam"], clip_norm=clip_norm)
    got = run_ranks(size, lambda transport: work(transport, sharded, clip_norm))
    rep.assert_like_one_worker(got, want, 1e-10)
    assert all(0 <= executor.k < 7 for *_, executor in got)
    assert len({executor.k for *_, executor in got}) == 1
    assert len({str(executor.costs) for *_, executor in got}) == 1


def test_few_samples():
    """Rank 2 has none at all, and is measured all the same."""
    states = run_ranks(3, lambda transport: work(transport, samples=2, epochs=6))
    assert len({rep.digest(state) for state, *_ in states}) == 1
    assert len({executor.k for *_, executor in states} - {None}) == 1


def test_the_clock_stands_still_while_sums_are_waited_for():
    class Slow:
        """Lets every sum of gradients take a while."""

        def __init__(self, inner):
            self.inner, self.rank, self.size, self.slow = inner, inner.rank, inner.size, False
            self.share, self.barrier, self.broadcast = inner.share, inner.barrier, inner.broadcast

        def allreduce(self, array):
            handle = self.inner.allreduce(array)

            class Later:
                def wait(_):
                    time.sleep(0.05 if array.size > 3 else 0)
                    handle.wait()

            return Later()

    def measure(transport):
        executor = rep.executor(Slow(transport), rep.mlp(), "waits", kind=TimedReplica)
        for _ in range(3):
            executor.step([(rep.INPUTS[:6], rep.CLASSES[:6])])
        costs = executor.costs(executor.sum_seconds())
        spent = sum(costs.duration(Action(stage, kind, 0)) for stage in range(7) for kind in "FIWU")
        return spent, sum(costs.duration(Action(stage, "S")) for stage in range(7)), executor.buckets.waited

    for spent, sums, waited in run_ranks(2, measure):
        assert waited > 0.15 and sums > 0.05 * 0.9 and spent < waited


def test_several_micro_batches_are_refused():
    def several(transport):
        model = rep.mlp()
        optimizer = rep.OPTIMIZERS["sgd"](model.parameters())
        executor = ReverseFirstKExecutor(model, nn.CrossEntropyLoss(), optimizer, transport)
        batch = rep.INPUTS[:3], rep.CLASSES[:3]
        executor.step([batch, batch])

    with pytest.raises(OptionError, match="one micro-batch a step"):
        run_ranks(1, several)


def test_tied_weights_are_refused_with_a_schedule_that_takes_them():
    def tied(transport):
        model = rep.shared()
        ReverseFirstKExecutor(model, nn.CrossEntropyLoss(), rep.OPTIMIZERS["sgd"](model.parameters()), transport)

    with pytest.raises(OptionError, match=r"several stages share.*schedule='data-parallel'"):
        run_ranks(2, tied)
