"""Fused pairs: a convolution, a Linear or a BatchNorm with a clamp behind it, in one pass over memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.nn.activation import Clamped, Hardtanh, ReLU, ReLU6
from sparsebp.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Layer
from sparsebp.nn.linear import Linear
from sparsebp.nn.norm import _BATCH_NORMS, BatchNorm

# A layer and a clamping layer after it in one pass over memory instead of two: `BatchNorm` forward and backward,
# convolutions and `Linear`, with a bias and a ReLU, forward. Results and saved values are the same as apart, so a chain
# may mix both. The array between the two, and its gradient, are never written.

_CLAMPS = ReLU, ReLU6, Hardtanh
_CONVOLUTIONS: tuple[type, ...] = Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
_BEHIND: dict[type, tuple[type, ...]] = {Linear: (ReLU,)} | dict.fromkeys((*_BATCH_NORMS, *_CONVOLUTIONS), _CLAMPS)


def together(layer: Any, behind: Any) -> bool:
    """Whether one pass can run both: `behind` cuts off, and `layer` is one of those above."""
    return type(behind) in _BEHIND.get(type(layer), ())


def forward(layer: Any, behind: Any, x: Array) -> tuple[Array, Any] | None:
    """Return the output of both, which `behind` saves, and the saved value of `layer`; None if they run apart."""
    if type(x) is not np.ndarray or "forward_between" not in layer.valid_shortcuts:
        return None
    if "limits" not in behind.valid_shortcuts:
        return None
    found: tuple[Array, Any] | None = layer.forward_between(x, behind.limits())
    return found


def gradients(layer: Layer, behind: Layer, gy: Array, saved: Any, y: Array) -> Gradients | None:
    """Return the `Gradients` of `layer` for `gy` at the output y of `behind`; None if they run apart."""
    if not isinstance(layer, BatchNorm) or not isinstance(behind, Clamped):
        return None
    if type(gy) is not np.ndarray or gy.shape != y.shape or not layer.couples_samples(saved):
        return None
    if "gradients_between" not in layer.valid_shortcuts or "inside" not in behind.valid_shortcuts:
        return None
    return layer.gradients_between(gy, saved, (y, behind.inside(y.dtype)))
