"""LeNet-5."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.arguments import check_generator, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Seed

_PADDING = {28: 2, 32: 0}


def lenet5(
    in_channels: int = 1, classes: int = 10, *, size: int = 28, dtype: Any = np.float32, rng: Seed = None
) -> nn.Sequential:
    """Return LeNet-5 with ReLU and max-pooling: two 5×5 convolutions (6 and 16 channels), three linear layers.

    Parameters
    ----------
    in_channels
        Channels of the images.
    classes
        Number of classes.
    size
        Height and width of the images: 32 as in the paper, or 28, which the first convolution pads by 2.
    dtype
        float32 or float64.
    rng
        Generator or seed of the initial values, torch.nn's default ones.

    Returns
    -------
    Sequential
        Images (B, in_channels, size, size) to logits (B, classes).

    Raises
    ------
    OptionError
        `size` is neither 28 nor 32, or a number is below 1.

    Notes
    -----
    Source: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, Fig. 2; the activations are
    those that BPPSA §3.5 trains with.
    """
    size, classes = check_integer("size", size, 1), check_integer("classes", classes, 1)
    if size not in _PADDING:
        raise OptionError("LeNet-5 does not fit the images", expected="size 28 or 32", got=size,
                          remedy="Scale or pad the images")  # fmt: skip
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 5, padding=_PADDING[size], **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120, **options), nn.ReLU(),
        nn.Linear(120, 84, **options), nn.ReLU(),
        nn.Linear(84, classes, **options),
    )  # fmt: skip
