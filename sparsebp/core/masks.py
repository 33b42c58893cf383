"""Masks of pruned arrays: which of an array's elements are kept; the others are 0.

A mask belongs to the array, whichever layers share it: all of them compute with 0 there, an update leaves 0, and so
does what a state holds. Layers own the masks, as buffers, and say here which array theirs is for.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from sparsebp.core import backend
from sparsebp.core.check import Array


class Owner(Protocol):
    """A layer that may have a mask for one array."""

    def mask_for(self, array: Array) -> Array | None:
        """Return its mask, None if it has none or uses another array by now."""

    def _arrays_replaced(self) -> None:
        """Call `attach` with the array that it uses by now."""


_owners: dict[int, tuple[weakref.ref[Owner], ...]] = {}
"""Who has a mask, by the identity of the array. An array that is gone is nobody's, even if another has its number."""
_places: dict[int, tuple[weakref.ref[Owner], int]] = {}
"""Of every owner, by its identity: layers may have an equality of their own."""


def attach(owner: Owner, array: Array) -> None:
    """Say that `owner` has a mask for `array`, and for no other any more."""
    number, place = id(array), id(owner)
    before = _places.get(place)
    if before is not None:
        if before[1] == number:
            return
        _detach(place, before[0])
    one = weakref.ref(owner, lambda gone: _detach(place, gone))
    _places[place] = one, number
    _owners[number] = (*_owners.get(number, ()), one)


def _detach(place: int, one: weakref.ref[Owner]) -> None:
    if _places.get(place, (None,))[0] is not one:
        return
    number = _places.pop(place)[1]
    left = tuple(ref for ref in _owners.get(number, ()) if ref is not one)
    if left:
        _owners[number] = left
    else:
        _owners.pop(number, None)


def arrays_replaced() -> None:
    """Let every owner look again which array it uses: one of some layer has been replaced."""
    for ref, _ in list(_places.values()):
        owner = ref()
        if owner is not None:
            owner._arrays_replaced()


def some() -> bool:
    """Whether there are any masks."""
    return bool(_owners)


def mask_of(array: Array) -> Array | None:
    """Return where the elements of an array are kept, by all masks for it; None: it is not pruned."""
    found = None
    for ref in _owners.get(id(array), ()):
        owner = ref()
        mask = None if owner is None else owner.mask_for(array)
        if mask is not None and mask is not found:
            found = mask if found is None else found & mask
    return found


def kept(array: Array, mask: Array) -> Array:
    """Return a new array with 0 where `mask` is false, whatever was there."""
    return backend.namespace(array).where(mask, array, array.dtype.type(0))


def clear(array: Array) -> None:
    """Write 0 into an array where it is pruned."""
    mask = mask_of(array)
    if mask is not None:
        array[...] = kept(array, mask)
