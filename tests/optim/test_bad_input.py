"""Bad input of optimizers, schedules and clipping is refused by name and changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparsebp import optim
from sparsebp.core.errors import DTypeError, FileFormatError, LayoutError, OptionError, ShapeError, SparseBPError
from sparsebp.optim.sharded import PieceOptimizer

OPTIMIZERS = [
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta,
    optim.RMSprop,
]  # fmt: skip
NO_NUMBERS = ["a", None, True, math.nan, math.inf, np.array([0.1, 0.1]), [0.1], 1j, "0.1", np.bool_(True)]


def refused(error, call):
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    assert caught.value.expected is not None and caught.value.got is not None
    return str(caught.value)


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize(
    ("error", "params", "said"),
    [
        (OptionError, [np.ones(2)], "names"),
        (OptionError, np.ones(2), "names"),
        (OptionError, "weights", "names"),
        (OptionError, None, "names"),
        (OptionError, 3, "names"),
        (OptionError, [None], "names"),
        (OptionError, [("w", np.ones(2))], "names"),
        (OptionError, [], "nothing"),
        (OptionError, {}, "nothing"),
        (OptionError, [{"params": [np.ones(2)]}], "mapping"),
        (OptionError, [{"params": {"w": np.ones(2)}, 3: 4}], "group"),
        (OptionError, {3: np.ones(2)}, "name"),
        (DTypeError, {"w": [1.0, 2.0]}, "parameter w"),
        (DTypeError, {"w": None}, "parameter w"),
        (DTypeError, {"w": 1.0}, "parameter w"),
        (DTypeError, {"w": np.ones(2, np.int64)}, "parameter w"),
        (DTypeError, {"w": np.ones(2, np.float16)}, "parameter w"),
        (DTypeError, {"w": np.array([None])}, "parameter w"),
        (DTypeError, {"w": np.ones(2, complex)}, "parameter w"),
        (LayoutError, {"w": np.float32(1)}, "parameter w"),
        (LayoutError, {"w": np.ones((4, 3)).T}, "w"),
        (LayoutError, {"w": np.broadcast_to(np.ones(1), (4,))}, "parameter w"),
    ],
)
def test_parameters(cls, error, params, said):
    assert said in refused(error, lambda: cls(params, lr=0.1))


def test_read_only_parameters_are_refused_by_name_now_and_later():
    frozen = np.ones(3)
    frozen.setflags(write=False)
    assert "parameter frozen is read-only" in refused(
        LayoutError, lambda: optim.Adam({"w": np.ones(2), "frozen": frozen})
    )
    params = {"w": np.ones(2), "b": np.ones(1)}
    optimizer = optim.SGD(params, 0.1)
    params["b"].setflags(write=False)
    grads = {"w": np.ones(2), "b": np.ones(1)}
    assert "parameter b is read-only" in refused(LayoutError, lambda: optimizer.step(grads))
    assert (params["w"] == 1).all() and set(optimizer.steps.values()) == {0}


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_numbers(cls, value):
    params = {"w": np.ones(2)}
    group = cls(params, lr=0.1).param_groups[0]
    for name, kept in group.items():
        if name in ("params", "betas"):
            continue
        if isinstance(kept, bool) and isinstance(value, bool | np.bool_):
            continue
        for options in ({name: value}, [{"params": params, name: value}]):
            refused(OptionError, lambda o=options: cls(params, **o) if isinstance(o, dict) else cls(o))
        optimizer = cls(params, lr=0.1)
        optimizer.step({"w": np.zeros(2)})
        before = params["w"].copy()
        optimizer.param_groups[0][name] = value
        refused(OptionError, lambda o=optimizer: o.step({"w": np.ones(2)}))
        refused(OptionError, lambda o=optimizer: o.begin())
        np.testing.assert_array_equal(params["w"], before)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_the_learning_rate(value):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)

    def set_rate():
        optimizer.lr = value

    refused(OptionError, set_rate)
    assert optimizer.lr == 0.1


@pytest.mark.parametrize(
    "betas", [0.9, (0.9,), (0.9, 0.99, 0.999), None, "ab", (0.9, "a"), (0.9, math.nan), (True, 0.9), (0.9, 1.0)]
)
def test_betas(betas):
    refused(OptionError, lambda: optim.Adam({"w": np.ones(2)}, betas=betas))
    optimizer = optim.Adam({"w": np.ones(2)}, betas=[0.9, 0.99])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    optimizer.param_groups[0]["betas"] = betas
    refused(OptionError, lambda: optimizer.step({"w": np.ones(2)}))


@pytest.mark.parametrize("cls", OPTIMIZERS)
@pytest.mark.parametrize("two_kinds", [False, True])
@pytest.mark.parametrize(
    ("error", "grad"),
    [(DTypeError, None), (DTypeError, [1.0, 2.0]), (DTypeError, 1.0), (DTypeError, "ab"),
     (DTypeError, np.ones(2, np.int64)), (DTypeError, np.array([None, None])), (DTypeError, np.ones(2, np.float32)),
     (ShapeError, np.ones(3))],
)  # fmt: skip
def test_gradients(cls, two_kinds, error, grad):
    params = {"a": np.ones(3, np.float32 if two_kinds else np.float64), "w": np.ones(2)}
    optimizer = cls(params, lr=0.1)
    grads = {"a": np.ones_like(params["a"]), "w": grad}
    assert "gradient of w" in refused(error, lambda: optimizer.step(grads))
    update = optimizer.begin()
    assert "gradient of w" in refused(error, lambda: update.apply(grads))
    assert update.remaining == ("a", "w")
    assert all((param == 1).all() for param in params.values()) and set(optimizer.steps.values()) == {0}


@pytest.mark.parametrize("grads", [[np.ones(2)], None, np.ones(2), "w", 3])
def test_gradients_without_names(grads):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)
    for call in (
        optimizer.step, optimizer.begin().apply, optim.global_norm, optim.check_finite,
        lambda g: optim.clip_grad_norm(g, 1.0), lambda g: optim.clip_grad_value(g, 1.0),
    ):  # fmt: skip
        assert "not a mapping" in refused(OptionError, lambda c=call: c(grads))
    for wrong in ({3: np.ones(2), "b": np.ones(2)}, {}, {"W": np.ones(2), "b": np.ones(2)}):
        refused(OptionError, lambda w=wrong: optimizer.step(w))


@pytest.mark.parametrize("grad", [None, [1.0], 1.0])
def test_clipping_what_is_no_array(grad):
    for call in (
        optim.global_norm, optim.check_finite, lambda g: optim.clip_grad_norm(g, 1.0),
        lambda g: optim.clip_grad_value(g, 1.0),
    ):  # fmt: skip
        assert "gradient of w" in refused(DTypeError, lambda c=call: c({"v": np.ones(2), "w": grad}))


@pytest.mark.parametrize("value", [*NO_NUMBERS, -1.0])
def test_what_to_clip_to(value):
    grads = {"w": np.ones(2)}
    refused(OptionError, lambda: optim.clip_grad_norm(grads, value))
    refused(OptionError, lambda: optim.clip_grad_value(grads, value))
    assert (grads["w"] == 1).all()


@pytest.mark.parametrize(
    "state",
    [None, [], {"step.w": "a"}, {"step.w": -1}, {"step.w": 1.5}, {"exp_avg.w": None}, {"exp_avg.w": [0.0, 0.0]},
     {"exp_avg.w": np.ones(3)}, {"exp_avg.w": np.ones(2, np.float32)},
     {"group0.lr": "a"}, {"group0.lr": None}, {"group0.lr": math.nan}, {"group0.betas.0": "a"},
     {"group0.maximize": "False"}, {"group0.lr": np.ones(2)}, {3: 4}],
)  # fmt: skip
def test_states(state):
    params = {"w": np.ones(2)}
    optimizer = optim.Adam(params)
    optimizer.step({"w": np.ones(2)})
    before = optimizer.state_dict()
    given = state if state is None or isinstance(state, list) else before | state
    with pytest.raises(SparseBPError) as caught:
        optimizer.load_state_dict(given)
    assert caught.value.expected is not None and caught.value.got is not None
    for name, value in optimizer.state_dict().items():
        np.testing.assert_array_equal(value, before[name])


COUNTS = ["a", None, True, 1.5, math.nan, 0, -1]


@pytest.mark.parametrize("value", COUNTS)
def test_counts_of_schedules(value):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)
    for make in (
        lambda: optim.StepLR(optimizer, value),
        lambda: optim.MultiStepLR(optimizer, [3, value] if value != 0 else [3, -2]),
        lambda: optim.LinearLR(optimizer, total_iters=value),
        lambda: optim.CosineAnnealingLR(optimizer, value),
        lambda: optim.ConstantLR(optimizer, total_iters=value),
        lambda: optim.PolynomialLR(optimizer, value),
        lambda: optim.CosineAnnealingWarmRestarts(optimizer, value),
        lambda: optim.CosineAnnealingWarmRestarts(optimizer, 3, value),
        lambda: optim.OneCycleLR(optimizer, 0.1, value),
        lambda: optim.SequentialLR(optimizer, [optim.StepLR(optimizer, 3), optim.StepLR(optimizer, 3)], [value]),
        lambda: optim.ReduceLROnPlateau(optimizer, patience=value if value != 0 else -1),
        lambda: optim.ReduceLROnPlateau(optimizer, cooldown=value if value != 0 else -1),
    ):
        refused(OptionError, make)
    assert optimizer.lr == 0.1


@pytest.mark.parametrize("value", [v for v in NO_NUMBERS if not isinstance(v, list | np.ndarray)])
def test_numbers_of_schedules(value):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)
    for make in (
        lambda: optim.StepLR(optimizer, 3, gamma=value),
        lambda: optim.MultiStepLR(optimizer, [3], gamma=value),
        lambda: optim.ExponentialLR(optimizer, value),
        lambda: optim.LinearLR(optimizer, start_factor=value),
        lambda: optim.LinearLR(optimizer, end_factor=value),
        lambda: optim.CosineAnnealingLR(optimizer, 3, eta_min=value),
        lambda: optim.ConstantLR(optimizer, value),
        lambda: optim.PolynomialLR(optimizer, power=value),
        lambda: optim.CosineAnnealingWarmRestarts(optimizer, 3, eta_min=value),
        lambda: optim.LambdaLR(optimizer, lambda step: value),
        lambda: optim.LambdaLR(optimizer, value),
        lambda: optim.OneCycleLR(optimizer, value, 10),
        lambda: optim.OneCycleLR(optimizer, [value], 10),
        lambda: optim.OneCycleLR(optimizer, 0.1, 10, pct_start=value),
        lambda: optim.OneCycleLR(optimizer, 0.1, 10, div_factor=value),
        lambda: optim.OneCycleLR(optimizer, 0.1, 10, final_div_factor=value),
        lambda: optim.ReduceLROnPlateau(optimizer, factor=value),
        lambda: optim.ReduceLROnPlateau(optimizer, threshold=value),
        lambda: optim.ReduceLROnPlateau(optimizer, min_lr=value),
        lambda: optim.ReduceLROnPlateau(optimizer, eps=value),
        lambda: optim.ReduceLROnPlateau(optimizer, mode=value),
    ):
        refused(OptionError, make)
    assert optimizer.lr == 0.1 and optimizer.param_groups[0].get("initial_lr", 0.1) == 0.1


@pytest.mark.parametrize("optimizer", [None, "sgd", 0.1, {"lr": 0.1}])
def test_schedules_of_what_is_no_optimizer(optimizer):
    ours = optim.SGD({"w": np.ones(2)}, 0.1)
    for make in (
        lambda: optim.StepLR(optimizer, 3), lambda: optim.OneCycleLR(optimizer, 0.1, 3),
        lambda: optim.ReduceLROnPlateau(optimizer), lambda: optim.SequentialLR(ours, optimizer, [3]),
        lambda: optim.SequentialLR(ours, [optimizer, optimizer], [3]), lambda: optim.MultiStepLR(ours, optimizer),
    ):  # fmt: skip
        refused(OptionError, make)


@pytest.mark.parametrize("metric", ["a", None, True, [0.1]])
def test_a_metric_that_is_none(metric):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)
    refused(OptionError, lambda: optim.ReduceLROnPlateau(optimizer).step(metric))


@pytest.mark.parametrize(("make", "state"), [
    *((lambda optimizer: optim.StepLR(optimizer, 3), state) for state in (
        None, [], {"steps": "a"}, {"steps": -1}, {"steps": 10**400}, {"base_lrs": None}, {"base_lrs": ["a"]},
        {"base_lrs": 3}, {"base_lrs": [math.nan]}, {"rates": ["a"]}, {"rates": 3},
    )),
    *((optim.ReduceLROnPlateau, state) for state in (
        None, {"best": "a"}, {"num_bad": -1}, {"num_bad": "a"}, {"num_bad": 10**400}, {"cooling": None},
    )),
])  # fmt: skip
def test_states_of_schedules(make, state):
    optimizer = optim.SGD({"w": np.ones(2)}, 0.1)
    schedule = make(optimizer)
    before = schedule.state_dict()
    with pytest.raises((FileFormatError, OptionError)):
        schedule.load_state_dict(before | state if isinstance(state, dict) else state)
    assert optimizer.lr == 0.1 and schedule.state_dict() == before


@pytest.mark.parametrize("cls", OPTIMIZERS)
def test_what_torch_asks_of_a_run(cls):
    params = {"w": np.ones(2)}
    cls(params, lr=0.1, foreach=None, fused=True, capturable=True, differentiable=False)
    for wrong in ({"fused": True, "foreach": True}, {"differentiable": True}, {"foreach": 1}, {"capturable": None},
                  {"speed": 3}):  # fmt: skip
        refused(OptionError, lambda w=wrong: cls(params, lr=0.1, **w))


def replaced(groups):
    groups[1] = groups[1] | {"lr": 0.3}


def renamed(groups):
    groups[0]["params"] = {"c": np.ones(2)}


def others(groups):
    groups[0]["params"] = {"a": np.ones(2)}


@pytest.mark.parametrize(
    "change",
    [
        lambda groups: groups.reverse(), lambda groups: groups.append({"params": {"c": np.ones(2)}, "lr": 0.1}),
        lambda groups: groups.append([]), lambda groups: groups.pop(), lambda groups: groups[1].pop("lr"),
        lambda groups: groups[1].pop("params"), renamed, others,
        lambda groups: groups[0].update(params=None), lambda groups: groups[0].update(params=[np.ones(2)]),
    ],
)  # fmt: skip
def test_groups_that_are_others(change):
    """Options belong to a group's parameters: groups neither change places nor come, go or lose an option."""
    params = {"a": np.ones(2), "b": np.ones(2)}
    optimizer = optim.Adam([{"params": {"a": params["a"]}, "lr": 0.1}, {"params": {"b": params["b"]}, "lr": 0.2}])
    optimizer.step({name: np.ones(2) for name in params})
    before = {name: array.copy() for name, array in params.items()}
    change(optimizer.param_groups)
    refused(OptionError, lambda: optimizer.step({name: np.ones(2) for name in params}))
    np.testing.assert_equal(params, before)


@pytest.mark.parametrize("change", [lambda groups: groups.append({"lr": 0.1}), lambda groups: groups.pop()])
@pytest.mark.parametrize("make", [
    lambda opt: optim.StepLR(opt, 3), lambda opt: optim.LambdaLR(opt, lambda step: 0.5),
    lambda opt: optim.SequentialLR(opt, [optim.StepLR(opt, 3), optim.StepLR(opt, 3)], [1]),
    lambda opt: optim.ReduceLROnPlateau(opt, patience=0), None,
])  # fmt: skip
def test_schedules_and_pieces_of_groups_that_are_others(make, change):
    optimizer = optim.Adam([{"params": {"a": np.ones(2)}}, {"params": {"b": np.ones(2)}}], lr=0.1)
    schedule = make and make(optimizer)
    before = schedule and schedule.state_dict()
    change(optimizer.param_groups)
    if schedule is None:
        assert "groups" in refused(OptionError, lambda: PieceOptimizer(optimizer, {"a": (0, 1)}))
        assert optimizer.buffers["exp_avg"]["a"].shape == (2,)  # the state is where it was
        return
    takes_metric = isinstance(schedule, optim.ReduceLROnPlateau)
    if takes_metric:
        schedule.step(1.0)
    assert "groups" in refused(OptionError, lambda: schedule.step(*[1.0] * takes_metric))
    if not takes_metric:  # whose state has no rates
        assert "groups" in refused(OptionError, lambda: schedule.load_state_dict(before))
        assert schedule.steps == 0


@pytest.mark.parametrize("groups", [[], None, 5])
def test_groups_that_are_none(groups):
    optimizer = optim.SGD({"a": np.ones(2)}, lr=0.1)
    optimizer.param_groups = groups
    refused(OptionError, lambda: optimizer.step({"a": np.ones(2)}))


def test_a_group_that_is_replaced_by_one_with_its_parameters():
    params = {"a": np.zeros(2), "b": np.zeros(2)}
    optimizer = optim.SGD([{"params": {"a": params["a"]}}, {"params": {"b": params["b"]}}], lr=0.1)
    replaced(optimizer.param_groups)
    optimizer.step({name: np.ones(2) for name in params})
    np.testing.assert_allclose([params["a"], params["b"]], [[-0.1] * 2, [-0.3] * 2])


@pytest.mark.parametrize("size", [1e154, 1e300, 1.7e308])
def test_clipping_whose_squares_overflow(size):
    grads = {"a": np.array([3.0, 0.0]) * (size / 5), "b": np.array([-4.0]) * (size / 5)}
    assert optim.clip_grad_norm(grads, 10.0) == pytest.approx(size)
    np.testing.assert_allclose(np.concatenate([grads["a"], grads["b"]]), [6.0, 0.0, -8.0])
