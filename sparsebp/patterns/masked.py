"""Patterns of pruned convolutions: the entries of the weights that are kept, found without those of the others.

At a sparsity of 97 % the pattern of all weights would take thirty times the memory, and the time to fill it.
"""

from __future__ import annotations

from math import prod

import numpy as np

from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.patterns.kron import Factor, kron
from sparsebp.patterns.validate import index_dtype


def packed_mask(mask: np.ndarray, weight_shape: tuple[int, ...]) -> bytes | None:
    """Return `mask` as bytes, eight weights in each, to tell masks apart by content; None if every weight is kept.

    Raises
    ------
    DTypeError, ShapeError
        It is not bool, or not of the weights' shape.
    """
    if not hasattr(mask, "dtype") or mask.dtype != np.dtype(bool):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise DTypeError(
            "mask has the wrong dtype", expected="an array of bool", got=got, remedy="Pass weight != 0, say"
        )
    if mask.shape != weight_shape:
        raise ShapeError(
            "mask has another shape than the weights", expected=weight_shape, got=mask.shape,
            remedy="Pass one truth value for every weight",
        )  # fmt: skip
    return None if mask.all() else np.packbits(mask).tobytes()


def unpacked_mask(packed: bytes, weight_shape: tuple[int, ...]) -> np.ndarray:
    """Return what `packed_mask` was made of."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=prod(weight_shape))
    return bits.astype(bool).reshape(weight_shape)


def count_masked(mask: np.ndarray, axes: list[Factor]) -> int:
    """Return the number of entries: every kept weight has one for each pair of positions that its tap joins."""
    taps = prod(mask.shape[2:])
    met, _ = _outputs_of(axes, taps)
    return int(np.count_nonzero(mask.reshape(-1, taps), axis=0) @ np.count_nonzero(met >= 0, axis=0))


def masked_entries(mask: np.ndarray, axes: list[Factor], in_channels: int, channels_last: bool) -> Factor:
    """Return the entries of a convolution's pattern for the weights that `mask` keeps; offsets are indices of weights.

    Parameters
    ----------
    mask
        Bool, (out_channels, in_channels // groups, *kernel).
    axes
        The pattern of every axis (`window_factors`), the offset of an entry its tap's share of the index of the weight.
    in_channels
        Channels of the input.
    channels_last
        Whether rows and columns count the channels last.

    Notes
    -----
    The kept weights are sorted as their columns are within a row. Then the entries are a selection from the table
    (input position, weight), those where the weight's tap meets an output; read row by row they are in CSR order, so no
    entry is sorted.
    """
    out_channels, from_group = mask.shape[:2]
    taps = prod(mask.shape[2:])
    met, n_outputs = _outputs_of(axes, taps)
    positions = len(met)
    output, channel, tap = np.nonzero(mask.reshape(out_channels, from_group, taps)[:, :, ::-1])
    tap = taps - 1 - tap  # the last tap belongs to the first output
    index = (output * from_group + channel) * taps + tap
    channel = output // (out_channels // (in_channels // from_group)) * from_group + channel
    if channels_last:
        order = np.lexsort((output, -tap, channel))
        parts = [order]
    else:
        order = np.lexsort((-tap, output, channel))
        parts = np.split(order, np.searchsorted(channel[order], np.arange(1, in_channels)))
    column_type = index_dtype(0, (positions * in_channels, n_outputs * out_channels))
    counts = np.zeros(positions * in_channels, np.int64)
    columns, weights = [np.zeros(0, column_type)], [np.zeros(0, np.int64)]
    step = out_channels if channels_last else 1
    first = output if channels_last else output * n_outputs
    for part in parts:
        if len(part) == 0:
            continue
        position = met[:, tap[part]]
        there = position >= 0
        columns.append((position * step + first[part])[there].astype(column_type))
        weights.append(np.broadcast_to(index[part], there.shape)[there])
        if channels_last:
            where, which = np.nonzero(there)
            counts += np.bincount(where * in_channels + channel[part][which], minlength=len(counts))
        else:
            start = channel[part[0]] * positions
            counts[start : start + positions] = there.sum(axis=1)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    return Factor(indptr, np.concatenate(columns), n_outputs * out_channels, np.concatenate(weights))


def _outputs_of(axes: list[Factor], taps: int) -> tuple[np.ndarray, int]:
    """Return which output each input position meets through each tap, (positions, taps), -1 for none; and how many."""
    one = Factor(np.array([0, 1]), np.zeros(1, np.int64), 1, np.zeros(1, np.int64))
    whole = kron([one, *axes], np.int64)  # also of no axes
    met = np.full((whole.n_rows, taps), -1)
    rows = np.repeat(np.arange(len(met)), np.diff(whole.indptr))
    met[rows, whole.offset] = whole.columns
    return met, whole.n_columns
