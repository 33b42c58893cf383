"""Kernels that make values of transposed Jacobians, on every backend."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import OptionError
from strategies import index_dtypes, normal, reals, seeds, sizes

SLOPES = {
    "given": lambda y: y,
    "relu": lambda y: np.where(y <= 0, 0, 1).astype(y.dtype),
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y * (1 - y),
}


@given(batch=sizes(0, 33), size=sizes(0, 67), function=st.sampled_from(sorted(SLOPES)), dtype=reals, seed=seeds)
def test_pointwise_slopes(backend, batch, size, function, dtype, seed):
    kept = normal(np.random.default_rng(seed), (batch, size), dtype)
    kept[:, ::5] = 0
    kept[:, 3::7] = np.nan
    out = backend.empty((size, batch), dtype)
    backend.kernels.pointwise_slopes(backend.array(kept), function, out)
    eps = np.finfo(dtype).eps
    np.testing.assert_allclose(backend.numpy(out), SLOPES[function](kept).T, rtol=4 * eps, atol=4 * eps)


@given(
    batch=sizes(0, 33), lines=sizes(0, 7), windows=sizes(1, 7), taps=sizes(1, 4), rows=sizes(1, 3),
    winners=st.sampled_from([np.uint8, np.int32]), dtype=reals, index=index_dtypes, seed=seeds,
)  # fmt: skip
def test_max_pool_values(backend, batch, lines, windows, taps, rows, winners, dtype, index, seed):
    rng = np.random.default_rng(seed)
    columns = windows + 5
    winner = rng.integers(0, rows * taps, (batch, columns)).astype(winners)
    window, offset = rng.integers(0, 6, lines), rng.integers(0, rows, lines) * taps
    out = backend.empty((lines * windows * taps, batch), dtype)
    backend.kernels.max_pool_values(
        backend.array(winner), backend.array(window, index), backend.array(offset, np.int32), windows, taps, out
    )
    won = winner[:, window[:, None] + np.arange(windows)]  # (B, lines, windows)
    expected = won[..., None] == (offset[:, None] + np.arange(taps))[:, None]
    np.testing.assert_array_equal(backend.numpy(out), expected.reshape(batch, lines * windows * taps).T)


def test_wrong_arguments_are_refused(backend):
    x, index = backend.array(np.ones((2, 3))), backend.array([0], np.int32)
    with pytest.raises(OptionError, match="Unknown function"):
        backend.kernels.pointwise_slopes(x, "gelu", backend.empty((3, 2), np.float64))
    winner = backend.array(np.ones((2, 3)), np.uint8)
    with pytest.raises(OptionError, match="at least one window"):
        backend.kernels.max_pool_values(winner, index, index, 0, 1, backend.empty((0, 2), np.float64))
