"""Pattern of max and average pooling: which inputs every window can take from, in any number of dimensions.

The matrix is a Kronecker product: one small factor for each spatial axis, and the identity over the channels (BPPSA
§3.3; a max-pool's values move within this pattern, the pattern stays).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from types import ModuleType
from typing import Any, Literal

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.pool_window import PoolWindow
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.windows import lengths

Layout = Literal["chw", "hwc"]
"""Order of a sample's elements: channels first or channels last."""


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
    return window_pattern(
        channels, size, PoolWindow.of(len(size), kernel, stride, padding, dilation, ceil_mode), layout
    )


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
    """
    size = _checked_size(channels, size, layout)
    return _adaptive_pattern(channels, size, lengths("output_size", out_size, len(size), 1), layout)


@lru_cache(maxsize=KEPT)
def window_pattern(channels: int, size: tuple[int, ...], window: PoolWindow, layout: Layout = "chw") -> PoolPattern:
    """Return `pool_pattern` for arguments that are known to be right."""
    factors = []
    for a, (length, count) in enumerate(zip(size, window.out_size(size), strict=True)):
        kernel, pad, step = window.kernel[a], window.padding[a], window.dilation[a]
        start = np.arange(count, dtype=np.int64) * window.stride[a] - pad
        # how AvgPool counts the padding (it has no dilation): up to the end of the padded input, not past it
        extent = np.minimum(start + kernel, length + pad) - start
        factors.append(_factor(length, start, np.full(count, kernel), step, extent))
    return _product(channels, factors, layout)


@lru_cache(maxsize=KEPT)
def _adaptive_pattern(channels: int, size: tuple[int, ...], out_size: tuple[int, ...], layout: Layout) -> PoolPattern:
    factors = []
    for length, count in zip(size, out_size, strict=True):
        i = np.arange(count, dtype=np.int64)
        start = i * length // count
        kernel = -(-(i + 1) * length // count) - start
        factors.append(_factor(length, start, kernel, 1, kernel))
    return _product(channels, factors, layout)


@dataclass(frozen=True)
class _Factor:
    """One axis: a CSR structure (inputs x windows), every entry's place in its window, and the windows' extents."""

    indptr: np.ndarray
    indices: np.ndarray
    offset: np.ndarray
    extent: np.ndarray
    kernel: int

    @property
    def line(self) -> tuple[int, int]:
        """How the entries lie where the windows stand side by side and leave out nothing, else (1, 1)."""
        every = np.arange(len(self.extent) * self.kernel)
        tiled = np.array_equal(self.indices, every // self.kernel) and np.array_equal(self.offset, every % self.kernel)
        return (len(self.extent), self.kernel) if tiled else (1, 1)

    def __mul__(self, other: _Factor) -> _Factor:
        """Return the Kronecker product: rows, columns and offsets of both, `other`'s running faster."""
        mine, others = np.diff(self.indptr), np.diff(other.indptr)
        row_lengths = np.multiply.outer(mine, others).reshape(-1)
        indptr = np.concatenate(([0], np.cumsum(row_lengths)))
        inner = np.repeat(np.tile(others, len(mine)), row_lengths)  # of every entry: how long its row of `other` is
        place = np.arange(indptr[-1]) - np.repeat(indptr[:-1], row_lengths)  # and where in its row it stands
        a = np.repeat(np.repeat(self.indptr[:-1], len(others)), row_lengths) + place // inner
        b = np.repeat(np.tile(other.indptr[:-1], len(mine)), row_lengths) + place % inner
        return _Factor(
            indptr,
            self.indices[a] * len(other.extent) + other.indices[b],
            self.offset[a] * other.kernel + other.offset[b],
            np.multiply.outer(self.extent, other.extent).reshape(-1),
            self.kernel * other.kernel,
        )


def _factor(length: int, start: np.ndarray, kernel: np.ndarray, step: int, extent: np.ndarray) -> _Factor:
    """Return the factor of an axis whose window o holds ``start[o] + k * step`` for k below ``kernel[o]``."""
    longest = int(kernel.max())
    k = np.arange(longest, dtype=np.int64)
    inputs = start[:, None] + k * step
    column, offset = np.nonzero((k < kernel[:, None]) & (inputs >= 0) & (inputs < length))
    row = inputs[column, offset]
    order = np.argsort(row, kind="stable")  # columns ascend already, and stay so within a row
    indptr = np.concatenate(([0], np.cumsum(np.bincount(row, minlength=length))))
    return _Factor(indptr, column[order], offset[order], extent, longest)


def _product(channels: int, factors: list[_Factor], layout: Layout) -> PoolPattern:
    every = np.arange(channels + 1)
    identity = _Factor(every, every[:-1], np.zeros(channels, np.int64), np.ones(channels, np.int64), 1)
    out_size = tuple(len(f.extent) for f in factors)
    whole = reduce(_Factor.__mul__, [identity, *factors] if layout == "chw" else [*factors, identity])
    pattern = SparsityPattern._trusted(whole.indptr, whole.indices, (len(whole.indptr) - 1, len(whole.extent)))
    inputs = frozen(np.bincount(pattern.indices, minlength=pattern.shape[1]))
    offset, extent = frozen(whole.offset.astype(np.int32)), frozen(whole.extent)
    apart = np.diff(whole.indptr).max(initial=0) <= 1  # else the entries of a row come between those of a line
    line = (factors[-1] if layout == "chw" else identity).line if apart else (1, 1)
    return PoolPattern(pattern, offset, inputs, extent, out_size, line)


def _checked_size(channels: Any, size: Any, layout: str) -> tuple[int, ...]:
    if layout not in ("chw", "hwc"):
        raise OptionError(
            "Unknown layout", expected="'chw' or 'hwc'", got=repr(layout), remedy="Say where the channels stand"
        )
    lengths("channels", channels, 1, 1)
    return lengths("size", size, len(size) if isinstance(size, (tuple, list)) else 1, 1)
