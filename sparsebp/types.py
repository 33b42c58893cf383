"""Literals, aliases and protocols that more than one room uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy or CuPy array. Which of the two is asked for in `sparsebp.backend` alone."""

PatternKind: TypeAlias = Literal["identity", "diagonal", "selection", "dense", "general"]
ScanAlgorithm: TypeAlias = Literal["auto", "linear", "blelloch", "hybrid", "chunked"]
SCAN_ALGORITHMS: tuple[ScanAlgorithm, ...] = ("auto", "linear", "blelloch", "hybrid", "chunked")
ChainBackward: TypeAlias = Literal["bp", "auto", "linear", "blelloch", "hybrid", "chunked"]
"""How a chain of layers runs backward: layer by layer, or by a scan."""
Nonlinearity: TypeAlias = Literal["tanh", "relu"]
SlopeFunction: TypeAlias = Literal["given", "relu", "tanh", "sigmoid"]
SLOPES: tuple[SlopeFunction, ...] = ("given", "relu", "tanh", "sigmoid")
"""What a slope is made of: itself, or y = f(x) of these f."""
UpdateRule: TypeAlias = Literal["sgd", "adam", "adagrad", "adadelta", "rmsprop"]
"""What an optimizer's kernel does with a gradient."""
Factors: TypeAlias = tuple[Array, Array]
"""Two matrices that stand for their product."""
Seed: TypeAlias = int | np.random.Generator | None
"""What ``rng=`` takes: a `numpy.random.Generator`, a seed, or None for fresh entropy."""


class Differentiable(Protocol):
    """What the action graph needs of a layer: F, I, W, and the Jacobian that lets a scan take the place of I."""

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return ``(y, saved)``: action F."""
        ...

    def input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at x: action I."""
        ...

    def weight_grad(self, gy: Array, saved: Any) -> Mapping[str, Array]:
        """Return the gradients of the parameters: action W."""
        ...

    def jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of y with respect to x."""
        ...
