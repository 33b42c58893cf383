"""Literals and aliases that more than one room uses."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

Array: TypeAlias = Any
"""A NumPy or CuPy array. Which of the two is asked for in `sparsebp.backend` alone."""

PatternKind: TypeAlias = Literal["identity", "diagonal", "selection", "dense", "general"]
ScanAlgorithm: TypeAlias = Literal["auto", "linear", "blelloch", "hybrid", "chunked"]
SCAN_ALGORITHMS: tuple[ScanAlgorithm, ...] = ("auto", "linear", "blelloch", "hybrid", "chunked")
Backward: TypeAlias = Literal["auto", "bp", "linear", "blelloch", "hybrid", "chunked"]
BACKWARDS: tuple[Backward, ...] = ("auto", "bp", "linear", "blelloch", "hybrid", "chunked")
"""How a chain of layers, or of time steps, runs backward: plain back-propagation, or a scan by that algorithm."""
Nonlinearity: TypeAlias = Literal["tanh", "relu"]
SlopeFunction: TypeAlias = Literal["given", "relu", "tanh", "sigmoid"]
SLOPES: tuple[SlopeFunction, ...] = ("given", "relu", "tanh", "sigmoid")
"""What a slope is made of: itself, or y = f(x) of these f."""
UpdateRule: TypeAlias = Literal["sgd", "adam", "nadam", "radam", "adamax", "adagrad", "adadelta", "rmsprop"]
"""What an optimizer's kernel does with a gradient."""
ProductFactors: TypeAlias = tuple[Array, Array]
"""Two matrices that stand for their product."""
Seed: TypeAlias = int | np.random.Generator | None
"""What ``rng=`` takes: a `numpy.random.Generator`, a seed, or None for fresh entropy."""
