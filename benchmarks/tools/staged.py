"""The networks of the benchmark in four stages, with real digits for each: SNN, VGG-11, GRU, Transformer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp import models, nn
from sparsebp.core.check import Array
from sparsebp.data import Dataset, load_digits, load_mnist_images
from sparsebp.nn.layer import check_gy, check_input

STAGES = 4


@dataclass(frozen=True)
class Network:
    """A network with its data.

    Attributes
    ----------
    build
        Returns the chain of four stages, from the sizes and a generator of their initial values.
    data
        Returns the training and the test set, from the number of test samples.
    rates
        Learning rates: a moderate one, and one near the highest by which synchronous training still learns.
    sizes, quick
        What `build` takes: of the benchmark, and of its quick run.
    """

    build: Callable[..., nn.Sequential]
    data: Callable[[int], tuple[Dataset, Dataset]]
    rates: tuple[float, float]
    sizes: Mapping[str, Any]
    quick: Mapping[str, Any]


class Part(nn.Layer):
    """Layers one after the other as one stage: a `Sequential` would be as many stages as it has layers."""

    def __init__(self, *layers: nn.Layer) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)
        self.children = {"body": self.body}

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return what the last layer returns."""
        return self.body.forward(x)

    def gradients(self, gy: Array, saved: Any) -> nn.Gradients:
        """Return the layers' gradients."""
        inner = self.body.gradients(gy, saved)
        return nn.Gradients(self, gy, saved, inner.input_grad, lambda: {"body": inner})


class LastStep(nn.Layer):
    """``(T, B, n) -> (B, n)``: the last step of a sequence."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the last step of x."""
        check_input(x)
        return x[-1].copy(), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy at the last step, and zeros before it."""
        xp = check_gy(gy, saved.shape[1:], saved.dtype, saved)
        gx = xp.zeros_like(saved)
        gx[-1] = gy
        return gx


class BatchFirst(nn.Layer):
    """``(T, B, n) -> (B, T, n)``."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x with the batch first."""
        xp = check_input(x)
        return xp.ascontiguousarray(x.transpose(1, 0, 2)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy with the time first."""
        xp = check_gy(gy, (saved.shape[1], saved.shape[0], saved.shape[2]), saved.dtype, saved)
        return xp.ascontiguousarray(gy.transpose(1, 0, 2))


def cut(layers: Sequence[nn.Layer], begins: Sequence[int]) -> nn.Sequential:
    """Return the chain of the layers in stages that begin at these."""
    ends = [*begins[1:], len(layers)]
    return nn.Sequential(*(Part(*layers[begin:end]) for begin, end in zip(begins, ends, strict=True)))


def snn(rng: np.random.Generator, *, layers: int, width: int) -> nn.Sequential:
    """A self-normalizing network (Klambauer et al., 2017): linear layers with SELU, LeCun's initial values."""
    chain: list[nn.Layer] = [nn.Flatten()]
    for number in range(layers):
        chain += [nn.Linear(784 if number == 0 else width, width, rng=rng), nn.SELU()]
    chain.append(nn.Linear(width, 10, rng=rng))
    model = cut(chain, [0, *(1 + 2 * (layers * k // STAGES) for k in range(1, STAGES))])
    nn.init.lecun_linear(model, rng)
    return model


def vgg11(rng: np.random.Generator, *, width: float) -> nn.Sequential:
    """VGG-11 with fewer channels; two convolutions a stage."""
    layers = list(models.vgg11(1, width=width, rng=rng).children.values())
    convolutions = [number for number, layer in enumerate(layers) if isinstance(layer, nn.Conv2d)]
    return cut(layers, [0, *convolutions[2::2]])


def gru(rng: np.random.Generator, *, hidden: int) -> nn.Sequential:
    """Two GRU layers between a projection of the 28 rows, the steps, and a linear head."""
    seeds = map(int, rng.integers(2**31, size=2))  # a generator each: the layers are on several ranks
    layers = [nn.Linear(28, hidden, rng=rng), *(nn.GRU(hidden, hidden, rng=seed) for seed in seeds)]
    return cut([*layers, LastStep(), nn.Linear(hidden, 10, rng=rng)], [0, 1, 2, 3])


def transformer(rng: np.random.Generator, *, width: int) -> nn.Sequential:
    """Four encoder layers, one a stage, on steps of two rows; the first has the embedding with it."""
    layers = list(models.transformer_classifier(56, steps=14, width=width, rng=rng).children.values())
    return cut([BatchFirst(), *layers], [0, 4, 5, 6])


NETWORKS = {
    "SNN": Network(
        snn, lambda test: load_mnist_images(test=test), (5e-4, 1.5e-3),
        {"layers": 32, "width": 256}, {"layers": 4, "width": 16},
    ),
    "VGG-11": Network(
        vgg11, lambda test: load_mnist_images(size=32, test=test), (2e-3, 5e-3), {"width": 0.125}, {"width": 0.02},
    ),
    "GRU": Network(
        gru, lambda test: load_digits(test=test, pixels_per_step=28), (2e-2, 5e-2), {"hidden": 32}, {"hidden": 5},
    ),
    "Transformer": Network(
        transformer, lambda test: load_digits(test=test, pixels_per_step=56), (3e-3, 1e-2),
        {"width": 32}, {"width": 4},
    ),
}  # fmt: skip
