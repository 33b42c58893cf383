"""What a layer's parts cost, in FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# Costs of back-propagation layer by layer, from shapes alone.


class Work(NamedTuple):
    """The cost of one call of a layer's `input_grad`, for the whole batch."""

    flops: int  # Floating-point operations; pruned weights count, since a matrix product computes with the zeros
    values: int  # Values read and written, including intermediate arrays
    calls: int  # Array operations one after the other
    # Entries of the layer's transposed Jacobian; 0 if shapes and masks do not determine them.
    entries: int = 0


def total_work(works: Iterable[Work]) -> Work:
    """Return the sum."""
    return Work(*(sum(column) for column in zip(Work(0, 0, 0), *works, strict=True)))
