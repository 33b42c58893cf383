"""Launchers of the optimizers' updates, of kernels of one pass over memory, of max pooling and banded products.

A launch's arguments hold the addresses, sizes, steps and options of its arrays, so that nothing is sent to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import FUNCTIONS, LOSS_FUNCTIONS, Array, UpdateRule
from sparsebp.kernels.checks import OPTIONAL_BUFFERS, UPDATE_BUFFERS, UPDATE_OPTIONS
from sparsebp.kernels.device.launch import (
    BLOCK,
    WARP,
    WARP_A_ROW,
    ByValue,
    Defines,
    Launcher,
    by_value,
    c_types,
    ceil_div,
    check_int32,
)

Check = Callable[[], None]
_FILE = "optimizers.cu"
_CHUNK = 4096
"""Numbers that a block works on, as in the source."""
_ROOM = 3968
"""Bytes for tables among a launch's arguments, as in the source."""
_LAYOUT = 3
"""Numbers of an array in addition to its addresses and options: size, first chunk, step."""


class _Part(NamedTuple):
    """Arrays of one launch: which of all, how many, two tables that are passed by value, and the blocks to launch."""

    rows: slice
    number: np.int32
    addresses: ByValue
    layout: ByValue
    blocks: int
    a_block_each: bool


class OptimizerKernels(Launcher):
    """Optimizers' part of `sparsebp.kernels.spec.Kernels` on a device; shapes and dtypes are stated there."""

    def optimizer_update(
        self,
        rule: UpdateRule,
        params: Sequence[Array],
        grads: Sequence[Array],
        buffers: Sequence[Sequence[Array | None]],
        options: Array,
        steps: Array,
        check: Check,
    ) -> None:
        """Update all parameters in place; a block a chunk of one of them."""
        names = UPDATE_BUFFERS[rule]
        needed = [of for name, of in zip(names, buffers, strict=True) if name not in OPTIONAL_BUFFERS]
        optional = [of for name, of in zip(names, buffers, strict=True) if name in OPTIONAL_BUFFERS]
        if not self._look_right(params, [grads, *needed], optional):
            check()
        if not params:
            return
        columns, width = (params, grads, *buffers), len(UPDATE_OPTIONS[rule])
        sent = backend.device_of(options) == "cpu"
        numbers: Sequence[int] = steps.tolist() if sent else ()
        name, define = f"{rule}_update", c_types(REAL=params[0])
        for part in self._parts(columns, width, numbers):
            table = np.zeros((_rows_a_launch(len(columns), width), width))
            if sent:
                table[: part.number] = options[part.rows]
            own = (None, None) if sent else (options[part.rows], steps[part.rows])
            args = (part.addresses, part.layout, by_value(table), *own, part.number)
            self._launch(_FILE, name, define, part.blocks, (BLOCK,), args)

    def scale_arrays(self, arrays: Sequence[Array], factor: float, check: Check) -> None:
        """Multiply all arrays by one number, in place."""
        for part, define in self._plain(arrays, check):
            args = (part.addresses, part.layout, part.number, arrays[0].dtype.type(factor))
            self._launch(_FILE, "scale_arrays", define, part.blocks, (BLOCK,), args)

    def clip_arrays(self, arrays: Sequence[Array], squares: Array, max_norm: float, check: Check) -> None:
        """Multiply all arrays by a factor that every block works out for itself."""
        for part, define in self._plain(arrays, check):
            args = (part.addresses, part.layout, part.number, squares, np.int32(squares.size), np.float64(max_norm))
            self._launch(_FILE, "clip_arrays", define, part.blocks, (BLOCK,), args)

    def clamp_arrays(self, arrays: Sequence[Array], limit: float, check: Check) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays."""
        for part, define in self._plain(arrays, check):
            args = (part.addresses, part.layout, part.number, arrays[0].dtype.type(limit))
            self._launch(_FILE, "clamp_arrays", define, part.blocks, (BLOCK,), args)

    def square_sums(self, arrays: Sequence[Array], out: Array, check: Check) -> None:
        """Sum of the squares of each array, in float64: of its chunks first, then of those, if there are several."""
        for part, define in self._plain(arrays, check):
            found = out[part.rows]
            sums = found if part.a_block_each else self.xp.empty(part.blocks, np.float64)
            args = (part.addresses, part.layout, part.number, sums)
            self._launch(_FILE, "chunk_squares", define, part.blocks, (BLOCK,), args)
            if sums is not found:
                grid = ceil_div(int(part.number), WARP_A_ROW[1])
                self._launch(_FILE, "sum_chunks", define, grid, WARP_A_ROW, (part.layout, part.number, sums, found))

    def join_arrays(self, arrays: Sequence[Array], out: Array) -> None:
        """Copy all arrays to one; a block a chunk of one of them."""
        begin = 0
        for part, define in self._plain(arrays):
            args = (part.addresses, part.layout, part.number, out[begin:])
            self._launch(_FILE, "join_arrays", define, part.blocks, (BLOCK,), args)
            begin += sum(array.size for array in arrays[part.rows])

    def _plain(self, arrays: Sequence[Array], check: Check | None = None) -> Iterator[tuple[_Part, Defines]]:
        """Yield the launches' shares of arrays, of which `check` is None where they have been checked."""
        if check is not None and not self._look_right(arrays):
            check()
        if arrays:
            define = c_types(REAL=arrays[0])
            for part in self._parts((arrays,), 0, ()):
                yield part, define

    def _look_right(
        self,
        arrays: Sequence[Array],
        others: Sequence[Sequence[Array]] = (),
        optional: Sequence[Sequence[Array | None]] = (),
    ) -> bool:
        """Say whether all are of one real dtype and C-contiguous, each of `others` and `optional` like its array.

        False means that a closer look is needed, which takes ten times as long.
        """
        kind, columns = self.xp.ndarray, (*others, *optional)
        if kind is np.ndarray or not arrays or any(len(column) != len(arrays) for column in columns):
            return False  # NumPy's arrays, of the executor in the tests, may be read-only
        dtype = getattr(arrays[0], "dtype", None)
        if dtype not in backend.FLOAT_DTYPES:
            return False
        shapes = [getattr(array, "shape", None) for array in arrays]
        for number, column in enumerate((arrays, *columns)):
            for array, shape in zip(column, shapes, strict=True):
                if type(array) is kind:
                    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
                        return False
                elif array is not None or number <= len(others):
                    return False
        return True

    def _parts(self, columns: Sequence[Sequence[Any]], options: int, steps: Sequence[int]) -> Iterator[_Part]:
        """Yield the launches' shares of arrays, by row; `steps` may be empty."""
        most = _rows_a_launch(len(columns), options)
        for begin in range(0, len(columns[0]), most):
            rows = slice(begin, begin + most)
            arrays = [array for row in zip(*(column[rows] for column in columns), strict=True) for array in row]
            self._check_device(arrays)
            sizes = [array.size for array in columns[0][rows]]
            first = [0]
            for size in sizes:
                first.append(first[-1] + -(-size // _CHUNK))
            layout = np.zeros(_LAYOUT * most + 1, np.int64)
            layout[: len(sizes)] = sizes
            layout[most : most + len(first)] = first
            if steps:
                layout[2 * most + 1 :][: len(sizes)] = steps[rows]
            addresses = self.loader.addresses(arrays, most * len(columns))
            one_each = first == list(range(len(first)))
            yield _Part(rows, np.int32(len(sizes)), addresses, by_value(layout), first[-1], one_each)


def _rows_a_launch(columns: int, options: int) -> int:
    return _ROOM // (8 * (columns + _LAYOUT + options))


# Launchers of kernels of one pass over memory: ``pointwise.cu``.

_PIECE = 8 * BLOCK
"""Elements of a channel that a block works on, as in the source."""
_ALL_ROWS = (WARP, 16)
"""A block that has all rows of a loss."""
_MOST_ROUNDS = 128
"""Rounds of its warps, each over as many entries as there are lanes, that are done before a second launch would be."""


def _of_function(function: str, constants: tuple[float, float, float], out: Array) -> tuple[Any, ...]:
    """Return the number that the source has for a function, and its constants."""
    return np.int32(FUNCTIONS.index(function)), *map(out.dtype.type, constants)


class PointwiseKernels(Launcher):
    """Device side of these kernels in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def channel_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, mean: Array, var: Array, scale: Array,
        out: Array, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Mean and variance, a block a piece of a channel; the factors; a linear map, a thread some elements."""
        self._add_pieces("moments", x, (x,), (mean, var), np.int32(x.shape[0] * x.shape[2]))
        factor = self.xp.empty(mean.shape, mean.dtype)
        self.channel_factors(var, eps, weight, scale, factor)
        self.channel_scale(x, mean, factor, bias, out, limits)

    def channel_back(
        self, gy: Array, x: Array, mean: Array, scale: Array, weight: Array | None, sums: Array, products: Array,
        out: Array, known: bool = False, y: Array | None = None, limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Two sums, a block a piece of a channel; the slopes; the gradient, a thread some elements."""
        gy = self._counted(gy, y, limits)
        if not known:
            self.channel_products(gy, x, mean, sums, products)
        offset, slope = self.xp.empty(mean.shape, mean.dtype), self.xp.empty(mean.shape, mean.dtype)
        count = mean.dtype.type(x.shape[0] * x.shape[2])
        self._numbers("channel_slopes", sums, sums, products, scale, count, offset, slope)
        factor = scale if weight is None else scale * weight
        self._channels("channel_centre", x, gy, x, mean, offset, slope, factor, out)

    def channel_scale(
        self, x: Array, mean: Array | None, factor: Array | None, offset: Array | None, out: Array,
        limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """A linear map for every channel; a thread some elements."""
        self._channels("channel_scale", x, x, mean, factor, offset, out)
        if limits is not None:
            self.clamp(out.reshape(-1), *limits, out.reshape(-1))

    def channel_products(
        self, gy: Array, x: Array, mean: Array, sums: Array, products: Array, y: Array | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:  # fmt: skip
        """Two sums over every channel in one pass; a block a piece of a channel."""
        self._add_pieces("products", x, (self._counted(gy, y, limits), x, mean), (sums, products))

    def _counted(self, gy: Array, y: Array | None, limits: tuple[float, float] | None) -> Array:
        """Return a gradient with zeros where y is not within the limits."""
        if y is None or limits is None:
            return gy
        out = self.xp.empty(gy.shape, gy.dtype)
        self.clamp_grad(gy.reshape(-1), y.reshape(-1), *limits, out.reshape(-1))
        return out

    def _add_pieces(
        self, name: str, x: Array, arrays: tuple[Array, ...], out: tuple[Array, Array], *count: Any
    ) -> None:
        """Launch two sums over each piece of a channel, and those over all pieces."""
        batch, channels, size = x.shape
        check_int32(name, {"the elements of a channel": batch * size})
        defines, pieces = c_types(REAL=x), ceil_div(batch * size, _PIECE)
        found = self.xp.empty((2, channels, pieces), x.dtype)
        sizes = map(np.int32, (*x.shape, pieces))
        self._launch("pointwise.cu", f"piece_{name}", defines, channels * pieces, (BLOCK,), (*arrays, *found, *sizes))
        args = (*found, *out, np.int32(channels), *count, np.int32(pieces))
        self._launch("pointwise.cu", f"channel_{name}", defines, ceil_div(channels, WARP_A_ROW[1]), WARP_A_ROW, args)

    def _channels(self, name: str, x: Array, *arrays: Array) -> None:
        check_int32(name, {"the elements of a channel": x.shape[0] * x.shape[2]})
        args = (*arrays, *map(np.int32, x.shape))
        self._launch("pointwise.cu", name, c_types(REAL=x), ceil_div(x.size, _PIECE), (BLOCK,), args)

    def channel_track(
        self, mean: Array, var: Array, momentum: float, correction: float, running_mean: Array, running_var: Array
    ) -> None:
        """Running statistics, one step on; a thread a channel."""
        number = mean.dtype.type
        factors = (number(momentum), number(1 - momentum), number(correction))
        self._numbers("channel_track", mean, mean, var, *factors, running_mean, running_var)

    def channel_factors(self, var: Array, eps: float, weight: Array | None, scale: Array, factor: Array) -> None:
        """Each channel's scale and factor; a thread a channel."""
        self._numbers("channel_factors", var, var, var.dtype.type(eps), weight, scale, factor)

    def _numbers(self, name: str, like: Array, *args: Any) -> None:
        grid = ceil_div(len(like), BLOCK)
        self._launch("pointwise.cu", name, c_types(REAL=like), grid, (BLOCK,), (*args, np.int32(len(like))))

    def row_normalise(
        self, x: Array, weight: Array | None, bias: Array | None, eps: float, centre: bool, mean: Array, scale: Array,
        out: Array,
    ) -> None:  # fmt: skip
        """Statistics of every row, and the row normalised by them; a block a row."""
        args = (x, weight, bias, x.dtype.type(eps), np.int32(centre), mean, scale, out)
        self._blocks_of_rows("row_normalise", x, len(x), weight, *args)

    def row_back(
        self, gy: Array, x: Array, weight: Array | None, centre: bool, mean: Array, scale: Array, out: Array
    ) -> None:
        """Two sums over every row, then the gradient; a block a row."""
        self._blocks_of_rows("row_back", x, len(x), weight, gy, x, weight, np.int32(centre), mean, scale, out)

    def row_products(self, gy: Array, x: Array, mean: Array, scale: Array, sums: Array, products: Array) -> None:
        """Two sums for every weight; a block a weight."""
        self._blocks_of_rows("row_products", x, len(sums), sums, gy, x, mean, scale, sums, products)

    def _blocks_of_rows(self, name: str, x: Array, blocks: int, weight: Array | None, *args: Any) -> None:
        sizes = (*x.shape, x.shape[1] if weight is None else len(weight))
        self._launch("pointwise.cu", name, c_types(REAL=x), blocks, (BLOCK,), (*args, *map(np.int64, sizes)))

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits; a thread an element."""
        limit = out.dtype.type
        self._elements("clamp", out, x, limit(low), limit(high))

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one."""
        limit = out.dtype.type
        self._elements("clamp_grad", out, gy, y, limit(low), limit(high))

    def channel_slope(self, values: Array, x: Array, weight: Array, out: Array) -> None:
        """Values, times the channel's weight where x is not positive; a thread an element."""
        args = values, x, weight, *map(np.int64, x.shape[1:]), out, np.int64(out.size)
        self._launch("pointwise.cu", "channel_slope", c_types(REAL=out), ceil_div(out.size, BLOCK), (BLOCK,), args)

    def channel_slope_grad(self, gy: Array, x: Array, out: Array) -> None:
        """Every element's term, a thread each; then the sums."""
        terms = self.xp.empty(x.shape, x.dtype)
        self._elements("channel_slope_terms", terms, gy, x)
        terms.sum(axis=(0, 2), out=out)

    def pointwise(self, x: Array, function: str, constants: tuple[float, float, float], out: Array) -> None:
        """Every element's f; a thread an element."""
        self._elements("pointwise", out, x, *_of_function(function, constants, out))

    def pointwise_grad(
        self, gy: Array, kept: Array, function: str, constants: tuple[float, float, float], out: Array
    ) -> None:
        """The gradient times the slope; a thread an element."""
        self._elements("pointwise_grad", out, gy, kept, *_of_function(function, constants, out))

    def _elements(self, name: str, out: Array, *args: Any) -> None:
        grid = ceil_div(out.size, BLOCK)
        self._launch("pointwise.cu", name, c_types(REAL=out), grid, (BLOCK,), (*args, out, np.int64(out.size)))

    def softmax(self, x: Array, log: bool, out: Array) -> None:
        """A warp a row; along another axis than the last, a thread."""
        self._softmax("softmax", x, log, x, out)

    def softmax_grad(self, gy: Array, y: Array, log: bool, out: Array) -> None:
        """As `softmax`."""
        self._softmax("softmax_grad", y, log, gy, y, out)

    def _softmax(self, name: str, like: Array, log: bool, *arrays: Array) -> None:
        outer, axis, inner = like.shape
        together = WARP if inner == 1 else 1
        grid = ceil_div(outer * inner * together, BLOCK)
        args = *arrays, np.int32(log), *map(np.int64, (outer * inner, axis, inner)), np.int32(together)
        self._launch("pointwise.cu", name, c_types(REAL=like), grid, (BLOCK,), args)

    def element_loss(
        self, prediction: Array, target: Array, weight: Array | None, counts: Array | None, function: str,
        constant: float, divisor: float, losses: Array | None, slopes: Array, value: Array | None,
    ) -> None:  # fmt: skip
        """Every element's loss and slope, a thread an element; then the sum."""
        losses = self.xp.empty(slopes.shape, slopes.dtype) if losses is None else losses
        number = slopes.dtype.type
        args = prediction, target, weight, counts, np.int32(LOSS_FUNCTIONS.index(function)), number(constant)
        self._elements("element_loss", slopes, *args, number(1 / divisor), losses)
        if value is not None:
            losses.sum(dtype=np.float64, out=value)
            value /= divisor

    def softmax_cross_entropy(
        self, logits: Array, target: Array, losses: Array, grad: Array, mean: Array | None = None
    ) -> None:
        """Loss and gradient of every row; a warp a row. A target outside [0, C) makes its row NaN.

        The mean over few rows costs no launch of its own.
        """
        rows, classes = logits.shape
        few = mean is not None and rows * ceil_div(classes, WARP) <= _MOST_ROUNDS
        block, grid = (_ALL_ROWS, 1) if few else (WARP_A_ROW, ceil_div(rows, WARP_A_ROW[1]))
        scale = grad.dtype.type(1 if mean is None else 1 / rows)
        args = (logits, target, losses, grad, mean if few else None, *map(np.int64, logits.shape), scale)
        self._launch("pointwise.cu", "softmax_cross_entropy", c_types(REAL=logits), grid, block, args)
        if mean is not None and not few:
            losses.mean(dtype=np.float64, out=mean)


# Launchers of max pooling and banded products (``cuda/windows.cu``, ``bands.cu``): a thread an element that is written.

Axes = tuple[int, ...]


class WindowKernels(Launcher):
    """Device side of windows in `sparsebp.kernels.spec.Kernels`, which states the shapes."""

    def max_pool(
        self, x: Array, rows: Array, columns: Array, kernel: Axes, dilation: Axes, y: Array, winner: Array
    ) -> None:
        """The maximum of every window and its place."""
        self._pool("max_pool", (x, y, winner), winner, y.size, x, y, (rows, columns), (kernel, dilation))

    def max_pool_grad(
        self, gy: Array, winner: Array, rows: Array, columns: Array, kernel: Axes, dilation: Axes, out: Array
    ) -> None:
        """Every window's gradient goes to its maximum; every input gathers them in the order of the windows."""
        arrays = gy, winner, out
        self._pool("max_pool_grad", arrays, winner, out.size, out, gy, (rows, columns), (kernel, dilation))

    def band_product(self, x: Array, first: Array, indptr: Array, data: Array, out: Array) -> None:
        """A banded matrix along an axis."""
        args = (x, first, indptr, data, out, *map(np.int64, (out.size, x.shape[1], *out.shape[1:])))
        self._launch("bands.cu", "band_product", c_types(REAL=x), ceil_div(out.size, BLOCK), (BLOCK,), args)

    def _pool(
        self, name: str, arrays: tuple[Array, ...], winner: Array, size: int, x: Array, y: Array,
        windows: tuple[Array, Array], options: tuple[Axes, Axes],
    ) -> None:  # fmt: skip
        args: tuple[Any, ...] = (
            *arrays, *windows, np.int64(size), *map(np.int32, (*x.shape[1:], *y.shape[1:])),
            *(np.int32(n) for option in options for n in option),
        )  # fmt: skip
        defines = c_types(REAL=x, WINNER=winner)
        self._launch("windows.cu", name, defines, ceil_div(size, BLOCK), (BLOCK,), args)
