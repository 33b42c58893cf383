"""Pattern of a convolution's transposed Jacobian, and which weight each entry holds.

An input and an output element are joined if a tap of the kernel lies between them, on every axis by itself. So the
pattern is a Kronecker product of small ones: channels × (input × output positions of axis 1) × … It has exactly the
entries that random weights fill (BPPSA §3.3; for 3 → 64 channels, 3×3, padding 1 on 32×32: 3·64·94·94).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import NamedTuple

import numpy as np

from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.core.locks import cached_property
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.kron import Factor, kron, window_factors
from sparsebp.patterns.masked import count_masked, masked_entries, packed_mask, unpacked_mask
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import index_bytes, index_dtype
from sparsebp.patterns.windows import Layout, Lengths, Padding, Windows, check_channels, lengths


@dataclass(frozen=True, eq=False)
class ConvPattern:
    """The structure of the transposed Jacobian of a convolution or a transposed convolution.

    Attributes
    ----------
    pattern
        Shape (in_channels * inputs, out_channels * outputs), the elements of a flattened sample.
    weight_index
        Position in ``weight.ravel()`` of every entry's value. Read-only int32 (int64 for 2**31 weights), shape (nnz,).
    weight_shape
        (out_channels, in_channels // groups, *kernel), as torch.nn has it; of a transposed convolution the channels are
        exchanged.
    output_size
        Lengths of the output's axes.
    layout
        ``"chw"`` or ``"hwc"``.
    """

    pattern: SparsityPattern
    weight_index: np.ndarray
    weight_shape: tuple[int, ...]
    output_size: tuple[int, ...]
    layout: Layout

    def device_index(self, xp: ModuleType) -> Array:
        """Return `weight_index` as an array of `xp`, copied to the current device once."""
        return self._copies.on(xp)[0]

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self.weight_index)


def conv_pattern(
    in_channels: int,
    out_channels: int,
    input_size: Lengths,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
    *,
    layout: Layout = "chw",
    mask: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> ConvPattern:
    """Return the pattern of a convolution over as many axes as `input_size` has; made once for its arguments.

    Parameters
    ----------
    in_channels, out_channels
        Channels of the input and the output.
    input_size
        Lengths of the axes: (L,), (H, W), (D, H, W), …; an integer for one axis.
    kernel_size, stride, dilation
        An integer for all axes, or one per axis.
    padding
        Zeros at both ends: an integer, one per axis, a pair (before, after) per axis, ``"same"`` or ``"valid"``.
    groups
        Channels are joined within their group only; ``groups=in_channels`` is a depthwise convolution.
    layout
        ``"chw"``: rows and columns count channels first; ``"hwc"``: channels last, which gives contiguous runs.
    mask
        Which weights are kept, bool in the shape of the weights: the entries of the others are left out, and the
        pattern of all is never built. None: all are.
    memory_limit
        Most bytes that the pattern and the index of weights may take; None: any.

    Returns
    -------
    ConvPattern
        Index arrays are int32 until the entries or a dimension reach 2**31, then int64.

    Raises
    ------
    OptionError
        An option is out of range, or `groups` does not divide the channels.
    ShapeError
        The kernel is larger than the padded input, or `mask` has another shape than the weights.
    DTypeError
        `mask` is not bool.
    MemoryLimitError
        The result would take more than `memory_limit`; nothing has been allocated.
    """
    ndim = 1 if np.ndim(input_size) == 0 else np.size(input_size)
    sizes = lengths("input_size", input_size, ndim, 0)
    windows = Windows.of(ndim, kernel_size, stride, padding, dilation)
    convolution = _Convolution(in_channels, out_channels, sizes, windows, groups, layout)
    return _checked(convolution, mask, memory_limit)


def conv_transpose_pattern(
    in_channels: int,
    out_channels: int,
    input_size: Lengths,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    output_padding: Lengths = 0,
    groups: int = 1,
    dilation: Lengths = 1,
    *,
    layout: Layout = "chw",
    mask: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> ConvPattern:
    """Return the pattern of a transposed convolution: the transpose of a convolution's, from the output to the input.

    Parameters
    ----------
    in_channels, out_channels, input_size, kernel_size, stride, groups, dilation, layout, mask, memory_limit
        As for `conv_pattern`, in the order of `torch.nn.ConvTranspose2d`.
    padding
        What is cut off at both ends of the output, in every form that `conv_pattern` takes.
    output_padding
        Elements added at the end of the output, less than the stride or the dilation.

    Returns
    -------
    ConvPattern
        Shape (in_channels * inputs, out_channels * outputs), `weight_shape` (in_channels, out_channels // groups,
        *kernel), as torch.nn has it.

    Raises
    ------
    OptionError, ShapeError, DTypeError, MemoryLimitError
        As for `conv_pattern`; ShapeError also where there is no output.
    """
    ndim = 1 if np.ndim(input_size) == 0 else np.size(input_size)
    windows = Windows.transposed(ndim, kernel_size, stride, padding, output_padding, dilation)
    sizes = windows.input_size(lengths("input_size", input_size, ndim, 0))
    convolution = _Convolution(out_channels, in_channels, sizes, windows, groups, layout, transposed=True)
    return _checked(convolution, mask, memory_limit)


class _Convolution(NamedTuple):
    """The options of both builders; all is said of the convolution, also where the pattern is transposed."""

    in_channels: int
    out_channels: int
    sizes: tuple[int, ...]
    windows: Windows
    groups: int
    layout: Layout
    transposed: bool = False

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.windows.kernel)

    @property
    def weight_type(self) -> np.dtype:
        return index_dtype(prod(self.weight_shape), (0, 0))

    @property
    def shape(self) -> tuple[int, int]:
        """Of the pattern."""
        outputs = self.windows.output_size(self.sizes)
        shape = self.in_channels * prod(self.sizes), self.out_channels * prod(outputs)
        return shape[::-1] if self.transposed else shape


def _checked(c: _Convolution, mask: np.ndarray | None, memory_limit: int | None) -> ConvPattern:
    """Check what both builders take, then build."""
    if c.layout not in ("chw", "hwc"):
        raise OptionError("Unknown layout", expected="'chw' or 'hwc'", got=repr(c.layout), remedy="Pass one of the two")
    check_channels(c.in_channels, c.out_channels, c.groups)
    packed = None if mask is None else packed_mask(mask, c.weight_shape)
    if memory_limit is not None:
        nnz = conv_entries(c.in_channels, c.out_channels, c.sizes, c.windows, c.groups, mask)
        needed = index_bytes(nnz, c.shape) + nnz * c.weight_type.itemsize
        if needed > memory_limit:
            raise MemoryLimitError(
                "The pattern of the convolution exceeds the memory limit",
                expected=f"at most {memory_limit} bytes",
                got=f"{needed} bytes for {nnz} entries",
                remedy="Use a smaller input, fewer channels or more groups, or raise memory_limit",
            )
    return _built(c, packed)


@lru_cache(maxsize=KEPT)
def _built(c: _Convolution, packed: bytes | None) -> ConvPattern:
    axes, channels_last = window_factors(c.sizes, c.windows), c.layout == "hwc"
    if packed is None:
        channels = _channels(c)
        factors = [*axes, channels] if channels_last else [channels, *axes]
        if c.transposed:  # the transpose of a Kronecker product is that of the transposes
            factors = [factor.transposed() for factor in factors]
        entries = kron(factors, c.weight_type)
    else:
        entries = masked_entries(unpacked_mask(packed, c.weight_shape), axes, c.in_channels, channels_last)
        entries = entries.transposed() if c.transposed else entries
    index = frozen(entries.offset.astype(c.weight_type, copy=False))
    pattern = SparsityPattern._trusted(entries.indptr, entries.columns, c.shape)
    output_size = c.sizes if c.transposed else c.windows.output_size(c.sizes)
    return ConvPattern(pattern, index, c.weight_shape, output_size, c.layout)


def _channels(c: _Convolution) -> Factor:
    """Every input channel meets the output channels of its group."""
    of_group, from_group = c.out_channels // c.groups, c.in_channels // c.groups
    inputs = np.arange(c.in_channels)[:, None]
    columns = inputs // from_group * of_group + np.arange(of_group)
    offset = (columns * from_group + inputs % from_group) * prod(c.windows.kernel)
    return Factor(np.arange(c.in_channels + 1) * of_group, columns.reshape(-1), c.out_channels, offset.reshape(-1))


def conv_entries(
    in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int, mask: np.ndarray | None
) -> int:
    """Return the entries that `conv_pattern` would have for these checked arguments, without building it.

    Those of a transposed convolution are as many, with `sizes` the lengths of its output and the channels exchanged.
    """
    axes = window_factors(sizes, windows)
    if mask is not None:
        return count_masked(mask, axes)
    return in_channels * out_channels // groups * prod(len(f.columns) for f in axes)
