"""Rows of sequences of several lengths, as a PackedSequence has them, in stretches that the kernels take as they lie.

The rows of all samples at the first step come first, then those at the second, and so on; samples are in the order of
falling length. Between two ends of sequences, steps have the same samples, so their rows are one contiguous array
(steps, samples, features): a stretch. No padding is computed, and none is stored. A batch of one length is one stretch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparsebp.core.errors import OptionError


class Stretch(NamedTuple):
    """Steps with the same samples: the first ``batch`` ones, in the rows from ``first`` on."""

    first: int
    steps: int
    batch: int

    @property
    def rows(self) -> slice:
        """All of its rows."""
        return slice(self.first, self.first + self.steps * self.batch)


def stretches(batch_sizes: np.ndarray | None, rows: int, batch: int) -> Sequence[Stretch]:
    """Cut the rows of a batch into stretches; `batch_sizes` (T,) int64 as a PackedSequence has them, or None.

    Raises
    ------
    OptionError
        The sizes are no falling sequence from `batch` down to 1 at least, or are not of so many rows in all.
    """
    if batch_sizes is None:
        return (Stretch(0, rows // batch, batch),) if rows else ()
    return _cut(batch_sizes.astype(np.int64, copy=False).tobytes(), rows, batch)


@lru_cache(maxsize=32)  # of one step, forward and back ask for the same
def _cut(sizes: bytes, rows: int, batch: int) -> tuple[Stretch, ...]:
    batch_sizes = np.frombuffer(sizes, np.int64)
    if batch_sizes.size == 0 and rows == batch == 0:
        return ()
    last = batch_sizes[-1] if batch_sizes.size else 0
    falls = batch_sizes[:-1] - batch_sizes[1:]
    if last < 1 or batch_sizes[0] != batch or (falls < 0).any() or batch_sizes.sum() != rows:
        raise OptionError(
            "The batch sizes of the packed sequence do not fit its data",
            expected=f"sizes that fall from {batch} to 1 or more, {rows} in all",
            got=np.array2string(batch_sizes, threshold=8),
            remedy="Make it with torch.nn.utils.rnn.pack_sequence or pack_padded_sequence",
        )
    begins = [0, *(np.flatnonzero(falls) + 1).tolist()]  # the first step of each stretch
    found, first = [], 0
    for begin, end, size in zip(begins, [*begins[1:], batch_sizes.size], batch_sizes[begins].tolist(), strict=True):
        found.append(Stretch(first, end - begin, size))
        first += (end - begin) * size
    return tuple(found)


def reversed_rows(batch_sizes: np.ndarray | None, rows: int, batch: int) -> np.ndarray:
    """Return for each row the one that takes its place when every sample is reversed in time; its own inverse."""
    if batch_sizes is None:
        steps = rows // batch if rows else 0
        return np.arange(rows).reshape(steps, batch)[::-1].reshape(-1)
    firsts = np.cumsum(batch_sizes) - batch_sizes
    step = np.repeat(np.arange(batch_sizes.size), batch_sizes)
    sample = np.arange(rows) - firsts[step]
    lengths = batch_sizes.size - np.searchsorted(batch_sizes[::-1], np.arange(batch), side="right")
    return firsts[lengths[sample] - 1 - step] + sample
