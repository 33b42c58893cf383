"""Models as lists of layer costs: FLOPs, weights and activations a sample, from their published shapes.

Counted are the matrix products and convolutions (two FLOPs a multiply-add); what normalisation, activations and pooling
compute is left out, what they keep is counted. A model is taken for a chain: its skip connections cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Layer(NamedTuple):
    """Costs of one layer, or of several joined.

    Attributes
    ----------
    name
        Of the layer; of several, that of the first.
    forward, input_grad, weight_grad
        FLOPs a sample of F, I and W.
    weights
        Number of values.
    output, saved
        Values a sample of the output, and of what the backward needs.
    """

    name: str
    forward: float
    input_grad: float
    weight_grad: float
    weights: float
    output: float
    saved: float

    @property
    def flops(self) -> float:
        """FLOPs a sample of all three."""
        return self.forward + self.input_grad + self.weight_grad


def joined(layers: Sequence[Layer]) -> Layer:
    """Return several layers in a row as one."""
    sums = [sum(values) for values in zip(*(layer[1:] for layer in layers), strict=True)]
    return Layer(layers[0].name, *sums)._replace(output=layers[-1].output)


def cut(layers: Sequence[Layer], parts: int) -> list[Layer]:
    """Return the layers in `parts` contiguous parts, the dearest of which is as cheap as can be (by FLOPs).

    Notes
    -----
    Narayanan et al., "PipeDream", SOSP 2019, §3.1, without replication.
    """
    before = [0.0, *accumulate(layer.flops for layer in layers)]
    best: list[tuple[float, tuple[int, ...]]] = [(before[end], (end,)) for end in range(len(layers) + 1)]
    for part in range(2, parts + 1):
        best = [
            min(((max(best[at][0], before[end] - before[at]), (*best[at][1], end)) for at in range(part - 1, end)),
                default=(float("inf"), ()))
            for end in range(len(layers) + 1)
        ]  # fmt: skip
    ends = best[-1][1]
    return [joined(layers[begin:end]) for begin, end in zip((0, *ends), ends, strict=False)]


def conv(name: str, inputs: int, outputs: int, kernel: int, size: int, stride: int = 1, pool: int = 1) -> Layer:
    """Return a convolution of `size` × `size` pixels, with what follows it up to a pooling by `pool`."""
    pixels = (size // stride) ** 2
    flops = 2.0 * kernel**2 * inputs * outputs * pixels
    saved = inputs * size**2 + outputs * pixels
    return Layer(name, flops, flops, flops, kernel**2 * inputs * outputs, outputs * pixels / pool**2, saved)


def dense(name: str, inputs: int, outputs: int) -> Layer:
    """Return a fully connected layer."""
    flops = 2.0 * inputs * outputs
    return Layer(name, flops, flops, flops, inputs * outputs, outputs, inputs + outputs)


def vgg16(size: int = 224, classes: int = 1000) -> list[Layer]:
    """Return VGG-16 for square images: 13 convolutions, 3 fully connected layers (Simonyan and Zisserman, 2015)."""
    layers, channels = [], 3
    for block, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)], 1):
        for number in range(1, count + 1):
            layers.append(conv(f"conv{block}_{number}", channels, width, 3, size, pool=2 if number == count else 1))
            channels = width
        size //= 2
    return [*layers, dense("fc6", 512 * size**2, 4096), dense("fc7", 4096, 4096), dense("fc8", 4096, classes)]


def resnet(depths: Sequence[int] = (3, 4, 6, 3), size: int = 224, classes: int = 1000) -> list[list[Layer]]:
    """Return a bottleneck ResNet, one list of layers a block (He et al., 2016): ResNet-50 by default."""
    blocks = [[conv("conv1", 3, 64, 7, size, 2, pool=2)]]
    size, channels = max(1, size // 4), 64
    for group, depth in enumerate(depths):
        width = 64 * 2**group
        for number in range(depth):
            stride = 2 if group > 0 and number == 0 and size > 1 else 1
            name, inside = f"conv{group + 2}_{number + 1}", size // stride
            block = [conv(f"{name}a", channels, width, 1, size), conv(f"{name}b", width, width, 3, size, stride),
                     conv(f"{name}c", width, 4 * width, 1, inside)]  # fmt: skip
            if number == 0:
                shortcut = conv(name, channels, 4 * width, 1, size, stride)
                block[-1] = joined([block[-1], shortcut])
            blocks.append(block)
            size, channels = inside, 4 * width
    return [*blocks, [dense("fc", channels, classes)]]


def transformer(layers: int, hidden: int, length: int, vocabulary: int, heads: int = 16) -> list[Layer]:
    """Return embedding, `layers` blocks of attention and a four times as wide MLP, and the output layer.

    What a block keeps, 17 length · hidden and 2.5 heads · length² values a sample, is that of Korthikanti et al.,
    "Reducing activation recomputation in large transformer models", MLSys 2023, Eq. 1 (34 and 5 bytes, 2 a value).
    """
    products, attention = 24.0 * length * hidden**2, 4.0 * length**2 * hidden
    values = length * hidden
    block = Layer("block", products + attention, products + 2 * attention, products, 12 * hidden**2 + 13 * hidden,
                  values, 17 * values + 2.5 * heads * length**2)  # fmt: skip
    first = Layer("embedding", 0.0, 0.0, 0.0, vocabulary * hidden, values, length)
    flops = 2.0 * values * vocabulary
    last = Layer("output", flops, flops, flops, vocabulary * hidden, length, values + length * vocabulary)
    return [first, *([block] * layers), last]


def bert(layers: int, hidden: int = 1024, length: int = 128) -> list[Layer]:
    """Return the encoders of BERT alone (Devlin et al., 2019)."""
    return transformer(layers, hidden, length, 30_522)[1:-1]


def mlp(layers: int, width: int, inputs: int, classes: int) -> list[Layer]:
    """Return fully connected layers of one width, and the last of another."""
    first = dense("fc1", inputs, width)
    return [first, *(dense(f"fc{i}", width, width) for i in range(2, layers)), dense("last", width, classes)]


def lstm(layers: int, inputs: int, units: int, length: int) -> list[Layer]:
    """Return LSTM layers of `units` that project to as many values as they take (Sak et al., 2014)."""
    weights = 4 * units * 2 * inputs + units * inputs
    flops = 2.0 * weights * length
    return [Layer("lstm", flops, flops, flops, weights, inputs * length, (2 * inputs + 7 * units) * length)] * layers


def flat(blocks: Iterable[Sequence[Layer]]) -> list[Layer]:
    """Return the layers of all blocks."""
    return [layer for block in blocks for layer in block]
