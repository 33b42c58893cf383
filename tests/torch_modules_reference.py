"""Outputs and gradients of a torch.nn module and of ours, side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating tensors inside: of a packed sequence its data alone."""
    if isinstance(value, PackedSequence):
        return [value.data]
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [tensor for part in value if part is not None for tensor in tensors(part)]


def run(module: Any, *args: Any, **kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the outputs, and the gradients at all inputs and parameters of a loss that tells all outputs apart."""
    fresh = [_fresh(arg) for arg in args]
    outputs = tensors(module(*fresh, **kwargs))
    weights = [torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape) for y in outputs]
    loss = sum((w * torch.sin(y)).sum() for w, y in zip(weights, outputs, strict=True))
    wanted = [t for t in tensors(fresh) if t.requires_grad] + list(module.parameters())
    return outputs, list(torch.autograd.grad(loss, wanted))


def assert_same(theirs: Any, ours: Any, *args: Any, tolerance: float = 1e-11, **kwargs: Any) -> None:
    """Compare outputs and gradients; `kwargs` go to ours alone."""
    for expected, got in zip(run(theirs, *args), run(ours, *args, **kwargs), strict=True):
        assert [t.shape for t in got] == [t.shape for t in expected]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def _fresh(value: Any) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=_fresh(value.data))
    if isinstance(value, torch.Tensor):
        return value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)
    return None if value is None else tuple(_fresh(part) for part in value)
