"""Predictors against real updates: they predict the next step of an unchanged optimizer state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn, optim
from sparsebp.core import backend as seam
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.data import load_digit_images
from strategies import optimizers, seeds

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "scalar": (), "empty": (0, 2), "prime": (31,)}
aheads = st.integers(0, 7)


@pytest.fixture(scope="module", params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def xp(request):
    """The arrays' namespace."""
    if request.param == "host":
        return np
    if not seam.has_gpu():
        pytest.skip("needs CuPy and a GPU")
    return pytest.importorskip("cupy")


def arrays(rng, dtype=np.float64, xp=np):
    return {name: xp.asarray(np.asarray(rng.standard_normal(shape), dtype)) for name, shape in SHAPES.items()}


def copies(params):
    return {name: param.copy() for name, param in params.items()}


def update(optimizer, predictor, grads):
    optimizer.step(grads)
    predictor.observe(grads, grads)


def check(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        np.testing.assert_allclose(
            seam.to_host(found[name]), seam.to_host(array), rtol=tolerance, atol=tolerance, err_msg=name
        )


@given(chosen=optimizers(), seed=seeds, dtype=st.sampled_from([np.float32, np.float64]), s=aheads,
       updates=st.integers(1, 4))  # fmt: skip
def test_the_rules_step_is_the_last_update(xp, chosen, seed, dtype, s, updates):
    """Without weight decay, and at one rate, the step of the present state is the one just made (PipeOptim)."""
    name, options = chosen
    options = options | {"weight_decay": 0.0}
    rng = np.random.default_rng(seed)
    params = arrays(rng, dtype, xp)
    optimizer = getattr(optim, name)(params, **options)
    rule, differences = optim.OptimizerRulePredictor(optimizer), optim.FiniteDifferencePredictor(optimizer)
    check(rule.predict(params, s), params, 0)  # nothing is known yet
    before = params
    for _ in range(updates):
        before = copies(params)
        grads = arrays(rng, dtype, xp)
        optimizer.step(grads)
        for predictor in (rule, differences):
            predictor.observe(grads, grads)
    now = copies(params)
    ahead = {key: param + s * (param - before[key]) for key, param in params.items()}
    tolerance = 1e-11 if dtype == np.float64 else 2e-4
    check(differences.predict(params, s), ahead, tolerance)
    if name != "Adadelta":  # whose mean of squared steps has the last one in it only afterwards
        check(rule.predict(params, s), ahead, tolerance)
    check(params, now, 0)  # predictions leave the weights alone


@given(seed=seeds, s=aheads, decay=st.sampled_from([0.01, 0.5]), maximize=st.booleans())
def test_weight_decay_is_part_of_the_step(seed, s, decay, maximize):
    rng = np.random.default_rng(seed)
    params, grads = arrays(rng), arrays(rng)
    sign = -1 if maximize else 1
    plain = optim.SGD(params, lr=0.1, weight_decay=decay, maximize=maximize)
    for predictor in (optim.OptimizerRulePredictor(plain), optim.MomentumPredictor(plain)):
        predictor.observe(grads, grads)
        plain._steps[:] = 1
        expected = {key: w - s * 0.1 * (sign * grads[key] + decay * w) for key, w in params.items()}
        check(predictor.predict(params, s), expected, 1e-12)
    adamw = optim.AdamW(params, lr=0.1, weight_decay=decay, maximize=maximize)
    adamw.step(grads)
    direction = {key: sign * grad / (abs(grad) + 1e-8) for key, grad in grads.items()}  # m̂ = g, v̂ = g²
    expected = {key: w - s * 0.1 * (direction[key] + decay * w) for key, w in params.items()}
    check(optim.OptimizerRulePredictor(adamw).predict(params, s), expected, 1e-12)


@given(seed=seeds, s=aheads)
def test_adadelta_goes_on_with_the_state_that_it_has(seed, s):
    rng = np.random.default_rng(seed)
    params, grads = arrays(rng), arrays(rng)
    optimizer = optim.Adadelta(params, lr=0.5, rho=0.7)
    predictor = optim.OptimizerRulePredictor(optimizer)
    update(optimizer, predictor, grads)
    squares, steps = optimizer.buffers["square_avg"], optimizer.buffers["acc_delta"]
    expected = {key: w - s * 0.5 * grads[key] * np.sqrt((steps[key] + 1e-6) / (squares[key] + 1e-6))
                for key, w in params.items()}  # fmt: skip
    check(predictor.predict(params, s), expected, 1e-12)


@given(seed=seeds, s=aheads, updates=st.integers(1, 5), gamma=st.sampled_from([0.0, 0.5, 0.9]))
def test_spectrain_is_exact_for_a_constant_gradient(xp, seed, s, updates, gamma):
    """Plain gradient descent: v is the gradient from the first one on, and Eq. 4 has no error."""
    rng = np.random.default_rng(seed)
    params, grads = arrays(rng, xp=xp), arrays(rng, xp=xp)
    optimizer = optim.SGD(params, lr=0.3)
    predictor = optim.MomentumPredictor(optimizer, gamma=gamma)
    for _ in range(updates):
        update(optimizer, predictor, grads)
    expected = predictor.predict(params, s)
    for _ in range(s):
        update(optimizer, predictor, grads)
    check(params, expected, 1e-12)


@given(seed=seeds, s=aheads, nesterov=st.booleans(), momentum=st.sampled_from([0.5, 0.9]))
def test_spectrain_is_exact_for_momentum_in_its_steady_state(xp, seed, s, nesterov, momentum):
    """The buffer is g / (1 − μ) then, and every step is η times it: no momentum step too many, none too few."""
    rng = np.random.default_rng(seed)
    params, grads = arrays(rng, xp=xp), arrays(rng, xp=xp)
    optimizer = optim.SGD(params, lr=0.3, momentum=momentum, nesterov=nesterov)
    optimizer.step(grads)
    for name, buffer in optimizer.buffers["momentum_buffer"].items():
        buffer[...] = grads[name] / (1 - momentum)
    predictors = [optim.MomentumPredictor(optimizer), optim.OptimizerRulePredictor(optimizer)]
    for predictor in predictors:
        predictor.observe(grads, grads)
    expected = [predictor.predict(params, s) for predictor in predictors]
    for _ in range(s):
        optimizer.step(grads)
    for found in expected:
        check(found, params, 1e-12)


@given(seed=seeds, updates=st.integers(1, 6))
def test_the_smoothed_gradient_is_a_weighted_mean(seed, updates):
    rng = np.random.default_rng(seed)
    params = arrays(rng)
    optimizer = optim.SGD(params, lr=0.2)
    predictor = optim.MomentumPredictor(optimizer, gamma=0.8)
    given_ = [arrays(rng) for _ in range(updates)]
    for grads in given_:
        update(optimizer, predictor, grads)
    weights = 0.8 ** np.arange(updates)[::-1]
    mean = {name: np.average([grads[name] for grads in given_], axis=0, weights=weights) for name in params}
    check(predictor.predict(params, 3), {name: w - 3 * 0.2 * mean[name] for name, w in params.items()}, 1e-12)


@pytest.mark.parametrize("kind", ["momentum", "optimizer_rule"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_rate_is_that_of_the_prediction(kind, momentum):
    rng = np.random.default_rng(3)
    params, grads = arrays(rng), arrays(rng)
    optimizer = optim.SGD([{"params": {"a.bias": params["a.bias"]}, "lr": 0.5}, {"params": {"prime": params["prime"]}}],
                          lr=0.1, momentum=momentum)  # fmt: skip
    predictor = optim.make_predictor(kind, optimizer)
    grads = {name: grads[name] for name in optimizer.params}
    update(optimizer, predictor, grads)
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        expected = {"a.bias": params["a.bias"] - 2 * rate * grads["a.bias"],
                    "prime": params["prime"] - 2 * 0.1 * grads["prime"]}  # fmt: skip
        check(predictor.predict(["a.bias", "prime"], 2), expected, 1e-12)


@pytest.mark.parametrize("kind", optim.PREDICTORS)
@pytest.mark.parametrize("options", [{}, {"momentum": 0.9, "nesterov": True}])
def test_the_state_goes_on_where_it_was(kind, options):
    """A run that is saved and loaded half-way predicts what it would have predicted."""
    rng = np.random.default_rng(5)
    params = arrays(rng)
    optimizer = optim.SGD(params, lr=0.1, **options)
    predictor = optim.make_predictor(kind, optimizer)
    for _ in range(3):
        update(optimizer, predictor, arrays(rng))
    twins = copies(params)
    other = optim.SGD(twins, lr=0.1, **options)
    restored = optim.make_predictor(kind, other)
    other.load_state_dict(optimizer.state_dict())
    state = predictor.state_dict()
    restored.load_state_dict(state)
    for array in state.values():
        if isinstance(array, np.ndarray):
            array[...] = np.nan  # the caller's own
    for _ in range(2):
        check(restored.predict(twins, 3), predictor.predict(params, 3), 0)
        grads = arrays(rng)
        update(optimizer, predictor, grads)
        update(other, restored, grads)
    with pytest.raises(FileFormatError, match="does not fit"):
        restored.load_state_dict({"Other.version": 1})
    with pytest.raises(FileFormatError, match="does not fit"):
        restored.load_state_dict(restored.state_dict() | {"kept.a.bias": np.zeros(4), "count.a.bias": 1})


@pytest.mark.parametrize("kind", optim.PREDICTORS)
def test_nothing_of_the_callers_is_kept(kind):
    rng = np.random.default_rng(7)
    params, grads = arrays(rng), arrays(rng)
    optimizer = optim.SGD(params, lr=0.1)
    predictor = optim.make_predictor(kind, optimizer)
    update(optimizer, predictor, grads)
    expected = predictor.predict(params, 2)
    for grad in grads.values():
        grad[...] = np.nan
    out = {name: np.full_like(param, np.nan) for name, param in params.items()}
    found = predictor.predict(["prime", "scalar"], 2, out)
    assert found["prime"] is out["prime"] and found["scalar"] is out["scalar"]
    check(found, {name: expected[name] for name in found}, 0)
    assert np.isnan(out["a.weight"]).all()


@pytest.mark.parametrize("kind", optim.PREDICTORS)
def test_bad_input_is_refused(kind):
    params = {"w": np.zeros(3)}
    predictor = optim.make_predictor(kind, optim.SGD(params))
    for s in (-1, np.nan, np.inf, "1"):
        with pytest.raises(OptionError, match="s"):
            predictor.predict(["w"], s)
    with pytest.raises(OptionError, match="not the optimizer's"):
        predictor.predict(["v"], 1)
    with pytest.raises(OptionError, match="no gradient of w"):
        predictor.observe(["w"], {})
    with pytest.raises(OptionError, match="optimizer"):
        optim.make_predictor(kind, params)
    with pytest.raises(OptionError, match="Unknown predictor"):
        optim.make_predictor("magic", predictor.optimizer)


def test_spectrain_is_for_gradient_descent():
    params = {"w": np.zeros(3)}
    with pytest.raises(OptionError, match="optimizer_rule"):
        optim.MomentumPredictor(optim.Adam(params))
    with pytest.raises(OptionError, match="gamma"):
        optim.MomentumPredictor(optim.SGD(params), gamma=1.0)


def test_predicted_weights_of_an_snn_are_nearer_than_stale_ones():
    """Chen et al., 2018, Fig. 9: s = 1, 2, 3, the mean over the iterations of the RMSE over all weights."""
    pytest.importorskip("sklearn")
    train, _ = load_digit_images(size=8)
    rng = np.random.default_rng(0)
    layers = [part for i in range(8) for part in (nn.Linear(64 if i == 0 else 32, 32, rng=rng), nn.SELU())]
    model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10, rng=rng))
    nn.init.lecun_linear(model, rng)
    loss, params = nn.CrossEntropyLoss(), model.parameters()
    optimizer = optim.SGD(params, lr=1e-3, momentum=0.9)
    predictor = optim.MomentumPredictor(optimizer)
    history = [copies(params)]
    expected = {s: [] for s in (1, 2, 3)}
    for _ in range(60):
        for s, found in expected.items():
            found.append(predictor.predict(params, s))
        x, target = train.batch(rng.choice(len(train), 128, replace=False))
        y, saved = model.forward(x)
        _, kept = loss.forward(y, target)
        update(optimizer, predictor, model.weight_grad(loss.input_grad(kept), saved))
        history.append(copies(params))
    errors = {}
    for s, found in expected.items():
        pairs = [(rmse(found[t], history[t + s]), rmse(history[t], history[t + s])) for t in range(5, 60 - s)]
        errors[s] = np.mean(pairs, axis=0)
        assert errors[s][0] < 0.6 * errors[s][1], f"s = {s}: {errors[s]}"
    assert errors[1][1] < errors[2][1] < errors[3][1], "stale weights are farther the staler they are"


def rmse(one, other):
    squares = [np.square(one[name] - other[name]) for name in one]
    return np.sqrt(sum(part.sum() for part in squares) / sum(part.size for part in squares))
