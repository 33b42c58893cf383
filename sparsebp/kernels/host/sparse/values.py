"""Values of transposed Jacobians on the host: what a forward saved, batch first, becomes entries, batch last."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import SLOPES, Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team

_GIVEN, _RELU, _TANH, _SIGMOID = range(len(SLOPES))


class ValueKernels:
    """Host side of the values part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def pointwise_slopes(self, kept: Array, function: str, out: Array) -> None:
        """Slopes from what a forward kept, turned to batch last."""
        batch = out.shape[1]
        arguments = (kept.reshape(-1), SLOPES.index(function), out.reshape(-1), batch, out.shape[0])
        parts = parts_for(out.size)
        _slopes(team(parts), parts, *arguments, parts)

    def max_pool_values(self, winner: Array, window: Array, offset: Array, windows: int, taps: int, out: Array) -> None:
        """One where an entry's place in its window is the winner's, else zero."""
        batch = out.shape[1]
        arguments = (winner.reshape(-1), winner.shape[1], window, offset, windows, taps, out.reshape(-1), batch)
        parts = parts_for(out.size)
        _winners(team(parts), parts, *arguments, parts)


# The functions below are compiled: their arguments are flat arrays, sizes and flags.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _slopes_part(part, kept, function, out, batch, size, parts):
    low, high, one = share(part, parts, size), share(part + 1, parts, size), out.dtype.type(1)
    if batch == 1:
        y, slope = kept[low:high], out[low:high]
        if function == _RELU:
            for i in range(len(y)):
                slope[i] = not y[i] <= 0  # 1 at a NaN
        elif function == _TANH:
            for i in range(len(y)):
                slope[i] = one - y[i] * y[i]
        elif function == _SIGMOID:
            for i in range(len(y)):
                slope[i] = y[i] * (one - y[i])
        else:
            for i in range(len(y)):
                slope[i] = y[i]
        return
    for i in range(low, high):
        slope = out[i * batch : (i + 1) * batch]
        if function == _RELU:
            for b in range(len(slope)):
                slope[b] = not kept[b * size + i] <= 0
        elif function == _TANH:
            for b in range(len(slope)):
                y = kept[b * size + i]
                slope[b] = one - y * y
        elif function == _SIGMOID:
            for b in range(len(slope)):
                y = kept[b * size + i]
                slope[b] = y * (one - y)
        else:
            for b in range(len(slope)):
                slope[b] = kept[b * size + i]


@numba.njit(**SERIAL)
def _slopes(team, parts, *args):
    in_parts(_slopes_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _winners_part(part, winner, columns, window, offset, windows, taps, out, batch, parts):
    low, high = share(part, parts, len(window)), share(part + 1, parts, len(window))
    one, zero = out.dtype.type(1), out.dtype.type(0)
    for line in range(low, high):
        first, place, start = window[line], offset[line], line * windows * taps
        if batch != 1:
            for entry in range(windows * taps):
                column, wanted = first + entry // taps, place + entry % taps
                for b in range(batch):
                    won = winner[np.uint64(b * columns + column)] == wanted
                    out[np.uint64((start + entry) * batch + b)] = one if won else zero
        elif taps == 1:
            for w in range(windows):
                out[np.uint64(start + w)] = one if np.int32(winner[np.uint64(first + w)]) == place else zero
        elif taps == 2:  # written out, so that the stores of both interleave in vectors
            for w in range(windows):
                tap = np.int32(winner[np.uint64(first + w)]) - place
                out[np.uint64(start + 2 * w)] = one if tap == 0 else zero
                out[np.uint64(start + 2 * w + 1)] = one if tap == 1 else zero
        else:
            for w in range(windows):
                tap = np.int32(winner[np.uint64(first + w)]) - place
                for t in range(taps):
                    out[np.uint64(start + w * taps + t)] = one if tap == t else zero


@numba.njit(**SERIAL)
def _winners(team, parts, *args):
    in_parts(_winners_part, team, parts, args)
