"""Masks of pruned arrays: the elements that are kept; the others are 0.

A mask belongs to an array, whichever layers share it: all compute with 0 there, updates keep the 0, and saved states
hold it. Layers own the masks, as buffers, and register here the array that theirs is for.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from sparsebp.core import backend
from sparsebp.core.check import Array


class Owner(Protocol):
    """A layer that may have a mask for one array."""

    def mask_for(self, array: Array) -> Array | None:
        """Return its mask, None if it has none or now uses another array."""

    def _arrays_replaced(self) -> None:
        """Call `attach` with the array that it uses now."""


owners: dict[int, tuple[weakref.ref[Owner], ...]] = {}
"""Owners of a mask, by the identity of the array; a new array with the identity of a deleted one has none. Empty while
nothing is pruned."""
_places: dict[int, tuple[weakref.ref[Owner], int]] = {}
"""Reference and array of every owner, by identity: layers may define their own equality."""


def attach(owner: Owner, array: Array) -> None:
    """Register a mask of `owner` for `array`, and for no other array."""
    number, place = id(array), id(owner)
    before = _places.get(place)
    if before is not None:
        if before[1] == number:
            return
        _detach(place, before[0])
    one = weakref.ref(owner, lambda gone: _detach(place, gone))
    _places[place] = one, number
    owners[number] = (*owners.get(number, ()), one)


def _detach(place: int, one: weakref.ref[Owner]) -> None:
    if _places.get(place, (None,))[0] is not one:
        return
    number = _places.pop(place)[1]
    left = tuple(ref for ref in owners.get(number, ()) if ref is not one)
    if left:
        owners[number] = left
    else:
        owners.pop(number, None)


def arrays_replaced() -> None:
    """Let every owner look up its array again, after one was replaced."""
    for ref, _ in list(_places.values()):
        owner = ref()
        if owner is not None:
            owner._arrays_replaced()


def mask_of(array: Array) -> Array | None:
    """Return the elements of an array that all its masks keep; None if it is not pruned."""
    found = None
    for ref in owners.get(id(array), ()):
        owner = ref()
        mask = None if owner is None else owner.mask_for(array)
        if mask is not None and mask is not found:
            found = mask if found is None else found & mask
    return found


def kept(array: Array, mask: Array) -> Array:
    """Return a new array with 0 where `mask` is False, whatever was there."""
    return backend.namespace(array).where(mask, array, array.dtype.type(0))


def clear(array: Array) -> None:
    """Set the pruned elements of an array to 0."""
    mask = mask_of(array)
    if mask is not None:
        array[...] = kept(array, mask)
