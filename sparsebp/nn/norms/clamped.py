"""A layer and the one behind it that cuts off, in one pass over memory instead of two.

Batch normalisation of images goes so both ways; a `Linear` adds its bias in the pass of the ReLU behind it.

What the two save is the same as apart, and so is every number: whoever runs a chain may do either, and either way back
fits either forward. The array between them, and the gradient at it, are never written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.shortcuts import belongs
from sparsebp.core.types import Array
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Layer
from sparsebp.nn.layers.activations import Clamped, Hardtanh, ReLU
from sparsebp.nn.layers.linear import Linear
from sparsebp.nn.layers.units import ReLU6
from sparsebp.nn.norms.batch import BatchNorm2d

_BEHIND: dict[type, tuple[type, ...]] = {BatchNorm2d: (ReLU, ReLU6, Hardtanh), Linear: (ReLU,)}


def together(layer: Any, behind: Any) -> bool:
    """Whether `layer` is batch normalisation of images and `behind` cuts off, or `layer` a `Linear` and that a ReLU."""
    return type(behind) in _BEHIND.get(type(layer), ())


def forward(layer: Layer, behind: Layer, x: Array) -> tuple[Array, Any] | None:
    """Return the output of both and what `layer` saves; the output is what `behind` saves. None: they run apart.

    Parameters
    ----------
    layer, behind
        Two of which `together` holds.
    x
        What comes to the first one.

    Raises
    ------
    ShapeError, DTypeError
        As ``layer.forward(x)``.
    """
    if not isinstance(layer, BatchNorm2d | Linear) or not isinstance(behind, Clamped) or type(x) is not np.ndarray:
        return None
    if not (belongs(layer, "forward_between") and belongs(behind, "limits")):
        return None
    return layer.forward_between(x, behind.limits())


def gradients(layer: Layer, behind: Layer, gy: Array, saved: Any, y: Array) -> Gradients | None:
    """Return the `Gradients` of `layer` for `gy` at the output of `behind`. None: they run apart.

    Parameters
    ----------
    layer, behind
        Two of which `together` holds.
    gy
        The gradient at the output of `behind`.
    saved, y
        What either has saved.
    """
    if not isinstance(layer, BatchNorm2d) or not isinstance(behind, Clamped):
        return None
    if type(gy) is not np.ndarray or gy.shape != y.shape or not layer.couples_samples(saved):
        return None
    if not (belongs(layer, "gradients_between") and belongs(behind, "inside")):
        return None
    return layer.gradients_between(gy, saved, (y, behind.inside(y.dtype)))
