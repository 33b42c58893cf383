"""What ``backward="auto"`` chose for an input, and why, in words."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from sparsebp.core.arguments import forward_of
from sparsebp.core.types import Array


def explain(model: Any, x: Array, **options: Any) -> str:
    """Run `model` forward on `x`, leaving no trace in it, and return a line for each choice of a way back."""
    with _undisturbed(model):
        _, saved = forward_of(model, x, **options)
        found = list(model.choices(saved))
    if not found:
        return f"{type(model).__name__} has one way back: plain back-propagation."
    return "\n".join(f"{name or type(model).__name__}: {algorithm}. {reason}" for name, algorithm, reason in found)


@contextlib.contextmanager
def _undisturbed(model: Any) -> Iterator[None]:
    """Bring running statistics and random generators back to where they were."""
    buffers = [(layer, name, array.copy()) for _, layer in model.modules() for name, array in layer.buffers.items()]
    generators = [(generator, generator.bit_generator.state) for generator in model.generators().values()]
    try:
        yield
    finally:
        for layer, name, array in buffers:
            layer.buffers[name][...] = array
        for generator, state in generators:
            generator.bit_generator.state = state
