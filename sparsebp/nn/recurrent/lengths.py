"""Sequences of different lengths in one batch: padded at the end, or packed in segments without padding."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.locks import cached_property

# Rows of sequences of several lengths, as in a PackedSequence, in segments that the kernels take without copies.
#
# The rows of all samples at the first step come first, then those at the second, and so on, with samples in the order
# of falling length. Between two ends of sequences, steps have the same samples, so their rows are one contiguous array
# (steps, samples, features): a segment. There is no padding. A batch of one length is one segment.


class Segment(NamedTuple):
    """Steps with the same samples: the first ``batch`` ones, in the rows from ``first`` on."""

    first: int
    steps: int
    batch: int

    def of(self, rows: Array) -> Array:
        """Return its part of the rows (N, 1, n) of a run as (steps, samples, n): a view."""
        first, steps, batch = self
        return rows[first : first + steps * batch].reshape(steps, batch, rows.shape[2])


Segments = tuple[Segment, ...]


def cut(batch_sizes: np.ndarray | None, rows: int, batch: int) -> Segments:
    """Cut the rows of a batch into segments; `batch_sizes` (T,) int64 as in a PackedSequence, or None."""
    if batch_sizes is None:
        return (Segment(0, rows // batch, batch),) if rows else ()
    return _cut(batch_sizes.astype(np.int64, copy=False).tobytes(), rows, batch)


@lru_cache(maxsize=32)  # the forward and backward of one step ask for the same
def _cut(sizes: bytes, rows: int, batch: int) -> Segments:
    batch_sizes = np.frombuffer(sizes, np.int64)
    if batch_sizes.size == 0 and rows == batch == 0:
        return ()
    last = batch_sizes[-1] if batch_sizes.size else 0
    falls = batch_sizes[:-1] - batch_sizes[1:]
    if last < 1 or batch_sizes[0] != batch or (falls < 0).any() or batch_sizes.sum() != rows:
        raise OptionError("The batch sizes of the packed sequence do not fit its data",
                          expected=f"sizes that fall from {batch} to 1 or more, {rows} in all",
                          got=np.array2string(batch_sizes, threshold=8))  # fmt: skip
    begins = [0, *(np.flatnonzero(falls) + 1).tolist()]  # the first step of each segment
    segments, first = [], 0
    for begin, end, size in zip(begins, [*begins[1:], batch_sizes.size], batch_sizes[begins].tolist(), strict=True):
        segments.append(Segment(first, end - begin, size))
        first += (end - begin) * size
    return tuple(segments)


def reversed_rows(batch_sizes: np.ndarray | None, rows: int, batch: int) -> np.ndarray:
    """Return the row that replaces each row when every sample is reversed; its own inverse."""
    if batch_sizes is None:
        steps = rows // batch if rows else 0
        return np.arange(rows).reshape(steps, batch)[::-1].reshape(-1)
    firsts, step, sample, lengths = _places(batch_sizes)
    return firsts[lengths[sample] - 1 - step] + sample


def _places(batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return each step's first row, each row's step and sample, and each sample's length."""
    firsts = np.cumsum(batch_sizes) - batch_sizes
    step = np.repeat(np.arange(batch_sizes.size), batch_sizes)
    batch = batch_sizes[0] if batch_sizes.size else 0
    lengths = batch_sizes.size - np.searchsorted(batch_sizes[::-1], np.arange(batch), side="right")
    return firsts, step, np.arange(step.size) - firsts[step], lengths


# The lengths of a padded batch: its rows in segments, masks, and time reversal sample by sample.


class Lengths:
    """The valid lengths of a padded batch, on the device of its data."""

    # values: (B,) int64.
    # valid: (T, B, 1) bool: true before a sample's end.
    # samples: `arange(B)`.
    # padding: steps past the samples' ends, in all.
    # reversed: (T, B): for each step the step that takes its place when every sample is reversed within its length.

    def __init__(self, values: np.ndarray, steps: int, xp: ModuleType) -> None:
        self.padding = steps * values.size - int(values.sum())
        self.values = xp.asarray(values)
        self.samples = xp.arange(values.size)
        time = xp.arange(steps)[:, None]
        self.valid = (time < self.values)[:, :, None]
        self.reversed = xp.where(time < self.values, self.values - 1 - time, time)

    def mask(self, array: Array) -> Array:
        """Return a copy of `array` (T, B, n) with zeros (also for NaN) past every sample's end."""
        return backend.namespace(array).where(self.valid, array, array.dtype.type(0))

    def fill(self, array: Array, value: float) -> None:
        """Write `value` into `array` (T, B, n) past every sample's end."""
        backend.namespace(array).copyto(array, array.dtype.type(value), where=~self.valid)

    def ends(self, states: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return arrays of the state (T + 1, B, n), the initial one first, after each sample's last valid step."""
        return tuple([array[self.values, self.samples] for array in states])

    def reverse(self, array: Array) -> Array:
        """Return `array` (T, B, n) with every sample's valid steps in reverse order; its own inverse."""
        return array[self.reversed, self.samples]

    @cached_property
    def packed(self) -> Packed:
        """Where the rows stand in a packed sequence, on the host."""
        order = np.argsort(-self.values, kind="stable")
        sizes = (np.arange(len(self.valid))[:, None] < self.values).sum(1)
        sizes = sizes[sizes > 0]
        _, step, sample, lengths = _places(sizes)
        batch, samples = self.values.size, order[sample]
        rows = step * batch + samples, (lengths[sample] - 1 - step) * batch + samples
        return Packed(cut(sizes, step.size, batch), order, rows, np.argsort(order), len(self.valid))


class Packed(NamedTuple):
    """Segments of a padded batch, and where their samples and rows come from."""

    segments: Segments
    order: np.ndarray  # (B,): the samples in order of falling length
    rows: tuple[np.ndarray, np.ndarray]  # (N,) each: rows among the T · B padded ones, forward and reversed in time

    back: np.ndarray  # (B,): where each sample stands in that order
    steps: int  # T

    def take(self, array: Array, reverse: int) -> Array:
        """Return the valid rows (N, 1, n) of a padded array (T, B, n), in the order of a run."""
        return array.reshape(-1, array.shape[2]).take(self.rows[reverse], 0)[:, None]

    def spread(self, rows: Array, reverse: int) -> Array:
        """Return rows (N, 1, n) in a padded array (T, B, n) with zeros past every sample's end."""
        padded = np.zeros((self.steps * self.order.size, rows.shape[2]), rows.dtype)
        padded[self.rows[reverse]] = rows[:, 0]
        return padded.reshape(self.steps, self.order.size, -1)


def parse_lengths(lengths: Any, steps: int, batch: int, xp: ModuleType, least: int = 1) -> Lengths | None:
    """Check `lengths`, each at least `least`, against an input of shape (steps, batch, …)."""
    # Returns Lengths or None: None if no length was given or all are full.
    if lengths is None:
        return None
    try:
        values = backend.to_host(backend.asarray("lengths", lengths))
    except ValueError:  # a ragged list
        values = np.asarray(None)
    if values.dtype.kind not in "iu":
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype)
    if values.shape != (batch,):
        raise ShapeError("lengths has the wrong shape", expected=(batch,), got=values.shape)
    if values.min() < least or values.max() > steps:
        remedy = "Leave empty sequences out, and pad x to the longest one" if least else "Pad x to the longest sequence"
        raise OptionError("lengths is out of range", expected=f"{least} to {steps} (the number of steps of x)",
                          got=f"{values.min()} to {values.max()}", remedy=remedy)  # fmt: skip
    if values.min() == steps:
        return None
    return Lengths(values.astype(np.int64), steps, xp)


def reverse_time(array: Array, lengths: Lengths | None) -> Array:
    """Return `array` (T, B, n) reversed in time, C-contiguous; with `lengths`, each sample within its own length."""
    if lengths is not None:
        return lengths.reverse(array)
    return backend.namespace(array).ascontiguousarray(array[::-1])
