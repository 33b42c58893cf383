"""LayerNorm, Residual, and random chains of the layers, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from strategies import seeds, sizes

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


class TorchResidual(torch.nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


def check(layer, twin, x, rng, torch_jacobian_t):
    """Move random weights into `layer` and back, then compare F, I, W and every sample's Jacobian."""
    state = {name: rng.standard_normal(p.shape) for name, p in twin.state_dict().items()}
    layer.load_state_dict(state)
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in layer.state_dict().items()})
    tx = torch.from_numpy(x).requires_grad_()
    want = twin(tx)
    gy = rng.standard_normal(want.shape)
    want.backward(torch.from_numpy(gy))
    y, saved = layer.forward(x)
    np.testing.assert_allclose(y, want.detach().numpy(), **CLOSE)
    np.testing.assert_allclose(layer.input_grad(gy, saved), tx.grad.numpy(), **CLOSE)
    grads = layer.weight_grad(gy, saved)
    assert list(grads) == list(layer.parameters()) == [name for name, _ in twin.named_parameters()]
    for name, param in twin.named_parameters():
        np.testing.assert_allclose(grads[name], param.grad.numpy(), err_msg=name, **CLOSE)
    jacobian = layer.jacobian_t(saved)
    for b in range(x.shape[0]):
        expected = torch_jacobian_t(lambda s: twin(s.unsqueeze(0))[0], x[b])
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **CLOSE)


@given(
    batch=sizes(1, 3), middle=st.lists(sizes(1, 3), max_size=2), shape=st.lists(sizes(1, 4), min_size=1, max_size=2),
    affine=st.booleans(), bias=st.booleans(), seed=seeds,
)  # fmt: skip
def test_layer_norm(torch_jacobian_t, batch, middle, shape, affine, bias, seed):
    rng = np.random.default_rng(seed)
    layer = nn.LayerNorm(shape, 1e-3, affine, bias, dtype=np.float64)
    twin = torch.nn.LayerNorm(shape, 1e-3, affine, bias, dtype=torch.float64)
    check(layer, twin, rng.standard_normal((batch, *middle, *shape)), rng, torch_jacobian_t)


def test_layer_norm_refuses():
    layer = nn.LayerNorm(3)
    with pytest.raises(OptionError, match="normalized_shape"):
        nn.LayerNorm(())
    with pytest.raises(ShapeError, match="wrong shape"):
        layer.forward(np.ones((2, 4), np.float32))
    with pytest.raises(ShapeError, match="too few axes"):
        nn.LayerNorm((2, 3)).forward(np.ones(3, np.float32))
    with pytest.raises(DTypeError):
        layer.forward(np.ones((2, 3)))
    _, saved = layer.forward(np.ones(3, np.float32))
    with pytest.raises(ShapeError, match="batch"):
        layer.jacobian_t(saved)


MAKERS = {
    "LayerNorm": (lambda n: nn.LayerNorm(n, dtype=np.float64), torch.nn.LayerNorm),
    "RMSNorm": (lambda n: nn.RMSNorm(n, dtype=np.float64), torch.nn.RMSNorm),
    "Linear": (lambda n: nn.Linear(n, n, dtype=np.float64), lambda n: torch.nn.Linear(n, n)),
    "Identity": (lambda n: nn.Identity(), lambda n: torch.nn.Identity()),
} | {
    name: (lambda n, name=name: getattr(nn, name)(), lambda n, name=name: getattr(torch.nn, name)())
    for name in ("LeakyReLU", "ELU", "GELU", "SiLU", "Softplus", "Hardtanh", "Tanh", "Mish")
} | {"Softmax": (lambda n: nn.Softmax(-1), lambda n: torch.nn.Softmax(-1))}  # fmt: skip
leaf = st.sampled_from(sorted(MAKERS))
chains = st.recursive(leaf, lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=6)


def build(spec, n):
    """A name is a layer, a list a Residual around a Sequential."""
    if isinstance(spec, str):
        ours, theirs = MAKERS[spec]
        return ours(n), theirs(n)
    pairs = [build(inner, n) for inner in spec]
    return (
        nn.Residual(nn.Sequential(*(p[0] for p in pairs))), TorchResidual(torch.nn.Sequential(*(p[1] for p in pairs)))
    )  # fmt: skip


@given(specs=st.lists(chains, min_size=1, max_size=3), n=sizes(2, 5), middle=st.lists(sizes(1, 2), max_size=1),
       batch=sizes(1, 3), seed=seeds)  # fmt: skip
def test_random_chains(torch_jacobian_t, specs, n, middle, batch, seed):
    rng = np.random.default_rng(seed)
    pairs = [build(spec, n) for spec in specs]
    layer, twin = nn.Sequential(*(p[0] for p in pairs)), torch.nn.Sequential(*(p[1] for p in pairs)).double()
    check(layer, twin, rng.standard_normal((batch, *middle, n)), rng, torch_jacobian_t)


def test_residual_refuses_a_body_that_changes_the_shape():
    with pytest.raises(ShapeError, match="changes the shape"):
        nn.Residual(nn.Linear(3, 2, rng=0)).forward(np.ones((2, 3), np.float32))
    layer = nn.Residual(nn.Tanh())
    _, saved = layer.forward(np.ones((2, 3)))
    with pytest.raises(ShapeError, match="gy"):
        layer.input_grad(np.ones((3, 3)), saved)
    pattern = layer.jacobian_t(saved).pattern
    assert pattern.kind == "diagonal"
