"""Pattern of a convolution's transposed Jacobian, and which weight each entry holds.

An input and an output element are joined if a tap of the kernel lies between them, on every axis by itself. So the
pattern is a Kronecker product of small ones: channels × (input × output positions of axis 1) × … It has exactly the
entries that random weights fill (BPPSA §3.3; for 3 → 64 channels, 3×3, padding 1 on 32×32: 3·64·94·94).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from math import prod
from types import ModuleType
from typing import Literal

import numpy as np

from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.core.types import Array
from sparsebp.patterns.copies import DeviceCopies, frozen
from sparsebp.patterns.kron import Factor, axis_factor, kron
from sparsebp.patterns.masked import count_kept, kept_entries, packed_mask, unpacked_mask
from sparsebp.patterns.sparsity import KEPT, SparsityPattern
from sparsebp.patterns.validate import index_bytes, index_dtype
from sparsebp.patterns.windows import Lengths, Padding, Windows, check_channels, lengths

Layout = Literal["chw", "hwc"]
"""Order of a flattened sample: channels first (as torch.nn has it) or last."""


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
    kept: np.ndarray | None = None,
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
    kept
        Which weights are there, bool in the shape of the weights: the entries of the others are left out, and the
        pattern of all is never built. None: all are there.
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
        The kernel is larger than the padded input, or `kept` has another shape than the weights.
    DTypeError
        `kept` is not bool.
    MemoryLimitError
        The result would take more than `memory_limit`; nothing has been allocated.
    """
    ndim = 1 if np.ndim(input_size) == 0 else np.size(input_size)
    sizes = lengths("input_size", input_size, ndim, 0)
    windows = Windows.of(ndim, kernel_size, stride, padding, dilation)
    return _checked(in_channels, out_channels, sizes, windows, groups, layout, kept, memory_limit, transposed=False)


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
    kept: np.ndarray | None = None,
    memory_limit: int | None = None,
) -> ConvPattern:
    """Return the pattern of a transposed convolution: the transpose of a convolution's, from the output to the input.

    Parameters
    ----------
    in_channels, out_channels, input_size, kernel_size, stride, groups, dilation, layout, kept, memory_limit
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
    return _checked(out_channels, in_channels, sizes, windows, groups, layout, kept, memory_limit, transposed=True)


def _checked(
    in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int, layout: Layout,
    kept: np.ndarray | None, memory_limit: int | None, *, transposed: bool,
) -> ConvPattern:  # fmt: skip
    """Check what both builders take, then build; all is said of the convolution, also where it is transposed."""
    if layout not in ("chw", "hwc"):
        raise OptionError("Unknown layout", expected="'chw' or 'hwc'", got=repr(layout), remedy="Pass one of the two")
    check_channels(in_channels, out_channels, groups)
    weight_shape = (out_channels, in_channels // groups, *windows.kernel)
    mask = None if kept is None else packed_mask(kept, weight_shape)
    if memory_limit is not None:
        _check_memory(memory_limit, in_channels, out_channels, sizes, windows, groups, transposed, kept)
    return _build(in_channels, out_channels, sizes, windows, groups, layout, transposed, mask)


@lru_cache(maxsize=KEPT)
def _build(
    in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int, layout: Layout,
    transposed: bool, mask: bytes | None,
) -> ConvPattern:  # fmt: skip
    outputs = windows.output_size(sizes)
    weight_shape = (out_channels, in_channels // groups, *windows.kernel)
    axes = [axis_factor(sizes, windows, axis) for axis in range(len(sizes))]
    shape = (in_channels * prod(sizes), out_channels * prod(outputs))
    weight_type = index_dtype(prod(weight_shape), (0, 0))
    if mask is None:
        channels = _channels(in_channels, out_channels, groups, prod(windows.kernel))
        factors = [channels, *axes] if layout == "chw" else [*axes, channels]
        if transposed:  # the transpose of a Kronecker product is that of the transposes
            factors = [factor.transposed() for factor in factors]
        column_type = index_dtype(prod(len(f.columns) for f in factors), shape)
        # From the last factor on: then what is repeated are the longest runs.
        entries = reduce(lambda right, left: kron(left, right, column_type, weight_type), reversed(factors))
    else:
        entries = kept_entries(unpacked_mask(mask, weight_shape), axes, in_channels, layout == "hwc")
        entries = entries.transposed() if transposed else entries
    if transposed:
        shape, outputs = shape[::-1], sizes
    index = frozen(entries.offset.astype(weight_type, copy=False))
    pattern = SparsityPattern._trusted(entries.indptr, entries.columns, shape)
    return ConvPattern(pattern, index, weight_shape, outputs, layout)


def _channels(in_channels: int, out_channels: int, groups: int, taps: int) -> Factor:
    """Every input channel meets the output channels of its group."""
    of_group, from_group = out_channels // groups, in_channels // groups
    inputs = np.arange(in_channels)[:, None]
    columns = inputs // from_group * of_group + np.arange(of_group)
    offset = (columns * from_group + inputs % from_group) * taps
    return Factor(np.arange(in_channels + 1) * of_group, columns.reshape(-1), out_channels, offset.reshape(-1))


def conv_entries(
    in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int, kept: np.ndarray | None
) -> int:
    """Return the entries that `conv_pattern` would have for these checked arguments, without building it.

    Those of a transposed convolution are as many, with `sizes` the lengths of its output and the channels exchanged.
    """
    axes = [axis_factor(sizes, windows, axis) for axis in range(len(sizes))]
    if kept is not None:
        return count_kept(kept, axes)
    return in_channels * out_channels // groups * prod(len(f.columns) for f in axes)


def _check_memory(
    limit: int, in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int,
    transposed: bool, kept: np.ndarray | None,
) -> None:  # fmt: skip
    shape = (in_channels * prod(sizes), out_channels * prod(windows.output_size(sizes)))
    weights = in_channels * out_channels // groups * prod(windows.kernel)
    nnz = conv_entries(in_channels, out_channels, sizes, windows, groups, kept)
    needed = index_bytes(nnz, shape[::-1] if transposed else shape) + nnz * index_dtype(weights, (0, 0)).itemsize
    if needed > limit:
        raise MemoryLimitError(
            "The pattern of the convolution exceeds the memory limit",
            expected=f"at most {limit} bytes",
            got=f"{needed} bytes for {nnz} entries",
            remedy="Use a smaller input, fewer channels or more groups, or raise memory_limit",
        )
