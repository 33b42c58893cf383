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
from torch_twins import assert_like_torch, loaded

CLOSE = {"rtol": 1e-9, "atol": 1e-11}


@given(
    batch=sizes(1, 3), middle=st.lists(sizes(1, 3), max_size=2), shape=st.lists(sizes(1, 4), min_size=1, max_size=2),
    affine=st.booleans(), bias=st.booleans(), seed=seeds,
)  # fmt: skip
def test_layer_norm(batch, middle, shape, affine, bias, seed):
    rng = np.random.default_rng(seed)
    layer = nn.LayerNorm(shape, 1e-3, affine, bias, dtype=np.float64)
    layer.load_state_dict({name: rng.standard_normal(p.shape) for name, p in layer.params.items()})
    twin = loaded(torch.nn.LayerNorm(shape, 1e-3, affine, bias), layer)
    assert_like_torch(layer, twin, rng.standard_normal((batch, *middle, *shape)), rng, CLOSE)


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


def test_residual_refuses_a_body_that_changes_the_shape():
    with pytest.raises(ShapeError, match="changes the shape"):
        nn.Residual(nn.Linear(3, 2, rng=0)).forward(np.ones((2, 3), np.float32))
    layer = nn.Residual(nn.Tanh())
    _, saved = layer.forward(np.ones((2, 3)))
    with pytest.raises(ShapeError, match="gy"):
        layer.input_grad(np.ones((3, 3)), saved)
    pattern = layer.jacobian_t(saved).pattern
    assert pattern.kind == "diagonal"
