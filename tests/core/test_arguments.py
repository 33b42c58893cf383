"""Checkers of arguments, and public functions that once accepted bad ones."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import numpy as np
import pytest

from sparsebp import nn, plan_scan
from sparsebp.core import backend
from sparsebp.core.check import (
    check_choice,
    check_flag,
    check_generator,
    check_integer,
    check_number,
    check_sequence,
    shown,
)
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, OptionError, ShapeError, SparseBPError
from sparsebp.core.files import write_atomically
from sparsebp.data import ArrayDataset, BitstreamDataset, load_cifar10
from sparsebp.nn.parameters import NamedArrays
from sparsebp.patterns import SparsityPattern
from sparsebp.schedule import Action, Costs, Link, StepGraph, parse, read_csv, simulate
from sparsebp.schedule.builders import BUILDERS
from sparsebp.schedule.costs import read_costs
from sparsebp.train import Checkpoint, load_checkpoint, save_checkpoint, verify
from sparsebp.train.batches import as_dataset
from sparsebp.train.config import read_config, write_config
from sparsebp.train.prune import prune_checkpoint


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_integers(value):
    found = check_integer("n", value, 3, 3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, np.bool_(True), 3.0, "3", None, np.array([3]), int, 2, 5, np.int8(-3), 1j])
def test_no_integers(value):
    with pytest.raises(OptionError, match=r"^n is"):
        check_integer("n", value, 3, 4)


@pytest.mark.parametrize("value", [True, np.bool_(True)])
def test_flags(value):
    assert check_flag("f", value) is True


@pytest.mark.parametrize("value", ["False", 0, 1, None, [], np.array(True), np.ones(2, bool), 1.0])
def test_no_flags(value):
    with pytest.raises(OptionError, match="not a bool"):
        check_flag("f", value)


@pytest.mark.parametrize("value", [0, 0.5, np.float32(0.5), np.int64(1), 1])
def test_numbers(value):
    found = check_number("x", value, 0, 1)
    assert found == value and type(found) is float


@pytest.mark.parametrize("value", [True, "0.5", None, math.nan, -0.1, 1.1, math.inf, 10**400, 1j, np.array(0.5), [0.5]])
def test_no_numbers(value):
    with pytest.raises(OptionError, match=r"^x is"):
        check_number("x", value, 0, 1)
    assert check_number("x", math.inf, finite=False) == math.inf


def test_choices_and_sequences():
    assert check_choice("way", "a", ("a", "b")) == "a" and check_sequence("s", (1, 2), "numbers") == [1, 2]
    for value in ("c", None, ["a"], np.array(["a", "b"]), 1):
        with pytest.raises(OptionError, match="Unknown way"):
            check_choice("way", value, ("a", "b"))
    for value in ("ab", b"ab", 3, None, np.array(3), len):
        with pytest.raises(OptionError, match="not a sequence"):
            check_sequence("s", value, "numbers")


def test_a_value_whose_text_cannot_be_had():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(OptionError, match="a Broken"):
        check_flag("f", Broken())


# ---- who took what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [
    lambda: nn.Linear(-1, 2), lambda: nn.Linear(1.5, 2), lambda: nn.Linear(2, True),
    lambda: nn.Linear(2, 2, "False"), lambda: nn.Linear(2**40, 2**40), lambda: nn.GRU(3.0, 5),
    lambda: nn.GRU(3, 5, bias="False"), lambda: nn.GRU(3, 5, batch_first="False"),
    lambda: nn.RNN(3, 5, bidirectional=1), lambda: nn.GRU(3, 5, dropout="a"),
    lambda: nn.GRU(3, 5, backward=["auto"]), lambda: nn.GRUCell(3.0, 5), lambda: nn.LSTM(3, 5, proj_size=2.0),
    lambda: nn.LSTMCell(3, 5.0), lambda: nn.RNNCell(3, 5, bias=0), lambda: nn.BatchNorm2d(2, eps=-1.0),
    lambda: nn.BatchNorm2d(2.0), lambda: nn.BatchNorm2d(2, affine="no"), lambda: nn.BatchNorm2d(2, eps=math.nan),
    lambda: nn.LayerNorm(2.7), lambda: nn.LayerNorm(2, eps=-1), lambda: nn.LayerNorm("ab"),
    lambda: nn.LayerNorm(2, bias=None), lambda: nn.Dropout("a"), lambda: nn.Dropout(True), lambda: nn.ELU("1"),
    lambda: nn.LeakyReLU(math.nan), lambda: nn.Softplus(beta=0), lambda: nn.Softplus(math.inf),
    lambda: nn.Hardtanh(math.nan, 1), lambda: nn.Softmax("x"), lambda: nn.GELU(["none"]),
    lambda: nn.Conv2d(1, 1, b"1"), lambda: nn.Conv2d(1, 1, True), lambda: nn.Conv2d(1, 1, 1, bias="no"),
    lambda: nn.Conv1d(1, 1, 3, padding=np.ones(3)), lambda: nn.MaxPool2d(2, ceil_mode="no"),
    lambda: nn.AvgPool2d(2, count_include_pad=1), lambda: nn.AvgPool2d(2, divisor_override=1.5),
    lambda: nn.AdaptiveAvgPool2d([(1,), 2]), lambda: nn.Sequential(nn.ReLU), lambda: nn.Concat(1),
    lambda: nn.Residual(None), lambda: nn.Sum(nn.ReLU(), nn.ReLU), lambda: nn.AdaptiveMaxPool2d(1.5),
    lambda: nn.InstanceNorm2d(2, affine="no"), lambda: nn.Upsample(2.5), lambda: nn.Upsample(scale_factor="2"),
    lambda: nn.CELU("a"), lambda: nn.Sequential(nn.ReLU(), backward=["bp"]),
    lambda: nn.SequenceClassifier(nn.Linear(1, 1), nn.Linear(1, 1)), lambda: nn.prune(nn.Linear(2, 2), True),
    lambda: nn.prune(nn.Linear(2, 2), 0.5, np.array(["a", "b"])),
    lambda: nn.prune(nn.Linear(2, 2), 0.5, optimizer=3), lambda: nn.ReLU().train("False"),
])  # fmt: skip
def test_layers_refuse(make):
    with pytest.raises(OptionError):
        make()


@pytest.mark.parametrize("x", [[[1.0, 2.0]], None, 3, "a", np.float32(1), np.zeros((), np.float32)])
def test_linear_refuses_what_is_no_array_of_features(x):
    with pytest.raises((DeviceError, DTypeError, ShapeError)):
        nn.Linear(2, 3).forward(x)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 0, 0), (0, 5)])
def test_linear_without_features(shape):
    layer = nn.Linear(shape[-1], 0, rng=0)
    y, saved = layer.forward(np.ones(shape, np.float32))
    assert y.shape == (*shape[:-1], 0)
    assert layer.input_grad(y, saved).shape == shape
    assert layer.weight_grad(y, saved)["weight"].shape == (0, shape[-1])


LAYERS = {
    "Linear": lambda: nn.Linear(3, 2),
    "Conv2d": lambda: nn.Conv2d(2, 3, 2),
    "ConvTranspose1d": lambda: nn.ConvTranspose1d(2, 3, 2),
    "BatchNorm2d": lambda: nn.BatchNorm2d(3),
    "InstanceNorm1d": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "LayerNorm": lambda: nn.LayerNorm((2, 3)),
    "GroupNorm": lambda: nn.GroupNorm(1, 3),
    "PReLU": lambda: nn.PReLU(3),
    "RNN": lambda: nn.RNN(2, 3),
    "GRU": lambda: nn.GRU(2, 3, bidirectional=True),
    "GRUCell": lambda: nn.GRUCell(2, 3),
    "LSTM": lambda: nn.LSTM(2, 3, proj_size=2),
    "LSTMCell": lambda: nn.LSTMCell(2, 3),
    "MinGRU": lambda: nn.MinGRU(2, 3),
    "LRU": lambda: nn.LRU(2, 3),
    "SelectiveScan": lambda: nn.SelectiveScan(2, 3),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_array_is_replaced_by_one_like_it_alone(name):
    layer = LAYERS[name]()
    for arrays in (layer.params, layer.buffers):
        for key, old in list(arrays.items()):
            wrong = [
                np.zeros((*old.shape, 1), old.dtype),
                old.astype(np.float16),
                old.tolist(),
                None,
                1.0,
                old[..., None],
            ]
            if old.shape:
                wrong += [np.zeros(1, old.dtype), np.repeat(old, 2, axis=-1)[..., ::2]]
            frozen = old.copy()
            frozen.flags.writeable = False
            for array in (*wrong, frozen):
                for assign in (
                    arrays.__setitem__,
                    lambda k, a, own=arrays: own.update({k: a}),
                    lambda k, a, own=arrays: own.__ior__({k: a}),
                ):
                    with pytest.raises((ShapeError, DTypeError, DeviceError, LayoutError)):
                        assign(key, array)
                assert arrays[key] is old
            for remove in (
                lambda k, own=arrays: own.pop(k),
                lambda k, own=arrays: own.__delitem__(k),
                lambda k, own=arrays: own.clear(),
            ):
                with pytest.raises(OptionError, match="removed"):
                    remove(key)
            arrays[key] = old + 1 if old.dtype.kind == "f" else old.copy()
            assert arrays[key] is not old
    with pytest.raises(SparseBPError):
        layer.params = {key: array[..., None] for key, array in layer.params.items()}
    with pytest.raises(OptionError, match="removed"):
        layer.params = {}
    converted = layer.to(dtype=np.float64)
    assert all(array.dtype == np.float64 for array in converted.params.values())


def test_named_arrays_are_copied_with_what_they_share():
    layer = nn.Sequential(nn.Linear(2, 2, rng=0), nn.Linear(2, 2, rng=1))
    layer[1].params["weight"] = layer[0].params["weight"]
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert isinstance(twin[0].params, NamedArrays) and twin[0].params["weight"] is twin[1].params["weight"]
        assert twin[0].params["weight"] is not layer[0].params["weight"]
    assert layer[0].params.setdefault("bias") is layer[0].params["bias"]


@pytest.mark.parametrize("name", BUILDERS)
def test_builders_refuse(name):
    good = {"stages": 8, "microbatches": 8, "workers": 4}
    parameters = inspect.signature(BUILDERS[name]).parameters
    good = {key: value for key, value in good.items() if key in parameters}
    simulate(BUILDERS[name](**good))
    bad = {
        "stages": (1.5, True, "8", 2**40, None),
        "microbatches": (0, [8]),
        "workers": (2.0, None),
        "k": ("1", 1.5),
        "unweighted": (3, "1", [0.5], [True]),
        "input_gradient": (1, "no"),
        "costs": (1, {"F": 1}),
        "chunks": (1.5,),
        "memory_ratio": ("a", math.nan),
        "memory_limit": ("a",),
        "group": (0, "1"),
        "streams": (1.0,),
        "times": (1,),
        "throughput": (1,),
        "fusion": ("no",),
        "recomputed": (1,),
        "regions": (1.5, "a", [1, 2], 0),
        "priority": (np.zeros(0), "last"),
    }
    for key, values in bad.items():
        for value in values if key in parameters else ():
            with pytest.raises(OptionError):
                BUILDERS[name](**good | {key: value})


@pytest.mark.parametrize("call", [
    lambda: StepGraph(2.0), lambda: StepGraph(2, unweighted=1), lambda: StepGraph(2, synchronised="no"),
    lambda: StepGraph(10**6, 10**6), lambda: StepGraph(2, first=["F"]), lambda: Action(1.5, "F", 0),
    lambda: Action(0, ["F"], 0), lambda: Action("0", "F", 0), lambda: Costs(slowdown="a"),
    lambda: Costs(stages=3), lambda: Costs(link=1), lambda: Link("a"), lambda: Link(0, "a"),
    lambda: Link(0, math.nan), lambda: parse(3), lambda: simulate(BUILDERS["conventional"](stages=2), steps=1.5),
    lambda: simulate(BUILDERS["conventional"](stages=2), 3),
])  # fmt: skip
def test_schedules_refuse(call):
    with pytest.raises(SparseBPError):
        call()


DENSE = [SparsityPattern.dense(2, 2)] * 3


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"fold": "no"}, None),
        ({"workers": True}, None),
        ({"batch": 1.5}, None),
        ({"shared": [1, 0, 0]}, None),
        ({"shared": 3}, None),
        ({"xp": "numpy"}, None),
        ({"algorithm": ["auto"]}, None),
        ({"memory_limit": np.array([3])}, None),
        ({}, (None, [np.ones(4)] * 3)),
        ({}, (np.ones(2), None)),
        ({}, (np.ones(2), [None] * 3)),
        ({}, (np.ones(2), 3)),
        ({}, (np.ones(2), [np.ones(4)] * 3, 3)),
        ({}, (np.ones(2), [np.ones(4)] * 3, np.float64(3))),
        ({}, (np.ones(2), [np.ones(4)] * 3, [[1, 2]] * 3)),
    ],
)
def test_scans_refuse(options, arguments):
    with pytest.raises(SparseBPError):
        plan_scan(DENSE, **options)(*arguments)


def test_numbers_of_numpy_plan_the_same_scan():
    """An integer of NumPy's among the cuts was taken for an array of positions."""
    g, data = np.ones(2), np.linspace(0, 1, 12).reshape(3, 4)
    wanted = plan_scan(DENSE, "linear")(g, data)
    for count in (2, np.int64(2)):
        np.testing.assert_allclose(plan_scan(DENSE, "chunked", chunks=count)(g, data), wanted)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("kind", ["masked", "matrix"])
def test_arrays_that_are_not_plain(kind):
    """Masks were dropped without a word; a matrix has other products."""
    array = np.ma.masked_array(np.ones((3, 5)), np.eye(3, 5, dtype=bool)) if kind == "masked" else np.matrix(np.eye(3))
    calls = (
        lambda: backend.namespace(np.ones(2), array),
        lambda: backend.namespace(x=array),
        lambda: backend.check_array("x", array),
        lambda: backend.to_host(array),
        lambda: ArrayDataset(array, np.zeros(3, np.int64)),
        lambda: ArrayDataset(np.ones((3, 5)), array.astype(np.float32)),
        lambda: ArrayDataset(np.ones((3, 5, 1)), np.zeros(3, np.int64), lengths=array[:, 0].astype(np.int64)),
        lambda: as_dataset((array, np.zeros(3, np.int64)), nn.Linear(5, 2, rng=0)),
        lambda: as_dataset((np.ones((3, 5), np.float32), array), nn.Linear(5, 2, rng=0)),
    )
    for call in calls:
        with pytest.raises(DTypeError, match="not a plain array") as caught:
            call()
        assert caught.value.remedy


def test_values_of_any_kind_are_shown_shortly():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list"
    assert shown("x" * 1000).startswith("'xxx") and len(shown("x" * 1000)) <= 80


@pytest.mark.parametrize("rng", ["a", -1, 1.5, True, [1], np.float64(1)])
def test_seeds(rng):
    calls = (
        lambda: BitstreamDataset(3, 5, rng=rng),
        lambda: verify.self_check(rng),
        lambda: check_generator("rng", rng),
    )
    for call in calls:
        with pytest.raises(OptionError, match="rng") as caught:
            call()
        assert caught.value.expected


def test_generators():
    drawn = [check_generator("rng", seed).integers(2**60) for seed in (3, np.int64(3), np.random.default_rng(3))]
    assert drawn == [np.random.default_rng(3).integers(2**60)] * 3
    generator = np.random.default_rng(0)
    assert check_generator("rng", generator) is generator
    assert check_generator("rng", None) is not check_generator("rng", None)


@pytest.mark.parametrize("path", [None, 3, b"x", ["a"], 1.5])
def test_what_is_no_path(path):
    calls = (
        lambda: load_checkpoint(path), lambda: save_checkpoint(path, Checkpoint({}, {})), lambda: read_config(path),
        lambda: write_config({}, path), lambda: read_csv(path), lambda: write_atomically(path, b""),
        lambda: prune_checkpoint(path, "x", 0.5), lambda: prune_checkpoint("x", path, 0.5), lambda: read_costs(path),
        lambda: load_cifar10(path),
    )  # fmt: skip
    for call in calls:
        with pytest.raises(OptionError, match="is not a path") as caught:
            call()
        assert caught.value.expected


def test_a_bound_that_is_not_reached_is_said():
    with pytest.raises(OptionError) as caught:
        nn.prune(nn.Linear(3, 2, rng=0), 1)
    assert caught.value.expected == "a finite number from 0 to below 1"


@pytest.mark.parametrize("value", ["a", None, 1.5, -1, True])
def test_descriptions(value):
    pattern = SparsityPattern.dense(3, 2)
    with pytest.raises(OptionError) as caught:
        plan_scan([pattern]).describe(value)
    assert caught.value.expected
    with pytest.raises(DeviceError, match="xp"):
        pattern.device_arrays(value)
