"""Banded products on every backend, against dense matrices."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.patterns.bands import Band
from strategies import normal, reals, seeds, sizes, tolerance


def band(rng, rows, columns, dtype):
    """Return a random matrix, dense and as a band; some rows are empty."""
    first = rng.integers(0, columns, rows)
    entries = np.minimum(rng.integers(0, 5, rows), columns - first)
    at = [(r, first[r] + k) for r in range(rows) for k in range(entries[r])]
    row, column = np.array(at, np.int64).reshape(-1, 2).T
    dense = np.zeros((rows, columns), dtype)
    dense[row, column] = normal(rng, len(row), dtype)
    return dense, Band.of(rows, row, column, dense[row, column])


@given(
    planes=sizes(0, 40), rows=sizes(0, 75), columns=sizes(1, 40), behind=st.sampled_from([0, 1, 2, 7, 8, 19]),
    dtype=reals, seed=seeds,
)  # fmt: skip
def test_it_is_the_dense_product(backend, planes, rows, columns, behind, dtype, seed):
    rng = np.random.default_rng(seed)
    dense, matrix = band(rng, rows, columns, dtype)
    x, out = normal(rng, (planes, columns, behind), dtype), backend.empty((planes, rows, behind), dtype)
    backend.kernels.band_product(*map(backend.array, (x, *matrix)), out)
    np.testing.assert_allclose(backend.numpy(out), np.einsum("rc,ncm->nrm", dense, x), **tolerance(dtype))


@pytest.mark.parametrize("behind", [1, 3, 8])
@pytest.mark.parametrize("planes", [3, 8, 21])
def test_what_is_not_finite_stays_in_the_rows_that_read_it(backend, planes, behind):
    rows, columns = np.arange(20), np.arange(20) + 1
    matrix = Band.of(20, np.repeat(rows, 2), np.stack([rows, columns], 1).ravel(), np.tile([1.0, 0.0], 20))
    for value in (np.nan, np.inf, -0.0):
        x, out = np.full((planes, 21, behind), -0.0), backend.empty((planes, 20, behind), np.float64)
        x[planes - 1, 9, behind - 1] = value
        backend.kernels.band_product(*map(backend.array, (x, *matrix)), out)
        with np.errstate(invalid="ignore"):
            want = x[:, :-1] * 1.0 + x[:, 1:] * 0.0
        got, numbers = backend.numpy(out), ~np.isnan(want)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(want[numbers]))


def test_rows_of_more_columns_than_scratch(backend):
    x, rows = normal(np.random.default_rng(0), (3, 5003, 1), np.float64), np.repeat([0, 2], [5000, 3])
    matrix = Band.of(3, rows, np.r_[:5000, 5000:5003], np.ones(5003))
    out = backend.empty((3, 3, 1), np.float64)
    backend.kernels.band_product(*map(backend.array, (x, *matrix)), out)
    np.testing.assert_allclose(backend.numpy(out)[:, 0], x[:, :5000].sum(1), rtol=1e-10)
    np.testing.assert_allclose(backend.numpy(out)[:, 1], 0)
    np.testing.assert_allclose(backend.numpy(out)[:, 2], x[:, 5000:].sum(1), rtol=1e-10)
