"""In-memory data sets whose batches are time-major, and the order in which an epoch visits them.

The order is a pure function of (seed, epoch): a training run that is killed and resumed anywhere in an epoch sees the
batches that it would have seen.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sparsebp.backend import FLOAT_DTYPES, float_dtype, namespace
from sparsebp.core.arguments import check_flag, check_integer, check_number, shown
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.types import Array


class Dataset(Protocol):
    """What `sparsebp.train.Trainer` asks of a data set."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: np.ndarray) -> tuple[Array, Array] | tuple[Array, Array, Any]:
        """Return the input, in the layout of the model, and the target ``(B,)`` or ``(B, …)``.

        Sequences of different lengths, padded at the end, have these, ``(B,)``, as the third; the model's forward gets
        them. A data set whose batches do not depend on the model says so with ``reads_model = False`` in its class:
        updates that are put off (``Trainer(fusion="forward")``) then need not be done before each.
        """


def epoch_order(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the permutation of ``range(samples)`` that epoch number `epoch` visits.

    Parameters
    ----------
    samples
        Number of samples.
    seed, epoch
        Non-negative integers; the permutation depends on nothing else.

    Returns
    -------
    numpy.ndarray
        Shape (samples,), int64.

    Raises
    ------
    OptionError
        An argument is negative, or no integer.
    """
    for name, value in (("samples", samples), ("seed", seed), ("epoch", epoch)):
        check_integer(name, value, 0)
    return np.random.default_rng((seed, epoch)).permutation(samples)


def check_real(name: str, array: Any) -> None:
    """Refuse what is no array of truth values, integers or real numbers, NumPy's or CuPy's.

    Raises
    ------
    DTypeError
        It is something else.
    DeviceError
        It is a masked array, or a ``numpy.matrix``.
    """
    is_array = isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__")
    if not is_array or getattr(array.dtype, "kind", "?") not in "biuf":
        raise DTypeError(
            f"{name} is no array of real numbers", expected="an array of integers, floats or truth values",
            got=f"dtype {array.dtype}" if is_array else type(array).__name__,
            remedy="Convert it; of complex numbers pass real and imaginary parts as features",
        )  # fmt: skip
    if isinstance(array, np.ndarray):
        namespace(**{name: array})


def class_numbers(name: str, labels: np.ndarray) -> np.ndarray:
    """Return class numbers of any integer dtype as int64, or raise `OptionError` if that cannot hold them."""
    if labels.size and int(labels.max()) > np.iinfo(np.int64).max:
        raise OptionError(f"{name} has a class number that is too large", expected="numbers below 2**63",
                          got=int(labels.max()), remedy="Number the classes from 0")  # fmt: skip
    return labels.astype(np.int64)


class ArrayDataset:
    """Samples in one array, stored in any real dtype and converted batch by batch.

    Storing pixels or bits as uint8 takes a quarter of the memory of float32.

    Parameters
    ----------
    inputs
        Sequences (N, T, I), or vectors (N, I); with `batch_first` also images (N, C, H, W) and the like. Arrays of
        NumPy or CuPy.
    targets
        Class numbers (N,), any integer dtype (kept as int64), or real values (N, …) in `dtype` (in float32 or float64
        beside inputs that are int64).
    dtype
        float32 or float64: the dtype of the batches' inputs. int64 for inputs that are numbers of words, (N, T).
    scale, offset
        A batch is ``inputs * scale + offset``; not of int64.
    lengths
        Of sequences that are padded at the end: how many steps of each are valid, (N,); None: all.
    batch_first
        Whether batches of sequences are (B, T, I), as for layers with ``batch_first=True``, and not (T, B, I).

    Raises
    ------
    ShapeError
        `inputs` has another number of dimensions, or the numbers of samples differ.
    DTypeError
        `dtype` is another one, or int64 for inputs that are no integers; real targets have another dtype; or something
        is no array of real numbers (complex ones are not: nothing is dropped silently).
    OptionError
        A class number is beyond int64, a length is out of range, `scale` or `offset` is no finite number, or
        `batch_first` no truth value.
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
        check_real("inputs", inputs)
        self.dtype = _input_dtype(dtype, inputs, scale, offset)
        self.batch_first = check_flag("batch_first", batch_first)
        check_real("targets", targets)
        if inputs.ndim not in (2, 3) and not (batch_first and inputs.ndim > 3):
            raise ShapeError(
                "inputs has the wrong shape",
                expected="(N, T, I) for sequences or (N, I) for vectors",
                got=inputs.shape,
                remedy="Add the missing axis: a sequence of single values is (N, T, 1)",
            )
        if targets.shape[:1] != inputs.shape[:1]:
            raise ShapeError(
                "inputs and targets have different lengths",
                expected=f"{len(inputs)} targets",
                got=targets.shape,
                remedy="Pass one target for every sample",
            )
        if targets.dtype.kind in "iu":
            targets = class_numbers("targets", targets)
        elif targets.dtype not in (FLOAT_DTYPES if self.dtype.kind == "i" else (self.dtype,)):
            real = "float32 or float64" if self.dtype.kind == "i" else self.dtype
            raise DTypeError(
                "targets has the wrong dtype",
                expected=f"an integer dtype (class numbers) or {real}",
                got=targets.dtype,
                remedy="Convert it with .astype(...)",
            )
        self.inputs, self.targets = inputs, targets
        self.scale, self.offset = check_number("scale", scale), check_number("offset", offset)
        self.lengths = None if lengths is None else _lengths(lengths, inputs.shape, words=self.dtype.kind == "i")

    @property
    def sample_axis(self) -> int:
        """The axis of a batch's input on which the samples are."""
        return 1 if self.inputs.ndim == 3 and not self.batch_first else 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[Array, Array] | tuple[Array, Array, np.ndarray]:
        """Return the samples `indices` (B,), a copy: input, C-contiguous, in `dtype`; target (B, …); lengths if any.

        The input is (T, B, I) of sequences, unless `batch_first`, and else (B, …).

        Raises
        ------
        ShapeError
            `indices` is not one-dimensional.
        OptionError
            They are no integers, or of no sample.
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
    """Return the dtype of a data set's batches; numbers of words stay what they are."""
    try:
        numbers = np.dtype(dtype) == np.int64
    except TypeError:  # no dtype at all
        numbers = False
    if not numbers:
        return float_dtype(dtype)
    if inputs.dtype.kind not in "iu":
        raise DTypeError("inputs has the wrong dtype", expected="integers (numbers of words)", got=inputs.dtype,
                         remedy="Convert it with .astype(int)")  # fmt: skip
    if (scale, offset) != (1.0, 0.0):
        raise OptionError("Numbers of words cannot be scaled", expected="scale=1 and offset=0",
                          got=f"scale={shown(scale)}, offset={shown(offset)}", remedy="Leave both out")  # fmt: skip
    return np.dtype(np.int64)


def _rows(array: Array, indices: np.ndarray) -> Array:
    """Return some rows, in an array of their own."""
    return array[namespace(array).asarray(indices)]


def check_indices(indices: Any, samples: int) -> np.ndarray:
    """Return the indices of a batch's samples as an array; negative ones count from the end.

    Raises
    ------
    ShapeError
        They are not one-dimensional.
    OptionError
        They are no integers, or of no sample.
    """
    try:
        found = np.asarray(indices)
    except (TypeError, ValueError):  # lists of different lengths
        found = np.asarray(None)
    if found.size == 0 and isinstance(indices, (list, tuple)):
        found = found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise OptionError("indices are no integers", expected=f"integers below {samples}", got=shown(indices),
                          remedy="Pass the numbers of samples")  # fmt: skip
    if found.ndim != 1:
        raise ShapeError("indices has the wrong shape", expected="(B,)", got=found.shape,
                         remedy="Pass a list of the numbers of samples")  # fmt: skip
    if found.size and not (-samples <= int(found.min()) and int(found.max()) < samples):
        raise OptionError("indices are of no sample", expected=f"numbers below {samples}",
                          got=f"{found.min()} to {found.max()}", remedy="Count samples from 0")  # fmt: skip
    return found


def _lengths(lengths: Any, shape: tuple[int, ...], *, words: bool) -> np.ndarray:
    if isinstance(lengths, np.ndarray):
        namespace(lengths=lengths)
    values = np.asarray(lengths)
    if values.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype,
                         remedy="Count the valid steps of each sample")  # fmt: skip
    if len(shape) != (2 if words else 3) or values.shape != shape[:1]:
        raise ShapeError("lengths has the wrong shape", expected=f"({shape[0]},), sequences (N, T, I), words (N, T)",
                         got=f"{values.shape} for inputs of {shape}",
                         remedy="Pass one length for each sequence")  # fmt: skip
    if values.size and not 1 <= values.min() <= values.max() <= shape[1]:
        raise OptionError("lengths is out of range", expected=f"1 to {shape[1]} steps",
                          got=f"{values.min()} to {values.max()}", remedy="Leave empty sequences out")  # fmt: skip
    return values.astype(np.int64)
