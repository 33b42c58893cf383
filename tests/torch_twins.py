"""A layer next to its twin in torch.nn: one comparison of everything a layer offers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


def loaded(twin: Any, layer: Any) -> Any:
    """Return torch's module with the dtype and the weights of ours, which have the same names and shapes."""
    twin = twin.to(torch.float32 if layer.dtype == np.float32 else torch.float64)
    state = {name: torch.from_numpy(np.asarray(array)) for name, array in layer.state_dict().items()}
    twin.load_state_dict({name: value for name, value in state.items() if not name.endswith("_mask")})
    return twin


def recurrent_twin(layer: Any) -> Any:
    """Return torch's RNN, GRU or LSTM with the options, the dtype and the weights of ours."""
    options = {name: getattr(layer, name) for name in ("num_layers", "batch_first", "bidirectional")}
    options |= {name: getattr(layer, name) for name in ("proj_size", "nonlinearity") if hasattr(layer, name)}
    options["bias"] = "bias_ih_l0" in layer.params
    twin = getattr(torch.nn, type(layer).__name__)(layer.input_size, layer.hidden_size, **options)
    assert list(twin.state_dict()) == list(layer.state_dict())
    return loaded(twin, layer)


def jacobian_t(function: Callable[[torch.Tensor], torch.Tensor], sample: np.ndarray) -> np.ndarray:
    """Return the transposed Jacobian of one sample's function, as a matrix, by autograd."""
    x = torch.from_numpy(np.ascontiguousarray(sample))
    jacobian = torch.autograd.functional.jacobian(function, x).numpy()
    return jacobian.reshape(-1, sample.size).T


def assert_gradients(
    layer: Any, function: Any, x: np.ndarray, rng: np.random.Generator, close: dict[str, float],
    parameters: Mapping[str, torch.Tensor] | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Compare forward, W alone, I, then W and state, and the dtypes; nothing given is written to. Return `saved`.

    `function` is the twin, or a function of x with `parameters`; `options` go to the layer's forward.
    """
    if parameters is None:
        parameters = dict(function.named_parameters())
    for param in parameters.values():
        param.grad = None
    tx = torch.from_numpy(x).requires_grad_(x.dtype.kind == "f")
    want = function(tx)
    gy = rng.standard_normal(want.shape).astype(want.detach().numpy().dtype)
    want.backward(torch.from_numpy(gy.copy()))
    # Strided and transposed memory gives what contiguous memory gives.
    x = x[...] if not x.ndim or rng.random() < 0.5 else np.repeat(x, 2, axis=-1)[..., ::2]
    gy = gy[...] if rng.random() < 0.5 else np.asfortranarray(gy)
    x.flags.writeable = gy.flags.writeable = False
    y, saved = layer.forward(x, **options)
    assert y.dtype == gy.dtype
    np.testing.assert_allclose(y, want.detach().numpy(), **close)
    grads, g = layer.weight_grad(gy, saved), layer.gradients(gy, saved)
    assert list(grads) == list(layer.parameters()) == list(parameters)
    for gx in (g.input_grad(), layer.input_grad(gy, saved)) if tx.requires_grad else ():
        assert gx.dtype == gy.dtype
        np.testing.assert_allclose(gx, tx.grad.numpy(), **close)
    for name, again in g.weight_grad().items():
        np.testing.assert_array_equal(again, grads[name], err_msg=name)
        np.testing.assert_allclose(grads[name], parameters[name].grad.numpy(), err_msg=name, **close)
        assert again.dtype == gy.dtype
    if isinstance(function, torch.nn.Module):
        for name, value in function.state_dict().items():  # running statistics
            np.testing.assert_allclose(layer.state_dict()[name], value.numpy(), err_msg=name, **close)
    return saved


def assert_like_torch(layer: Any, function: Any, x: np.ndarray, *more: Any) -> Any:
    """As `assert_gradients`, and every sample's Jacobian; return it, or None where samples are coupled."""
    saved = assert_gradients(layer, function, x, *more)
    if layer.couples_samples(saved):
        return None
    jacobian = layer.jacobian_t(saved)
    for b in range(len(x)):
        expected = jacobian_t(lambda s: function(s.unsqueeze(0))[0], x[b])
        np.testing.assert_allclose(jacobian.to_dense(b), expected, **more[1])
    return jacobian


def slope_at(function: Callable[[], Any], array: np.ndarray, at: tuple[int, ...]) -> float:
    """Return the derivative of a number, which `function` computes, by one element of an array: central differences."""
    kept, ends = array[at], []
    for sign in (1, -1):
        array[at] = kept + sign * 1e-6
        ends.append(float(function()))
    array[at] = kept
    return (ends[0] - ends[1]) / 2e-6
