"""Models whose parameters are made when they are needed, all of them or those of some layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sparsebp.core import parts
from sparsebp.core.absent import Absent, initial_values
from sparsebp.core.check import Array
from sparsebp.nn.layer import Layer


def materialize(model: Layer) -> None:
    """Make the parameters of a model that was built within `deferred_init`, with the values that they would have had.

    Those that are there stay as they are. Build the optimizer afterwards, as after `Layer.to`.

    Raises
    ------
    OptionError
        A layer takes its random numbers from elsewhere than its arguments, or trained parameters are on other ranks.
    """
    fill(model, {id(one): values for one, values in initial_values(absent_in([model]))})


def absent_in(layers: Iterable[Any]) -> list[Absent]:
    """Return the stand-ins in these layers and the layers inside them, each once."""
    found = {
        id(array): array
        for layer in layers if hasattr(layer, "modules")
        for _, one in layer.modules() for array in one.params.values() if isinstance(array, Absent)
    }  # fmt: skip
    return list(found.values())


def fill(model: Layer, arrays: Mapping[int, Array]) -> None:
    """Put arrays in the place of a model's, by the identity of those: wherever the model has them."""
    for _, layer in model.modules():
        mine = {name: arrays[id(array)] for name, array in layer.params.items() if id(array) in arrays}
        for name, array in mine.items():
            layer.params.replace(name, array)  # type: ignore[attr-defined]
        if mine:
            layer._arrays_replaced()
    parts.changed()
