"""In-memory data sets whose batches are time-major, and the order in which an epoch visits them.

The order is a pure function of (seed, epoch): a training run that is killed and resumed anywhere in an epoch sees the
batches that it would have seen.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sparsebp.backend import float_dtype
from sparsebp.errors import DTypeError, OptionError, ShapeError


class Dataset(Protocol):
    """What `sparsebp.train.Trainer` asks of a data set."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the input, time-major ``(T, B, I)`` for sequences, and the target ``(B,)`` or ``(B, …)``."""


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
        An argument is negative.
    """
    for name, value in (("samples", samples), ("seed", seed), ("epoch", epoch)):
        if value < 0:
            raise OptionError(f"{name} is negative", expected="0 or more", got=value, remedy=f"Pass {name}=0 or more")
    return np.random.default_rng((seed, epoch)).permutation(samples)


class ArrayDataset:
    """Samples in one array, stored in any real dtype and converted batch by batch.

    Storing pixels or bits as uint8 takes a quarter of the memory of float32.

    Parameters
    ----------
    inputs
        Sequences (N, T, I), or vectors (N, I).
    targets
        Class numbers (N,), any integer dtype (kept as int64), or real values (N, …) in `dtype`.
    dtype
        float32 or float64: the dtype of the batches' inputs.
    scale, offset
        A batch is ``inputs * scale + offset``.

    Raises
    ------
    ShapeError
        `inputs` is not of two or three dimensions, or the lengths differ.
    DTypeError
        `dtype` is neither float32 nor float64, or real targets have another dtype.
    """

    def __init__(
        self,
        inputs: np.ndarray,
        targets: np.ndarray,
        *,
        dtype: Any = np.float32,
        scale: float = 1.0,
        offset: float = 0.0,
    ) -> None:
        self.dtype = float_dtype(dtype)
        if inputs.ndim not in (2, 3):
            raise ShapeError(
                "inputs has the wrong shape",
                expected="(N, T, I) for sequences or (N, I) for vectors",
                got=inputs.shape,
                remedy="Add the missing axis: a sequence of single values is (N, T, 1)",
            )
        if len(inputs) != len(targets):
            raise ShapeError(
                "inputs and targets have different lengths",
                expected=f"{len(inputs)} targets",
                got=len(targets),
                remedy="Pass one target for every sample",
            )
        if np.issubdtype(targets.dtype, np.integer):
            targets = targets.astype(np.int64)
        elif targets.dtype != self.dtype:
            raise DTypeError(
                "targets has the wrong dtype",
                expected=f"an integer dtype (class numbers) or {self.dtype}",
                got=targets.dtype,
                remedy="Convert it with .astype(...)",
            )
        self.inputs, self.targets = inputs, targets
        self.scale, self.offset = float(scale), float(offset)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.inputs)

    def batch(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the samples `indices` (B,): input (T, B, I) or (B, I) in `dtype`, C-contiguous; target (B, …)."""
        rows = self.inputs[indices]
        if rows.ndim == 3:
            rows = rows.transpose(1, 0, 2)
        x = np.ascontiguousarray(rows, dtype=self.dtype)
        if x is self.inputs or np.shares_memory(x, self.inputs):  # never scale the store itself in place
            x = x.copy()
        if self.scale != 1.0:
            x *= self.dtype.type(self.scale)
        if self.offset != 0.0:
            x += self.dtype.type(self.offset)
        return x, self.targets[indices]
