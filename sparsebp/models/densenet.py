"""DenseNet for images of 32×32."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Seed
from sparsebp.models.width import scaled

_FIRST = 16  # channels of the first convolution (§4.2 of the paper)


def densenet(
    in_channels: int = 3,
    classes: int = 10,
    *,
    depth: int = 40,
    growth: int = 12,
    blocks: int = 3,
    width: float = 1.0,
    dtype: Any = np.float32,
    rng: Seed = None,
) -> nn.Sequential:
    """Return DenseNet (L = `depth`, k = `growth`) as it is used on CIFAR-10, without bottlenecks and compression.

    In a dense block every layer adds k channels to those it reads: ``Concat(Identity, Sequential(BN, ReLU, Conv))``.
    Between the blocks a 1×1 convolution and an average pooling halve the image.

    Parameters
    ----------
    in_channels
        Channels of the images.
    classes
        Number of classes.
    depth
        Convolutions and the linear layer: every block has ``(depth - 1 - blocks) / blocks`` layers.
    growth
        Channels that every layer adds, k.
    blocks
        Number of dense blocks, of equal length.
    width
        Factor on k and on the channels of the first convolution; they are rounded, to 1 at least.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values: He's for the convolutions, torch.nn's default for the linear layer.

    Returns
    -------
    Sequential
        Images (B, in_channels, H, W) to logits (B, classes). Every layer of a dense block is one stage of it.

    Raises
    ------
    OptionError
        The blocks cannot be of equal length, 1 or more; `width` is not positive; or a number is below 1.

    Notes
    -----
    Source: Huang et al., "Densely Connected Convolutional Networks", 2017, §3 and §4.2. In front of the convolutions
    between the blocks there is a ReLU, as in the authors' code.
    """
    depth, growth, blocks = (
        check_integer(name, value, 1) for name, value in (("depth", depth), ("growth", growth), ("blocks", blocks))
    )
    in_channels, classes = check_integer("in_channels", in_channels, 1), check_integer("classes", classes, 1)
    if depth < 1 + 2 * blocks or (depth - 1 - blocks) % blocks:
        raise OptionError(
            "The layers of this depth cannot be shared out over the blocks",
            expected="depth = blocks · n + blocks + 1, n ≥ 1", got=f"depth={depth}, blocks={blocks}",
            remedy="Pass depth=40 and blocks=3, say",
        )  # fmt: skip
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    channels, added = scaled(_FIRST, width), scaled(growth, width)
    layers: list[nn.Layer] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False, **options)]
    for block in range(blocks):
        if block > 0:
            layers += [*_convolution(channels, channels, 1, options), nn.AvgPool2d(2)]
        for _ in range((depth - 1 - blocks) // blocks):
            branch = nn.Sequential(*_convolution(channels, added, 3, options))
            layers.append(nn.Concat(nn.Identity(), branch))
            channels += added
    layers += [nn.BatchNorm2d(channels, dtype=dtype), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(channels, classes, **options))
    nn.init.he_convolutions(model, options["rng"])
    return model


def _convolution(channels: int, wanted: int, kernel: int, options: dict[str, Any]) -> list[nn.Layer]:
    """Return batch normalisation, ReLU and a convolution without bias."""
    convolution = nn.Conv2d(channels, wanted, kernel, padding=kernel // 2, bias=False, **options)
    return [nn.BatchNorm2d(channels, dtype=options["dtype"]), nn.ReLU(), convolution]
