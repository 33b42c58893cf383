"""Patterns by operator: convolutions with the weight of each entry, pooling, blocks, sums.

An input and an output element are connected if a kernel tap lies between them, on every axis independently. So a
pattern is a Kronecker product of small ones: channels × (input × output positions of axis 1) × … Its entries are
exactly those that random weights fill (BPPSA §3.3; 3 → 64 channels, 3×3, padding 1 on 32×32: 3·64·94·94).

All builders are cached by their arguments. They raise `PatternError` for a size that is not an integer of 0 or more,
and plans raise `ShapeError`, `DTypeError` or `DeviceError` for values that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, reduce, wraps
from inspect import signature
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, get_args

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_integer
from sparsebp.core.errors import DTypeError, MemoryLimitError, ShapeError
from sparsebp.core.locks import cached_property
from sparsebp.patterns.pattern import (
    KEPT,
    DeviceCopies,
    SparsityPattern,
    checked_sizes,
    frozen,
    index_bytes,
    index_dtype,
    structure_of,
    values_on,
    with_room,
)
from sparsebp.patterns.windows import (
    Factor,
    Layout,
    Lengths,
    Padding,
    PoolWindows,
    Windows,
    check_channels,
    count_masked,
    kron,
    lengths,
    masked_entries,
    packed_mask,
    unpacked_mask,
    window_factors,
)

# Matrices assembled from others on a fixed pattern: sums, and matrices side by side.


@dataclass(frozen=True, eq=False)
class AssemblyPlan:
    """How C is assembled from other matrices, any number of times; entries that coincide are added.

    Made by `plan_addition` and `plan_concatenation`.

    Attributes
    ----------
    parts : tuple of SparsityPattern
        Patterns of the matrices.
    pattern : SparsityPattern
        Pattern of C.
    indices : tuple of numpy.ndarray
        Entry of C for every entry of each part, shapes (nnz,), read-only. Unique within a part; together they cover C.
    """

    parts: tuple[SparsityPattern, ...]
    pattern: SparsityPattern
    indices: tuple[np.ndarray, ...] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(map(frozen, self.indices)))

    def __call__(self, *data: Array) -> Array:
        """Return the values of C.

        Parameters
        ----------
        data
            Values on the parts: (nnz,) shared by the batch or (nnz, B) per sample, of one dtype, all of NumPy or all of
            CuPy; or sparse matrices, as `SparsityPattern.values_of` takes them.

        Returns
        -------
        Array
            (nnz,) if all parts are shared, else (nnz, B).
        """
        if len(data) == len(self.parts):
            data = tuple(map(values_on, self.parts, data))
        xp = backend.namespace(*data)
        wanted = [pattern.nnz for pattern in self.parts]
        if [a.shape[:1] for a in data] != [(n,) for n in wanted] or any(a.ndim > 2 for a in data):
            raise ShapeError("The values do not fit the parts", expected=f"(nnz,) or (nnz, B) each, with nnz {wanted}",
                             got=[a.shape for a in data])  # fmt: skip
        if len({a.dtype for a in data}) > 1:
            raise DTypeError("The parts have different dtypes", expected="one dtype", got=[str(a.dtype) for a in data])
        batches = {a.shape[1:] for a in data if a.ndim == 2}
        if len(batches) > 1:
            raise ShapeError("The parts have different batch sizes", expected="one batch size, or shared values (nnz,)",
                             got=[a.shape for a in data])  # fmt: skip
        shape = (self.pattern.nnz, *(batches.pop() if batches else ()))
        disjoint = sum(wanted) == self.pattern.nnz  # no entries coincide
        out = (xp.empty if disjoint else xp.zeros)(shape, dtype=data[0].dtype)
        for part, (values, index) in enumerate(zip(data, self._copies.on(xp), strict=True)):
            wide = values if values.ndim == out.ndim else values[:, None]
            if disjoint or part == 0:
                out[index] = wide
            else:
                out[index] += wide
        return out

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy by the constructor, so that the arrays are read-only again."""
        return AssemblyPlan, (self.parts, self.pattern, self.indices)

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(*self.indices)


def plan_concatenation(*parts: Any) -> AssemblyPlan:
    """Do the symbolic work of C = [A₁ A₂ …] once.

    Parameters
    ----------
    parts
        One or more patterns, or sparse matrices, with the same number of rows.

    Returns
    -------
    AssemblyPlan
        Cached: equal patterns give the same object while it is among the most recently used.

    Raises
    ------
    PatternError, ShapeError
        A part is not a pattern, there is none, or the numbers of rows differ.
    """
    parts = tuple(structure_of(f"parts[{i}]", part) for i, part in enumerate(parts))
    if len({part.shape[0] for part in parts}) != 1:
        raise ShapeError("Matrices side by side need the same number of rows",
                         expected="one part or more, with one number of rows",
                         got=[part.shape for part in parts])  # fmt: skip
    return _plan(parts)


@lru_cache(maxsize=KEPT)
def _plan(parts: tuple[SparsityPattern, ...]) -> AssemblyPlan:
    rows = parts[0].shape[0]
    lengths = np.array([np.diff(part.indptr) for part in parts], dtype=np.int64)  # (parts, rows)
    ends = np.cumsum(lengths.T.reshape(-1))  # of each part's segment of each row, in the order of C
    starts = (ends - lengths.T.reshape(-1)).reshape(rows, len(parts))
    n_columns = np.cumsum([0, *(part.shape[1] for part in parts)])
    columns = np.empty(sum(part.nnz for part in parts), dtype=np.int64)
    indices = []
    for part, start, first in zip(parts, starts.T, n_columns[:-1], strict=True):
        index = np.arange(part.nnz) + np.repeat(start - part.indptr[:-1], np.diff(part.indptr))
        columns[index] = part.indices + first
        indices.append(index)
    indptr = np.concatenate(([0], np.cumsum(lengths.sum(axis=0))))
    pattern = SparsityPattern._unchecked(indptr, columns, (rows, int(n_columns[-1])))
    return AssemblyPlan(parts, pattern, tuple(indices))


Sizes = ParamSpec("Sizes")


def _of_sizes(build: Callable[Sizes, SparsityPattern]) -> Callable[Sizes, SparsityPattern]:
    """Let a builder, whose arguments are all sizes, check them and keep its latest patterns."""
    parameters, kept = signature(build), lru_cache(maxsize=KEPT)(build)

    @wraps(build)
    def checked(*args: Sizes.args, **options: Sizes.kwargs) -> SparsityPattern:
        sizes = parameters.bind(*args, **options).arguments
        return kept(**dict(zip(sizes, checked_sizes(**sizes), strict=True)))

    return checked


# Patterns of blocks: diagonals (pointwise operators, linear layers), dense ones and triangles (recurrent layers).


@_of_sizes
def pointwise_pattern(size: int) -> SparsityPattern:
    """Return the diagonal pattern of an elementwise operator on `size` elements.

    Elements that are zero for one input only, such as a ReLU that is off, stay entries (BPPSA §3.3 and Table 1:
    sparsity 1 - 1/size).
    """
    return SparsityPattern.diagonal(size)


@_of_sizes
def linear_pattern(in_features: int, out_features: int, positions: int = 1) -> SparsityPattern:
    """Return the pattern of the transposed Jacobian of ``y = x @ W.T + b``: dense, or block diagonal.

    Parameters
    ----------
    in_features, out_features
        Sizes of an input and an output vector.
    positions
        Number of vectors per sample (time steps, tokens); the same weights map each.

    Returns
    -------
    SparsityPattern
        Shape (positions * in_features, positions * out_features).
    """
    if positions == 1:
        return SparsityPattern.dense(in_features, out_features)
    rows = positions * in_features
    shape, entry = with_room(rows * out_features, rows, positions * out_features)
    indptr = np.arange(rows + 1, dtype=np.int64) * out_features
    block = np.arange(out_features, dtype=entry)
    first = np.arange(positions, dtype=entry) * out_features
    indices = np.broadcast_to((first[:, None] + block)[:, None, :], (positions, in_features, out_features))
    return SparsityPattern._unchecked(indptr, indices.reshape(-1), shape)


@_of_sizes
def axis_pattern(outer: int, length: int, inner: int) -> SparsityPattern:
    """Return the pattern of an operator on the vectors along one axis: dense along it, diagonal elsewhere.

    Parameters
    ----------
    outer, length, inner
        Numbers of elements of a sample before, along and after the axis.

    Returns
    -------
    SparsityPattern
        Square, of outer * length * inner rows with `length` entries each.
    """
    if inner == 1:
        return linear_pattern(length, length, outer)
    size = outer * length * inner
    shape, entry = with_room(size * length, size, size)
    first = np.arange(outer, dtype=entry)[:, None, None, None] * (length * inner)
    columns = first + np.arange(inner, dtype=entry)[:, None] + np.arange(length, dtype=entry) * inner
    indices = np.broadcast_to(columns, (outer, length, inner, length)).reshape(-1)
    return SparsityPattern._unchecked(np.arange(size + 1, dtype=np.int64) * length, indices, shape)


@_of_sizes
def hidden_pattern(size: int) -> SparsityPattern:
    """Return the pattern of ∂h[t]/∂h[t-1], transposed, of one recurrent step: dense (BPPSA Eq. 9, 11)."""
    return SparsityPattern.dense(size, size)


@_of_sizes
def lstm_pattern(size: int) -> SparsityPattern:
    """Return the pattern of ∂(h, c)[t]/∂(h, c)[t-1], transposed, of an LSTM step.

    Shape (2 * size, 2 * size). Row i is dense: every unit of h reaches all of the next h and c. Row ``size + i`` holds
    only unit i of both: c reaches them unit by unit.
    """
    shape, entry = with_room(2 * size * (size + 1), 2 * size, 2 * size)
    lengths = np.repeat(np.array([2 * size, 2], dtype=np.int64), size)
    columns = np.arange(2 * size, dtype=entry)
    indices = np.concatenate([np.tile(columns, size), columns.reshape(2, size).T.reshape(-1)])
    return SparsityPattern._unchecked(np.concatenate(([0], np.cumsum(lengths))), indices, shape)


@_of_sizes
def step_sum_pattern(steps: int, features: int) -> SparsityPattern:
    """Return the pattern of a sum over steps, per feature: one entry per row, (steps * features, features)."""
    shape, entry = with_room(steps * features, steps * features, features)
    columns = np.tile(np.arange(features, dtype=entry), steps)
    return SparsityPattern._unchecked(np.arange(shape[0] + 1), columns, shape)


def sequence_pattern(
    steps: int, input_size: int, hidden_size: int, *, reverse: bool = False, bidirectional: bool = False
) -> SparsityPattern:
    """Return the pattern of a recurrent layer over a sequence: block triangular, as inputs only reach later outputs.

    Parameters
    ----------
    steps, input_size, hidden_size
        T, I and H. Elements are in time order: row ``t * I + i`` is input i of step t.
    reverse
        The layer runs backward in time: input t reaches the outputs s <= t.
    bidirectional
        Both directions: every step has 2H outputs, the forward ones first.

    Returns
    -------
    SparsityPattern
        Shape (T·I, T·H), or (T·I, T·2H).
    """
    sizes = checked_sizes(steps=steps, input_size=input_size, hidden_size=hidden_size)
    return _sequence(*sizes, bool(reverse), bool(bidirectional))


@lru_cache(maxsize=KEPT)
def _sequence(steps: int, input_size: int, hidden_size: int, reverse: bool, bidirectional: bool) -> SparsityPattern:
    directions = 1 + bidirectional
    most = steps * (steps + 1) // 2 * directions * max(input_size, 1) * hidden_size
    shape, _ = with_room(most, steps * input_size, steps * directions * hidden_size)
    later = np.arange(steps)[:, None] <= np.arange(steps)  # (t, s): input t reaches output s
    reached = [later, later.T] if bidirectional else [later.T if reverse else later]
    of_step = np.repeat(np.stack(reached, axis=-1).reshape(steps, steps * directions), hidden_size, axis=1)
    lengths = np.repeat(of_step.sum(axis=1, dtype=np.int64), input_size)
    indptr = np.concatenate(([0], np.cumsum(lengths)))
    rows = [np.tile(np.flatnonzero(columns), input_size) for columns in of_step]
    indices = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    return SparsityPattern._unchecked(indptr, indices.astype(index_dtype(len(indices), shape)), shape)


@dataclass(frozen=True, eq=False)
class ConvPattern:
    """The structure of the transposed Jacobian of a convolution or a transposed convolution.

    Attributes
    ----------
    pattern
        Shape (in_channels * inputs, out_channels * outputs), over the elements of a flattened sample.
    weight_index
        Index in ``weight.ravel()`` of every entry's value. Read-only int32 (int64 from 2**31 weights), shape (nnz,).
    weight_shape
        (out_channels, in_channels // groups, *kernel), as in torch.nn; channels are swapped if transposed.
    output_size
        Lengths of the output axes.
    layout
        ``"chw"`` or ``"hwc"``.
    """

    pattern: SparsityPattern
    weight_index: np.ndarray
    weight_shape: tuple[int, ...]
    output_size: tuple[int, ...]
    layout: Layout

    def device_index(self, xp: ModuleType) -> Array:
        """Return `weight_index` as an array of `xp`, copied once per device."""
        return self._copies.on(xp)[0]

    @cached_property
    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self.weight_index)


def conv_pattern(
    in_channels: int, out_channels: int, input_size: Lengths, kernel_size: Lengths, stride: Lengths = 1,
    padding: Padding = 0, dilation: Lengths = 1, groups: int = 1, *, layout: Layout = "chw",
    mask: np.ndarray | None = None, memory_limit: int | None = None,
) -> ConvPattern:  # fmt: skip
    """Return the pattern of a convolution over as many axes as `input_size` has. Cached by its arguments.

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
        Channels are connected within their group only; ``groups=in_channels`` is a depthwise convolution.
    layout
        ``"chw"``: rows and columns count channels first; ``"hwc"``: channels last, which gives contiguous runs.
    mask
        Bool array in the shape of the weights: the weights to keep. Entries of the others are left out, and the full
        pattern is never built. None keeps all.
    memory_limit
        Most bytes of the pattern and the weight index, None for no limit.

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
    in_channels: int, out_channels: int, input_size: Lengths, kernel_size: Lengths, stride: Lengths = 1,
    padding: Padding = 0, output_padding: Lengths = 0, groups: int = 1, dilation: Lengths = 1, *,
    layout: Layout = "chw", mask: np.ndarray | None = None, memory_limit: int | None = None,
) -> ConvPattern:  # fmt: skip
    """Return the pattern of a transposed convolution: the transpose of a convolution's pattern.

    Parameters
    ----------
    in_channels, out_channels, input_size, kernel_size, stride, groups, dilation, layout, mask, memory_limit
        As for `conv_pattern`, in the order of `torch.nn.ConvTranspose2d`.
    padding
        Elements cut off both ends of the output, in every form that `conv_pattern` takes.
    output_padding
        Elements added at the end of the output, less than the stride or the dilation.

    Returns
    -------
    ConvPattern
        Shape (in_channels * inputs, out_channels * outputs); `weight_shape` is (in_channels, out_channels // groups,
        *kernel), as in torch.nn.

    Raises
    ------
    OptionError, ShapeError, DTypeError, MemoryLimitError
        As for `conv_pattern`; ShapeError also if the output is empty.
    """
    ndim = 1 if np.ndim(input_size) == 0 else np.size(input_size)
    windows = Windows.transposed(ndim, kernel_size, stride, padding, output_padding, dilation)
    sizes = windows.input_size(lengths("input_size", input_size, ndim, 0))
    convolution = _Convolution(out_channels, in_channels, sizes, windows, groups, layout, transposed=True)
    return _checked(convolution, mask, memory_limit)


class _Convolution(NamedTuple):
    """The options of both builders, in terms of the convolution even if the pattern is transposed."""

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
        """Shape of the pattern."""
        outputs = self.windows.output_size(self.sizes)
        shape = self.in_channels * prod(self.sizes), self.out_channels * prod(outputs)
        return shape[::-1] if self.transposed else shape


def _checked(c: _Convolution, mask: np.ndarray | None, memory_limit: int | None) -> ConvPattern:
    """Check the options and build the pattern."""
    check_choice("layout", c.layout, get_args(Layout))
    check_channels(c.in_channels, c.out_channels, c.groups)
    packed = None if mask is None else packed_mask(mask, c.weight_shape)
    if memory_limit is not None:
        memory_limit = check_integer("memory_limit", memory_limit, 0)
        nnz = conv_entries(c.in_channels, c.out_channels, c.sizes, c.windows, c.groups, mask)
        needed = index_bytes(nnz, c.shape) + nnz * c.weight_type.itemsize
        if needed > memory_limit:
            raise MemoryLimitError("The pattern of the convolution exceeds the memory limit",
                                   expected=f"at most {memory_limit} bytes", got=f"{needed} bytes for {nnz} entries",
                                   remedy="Use a smaller input, fewer channels or more groups")  # fmt: skip
    return _built(c, packed)


@lru_cache(maxsize=KEPT)
def _built(c: _Convolution, packed: bytes | None) -> ConvPattern:
    axes, channels_last = window_factors(c.sizes, c.windows), c.layout == "hwc"
    if packed is None:
        channels = _channels(c)
        factors = [*axes, channels] if channels_last else [channels, *axes]
        if c.transposed:  # the transpose of a Kronecker product is the Kronecker product of the transposes
            factors = [factor.transposed() for factor in factors]
        entries = kron(factors, c.weight_type)
    else:
        entries = masked_entries(unpacked_mask(packed, c.weight_shape), axes, c.in_channels, channels_last)
        entries = entries.transposed() if c.transposed else entries
    index = frozen(entries.offset.astype(c.weight_type, copy=False))
    pattern = SparsityPattern._unchecked(entries.indptr, entries.columns, c.shape)
    output_size = c.sizes if c.transposed else c.windows.output_size(c.sizes)
    return ConvPattern(pattern, index, c.weight_shape, output_size, c.layout)


def _channels(c: _Convolution) -> Factor:
    """Connect every input channel to the output channels of its group."""
    of_group, from_group = c.out_channels // c.groups, c.in_channels // c.groups
    inputs = np.arange(c.in_channels)[:, None]
    columns = inputs // from_group * of_group + np.arange(of_group)
    offset = (columns * from_group + inputs % from_group) * prod(c.windows.kernel)
    return Factor(np.arange(c.in_channels + 1) * of_group, columns.reshape(-1), c.out_channels, offset.reshape(-1))


def conv_entries(
    in_channels: int, out_channels: int, sizes: tuple[int, ...], windows: Windows, groups: int, mask: np.ndarray | None
) -> int:
    """Return the number of entries of `conv_pattern` for these checked arguments, without building it."""
    # A transposed convolution has as many: pass its output lengths as `sizes`, and swap the channels.
    axes = window_factors(sizes, windows)
    if mask is not None:
        return count_masked(mask, axes)
    return in_channels * out_channels // groups * prod(len(f.columns) for f in axes)


# Patterns of max and average pooling in any number of dimensions: the inputs that every window can take from.
#
# A Kronecker product of one small factor per spatial axis and the identity over the channels (BPPSA §3.3). The values
# of a max-pool depend on the input; the pattern does not.


@dataclass(frozen=True, eq=False)
class PoolPattern:
    """The pattern of a pooling layer, and the data from which its values are made.

    Attributes
    ----------
    pattern
        Rows: the inputs of one sample; columns: its windows. The window of an entry is its column.
    offset
        Offset of every entry's input within its window, in C order over the kernel. int32, shape (nnz,).
    inputs
        Number of inputs per window, without padding. int64, shape (n_out,).
    extent
        Number of elements per window within the padded input. int64, shape (n_out,).
    out_size
        Number of windows along each spatial axis.
    line
        (windows, taps) of a line of entries: adjacent windows, and adjacent offsets in each. (1, 1) where windows
        overlap or skip elements along the last axis.
    """

    pattern: SparsityPattern
    offset: np.ndarray
    inputs: np.ndarray
    extent: np.ndarray
    out_size: tuple[int, ...]
    line: tuple[int, int]

    def lines_on(self, xp: ModuleType) -> tuple[Array, Array]:
        """Return window and offset of each line's first entry, as arrays of `xp`, copied once per device."""
        window, offset = self._lines.on(xp)
        return window, offset

    @cached_property
    def _lines(self) -> DeviceCopies:
        step = self.line[0] * self.line[1]
        return DeviceCopies(*(np.ascontiguousarray(array[::step]) for array in (self.pattern.indices, self.offset)))


def pool_pattern(
    channels: int, size: int | tuple[int, ...], kernel: int | tuple[int, ...],
    stride: int | tuple[int, ...] | None = None, padding: int | tuple[int, ...] = 0,
    dilation: int | tuple[int, ...] = 1, ceil_mode: bool = False, *, layout: Layout = "chw",
) -> PoolPattern:  # fmt: skip
    """Return the pattern of the transposed Jacobian of max or average pooling. Cached by its arguments.

    Which input a max-pool takes depends on the values; the pattern does not (BPPSA Table 1: sparsity
    ``1 - h_f w_f / (c h w)`` where windows do not overlap).

    Parameters
    ----------
    channels
        Number of channels; each is pooled separately.
    size
        Spatial size of the input, one length per dimension.
    kernel, stride, padding, dilation, ceil_mode
        As in `torch.nn.MaxPool2d`.
    layout
        ``"chw"``: elements of a sample are ordered (channel, spatial axes); ``"hwc"``: (spatial axes, channel).

    Returns
    -------
    PoolPattern
        Its pattern has shape (channels * inputs, channels * windows).

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
    """Return the pattern of the transposed Jacobian of adaptive pooling. Cached by its arguments.

    Window i of n over a length L holds the inputs from ``floor(i L / n)`` up to, excluding, ``ceil((i + 1) L / n)``.

    Parameters
    ----------
    channels, size, layout
        As in `pool_pattern`.
    out_size
        Number of windows along each axis.

    Returns
    -------
    PoolPattern
        Its pattern has shape (channels * inputs, channels * windows).

    Raises
    ------
    OptionError
        A size is not a positive integer, or the layout is unknown.
    MemoryLimitError
        There are too many windows for the memory.
    """
    size = _checked_size(channels, size, layout)
    out_size = lengths("output_size", out_size, len(size), 1)
    try:
        return _adaptive_pattern(channels, size, out_size, layout)
    except MemoryError as error:
        raise MemoryLimitError("The windows do not fit in memory", expected="memory for the index of each",
                               got=f"output_size {out_size}") from error  # fmt: skip


@lru_cache(maxsize=KEPT)
def window_pattern(channels: int, size: tuple[int, ...], windows: PoolWindows, layout: Layout = "chw") -> PoolPattern:
    """Return `pool_pattern` for checked arguments."""
    extents = []
    for a, (length, count) in enumerate(zip(size, windows.output_size(size), strict=True)):
        start = np.arange(count) * windows.stride[a] - windows.before[a]
        # AvgPool (which has no dilation) counts padding up to the end of the padded input, not past it
        extents.append(np.minimum(start + windows.kernel[a], length + windows.before[a]) - start)
    return _assembled(channels, window_factors(size, windows), extents, windows.kernel[-1], layout)


@lru_cache(maxsize=KEPT)
def adaptive_windows(length: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first input of every window of adaptive pooling over an axis, and the one behind its last."""
    try:
        numbers = np.arange(count)
        return frozen(numbers * length // count), frozen(-(-(numbers + 1) * length // count))
    except MemoryError as error:
        raise MemoryLimitError("The windows do not fit in memory", expected="memory for the index of each",
                               got=f"output_size {count}") from error  # fmt: skip


@lru_cache(maxsize=KEPT)
def _adaptive_pattern(channels: int, size: tuple[int, ...], out_size: tuple[int, ...], layout: Layout) -> PoolPattern:
    windows = [adaptive_windows(length, n) for length, n in zip(size, out_size, strict=True)]
    taps = [end - start for start, end in windows]
    longest = [int(t.max()) for t in taps]
    axes = []
    for axis, length in enumerate(size):
        indptr = np.concatenate(([0], np.cumsum(taps[axis])))
        tap = np.arange(indptr[-1]) - np.repeat(indptr[:-1], taps[axis])
        inputs = np.repeat(windows[axis][0], taps[axis]) + tap
        axes.append(Factor(indptr, inputs, length, tap * prod(longest[axis + 1 :])).transposed())
    return _assembled(channels, axes, taps, longest[-1], layout)


def _assembled(channels: int, axes: list[Factor], extents: list[np.ndarray], taps: int, layout: Layout) -> PoolPattern:
    """Assemble a pattern from its axes; windows have at most `taps` elements along the last one."""
    every = np.arange(channels + 1)
    each = Factor(every, every[:-1], channels, np.zeros(channels, np.int64))
    whole = kron([each, *axes] if layout == "chw" else [*axes, each], np.int32)
    pattern = SparsityPattern._unchecked(whole.indptr, whole.columns, (whole.n_rows, whole.n_columns))
    inputs = frozen(np.bincount(pattern.indices, minlength=pattern.shape[1]))
    ones = [np.ones(channels, np.int64)]
    extent = frozen(reduce(np.multiply.outer, ones + extents if layout == "chw" else extents + ones).reshape(-1))
    line = _line(axes[-1], taps) if layout == "chw" else (channels, 1)
    if np.diff(whole.indptr).max(initial=0) > 1:  # overlapping windows: the entries of a line are not adjacent
        line = (1, 1)
    return PoolPattern(pattern, frozen(whole.offset), inputs, extent, tuple(f.n_columns for f in axes), line)


def _line(axis: Factor, taps: int) -> tuple[int, int]:
    """Return `PoolPattern.line` where windows adjoin without gaps or overlap, else (1, 1)."""
    every = np.arange(axis.n_columns * taps)
    tiled = np.array_equal(axis.columns, every // taps) and np.array_equal(axis.offset, every % taps)
    return (axis.n_columns, taps) if tiled else (1, 1)


def _checked_size(channels: Any, size: Any, layout: str) -> tuple[int, ...]:
    check_choice("layout", layout, get_args(Layout))
    lengths("channels", channels, 1, 1)
    return lengths("size", size, len(size) if isinstance(size, (tuple, list)) else 1, 1)


# Patterns of resampling: the elements that every output interpolates, axis by axis, with their weights.


class Resampling(NamedTuple):
    """How the outputs on an axis interpolate the inputs, as `torch.nn.Upsample`."""

    inputs: int  # Length of the axis
    outputs: int
    scale: float | None  # Outputs per input; None: outputs / inputs
    mode: str  # "nearest", "nearest-exact" or "linear"
    align_corners: bool

    def taps(self, real: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the inputs that every output reads, (outputs, taps), and their weights; computed in `real` numbers."""
        number, half = np.arange(self.outputs, dtype=real), real(0.5)
        step = real(self.inputs) / real(self.outputs) if self.scale is None else real(1 / self.scale)
        if self.align_corners:
            step = real(self.inputs - 1) / real(max(self.outputs - 1, 1))
        if self.mode.startswith("nearest"):
            at = (number if self.mode == "nearest" else number + half) * step
            low = np.floor(at.astype(np.float32)).astype(np.int64)  # as in PyTorch: 49 · (2 / 98), say, is 1
            return np.minimum(low, self.inputs - 1)[:, None], np.ones((self.outputs, 1), real)
        at = number * step if self.align_corners else (number + half) * step - half
        if self.inputs == self.outputs:  # as in PyTorch, which then copies
            return np.arange(self.outputs)[:, None], np.ones((self.outputs, 1), real)
        at = np.maximum(at, real(0))
        low = np.minimum(np.floor(at).astype(np.int64), self.inputs - 1)
        t = np.clip(at - low, real(0), real(1))
        return np.stack([low, np.minimum(low + 1, self.inputs - 1)], axis=1), np.stack([1 - t, t], axis=1)

    def entries(self, real: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return ``output * inputs + input`` of every entry of the matrix, ascending, and the weights, 0 too."""
        index, values = self.taps(real)
        places = np.arange(self.outputs)[:, None] * self.inputs + index
        keys, entry = np.unique(places.reshape(-1), return_inverse=True)
        return keys, np.bincount(entry.reshape(-1), values.reshape(-1), len(keys))


@lru_cache(maxsize=KEPT)
def resampling_pattern(
    channels: int, axes: tuple[Resampling, ...], dtype: np.dtype
) -> tuple[SparsityPattern, DeviceCopies]:
    """Return the pattern of the transposed Jacobian of resampling every channel, and its values."""
    each = np.arange(channels + 1)
    factors, weights, behind = [], [], 1
    for axis in reversed(axes):
        keys, values = axis.entries(dtype.type)
        read = values != 0
        columns, rows = np.divmod(keys[read], axis.inputs)
        indptr = np.concatenate(([0], np.cumsum(np.bincount(columns, minlength=axis.outputs))))
        factors.append(Factor(indptr, rows, axis.inputs, np.arange(len(rows)) * behind).transposed())
        weights.append(values[read])
        behind *= len(rows)
    factors.append(Factor(each, each[:-1], channels, np.zeros(channels, np.int64)))
    whole = kron(factors[::-1], np.int64)
    values = reduce(np.multiply.outer, weights[::-1]).reshape(-1)[whole.offset].astype(dtype)
    pattern = SparsityPattern._unchecked(whole.indptr, whole.columns, (whole.n_rows, whole.n_columns))
    return pattern, DeviceCopies(frozen(values))
