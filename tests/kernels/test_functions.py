"""The vector functions of the host kernels: error bounds in units in the last place, symmetry, limits, NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.kernels.host.engine import math
from sparsebp.kernels.host.engine.simd import lanes, load_n, pointer, store_n
from strategies import seeds

REFERENCES: dict[str, Callable[[Any], Any]] = {
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "exp": np.exp,
}
BOUNDS = {"tanh": 3.0, "sigmoid": 3.0, "exp": 1.5}
RANGES = {  # where the result is a normal number
    ("tanh", "float32"): (-50.0, 50.0),
    ("tanh", "float64"): (-50.0, 50.0),
    ("sigmoid", "float32"): (-87.0, 100.0),
    ("sigmoid", "float64"): (-708.0, 800.0),
    ("exp", "float32"): (-87.0, 88.0),
    ("exp", "float64"): (-708.0, 709.0),
}
each = pytest.mark.parametrize("name", list(REFERENCES))
dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@cache
def compiled(name: str) -> Callable[[np.ndarray, np.ndarray], None]:
    function = getattr(math, name)

    @numba.njit(error_model="numpy")
    def run(x: np.ndarray, out: np.ndarray) -> None:
        source, target = pointer(x), pointer(out)
        for i in range(0, x.size, lanes(source)):
            store_n(target, i, function(load_n(source, i, x.size - i)), x.size - i)

    return run


def evaluate(name: str, x: np.ndarray) -> np.ndarray:
    out = np.full_like(x, np.nan)
    compiled(name)(x, out)
    return out


def wide(name: str, x: np.ndarray) -> np.ndarray:
    """Return the function in a wider type: float64 for float32, extended precision for float64."""
    return REFERENCES[name](x.astype(np.float64 if x.dtype == np.float32 else np.longdouble))


@each
@dtypes
@given(seed=seeds)
def test_error_is_within_the_stated_bound(name: str, dtype: Any, seed: int) -> None:
    if dtype is np.float64 and np.finfo(np.longdouble).eps >= np.finfo(np.float64).eps:
        pytest.skip("no type wider than float64 here")
    rng = np.random.default_rng(seed)
    x = np.concatenate([
        rng.uniform(*RANGES[name, np.dtype(dtype).name], 2000),
        rng.uniform(-10, 10, 2000),
        rng.uniform(-1, 1, 2000),
        rng.choice([-1, 1], 1001) * np.exp(rng.uniform(-80, 0, 1001)),
    ]).astype(dtype)  # fmt: skip
    expected = wide(name, x)
    error = np.abs(evaluate(name, x).astype(expected.dtype) - expected)
    assert np.max(error / np.spacing(np.abs(expected).astype(dtype)).astype(expected.dtype)) <= BOUNDS[name]


@each
@dtypes
def test_nan_stays(name: str, dtype: Any) -> None:
    x = np.array([np.nan, 1, -np.nan, 0, np.nan], dtype)
    np.testing.assert_array_equal(np.isnan(evaluate(name, x)), np.isnan(x))


@dtypes
def test_tanh_is_odd_and_saturates(dtype: Any) -> None:
    x = np.array([0.0, 1e-40, 1e-30, 0.1, 0.7, 3.0, 20.0, 1e3, 1e30, np.inf], dtype)
    y = evaluate("tanh", x)
    np.testing.assert_array_equal(evaluate("tanh", -x), -y)
    assert np.signbit(evaluate("tanh", -x)).all()
    np.testing.assert_array_equal(y[:3], x[:3])
    np.testing.assert_array_equal(y[-4:], np.ones(4))
    assert (np.abs(y) <= 1).all()


@dtypes
def test_sigmoid_and_exp_saturate(dtype: Any) -> None:
    low, high = np.array([-1e30, -np.inf], dtype), np.array([1e30, np.inf], dtype)
    np.testing.assert_array_equal(evaluate("sigmoid", high), np.ones(2))
    assert (evaluate("sigmoid", low) >= 0).all()
    assert (evaluate("sigmoid", low) < 2 * np.finfo(dtype).tiny).all()
    assert (evaluate("exp", low) < 4 * np.finfo(dtype).tiny).all()
    assert np.isfinite(evaluate("exp", high)).all()


@dtypes
@given(length=st.integers(0, 70), name=st.sampled_from(list(REFERENCES)))
def test_ends_of_rows_touch_exactly_what_is_asked(dtype: Any, length: int, name: str) -> None:
    flat = np.full(length + 64, 7.0, dtype)
    compiled(name)(np.zeros(length, dtype), flat[32 : 32 + length])
    assert (flat[:32] == 7).all()
    assert (flat[32 + length :] == 7).all()
    np.testing.assert_array_equal(flat[32 : 32 + length], np.full(length, REFERENCES[name](0.0)))
