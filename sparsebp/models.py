"""Networks of the papers: LeNet-5, VGG-11, ResNet, MobileNetV2, DenseNet; and a small Transformer.

Each function returns a `Sequential` that maps images (B, in_channels, H, W), or sequences, to logits (B, `classes`), of
`dtype` float32 or float64, with initial values from the generator or seed `rng`. A number out of range raises
`OptionError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core.check import Seed, check_flag, check_generator, check_integer, check_positive
from sparsebp.core.errors import OptionError

__all__ = ["densenet", "lenet5", "mobilenetv2", "resnet", "transformer_classifier", "vgg11"]


_LENET_PADDING = {28: 2, 32: 0}
# channels of a 3×3 convolution with its ReLU, or P for a 2×2 max-pooling (configuration A of the paper)
_VGG_LAYERS = (64, "P", 128, "P", 256, 256, "P", 512, 512, "P", 512, 512, "P")
# expansion, channels, blocks, stride of the first (Table 2 of the paper; the strides are those for small images)
_MOBILENET_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
_RESNET_CHANNELS = (16, 32, 64)  # of the three stages (§4.2 of the paper)
_MOBILENET_FIRST, _MOBILENET_LAST = 32, 1280
_DENSENET_FIRST = 16  # channels of the first convolution (§4.2 of the paper)


def lenet5(
    in_channels: int = 1, classes: int = 10, *, size: int = 28, dtype: Any = np.float32, rng: Seed = None
) -> nn.Sequential:
    """Return LeNet-5 with ReLU and max-pooling: two 5×5 convolutions (6 and 16 channels), three linear layers.

    `size` is the height and width of the images: 32 as in the paper, or 28, which the first convolution pads by 2.
    Initial values are torch.nn's defaults. Other parameters, result and errors: see the module.

    Notes
    -----
    LeCun et al., "Gradient-Based Learning Applied to Document Recognition", 1998, Fig. 2; the activations are those of
    BPPSA §3.5.
    """
    size, classes = check_integer("size", size, 1), check_integer("classes", classes, 1)
    if size not in _LENET_PADDING:
        raise OptionError("LeNet-5 does not fit the images", expected="size 28 or 32", got=size)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    return nn.Sequential(
        nn.Conv2d(in_channels, 6, 5, padding=_LENET_PADDING[size], **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5, **options), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120, **options), nn.ReLU(),
        nn.Linear(120, 84, **options), nn.ReLU(),
        nn.Linear(84, classes, **options),
    )  # fmt: skip


def vgg11(
    in_channels: int = 3, classes: int = 10, *, width: float = 1.0, dtype: Any = np.float32, rng: Seed = None
) -> nn.Sequential:
    """Return VGG-11 for CIFAR-10, images (B, in_channels, 32, 32): 8 convolutions, 5 poolings and one linear layer.

    `width` is a factor on all numbers of channels, which are rounded, to 1 at least. Initial values are He's for the
    convolutions, torch.nn's default for the linear layer. Other parameters, result and errors: see the module.

    Notes
    -----
    Simonyan & Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", 2015, Table 1, column A;
    with one linear layer, as BPPSA §4.3 counts it: 21 operators before it.
    """
    in_channels, classes = check_integer("in_channels", in_channels, 1), check_integer("classes", classes, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    layers: list[nn.Layer] = []
    channels = in_channels
    for entry in _VGG_LAYERS:
        if isinstance(entry, str):
            layers.append(nn.MaxPool2d(2))
        else:
            wanted = _scaled(entry, width)
            layers += [nn.Conv2d(channels, wanted, 3, padding=1, **options), nn.ReLU()]
            channels = wanted
    return _classifier(layers, channels, classes, options)


def resnet(
    in_channels: int = 3, classes: int = 10, *, depth: int = 20, width: float = 1.0, dtype: Any = np.float32,
    rng: Seed = None,
) -> nn.Sequential:  # fmt: skip
    """Return ResNet-20 for CIFAR-10, or a deeper one: a 3×3 convolution, then three stages of residual blocks.

    A block is ``Residual(body, shortcut)`` and a ReLU, its body two 3×3 convolutions with batch normalisation. The
    first block of the second and the third stage halves the image; its shortcut is a 1×1 convolution with batch
    normalisation.

    Parameters
    ----------
    in_channels, classes, dtype, rng
        See the module. Initial values are He's for the convolutions, torch.nn's default for the linear layer.
    depth
        Number of convolutions on the longest way, and the linear layer: 6n + 2 for n blocks per stage, 8 or more.
    width
        Factor on all numbers of channels, which are rounded, to 1 at least.

    Notes
    -----
    He et al., "Deep Residual Learning for Image Recognition", 2016, §4.2, with shortcuts of option B (§4.1).
    """
    depth, classes = check_integer("depth", depth, 8), check_integer("classes", classes, 1)
    in_channels = check_integer("in_channels", in_channels, 1)
    if (depth - 2) % 6:
        raise OptionError("The depth cannot be divided over the blocks", expected="depth = 6n + 2, n ≥ 1", got=depth)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    channels = _scaled(_RESNET_CHANNELS[0], width)
    layers: list[nn.Layer] = [*_conv_norm(in_channels, channels, 3, options), nn.ReLU()]
    for stage, base in enumerate(_RESNET_CHANNELS):
        wanted = _scaled(base, width)
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            first, last = _conv_norm(channels, wanted, 3, options, stride), _conv_norm(wanted, wanted, 3, options)
            shortcut = nn.Sequential(*_conv_norm(channels, wanted, 1, options, stride)) if stride > 1 else None
            layers += [nn.Residual(nn.Sequential(*first, nn.ReLU(), *last), shortcut), nn.ReLU()]
            channels = wanted
    return _classifier([*layers, nn.AdaptiveAvgPool2d(1)], channels, classes, options)


def mobilenetv2(
    in_channels: int = 3, classes: int = 10, *, width: float = 1.0, stages: int = len(_MOBILENET_STAGES),
    dtype: Any = np.float32, rng: Seed = None,
) -> nn.Sequential:  # fmt: skip
    """Return MobileNetV2 with the usual strides for CIFAR-10: it halves 32×32 three times.

    Each block expands the channels by a 1×1 convolution, filters each by a depthwise 3×3 one and projects them by a
    1×1 one, with batch normalisation after each and ReLU6 after the first two. Blocks that keep the shape are residual.
    Call ``eval()`` for a network with independent samples, as `jacobian_t` needs.

    Parameters
    ----------
    in_channels, classes, dtype, rng
        See the module. Initial values are He's for the convolutions, torch.nn's default for the linear layer.
    width
        Factor on all numbers of channels, which are rounded to multiples of 8.
    stages
        Number of stages to build, 1 to 7.

    Notes
    -----
    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018, Tables 1 and 2.
    """
    stages, classes = check_integer("stages", stages, 1, len(_MOBILENET_STAGES)), check_integer("classes", classes, 1)
    in_channels = check_integer("in_channels", in_channels, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    channels = _scaled(_MOBILENET_FIRST, width, 8)
    layers = [*_conv_norm(in_channels, channels, 3, options), nn.Hardtanh(0.0, 6.0)]
    for expansion, base, blocks, first_stride in _MOBILENET_STAGES[:stages]:
        wanted = _scaled(base, width, 8)
        for stride in (first_stride, *(1 for _ in range(blocks - 1))):
            block = _inverted_residual(channels, wanted, expansion, stride, options)
            layers.append(nn.Residual(block) if stride == 1 and channels == wanted else block)
            channels = wanted
    last = _scaled(_MOBILENET_LAST, max(width, 1.0), 8) if stages == len(_MOBILENET_STAGES) else channels * 4
    layers += [*_conv_norm(channels, last, 1, options), nn.Hardtanh(0.0, 6.0)]
    return _classifier([*layers, nn.AdaptiveAvgPool2d(1)], last, classes, options)


def _conv_norm(
    channels: int, wanted: int, kernel: int, options: dict[str, Any], stride: int = 1, groups: int = 1
) -> list[nn.Layer]:
    """Return a convolution without bias, and batch normalisation."""
    convolution = nn.Conv2d(channels, wanted, kernel, stride, padding=kernel // 2, groups=groups, bias=False, **options)
    return [convolution, nn.BatchNorm2d(wanted, dtype=options["dtype"])]


def _inverted_residual(
    channels: int, wanted: int, expansion: int, stride: int, options: dict[str, Any]
) -> nn.Sequential:
    """Return an inverted residual block without its shortcut."""
    hidden = channels * expansion
    layers = [*_conv_norm(channels, hidden, 1, options), nn.Hardtanh(0.0, 6.0)] if expansion > 1 else []
    layers += [*_conv_norm(hidden, hidden, 3, options, stride, groups=hidden), nn.Hardtanh(0.0, 6.0)]
    return nn.Sequential(*layers, *_conv_norm(hidden, wanted, 1, options))


def densenet(
    in_channels: int = 3, classes: int = 10, *, depth: int = 40, growth: int = 12, blocks: int = 3, width: float = 1.0,
    dtype: Any = np.float32, rng: Seed = None,
) -> nn.Sequential:  # fmt: skip
    """Return DenseNet (L = `depth`, k = `growth`) for CIFAR-10, without bottlenecks and compression.

    In a dense block every layer adds k channels to its input: ``Concat(Identity, Sequential(BN, ReLU, Conv))``, one
    stage of the result each. Between the blocks a 1×1 convolution and an average pooling halve the image.

    Parameters
    ----------
    in_channels, classes, dtype, rng
        See the module. Initial values are He's for the convolutions, torch.nn's default for the linear layer.
    depth
        Number of convolutions and linear layers: every block has ``(depth - 1 - blocks) / blocks`` layers, 1 or more.
    growth
        Channels that every layer adds, k.
    blocks
        Number of dense blocks, of equal length.
    width
        Factor on k and on the channels of the first convolution, which are rounded, to 1 at least.

    Notes
    -----
    Huang et al., "Densely Connected Convolutional Networks", 2017, §3 and §4.2. A ReLU precedes the convolutions
    between the blocks, as in the authors' code.
    """
    depth, growth, blocks = (
        check_integer(name, value, 1) for name, value in (("depth", depth), ("growth", growth), ("blocks", blocks))
    )
    in_channels, classes = check_integer("in_channels", in_channels, 1), check_integer("classes", classes, 1)
    if depth < 1 + 2 * blocks or (depth - 1 - blocks) % blocks:
        raise OptionError("The depth cannot be divided over the blocks", got=f"depth={depth}, blocks={blocks}",
                          expected="depth = blocks · n + blocks + 1, n ≥ 1")  # fmt: skip
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    channels, added = _scaled(_DENSENET_FIRST, width), _scaled(growth, width)
    layers: list[nn.Layer] = [nn.Conv2d(in_channels, channels, 3, padding=1, bias=False, **options)]
    for block in range(blocks):
        if block > 0:
            layers += [*_norm_relu_conv(channels, channels, 1, options), nn.AvgPool2d(2)]
        for _ in range((depth - 1 - blocks) // blocks):
            branch = nn.Sequential(*_norm_relu_conv(channels, added, 3, options))
            layers.append(nn.Concat(nn.Identity(), branch))
            channels += added
    layers += [nn.BatchNorm2d(channels, dtype=dtype), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    return _classifier(layers, channels, classes, options)


def _norm_relu_conv(channels: int, wanted: int, kernel: int, options: dict[str, Any]) -> list[nn.Layer]:
    """Return batch normalisation, ReLU and a convolution without bias."""
    convolution = nn.Conv2d(channels, wanted, kernel, padding=kernel // 2, bias=False, **options)
    return [nn.BatchNorm2d(channels, dtype=options["dtype"]), nn.ReLU(), convolution]


def _classifier(layers: list[nn.Layer], features: int, classes: int, options: dict[str, Any]) -> nn.Sequential:
    """Append a linear layer, and give the convolutions He's initial values."""
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, classes, **options))
    nn.init.he_convolutions(model, options["rng"])
    return model


def _scaled(channels: int, width: float, multiple: int = 1) -> int:
    """Return ``channels * width`` rounded to a positive multiple."""
    # rounds down by at most a tenth, as the reference code of MobileNetV2
    wanted = channels * check_positive("width", width)
    rounded = max(multiple, int(wanted + multiple / 2) // multiple * multiple)
    return rounded + multiple if rounded < 0.9 * wanted else rounded


# A small Transformer that classifies sequences of vectors or tokens.


def transformer_classifier(
    inputs: int, classes: int = 10, *, steps: int, tokens: bool = False, width: int = 64, heads: int = 4,
    layers: int = 4, dropout: float = 0.0, dtype: Any = np.float32, rng: Seed = None,
) -> nn.Sequential:  # fmt: skip
    """Return a Transformer encoder followed by the mean over the steps and a linear layer.

    Parameters
    ----------
    inputs
        Features of a step; with `tokens`, the size of the vocabulary.
    classes, dtype, rng
        See the module. Initial values are torch.nn's defaults; `rng` also draws dropout.
    steps
        Longest sequence.
    tokens
        Whether a step is an integer, for an `Embedding`, or a vector, for a `Linear`.
    width
        Length of a step's vector between the layers, a multiple of `heads`.
    heads
        Number of attention heads.
    layers
        Number of encoder layers, with 4 · width features between their two linear layers.
    dropout
        Dropout probability of the encoder layers in training.

    Returns
    -------
    Sequential
        Sequences (B, T, inputs), with `tokens` integers (B, T), to logits (B, classes). Its stages: embedding,
        positions, every encoder layer, normalisation, mean, linear layer.
        For sequences padded at the end it takes ``lengths=``: padding has no influence.

    Notes
    -----
    Vaswani et al., "Attention Is All You Need", 2017, §3. Normalisation comes first, which needs no learning-rate
    warm-up (Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020); GELU, learned positions and
    the factor 4 are those of Devlin et al., "BERT", 2019.
    """
    inputs, classes, width = (
        check_integer(name, value, 1) for name, value in (("inputs", inputs), ("classes", classes), ("width", width))
    )
    layers = check_integer("layers", layers, 1)
    options: dict[str, Any] = {"dtype": dtype, "rng": check_generator("rng", rng)}
    first = nn.Embedding if check_flag("tokens", tokens) else nn.Linear
    return nn.Sequential(
        first(inputs, width, **options),
        nn.PositionalEmbedding(steps, width, batch_first=True, **options),
        *(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True, **options
            )
            for _ in range(layers)
        ),
        nn.LayerNorm(width, dtype=dtype),
        nn.MeanOverSteps(batch_first=True),
        nn.Linear(width, classes, **options),
    )


def __dir__() -> list[str]:
    return sorted(__all__)
