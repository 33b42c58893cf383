"""A pipeline whose ranks hold their own stages alone: the numbers and the files of one worker."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

import orders
import pipelines as p
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.absent import is_absent
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.train import Callback, EarlyStopping, Trainer, WeightAveraging, load_checkpoint
from sparsebp.train.checkpoint import live_state

rng = np.random.default_rng(0)
X, TARGET = rng.standard_normal((23, 7)), rng.integers(0, 3, 23)


def chain():
    """Five layers with parameters and two without, of which one draws; all take one generator, in turn."""
    g = np.random.default_rng(5)
    return [
        nn.Flatten(), nn.Linear(7, 6, dtype=float, rng=g), nn.BatchNorm1d(6, dtype=float), nn.Tanh(),
        nn.Linear(6, 5, dtype=float, rng=g), nn.Dropout(0.3, rng=7), nn.Linear(5, 4, dtype=float, rng=g),
        nn.Linear(4, 3, dtype=float, rng=g),
    ]  # fmt: skip


def grouped(*cuts):
    """Return the chain in stages that end at these layers."""
    layers = chain()
    return nn.Sequential(*(nn.Stage(*layers[a:b]) for a, b in zip((0, *cuts), (*cuts, len(layers)), strict=True)))


def tied():
    first, *layers = (nn.Linear(7, 7, dtype=float, rng=number) for number in range(4))
    layers[-1].params["weight"] = first.params["weight"]
    return nn.Sequential(first, nn.Tanh(), *layers)


def trainer(transport, make=lambda: nn.Sequential(*chain()), deferred=True, **options):
    if deferred:
        with nn.deferred_init():
            model = make()
    else:
        model = make()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    options = ({} if transport is None else {"transport": transport, "schedule": "1f1b"}) | options
    return Trainer(model, nn.CrossEntropyLoss(), optimizer, **{"accumulate": 3, "rng": 5} | options)


def fit(t, **options):
    return t.fit((X, TARGET), batch_size=8, validation=(X[:9], TARGET[:9]), **{"epochs": 2} | options)


def everything(t):
    """Return what a rank holds."""
    arrays = live_state(t.model) | {f"optimizer {name}": value for name, value in live_state(t.optimizer).items()}
    return {name: value for name, value in arrays.items() if hasattr(value, "ndim") and not is_absent(value)}


def alone(epochs=2, **options):
    t = trainer(None, **options)
    return fit(t, epochs=epochs), t


def assert_like(found, wanted):
    """Compare histories and arrays of ranks with one worker's; the arrays of all ranks are all of them."""
    history, t = wanted
    whole, seen = everything(t), set()
    for own, arrays in found:
        assert (own.loss, own.grad_norm) == (history.loss, history.grad_norm)
        assert [one.validation_loss for one in own.epochs] == [one.validation_loss for one in history.epochs]
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, whole[name], err_msg=name)
        seen |= arrays.keys()
    assert seen == whole.keys()


def run(size, **options):
    how = {key: options.pop(key) for key in ("epochs", "resume", "overwrite") if key in options}

    def work(transport):
        t = trainer(transport, **options)
        return fit(t, **how), everything(t)

    return run_ranks(size, work)


@pytest.mark.parametrize(("size", "options"), [
    (1, {}), (2, {}), (3, {"schedule": "zb-h1"}), (4, {}), (2, {"schedule": "zb-v"}), (3, {"make": tied}),
    (3, {"make": lambda: grouped(4, 6)}), (2, {"clip_norm": 0.05}), (2, {"schedule": "data-parallel", "make": tied}),
])  # fmt: skip
def test_training_is_one_workers(size, options):
    found = run(size, **options)
    wanted = alone(**{key: value for key, value in options.items() if key != "schedule"})
    if options.get("make") is tied:  # sums over ranks
        p.assert_close(([(loss, 0) for loss in found[0][0].loss], {}), ([(loss, 0) for loss in wanted[0].loss], {}),
                       rtol=1e-10)  # fmt: skip
        for _, arrays in found:
            orders.assert_close(arrays, {name: everything(wanted[1])[name] for name in arrays}, rtol=1e-9, atol=1e-12)
    else:
        assert_like(found, wanted)
    if size > 1 and options.get("schedule") != "data-parallel":
        held = [sum(array.nbytes for array in arrays.values()) for _, arrays in found]
        assert max(held) < 0.85 * sum(array.nbytes for array in everything(wanted[1]).values())


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 1), (1, 3), (None, 3), (4, None)])
def test_any_number_of_ranks_goes_on(sizes, tmp_path):
    def some(size, **options):
        options["checkpoint_dir"] = tmp_path
        if size is None:
            t = trainer(None, deferred=False, checkpoint_dir=tmp_path)
            return [(fit(t, **{key: options[key] for key in ("epochs", "resume") if key in options}), everything(t))]
        return run(size, **options)

    some(sizes[0], epochs=1)
    saved = load_checkpoint(tmp_path)
    reference = tmp_path / "one"
    t = trainer(None, checkpoint_dir=reference)
    fit(t, epochs=1)
    one = load_checkpoint(reference)
    assert saved.tensors.keys() == one.tensors.keys()
    for name, array in one.tensors.items():
        if name != "history.seconds":
            np.testing.assert_array_equal(saved.tensors[name], array, err_msg=name)
    times = json.dumps([{**saved.state, "epochs": 0}, {**one.state, "epochs": 0}])
    assert times.count(json.dumps({**one.state, "epochs": 0})) == 2
    assert_like(some(sizes[1], resume=True), alone())


@pytest.mark.parametrize("replicas", [1, 2])
def test_ranks_without_parameters(replicas, tmp_path):
    """The first one, which writes the checkpoint, and one between: their steps count as everywhere."""

    def make():
        layers = [nn.Linear(7, 7, dtype=float, rng=1), nn.Tanh(), nn.Linear(7, 3, dtype=float, rng=2)]
        return nn.Sequential(nn.Flatten(), *layers)

    options = {"make": make, "checkpoint_dir": tmp_path / "ranks"}
    sharded = {"replicas": replicas, "sharded": replicas > 1}
    found = run(4 * replicas, epochs=1, **sharded, **options)
    alone(make=make, checkpoint_dir=tmp_path / "one", epochs=1)
    assert [len(arrays) for _, arrays in found[:4]] == [0, 6, 0, 6]
    saved, wanted = load_checkpoint(tmp_path / "ranks"), load_checkpoint(tmp_path / "one")
    assert saved.state["optimizer"] == wanted.state["optimizer"]
    assert saved.tensors.keys() == wanted.tensors.keys()
    again = run(4 * replicas, resume=True, **sharded, **options)
    np.testing.assert_allclose(again[0][0].loss, alone(make=make)[0].loss, rtol=1e-10)


@pytest.mark.parametrize("cuts", [(), (1, 5), (3,), (2, 6, 7)])
def test_a_checkpoint_is_of_layers_whatever_their_groups(cuts, tmp_path):
    """Written by three ranks, read by two; to other layers it does not fit."""
    run(3, epochs=1, checkpoint_dir=tmp_path, make=lambda: grouped(2, 5), schedule="gpipe")
    wanted, _ = alone()
    make = (lambda: grouped(*cuts)) if cuts else (lambda: nn.Sequential(*chain()))
    found = run(2, resume=True, checkpoint_dir=tmp_path, make=make)
    assert found[0][0].loss == wanted.loss
    with pytest.raises(FileFormatError, match=r"differs|does not fit"):
        run(2, resume=True, checkpoint_dir=tmp_path, make=lambda: nn.Sequential(*chain()[:-1], nn.Linear(4, 9, rng=0)))
    with pytest.raises(FileFormatError, match="lr of the optimizer differs"):
        t = trainer(None, make, checkpoint_dir=tmp_path)
        t.optimizer.lr = 0.5
        fit(t, resume=True)


@pytest.mark.parametrize("size", [2, 3])
def test_evaluation_and_predictions_run_through_the_pipeline(size):
    def work(transport, first=False):
        t = trainer(transport)
        before = t.evaluate((X, TARGET), batch_size=4) if first else None
        fit(t, epochs=1)
        whole = t.gather_model()
        return before, t.evaluate((X, TARGET), batch_size=5), t.predict(X, batch_size=4), whole

    wanted = work(None, first=True)
    for rank, (before, numbers, prediction, whole) in enumerate(run_ranks(size, lambda t: work(t, first=True))):
        assert (before, numbers) == wanted[:2]
        np.testing.assert_array_equal(prediction, wanted[2])
        assert (whole is None) == (rank > 0)
        if whole is not None:
            assert p.digest(whole) == p.digest(wanted[3])
    assert run_ranks(size, work)[0][1] == wanted[1]


class Doubles(Callback):
    """Looks at all parameters, and changes two, on different ranks."""

    def set_trainer(self, trainer):
        self.trainer, self.seen = trainer, []

    def on_step(self, history):
        state = self.trainer.model.state_dict() | self.trainer.optimizer.state_dict()
        self.seen.append(p.digest(state))
        for name in ("1.weight", "7.bias"):
            self.trainer.model.parameters()[name][...] *= 2


def test_a_callback_that_looks_at_the_model_sees_all_of_it_on_rank_0():
    wanted, given = Doubles(), Doubles()
    whole = alone(callbacks=[wanted])

    def work(transport):
        t = trainer(transport, callbacks=[given] if transport.rank == 0 else [])
        return fit(t), everything(t)

    assert_like(run_ranks(3, work), whole)
    assert given.seen == wanted.seen


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_dies_in_the_middle_of_a_checkpoint_leaves_the_last_one(rank, tmp_path, monkeypatch):
    from sparsebp.train import by_stage

    whole = run(3, epochs=1, checkpoint_dir=tmp_path)
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    send, receive, calls = by_stage._send, by_stage._received, []

    def failing(inner):
        def call(transport, *args):
            if transport.rank == rank and "save" in calls:
                calls.append(rank)
                if len(calls) > 4:
                    raise KeyboardInterrupt
            return inner(transport, *args)

        return call

    monkeypatch.setattr(by_stage, "_send", failing(send))
    monkeypatch.setattr(by_stage, "_received", failing(receive))
    save = by_stage.save_by_stage
    monkeypatch.setattr("sparsebp.train.trainer.save_by_stage", lambda *given: (calls.append("save"), save(*given)))
    with pytest.raises(KeyboardInterrupt):
        run(3, resume=True, checkpoint_dir=tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert [file.name for file in tmp_path.iterdir() if "tmp" in file.name] == []
    monkeypatch.undo()
    assert_like(run(2, resume=True, checkpoint_dir=tmp_path), alone())
    assert whole[0][0].steps == 3


@pytest.mark.parametrize("name", ["gru", "vgg11", "transformer", "grouped"])
def test_parameters_are_those_of_a_model_that_was_built_at_once(name):
    make = p.MODELS[name][0]
    with nn.deferred_init():
        model = make()
    assert all(map(is_absent, model.parameters().values()))
    nn.materialize(model)
    assert p.digest(model.state_dict()) == p.digest(make().state_dict())
    x = p.batches(name, [2])[0][0]
    np.testing.assert_array_equal(model.forward(x)[0], make().forward(x)[0])


def test_copies_of_layers_without_memory_are_apart():
    """And those of a shared parameter are shared."""
    with nn.deferred_init():
        layer = nn.Linear(3, 3, rng=0)
        other = copy.deepcopy(layer)
        pair = nn.Sequential(layer, nn.Linear(3, 3, rng=1))
        pair[1].params["weight"] = layer.params["weight"]
        again, third = copy.deepcopy(pair), nn.Linear(3, 3, rng=2)
        third.params["bias"] = layer.params["bias"].copy()
    model = nn.Sequential(pair, other, again, third)
    nn.materialize(model)
    weights = [pair[0].weight, pair[1].weight, other.weight, again[0].weight, again[1].weight]
    assert len({id(array) for array in weights}) == 3
    assert weights[0] is weights[1] and weights[3] is weights[4] and third.bias is not layer.bias
    for array in weights:
        np.testing.assert_array_equal(array, nn.Linear(3, 3, rng=0).weight)
    np.testing.assert_array_equal(third.bias, layer.bias)
    assert model.forward(np.ones((2, 3), "f"))[0].shape == (2, 3)


def test_what_cannot_be_is_refused():
    with nn.deferred_init():
        layer, unseeded = nn.Linear(3, 2, rng=0), nn.Linear(3, 2)
    for use in (
        lambda: layer.forward(np.ones((1, 3), np.float32)), layer.state_dict, optim.Adam(layer.parameters()).state_dict,
        lambda: layer.load_state_dict({"weight": np.ones((2, 3), np.float32), "bias": np.ones(2, np.float32)}),
        lambda: nn.prune(layer, 0.5),
        lambda: layer.weight.__setitem__(0, 1), lambda: layer.to(dtype=float),
        lambda: nn.Sequential(layer, nn.ReLU()).forward(np.ones((1, 3), "f")),
    ):  # fmt: skip
        with pytest.raises(OptionError, match="does not hold"):
            use()
    with pytest.raises(OptionError, match="cannot be made again"):
        nn.materialize(unseeded)
    nn.materialize(layer)
    np.testing.assert_array_equal(layer.forward(np.ones((1, 3), "f"))[0], nn.Linear(3, 2, rng=0)(np.ones((1, 3), "f")))

    def other_schedule(transport):
        t = trainer(transport)
        fit(t)
        t.schedule = "gpipe"
        fit(t)  # the same stages on every rank
        t.schedule = "zb-v"
        fit(t)

    with pytest.raises(OptionError, match=r"cannot be made again.*gather the model"):
        run_ranks(2, other_schedule)
    with pytest.raises(OptionError, match="too few stages"):
        run(9)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize(("sizes", "cuts"), [((2, 2), None), ((3, 1), (2, 5)), ((1, 2), (4, 6))])
def test_averages_and_best_weights(deferred, sizes, cuts, tmp_path):
    """Rank 0 keeps them for all; the validated averages leave the model's weights alone; groups may be others."""

    def some(size, folder, epochs, resume, cuts=None):
        def work(transport):
            make = (lambda: grouped(*cuts)) if cuts else (lambda: nn.Sequential(*chain()))
            t = trainer(transport if size > 1 else None, make, deferred, checkpoint_dir=folder)
            ema = optim.EMA(t.model, 0.8)
            t.callbacks = (WeightAveraging(ema), EarlyStopping(mode="max", patience=9, restore_best=True))
            history = fit(t, epochs=epochs, resume=resume)
            return (
                history.loss,
                [one.validation_loss for one in history.epochs],
                t.predict(X),
                ema,
                t.callbacks[1].best_epoch,
            )

        return run_ranks(size, work)

    ((loss, validated, best, ema, epoch),) = some(1, tmp_path / "one", 4, False, cuts)
    assert epoch == 1  # before the run is resumed
    some(sizes[0], tmp_path / "ranks", 2, False)
    found = some(sizes[1], tmp_path / "ranks", 4, True, cuts)
    for own in found:
        assert own[:2] == (loss, validated)
        np.testing.assert_array_equal(own[2], best)
    for name, array in found[0][3].state_dict().items():
        np.testing.assert_array_equal(array, ema.state_dict()[name], err_msg=name)
