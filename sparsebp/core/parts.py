"""Changes to what models are made of, for whatever rests on a model's layers and arrays: executors, optimizers.

Layers count here: another child, another array in place of a parameter. Who has looked at a model keeps the count, and
looks again once it differs. That costs a step one comparison of two integers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping
from typing import Protocol

from sparsebp.core.check import Array

_numbers = itertools.count(1)
changes = 0
"""Differs after every change to a layer."""


def changed() -> None:
    """Count a change; called after it."""
    global changes  # noqa: PLW0603 - a number is what a step can compare fastest
    changes = next(_numbers)


# Which model an optimizer's parameters are of. An optimizer gets bare arrays by name, often a part of what a model's
# `parameters` returned, in a new dict; so a model notes that it has given them out.


class Model(Protocol):
    """A layer that has given out its parameters."""

    def live_parameters(self) -> Mapping[str, Array]:
        """Return the parameters that it has now."""


_models: dict[int, weakref.ref[Model]] = {}
"""Models that have given out their parameters, by identity (layers may define their own equality); the last one is at
the end."""


def gives_out(model: Model) -> None:
    """Note that a model gives out its parameters."""
    key = id(model)
    ref = _models.pop(key, None)
    if ref is None or ref() is not model:
        ref = weakref.ref(model, lambda gone: _models.pop(key) if _models.get(key) is gone else None)
    _models[key] = ref


def models_of(arrays: Iterable[Array]) -> list[tuple[weakref.ref[Model], set[int]]]:
    """Return models that have given out these arrays, each with the identities of its own.

    It is the last model that has them all, or else for each array the last one that has it.
    """
    left = set(map(id, arrays))
    found, known = [], []
    for ref in [*_models.values()][::-1]:
        model = ref()
        live = set() if model is None else identities(model)
        if left <= live:
            return [(ref, left)]
        known.append((ref, live))
    for ref, live in known:
        if own := left & live:
            found.append((ref, own))
            left -= own
    return found


def identities(model: Model) -> set[int]:
    """Return the identities of a model's parameters."""
    return set(map(id, model.live_parameters().values()))
