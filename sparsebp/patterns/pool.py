"""Pattern of max and average pooling: which inputs every window can take from, in any number of dimensions.

The matrix is a Kronecker product: one small factor for each spatial axis, and the identity over the channels (BPPSA
§3.3; a max-pool's values move within this pattern, the pattern stays).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.kron import Factor, kron, window_factors
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.windows import Layout, PoolWindows, lengths


@dataclass(frozen=True, eq=False)
class PoolPattern:
    """The pattern of a pooling layer and what its values are made of.

    Attributes
    ----------
    pattern
        Rows: the inputs of one sample; columns: its windows. An entry's window is its column, ``pattern.indices``.
    offset
        Place of every entry's input inside its window, counted in C order over the kernel. int32, shape (nnz,).
    inputs
        How many inputs a window holds, padding not counted. int64, shape (n_out,).
    extent
        How many elements a window holds within the padded input. int64, shape (n_out,).
    out_size
        Windows along each spatial axis.
    line
        (windows, taps): entries come in lines of so many windows beside each other, of each so many places beside each
        other. (1, 1) where windows overlap or leave out elements along the last axis.
    """

    pattern: SparsityPattern
    offset: np.ndarray
    inputs: np.ndarray
    extent: np.ndarray
    out_size: tuple[int, ...]
    line: tuple[int, int]

    def lines_on(self, xp: ModuleType) -> tuple[Array, Array]:
        """Return the window and the offset of every line's first entry, as arrays of `xp`, copied there once."""
        window, offset = self._lines.on(xp)
        return window, offset

    @cached_property
    def _lines(self) -> DeviceCopies:
        step = self.line[0] * self.line[1]
        return DeviceCopies(*(np.ascontiguousarray(array[::step]) for array in (self.pattern.indices, self.offset)))


def pool_pattern(
    channels: int,
    size: int | tuple[int, ...],
    kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None,
    padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1,
    ceil_mode: bool = False,
    *,
    layout: Layout = "chw",
) -> PoolPattern:
    """Return the pattern of the transposed Jacobian of max or average pooling: every input that a window can take from.

    Which of them a max-pool takes depends on the input; the pattern does not (BPPSA Table 1: sparsity
    ``1 - h_f w_f / (c h w)`` where windows do not overlap).

    Parameters
    ----------
    channels
        Number of channels; each is pooled by itself.
    size
        Spatial size of the input; its length is the number of dimensions.
    kernel, stride, padding, dilation, ceil_mode
        As in `torch.nn.MaxPool2d`.
    layout
        ``"chw"``: a sample's elements are ordered (channel, spatial axes); ``"hwc"``: (spatial axes, channel).

    Returns
    -------
    PoolPattern
        Its pattern has shape (channels * inputs, channels * windows). Made once for a configuration.

    Raises
    ------
    OptionError
        A size is not a positive integer, the padding is more than half of the kernel, or the layout is unknown.
    ShapeError
        The kernel is larger than the padded input.
    """
    size = _checked_size(channels, size, layout)
    windows = PoolWindows.of(len(size), kernel, stride, padding, dilation, ceil_mode)
    return window_pattern(channels, size, windows, layout)


def adaptive_pool_pattern(
    channels: int, size: int | tuple[int, ...], out_size: int | tuple[int, ...], *, layout: Layout = "chw"
) -> PoolPattern:
    """Return the pattern of the transposed Jacobian of adaptive average pooling.

    Window i of n over a length L holds the inputs from ``floor(i L / n)`` up to, without, ``ceil((i + 1) L / n)``.

    Parameters
    ----------
    channels, size, layout
        As in `pool_pattern`.
    out_size
        Windows along each axis.

    Returns
    -------
    PoolPattern
        Its pattern has shape (channels * inputs, channels * windows). Made once for a configuration.

    Raises
    ------
    OptionError
        A size is not a positive integer, or the layout is unknown.
    MemoryLimitError
        There are more windows than the memory holds.
    """
    size = _checked_size(channels, size, layout)
    out_size = lengths("output_size", out_size, len(size), 1)
    try:
        return _adaptive_pattern(channels, size, out_size, layout)
    except MemoryError as error:
        raise MemoryLimitError(
            "The windows do not fit in memory", expected="memory for the index of each",
            got=f"output_size {out_size}", remedy="Pass a smaller output_size",
        ) from error  # fmt: skip


@lru_cache(maxsize=KEPT)
def window_pattern(channels: int, size: tuple[int, ...], windows: PoolWindows, layout: Layout = "chw") -> PoolPattern:
    """Return `pool_pattern` for arguments that are known to be right."""
    extents = []
    for a, (length, count) in enumerate(zip(size, windows.output_size(size), strict=True)):
        start = np.arange(count) * windows.stride[a] - windows.before[a]
        # how AvgPool counts the padding (it has no dilation): up to the end of the padded input, not past it
        extents.append(np.minimum(start + windows.kernel[a], length + windows.before[a]) - start)
    return _assembled(channels, window_factors(size, windows), extents, windows.kernel[-1], layout)


@lru_cache(maxsize=KEPT)
def _adaptive_pattern(channels: int, size: tuple[int, ...], out_size: tuple[int, ...], layout: Layout) -> PoolPattern:
    starts = [np.arange(n) * length // n for length, n in zip(size, out_size, strict=True)]
    ends = [-(-(np.arange(n) + 1) * length // n) for length, n in zip(size, out_size, strict=True)]
    taps = [end - start for start, end in zip(starts, ends, strict=True)]
    longest = [int(t.max()) for t in taps]
    axes = []
    for axis, length in enumerate(size):
        indptr = np.concatenate(([0], np.cumsum(taps[axis])))
        tap = np.arange(indptr[-1]) - np.repeat(indptr[:-1], taps[axis])
        inputs = np.repeat(starts[axis], taps[axis]) + tap
        axes.append(Factor(indptr, inputs, length, tap * prod(longest[axis + 1 :])).transposed())
    return _assembled(channels, axes, taps, longest[-1], layout)


def _assembled(channels: int, axes: list[Factor], extents: list[np.ndarray], taps: int, layout: Layout) -> PoolPattern:
    """Put a pattern together of its axes, of which the last one's windows have so many taps at most."""
    every = np.arange(channels + 1)
    each = Factor(every, every[:-1], channels, np.zeros(channels, np.int64))
    whole = kron([each, *axes] if layout == "chw" else [*axes, each], np.int32)
    pattern = SparsityPattern._trusted(whole.indptr, whole.columns, (whole.n_rows, whole.n_columns))
    inputs = frozen(np.bincount(pattern.indices, minlength=pattern.shape[1]))
    ones = [np.ones(channels, np.int64)]
    extent = frozen(reduce(np.multiply.outer, ones + extents if layout == "chw" else extents + ones).reshape(-1))
    line = _line(axes[-1], taps) if layout == "chw" else (channels, 1)
    if np.diff(whole.indptr).max(initial=0) > 1:  # the entries of a row come between those of a line
        line = (1, 1)
    return PoolPattern(pattern, frozen(whole.offset), inputs, extent, tuple(f.n_columns for f in axes), line)


def _line(axis: Factor, taps: int) -> tuple[int, int]:
    """How the entries lie where the windows stand side by side and leave out nothing, else (1, 1)."""
    every = np.arange(axis.n_columns * taps)
    tiled = np.array_equal(axis.columns, every // taps) and np.array_equal(axis.offset, every % taps)
    return (axis.n_columns, taps) if tiled else (1, 1)


def _checked_size(channels: Any, size: Any, layout: str) -> tuple[int, ...]:
    if layout not in ("chw", "hwc"):
        raise OptionError(
            "Unknown layout", expected="'chw' or 'hwc'", got=repr(layout), remedy="Say where the channels stand"
        )
    lengths("channels", channels, 1, 1)
    return lengths("size", size, len(size) if isinstance(size, (tuple, list)) else 1, 1)
