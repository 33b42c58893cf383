"""BPPSA Eq. 8: x_t ~ Bernoulli(0.05 + 0.1 c), c in 0 … 9."""

import inspect

import numpy as np
import pytest

from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.data import BitstreamDataset, WithPositions


def test_eq_8_probability_of_each_class():
    data = BitstreamDataset(203, 4_000, rng=5)
    bits = data.bits().astype(np.int64)
    for c in range(10):
        rows = bits[data.targets == c]
        p, n = 0.05 + 0.1 * c, rows.size
        assert abs(rows.sum() - n * p) < 5 * np.sqrt(n * p * (1 - p))  # five standard deviations of a binomial


def test_eq_8_every_position_and_no_memory_between_them():
    data = BitstreamDataset(37, 6_000, rng=1)
    rows = data.bits()[data.targets == 4].astype(np.float64)
    n = len(rows)
    assert np.abs(rows.mean(axis=0) - 0.45).max() < 5 * np.sqrt(0.45 * 0.55 / n)
    neighbours = ((rows[:, 1:] - 0.45) * (rows[:, :-1] - 0.45)).mean()
    assert abs(neighbours) < 5 * 0.45 * 0.55 / np.sqrt(n * 36)


def test_classes_are_uniform():
    counts = np.bincount(BitstreamDataset(1, 10_000, rng=2).targets, minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 1_000).max() < 5 * np.sqrt(10_000 * 0.1 * 0.9)


def test_the_papers_size_is_the_default():
    assert inspect.signature(BitstreamDataset).parameters["samples"].default == 32_000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("seq_len", "samples"), [(1, 1), (1, 9), (8, 3), (13, 1), (64, 17)])
def test_batches(seq_len, samples, dtype):
    data = BitstreamDataset(seq_len, samples, rng=0, dtype=dtype)
    indices = np.arange(samples)[::-1]
    x, target = data.batch(indices)
    assert x.shape == (seq_len, samples, 1)
    assert x.dtype == dtype
    assert x.flags.c_contiguous
    assert set(np.unique(x)) <= {0.0, 1.0}
    assert target.dtype == np.int64
    np.testing.assert_array_equal(target, data.targets[::-1])
    np.testing.assert_array_equal(x[:, :, 0].T, data.bits()[::-1])
    assert len(data) == samples


def test_a_function_of_the_seed():
    first, again, other = (BitstreamDataset(50, 40, rng=seed) for seed in (3, np.random.default_rng(3), 4))
    np.testing.assert_array_equal(first.packed, again.packed)
    np.testing.assert_array_equal(first.targets, again.targets)
    assert (first.packed != other.packed).any()


def test_the_way_it_is_generated_does_not_show(monkeypatch):
    whole = BitstreamDataset(11, 100, rng=3)
    monkeypatch.setattr("sparsebp.data.dataset._BITS_AT_ONCE", 23)
    np.testing.assert_array_equal(BitstreamDataset(11, 100, rng=3).packed, whole.packed)


def test_an_eighth_of_a_byte_a_bit():
    data = BitstreamDataset(1_000, 10)
    assert data.packed.nbytes == 10 * 125


@pytest.mark.parametrize(("seq_len", "samples"), [(0, 5), (5, 0), (-1, 5)])
def test_empty_is_refused(seq_len, samples):
    with pytest.raises(OptionError):
        BitstreamDataset(seq_len, samples)


def test_other_dtypes_are_refused():
    with pytest.raises(DTypeError):
        BitstreamDataset(3, 5, dtype=np.float16)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_positions_are_waves_beside_the_input(dtype):
    data = BitstreamDataset(12, 9, rng=0, dtype=dtype)
    placed, some = WithPositions(data, 2), np.array([3, 1])
    (x, target), (bits, classes) = placed.batch(some), data.batch(some)
    assert len(placed) == 9 and x.dtype == dtype and x.flags.c_contiguous
    np.testing.assert_array_equal(x[:, :, :1], bits)
    np.testing.assert_array_equal(target, classes)
    t = 2 * np.pi * np.arange(12) / 12
    waves = np.stack((np.sin(t), np.sin(2 * t), np.cos(t), np.cos(2 * t)), axis=1)
    np.testing.assert_allclose(x[:, :, 1:], np.stack((waves, waves), axis=1), atol=1e-6)
    with pytest.raises(OptionError, match="frequencies"):
        WithPositions(data, 0)
    data.batch = lambda indices: (bits, classes, np.array([12, 5]))  # type: ignore[method-assign]
    with pytest.raises(ShapeError, match="lengths"):
        placed.batch(some)
