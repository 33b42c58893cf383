"""Cutting off at two values, on every backend, against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import OptionError, ShapeError
from strategies import normal, reals, seeds, sizes


@given(length=sizes(0, 600), limits=st.sampled_from([(-0.5, 0.25), (0.0, np.inf)]), dtype=reals, seed=seeds)
def test_clamp_and_its_gradient(backend, length, limits, dtype, seed):
    rng = np.random.default_rng(seed)
    x, gy = normal(rng, length, dtype), normal(rng, length, dtype)
    x[rng.random(length) < 0.2] = rng.choice([np.nan, np.inf, -np.inf, *limits])
    y, gx = backend.empty(length, dtype), backend.empty(length, dtype)
    backend.kernels.clamp(backend.array(x), *limits, y)
    with np.errstate(invalid="ignore"):
        want = np.clip(x, *map(np.dtype(dtype).type, limits))
    np.testing.assert_array_equal(backend.numpy(y), want)
    backend.kernels.clamp_grad(backend.array(gy), y, *limits, gx)
    np.testing.assert_array_equal(backend.numpy(gx), np.where((want <= limits[0]) | (want > limits[1]), 0, gy))


def test_wrong_arguments_are_refused(backend):
    x = backend.array(np.ones(3))
    for low, high in ((1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)):
        with pytest.raises(OptionError, match="limits"):
            backend.kernels.clamp(x, low, high, x)
        with pytest.raises(OptionError, match="limits"):
            backend.kernels.clamp_grad(x, x, low, high, x)
    with pytest.raises(ShapeError, match="y has"):
        backend.kernels.clamp_grad(x, backend.array(np.ones(4)), 0.0, 1.0, x)
