"""Sums over ranks: who sums which part, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsebp.core.types import Array


def parts_of(flat: Array, ranks: int) -> list[Array]:
    """Return the part of an array that each rank sums: as equal as can be, in the order of the ranks."""
    return [flat[rank * flat.size // ranks : (rank + 1) * flat.size // ranks] for rank in range(ranks)]


def sum_in_order(arrays: Sequence[Array], out: Array, add: Callable[..., Any] = np.add) -> None:
    """Write the sum of `arrays`, added in their order, to `out`; if that is one of them, the first may be lost."""
    if len(arrays) == 1:
        if arrays[0] is not out:
            out[...] = arrays[0]
        return
    total = arrays[0] if any(one is out for one in arrays[2:]) else out
    add(arrays[0], arrays[1], out=out if len(arrays) == 2 else total)
    for number, one in enumerate(arrays[2:], 3):
        add(total, one, out=out if number == len(arrays) else total)
