"""Batches are time-major, and the order of an epoch is a function of (seed, epoch)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.data import ArrayDataset, epoch_order
from sparsebp.errors import DTypeError, OptionError, ShapeError


@given(samples=st.integers(0, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_epoch_order_is_a_permutation_and_repeats(samples, seed, epoch):
    order = epoch_order(samples, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(samples))
    np.testing.assert_array_equal(order, epoch_order(samples, seed=seed, epoch=epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(30, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16


@pytest.mark.parametrize("bad", [{"samples": -1}, {"seed": -1}, {"epoch": -1}])
def test_negative_is_refused(bad):
    options = {"samples": 3, "seed": 0, "epoch": 0} | bad
    with pytest.raises(OptionError):
        epoch_order(options.pop("samples"), **options)


@pytest.mark.parametrize("store", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(5, 3, 2), (1, 1, 1), (7, 4), (3, 5, 1)])
def test_batches(store, dtype, shape):
    inputs = np.arange(np.prod(shape)).reshape(shape).astype(store)
    kept = inputs.copy()
    data = ArrayDataset(inputs, np.arange(shape[0]), dtype=dtype, scale=0.5, offset=1)
    for indices in (np.arange(shape[0]), np.array([0]), np.array([], np.int64)):
        x, target = data.batch(indices)
        expected = inputs[indices] * 0.5 + 1
        np.testing.assert_array_equal(x, expected.swapaxes(0, 1) if len(shape) == 3 else expected)
        assert x.dtype == dtype
        assert x.flags.c_contiguous
        np.testing.assert_array_equal(target, indices)
    np.testing.assert_array_equal(inputs, kept)


def test_real_targets():
    x, target = ArrayDataset(np.zeros((4, 2)), np.ones((4, 3), np.float32)).batch(np.array([1, 2]))
    assert x.shape == (2, 2)
    assert target.shape == (2, 3)
    assert target.dtype == np.float32


def test_bad_input():
    with pytest.raises(ShapeError, match="N, T, 1"):
        ArrayDataset(np.zeros(4), np.zeros(4, int))
    with pytest.raises(ShapeError, match="5 targets"):
        ArrayDataset(np.zeros((5, 2)), np.zeros(4, int))
    with pytest.raises(DTypeError):
        ArrayDataset(np.zeros((5, 2)), np.zeros(5, np.float64))
    with pytest.raises(DTypeError):
        ArrayDataset(np.zeros((5, 2)), np.zeros(5, int), dtype=np.int32)
