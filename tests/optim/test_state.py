"""An optimizer's state: options belong to the names of parameters; PyTorch's state, both ways; groups added later."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sparsebp import nn, optim, runtime
from sparsebp.core.errors import (
    DTypeError,
    FileFormatError,
    LayoutError,
    MissingDependencyError,
    OptionError,
    ShapeError,
    SparseBPError,
)
from sparsebp.data.dataset import epoch_order
from sparsebp.optim.sharded import PieceOptimizer
from sparsebp.schedule.builders import conventional
from sparsebp.train import Callback, Trainer
from strategies import optimizers, seeds
from torch_cases import scalars_in_float64

NAMES = "abcde"
SHAPES = {"a": (3, 2), "b": (2,), "c": (), "d": (0, 2), "e": (4,)}


def arrays(rng, names=NAMES):
    return {name: np.asarray(rng.standard_normal(SHAPES[name])) for name in names}


def grouped(params, numbers, **options):
    """Return groups of parameters by the number of each, with further options by number."""
    return [
        {"params": {name: params[name] for name in params if numbers[name] == number}}
        | {key: values[number] for key, values in options.items()} for number in sorted(set(numbers.values()))
    ]  # fmt: skip


def options_by_name(optimizer):
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups for name in group["params"]
    }  # fmt: skip


numbers = st.fixed_dictionaries({name: st.integers(0, 2) for name in NAMES})


@given(old=numbers, new=numbers, order=st.permutations(NAMES), decay=st.lists(st.sampled_from([0.0, 0.1]), min_size=3,
       max_size=3), seed=seeds, text=st.booleans())  # fmt: skip
def test_options_follow_their_parameters(old, new, order, decay, seed, text):
    """Into any other groups, in any order; one of parameters whose options differed is refused, and nothing moves."""
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    first = optim.Adam(grouped(params, old, weight_decay=decay), lr=0.3)
    first.step(arrays(rng))
    state = first.state_dict()
    if text:  # as a checkpoint keeps it
        plain = {key: value for key, value in state.items() if not hasattr(value, "shape")}
        state |= json.loads(json.dumps(plain))
    copies = {name: params[name].copy() for name in order}
    second = optim.Adam(grouped(copies, new), lr=0.01)
    before, kept = copy.deepcopy(second.state_dict()), options_by_name(first)
    if all(kept[a]["weight_decay"] == kept[b]["weight_decay"] for a in NAMES for b in NAMES if new[a] == new[b]):
        second.load_state_dict(state)
        assert options_by_name(second) == kept and second.steps == first.steps
        grads = arrays(rng)
        first.step(grads)
        second.step(grads)
        np.testing.assert_equal(params, {name: copies[name] for name in NAMES})
    else:
        with pytest.raises(FileFormatError, match="different weight_decay"):
            second.load_state_dict(state)
        np.testing.assert_equal(second.state_dict(), before)


def of_version_1(state):
    return {k: 1 if k.endswith(".version") else v for k, v in state.items() if not k.endswith(".params")}


def test_states_of_version_0_2_0():
    rng = np.random.default_rng(0)
    state = of_version_1(optim.AdamW(arrays(rng), lr=0.3).state_dict())
    second = optim.AdamW(grouped(arrays(rng), dict(zip(NAMES, [0, 1, 0, 1, 2], strict=True))))
    second.load_state_dict(state)  # of one group: all had the same
    assert {options["lr"] for options in options_by_name(second).values()} == {0.3}
    half = dict(zip(NAMES, [0, 1, 0, 1, 0], strict=True))
    first = optim.AdamW(grouped(arrays(rng), half, weight_decay=[0.0, 0.1]), lr=0.3)
    old = of_version_1(first.state_dict())
    second = optim.AdamW(grouped(arrays(rng), half, weight_decay=[0.5, 0.6]))
    with pytest.raises(FileFormatError, match=r'weight_decay, in the format of version 0.2.0.*\["group0.params"\]'):
        second.load_state_dict(old)
    second.load_state_dict(old | {"group0.params": ["c", "e", "a"], "group1.params": ["b", "d"]})
    assert options_by_name(second) == options_by_name(first)
    second = optim.AdamW(grouped(arrays(rng), half))
    second.load_state_dict(old | {"group1.weight_decay": 0.0})  # several groups with the same options
    assert {options["weight_decay"] for options in options_by_name(second).values()} == {0.0}


@pytest.mark.parametrize("change", [
    {"group0.params": None}, {"group0.params": "ab"}, {"group0.params": ["a"]}, {"group0.params": ["a", "b", "b"]},
    {"group0.params": ["a", "c"]}, {"group0.params": [["a"], "b"]}, {"group1.params": ["b"]}, {"group2.lr": 0.1},
    {"group1.lr": 0.1}, {"group0.speed": 1.0}, {"joined.a": -1}, {"joined.c": 1},
])  # fmt: skip
def test_groups_of_states_that_are_wrong(change):
    optimizer = optim.SGD({"a": np.ones(2), "b": np.ones(2)})
    before = optimizer.state_dict()
    with pytest.raises(SparseBPError) as caught:
        optimizer.load_state_dict(before | change)
    assert caught.value.expected is not None and caught.value.got is not None
    np.testing.assert_equal(optimizer.state_dict(), before)


def model_and_groups(reverse, moved=False):
    model = nn.Sequential(
        nn.Linear(4, 5, rng=0, dtype=float), nn.LayerNorm(5, dtype=float), nn.Linear(5, 3, rng=1, dtype=float)
    )
    params = model.parameters()
    plain = [name for name in params if name.startswith("1.") or (moved and name == "2.weight")]
    groups = [{"params": {name: params[name] for name in params if name not in plain}, "weight_decay": 0.1},
              {"params": {name: params[name] for name in plain}, "weight_decay": 0.0, "lr": 0.03}]  # fmt: skip
    return model, optim.SGD(groups[::-1] if reverse else groups, lr=0.2, momentum=0.9)


def test_a_run_is_resumed_with_groups_in_another_order(tmp_path):
    rng = np.random.default_rng(0)
    data, found = (rng.standard_normal((20, 4)), rng.integers(0, 3, 20)), []

    def fit(folder, epochs, *, resume=False, reverse=False, moved=False):
        model, optimizer = model_and_groups(reverse, moved)
        schedule = [optim.StepLR(optimizer, 3, 0.7)]
        trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, lr_scheduler=schedule, checkpoint_dir=folder, rng=0)
        trainer.fit(data, epochs=epochs, batch_size=5, resume=resume)
        return model.state_dict()

    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "parts", 2)
    with pytest.raises(FileFormatError, match=r"different lr.*of 2\.weight"):
        fit(tmp_path / "parts", 4, resume=True, moved=True)
    found.append(fit(tmp_path / "parts", 4, resume=True, reverse=True))
    for name, array in whole.items():
        np.testing.assert_array_equal(array, found[0][name])


# ---- gradients and groups of a part of the parameters ---------------------------------------------------------------


def test_gradients_of_further_parameters_are_left_out():
    rng = np.random.default_rng(0)
    params, grads = arrays(rng), arrays(rng)
    before = copy.deepcopy(params)
    opts = [optim.SGD({name: params[name] for name in some}, lr=0.5) for some in ("ab", "e")]
    for opt in opts:
        opt.step(grads)
    for name in NAMES:
        np.testing.assert_allclose(params[name], before[name] - (0.5 * grads[name] if name in "abe" else 0))
    with pytest.raises(OptionError, match=r"missing \['e'\]"):
        opts[1].step({name: grads[name] for name in "abc"})


@given(chosen=optimizers(), seed=seeds, before=st.integers(0, 3))
def test_a_group_that_is_added_is_torchs(chosen, seed, before):
    name, options = chosen
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    twins = {key: torch.nn.Parameter(torch.from_numpy(param.copy())) for key, param in params.items()}
    ours = getattr(optim, name)({key: params[key] for key in "ab"}, **options)
    theirs = getattr(torch.optim, name)([twins[key] for key in "ab"], **options)
    for step in range(6):
        if step == before:
            ours.add_param_group({"params": {key: params[key] for key in "ced"}, "lr": 0.05})
            theirs.add_param_group({"params": [twins[key] for key in "ced"], "lr": 0.05})
        grads = arrays(rng)
        for key, twin in twins.items():
            twin.grad = torch.from_numpy(grads[key])
        ours.step(grads)
        with scalars_in_float64():
            theirs.step()
    for key, param in params.items():
        np.testing.assert_allclose(param, twins[key].detach().numpy(), rtol=1e-9, atol=1e-12)
    assert ours.steps == {key: 6 if key in "ab" else 6 - before for key in ours.params}
    assert set(ours.last_update.values()) == {6}
    copies = copy.deepcopy(params)
    again = getattr(optim, name)({key: copies[key] for key in "ab"}, **options)
    again.add_param_group({"params": {key: copies[key] for key in "ced"}})
    again.load_state_dict(ours.state_dict())
    assert again.last_update == ours.last_update and options_by_name(again) == options_by_name(ours)
    assert pickle_of(again) == pickle_of(ours)


def pickle_of(optimizer):
    return {key: getattr(value, "tolist", lambda v=value: v)() for key, value in optimizer.state_dict().items()}


def test_bad_groups_change_nothing():
    params = {"a": np.ones(2), "b": np.ones(3)}
    frozen = np.ones(2)
    frozen.setflags(write=False)
    optimizer = optim.Adam(params)
    before = copy.deepcopy(optimizer.state_dict())
    for error, group in (
        (OptionError, {"params": {"a": np.ones(2)}}), (OptionError, {"params": {"c": params["b"]}}),
        (OptionError, {"params": {"c": np.ones(2)}, "momentum": 0.9}), (OptionError, {"lr": 0.1}), (OptionError, None),
        (OptionError, {"params": [np.ones(2)]}), (OptionError, {"params": {"c": np.ones(2)}, "lr": -1.0}),
        (DTypeError, {"params": {"c": np.ones(2), "d": np.ones(2, int)}}), (LayoutError, {"params": {"c": frozen}}),
    ):  # fmt: skip
        with pytest.raises(error):
            optimizer.add_param_group(group)
        np.testing.assert_equal(optimizer.state_dict(), before)
        assert list(optimizer.params) == ["a", "b"] and len(optimizer.param_groups) == 1
    PieceOptimizer(optimizer, {"a": (0, 1)})
    with pytest.raises(OptionError, match="in pieces"):
        optimizer.add_param_group({"params": {"c": np.ones(2)}})


@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
@pytest.mark.parametrize("when", ["between", "epoch", "step"])
def test_a_trainer_trains_a_group_that_is_added(fusion, when):
    """Unfrozen between two calls of fit, or by a callback; as in a plain loop."""
    rng = np.random.default_rng(0)
    data = rng.standard_normal((16, 4)), rng.integers(0, 3, 16)

    def parts():
        model = nn.Sequential(*(nn.Linear(a, b, rng=a, dtype=float) for a, b in ((4, 5), (5, 6), (6, 3))))
        params = model.parameters()
        return model, optim.SGD({key: params[key] for key in params if key[0] == "2"}, lr=0.1, momentum=0.9)

    def unfreeze(model, optimizer):
        params = model.parameters()
        optimizer.add_param_group({"params": {key: params[key] for key in params if key[0] != "2"}, "lr": 0.02})

    class Unfreeze(Callback):
        def set_trainer(self, trainer):
            self.trainer = trainer

        def on_epoch(self, record):
            if when == "epoch" and self.trainer.history.steps == 4:
                unfreeze(self.trainer.model, self.trainer.optimizer)

        def on_step(self, history):
            if when == "step" and history.steps == 3:
                unfreeze(self.trainer.model, self.trainer.optimizer)

    model, optimizer = parts()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, fusion=fusion, callbacks=[Unfreeze()], rng=0)
    if when == "between":
        trainer.fit(data, epochs=1, batch_size=4)
        unfreeze(model, optimizer)
        trainer.fit(data, epochs=1, batch_size=4)
    else:
        trainer.fit(data, epochs=2, batch_size=4)
    twin, plain = parts()
    epochs = [0, 0] if when == "between" else [0, 1]
    for number, epoch in enumerate(epochs):
        for batch in np.split(epoch_order(16, seed=trainer.seed, epoch=epoch), 4):
            _, grads = nn.value_and_grad(twin, nn.CrossEntropyLoss())(data[0][batch], data[1][batch])
            plain.step(grads)
            if when == "step" and plain.steps["2.weight"] == 3:
                unfreeze(twin, plain)
        if number == 0 and when != "step":
            unfreeze(twin, plain)
    for name, array in model.parameters().items():
        np.testing.assert_allclose(array, twin.parameters()[name], rtol=1e-12, err_msg=name)


def test_an_executor_refuses_parameters_that_it_does_not_train():
    model = nn.Sequential(nn.Linear(4, 5, rng=0), nn.Linear(5, 3, rng=1))
    params = model.parameters()
    optimizer = optim.SGD({name: params[name] for name in params if name[0] == "1"})
    executor = runtime.PlainExecutor(model, nn.CrossEntropyLoss(), optimizer, conventional(stages=2))
    batch = [(np.ones((2, 4), np.float32), np.array([0, 1]))]
    executor.step(batch)
    optimizer.add_param_group({"params": {name: params[name] for name in params if name[0] == "0"}})
    with pytest.raises(OptionError, match=r"does not train them.*0\.weight"):
        executor.step(batch)
    assert set(optimizer.last_update.values()) == {1}


# ---- PyTorch's state ------------------------------------------------------------------------------------------------


def steps_of_torch(optimizer, twins, rng, count):
    for _ in range(count):
        grads = arrays(rng)
        for key, twin in twins.items():
            twin.grad = torch.from_numpy(grads[key])
        with scalars_in_float64():
            optimizer.step()
        yield grads


@given(chosen=optimizers(), seed=seeds, count=st.integers(0, 3), several=st.booleans(), named=st.booleans())
def test_torchs_state_goes_on_here_and_back(chosen, seed, count, several, named):
    """Steps in PyTorch, then in both; the state of ours goes back into a new one of PyTorch, then in both again."""
    name, options = chosen
    rng = np.random.default_rng(seed)
    start = arrays(rng)
    if name == "NAdam":
        assume(count > 0)  # PyTorch's first step is in float32 else

    def of_torch(values):
        twins = {key: torch.nn.Parameter(torch.from_numpy(np.array(value))) for key, value in values.items()}
        pairs = list(twins.items()) if named else list(twins.values())
        groups = [{"params": pairs[:2], "lr": 0.02}, {"params": pairs[2:]}] if several else pairs
        return twins, getattr(torch.optim, name)(groups, **options)

    twins, theirs = of_torch(start)
    list(steps_of_torch(theirs, twins, rng, count))
    params = {key: twin.detach().numpy().copy() for key, twin in twins.items()}
    groups = [{"params": {key: params[key] for key in "ab"}}, {"params": {key: params[key] for key in "cde"}}]
    ours = getattr(optim, name)(groups if several else params, lr=0.7)
    if options.get("momentum") or options.get("amsgrad") or options.get("centered"):
        ours = getattr(optim, name)(groups if several else params, **options | {"lr": 0.7})
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    for _ in range(2):
        for grads in steps_of_torch(theirs, twins, rng, 2):
            ours.step(grads)
        for key, param in params.items():
            np.testing.assert_allclose(param, twins[key].detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=key)
        twins, theirs = of_torch(params)
        with scalars_in_float64():
            theirs.load_state_dict(ours.torch_state_dict())


def test_the_order_of_torchs_parameters_must_be_known():
    rng = np.random.default_rng(0)
    values = {name: rng.standard_normal(2) for name in "abc"}
    twins = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in values.items()}

    def state(groups):
        adam = torch.optim.Adam([{"params": [twins[n] for n in some], "weight_decay": 0.1 * i}
                                 for i, some in enumerate(groups)])  # fmt: skip
        for twin in twins.values():
            twin.grad = twin.detach() + 1
        adam.step()
        return adam.state_dict()

    two = optim.Adam([{"params": {n: values[n] for n in some}} for some in ("ab", "c")])
    two.load_state_dict(state(["ab", "c"]))
    for given_, names in ((["c", "ab"], "cab"), (["abc"], "abc"), (["a", "b", "c"], "abc")):
        with pytest.raises(FileFormatError, match="which parameter is which"):
            two.load_state_dict(state(given_))
        if given_ != ["a", "b", "c"]:
            two.load_torch_state_dict(state(given_), names=list(names))
            for name, mean in two.buffers["exp_avg"].items():
                np.testing.assert_allclose(mean, 0.1 * (twins[name].detach().numpy() + 1), rtol=0.1)
            assert options_by_name(two)["c"]["weight_decay"] == 0.0
    same = optim.Adam([{"params": {n: values[n]}} for n in "ab"])
    pair = {n: torch.nn.Parameter(torch.from_numpy(values[n])) for n in "ba"}
    adam = torch.optim.Adam([{"params": [("b", pair["b"])], "lr": 0.5}, {"params": [("a", pair["a"])], "lr": 0.25}])
    same.load_state_dict(adam.state_dict())  # it has names
    assert options_by_name(same)["a"]["lr"] == 0.25
    plain = torch.optim.Adam([{"params": [pair["b"]]}, {"params": [pair["a"]]}])
    with pytest.raises(FileFormatError, match="of different shapes"):  # the groups could be exchanged
        same.load_state_dict(plain.state_dict())
    for wrong in (["a"], ["a", "a"], ["a", "c"], "ab", 3):
        with pytest.raises(OptionError):
            same.load_torch_state_dict(plain.state_dict(), names=wrong)
        with pytest.raises(OptionError):
            same.torch_state_dict(names=wrong)


@pytest.mark.parametrize(("ours", "theirs"), [
    ("Adam", torch.optim.AdamW), ("AdamW", torch.optim.Adam), ("Adam", torch.optim.RAdam), ("RAdam", torch.optim.Adam),
    ("SGD", lambda params: torch.optim.SGD(params, momentum=0.9)), ("Adagrad", torch.optim.Adadelta),
    ("Adam", lambda params: torch.optim.Adam(params, amsgrad=True)), ("RMSprop", torch.optim.Rprop),
])  # fmt: skip
def test_states_of_torchs_other_optimizers_are_refused(ours, theirs):
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = theirs([param])
    param.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    mine = getattr(optim, ours)({"w": np.ones(2)})
    before = mine.state_dict()
    with pytest.raises(FileFormatError):
        mine.load_state_dict(optimizer.state_dict())
    np.testing.assert_equal(mine.state_dict(), before)


def test_torchs_states_that_do_not_fit(monkeypatch):
    def state(shape, dtype=torch.float64):
        param = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = torch.optim.Adam([param])
        param.grad = torch.ones(shape, dtype=dtype)
        optimizer.step()
        return optimizer.state_dict()

    mine = optim.Adam({"w": np.ones(2)})
    for error, wrong in (
        (ShapeError, state(3)), (DTypeError, state(2, torch.float32)), (FileFormatError, {"state": {}}),
        (FileFormatError, {"state": {}, "param_groups": 3}), (FileFormatError, None),
    ):  # fmt: skip
        with pytest.raises(error):
            mine.load_torch_state_dict(wrong)
    assert mine.steps == {"w": 0}

    class Own(optim.Optimizer):
        def update(self, param, grad, state, group):
            param -= grad

    for call in (lambda o: o.torch_state_dict(), lambda o: o.load_state_dict(state(2))):
        with pytest.raises(OptionError, match="PyTorch has no Own"):
            call(Own({"w": np.ones(2)}, {"lr": 0.1}))
    nadam = torch.optim.NAdam([torch.nn.Parameter(torch.ones(2, dtype=torch.float64))])
    twin = nadam.param_groups[0]["params"][0]
    for beta in (0.9, 0.5):
        nadam.param_groups[0]["betas"] = (beta, 0.999)
        twin.grad = torch.ones(2, dtype=torch.float64)
        nadam.step()
    with pytest.raises(FileFormatError, match="momentum_decay of NAdam have changed"):
        optim.NAdam({"w": np.ones(2)}).load_state_dict(nadam.state_dict())
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(MissingDependencyError):
        mine.torch_state_dict()


@pytest.mark.parametrize(("layer", "twin"), [
    (lambda: nn.LSTM(3, 4, 2, bidirectional=True, rng=0), torch.nn.LSTM(3, 4, 2, bidirectional=True)),
    (lambda: nn.GRU(3, 4, rng=0), torch.nn.GRU(3, 4)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, rng=0), torch.nn.TransformerEncoderLayer(8, 2, 16)),
    (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, rng=0), nn.BatchNorm2d(3), nn.Linear(4, 2, rng=1)),
     torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(4, 2))),
    (lambda: nn.MultiheadAttention(8, 2, rng=0), torch.nn.MultiheadAttention(8, 2)),
])  # fmt: skip
def test_the_order_of_parameters_is_that_of_torchs_modules(layer, twin):
    assert list(layer().parameters()) == [name for name, _ in twin.named_parameters()]
