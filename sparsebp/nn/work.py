"""What back-propagation layer by layer costs, told from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Work(NamedTuple):
    """What one call of a layer's `input_grad` does, for the whole batch.

    Attributes
    ----------
    flops
        Floating-point operations; pruned weights count, since a matrix product computes with the zeros.
    values
        Values read and written, those of intermediate arrays included.
    calls
        Array operations one after the other.
    entries
        Entries of the layer's transposed Jacobian as far as shapes and masks tell them; 0 where they do not.
    """

    flops: int
    values: int
    calls: int
    entries: int = 0


def total_work(works: Iterable[Work]) -> Work:
    """Return the sum."""
    return Work(*(sum(column) for column in zip(Work(0, 0, 0), *works, strict=True)))
