"""Pipelines on ranks: every synchronous schedule has the gradients, losses and weights of one worker."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelines as p
import schedules
from backends import needs_numba
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import NonFiniteError, OptionError, TransportError
from sparsebp.runtime.actions import Observer, Stages
from sparsebp.runtime.timeline import Timeline
from sparsebp.schedule import StepGraph
from sparsebp.schedule.builders import build, place_updates
from sparsebp.schedule.simulation import Event
from sparsebp.train import Trainer

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


def one_step_each(name: str, schedule: str, size: int, sizes: list[int], dtype=np.float64, **options):
    make, _ = p.MODELS[name]
    steps = [p.batches(name, sizes, dtype, seed) for seed in range(2)]
    wanted = p.alone(lambda: make(dtype), p.momentum, steps, **options)
    found = p.on_ranks(
        size, lambda: make(dtype), p.momentum, steps,
        lambda model: p.schedule_of(schedule, model, size, len(sizes)), **options,
    )  # fmt: skip
    return found, wanted


@pytest.mark.parametrize(("schedule", "size"), p.on_sizes(1, 3, 4))
def test_every_synchronous_schedule_gives_the_numbers_of_one_worker(schedule, size):
    """Bit for bit: micro-batches come to every stage in their order. DualPipe adds the sums of two ranks."""
    found, wanted = one_step_each("mlp", schedule, size, p.filling(schedule, size, [2, 3, 1, 2]))
    p.assert_close(found, wanted, **TIGHT)
    if schedule != "dualpipe":
        assert found[0] == wanted[0]
        assert p.digest(found[1]) == p.digest(wanted[1])


@pytest.mark.parametrize("name, schedule, size", [
    ("lenet5", "1f1b", 4), ("vgg11", "zb-h1", 3), ("densenet", "modulo", 2), ("gru", "fast-forward", 3),
    ("densenet", "gpipe", 4), ("gru", "zb-h2", 4), ("vgg11", "interleaved-1f1b", 2), ("lenet5", "gpipe", 1),
    ("transformer", "zb-h1", 4), ("transformer", "modulo", 3), ("vgg11", "zb-v", 2), ("lenet5", "dualpipe-v", 2),
    ("transformer", "dualpipe-v", 2), ("transformer", "dualpipe", 2), ("lenet5", "dualpipe", 2), ("gru", "dualpipe", 2),
    ("gru", "modulo", 2),
])  # fmt: skip
def test_networks(name, schedule, size):
    found, wanted = one_step_each(name, schedule, size, [2, 2, 2, 2])
    p.assert_close(found, wanted, **TIGHT)


@pytest.mark.parametrize(
    "schedule, size", [*((name, 2) for name in p.SYNCHRONOUS if name != "dualpipe"), ("1f1b", 4), ("zb-h1", 3)]
)
def test_groups_of_layers_have_the_numbers_of_their_layers(schedule, size):
    found, wanted = one_step_each("grouped", schedule, size, [2, 3, 1, 2])
    p.assert_close(found, wanted, **TIGHT)
    steps = [p.batches("grouped", [2, 3, 1, 2], seed=seed) for seed in range(2)]
    p.assert_close(found, p.alone(lambda: p.grouped(group=nn.Sequential), p.momentum, steps), **TIGHT)


@pytest.mark.parametrize(("schedule", "size"), p.on_sizes(2, 3, 4))
def test_skip_connections_cross_ranks(schedule, size):
    """Bit for bit, as without: the gradients at what is stashed are added in the order of one worker."""
    found, wanted = one_step_each("unet", schedule, size, p.filling(schedule, size, [2, 3, 1, 2]))
    p.assert_close(found, wanted, **TIGHT)
    if schedule != "dualpipe":
        assert found[0] == wanted[0]
        assert p.digest(found[1]) == p.digest(wanted[1])


def test_skip_connections_with_draws_statistics_and_second_forwards():
    def make():
        return p.unet(draws=True)

    steps = [p.batches("unet", counts, seed=counts[0]) for counts in ([4, 4, 4], [3, 2, 1], [4, 1])]
    wanted = p.alone(make, p.momentum, steps)
    for again in (), range(len(Stages(make()))):
        found = p.on_ranks(3, make, p.momentum, steps, lambda model, again=again: replace(
            p.schedule_of("1f1b", model, 3, 3), recomputed=frozenset(again)))  # fmt: skip
        p.assert_close(found, wanted, **TIGHT)
        assert p.digest(found[1]) == p.digest(wanted[1])


def test_skip_connections_where_ranks_hold_their_own_stages():
    x, target = p.batches("unet", [12])[0]

    def run(transport):
        with nn.deferred_init():
            model = p.unet(draws=True)
        options = {} if transport is None else {"transport": transport, "schedule": "1f1b"}
        trainer = Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), accumulate=2, rng=0, **options)
        history = trainer.fit((x, target), epochs=2, batch_size=6, validation=(x[:5], target[:5]), verbose=False)
        return [*history.loss, *(epoch.validation_loss for epoch in history.epochs)]

    wanted = run(None)
    for found in run_ranks(3, run):
        np.testing.assert_allclose(found, wanted, **TIGHT)


@pytest.mark.parametrize("name", ["mlp", "gru"])
def test_float32(name):
    found, wanted = one_step_each(name, "1f1b", 2, [3, 3], np.float32)
    p.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "modulo", "zb-h2", "zb-v", "dualpipe"])
def test_shapes_and_numbers_of_micro_batches_may_change(schedule):
    sizes = [[4, 4, 4], [4, 4, 3], [4, 4, 4], [3, 1], [5, 4, 3], [1], [4, 4, 4]]
    steps = [p.batches("mlp", counts, seed=number) for number, counts in enumerate(sizes)]
    make, shape = p.MODELS["mlp"][0], schedules.fitting(schedule, 3, 8, 3)
    ranks, most = shape["workers"], shape["microbatches"]
    found = p.on_ranks(ranks, make, p.momentum, steps, lambda model: p.schedule_of(schedule, model, ranks, most))
    p.assert_close(found, p.alone(make, p.momentum, steps), **TIGHT)


@pytest.mark.parametrize("schedule, size, sizes", [("zb-h1", 3, [2, 2, 2]), ("dualpipe", 2, [2, 2, 1, 2])])
def test_clipping_by_the_norm_over_all_ranks(schedule, size, sizes):
    found, wanted = one_step_each("mlp", schedule, size, sizes, clip_norm=1e-2)
    p.assert_close(found, wanted, **TIGHT)
    assert min(norm for _, norm in found[0]) > 1e-2


@pytest.mark.parametrize("frozen", [{"1.weight", "1.bias"}, {"3.bias"}, {"5.weight", "5.bias", "7.weight"}])
@pytest.mark.parametrize("schedule, size", [("1f1b", 2), ("1f1b", 4), ("dualpipe", 2)])
def test_parameters_that_are_not_trained(frozen, schedule, size):
    def trains(model):
        return optim.Adam({name: array for name, array in model.parameters().items() if name not in frozen})

    make = p.MODELS["mlp"][0]
    sizes = p.filling(schedule, size, [2, 3])
    steps = [p.batches("mlp", sizes, seed=seed) for seed in range(3)]
    found = p.on_ranks(size, make, trains, steps, lambda model: p.schedule_of(schedule, model, size, len(sizes)))
    p.assert_close(found, p.alone(make, trains, steps), **TIGHT)


def dropout():
    layers = []
    for n in range(3):
        layers += [nn.Conv2d(3, 3, 3, dtype=np.float64, rng=n), nn.Dropout(0.4, rng=100 + n)]
        layers.append(nn.BatchNorm2d(3, dtype=np.float64))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3, dtype=np.float64, rng=3))


def test_dropout_and_running_statistics_are_those_of_one_worker():
    steps = [p.batches("densenet", [4, 4, 4], seed=seed) for seed in range(3)]
    found = p.on_ranks(3, dropout, p.momentum, steps, lambda model: p.schedule_of("1f1b", model, 3, 3))
    p.assert_close(found, p.alone(dropout, p.momentum, steps), **TIGHT)
    assert any("running" in name for name in found[1])


def shared_apart():
    """The first stage and the last one share weights; the second and the fourth one a bias."""
    tied, one, other, more = (nn.Linear(7, 7, dtype=np.float64, rng=rng) for rng in range(4))
    other.params["bias"] = one.params["bias"]
    return nn.Sequential(tied, one, nn.Tanh(), other, nn.Tanh(), more, nn.Tanh(), tied)


def draws_together():
    rng = np.random.default_rng(0)
    return nn.Sequential(
        nn.Linear(7, 7, rng=1), nn.Dropout(0.5, rng=rng), nn.Linear(7, 3, rng=2), nn.Dropout(0.5, rng=rng)
    )


def scans():
    return nn.Sequential(nn.Linear(7, 7, rng=1), nn.Tanh(), nn.Linear(7, 3, rng=2), backward="hybrid")


@pytest.mark.parametrize("make, ranks, workers, build, words", [
    (shared_apart, 2, 2, "gpipe with updates at once", ["0.weight", "shared by stages on several ranks"]),
    (draws_together, 2, 2, "gpipe", ["draw from one random generator", "1, 3"]),
    (scans, 2, 2, "gpipe", ["set_backward"]),
    (p.mlp, 2, 3, "gpipe", ["another number of ranks", "workers=2"]),
    (p.mlp, 9, 2, "gpipe", ["more ranks than stages", "at most 8"]),
])  # fmt: skip
def test_what_cannot_run_is_refused(make, ranks, workers, build, words):
    def work(transport):
        model = make()
        schedule = p.schedule_of(build.partition(" ")[0], model, workers, 2)
        p.executor(model, place_updates(schedule, "backward") if "updates" in build else schedule, transport)

    with pytest.raises(OptionError) as error:
        run_ranks(ranks, work)
    for word in words:
        assert word in str(error.value)


def test_replicated_stages_have_no_running_statistics_and_do_not_draw():
    """On each of their ranks they would follow that rank's micro-batches alone."""

    def step(model, name):
        def work(transport):
            p.executor(model(), "dualpipe", transport, 4).step(p.batches(name, [2, 2, 2, 2]))

        run_ranks(2, work)

    with pytest.raises(OptionError, match=r"running statistics.*dualpipe-v"):
        step(p.densenet, "densenet")
    with pytest.raises(OptionError, match=r"The layer 1 draws random numbers on several ranks.*dualpipe-v"):
        step(
            lambda: nn.Sequential(
                nn.Linear(7, 7, dtype=np.float64, rng=1),
                nn.Dropout(0.5, rng=2),
                nn.Linear(7, 3, dtype=np.float64, rng=2),
            ),
            "mlp",
        )


@pytest.mark.parametrize(("schedule", "sizes"), [("zb-v", [2, 3, 1]), ("dualpipe-v", [2, 3, 1, 2])])
def test_stages_that_share_a_parameter_sum_as_one_worker_does(schedule, sizes):
    """The V puts the first stage and the last one on one rank, where their W of several micro-batches alternate."""

    def tied():
        linear = nn.Linear(7, 7, dtype=np.float64, rng=0)
        return nn.Sequential(linear, nn.Tanh(), nn.Linear(7, 7, dtype=np.float64, rng=1), linear)

    steps = [p.batches("mlp", sizes, seed=seed) for seed in range(3)]
    found = p.on_ranks(2, tied, p.momentum, steps, lambda model: p.schedule_of(schedule, model, 2, len(sizes)))
    assert p.digest(found[1]) == p.digest(p.alone(tied, p.momentum, steps)[1])


def test_stages_on_the_same_ranks_may_share_a_parameter():
    """And fewer micro-batches than the schedule's enter at one end alone: some ranks have no gradient of their own."""

    def tied():
        first, middle = nn.Linear(7, 7, dtype=np.float64, rng=0), nn.Linear(7, 7, dtype=np.float64, rng=1)
        return nn.Sequential(first, nn.Tanh(), middle, first)

    steps = [p.batches("mlp", sizes, seed=seed) for seed, sizes in enumerate(([2, 1, 2, 3], [2, 1], [3], [2, 1, 2]))]
    found = p.on_ranks(2, tied, p.momentum, steps, lambda model: p.schedule_of("dualpipe", model, 2, 4))
    p.assert_close(found, p.alone(tied, p.momentum, steps), **TIGHT)


@pytest.mark.parametrize(("schedule", "size"), p.on_sizes(2, 3, 4))
def test_stages_on_several_ranks_may_share_a_parameter(schedule, size):
    """As an embedding and the output layer do; steps may have fewer micro-batches."""
    clip_norm = 0.5 if size == 3 else None
    most = p.filling(schedule, size, [2, 3])
    steps = [p.batches("mlp", sizes, seed=seed) for seed, sizes in enumerate((most, most, most[:1], most))]
    found = p.on_ranks(
        size, shared_apart, p.momentum, steps, lambda model: p.schedule_of(schedule, model, size, len(most)),
        clip_norm=clip_norm,
    )  # fmt: skip
    p.assert_close(found, p.alone(shared_apart, p.momentum, steps, clip_norm=clip_norm), **TIGHT)


@pytest.mark.parametrize("schedule", p.SYNCHRONOUS)
@pytest.mark.parametrize("kind", ["norm", "pruned"])
def test_buffers_of_a_shared_layer_are_those_of_one_worker_or_it_is_refused(schedule, kind):
    """Running statistics depend on the order of their updates; masks do not."""

    def shared():
        layers = [nn.Linear(7, 7, dtype=np.float64, rng=number) for number in range(4)]
        norm = nn.BatchNorm1d(7, dtype=np.float64)
        if kind == "pruned":
            layers[0].keep_weights(np.eye(7) > 0)
            return nn.Sequential(*layers, layers[0], nn.Tanh())
        return nn.Sequential(layers[0], norm, *layers[1:], norm)

    sizes = p.filling(schedule, 2, [3, 2])
    steps = [p.batches("mlp", sizes, seed=seed) for seed in range(2)]
    try:
        found = p.on_ranks(2, shared, p.momentum, steps, lambda model: p.schedule_of(schedule, model, 2, len(sizes)))
    except OptionError as error:
        assert kind == "norm" and "in another order than in one worker" in error.problem
        return
    p.assert_close(found, p.alone(shared, p.momentum, steps), **TIGHT)


def test_clipping_needs_all_gradients_before_the_first_update():
    def work(transport):
        model = p.mlp()
        schedule = place_updates(p.schedule_of("gpipe", model, 2, 2), "backward")
        p.executor(model, schedule, transport, clip_norm=1.0)

    with pytest.raises(OptionError, match="not known before the first update"):
        run_ranks(2, work)


@pytest.mark.parametrize("size", [2, 3])
def test_updates_right_after_their_gradients(size):
    steps = [p.batches("mlp", [2, 3], seed=seed) for seed in range(3)]
    found = p.on_ranks(
        size, p.mlp, p.momentum, steps, lambda model: place_updates(p.schedule_of("1f1b", model, size, 2), "backward")
    )
    p.assert_close(found, p.alone(p.mlp, p.momentum, steps), **TIGHT)


@given(seed=st.integers(0, 2**32 - 1), workers=st.integers(1, 4), microbatches=st.integers(1, 4),
       updates=st.sampled_from(["none", "replicated", "step"]),
       streams=st.sampled_from([("main",), ("main", "sub")]))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_synchronous_schedule(seed, workers, microbatches, updates, streams):
    """Stages lie anywhere, even on several ranks, on one stream or two, and gradients are added in any order."""
    steps = [p.batches("mlp", [2] * microbatches, seed=s) for s in range(2)]
    stages = Stages(p.mlp())
    graph = StepGraph(len(stages), microbatches, stages.unweighted, updates.replace("replicated", "none"))
    rng = random.Random(seed)
    replicated = rng.sample(range(len(stages)), 5) if updates == "replicated" else ()
    schedule = schedules.random_schedule(
        graph, rng, workers, streams, input_gradient=True, joined=0.5, replicated=replicated
    )
    found = p.on_ranks(schedule.workers, p.mlp, p.momentum, steps, lambda _: schedule)
    p.assert_close(found, p.alone(p.mlp, p.momentum, steps), **TIGHT)


class InOrder:
    """A transport on which receives must be posted in the order of the sends of their pair, as on NCCL."""

    def __init__(self, inner):
        self.inner, self.sent, self.received = inner, {}, {}

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def isend(self, array, to, tag):
        self.sent[to] = self.sent.get(to, 0) + 1
        return self.inner.isend(array, to, 1000 + self.sent[to])

    def irecv(self, out, source, tag):
        self.received[source] = self.received.get(source, 0) + 1
        return self.inner.irecv(out, source, 1000 + self.received[source])


@pytest.mark.parametrize("schedule", [*p.SYNCHRONOUS, "pipedream", "dualpipe-2018"])
def test_receives_begin_in_the_order_of_the_sends(schedule):
    def work(transport):
        model = p.mlp()
        whole = p.filling(schedule, 4, [2, 3, 1, 2])
        executor = p.executor(model, schedule, transport, len(whole))
        sizes = [whole, whole, [2, 5, 1, 2], [1, 1]]
        steps = [p.batches("mlp", counts, seed=number) for number, counts in enumerate(sizes)]
        losses = [step.loss for batches in steps for step in executor.step(batches)]
        executor.flush()
        return losses, p.digest(p.state_of(model, executor._actions.optimizer))

    assert run_ranks(4, lambda transport: work(InOrder(transport))) == run_ranks(4, work)


@pytest.mark.parametrize("name", ["1f1b", "dualpipe-v", "dualpipe-2018"])
def test_the_simulation_of_a_measured_step_runs_a_pair_one_after_the_other(name):
    """As ranks do: with one worker nothing waits, so both take as long."""
    schedule = build(name, **schedules.fitting(name, 1, 2, 3))
    events = [Event(action, 0, start, start + 1, (None,), 0) for start, action in enumerate(schedule)]
    timeline = Timeline(schedule, tuple(events), 0.0)
    assert timeline.simulated().makespan == timeline.makespan == len(events)


class Broken(Observer):
    def gradients(self, step, grads):
        raise NonFiniteError("not finite", got=", ".join(grads))


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_any_update(rank):
    names = ["1.weight", "3.weight", "7.weight"]
    ended, states = [], {}

    def work(transport):
        model = p.mlp()
        before = p.digest(model.state_dict())
        executor = p.executor(model, "1f1b", transport, observer=Broken())
        if transport.rank == rank:  # as if this rank's hardware had failed
            part = dict(model.modules())[names[rank].split(".")[0]]
            gradient = part.weight_grad
            part.weight_grad = lambda gy, saved: {k: g * np.nan for k, g in gradient(gy, saved).items()}
        try:
            executor.step(p.batches("mlp", [2, 2]))
        except Exception as error:
            ended.append(type(error).__name__)
            transport.abort(error)
            states[transport.rank] = p.digest(model.state_dict()) == before
            with pytest.raises(TransportError, match="step has failed"):
                executor.step(p.batches("mlp", [2, 2]))
            raise

    with pytest.raises(NonFiniteError, match=names[rank]):
        run_ranks(3, work)
    assert sorted(ended) == ["NonFiniteError", "TransportError", "TransportError"]
    assert states == dict.fromkeys(range(3), True)


# ---- ranks that share a GPU ------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("schedule, predictor", [
    ("1f1b", None), ("zb-h2", None), ("pipedream", None), ("dualpipe-2018", optim.MomentumPredictor),
])  # fmt: skip
@pytest.mark.parametrize("staged", [False, True])
def test_the_numbers_are_those_of_the_host(schedule, predictor, staged):
    needs_numba("the host is what it compares with")

    def work(transport, device):
        model = p.mlp(np.float32).to(device)
        optimizer = p.momentum(model)
        transport.on_device = not staged  # or arrays go through the host
        executor = p.executor(model, schedule, transport, 3, optimizer, predictor=predictor and predictor(optimizer))
        losses = []
        for seed in range(2):
            batches = p.batches("mlp", [2, 3, 2], np.float32, seed)
            moved = [tuple(backend.to_device(array, device) for array in batch) for batch in batches]
            losses += [step.loss for step in executor.step(moved)]
        executor.flush()
        return losses, {name: backend.to_host(array) for name, array in model.state_dict().items()}

    found, wanted = (run_ranks(2, lambda transport, d=device: work(transport, d))[0] for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for name, array in wanted[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)
