"""Optimizers and clipping against torch.optim over several steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import optim
from sparsebp.errors import DTypeError, FileFormatError, NonFiniteError, OptionError, ShapeError
from strategies import seeds

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "scalar": (), "empty": (0, 2)}


@st.composite
def pairs(draw):
    """An optimizer of ours and of torch's with the same options, as functions of the parameters."""
    lr, decay = draw(st.sampled_from([0.0, 1e-3, 0.3])), draw(st.sampled_from([0.0, 0.01, 0.5]))
    name = draw(st.sampled_from(["SGD", "Adam", "AdamW"]))
    if name == "SGD":
        nesterov = draw(st.booleans())
        options = {
            "momentum": draw(st.sampled_from([0.5, 0.9] if nesterov else [0.0, 0.9])),
            "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3])),
            "nesterov": nesterov,
        }
    else:
        options = {
            "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5)])),
            "eps": draw(st.sampled_from([1e-8, 0.1])),
        }
    options |= {"lr": lr, "weight_decay": decay}
    return (lambda p: getattr(optim, name)(p, **options)), (lambda p: getattr(torch.optim, name)(p, **options))


def arrays(rng, dtype=np.float64):
    return {name: np.asarray(rng.standard_normal(shape), dtype=dtype) for name, shape in SHAPES.items()}


@given(pair=pairs(), seed=seeds, dtype=st.sampled_from([np.float32, np.float64]))
def test_steps_are_torchs(pair, seed, dtype):
    rng = np.random.default_rng(seed)
    params = arrays(rng, dtype)
    twins = {name: torch.nn.Parameter(torch.from_numpy(p.copy())) for name, p in params.items()}
    ours, theirs = pair[0](params), pair[1](twins.values())
    for _ in range(4):
        grads = arrays(rng, dtype)
        for name, twin in twins.items():
            twin.grad = torch.from_numpy(grads[name].copy())
        ours.step(grads)
        theirs.step()
        for name, param in params.items():
            tolerance = 1e-12 if dtype == np.float64 else 1e-5
            np.testing.assert_allclose(
                param, twins[name].detach().numpy(), rtol=tolerance, atol=tolerance, err_msg=name
            )


@given(pair=pairs(), seed=seeds)
def test_a_restored_state_goes_on_bit_for_bit(pair, seed):
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    first = pair[0](params)
    first.step(arrays(rng))
    first.lr = 0.05
    copies = {name: p.copy() for name, p in params.items()}
    second = pair[0](copies)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        grads = arrays(rng)
        first.step(grads)
        second.step(grads)
    for name, param in params.items():
        np.testing.assert_array_equal(param, copies[name])


def test_state_dict_is_flat_and_a_copy():
    params = {"w": np.ones(2)}
    adam = optim.Adam(params, lr=0.1)
    state = adam.state_dict()
    options = {f"group0.{name}" for name in ("lr", "betas.0", "betas.1", "eps", "weight_decay", "maximize")}
    assert state.keys() == options | {"Adam.version", "step.w", "exp_avg.w", "exp_avg_sq.w"}
    adam.step({"w": np.ones(2)})
    assert (state["exp_avg.w"] == 0).all()
    assert not any(isinstance(value, np.ndarray) for value in optim.SGD(params, 0.1).state_dict().values())


def test_bad_input_is_refused():
    params = {"w": np.ones(2), "b": np.ones(1)}
    for make in (optim.SGD, optim.Adam, optim.AdamW):
        optimizer = make(params, lr=0.1)
        for error, grads in (
            (OptionError, {"w": np.ones(2)}),
            (OptionError, {"w": np.ones(2), "b": np.ones(1), "c": np.ones(1)}),
            (ShapeError, {"w": np.ones(2), "b": np.ones(2)}),
            (DTypeError, {"w": np.ones(2), "b": np.ones(1, np.float32)}),
        ):
            with pytest.raises(error):
                optimizer.step(grads)
        assert set(optimizer.steps.values()) == {0} and (params["w"] == 1).all()
        with pytest.raises(FileFormatError):
            optimizer.load_state_dict({"lr": 1.0})
        with pytest.raises(OptionError):
            make({}, lr=0.1)
        with pytest.raises(OptionError):
            make(params, lr=-1.0)
    state = optim.Adam(params).state_dict()
    with pytest.raises(ShapeError):
        optim.Adam(params).load_state_dict(state | {"exp_avg.w": np.ones(3)})
    with pytest.raises(DTypeError):
        optim.Adam(params).load_state_dict(state | {"exp_avg.w": np.ones(2, np.float32)})
    with pytest.raises(OptionError):
        optim.Adam(params, betas=(0.9, 1.0))
    with pytest.raises(OptionError):
        optim.SGD(params, 0.1, nesterov=True)


# ---- clipping ------------------------------------------------------------------------------------------------------


@given(seed=seeds, max_norm=st.sampled_from([0.0, 0.1, 1e6]))
def test_clipping_is_torchs(seed, max_norm):
    grads = arrays(np.random.default_rng(seed))
    twins = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.float64)) for g in grads.values()]
    for twin, grad in zip(twins, grads.values(), strict=True):
        twin.grad = torch.from_numpy(grad.copy())
    want = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    assert optim.clip_grad_norm(grads, max_norm) == pytest.approx(float(want), rel=1e-12)
    for twin, grad in zip(twins, grads.values(), strict=True):
        np.testing.assert_allclose(grad, twin.grad.numpy(), rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_named(value):
    grads = {"good": np.ones(2), "bad": np.array([1.0, value])}
    with pytest.raises(NonFiniteError, match="bad"):
        optim.check_finite(grads)
    with pytest.raises(NonFiniteError, match="bad"):
        optim.clip_grad_norm(grads, 1.0)
    assert (grads["good"] == 1).all()
    optim.check_finite({"good": grads["good"]})
    with pytest.raises(OptionError):
        optim.clip_grad_norm({"good": grads["good"]}, -1.0)


# ---- groups and updates in pieces ----------------------------------------------------------------------------------


def test_groups_have_options_of_their_own():
    params = {"a": np.ones(2), "b": np.ones(2)}
    groups = [{"params": {"a": params["a"]}}, {"params": {"b": params["b"]}, "lr": 0.5, "momentum": 0.0}]
    optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5] and optimizer.lr == 0.1
    assert list(optimizer.buffers["momentum_buffer"]) == ["a"]
    optimizer.step({"b": np.ones(2), "a": np.full(2, 2.0)})
    np.testing.assert_allclose(params["a"], 0.8)
    np.testing.assert_allclose(params["b"], 0.5)
    optimizer.lr = 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    for wrong in (
        [{"params": {"a": params["a"]}, "speed": 1.0}],
        [{"lr": 1.0}],
        [{"params": [params["a"]]}],
        [{"params": {"a": params["a"]}}, {"params": {"a": params["b"]}}],
        [{"params": {"a": params["a"]}}, {"params": {"b": params["a"]}}],
        [],
    ):
        with pytest.raises(OptionError):
            optim.SGD(wrong, lr=0.1)


def test_an_update_takes_the_options_as_they_were_when_it_began():
    params = {"a": np.ones(2), "b": np.ones(2)}
    optimizer = optim.SGD(params, lr=0.5)
    update = optimizer.begin()
    optimizer.lr = 0.0
    update.apply({"b": np.ones(2)})
    assert update.remaining == ("a",) and optimizer.steps == {"a": 0, "b": 1}
    update.apply({"a": np.ones(2)})
    np.testing.assert_allclose([params["a"], params["b"]], 0.5)
    assert update.remaining == ()
    optimizer.lr = -1.0
    with pytest.raises(OptionError):
        optimizer.begin()


def test_an_update_refuses_what_does_not_belong():
    params = {"a": np.ones(2), "b": np.ones(2)}
    update = optim.SGD(params, lr=0.5).begin()
    update.apply({"a": np.zeros(2)})
    for error, grads in (
        (OptionError, {"a": np.ones(2)}),
        (OptionError, {"b": np.ones(2), "a": np.ones(2)}),
        (OptionError, {"b": np.ones(2), "c": np.ones(2)}),
        (ShapeError, {"b": np.ones(3)}),
        (DTypeError, {"b": np.ones(2, np.float32)}),
    ):
        with pytest.raises(error):
            update.apply(grads)
    assert update.remaining == ("b",) and (params["b"] == 1).all()


def test_a_state_of_another_optimizer_is_refused():
    params = {"w": np.ones(2)}
    state = optim.AdamW(params).state_dict()
    with pytest.raises(FileFormatError, match=r"AdamW\.version"):
        optim.Adam(params).load_state_dict(state)
    with pytest.raises(OptionError):
        optim.AdamW(params).load_state_dict(state | {"group0.lr": -1.0})
    with pytest.raises(FileFormatError, match="momentum_buffer"):
        optim.SGD(params, momentum=0.9).load_state_dict(optim.SGD(params).state_dict())
