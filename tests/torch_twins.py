"""A layer next to its twin in torch.nn: one comparison of everything a layer offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def jacobian_t(function: Callable[[torch.Tensor], torch.Tensor], sample: np.ndarray) -> np.ndarray:
    """Return the transposed Jacobian of one sample's function, as a matrix, by autograd."""
    x = torch.from_numpy(np.ascontiguousarray(sample))
    jacobian = torch.autograd.functional.jacobian(function, x).numpy()
    return jacobian.reshape(-1, sample.size).T


def assert_like_torch(
    layer: Any, function: Any, x: np.ndarray, rng: np.random.Generator, close: dict[str, float],
    parameters: Mapping[str, torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    """Compare forward, I, W, state and every sample's Jacobian (none where samples are coupled); return the Jacobian.

    `function` is the twin, or a function of x with `parameters`.
    """
    if parameters is None:
        parameters = dict(function.named_parameters())
    for param in parameters.values():
        param.grad = None
    tx = torch.from_numpy(x).requires_grad_()
    want = function(tx)
    gy = rng.standard_normal(want.shape).astype(x.dtype)
    want.backward(torch.from_numpy(gy))
    y, saved = layer.forward(x)
    assert y.dtype == x.dtype
    np.testing.assert_allclose(y, want.detach().numpy(), **close)
    gx = layer.input_grad(gy, saved)
    assert gx.dtype == x.dtype
    np.testing.assert_allclose(gx, tx.grad.numpy(), **close)
    grads = layer.weight_grad(gy, saved)
    assert list(grads) == list(layer.parameters()) == list(parameters)
    for name, param in parameters.items():
        np.testing.assert_allclose(grads[name], param.grad.numpy(), err_msg=name, **close)
    if isinstance(function, torch.nn.Module):
        for name, value in function.state_dict().items():  # running statistics
            np.testing.assert_allclose(layer.state_dict()[name], value.numpy(), err_msg=name, **close)
    if layer.couples_samples(saved):
        return None
    jacobian = layer.jacobian_t(saved)
    for b in range(len(x)):
        expected = jacobian_t(lambda s: function(s.unsqueeze(0))[0], x[b])
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **close)
    return jacobian
