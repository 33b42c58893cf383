"""Optimizers whose update is written in Python: in steps, pieces, training, checkpoints."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import sparsebp as sb
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.optim.sharded import PieceOptimizer


class Lion(sb.optim.Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023, Algorithm 2."""

    state_names = ("exp_avg",)

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    def update(self, param, grad, state, group):
        (beta1, beta2), m = group["betas"], state["exp_avg"]
        param *= 1 - group["lr"] * group["decay"]
        param -= group["lr"] * np.sign(beta1 * m + (1 - beta1) * grad)
        state["exp_avg"] = beta2 * m + (1 - beta2) * grad  # assigned anew, as users may


class Plain(sb.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    def update(self, param, grad, state, group):
        param -= (group["lr"] / state["step"]) * grad


def arrays(rng: Any, dtype: Any = np.float64) -> dict[str, Any]:
    shapes = {"a": (3, 5), "b": (7,), "c": (0, 2)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_lion_is_lion(dtype):
    rng = np.random.default_rng(0)
    params = arrays(rng, dtype)
    wanted = {name: array.astype(float) for name, array in params.items()}
    moments = {name: np.zeros(array.shape) for name, array in params.items()}
    opt = Lion(params, lr=0.01, decay=0.1)
    for _ in range(4):
        grads = arrays(rng, dtype)
        for name, w in wanted.items():
            w[...] = w * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * moments[name] + 0.1 * grads[name])
            moments[name] = 0.99 * moments[name] + 0.01 * grads[name]
        opt.step(grads)
    for name, w in wanted.items():
        np.testing.assert_allclose(params[name], w, rtol=1e-5 if dtype == np.float32 else 1e-12)
        np.testing.assert_allclose(opt.buffers["exp_avg"][name], moments[name], rtol=1e-5, atol=1e-7)
    assert opt.steps == dict.fromkeys(params, 4)


def test_pieces_groups_and_options_at_the_beginning():
    rng = np.random.default_rng(1)
    params = arrays(rng)
    twin = copy.deepcopy(params)
    groups = [{"params": {"a": params["a"]}, "lr": 0.5}, {"params": {name: params[name] for name in "bc"}}]
    opt, grads = Plain(groups), arrays(rng)
    update = opt.begin()
    opt.lr = 100.0  # belongs to the next update
    update.apply({"b": grads["b"]})
    update.apply({name: grads[name] for name in "ca"})
    assert update.remaining == ()
    np.testing.assert_array_equal(params["a"], twin["a"] - 0.5 * grads["a"])
    np.testing.assert_array_equal(params["b"], twin["b"] - 0.1 * grads["b"])


@pytest.mark.parametrize("schedule", ["conventional", "ooo"])
@pytest.mark.parametrize("fusion", ["none", "forward", "backward"])
def test_training_is_that_of_the_built_in_rule(schedule, fusion):
    class Sgd(sb.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.05})

        def update(self, param, grad, state, group):
            param -= group["lr"] * grad

    if schedule == "ooo" and fusion == "forward":
        pytest.skip("out-of-order schedules have no forward-fusion")
    rng = np.random.default_rng(2)
    x, t = rng.standard_normal((20, 6)), rng.integers(0, 3, 20)
    results = []
    for make in (Sgd, lambda params: sb.optim.SGD(params, lr=0.05)):
        model = sb.nn.Sequential(
            sb.nn.Linear(6, 5, rng=0, dtype=float), sb.nn.Tanh(), sb.nn.Linear(5, 3, rng=1, dtype=float)
        )
        options = {"fusion": fusion} if schedule == "conventional" else {"schedule": schedule}
        trainer = sb.train.Trainer(model, sb.nn.CrossEntropyLoss(), make(model.parameters()), rng=0, **options)
        trainer.fit((x, t), epochs=2, batch_size=5)
        results.append(model.state_dict())
    for name, array in results[0].items():
        np.testing.assert_allclose(array, results[1][name], rtol=1e-12, atol=1e-14)


def test_state_goes_into_a_checkpoint_and_back():
    rng = np.random.default_rng(3)
    params = arrays(rng)
    opt = Lion(params, lr=0.01)
    opt.step(arrays(rng))
    state, kept, grads = opt.state_dict(), copy.deepcopy(params), arrays(rng)
    opt.step(grads)
    again = Lion(kept, lr=0.5)
    again.load_state_dict(state)
    again.step(grads)
    for name, array in params.items():
        np.testing.assert_array_equal(array, kept[name])
    assert again.steps == dict.fromkeys(params, 2)


def test_pruned_weights_stay_zero():
    model = sb.nn.Sequential(sb.nn.Linear(6, 4, rng=0), sb.nn.ReLU(), sb.nn.Linear(4, 2, rng=1))
    sb.prune(model, 0.5)
    opt = Lion(model.parameters(), lr=0.1)
    opt.step({name: np.ones_like(array) for name, array in model.parameters().items()})
    zeros = [int((array == 0).sum()) for name, array in model.state_dict().items() if "weight" in name]
    assert sum(zeros) >= 0.5 * 32


def test_mistakes_are_told():
    class Lost(Plain):
        def update(self, param, grad, state, group):
            return param - group["lr"] * grad

    params = {"w": np.ones(3)}
    with pytest.raises(OptionError, match="would be lost"):
        Lost(params).step({"w": np.ones(3)})
    for error, wrong in ((ShapeError, np.ones(2)), (DTypeError, np.ones(1, np.float32))):
        with pytest.raises(error):
            Plain(params | {"b": np.ones(1)}).step({"w": np.ones(3), "b": wrong})

    class Nothing(sb.optim.Optimizer):
        pass

    with pytest.raises(OptionError, match="has no update"):
        Nothing(params, {"lr": 0.1}).step({"w": np.ones(3)})
    with pytest.raises(OptionError, match="cannot be captured"):
        Plain(params).begin_on_device()
    with pytest.raises(OptionError, match="cannot be parted"):
        PieceOptimizer(Plain(params), {"w": (0, 2)})
    with pytest.raises(OptionError, match="next step"):
        Plain(params).next_step(None)
    np.testing.assert_array_equal(params["w"], np.ones(3))


def test_what_would_be_lost_is_refused():
    class Halved(sb.optim.Adam):
        def update(self, param, grad, state, group):
            param *= 0.5

    class Forgets(Plain):
        def update(self, param, grad, state, group):
            state["m"] = state.get("m", 0) + grad

    class Assigns(Plain):
        state_names = ("m",)

        def update(self, param, grad, state, group):
            state["m"] = group["m"](state["m"])

    class Counts(Plain):
        state_names = ("step",)

    params = {"a": np.ones(3)}
    with pytest.raises(OptionError, match="update would not run"):
        Halved(params)
    with pytest.raises(OptionError, match="would be lost"):
        Forgets(params).step({"a": np.ones(3)})
    for error, assigned in ((DTypeError, lambda m: m.astype(np.float32)), (ShapeError, lambda m: m[:1])):
        own = Assigns(params)
        own.param_groups[0]["m"] = assigned
        with pytest.raises(error, match="m, assigned by Assigns"):
            own._update_rows([0], [np.ones(3)], own.param_groups)
    with pytest.raises(OptionError, match="which every state has"):
        Counts(params)


def test_torchs_sgd_with_a_falling_rate():
    rng = np.random.default_rng(4)
    params = {"w": rng.standard_normal((4, 3))}
    theirs = torch.tensor(params["w"].copy(), requires_grad=True)
    opt, sgd = Plain(params, lr=0.1), torch.optim.SGD([theirs], lr=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(sgd, lambda step: 1 / (step + 1))
    for _ in range(3):
        grad = rng.standard_normal((4, 3))
        theirs.grad = torch.tensor(grad)
        sgd.step()
        rates.step()
        opt.step({"w": grad})
    np.testing.assert_allclose(params["w"], theirs.detach().numpy(), rtol=1e-12)
