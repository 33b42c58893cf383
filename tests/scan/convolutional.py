"""Chains of a convolutional network's transposed Jacobians, pruned, as patterns alone: VGG-11 and LeNet-5 like."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsebp import SparsityPattern
from sparsebp.patterns import conv_pattern, pool_pattern

VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
"""Channels of the eight convolutions, each with a ReLU, and the five max-poolings."""


class Operator(NamedTuple):
    """One operator: name, its transposed Jacobian's pattern, whether the batch shares the values, FLOPs of BP."""

    name: str
    pattern: SparsityPattern
    shared: bool
    flops: int


def vgg_like(
    rng: np.random.Generator,
    layers=VGG11,
    size: int = 32,
    channels: int = 3,
    density: float = 0.03,
    kernel: int = 3,
    divide: int = 1,
) -> list[Operator]:
    """The convolutional part in the order of back-propagation, `density` of each layer's weights kept at random.

    `divide` divides every number of channels.
    """
    operators: list[Operator] = []
    for number, layer in enumerate(layers):
        if layer == "M":
            pattern = pool_pattern(channels, (size, size), 2).pattern
            operators.append(Operator(f"pool{number}", pattern, False, channels * size * size))
            size //= 2
            continue
        out = layer // divide
        weights = rng.random((out, channels, kernel, kernel)) < density
        pattern = conv_pattern(channels, out, (size, size), kernel, padding=kernel // 2, mask=weights).pattern
        dense = 2 * channels * out * kernel * kernel * size * size
        operators.append(Operator(f"conv{number}", pattern, True, dense))
        operators.append(Operator(f"relu{number}", SparsityPattern.diagonal(out * size * size), False, out * size**2))
        channels = out
    return operators[::-1]
