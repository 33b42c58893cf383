"""What the benchmarks of convolutional networks share: twins in PyTorch, the order of batches, and training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.tools.peers import import_torch
from sparsebp import nn, optim
from sparsebp.data import ImageDataset, epoch_order


def torch_twin(model: nn.Sequential) -> Any:
    """Return the same chain in torch.nn, with the same weights: convolutions, pooling, linear layers, residual blocks…

    Raises
    ------
    MissingDependencyError
        PyTorch is not installed.
    """
    torch = import_torch()
    twin = _torch_module(torch.nn, model).to(torch.float64 if model.dtype == np.float64 else torch.float32)
    state = model.state_dict()
    twin.load_state_dict({name: torch.as_tensor(state[name]) for name in twin.state_dict()})  # pruning masks stay here
    return twin


def _torch_module(theirs: Any, layer: nn.Layer) -> Any:
    if isinstance(layer, nn.Conv2d):
        w = layer.windows
        padding = tuple(before for before, _ in w.padding)
        bias = "bias" in layer.params
        return theirs.Conv2d(
            layer.in_channels, layer.out_channels, w.kernel, w.stride, padding, groups=layer.groups, bias=bias
        )
    if isinstance(layer, nn.Sequential):
        return theirs.Sequential(*(_torch_module(theirs, child) for child in layer.children.values()))
    if isinstance(layer, nn.Residual):
        return _residual(theirs, _torch_module(theirs, layer.children["body"]))
    if isinstance(layer, nn.BatchNorm2d):
        return theirs.BatchNorm2d(len(layer.params["weight"]))
    if isinstance(layer, nn.Hardtanh):
        return theirs.Hardtanh(layer.min_val, layer.max_val)
    if isinstance(layer, nn.AdaptiveAvgPool2d):
        return theirs.AdaptiveAvgPool2d(layer.output_size)
    if isinstance(layer, nn.Linear):
        return theirs.Linear(layer.in_features, layer.out_features)
    if isinstance(layer, nn.MaxPool2d):
        return theirs.MaxPool2d(layer.window.kernel, layer.window.stride)
    return getattr(theirs, type(layer).__name__)()


def _residual(theirs: Any, body: Any) -> Any:
    class Residual(theirs.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Any) -> Any:
            return x + self.body(x)

    return Residual()


def batches(samples: int, size: int, seed: int, steps: int) -> Iterator[np.ndarray]:
    """Yield the samples of each of `steps` batches: epochs in random order, incomplete batches left out."""
    an_epoch = samples // size
    for step in range(steps):
        epoch, number = divmod(step, an_epoch)
        yield epoch_order(samples, seed=seed, epoch=epoch)[number * size : (number + 1) * size]


def train(
    model: nn.Sequential, optimizer: optim.Optimizer, data: ImageDataset, size: int, seed: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Train on `batches`, a step each time: yields the loss, and the seconds that the step took without its batch."""
    loss = nn.CrossEntropyLoss()
    for chosen in batches(len(data), size, seed, steps):
        x, target = data.batch(chosen)
        start = time.perf_counter()
        logits, saved = model.forward(x)
        value, loss_saved = loss.forward(logits, target)
        optimizer.step(model.weight_grad(loss.input_grad(loss_saved), saved))
        yield float(value), time.perf_counter() - start
