"""Masks of pruned arrays: which of an array's elements are kept; the others are 0.

A mask belongs to the array, whichever layers share it: all of them compute with 0 there, an update leaves 0, and so
does what a state holds. Layers own the masks, as buffers, and say here which array theirs is for.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from sparsebp import backend
from sparsebp.core.types import Array


class Owner(Protocol):
    """A layer that may have a mask for one array."""

    def mask_for(self, array: Array) -> Array | None:
        """Return its mask, None if it has none or uses another array by now."""


_owners: dict[int, tuple[weakref.ref[Owner], ...]] = {}
"""Who has a mask, by the identity of the array. An array that is gone is nobody's, even if another has its number."""
_places: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()


def attach(owner: Owner, array: Array) -> None:
    """Say that `owner` has a mask for `array`, and for no other any more."""
    number, before = id(array), _places.get(owner)
    if before == number:
        return
    if before is not None:
        _keep(before, lambda ref: ref() is not owner)
    _places[owner] = number
    one = weakref.ref(owner, lambda gone: _keep(number, lambda ref: ref is not gone))
    _owners[number] = (*_owners.get(number, ()), one)


def _keep(number: int, condition: object) -> None:
    left = tuple(filter(condition, _owners.get(number, ())))  # type: ignore[call-overload]
    if left:
        _owners[number] = left
    else:
        _owners.pop(number, None)


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
