"""Checkpoints with a valid digest and bad content are refused, and nothing is changed."""

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn, optim
from sparsebp.core.errors import FileFormatError, NonFiniteError, OptionError
from sparsebp.data import ArrayDataset
from sparsebp.train import Checkpoint, History, Trainer, load_checkpoint, save_checkpoint
from sparsebp.train.callbacks import EpochRecord
from sparsebp.train.checkpoint import load_weights, pack
from sparsebp.train.prune import prune_checkpoint
from sparsebp.train.state import FILE_NAME

HUGE = 10**400
rng = np.random.default_rng(0)
DATA = ArrayDataset(rng.standard_normal((7, 3)).astype(np.float32), rng.integers(0, 2, 7))


def trainer(folder=None, seed=0, generator=np.random.PCG64):
    model = nn.Sequential(
        nn.Linear(3, 5, rng=seed), nn.Dropout(0.3, rng=np.random.Generator(generator(seed))), nn.Linear(5, 2, rng=seed)
    )
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    return Trainer(
        model, nn.CrossEntropyLoss(), optimizer, lr_scheduler=optim.CosineAnnealingLR(optimizer, T_max=100),
        checkpoint_dir=folder, checkpoint_every=1, config={"a": 1, "sizes": (1, 2)}, rng=3,
    )  # fmt: skip


def fit(t, *, resume=False, epochs=2):
    return t.fit(DATA, epochs=epochs, batch_size=3, resume=resume)


def everything(t):
    """Return all that a checkpoint is loaded into, in a form that can be compared."""
    generators = {name: json.dumps(g.bit_generator.state, default=np.ndarray.tolist)
                  for name, g in t.model.generators().items()}  # fmt: skip
    arrays = {f"model.{name}": array for name, array in t.model.state_dict().items()} | t.optimizer.state_dict()
    flat = {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in arrays.items()}
    return flat | {"generators": generators, "schedule": copy.deepcopy(t.lr_scheduler.state_dict()), "seed": t.seed}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    fit(trainer(folder), epochs=1)
    return load_checkpoint(folder)


def refused(tmp_path, checkpoint, words=None):
    save_checkpoint(tmp_path / FILE_NAME, checkpoint)
    t = trainer(tmp_path, seed=1)
    t.optimizer.step({name: np.ones_like(array) for name, array in t.model.parameters().items()})
    before, arrays = everything(t), t.model.parameters()
    with pytest.raises(FileFormatError, match=words) as caught:
        fit(t, resume=True)
    assert caught.value.expected is not None and caught.value.got is not None and caught.value.remedy
    assert FILE_NAME in str(caught.value)
    assert everything(t) == before
    assert all(array is arrays[name] for name, array in t.model.parameters().items())
    assert t.history.steps == 0


def test_the_same_one_is_taken_when_it_is_whole(tmp_path, written):
    save_checkpoint(tmp_path / FILE_NAME, written)
    assert fit(trainer(tmp_path, seed=1), resume=True).steps == 6


def changed(state, *path, value=...):
    """Return a copy of `state` with another value at `path`, or without it."""
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


ODD = [None, [], {}, "x", True, 1.5, -1, math.nan, HUGE, [[1]], {"a": 1}]
KEYS = ["seed", "position", "config", "optimizer", "lr_scheduler", "generators", "epochs"]


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_or_odd_part_of_the_state(tmp_path, written, key):
    refused(tmp_path, Checkpoint(written.tensors, changed(written.state, key)))
    for value in ODD:
        refused(tmp_path, Checkpoint(written.tensors, changed(written.state, key, value=value)))


def test_odd_options_and_data(tmp_path, written):
    """Older checkpoints have none; what is there must be as it is written."""
    group = written.state["options"]["groups"]["0.bias"]
    for path in (["options"], ["options", "groups"], ["options", "groups", "0.bias"], ["options", "clip_norm"],
                 ["earlier_steps"]):  # fmt: skip
        for value in ("x", 1.5, -1, [], [[1]], {"a": 1}, {**group, "lr": HUGE}):
            if path[-1] == "groups" and isinstance(value, dict):
                continue  # of other groups, which may have been added since
            refused(tmp_path, Checkpoint(written.tensors, changed(written.state, *path, value=value)))


@pytest.mark.parametrize(
    "path",
    [
        ("position", "epoch"), ("position", "batch"), ("position", "batch_size"), ("position", "samples"),
        ("optimizer", "group0.lr"), ("optimizer", "step.0.weight"), ("optimizer", "Adam.version"),
        ("lr_scheduler", "steps"), ("lr_scheduler", "base_lrs"), ("generators", "1"),
        ("generators", "1", "bit_generator"), ("generators", "1", "state"), ("generators", "1", "state", "inc"),
        ("epochs", 0), ("epochs", 0, "epoch"), ("epochs", 0, "train_loss"), ("epochs", 0, "seconds"),
    ],
)  # fmt: skip
def test_a_missing_or_odd_entry_of_the_state(tmp_path, written, path):
    refused(tmp_path, Checkpoint(written.tensors, changed(written.state, *path)))
    for value in ("x", [], {}, None, -1.5 if path[0] != "epochs" else "y", [HUGE]):
        refused(tmp_path, Checkpoint(written.tensors, changed(written.state, *path, value=value)))
    if path[0] != "epochs":
        refused(tmp_path, Checkpoint(written.tensors, changed(written.state, *path, value=HUGE)))


def test_arrays_that_are_missing_or_odd(tmp_path, written):
    for name, array in written.tensors.items():
        rest = {other: a for other, a in written.tensors.items() if other != name}
        refused(tmp_path, Checkpoint(rest, written.state))
        for odd in (array.astype(np.int32), array.reshape(*array.shape, 1), array[:1], np.array(1.0)):
            refused(tmp_path, Checkpoint(rest | {name: odd}, written.state))
    for extra in ("model.x", "optimizer.x", "history.x", "model.1.weight_mask"):
        refused(tmp_path, Checkpoint({**written.tensors, extra: np.zeros(2, np.float32)}, written.state))


def test_the_last_part_fails_and_all_others_are_put_back(tmp_path, written):
    """The weights are loaded last: by then optimizer, schedule and generators have been."""
    for value in (np.nan, np.inf):
        bad = written.tensors["model.0.weight"].copy()
        bad[1, 2] = value
        refused(tmp_path, Checkpoint({**written.tensors, "model.0.weight": bad}, written.state), "not finite|finite")


def test_a_model_that_fails_half_way_is_put_back(tmp_path, written, monkeypatch):
    save_checkpoint(tmp_path / FILE_NAME, written)
    t = trainer(tmp_path, seed=1)
    before = everything(t)

    def half(state):
        t.model.parameters()["0.weight"][...] = state["0.weight"]
        raise KeyboardInterrupt

    monkeypatch.setattr(t.model, "load_state_dict", half)
    with pytest.raises(KeyboardInterrupt):
        fit(t, resume=True)
    assert everything(t) == before


@given(data=st.data())
def test_any_json_in_any_place(tmp_path_factory, written, data):
    """Resumed as if nothing were wrong, or refused with nothing changed; never anything else."""
    values = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(HUGE),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=5,
    )  # fmt: skip
    state = written.state
    path = [data.draw(st.sampled_from(KEYS))]
    inner = state[path[0]]
    while isinstance(inner, dict | list) and inner and data.draw(st.booleans()):
        path.append(data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))))
        inner = inner[path[-1]]
    folder = tmp_path_factory.mktemp("any")
    save_checkpoint(folder / FILE_NAME, Checkpoint(written.tensors, changed(state, *path, value=data.draw(values))))
    t = trainer(folder, seed=1)
    before = everything(t)
    try:
        fit(t, resume=True, epochs=1)
    except FileFormatError:
        assert everything(t) == before


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "x" * 5000, "\ud800"])
def test_paths_that_cannot_be(tmp_path, name):
    for path in (tmp_path / name, str(tmp_path / name), tmp_path / name / "c.safetensors"):
        with pytest.raises(FileFormatError, match="No checkpoint"):
            load_checkpoint(path)
        with pytest.raises(FileFormatError, match="No checkpoint"):
            load_weights(nn.Linear(2, 2), path)
        with pytest.raises(FileFormatError, match="No checkpoint"):
            prune_checkpoint(path, tmp_path / "out", 0.5)


def test_weights_that_do_not_load_change_nothing(tmp_path, written):
    mask = np.zeros((5, 3), np.float32)
    nan = np.full((5, 3), np.nan, np.float32)
    for odd in ({"model.0.weight": nan}, {"model.0.weight_mask": mask}, {"model.9.weight_mask": mask > 0}):
        save_checkpoint(tmp_path / FILE_NAME, Checkpoint({**written.tensors, **odd}, written.state))
        model = trainer(seed=1).model
        before = {name: array.copy() for name, array in model.state_dict().items()}
        with pytest.raises(FileFormatError):
            load_weights(model, tmp_path)
        assert model.state_dict().keys() == before.keys()
        assert all((model.state_dict()[name] == array).all() for name, array in before.items())


@pytest.mark.parametrize(
    "config",
    [None, {}, [], 3, {"task": "digits"}, {"task": ["digits"], "model": "lenet5"}, {"task": "digits", "model": [1]},
     {"task": "digits", "model": "lenet5", "epochs": "x"}, {"task": "digits", "model": "lenet5", "lr": HUGE},
     {"task": "digits", "model": "lenet5", "seed": -1}, {"task": "digits", "model": "vgg11", "width": "wide"},
     {"task": "digits", "model": "lenet5"}],
)  # fmt: skip
def test_pruning_what_does_not_say_its_network(tmp_path, written, config):
    save_checkpoint(tmp_path / FILE_NAME, Checkpoint(written.tensors, changed(written.state, "config", value=config)))
    other = config == {"task": "digits", "model": "lenet5"}  # a network, but not this one
    with pytest.raises(FileFormatError, match="does not fit the model" if other else "does not say what network"):
        prune_checkpoint(tmp_path, tmp_path / "out", 0.5)
    assert not (tmp_path / "out").exists()


# ---- what is written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"])
def test_every_random_generator_of_numpy_is_resumed(tmp_path, kind):
    generator = getattr(np.random, kind)
    whole = fit(trainer(generator=generator))
    fit(trainer(tmp_path, generator=generator), epochs=1)
    resumed = fit(trainer(tmp_path, seed=5, generator=generator), resume=True)
    assert resumed.loss == whole.loss


ANY = st.floats(width=32) | st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e-45, 3e38])


class Masked(nn.Layer):
    """Adds a buffer, as attention adds a mask of -inf."""

    def __init__(self, mask):
        super().__init__()
        self.buffers["mask"] = np.array(mask, np.float32)

    def forward(self, x):
        return x + np.where(np.isfinite(self.buffers["mask"]), self.buffers["mask"], 0), None

    def input_grad(self, gy, saved):
        return gy


SCHEDULES = [
    lambda o: None, lambda o: optim.OneCycleLR(o, 0.1, 20), lambda o: optim.ReduceLROnPlateau(o, patience=0),
    lambda o: [optim.LinearLR(o, 0.5, 1, 4), optim.ReduceLROnPlateau(o, "max", monitor="train_accuracy")],
    lambda o: optim.SequentialLR(o, [optim.ConstantLR(o), optim.PolynomialLR(o, 4)], [3]),
]  # fmt: skip


@given(data=st.data())
def test_whatever_is_written_is_read_again(tmp_path_factory, data):
    """Parameters and running statistics are finite, or nothing is written; all else may hold anything."""
    folder = tmp_path_factory.mktemp("any")

    def make(seed):
        model = nn.Sequential(nn.Linear(3, 2, rng=seed), nn.BatchNorm1d(2), nn.Dropout(0.2, rng=seed), Masked([0, 0]))
        optimizer = optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
        return Trainer(model, nn.CrossEntropyLoss(), optimizer, lr_scheduler=schedule(optimizer), rng=3,
                       checkpoint_dir=folder)  # fmt: skip

    schedule = data.draw(st.sampled_from(SCHEDULES))
    first = make(0)
    first.fit(DATA, epochs=data.draw(st.integers(1, 2)), batch_size=7)
    if isinstance(first.lr_scheduler, optim.ReduceLROnPlateau):
        first.lr_scheduler.step(data.draw(ANY))
    state = first.optimizer.buffers | {"buffers": first.model.children["1"].buffers | first.model.children["3"].buffers}
    for name, array in [pair for arrays in state.values() for pair in arrays.items() if pair[1].dtype.kind == "f"]:
        if not name.startswith("running") or data.draw(st.booleans()):
            array.ravel()[:2] = data.draw(st.tuples(ANY, ANY))
    for values in (first.history.loss, first.history.grad_norm, first.history.accuracy):
        values[-1] = float(data.draw(ANY))
    path, before = folder / FILE_NAME, (folder / FILE_NAME).read_bytes()
    try:
        first._save(len(first.history.epochs), 0, {"batch_size": 7, "samples": 7})
    except NonFiniteError as error:
        assert "running_" in str(error) and path.read_bytes() == before
        return
    written, second = load_checkpoint(path), make(1)
    second.fit(DATA, epochs=0, batch_size=7, resume=True)
    again = pack(second)
    assert again.tensors.keys() == written.tensors.keys()
    assert all(again.tensors[name].tobytes() == array.tobytes() for name, array in written.tensors.items())
    assert json.dumps(again.state) == json.dumps(written.state)


def test_a_state_that_json_would_change_is_refused(tmp_path):
    with pytest.raises(OptionError, match="would come back as a text"):
        save_checkpoint(tmp_path / FILE_NAME, Checkpoint({}, {"lr_scheduler": {"rates": [{3: 0.1}]}}))


@pytest.mark.parametrize(
    "config",
    [{"a": object()}, {"a": np.int64(3)}, {"a": {1, 2}}, {"a": math.nan}, {"a": math.inf}, {("a",): 1}, [1], "x"],
)  # fmt: skip
def test_a_configuration_that_cannot_be_kept_is_refused_before_anything_is_written(tmp_path, config):
    model = nn.Linear(3, 2, rng=0)
    with pytest.raises(OptionError, match="config") as caught:
        Trainer(
            model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), config=config,
            checkpoint_dir=tmp_path / "run",
        )  # fmt: skip
    assert caught.value.expected and caught.value.got
    assert list(tmp_path.iterdir()) == []


def test_tuples_in_a_configuration_do_not_prevent_a_resume(tmp_path):
    fit(trainer(tmp_path), epochs=1)
    assert trainer(tmp_path).config == {"a": 1, "sizes": [1, 2]}
    assert fit(trainer(tmp_path), resume=True).steps == 6


@pytest.mark.parametrize(
    "tensors", [{"a": np.array(["x"])}, {"a": np.zeros(2, complex)}, {"a": np.array([None])}, {"\ud800": np.zeros(1)},
                {"__metadata__": np.zeros(1)}, {3: np.zeros(1)}]
)  # fmt: skip
def test_arrays_that_a_checkpoint_cannot_hold(tmp_path, tensors):
    with pytest.raises(OptionError, match="cannot hold"):
        save_checkpoint(tmp_path / FILE_NAME, Checkpoint(tensors, {}))
    with pytest.raises(OptionError, match="JSON"):
        save_checkpoint(tmp_path / FILE_NAME, Checkpoint({}, {"a": object()}))
    assert list(tmp_path.iterdir()) == []


def test_arrays_of_the_other_byte_order_come_back(tmp_path):
    array = np.arange(6, dtype=">f4").reshape(2, 3).T
    save_checkpoint(tmp_path / FILE_NAME, Checkpoint({"a": array}, {}))
    np.testing.assert_array_equal(load_checkpoint(tmp_path).tensors["a"], array)


def test_a_history_that_is_none():
    history = fit(trainer())
    record = history.epochs[0].to_json()
    entries = ({"x": 1}, {"epoch": 1.0}, {"epoch": True}, {"train_loss": None})
    for odd in (None, [], {}, *(record | entry for entry in entries)):
        with pytest.raises(FileFormatError):
            EpochRecord.from_json(odd)
    arrays = history.to_arrays()
    entries = ({"x": arrays["loss"]}, {"loss": arrays["loss"][1:]}, {"loss": arrays["samples"]})
    for odd in ({}, *(arrays | entry for entry in entries)):
        with pytest.raises(FileFormatError):
            History.from_arrays(odd, [])
