"""Sliding windows and borders: kernel, stride, padding and dilation over any axes, and the patterns they make.

Patterns and layers share the meaning of these options, which is defined here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from math import prod
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard

import numpy as np

from sparsebp.core.check import check_flag, check_integer, shown
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import KEPT, SparsityPattern, checked_sizes, index_dtype, with_room

Lengths: TypeAlias = int | Sequence[int]
"""One integer for all axes, or one per axis."""

Padding: TypeAlias = int | Sequence[int] | Sequence[tuple[int, int]] | str
"""One integer, one per axis, a pair (before, after) per axis, ``"same"`` or ``"valid"``."""

Layout = Literal["chw", "hwc"]
"""Order of a flattened sample: channels first (as torch.nn has it) or last."""


@dataclass(frozen=True)
class Windows:
    """The windows of a convolution; hashable. Every field has one entry per axis."""

    kernel: tuple[int, ...]  # taps of a window
    stride: tuple[int, ...]  # distance between windows
    padding: tuple[tuple[int, int], ...]  # zeros (before, after) the input; negative: elements left out
    dilation: tuple[int, ...]  # distance between the taps of a window

    @classmethod
    def of(
        cls, ndim: int, kernel_size: Lengths, stride: Lengths = 1, padding: Padding = 0, dilation: Lengths = 1
    ) -> Windows:
        """Read the options of torch.nn's convolutions for `ndim` axes; padding may differ at both ends."""
        # `"same"` keeps the length for stride 1; an odd padding has its larger part at the end, as in PyTorch.
        kernel = lengths("kernel_size", kernel_size, ndim, 1)
        strides = lengths("stride", stride, ndim, 1)
        dilations = lengths("dilation", dilation, ndim, 1)
        return cls(kernel, strides, _pairs(padding, kernel, strides, dilations), dilations)

    @classmethod
    def transposed(
        cls, ndim: int, kernel_size: Lengths, stride: Lengths = 1, padding: Padding = 0, output_padding: Lengths = 0,
        dilation: Lengths = 1,
    ) -> Windows:  # fmt: skip
        """Read the options of torch.nn's transposed convolutions; the windows slide over their output."""
        # `output_padding` elements at the end of the output are in no window unless the padding covers them, so they
        # reduce the padding there, which may become negative.
        windows = cls.of(ndim, kernel_size, stride, padding, dilation)
        extra = lengths("output_padding", output_padding, ndim, 0)
        if any(n >= max(s, d) for n, s, d in zip(extra, windows.stride, windows.dilation, strict=True)):
            raise OptionError("output_padding is too large", got=extra,
                              expected=f"less than stride {windows.stride} or dilation {windows.dilation}",
                              remedy="It only selects between outputs of one input length")  # fmt: skip
        ends = zip(windows.padding, extra, strict=True)
        return replace(windows, padding=tuple((before, after - n) for (before, after), n in ends))

    @cached_property
    def before(self) -> tuple[int, ...]:
        """The padding before the input."""
        return tuple(before for before, _ in self.padding)

    @cached_property
    def reach(self) -> tuple[int, ...]:
        """Span of a window on the padded input: ``dilation * (kernel - 1) + 1``."""
        return tuple(d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True))

    def padded_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the padded input."""
        return tuple(n + before + after for n, (before, after) in zip(input_size, self.padding, strict=True))

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of windows on each axis: ``(padded - reach) // stride + 1``."""
        return _output_size(self, tuple(input_size))

    def input_size(self, output_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the input that these windows cover exactly: the output of a transposed convolution."""
        axes = zip(output_size, self.stride, self.reach, self.padding, strict=True)
        sizes = tuple((n - 1) * s + r - before - after for n, s, r, (before, after) in axes)
        if min(output_size, default=1) < 1 or min(sizes, default=1) < 1:
            raise ShapeError("The transposed convolution has no output",
                             expected="at least 1 element on every axis of input and output",
                             got=f"input {tuple(output_size)}, output {sizes}")  # fmt: skip
        return sizes


@dataclass(frozen=True)
class PoolWindows(Windows):
    """The windows of a pooling layer."""

    ceil_mode: bool = False  # whether the last window may extend past the padded input

    @classmethod
    def of(
        cls, ndim: int, kernel_size: Lengths, stride: Lengths | None = None, padding: Any = 0, dilation: Lengths = 1,
        ceil_mode: bool = False,
    ) -> PoolWindows:  # fmt: skip
        """Read the options of torch.nn's pooling layers; `stride` None means windows that do not overlap."""
        kernel = lengths("kernel_size", kernel_size, ndim, 1)
        strides = lengths("stride", kernel_size if stride is None else stride, ndim, 1)
        pads, dilations = lengths("padding", padding, ndim, 0), lengths("dilation", dilation, ndim, 1)
        windows = cls(kernel, strides, tuple((pad, pad) for pad in pads), dilations, check_flag("ceil_mode", ceil_mode))
        for pad, length in zip(pads, kernel, strict=True):
            if pad > length // 2:
                raise OptionError("The padding is more than half of the kernel", got=pad,
                                  expected=f"padding <= {length // 2} for a kernel of {length}")  # fmt: skip
        return windows

    def output_size(self, input_size: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of windows along each axis (torch.nn.MaxPool2d, "Shape")."""
        return _pooled_size(self, tuple(input_size))


LONGEST = 2**48
"""Longest axis: kernels add and multiply such lengths in 64 bits."""


def lengths(name: str, value: Lengths, ndim: int, least: int) -> tuple[int, ...]:
    """Return `value` as `ndim` integers from `least` to `LONGEST`."""
    try:
        given = list(value) if _is_sequence(value) else [value] * ndim
        result = tuple(check_integer(name, n, least, LONGEST) for n in given)
    except OptionError:
        result = ()
    if len(result) != ndim:
        raise OptionError(f"{name} does not fit {ndim} axes",
                          expected=f"an integer or {ndim} integers, from {least} to {LONGEST}",
                          got=shown(value))  # fmt: skip
    return result


def check_channels(in_channels: int, out_channels: int, groups: int) -> tuple[int, int, int]:
    """Return the numbers, checked: integers of 1 or more, and `groups` divides both channels."""
    named = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
    in_channels, out_channels, groups = (check_integer(name, value, 1) for name, value in named.items())
    if in_channels % groups or out_channels % groups:
        raise OptionError("The groups do not divide the channels",
                          expected="in_channels and out_channels that are positive multiples of groups",
                          got=f"in_channels={in_channels}, out_channels={out_channels}, groups={groups}")  # fmt: skip
    return in_channels, out_channels, groups


def _pairs(
    padding: Padding, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    ndim = len(kernel)
    if isinstance(padding, str) and padding == "valid":
        return ((0, 0),) * ndim
    if isinstance(padding, str) and padding == "same":
        if max(stride, default=1) > 1:
            raise OptionError('padding="same" needs stride 1', expected="stride 1 on every axis", got=stride)
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    if _is_sequence(padding) and len(padding) == ndim and all(_is_sequence(pair) for pair in padding):
        before_after = [lengths("a pair of padding", pair, 2, 0) for pair in padding]
        return tuple((before, after) for before, after in before_after)
    if isinstance(padding, str):
        raise OptionError(
            "Unknown padding", expected="integers, pairs (before, after), 'same' or 'valid'", got=repr(padding)
        )
    return tuple((n, n) for n in lengths("padding", padding, ndim, 0))  # type: ignore[arg-type]


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


@lru_cache(maxsize=1024)
def _pooled_size(windows: PoolWindows, input_size: tuple[int, ...]) -> tuple[int, ...]:
    out = []
    for length, reach, stride, pad, step in zip(
        input_size, windows.reach, windows.stride, windows.before, windows.dilation, strict=True
    ):
        room = length + 2 * pad - reach
        count = (room + (stride - 1 if windows.ceil_mode else 0)) // stride + 1
        if windows.ceil_mode and (count - 1) * stride >= length + pad:
            count -= 1  # the last window must begin in the input or in the padding before it
        if length < 1 or count < 1:
            raise ShapeError("The kernel is larger than the padded input", got=f"{length} + 2 * {pad}",
                             expected=f"at least {reach} elements with the padding")  # fmt: skip
        steps_over = ((start - pad) % step >= length for start in range(0, min(count * stride, pad), stride))
        if any(steps_over):
            raise ShapeError("The dilation steps over the whole input, so that a window holds padding only",
                             expected=f"an input of at least {step} elements", got=length)  # fmt: skip
        out.append(count)
    return tuple(out)


@lru_cache(maxsize=1024)  # layers ask at every call, and it takes as long as a small kernel
def _output_size(windows: Windows, input_size: tuple[int, ...]) -> tuple[int, ...]:
    padded = windows.padded_size(input_size)
    if any(r > n for r, n in zip(windows.reach, padded, strict=True)):
        raise ShapeError("The kernel is larger than the padded input", expected=f"at least {windows.reach} elements "
                         f"with padding, for kernel {windows.kernel} and dilation {windows.dilation}",
                         got=f"{padded}: input {input_size} with padding {windows.padding}")  # fmt: skip
    return tuple((n - r) // s + 1 for n, r, s in zip(padded, windows.reach, windows.stride, strict=True))


# Kronecker products of small patterns, channels and axes, whose entries each carry an index: of a convolution's
# weight, or of an offset in a pooling window. The index is the sum of the factors' offsets.


class Factor(NamedTuple):
    """One factor of a Kronecker product: a CSR pattern, and what each entry adds to the index."""

    indptr: np.ndarray
    columns: np.ndarray
    n_columns: int
    offset: np.ndarray

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.indptr) - 1

    def transposed(self) -> Factor:
        """Return the transposed pattern with the entries' offsets."""
        order = np.argsort(self.columns, kind="stable")
        rows = np.repeat(np.arange(self.n_rows), np.diff(self.indptr))
        indptr = np.concatenate(([0], np.cumsum(np.bincount(self.columns, minlength=self.n_columns))))
        return Factor(indptr, rows[order], self.n_rows, self.offset[order])


def window_factors(sizes: tuple[int, ...], windows: Windows) -> list[Factor]:
    """Return the factor of every axis: input i is in window o where ``i + before == o * stride + tap * dilation``."""
    factors = []
    for axis, (size, count) in enumerate(zip(sizes, windows.output_size(sizes), strict=True)):
        taps = np.arange(windows.kernel[axis])[::-1]  # the last tap belongs to the first output
        start = np.arange(size)[:, None] + windows.before[axis] - taps * windows.dilation[axis]
        output, rest = np.divmod(start, windows.stride[axis])
        met = (rest == 0) & (output >= 0) & (output < count)
        indptr = np.concatenate(([0], np.cumsum(met.sum(axis=1))))
        offset = np.broadcast_to(taps, met.shape)[met] * prod(windows.kernel[axis + 1 :])
        factors.append(Factor(indptr, output[met], count, offset))
    return factors


def kron(factors: Sequence[Factor], offset_type: np.dtype | type[np.integer]) -> Factor:
    """Return the Kronecker product, its columns in a pattern's index type; offsets add up."""
    shape = (prod(f.n_rows for f in factors), prod(f.n_columns for f in factors))
    column_type = index_dtype(prod(len(f.columns) for f in factors), shape)
    # from the last factor on: the repeated runs are then longest
    return reduce(lambda right, left: _product(left, right, column_type, np.dtype(offset_type)), reversed(factors))


def _product(left: Factor, right: Factor, column_type: np.dtype, offset_type: np.dtype) -> Factor:
    """Multiply two factors: row (r, s) is, for every entry of row r of `left`, row s of `right`, shifted."""
    left_lengths, right_lengths = np.diff(left.indptr), np.diff(right.indptr)
    rows, n_right = len(left_lengths) * len(right_lengths), len(right_lengths)
    indptr = np.zeros(rows + 1, dtype=np.int64)
    np.cumsum((left_lengths[:, None] * right_lengths).reshape(-1), out=indptr[1:])
    # the runs in order: which entry of left, which row of right
    runs_of_row = np.repeat(left_lengths, n_right)
    run_row = np.repeat(np.arange(rows), runs_of_row)
    first_run = np.cumsum(runs_of_row) - runs_of_row
    left_row, right_row = np.divmod(run_row, max(n_right, 1))
    entry = left.indptr[left_row] + np.arange(len(run_row)) - first_run[run_row]
    length = right_lengths[right_row]
    start = right.indptr[right_row] - (np.cumsum(length) - length)
    source_type = index_dtype(int(indptr[-1]), (0, 0))
    source = np.arange(indptr[-1], dtype=source_type)
    source += np.repeat(start.astype(source_type), length)
    columns = right.columns.astype(column_type)[source]
    columns += np.repeat((left.columns[entry] * right.n_columns).astype(column_type), length)
    offset = right.offset.astype(offset_type)[source]
    offset += np.repeat(left.offset[entry].astype(offset_type), length)
    return Factor(indptr, columns, left.n_columns * right.n_columns, offset)


# Patterns of pruned convolutions, built from the kept weights alone: at a sparsity of 97 % the pattern of all weights
# would take thirty times the memory, and the time to fill it.


def packed_mask(mask: np.ndarray, weight_shape: tuple[int, ...]) -> bytes | None:
    """Return `mask` as bytes, a bit per weight, to compare masks by content; None if all weights are kept."""
    if not hasattr(mask, "dtype") or mask.dtype != np.dtype(bool):
        got = getattr(mask, "dtype", type(mask).__name__)
        raise DTypeError(
            "mask has the wrong dtype", expected="an array of bool", got=got, remedy="Pass weight != 0, say"
        )
    if mask.shape != weight_shape:
        raise ShapeError("mask has another shape than the weights", expected=weight_shape, got=mask.shape)
    return None if mask.all() else np.packbits(mask).tobytes()


def unpacked_mask(packed: bytes, weight_shape: tuple[int, ...]) -> np.ndarray:
    """Undo `packed_mask`."""
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=prod(weight_shape))
    return bits.astype(bool).reshape(weight_shape)


def count_masked(mask: np.ndarray, axes: list[Factor]) -> int:
    """Return the number of entries: each kept weight has one per pair of positions that its tap connects."""
    taps = prod(mask.shape[2:])
    met, _ = _outputs_of(axes, taps)
    return int(np.count_nonzero(mask.reshape(-1, taps), axis=0) @ np.count_nonzero(met >= 0, axis=0))


def masked_entries(mask: np.ndarray, axes: list[Factor], in_channels: int, channels_last: bool) -> Factor:
    """Return the entries of a convolution's pattern for the weights that `mask` keeps; offsets index the weights."""
    # mask: bool, (out_channels, in_channels // groups, *kernel). axes: the factors of `window_factors`.
    # The kept weights are sorted as their columns are within a row. Then the entries are a selection from the table
    # (input position, weight), where the weight's tap meets an output. Read by rows they are in CSR order already.
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
    """Return the output that each input position meets through each tap, (positions, taps), or -1; and their number."""
    one = Factor(np.array([0, 1]), np.zeros(1, np.int64), 1, np.zeros(1, np.int64))
    whole = kron([one, *axes], np.int64)  # works without axes too
    met = np.full((whole.n_rows, taps), -1)
    rows = np.repeat(np.arange(len(met)), np.diff(whole.indptr))
    met[rows, whole.offset] = whole.columns
    return met, whole.n_columns


# Patterns of padding: with zeros, a selection; with repeated elements, the transpose of a selection.

_OF_NUMPY = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def pad_pattern(channels: int, size: tuple[int, int], padding: tuple[int, int, int, int]) -> SparsityPattern:
    """Return the pattern of zero padding around every channel of an image: at most one entry per row.

    Parameters
    ----------
    channels, size
        Channels, and (height, width) of the input.
    padding
        Lines added on the left, right, top and bottom; negative numbers crop the input.

    Returns
    -------
    SparsityPattern
        A row per input element, a column per output element.

    Raises
    ------
    PatternError
        A size, of the input or the output, is not an integer, or negative.
    """
    left, right, above, below = padding
    checked_sizes(height=size[0] + above + below, width=size[1] + left + right)
    return _pad(*checked_sizes(channels=channels, height=size[0], width=size[1]), *padding)


@lru_cache(maxsize=KEPT)
def _pad(channels: int, height: int, width: int, left: int, right: int, above: int, below: int) -> SparsityPattern:
    area = (height + above + below) * (width + left + right)
    shape, entry = with_room(channels * height * width, channels * height * width, channels * area)
    rows, columns = np.arange(height, dtype=entry) + above, np.arange(width, dtype=entry) + left
    kept = ((rows >= 0) & (rows < height + above + below))[:, None] & (columns >= 0) & (columns < width + left + right)
    places = rows[:, None] * (width + left + right) + columns
    first = np.arange(channels, dtype=entry)[:, None] * area
    indptr = np.concatenate([[0], np.cumsum(np.tile(kept.reshape(-1), channels))])
    return SparsityPattern._unchecked(indptr, (first + places[kept]).reshape(-1).astype(entry), shape)


@lru_cache(maxsize=KEPT)
def border_pattern(
    channels: int, sizes: tuple[int, ...], padding: tuple[tuple[int, int], ...], mode: str
) -> SparsityPattern:
    """Return the pattern of padding that repeats input elements: one entry per column, several in some rows."""
    # sizes: lengths of the axes after the channels; padding: (before, after) on each of them;
    # mode: "reflect", "replicate" or "circular", as in torch.nn.functional.pad.
    nnz = channels * prod(n + sum(pair) for n, pair in zip(sizes, padding, strict=True))
    shape, _ = with_room(nnz, channels * prod(sizes), nnz)
    each = np.arange(channels + 1)
    factors = [Factor(each, each[:-1], channels, np.zeros(channels, np.int8))]
    factors += [_repeated(size, pair, mode) for size, pair in zip(sizes, padding, strict=True)]
    entries = kron(factors, np.int8)
    return SparsityPattern._unchecked(entries.indptr, entries.columns, shape)


def _repeated(size: int, pair: tuple[int, int], mode: str) -> Factor:
    """Return the factor of one axis."""
    source = np.pad(np.arange(size), pair, _OF_NUMPY[mode])  # type: ignore[call-overload]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(source, minlength=size))))
    return Factor(indptr, np.argsort(source, kind="stable"), len(source), np.zeros(len(source), np.int8))
