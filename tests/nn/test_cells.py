"""RNNCell and GRUCell against torch.nn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsebp as sb
from sparsebp import nn
from sparsebp.core.errors import OptionError, ShapeError
from strategies import seeds, sizes

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def pair(kind: str, features: int, hidden: int, bias: bool, rng):
    if kind == "gru":
        ours = nn.GRUCell(features, hidden, bias, dtype=np.float64, rng=rng)
        twin = torch.nn.GRUCell(features, hidden, bias, dtype=torch.float64)
    else:
        ours = nn.RNNCell(features, hidden, bias, kind, dtype=np.float64, rng=rng)
        twin = torch.nn.RNNCell(features, hidden, bias, kind, dtype=torch.float64)
    assert list(ours.state_dict()) == list(twin.state_dict())
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in ours.state_dict().items()})
    return ours, twin


@given(
    kind=st.sampled_from(["tanh", "relu", "gru"]), features=sizes(1, 5), hidden=sizes(1, 7), batch=sizes(1, 5),
    bias=st.booleans(), with_h=st.booleans(), seed=seeds,
)  # fmt: skip
def test_against_torch(torch_jacobian_t, kind, features, hidden, batch, bias, with_h, seed):
    rng = np.random.default_rng(seed)
    ours, twin = pair(kind, features, hidden, bias, rng)
    x, gy = rng.standard_normal((batch, features)), rng.standard_normal((batch, hidden))
    h = rng.standard_normal((batch, hidden)) if with_h else None
    tx = torch.from_numpy(x).requires_grad_()
    th = torch.from_numpy(h if with_h else np.zeros((batch, hidden))).requires_grad_()
    want = twin(tx, th)
    want.backward(torch.from_numpy(gy))
    y, saved = ours.forward(x, h)
    np.testing.assert_allclose(y, want.detach().numpy(), **CLOSE)
    np.testing.assert_allclose(ours.input_grad(gy, saved), tx.grad.numpy(), **CLOSE)
    np.testing.assert_allclose(ours.gradients(gy, saved).hidden, th.grad.numpy(), **CLOSE)
    grads = ours.weight_grad(gy, saved)
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(grads[name], param.grad.numpy(), err_msg=name, **CLOSE)
    jacobian = ours.hidden_jacobian_t(saved)
    for b in range(batch):
        expected = torch_jacobian_t(lambda s, b=b: twin(tx[b].detach(), s), th[b].detach().numpy())
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **CLOSE)


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell])
def test_bad_input_is_refused(cell):
    layer = cell(2, 3, rng=0)
    with pytest.raises(ShapeError, match="batch is empty"):
        layer.forward(np.ones((0, 2), np.float32))
    with pytest.raises(ShapeError, match="x has the wrong shape"):
        layer.forward(np.ones((1, 3), np.float32))
    with pytest.raises(ShapeError, match="h has the wrong shape"):
        layer.forward(np.ones((1, 2), np.float32), np.ones((2, 3), np.float32))
    with pytest.raises(OptionError, match="hidden_size is too small"):
        cell(2, 0)


@pytest.mark.parametrize("kind", ["tanh", "relu", "gru"])
@pytest.mark.parametrize("features", [2, 3])
def test_the_jacobian_of_a_cell_is_that_of_its_input(kind, features):
    """As large as the hidden one where the sizes are equal, and not to be taken for it."""
    rng = np.random.default_rng(0)
    cell, _ = pair(kind, features, 3, True, rng)
    x, gy = rng.standard_normal((4, features)), rng.standard_normal((4, 3))
    _, back = cell.vjp(x)
    np.testing.assert_allclose(sb.jacobian_t(cell, x).vjp(gy), back(gy).input, rtol=1e-12, atol=1e-14)
