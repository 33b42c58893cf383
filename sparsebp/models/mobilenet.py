"""MobileNetV2 for images of 32×32."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.types import Seed
from sparsebp.models.width import scaled

# expansion, channels, blocks, stride of the first (Table 2 of the paper; the strides are those for small images)
_STAGES = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
_FIRST, _LAST = 32, 1280


def mobilenetv2(
    in_channels: int = 3,
    classes: int = 10,
    *,
    width: float = 1.0,
    stages: int = len(_STAGES),
    dtype: Any = np.float32,
    rng: Seed = None,
) -> nn.Sequential:
    """Return MobileNetV2 with the strides that are usual for CIFAR-10: it halves 32×32 three times.

    Every block expands the channels by a 1×1 convolution, filters each by a depthwise 3×3 one and projects them by a
    1×1 one, with batch normalisation behind each and ReLU6 behind the first two; blocks that keep the shape are
    residual.

    Parameters
    ----------
    in_channels
        Channels of the images.
    classes
        Number of classes.
    width
        Factor on all numbers of channels; they are rounded to multiples of 8.
    stages
        How many of the seven stages are built, for smaller networks.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values: He's for the convolutions, torch.nn's default for the linear layer.

    Returns
    -------
    Sequential
        Images (B, in_channels, H, W) to logits (B, classes). Call ``eval()`` for a network whose samples do not depend
        on each other, as `jacobian_t` needs it.

    Raises
    ------
    OptionError
        `width` is not positive, `stages` is not in 1 … 7, or a number is below 1.

    Notes
    -----
    Source: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018, Tables 1 and 2.
    """
    stages, classes = check_integer("stages", stages, 1, len(_STAGES)), check_integer("classes", classes, 1)
    in_channels = check_integer("in_channels", in_channels, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    channels = scaled(_FIRST, width, 8)
    layers = _convolution(in_channels, channels, 3, options)
    for expansion, base, blocks, first_stride in _STAGES[:stages]:
        wanted = scaled(base, width, 8)
        for stride in (first_stride, *(1 for _ in range(blocks - 1))):
            block = _block(channels, wanted, expansion, stride, options)
            layers.append(nn.Residual(block) if stride == 1 and channels == wanted else block)
            channels = wanted
    last = scaled(_LAST, max(width, 1.0), 8) if stages == len(_STAGES) else channels * 4
    layers += _convolution(channels, last, 1, options)
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, classes, **options))
    nn.init.he_convolutions(model, options["rng"])
    return model


def _convolution(
    channels: int, wanted: int, kernel: int, options: dict[str, Any], stride: int = 1, groups: int = 1
) -> list[nn.Layer]:
    """Return a convolution without bias, batch normalisation and ReLU6."""
    convolution = nn.Conv2d(channels, wanted, kernel, stride, padding=kernel // 2, groups=groups, bias=False, **options)
    return [convolution, nn.BatchNorm2d(wanted, dtype=options["dtype"]), nn.Hardtanh(0.0, 6.0)]


def _block(channels: int, wanted: int, expansion: int, stride: int, options: dict[str, Any]) -> nn.Sequential:
    """Return an inverted residual block without its shortcut."""
    hidden = channels * expansion
    layers = _convolution(channels, hidden, 1, options) if expansion > 1 else []
    layers += _convolution(hidden, hidden, 3, options, stride, groups=hidden)
    return nn.Sequential(*layers, *_convolution(hidden, wanted, 1, options)[:2])
