"""CIFAR-10 from its binary version: plain bytes, nothing that runs code when it is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import check_path, read_file
from sparsebp.data.images import ImageDataset

CLASSES = 10
RECORDS = 10_000
"""Records in a file."""
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
"""One byte for the class, then the pixels: red, green and blue, each row by row."""
FOLDER = "cifar-10-batches-bin"
TRAINING_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"


def load_cifar10(folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> tuple[ImageDataset, ImageDataset]:
    """Return the training set (50 000 images) and the test set (10 000) of CIFAR-10.

    Parameters
    ----------
    folder
        Where ``data_batch_1.bin`` … ``data_batch_5.bin`` and ``test_batch.bin`` are, or the folder around
        ``cifar-10-batches-bin``.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ImageDataset
        Images (3, 32, 32), normalised by the mean and standard deviation of the training set.

    Raises
    ------
    OptionError
        `folder` is no path.
    FileFormatError
        The folder or a file is not there, is too short or too long, or names a class above 9.
    """
    path = check_path("folder", folder)
    if os.path.isdir(path / FOLDER):
        path = path / FOLDER
    if not os.path.isdir(path):
        raise FileFormatError(
            f"The folder of CIFAR-10 is not there: {path}",
            expected=f"a folder with {TRAINING_FILES[0]} … {TEST_FILE}",
            got="no such folder",
            remedy="Unpack cifar-10-binary.tar.gz (the binary version) and pass the folder that it makes",
        )
    parts = [_read(path / name) for name in TRAINING_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    train = ImageDataset(images, labels, dtype=dtype)
    return train, ImageDataset(*_read(path / TEST_FILE), mean=train.mean, std=train.std, dtype=dtype)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (RECORDS, 3, 32, 32) and classes (RECORDS,) of one file, uint8."""
    content = np.frombuffer(
        read_file(
            path, f"{path} cannot be read", expected="a file of CIFAR-10's binary version",
            remedy="Unpack cifar-10-binary.tar.gz again; the Python version (pickles) is never read",
        ),
        np.uint8,
    )  # fmt: skip
    if len(content) != RECORDS * RECORD_BYTES:
        whole, rest = divmod(len(content), RECORD_BYTES)
        raise FileFormatError(
            f"{path} has the wrong size",
            expected=f"{RECORDS * RECORD_BYTES} bytes: {RECORDS} records of {RECORD_BYTES}",
            got=f"{len(content)} bytes: {whole} records and {rest} bytes",
            remedy="The file is truncated or another one (CIFAR-100 has records of 3074 bytes); unpack it again",
        )
    records = content.reshape(RECORDS, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max(initial=0) >= CLASSES:
        first = int(np.argmax(labels >= CLASSES))
        raise FileFormatError(
            f"{path} names a class that CIFAR-10 does not have",
            expected=f"classes from 0 to {CLASSES - 1}",
            got=f"{labels[first]} in record {first}",
            remedy="The file is damaged or another one; unpack it again",
        )
    return records[:, 1:].reshape(-1, *SHAPE), labels
