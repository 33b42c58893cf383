"""The loss on every backend, against PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp import kernels
from strategies import normal, reals, seeds, sizes, tolerance
from thread_counts import assert_same_for_any_number_of_threads


def double(array):
    return torch.tensor(array.astype(np.float64))


@given(n=sizes(0, 33), classes=sizes(1, 33), scale=st.sampled_from([1.0, 30.0]), dtype=reals, seed=seeds)
def test_softmax_cross_entropy(backend, n, classes, scale, dtype, seed):
    rng = np.random.default_rng(seed)
    logits, target = normal(rng, (n, classes), dtype, scale), rng.integers(0, classes, n)
    losses, grad = backend.empty(n, dtype), backend.empty((n, classes), dtype)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array(target), losses, grad)
    x = double(logits).requires_grad_()
    expected = torch.nn.functional.cross_entropy(x, torch.tensor(target), reduction="none")
    expected.sum().backward()
    np.testing.assert_allclose(backend.numpy(losses), expected.detach(), **tolerance(dtype, 10))
    np.testing.assert_allclose(backend.numpy(grad), x.grad, **tolerance(dtype, 10))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_gives_a_loss_that_is_not_finite(backend, value):
    logits = np.zeros((3, 4), np.float32)
    logits[1, 2] = value
    losses, grad = backend.empty(3, np.float32), backend.empty((3, 4), np.float32)
    backend.kernels.softmax_cross_entropy(backend.array(logits), backend.array([0, 1, 2]), losses, grad)
    np.testing.assert_array_equal(np.isfinite(backend.numpy(losses)), [True, False, True])
    assert np.isfinite(backend.numpy(grad)[[0, 2]]).all()


def test_the_loss_is_bitwise_equal_on_the_host_for_every_number_of_threads():
    rng, k = np.random.default_rng(0), kernels.get(np)
    logits, target = normal(rng, (9001, 10), np.float32), rng.integers(0, 10, 9001)

    def run():
        losses, slope = np.empty(9001, np.float32), np.empty_like(logits)
        k.softmax_cross_entropy(logits, target, losses, slope)
        return losses, slope

    assert_same_for_any_number_of_threads(run)
