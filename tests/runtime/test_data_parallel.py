"""Replicas: the numbers of one worker with all samples, identical on all ranks and in every run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orders
import replicas as rep
from backends import needs_numba
from sparsebp import nn
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import OptionError, ScheduleError
from sparsebp.runtime.actions import Observer, Stages
from sparsebp.runtime.replicas import ReplicaExecutor, bucket_names
from sparsebp.schedule import Lane, StepGraph
from sparsebp.schedule.builders import gpipe, place_updates, synchronise

NAMES = list(rep.schedules(Stages(rep.mlp())))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [1, 3])
def test_equal_to_one_worker(name, size):
    want = rep.alone(rep.mlp, rep.OPTIMIZERS["adam"])
    got = rep.replicas(size, rep.mlp, rep.OPTIMIZERS["adam"], name)
    rep.assert_like_one_worker(got, want, 1e-10)
    if size == 1:
        orders.assert_same(got[0][0], want[0])


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_random_settings(data):
    make, optimizer, name, size, options = rep.random_settings(data.draw, ["sgd", "momentum", "amsgrad"])
    small = {"bucket_bytes": data.draw(st.sampled_from([1, 300, 10**6])), "sharded": data.draw(st.booleans())}
    got = rep.replicas(size, make, optimizer, name, **options, **small)
    rep.assert_like_one_worker(got, rep.alone(make, optimizer, **options))
    again = rep.replicas(size, make, optimizer, name, **options, **small)
    assert rep.digest(again[0][0]) == rep.digest(got[0][0])


@given(
    seed=st.integers(0, 2**32 - 1), first=st.sampled_from("FUI"), microbatches=st.integers(1, 2), waits=st.booleans(),
    sharded=st.booleans(),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_every_order_gives_the_same_numbers(seed, first, microbatches, waits, sharded):
    def schedule_of(stages):
        graph = StepGraph(len(stages), microbatches, stages.unweighted, "step", True, first)
        schedule = orders.random_order(np.random.default_rng(seed), graph, 1, first)
        if waits:
            return schedule
        cells = schedule.lanes[0].cells
        main, link = (tuple(cell for cell in cells if (cell.kind == "S") == there) for there in (False, True))
        return replace(schedule, lanes=(Lane(0, "main", main), Lane(0, "link", link)))

    optimizer, options = rep.OPTIMIZERS["momentum"], {"accumulate": microbatches, "epochs": 1}
    want = rep.alone(rep.mlp, optimizer, **options)
    got = rep.replicas(2, rep.mlp, optimizer, schedule_of, sharded=sharded, **options)
    rep.assert_like_one_worker(got, want, 1e-10)


@pytest.mark.parametrize("model", ["mlp", "mlp, hybrid", "conv", "shared, linear"])
def test_models(model):
    make, data = orders.MODELS[model]
    options = {"inputs": data().x, "epochs": 1, "batch_size": 7}
    (one, two), (again, _) = (rep.replicas(2, make, rep.OPTIMIZERS["adam"], "first-ready", **options) for _ in "12")
    assert rep.digest(one[0], running=False) == rep.digest(two[0], running=False)
    assert one[1:] == two[1:] == again[1:]
    orders.assert_same(again[0], one[0])


@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 1), (2, 3), (7, 3), (9, 3), (23, 4)])
def test_shares(count, size):
    executors = [ReplicaExecutor.__new__(ReplicaExecutor) for _ in range(size)]
    for rank, executor in enumerate(executors):
        executor.transport = type("Ranks", (), {"rank": rank, "size": size})
    shares = [executor.own(np.arange(count)) for executor in executors]
    assert np.concatenate(shares).tolist() == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


class Right(Observer):
    """Says how many are classified right."""

    def score(self, prediction, target):
        return (prediction.argmax(axis=-1) == target).sum(), target.size


def test_scores_are_those_of_all_samples():
    def work(transport):
        executor = rep.executor(transport, rep.mlp(), "first-ready", accumulate=2, observer=Right())
        parts = [executor.own(part) for part in np.array_split(np.arange(11), 2)]
        (step,) = executor.step([(rep.INPUTS[part], rep.CLASSES[part]) for part in parts])
        return step.score[0]

    prediction, _ = rep.mlp().forward(rep.INPUTS[:11])
    right = (prediction.argmax(axis=-1) == rep.CLASSES[:11]).mean()
    np.testing.assert_allclose(run_ranks(3, work), right)


def test_parts():
    params = {"a": np.zeros(3), "b": np.zeros(2), "c": np.zeros(2, np.float32), "d": np.zeros(0, np.float32)}
    early, late = dict(zip("abcd", range(4), strict=True)), dict.fromkeys("abcd", 4)
    assert bucket_names(params, early, late, 16) == [["a"], ["b"], ["c", "d"]]
    assert bucket_names(params, early, late, 1000) == [["a", "b"], ["c", "d"]]
    early, late = {"a": 0, "b": 2, "c": 4, "d": 5}, {"a": 1, "b": 3, "c": 6, "d": 6}
    assert bucket_names(params, early, late, 1000) == [["a"], ["b"], ["c", "d"]]
    assert bucket_names({}, {}, {}, 16) == []


def test_sums_begin_early_and_are_waited_for_late():
    """A bucket a stage: each sum begins right after its gradients, and is waited for right before its own update."""
    events = []

    class Noting:
        """Says when sums of gradients begin, and when they are waited for."""

        def __init__(self, inner):
            self.inner, self.rank, self.size, self.share = inner, inner.rank, inner.size, inner.share

        def allreduce(self, array):
            handle, name = self.inner.allreduce(array), f"{array.nbytes} bytes"
            if array.nbytes > 24:
                events.append(f"sum of {name}")

            class Later:
                def wait(_):
                    if array.nbytes > 24:
                        events.append(f"wait for {name}")
                    handle.wait()

            return Later()

    def noted(layer, method, what):
        inner = getattr(layer, method)

        def run(*args, **options):
            events.append(what)
            return inner(*args, **options)

        setattr(layer, method, run)

    def work(transport):
        model = nn.Sequential(*[nn.Linear(size, size, bias=False, rng=0) for size in (3, 3, 3)])
        executor = rep.executor(Noting(transport), model, "forward", bucket_bytes=1)
        for number, (_, layer) in enumerate(model.stages()):
            for method, letter in (("forward", "F"), ("input_grad", "I"), ("weight_grad", "W")):
                noted(layer, method, f"{number}{letter}")
        batch = [(rep.INPUTS[:4, :3].astype(np.float32), rep.CLASSES[:4])]
        executor.step(batch)
        first = len(events)
        executor.step(batch)
        return events[:first], events[first:]

    ((first, second),) = run_ranks(1, work)
    begun = ["2W", "sum of 36 bytes", "2I", "1W", "sum of 36 bytes", "1I", "0W", "sum of 36 bytes"]
    assert first == ["0F", "1F", "2F", *begun]
    late = [event for stage in range(3) for event in ("wait for 36 bytes", f"{stage}F")]
    assert second == [*late, *begun]


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("name", ["waits", "forward", "reverse first-2, forward"])
def test_on_a_device(name, clip_norm, sharded):
    """Two ranks on one device: the host looks at steps late, and rank 1 has no sample of the last one."""
    needs_numba("the host is what it compares with")
    import cupy

    options = {"inputs": rep.INPUTS[:13], "epochs": 1, "clip_norm": clip_norm}
    want = rep.alone(rep.mlp, rep.OPTIMIZERS["momentum"], **options)

    def work(transport):
        model = rep.mlp().to("cuda")
        optimizer = rep.OPTIMIZERS["momentum"](model.parameters())
        given = {"bucket_bytes": 150, "observer": Right(), "clip_norm": clip_norm, "sharded": sharded}
        executor = rep.executor(transport, model, name, optimizer, **given)
        done = []
        for (part,) in rep.batches_of(13, 6, 1):
            own = executor.own(part)
            done += executor.step([(cupy.asarray(rep.INPUTS[own]), cupy.asarray(rep.CLASSES[own]))])
        done += executor.flush()
        executor.gather_state(everywhere=True)
        state = rep.state_of(model, optimizer)
        state = {key: cupy.asnumpy(value) if hasattr(value, "ndim") else value for key, value in state.items()}
        norms = [step.norm(executor.stages.names) for step in done]
        return state, [step.loss for step in done], norms, [step.scores for step in done]

    got = run_ranks(2, work)
    for state, losses, norms, _ in got:
        rep.assert_close(state, want[0], 1e-8)
        np.testing.assert_allclose(losses, want[1], rtol=1e-9)
        np.testing.assert_allclose(norms, want[2], rtol=1e-7)
    assert got[0][3] == got[1][3]


# ---- what must not go on -----------------------------------------------------------------------------------------


def refused(change, error, match, size=2):
    def work(transport):
        model = rep.mlp()
        schedule = rep.schedules(Stages(model))["first-ready"]
        options = {"model": model, "schedule": schedule, "clip_norm": None} | change(model, transport.rank)
        rep.executor(transport, options["model"], lambda _: options["schedule"], clip_norm=options["clip_norm"])

    with pytest.raises(error, match=match):
        run_ranks(size, work)


def test_ranks_that_differ_are_refused():
    def other_values(model, rank):
        next(iter(model.parameters().values()))[0] += rank
        return {}

    names = list(rep.schedules(Stages(rep.mlp())))
    refused(other_values, OptionError, "Ranks differ in the parameter")
    refused(lambda model, rank: {"model": rep.mlp([np.float32, np.float64][rank])}, OptionError, "parameter .*float64")
    refused(
        lambda model, rank: {"schedule": rep.schedules(Stages(model))[names[rank]]}, OptionError, "differ in .*schedule"
    )
    refused(lambda model, rank: {"clip_norm": [None, 1.0][rank]}, OptionError, "differ in .*clip_norm")


def test_schedules_that_are_refused():
    def without(model, rank):
        return {"schedule": orders.order_for(model)}

    def of_two_workers(model, rank):
        whole = orders.order_for(model, gpipe, workers=2, microbatches=2)
        return {"schedule": place_updates(synchronise(whole))}

    def of_two_streams(model, rank):
        schedule = rep.schedules(Stages(model))["first-ready"]
        main, link = (lane.cells for lane in schedule.lanes)
        kinds = {"main": "FIU", "sub": "W"}
        lanes = [Lane(0, name, tuple(c for c in main if c.kind in kind)) for name, kind in kinds.items()]
        return {"schedule": replace(schedule, lanes=(*lanes, Lane(0, "link", link)))}

    def of_another_model(model, rank):
        return {"schedule": rep.schedules(Stages(rep.shared()))["first-ready"]}

    def endless(model, rank):
        schedule = rep.schedules(Stages(model))["first-ready"]
        lanes = tuple(
            replace(lane, cells=lane.cells[::-1]) if lane.stream == "main" else lane for lane in schedule.lanes
        )
        return {"schedule": replace(schedule, lanes=lanes)}

    refused(without, OptionError, "does not say in which order")
    refused(of_two_workers, OptionError, "on 2 streams|several workers")
    refused(of_two_streams, OptionError, "computes on one stream")
    refused(of_another_model, OptionError, "is not of this model")
    refused(endless, ScheduleError, "0W0|cannot|waits")


def test_a_step_without_samples_is_refused():
    def work(transport):
        rep.executor(transport, rep.mlp(), "first-ready").step([(rep.INPUTS[:0], rep.CLASSES[:0])])

    with pytest.raises(OptionError, match="A step has no samples"):
        run_ranks(2, work)
