"""LayerNorm, Residual, and random chains of the layers, against torch."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import nn
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


def test_the_jacobian_of_a_residual_tanh_is_diagonal():
    layer = nn.Residual(nn.Tanh())
    assert layer.jacobian_t(layer.forward(np.ones((2, 3)))[1]).pattern.kind == "diagonal"
