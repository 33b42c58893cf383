"""Launches, products and copies of recurrent layers on a GPU, counted by the stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparsebp import nn
from sparsebp.core import backend

pytestmark = pytest.mark.gpu
STEPS, BATCH, HIDDEN = 40, 16, 20


@pytest.fixture
def counted() -> Callable[[], Any]:
    strict_cupy = pytest.importorskip("strict_cupy")
    if not strict_cupy.installed():
        pytest.skip("counts are the stand-in's")
    return strict_cupy.counted


def run(make: Callable[..., Any], features: int) -> tuple[Any, Any]:
    """Return a layer on the GPU, whose kernels are compiled, and an input."""
    layer = make(features, HIDDEN, backward="bp", rng=0).to("cuda")
    values = np.random.default_rng(0).standard_normal((STEPS, BATCH, features)).astype(np.float32)
    x = backend.to_device(values, "cuda")
    y, saved = layer.forward(x)
    g = layer.gradients(y, saved)
    assert g.input.shape == x.shape and g.weights
    return layer, x


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_an_input_of_few_features_is_projected_by_the_kernel(make: Any, counted: Any) -> None:
    layer, x = run(make, 8)
    with counted() as counts:
        layer.forward(x)
    assert dict(counts.launched) == {f"{layer.cell.name}_forward": 1}, str(counts)
    layer, x = run(make, 9)
    with counted() as counts:
        layer.forward(x)
    assert counts.products == 1, str(counts)


@pytest.mark.parametrize("make", [nn.RNN, nn.GRU])
def test_gradients_are_products_of_what_lies_there(make: Any, counted: Any) -> None:
    """Each weight's, the biases' together, and the input's: by cuBLAS, without a copy of a view over all steps."""
    layer, x = run(make, 3)
    y, saved = layer.forward(x)
    with counted() as counts:
        g = layer.gradients(y, saved)
        assert g.input.shape == x.shape and g.weights
    assert counts.products == 4, str(counts)
    assert "cupy.matmul" not in counts.launched
    large = [size for what, _, size in counts.log if what == "allocation" and size >= 4 * STEPS * BATCH * HIDDEN]
    assert large == [4 * STEPS * BATCH * layer.cell.columns * HIDDEN], str(counts)  # the gradients at the gates


@pytest.mark.parametrize("make", [nn.RNNCell, nn.GRUCell])
def test_a_cells_products_are_cublass(make: Any, counted: Any) -> None:
    cell = make(9, HIDDEN, rng=0).to("cuda")
    x = backend.to_device(np.ones((BATCH, 9), np.float32), "cuda")
    with counted() as counts:
        h, saved = cell.forward(x)
        g = cell.gradients(h, saved)
        assert g.input.shape == x.shape and g.hidden.shape == h.shape and g.weights
    assert counts.products == 5, str(counts)
    assert "cupy.matmul" not in counts.launched
