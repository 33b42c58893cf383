"""Launchers of linear recurrences and selective scans (``cuda/recurrence.cu``, ``cuda/selective_scan.cu``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.check import Array
from sparsebp.kernels.device.launch import BLOCK, WARP, Defines, Launcher, c_types, ceil_div
from sparsebp.kernels.spec import CANDIDATES, CHUNK

Operands = tuple[Array | None, ...]

_STATES, _CHANNELS = 8, 128
"""States in a thread's registers, and channels of a block, as in the source."""


class LinearRecurrenceKernels(Launcher):
    """Device side of linear recurrences in `sparsebp.kernels.spec.Kernels`: a thread a unit of a sample."""

    def linear_recurrence(
        self, a: Array, b: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, h: Array
    ) -> None:
        """Every thread runs down the steps."""
        self._linear("linear_recurrence", (a, b, h0, lengths, h), a, h, pairs, reverse)

    def linear_recurrence_grad(
        self, a: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, pairs: bool, reverse: bool, ga: Array,
        gb: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same, from the last step to the first."""
        arrays = (a, h, gh, h0, lengths, ga, gb, gh0)
        self._linear("linear_recurrence_grad", arrays, a, h, pairs, reverse, len(ga) != len(h))

    def min_gru_forward(
        self, x: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool, h: Array
    ) -> None:
        """Every thread runs down the steps."""
        self._min_gru("min_gru_forward", (x, h0, lengths, h), h, nonlinearity, reverse)

    def min_gru_backward(
        self, x: Array, h: Array, gh: Array, h0: Array, lengths: Array | None, nonlinearity: str, reverse: bool,
        gx: Array, gh0: Array,
    ) -> None:  # fmt: skip
        """The same, from the last step to the first."""
        self._min_gru("min_gru_backward", (x, h, gh, h0, lengths, gx, gh0), h, nonlinearity, reverse)

    def _linear(self, name: str, arrays: Operands, a: Array, h: Array, pairs: bool, *flags: bool) -> None:
        steps, batch, width = h.shape
        units, of_units = (n // (1 + pairs) for n in (width, a.shape[2]))
        of_step, of_sample = a.shape[1] * of_units if len(a) > 1 else 0, of_units if a.shape[1] > 1 else 0
        sizes = of_step, of_sample, int(of_units > 1), steps, batch * units, units
        args = (*arrays, *map(np.int64, sizes), *map(np.int32, flags))
        self._launch_chains(name, c_types(REAL=h) | {"PAIRS": int(pairs)}, batch * units, args)

    def _min_gru(self, name: str, arrays: Operands, h: Array, nonlinearity: str, reverse: bool) -> None:
        steps, batch, units = h.shape
        function, sizes = np.int32(CANDIDATES.index(nonlinearity)), (steps, batch * units, units)
        args = (*arrays, function, *map(np.int64, sizes), np.int32(reverse))
        self._launch_chains(name, c_types(REAL=h) | {"PAIRS": 0}, batch * units, args)

    def _launch_chains(self, name: str, defines: Defines, count: int, args: tuple[Any, ...]) -> None:
        self._launch("recurrence.cu", name, defines, ceil_div(count, BLOCK), (BLOCK,), args)


class SelectiveScanKernels(Launcher):
    """Device side of the selective scan in `sparsebp.kernels.spec.Kernels`; shapes and dtypes are stated there."""

    def selective_scan(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, y: Array, states: Array
    ) -> None:
        """A thread a channel of a sample runs down the steps, once for `_STATES` states."""
        self._scan("selective_scan", (x, dt, a, b, c, d, y, states), x, len(a))

    def selective_scan_grad(
        self, x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, gy: Array, states: Array, gx: Array,
        gdt: Array, ga: Array, gb: Array, gc: Array, gd: Array,
    ) -> None:  # fmt: skip
        """The same back; each warp leaves its sums at b and c, which are added up here."""
        _, batch, channels = x.shape
        blocks = ceil_div(channels, _CHANNELS)
        of_b, of_c = (self.xp.empty((blocks * _CHANNELS // WARP, *b.shape), b.dtype) for _ in range(2))
        befores = self.xp.empty((CHUNK, _STATES, batch * blocks * _CHANNELS), x.dtype)
        arrays = (x, dt, a, b, c, d, gy, states, gx, gdt, ga, of_b, of_c, gd, befores)
        self._scan("selective_scan_grad", arrays, x, len(a))
        gb[...], gc[...] = of_b.sum(axis=0), of_c.sum(axis=0)

    def _scan(self, name: str, arrays: tuple[Array, ...], x: Array, order: int) -> None:
        steps, batch, channels = x.shape
        blocks = ceil_div(channels, _CHANNELS)
        args = (*arrays, *map(np.int64, (steps, batch, channels, order, blocks)))
        self._launch("selective_scan.cu", name, c_types(REAL=x), batch * blocks, (_CHANNELS,), args)
