"""BatchNorm and InstanceNorm against torch.nn, training and evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels, nn, optim
from sparsebp.core.errors import LayoutError, OptionError, ShapeError
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.train.setup import schedule_of
from strategies import seeds, sizes
from torch_twins import assert_gradients, assert_like_torch, loaded

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@given(name=st.sampled_from(["BatchNorm", "InstanceNorm"]), batch=sizes(2, 4), c=sizes(1, 3),
       lengths=st.lists(sizes(1, 3), min_size=1, max_size=3), momentum=st.sampled_from([0.1, 0.7, None]),
       affine=st.booleans(), track=st.booleans(), seed=seeds)  # fmt: skip
def test_statistics_of_batches_and_samples(name, batch, c, lengths, momentum, affine, track, seed):
    rng, by_batch, name = np.random.default_rng(seed), name == "BatchNorm", f"{name}{len(lengths)}d"
    if not by_batch:
        lengths[0] += np.prod(lengths) == 1  # torch refuses one element
    layer = getattr(nn, name)(c, 1e-3, momentum, affine, track, dtype=np.float64)
    twin = getattr(torch.nn, name)(c, 1e-3, momentum, affine, track, dtype=torch.float64)
    state = {n: np.abs(rng.standard_normal(a.shape)) if a.ndim else a for n, a in layer.state_dict().items()}
    twin.load_state_dict({n: torch.from_numpy(a) for n, a in state.items()})
    layer.load_state_dict(twin.state_dict())
    for training in (True, True, False):
        layer.train(training), twin.train(training)
        x = rng.standard_normal((batch, c, *lengths))
        found = assert_like_torch(layer, twin, x, rng, CLOSE)
        assert list(layer.state_dict()) == list(twin.state_dict())
        assert (found is None) == (by_batch and (training or not track))
        if not by_batch:
            assert (found.pattern.kind == "diagonal") == (not training and track) or np.prod(lengths) == 1
            layer.load_state_dict(twin.state_dict())
            saved = assert_gradients(layer, twin, x[0], rng, CLOSE)  # unbatched
            assert layer.unbatched(saved)
        if found is None:
            with pytest.raises(OptionError, match="couple the samples"):
                layer.jacobian_t(layer.forward(x)[1])
            layer.load_state_dict(twin.state_dict())  # not the statistics of the additional forward


def test_buffers_keep_their_kind_and_one_value_is_refused():
    layer = nn.BatchNorm2d(2)
    with pytest.raises(ShapeError, match="too few values"):
        layer.forward(np.ones((1, 2, 1, 1), np.float32))
    layer.to(dtype=np.float64)
    assert layer.buffers["running_var"].dtype == np.float64
    assert layer.buffers["num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize("behind", [nn.ReLU(), nn.ReLU6(), nn.Hardtanh(-0.5, 0.25)])
@pytest.mark.parametrize("training", [True, False])
def test_a_layer_behind_that_cuts_off_is_computed_in_the_same_pass(behind, training):
    """In a chain every number is bit for bit that of the two layers by themselves, and what is saved as well."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 2, 9, 11), dtype=np.float32)
    around = (nn.Conv2d(2, 5, 3, rng=0),), (nn.Conv2d(5, 3, 1, rng=1),)
    five, bare = np.tile(x, (1, 3, 1, 1))[:, :5], ((), ())
    for kind, batch, (first, last) in ((nn.BatchNorm2d, x, around), (nn.BatchNorm2d, five, bare),
                                       (nn.BatchNorm1d, five[..., 0], bare), (nn.BatchNorm1d, five[..., 0, 0], bare),
                                       (nn.BatchNorm3d, five[..., None], bare)):  # fmt: skip
        found, shapes = [], []
        for norm in (kind, type("Apart", (kind,), {})):
            chain = nn.Sequential(*first, norm(5), behind, *last).train(training)
            y, saved = chain.forward(batch)
            gradients = chain.gradients(np.cos(y), saved)
            grads, state = gradients.weight_grad(), chain.state_dict()
            found.append({"y": y, "x": gradients.input_grad()} | state | {f"at {name}": g for name, g in grads.items()})
            shapes.append(saved.shapes)
        assert shapes[0] == shapes[1] and found[0].keys() == found[1].keys()
        for name, value in found[1].items():
            np.testing.assert_array_equal(found[0][name], value, err_msg=name)


@pytest.mark.parametrize("weights_first", [True, False])
def test_sums_are_taken_once_whichever_comes_first(monkeypatch, weights_first):
    rng, layer = np.random.default_rng(0), nn.BatchNorm2d(3)
    x, gy = rng.standard_normal((2, 2, 3, 4, 5), dtype=np.float32)
    _, saved = layer.forward(x)
    want = layer.input_grad(gy, saved), layer.weight_grad(gy, saved)
    gradients, run, known = layer.gradients(gy, saved), kernels.get(np).unchecked, []
    products, back = run.channel_products, run.channel_back
    monkeypatch.setattr(run, "channel_products", lambda *a: (known.append("products"), products(*a)))
    monkeypatch.setattr(run, "channel_back", lambda *a: (known.append(a[8]), back(*a)))
    if weights_first:
        weights, at_input = gradients.weight_grad(), gradients.input_grad()
    else:
        at_input, weights = gradients.input_grad(), gradients.weight_grad()
    assert known == [False]  # one pass, whichever comes first
    np.testing.assert_array_equal(at_input, want[0])
    for name, grad in weights.items():
        np.testing.assert_array_equal(grad, want[1][name])


@pytest.mark.parametrize("weights_first", [True, False])
@pytest.mark.parametrize("layers", [
    (nn.BatchNorm2d(3),), (nn.BatchNorm1d(3),), (nn.BatchNorm2d(3), nn.ReLU()), (nn.InstanceNorm2d(3, affine=True),),
])  # fmt: skip
def test_gradients_may_be_written_to_before_the_others_are_asked_for(layers, weights_first):
    layer = layers[0] if len(layers) == 1 else nn.Sequential(*layers)
    shape = (4, 3, 5) if isinstance(layer, nn.BatchNorm1d) else (2, 3, 4, 5)
    x, gy = np.random.default_rng(0).standard_normal((2, *shape), dtype=np.float32)
    _, saved = layer.forward(x)
    want = layer.gradients(gy, saved)
    at_input, weights = want.input_grad(), want.weight_grad()
    got = layer.gradients(gy, saved)
    for _ in range(2):
        if weights_first:
            for name, grad in got.weight_grad().items():
                np.testing.assert_array_equal(grad, weights[name])
                grad[...] = np.nan
        found = got.input_grad()
        np.testing.assert_array_equal(found, at_input)
        found[...] = np.nan
        if not weights_first:
            for name, grad in got.weight_grad().items():
                np.testing.assert_array_equal(grad, weights[name])
                grad[...] = np.nan


@pytest.mark.filterwarnings("error")
def test_limits_beyond_the_dtype():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Hardtanh(-1, 1e39))
    x = np.random.default_rng(0).standard_normal((2, 2, 3, 3), dtype=np.float32)
    y, saved = model.forward(x)
    np.testing.assert_array_equal(y, np.maximum(model[0].forward(x)[0], -1))
    assert np.isfinite(model.gradients(np.ones_like(y), saved).input_grad()).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_not_finite_passes_a_relu_behind_as_in_torch(value, dtype):
    """In one pass or apart: a channel becomes NaN, and the gradient of its bias is what comes, not 0."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 5, 5)).astype(dtype)
    x[1, 2, 3, 4] = value
    twin = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.ReLU())
    for norm in (nn.BatchNorm2d, type("Apart", (nn.BatchNorm2d,), {})):
        model = nn.Sequential(norm(3, dtype=dtype), nn.ReLU())
        with np.errstate(invalid="ignore"):
            assert_gradients(model, loaded(twin, model), x, rng, {"rtol": 1e-4, "atol": 1e-5})


def test_a_chain_of_stages_computes_what_the_layers_compute_by_themselves():
    """An executor runs both stages in one pass, forward and backward: the same parameters, bit for bit, as without."""
    rng = np.random.default_rng(0)
    batch = rng.standard_normal((4, 2, 6, 6), dtype=np.float32), rng.integers(0, 3, 4)

    def trained(fused):
        norm = nn.BatchNorm2d(5) if fused else type("Norm", (nn.BatchNorm2d,), {})(5)
        layers = nn.Conv2d(2, 5, 3, rng=0), norm, nn.ReLU6(), nn.Flatten(), nn.Linear(80, 3, rng=1)
        model = nn.Sequential(*layers)
        optimizer = optim.SGD(model.parameters(), 0.1)
        executor = PlainExecutor(
            model, nn.CrossEntropyLoss(), optimizer, schedule_of(Stages(model), "none", 1, "conventional")
        )
        for _ in range(3):
            executor.step([batch])
        return model.state_dict()

    want = trained(False)
    for name, value in trained(True).items():
        np.testing.assert_array_equal(value, want[name])


@pytest.mark.parametrize("make", [nn.BatchNorm2d, lambda c: nn.InstanceNorm2d(c, track_running_stats=True)])
def test_running_statistics_that_are_read_only_are_not_written_to(make):
    layer = make(3)
    layer.buffers["running_mean"].flags.writeable = False
    with pytest.raises(LayoutError, match="running_mean is read-only"):
        layer.forward(np.ones((2, 3, 4, 4), np.float32))
    np.testing.assert_array_equal(layer.buffers["running_mean"], np.zeros(3))
