"""Launchers of the optimizers' updates and of clipping (``cuda/optimizers.cu``): one launch for as many arrays as fit.

A launch's arguments hold the addresses, sizes, steps and options of its arrays, so that nothing is sent to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array, UpdateRule
from sparsebp.kernels.api.optimizers import OPTIONAL_BUFFERS, UPDATE_BUFFERS, UPDATE_OPTIONS
from sparsebp.kernels.device.base import BLOCK, WARP, ByValue, Defines, Launcher, by_value, ceil_div, real_define

Check = Callable[[], None]
_FILE = "optimizers.cu"
_CHUNK = 4096
"""Numbers that a block works on, as in the source."""
_ROOM = 3968
"""Bytes for tables among a launch's arguments, as in the source."""
_LAYOUT = 3
"""Numbers of an array beside its addresses and options: size, first chunk, step."""


class _Part(NamedTuple):
    """Arrays of one launch: which of all, how many, two tables that are passed by value, and the blocks to launch."""

    rows: slice
    number: np.int32
    addresses: ByValue
    layout: ByValue
    blocks: int


class OptimizerKernels(Launcher):
    """Optimizers' part of `sparsebp.kernels.api.Kernels` on a device; shapes and dtypes are stated there."""

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
        name, define = f"{rule}_update", real_define(params[0])
        for part in self._parts(columns, width, numbers):
            table = np.zeros((_rows_a_launch(len(columns), width), width))
            if sent:
                table[: part.number] = options[part.rows]
            own = (None, None) if sent else (options[part.rows], steps[part.rows])
            args = (part.addresses, part.layout, by_value(table), *own, part.number)
            self._launch(_FILE, name, define, part.blocks, (BLOCK,), args)

    def scale_arrays(self, arrays: Sequence[Array], factor: float | Array, check: Check) -> None:
        """Multiply all arrays by one number, in place."""
        there = isinstance(factor, self.xp.ndarray)
        for part, define in self._plain(arrays, check):
            number = arrays[0].dtype.type(1 if there else factor)
            args = (part.addresses, part.layout, part.number, number, factor if there else None)
            self._launch(_FILE, "scale_arrays", define, part.blocks, (BLOCK,), args)

    def clamp_arrays(self, arrays: Sequence[Array], limit: float, check: Check) -> None:
        """Bring all numbers into [-limit, limit], in place; NaN stays."""
        for part, define in self._plain(arrays, check):
            args = (part.addresses, part.layout, part.number, arrays[0].dtype.type(limit))
            self._launch(_FILE, "clamp_arrays", define, part.blocks, (BLOCK,), args)

    def square_sums(self, arrays: Sequence[Array], out: Array, check: Check) -> None:
        """Sum of the squares of each array, in float64: of its chunks first, then of those."""
        for part, define in self._plain(arrays, check):
            sums = self.xp.empty(part.blocks, np.float64)
            args = (part.addresses, part.layout, part.number, sums)
            self._launch(_FILE, "chunk_squares", define, part.blocks, (BLOCK,), args)
            block = (WARP, BLOCK // WARP)
            grid = ceil_div(int(part.number), block[1])
            self._launch(_FILE, "sum_chunks", define, grid, block, (part.layout, part.number, sums, out[part.rows]))

    def _plain(self, arrays: Sequence[Array], check: Check) -> Iterator[tuple[_Part, Defines]]:
        if not self._look_right(arrays):
            check()
        if arrays:
            define = real_define(arrays[0])
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
            yield _Part(rows, np.int32(len(sizes)), addresses, by_value(layout), first[-1])


def _rows_a_launch(columns: int, options: int) -> int:
    return _ROOM // (8 * (columns + _LAYOUT + options))
