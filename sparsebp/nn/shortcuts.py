"""Methods that a layer has beside others, to do the same work in a quicker way: whether they still do the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def stands_for(layer: Any, shortcut: str, methods: Sequence[str] = ("gradients", "weight_grad")) -> bool:
    """Whether a layer's method `shortcut` was written with its `methods`, or after them.

    A program may override one of `methods` in a subclass, or replace it on an object or in a class, and leave the
    shortcut as it is, which then computes something else.

    Parameters
    ----------
    layer
        Any object.
    shortcut
        The name of a method; False if there is none.
    methods
        The names of those in whose place it is called.
    """
    spaces: list[Mapping[str, Any]] = [getattr(layer, "__dict__", {}), *map(vars, type(layer).__mro__)]
    at, quick = _found(spaces, shortcut)
    if at == len(spaces):
        return False
    for name in methods:
        place, method = _found(spaces, name)
        # Of one class and two modules: one has been put there later. Of one object: both have.
        if place < at or (place == at > 0 and _module(method) is not _module(quick)):
            return False
    return True


def _found(spaces: Sequence[Mapping[str, Any]], name: str) -> tuple[int, Any]:
    """Return where a name is found first, `len(spaces)` if nowhere, and what it is."""
    return next(((at, space[name]) for at, space in enumerate(spaces) if name in space), (len(spaces), None))


def _module(function: Any) -> Any:
    """Return the names of the module that a function was written in: a decorator's are those of its own."""
    return getattr(getattr(function, "__func__", function), "__globals__", function)
