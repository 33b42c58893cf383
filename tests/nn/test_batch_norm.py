"""BatchNorm2d against torch.nn, training and evaluation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from strategies import seeds, sizes

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@given(batch=sizes(2, 4), c=sizes(1, 3), h=sizes(1, 3), w=sizes(1, 3), momentum=st.sampled_from([0.1, 0.7, None]),
       affine=st.booleans(), track=st.booleans(), seed=seeds)  # fmt: skip
def test_batch_norm(torch_jacobian_t, batch, c, h, w, momentum, affine, track, seed):
    rng = np.random.default_rng(seed)
    layer = nn.BatchNorm2d(c, 1e-3, momentum, affine, track, dtype=np.float64)
    twin = torch.nn.BatchNorm2d(c, 1e-3, momentum, affine, track, dtype=torch.float64)
    state = {n: np.abs(rng.standard_normal(a.shape)) if a.ndim else a for n, a in layer.state_dict().items()}
    twin.load_state_dict({n: torch.from_numpy(a) for n, a in state.items()})
    layer.load_state_dict(twin.state_dict())
    for training in (True, True, False):
        layer.train(training), twin.train(training)
        x = rng.standard_normal((batch, c, h, w))
        tx = torch.from_numpy(x).requires_grad_()
        want = twin(tx)
        gy = rng.standard_normal(x.shape)
        twin.zero_grad()
        want.backward(torch.from_numpy(gy))
        y, saved = layer.forward(x)
        np.testing.assert_allclose(y, want.detach().numpy(), **CLOSE)
        np.testing.assert_allclose(layer.input_grad(gy, saved), tx.grad.numpy(), **CLOSE)
        grads = layer.weight_grad(gy, saved)
        assert list(grads) == list(layer.parameters()) == [n for n, _ in twin.named_parameters()]
        for name, param in twin.named_parameters():
            np.testing.assert_allclose(grads[name], param.grad.numpy(), **CLOSE)
        assert list(layer.state_dict()) == list(twin.state_dict())
        for name, value in twin.state_dict().items():
            np.testing.assert_allclose(layer.state_dict()[name], value.numpy(), **CLOSE)
        if training or not track:
            with pytest.raises(OptionError, match="couple the samples"):
                layer.jacobian_t(saved)
        else:
            expected = torch_jacobian_t(lambda s: twin(s.unsqueeze(0))[0], x[1])
            np.testing.assert_allclose(layer.jacobian_t(saved).to_dense(1), expected, **CLOSE)


def test_buffers_keep_their_kind_and_one_value_is_refused():
    layer = nn.BatchNorm2d(2)
    with pytest.raises(ShapeError, match="too few values"):
        layer.forward(np.ones((1, 2, 1, 1), np.float32))
    layer.to(dtype=np.float64)
    assert layer.buffers["running_var"].dtype == np.float64
    assert layer.buffers["num_batches_tracked"].dtype == np.int64


@pytest.mark.parametrize("options", [{"num_features": 0}, {"num_features": 2, "momentum": 1.5}])
def test_bad_options_are_refused(options):
    with pytest.raises(OptionError, match=r"num_features|momentum"):
        nn.BatchNorm2d(**options)
