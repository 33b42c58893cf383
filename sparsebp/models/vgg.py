"""VGG-11 for images of 32×32."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.types import Seed
from sparsebp.models.width import scaled

# channels of a 3×3 convolution with its ReLU, or P for a 2×2 max-pooling (configuration A of the paper)
_LAYERS = (64, "P", 128, "P", 256, 256, "P", 512, 512, "P", 512, 512, "P")


def vgg11(
    in_channels: int = 3, classes: int = 10, *, width: float = 1.0, dtype: Any = np.float32, rng: Seed = None
) -> nn.Sequential:
    """Return VGG-11 as it is used on CIFAR-10: 8 convolutions, 5 poolings and one linear layer.

    Parameters
    ----------
    in_channels
        Channels of the images.
    classes
        Number of classes.
    width
        Factor on all numbers of channels; they are rounded, to 1 at least.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values: He's for the convolutions, torch.nn's default for the linear layer.

    Returns
    -------
    Sequential
        Images (B, in_channels, 32, 32) to logits (B, classes).

    Raises
    ------
    OptionError
        `width` is not positive, or a number is below 1.

    Notes
    -----
    Source: Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, Table 1,
    column A; with one linear layer, as BPPSA §4.3 counts it: 21 operators in front of it.
    """
    in_channels, classes = check_integer("in_channels", in_channels, 1), check_integer("classes", classes, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    layers: list[nn.Layer] = []
    channels = in_channels
    for entry in _LAYERS:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
        else:
            wanted = scaled(entry, width)
            layers += [nn.Conv2d(channels, wanted, 3, padding=1, **options), nn.ReLU()]
            channels = wanted
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, classes, **options))
    nn.init.he_convolutions(model, options["rng"])
    return model
