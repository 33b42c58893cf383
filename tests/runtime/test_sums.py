"""Sums over ranks: which rank sums which part, also for arrays beyond 32-bit sizes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.comm.transport import parts_of, sum_in_order


class Huge:
    """As an array that is only cut."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, part: slice) -> slice:
        return part


@given(size=st.integers(0, 2**40), ranks=st.integers(1, 64))
def test_parts_are_all_and_as_equal_as_can_be(size: int, ranks: int) -> None:
    parts = parts_of(Huge(size), ranks)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    lengths = {part.stop - part.start for part in parts}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_sums_have_one_order(count: int) -> None:
    """Into an array of their own, and into each of those that are summed."""
    every = np.random.default_rng(count).standard_normal((count, 100)).astype(np.float32)
    expected = every[0]
    for one in every[1:]:
        expected = expected + one
    for place in [None, *range(count)]:
        arrays = list(every.copy())
        out = np.empty(100, np.float32) if place is None else arrays[place]
        sum_in_order(arrays, out)
        np.testing.assert_array_equal(out, expected)
        if place is None:
            np.testing.assert_array_equal(np.array(arrays), every)
