"""Training and evaluation, with every layer's own mode as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def training(model: Any) -> Iterator[None]:
    """Train: a model in evaluation is switched as a whole, one in training keeps layers that are in evaluation."""
    with _restored(model):
        if not getattr(model, "training", False):
            _switch(model, "train")
        yield


@contextlib.contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Switch all layers to evaluation. What a layer draws nevertheless is not missing afterwards."""
    generators = model.generators() if hasattr(model, "generators") else {}
    drawn = [(generator, generator.bit_generator.state) for generator in generators.values()]
    with _restored(model):
        _switch(model, "eval")
        try:
            yield
        finally:
            for generator, state in drawn:
                generator.bit_generator.state = state


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    layers = [layer for _, layer in model.modules()] if hasattr(model, "modules") else [model]
    modes = [(layer, layer.training) for layer in layers if hasattr(layer, "training")]
    try:
        yield
    finally:
        if not modes:  # it does not say
            _switch(model, "train")
        for layer, mode in modes:
            layer.training = mode


def _switch(model: Any, mode: str) -> None:
    switch = getattr(model, mode, None)
    if switch is not None:
        switch()
