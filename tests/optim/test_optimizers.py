"""Optimizers and clipping against torch.optim over several steps."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import optim
from sparsebp.core.errors import DTypeError, FileFormatError, NonFiniteError, OptionError, ShapeError
from strategies import optimizers, seeds
from torch_cases import scalars_in_float64

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "scalar": (), "empty": (0, 2)}


def make(chosen, params):
    return getattr(optim, chosen[0])(params, **chosen[1])


def arrays(rng, dtype=np.float64):
    return {name: np.asarray(rng.standard_normal(shape), dtype=dtype) for name, shape in SHAPES.items()}


@given(chosen=optimizers(), seed=seeds, dtype=st.sampled_from([np.float32, np.float64]))
def test_a_hundred_steps_are_torchs(chosen, seed, dtype):
    rng = np.random.default_rng(seed)
    params = arrays(rng, dtype)
    twins = {name: torch.nn.Parameter(torch.from_numpy(p.copy())) for name, p in params.items()}
    ours, theirs = make(chosen, params), getattr(torch.optim, chosen[0])(twins.values(), **chosen[1])
    wide = {name: torch.nn.Parameter(torch.from_numpy(p.astype(np.float64))) for name, p in params.items()}
    exact = getattr(torch.optim, chosen[0])(wide.values(), **chosen[1])
    largest = {name: np.ones(param.shape) for name, param in params.items()}
    for _ in range(100):
        grads = arrays(rng, dtype)
        for name, twin in twins.items():
            twin.grad = torch.from_numpy(grads[name])
            wide[name].grad = torch.from_numpy(grads[name].astype(np.float64))
        ours.step(grads)
        with scalars_in_float64():
            theirs.step()
            exact.step()
        largest = {name: np.maximum(size, np.abs(params[name])) for name, size in largest.items()}
    tolerance = 1e-12 if dtype == np.float64 else 1e-6
    for name, param in params.items():  # a step rounds by what a parameter is then, however near to 0 it ends
        difference = np.abs(param - twins[name].detach().numpy())
        # and where a step is ill conditioned, as behind a difference that is near to 0, PyTorch's own rounding shows it
        rounding = np.abs(wide[name].detach().numpy() - twins[name].detach().numpy()).max(initial=0)
        bound = 2 * tolerance * largest[name] + 4 * rounding + 1e-300
        np.testing.assert_array_less(difference, bound, err_msg=name)


@given(chosen=optimizers(), seed=seeds)
def test_a_restored_state_goes_on_bit_for_bit(chosen, seed):
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    first = make(chosen, params)
    first.step(arrays(rng))
    first.lr = 0.05
    copies = {name: p.copy() for name, p in params.items()}
    second = make(chosen, copies)
    second.load_state_dict(first.state_dict())
    for _ in range(2):
        grads = arrays(rng)
        first.step(grads)
        second.step(grads)
    for name, param in params.items():
        np.testing.assert_array_equal(param, copies[name])


@given(chosen=optimizers(), seed=seeds, order=st.permutations(list(SHAPES)), cut=st.integers(0, len(SHAPES)))
def test_an_update_in_pieces_is_the_whole_bit_for_bit(chosen, seed, order, cut):
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    copies = {name: p.copy() for name, p in params.items()}
    whole, pieces = make(chosen, params), make(chosen, copies)
    for _ in range(3):
        grads = arrays(rng)
        whole.step(grads)
        update = pieces.begin()
        update.apply({name: grads[name] for name in order[:cut]})
        for name in order[cut:]:
            update.apply({name: grads[name]})
        assert update.remaining == ()
    assert whole.steps == pieces.steps == dict.fromkeys(SHAPES, 3)
    for name, param in params.items():
        np.testing.assert_array_equal(param, copies[name])


def test_state_dict_is_flat_and_a_copy():
    params = {"w": np.ones(2)}
    adam = optim.Adam(params, lr=0.1)
    state = adam.state_dict()
    options = {f"group0.{name}" for name in ("lr", "betas.0", "betas.1", "eps", "weight_decay", "amsgrad", "maximize")}
    assert state.keys() == options | {"Adam.version", "group0.params", "step.w", "exp_avg.w", "exp_avg_sq.w"}
    adam.step({"w": np.ones(2)})
    assert (state["exp_avg.w"] == 0).all()
    assert not any(isinstance(value, np.ndarray) for value in optim.SGD(params, 0.1).state_dict().values())


def test_options_that_are_out_of_range():
    params = {"w": np.ones(2), "b": np.ones(1)}
    for wrong in (
        lambda: optim.SGD(params, -1.0),
        lambda: optim.SGD(params, 0.1, nesterov=True),
        lambda: optim.Adadelta(params, rho=1.5),
        lambda: optim.Adagrad(params, initial_accumulator_value=-1.0),
        lambda: optim.RMSprop(params, alpha=-0.1),
    ):
        with pytest.raises(OptionError):
            wrong()
    optimizer = optim.SGD(params, 0.1)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptionError, match="switched"):
        optimizer.begin()


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


@given(seed=seeds, limit=st.sampled_from([0.0, 0.5, 10.0]))
def test_clipping_by_value_is_torchs(seed, limit):
    grads = arrays(np.random.default_rng(seed)) | {"single": np.array([-3.0, np.nan, 3.0], np.float32)}
    twins = [torch.nn.Parameter(torch.zeros(g.shape, dtype=torch.from_numpy(g).dtype)) for g in grads.values()]
    for twin, grad in zip(twins, grads.values(), strict=True):
        twin.grad = torch.from_numpy(grad.copy())
    torch.nn.utils.clip_grad_value_(twins, limit)
    optim.clip_grad_value(grads, limit)
    for twin, grad in zip(twins, grads.values(), strict=True):
        np.testing.assert_array_equal(grad, twin.grad.numpy())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_gradients_that_are_not_finite_are_named(value):
    grads = {"good": np.ones(2), "bad": np.array([1.0, value])}
    with pytest.raises(NonFiniteError, match="bad"):
        optim.check_finite(grads)
    with pytest.raises(NonFiniteError, match="bad"):
        optim.clip_grad_norm(grads, 1.0)
    assert (grads["good"] == 1).all()
    optim.check_finite({"good": grads["good"]})


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
    with pytest.raises(OptionError):
        optimizer.lr = -1.0
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(OptionError):
        optimizer.begin()


def test_threads_apply_different_names_at_the_same_time():
    rng = np.random.default_rng(0)
    params = {f"p{i}": rng.standard_normal(5000) for i in range(24)}
    copies = {name: p.copy() for name, p in params.items()}
    grads = {name: rng.standard_normal(5000) for name in params}
    whole, pieces = optim.Adam(params), optim.Adam(copies)
    whole.step(grads)
    update, refused = pieces.begin(), []

    def work(names):
        for name in names:
            try:
                update.apply({name: grads[name]})
            except OptionError:
                refused.append(name)

    names = list(params)
    workers = [threading.Thread(target=work, args=(part,)) for part in (names[:14], names[10:])]  # four names twice
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(refused) == sorted(names[10:14]) and update.remaining == ()
    for name, param in params.items():
        np.testing.assert_array_equal(param, copies[name])


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


def test_parameters_of_two_dtypes():
    params = {"a": np.ones(2), "b": np.ones(2, np.float32), "c": np.ones(3)}
    optimizer = optim.Adam(params, lr=0.5)
    grads = {"a": np.ones(2), "b": np.ones(2, np.float32), "c": np.ones(3)}
    with pytest.raises(ShapeError, match="gradient of b"):
        optimizer.step(grads | {"b": np.ones(3, np.float32)})
    assert (params["a"] == 1).all()
    optimizer.step(grads)
    for param in params.values():
        np.testing.assert_allclose(param, 0.5, rtol=1e-6)
    assert optim.global_norm(grads) == pytest.approx(7**0.5)
