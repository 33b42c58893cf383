"""Number of launches per layer on a device; none of them transfers or reads anything."""

from __future__ import annotations

import numpy as np
import pytest

import strict_cupy
from backends import make_backend
from sparsebp import nn

pytestmark = pytest.mark.gpu

IMAGES, SEQUENCES = (4, 3, 8, 8), (5, 3, 20)
BUDGETS = {
    "Linear": (lambda: nn.Linear(20, 10), (16, 20), (2, 1, 2)),
    "ReLU": (nn.ReLU, (16, 20), (1, 1, 0)),
    "Tanh": (nn.Tanh, (16, 20), (1, 3, 0)),
    "Conv2d": (lambda: nn.Conv2d(3, 8, 3, padding=1), IMAGES, (4, 3, 5)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), IMAGES, (5, 4, 2)),
    "MaxPool2d": (lambda: nn.MaxPool2d(2), IMAGES, (1, 1, 0)),
    "AvgPool2d": (lambda: nn.AvgPool2d(2), IMAGES, (8, 10, 0)),
    "Dropout": (lambda: nn.Dropout(0.5), (16, 20), (5, 1, 0)),
    "LayerNorm": (lambda: nn.LayerNorm(20), (16, 20), (10, 8, 3)),
    "GELU": (nn.GELU, (16, 20), (1, 1, 0)),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(20, 4), SEQUENCES, (14, 16, 19)),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(20, 4, 40, 0.0), SEQUENCES, (41, 37, 49)),
    "PositionalEmbedding": (lambda: nn.PositionalEmbedding(5, 20), SEQUENCES, (1, 0, 3)),
    "MeanOverSteps": (nn.MeanOverSteps, SEQUENCES, (1, 2, 0)),
    "Residual": (lambda: nn.Residual(nn.Linear(20, 20)), (16, 20), (3, 2, 2)),
}
"""Of each layer, the shape of its input and the launches at most: forward, gradient of the input, of the weights."""


@pytest.mark.parametrize("name", BUDGETS)
def test_launches_of_a_layer(name):
    make, shape, budget = BUDGETS[name]
    cupy = make_backend("gpu").xp
    if not strict_cupy.installed():
        pytest.skip("only the stand-in counts")
    layer = make().to("cuda")
    x = cupy.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    y, saved = layer.forward(x)  # what is kept is sent, what is compiled is compiled
    gy = cupy.ones(y.shape, y.dtype)
    layer.input_grad(gy, saved), layer.weight_grad(gy, saved)
    parts = [lambda: layer.forward(x), lambda: layer.input_grad(gy, saved), lambda: layer.weight_grad(gy, saved)]
    for part, most in zip(parts, budget, strict=True):
        with strict_cupy.counted() as counts:
            part()
        assert counts.launches <= most, str(counts)
        assert counts.h2d == counts.host_reads == 0, str(counts)
