"""The kernels of linear recurrences on every backend; `tests/scan/test_recurrence.py` has all forms, and gradients."""

import numpy as np
import pytest

from sparsebp.core.errors import LayoutError, ShapeError


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("reverse", [False, True])
def test_equal_terms_are_a_geometric_series(backend, reverse, dtype):
    """With a = 1/2 and b = 1: h = 2 - 2⁻ᵗ, and the gradient at b of the sum of all h is the same from the other end."""
    steps, shape = 9, (9, 2, 35)
    a, b, h0 = (
        backend.array(np.full((1, 1, 1), 0.5, dtype)),
        backend.array(np.ones(shape, dtype)),
        backend.zeros((2, 35), dtype),
    )
    h, gb, ga, gh0 = (backend.empty(each, dtype) for each in (shape, shape, (1, 2, 35), (2, 35)))
    backend.kernels.linear_recurrence(a, b, h0, None, False, reverse, h)
    backend.kernels.linear_recurrence_grad(a, h, b, h0, None, False, reverse, ga, gb, gh0)
    series = 2 - 0.5 ** np.arange(steps)
    one, other = (series[::-1], series) if reverse else (series, series[::-1])
    np.testing.assert_array_equal(backend.numpy(h), np.broadcast_to(one[:, None, None], shape))
    np.testing.assert_array_equal(backend.numpy(gb), np.broadcast_to(other[:, None, None], shape))
    np.testing.assert_allclose(backend.numpy(ga), (series[:-1] * series[-2::-1]).sum(), rtol=1e-6)
    np.testing.assert_array_equal(backend.numpy(gh0), series[-1] / 2)


def test_factors_and_pairs_that_do_not_fit_are_refused(backend):
    b, h0 = backend.zeros((5, 3, 7), np.float64), backend.zeros((3, 7), np.float64)
    for shape in ((4, 3, 7), (5, 2, 7), (5, 3, 2), (0, 3, 7)):
        with pytest.raises(ShapeError, match="a does not fit"):
            backend.kernels.linear_recurrence(backend.zeros(shape, np.float64), b, h0, None, False, False, b)
    with pytest.raises(ShapeError, match="Pairs"):
        backend.kernels.linear_recurrence(b, b, h0, None, True, False, b)
    with pytest.raises(LayoutError):
        backend.kernels.linear_recurrence(b, b, backend.zeros((3, 14), np.float64)[:, ::2], None, False, False, b)
