"""A trainer on several ranks: the history and weights of one worker; checkpoints for any number of ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

import orders
import pipelines as p
from backends import needs_numba
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend
from sparsebp.core.errors import FileFormatError, NonFiniteError, OptionError, OutputError, TransportError
from sparsebp.data import epoch_order
from sparsebp.train import Callback, Trainer

TIGHT = {"rtol": 1e-10, "atol": 1e-12}
FIELDS = ("loss", "accuracy", "grad_norm", "lr", "samples")


def images(name="mlp", samples=23, seed=0):
    rng = np.random.default_rng(seed)
    shape = p.MODELS[name][1]
    return orders.Rows(rng.standard_normal((samples, *shape)), rng.integers(0, 3, samples))


def fit(transport, name="mlp", *, epochs=2, scheduler=None, clip_norm=None, validation=False, **options):
    how = {key: options.pop(key, False) for key in ("resume", "overwrite")}
    model = p.MODELS[name][0]()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    options |= {} if transport is None else {"schedule": "1f1b"} | options
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, transport=transport, rng=5, clip_norm=clip_norm,
        lr_scheduler=scheduler(optimizer) if scheduler else None, **{"accumulate": 3} | options,
    )  # fmt: skip
    held_out = images(name, 11, seed=1) if validation else None
    history = trainer.fit(images(name), epochs=epochs, batch_size=8, validation=held_out, **how)
    return history, p.state_of(model, optimizer)


def rows(history):
    return [getattr(history, field) for field in FIELDS]


def epochs_of(history):
    return [{**record.to_json(), "seconds": 0} for record in history.epochs]


def assert_like(found, wanted):
    history, state = found
    np.testing.assert_allclose(rows(history), rows(wanted[0]), **TIGHT)
    for one, other in zip(epochs_of(history), epochs_of(wanted[0]), strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_allclose(*[[np.nan if v is None else v for v in e.values()] for e in (one, other)], **TIGHT)
    p.assert_close(([], state), ([], wanted[1]), **TIGHT)


def assert_ranks_like(found, wanted):
    for history, state in found:
        assert rows(history) == rows(found[0][0]) and history.epochs == found[0][0].epochs
        assert history.seconds == found[0][0].seconds  # those of rank 0
        assert p.digest(state) == p.digest(found[0][1])
    assert_like(found[0], wanted)


@pytest.mark.parametrize(("size", "options"), [
    (1, {}), (4, {}), (2, {"schedule": "zb-h1", "clip_norm": 0.05}), (4, {"schedule": "zb-h1", "clip_norm": 0.05}),
    (4, {"schedule": "modulo", "validation": True}), (2, {"scheduler": lambda o: optim.StepLR(o, 2)}),
    (4, {"scheduler": lambda o: optim.ReduceLROnPlateau(o, patience=0), "validation": True}),
])  # fmt: skip
def test_history_and_weights_are_those_of_one_worker_on_every_rank(size, options):
    found = run_ranks(size, lambda transport: fit(transport, **options))
    wanted = fit(None, **{key: value for key, value in options.items() if key != "schedule"})
    assert_ranks_like(found, wanted)


@pytest.mark.parametrize("size, accumulate", [(2, 4), (4, 8)])
def test_replicated_stages_train_as_one_worker_and_their_checkpoint_is_one_workers(size, accumulate, tmp_path):
    options = {"accumulate": accumulate, "clip_norm": 0.05, "validation": True}
    wanted = fit(None, **options)
    assert_ranks_like(run_ranks(size, lambda transport: fit(transport, schedule="dualpipe", **options)), wanted)
    run_ranks(size, lambda t: fit(t, schedule="dualpipe", epochs=1, checkpoint_dir=tmp_path, **options))
    assert_like(fit(None, resume=True, checkpoint_dir=tmp_path, **options), wanted)


@pytest.mark.parametrize(("size", "options"), [
    (1, {}), (3, {}), (2, {"sharded": True}), (1, {"clip_norm": 0.05}), (3, {"clip_norm": 0.05, "validation": True}),
    (3, {"scheduler": lambda o: optim.ReduceLROnPlateau(o, patience=0), "validation": True, "sharded": True}),
])  # fmt: skip
def test_replicas_have_the_history_and_weights_of_one_worker(size, options, tmp_path):
    def run(transport, folder=None, **more):
        return fit(transport, schedule="data-parallel", checkpoint_dir=folder, **{**options, **more})

    found = run_ranks(size, run)
    wanted = fit(None, **{key: value for key, value in options.items() if key != "sharded"})
    assert_ranks_like(found, wanted)
    run_ranks(size, lambda transport: run(transport, tmp_path, epochs=1))
    again = run_ranks(size, lambda transport: run(transport, tmp_path, resume=True))
    assert rows(again[0][0]) == rows(found[0][0])
    assert p.digest(again[0][1]) == p.digest(found[0][1])


def test_reverse_first_k_measures_and_has_the_weights_of_one_worker(tmp_path):
    def run(transport, **options):
        options = {"validation": True, "sharded": True, "accumulate": 1} | options
        return fit(transport, schedule="reverse-first-k", **options)

    found = run_ranks(2, lambda transport: run(transport, epochs=4, checkpoint_dir=tmp_path, checkpoint_every=2))
    assert p.digest(found[0][1]) == p.digest(found[1][1])
    assert_like(found[0], fit(None, epochs=4, validation=True, accumulate=1))
    with pytest.raises(OptionError, match="one micro-batch"):
        run_ranks(2, lambda transport: run(transport, accumulate=2))


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel"])
def test_running_statistics_are_the_same_on_all_ranks(schedule):
    """And of one worker, unless ranks of replicas see their own shares of a batch."""
    found = run_ranks(2, lambda t: fit(t, "densenet", schedule=schedule, epochs=1, validation=True))
    assert p.digest(found[0][1]) == p.digest(found[1][1]) and epochs_of(found[0][0]) == epochs_of(found[1][0])
    if schedule == "1f1b":
        assert_like(found[0], fit(None, "densenet", epochs=1, validation=True))


@pytest.mark.parametrize("sizes", [(3, 1), (1, 4), (2, 3), (4, None), (None, 2)])
def test_any_number_of_ranks_goes_on_from_a_checkpoint(sizes, tmp_path):
    def run(size, **options):
        def work(transport):
            return fit(transport, checkpoint_dir=tmp_path / "run", checkpoint_every=2, validation=True, **options)

        return work(None) if size is None else run_ranks(size, work)[0]

    first, second = sizes
    run(first, epochs=1)
    found = run(second, epochs=2, resume=True)
    assert_like(found, fit(None, epochs=2, validation=True))


@pytest.mark.parametrize("schedule", ["1f1b", "data-parallel"])
def test_a_second_fit_and_an_evaluation_on_one_rank(schedule):
    def work(transport):
        model = p.mlp()
        options = {} if transport is None else {"transport": transport, "schedule": schedule}
        trainer = Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), accumulate=2, rng=0, **options)
        trainer.fit(images(), epochs=1, batch_size=8)
        trainer.fit(images(seed=2), epochs=1, batch_size=5)
        if transport is not None and transport.rank != 1:  # nobody else takes part
            return None
        return trainer.evaluate(images(seed=1), batch_size=4)

    np.testing.assert_allclose(run_ranks(3, work)[1], work(None), **TIGHT)


class Notes(Callback):
    """Keeps which events it saw, and whether the model was up to date then."""

    def __init__(self, transport, reads=True):
        self.events, self.reads_model, self.transport = [], reads, transport

    def on_step(self, history):
        self.events.append(("step", history.steps))

    def on_checkpoint(self, path):
        self.events.append(("checkpoint", path.name))

    def on_close(self):
        self.events.append(("close", 0))


@pytest.mark.parametrize("everywhere", [True, False])
def test_callbacks_are_called_on_rank_0(everywhere, tmp_path):
    def work(transport):
        notes = Notes(transport)
        given = [notes] if everywhere or transport.rank == 0 else []
        fit(transport, epochs=1, callbacks=given, checkpoint_dir=tmp_path)
        return notes.events

    first, *others = run_ranks(3, work)
    assert first == [("checkpoint", "checkpoint.safetensors"), ("step", 1), ("step", 2), ("step", 3),
                     ("checkpoint", "checkpoint.safetensors"), ("close", 0)]  # fmt: skip
    assert others == [[], []]


class Weights(Callback):
    """Keeps the weights after every step."""

    def __init__(self):
        self.model, self.seen = None, []

    def on_step(self, history):
        self.seen.append({name: array.copy() for name, array in self.model.parameters().items()})


def test_a_callback_sees_the_whole_model_after_every_step():
    def work(transport):
        model, seen = p.mlp(), Weights()
        seen.model = model
        options = {} if transport is None else {"transport": transport, "schedule": "gpipe"}
        trainer = Trainer(
            model, nn.CrossEntropyLoss(), p.momentum(model), accumulate=2, rng=0, callbacks=[seen], **options
        )
        trainer.fit(images(), epochs=1, batch_size=8)
        return seen.seen

    found, wanted = run_ranks(3, work)[0], work(None)
    for one, other in zip(found, wanted, strict=True):
        for name, array in other.items():
            np.testing.assert_allclose(one[name], array, err_msg=name, **TIGHT)


class Fails(Callback):
    """Fails at its second step."""

    def on_step(self, history):
        if history.steps == 2:
            raise RuntimeError("the disk is full")


def test_a_rank_that_fails_ends_the_others_and_leaves_the_last_checkpoint(tmp_path):
    ended = {}

    def work(transport):
        try:
            fit(transport, epochs=1, callbacks=[Fails()], checkpoint_dir=tmp_path, checkpoint_every=1)
        except Exception as error:
            ended[transport.rank] = type(error)
            raise

    with pytest.raises(RuntimeError, match="disk is full"):
        run_ranks(3, work)
    assert ended == {0: RuntimeError, 1: TransportError, 2: TransportError}
    found = run_ranks(2, lambda t: fit(t, epochs=1, resume=True, checkpoint_dir=tmp_path, checkpoint_every=1))[0]
    assert_like(found, fit(None, epochs=1))


def test_a_loss_that_is_not_finite_is_told_once():
    ended = []

    def work(transport):
        model = p.mlp()
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=1e300), transport=transport,
                          schedule="1f1b", accumulate=2, rng=0)  # fmt: skip
        try:
            trainer.fit(images(), epochs=3, batch_size=8)
        except Exception as error:
            ended.append(type(error))
            raise

    with pytest.raises(NonFiniteError, match="step"):
        run_ranks(3, work)
    assert sorted(error.__name__ for error in ended) == ["NonFiniteError", "TransportError", "TransportError"]


def test_what_needs_a_transport_says_so():
    model = p.mlp()
    parts = model, nn.CrossEntropyLoss(), p.momentum(model)
    with pytest.raises(OptionError, match="transport="):
        Trainer(*parts, schedule="1f1b")
    schedule = p.schedule_of("1f1b", model, 2, 1)
    with pytest.raises(OptionError, match="transport="):
        Trainer(*parts, schedule=schedule).fit(images(), epochs=1, batch_size=8)

    def work(transport):
        model = p.mlp()
        return Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), transport=transport)

    with pytest.raises(OptionError, match="schedule='1f1b'"):
        run_ranks(2, work)


def test_one_rank_is_one_worker():
    found = run_ranks(1, lambda transport: fit(transport, schedule="conventional"))[0]
    wanted = fit(None)
    assert rows(found[0]) == rows(wanted[0]) and json.dumps(epochs_of(found[0])) == json.dumps(epochs_of(wanted[0]))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "dualpipe-2018"])
def test_the_same_ranks_go_on_bit_for_bit_and_no_other_order_of_updates(schedule, tmp_path):
    def run(**options):
        return run_ranks(3, lambda transport: fit(transport, schedule=schedule, validation=True, **options))[0]

    found = run()
    assert len(found[0].loss) == 6 and found[0].samples == [8, 8, 7] * 2
    run(epochs=1, checkpoint_dir=tmp_path)
    again = run(resume=True, checkpoint_dir=tmp_path)
    assert rows(again[0]) == rows(found[0]) and epochs_of(again[0]) == epochs_of(found[0])
    assert p.digest(again[1]) == p.digest(found[1])
    if schedule == "1f1b":
        return
    again = {"resume": True, "checkpoint_dir": tmp_path, "validation": True}
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    for size, options, got in (
        (2, {"schedule": schedule}, "accumulate=3, 2 ranks"), (3, {}, "a schedule with one update a step"),
        (3, {"schedule": schedule, "accumulate": 4}, "accumulate=4, 3 ranks"),
    ):  # fmt: skip
        with pytest.raises(FileFormatError, match=rf"{got}.*Got schedule={schedule}, accumulate=3, 3 ranks in the"):
            run_ranks(size, lambda t, options=options: fit(t, **again, **options))
    with pytest.raises(FileFormatError, match="updates came in another order"):
        fit(None, **again)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before


def test_what_is_refused_leaves_an_earlier_runs_checkpoint(tmp_path):
    """The model has 8 stages: five ranks with two parts each are too many."""
    fit(None, epochs=1, checkpoint_dir=tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(OutputError, match="holds an earlier run"):
        run_ranks(2, lambda transport: fit(transport, checkpoint_dir=tmp_path))
    options = {"schedule": "interleaved-1f1b", "checkpoint_dir": tmp_path, "overwrite": True}
    with pytest.raises(OptionError, match="too few stages"):
        run_ranks(5, lambda transport: fit(transport, **options))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "kind", [optim.MomentumPredictor, optim.OptimizerRulePredictor, optim.FiniteDifferencePredictor]
)
def test_predicted_weights_go_on_bit_for_bit(kind, tmp_path):
    def train(transport, **options):
        model, told = p.mlp(), []
        optimizer = p.momentum(model)
        trainer = Trainer(
            model, nn.CrossEntropyLoss(), optimizer, transport=transport, schedule="dualpipe-2018", accumulate=5, rng=5,
            predictor=options.get("kind", kind)(optimizer), note=told.append, checkpoint_dir=options.get("folder"),
        )  # fmt: skip
        history = trainer.fit(images(), epochs=options.get("epochs", 2), batch_size=10, resume="epochs" not in options
                              and "folder" in options)  # fmt: skip
        assert all(np.isfinite([d.predicted, d.stale]).all() for d in told)
        return history, p.state_of(model, optimizer), trainer.predictor and trainer.predictor.state_dict()

    found = run_ranks(3, train)
    assert len({p.digest(one[2]) for one in found}) == 1
    run_ranks(3, lambda transport: train(transport, epochs=1, folder=tmp_path))
    again = run_ranks(3, lambda transport: train(transport, folder=tmp_path))
    assert rows(again[0][0]) == rows(found[0][0])
    assert p.digest(again[0][1]) == p.digest(found[0][1]) and p.digest(again[0][2]) == p.digest(found[0][2])
    with pytest.raises(FileFormatError, match="the predictor"):
        run_ranks(3, lambda transport: train(transport, folder=tmp_path, kind=lambda _: None))


def test_an_asynchronous_pipeline_of_one_rank_updates_after_every_micro_batch():
    found = run_ranks(1, lambda transport: fit(transport, schedule="pipedream", epochs=1))[0]
    model = p.mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, rng=5)
    data, order = images(), epoch_order(23, seed=5, epoch=0)
    parts = [part for start in range(0, 23, 8) for part in np.array_split(order[start : start + 8], 3)]
    for part in parts:  # each a batch of its own
        trainer.fit(data.batch(part), epochs=1, batch_size=len(part))
    p.assert_close(([], found[1]), ([], p.state_of(model, optimizer)), **TIGHT)


@pytest.mark.gpu
@pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")
@pytest.mark.parametrize("options", [
    {"schedule": "1f1b", "clip_norm": 0.05}, {"schedule": "data-parallel", "clip_norm": 0.05, "sharded": True},
    {"schedule": "dualpipe-2018", "predictor": optim.MomentumPredictor},
])  # fmt: skip
def test_arrays_of_a_device_all_the_way(options, tmp_path):
    """Comparisons of ranks, steps, evaluation, checkpoints: two ranks on one device, beside those on the host."""
    needs_numba("the host is what it compares with")
    data = images()

    def run(transport, device, **more):
        model = p.mlp().to(device)
        optimizer, given = p.momentum(model), dict(options)
        if "predictor" in given:
            given["predictor"] = given["predictor"](optimizer)
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, transport=transport, rng=5, accumulate=2,
                          checkpoint_dir=tmp_path / device, **given)  # fmt: skip
        x, target = (backend.to_device(array, device) for array in (data.x, data.target))
        history = trainer.fit((x, target), batch_size=8, validation=(x[:9], target[:9]), **more)
        return history, {name: backend.to_host(array) for name, array in model.parameters().items()}

    wanted = run_ranks(2, lambda transport: run(transport, "cpu", epochs=2))[0]
    run_ranks(2, lambda transport: run(transport, "cuda", epochs=1))
    found = run_ranks(2, lambda transport: run(transport, "cuda", epochs=2, resume=True))
    np.testing.assert_allclose(rows(found[0][0]), rows(wanted[0]), rtol=1e-8, atol=1e-10)
    for name, array in wanted[1].items():
        np.testing.assert_allclose(found[0][1][name], array, rtol=1e-8, atol=1e-10, err_msg=name)
        np.testing.assert_array_equal(found[0][1][name], found[1][1][name])
