"""Affine maps in one array: joined in their order, whatever the grouping."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.scan import algorithms
from strategies import seeds


def through(maps: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Take rows g (B, n) through maps (C, B, n + 1, n), the first one first."""
    for one in maps:
        g = np.einsum("bi,bij->bj", g, one[:, :-1]) + one[:, -1]
    return g


@given(seed=seeds, count=st.integers(1, 9), batch=st.integers(0, 3), size=st.integers(1, 5))
def test_joined_maps_do_what_they_do_one_after_the_other(seed: int, count: int, batch: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    maps, g = rng.standard_normal((count, batch, size + 1, size)), rng.standard_normal((batch, size))
    kept = maps.copy()
    np.testing.assert_allclose(through(algorithms.join_all(maps)[None], g), through(maps, g), rtol=1e-9, atol=1e-9)
    if count == 3:
        left, right = (
            algorithms.join(algorithms.join(*maps[:2]), maps[2]),
            algorithms.join(maps[0], algorithms.join(*maps[1:])),
        )
        np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(maps, kept)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_identity_and_constant(dtype: type) -> None:
    rng = np.random.default_rng(0)
    one, vectors = rng.standard_normal((2, 4, 3)).astype(dtype), rng.standard_normal((2, 3)).astype(dtype)
    same, fixed = algorithms.identity(one), algorithms.constant(vectors)
    assert same.dtype == fixed.dtype == dtype
    np.testing.assert_array_equal(algorithms.join(one, same), one)
    np.testing.assert_array_equal(algorithms.join(same, one), one)
    np.testing.assert_array_equal(algorithms.join(one, fixed), fixed)
    np.testing.assert_array_equal(through(fixed[None], rng.standard_normal((2, 3))), vectors)
