"""Convolutions with one input channel a group, on the host: every tap is a multiple of the plane, moved.

A plane is first copied with its padding, so that the taps of all windows lie as far from each other as the windows do:
the loops over a plane are then one run of consecutive elements, without conditions, and the elements between two rows
of windows are computed for nothing. With a stride s, what the windows skip is put aside: the plane is stored as s
planes (on each axis), each with every s-th element.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, INNER_SUMS, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team

Axes = tuple[int, ...]


class _Layout(NamedTuple):
    """Where things lie in the planes of a padded plane: what the compiled functions take, in this order.

    Attributes
    ----------
    rows
        Beginning of every row of the input (or output), at its first element.
    phases
        Of the first `stride` elements of a row, how far behind its beginning they lie.
    lines
        Beginning of every row of windows in a run over them.
    taps
        Where each tap of window 0 lies.
    padded, run
        Elements of the padded planes, and of a run over all windows.
    """

    rows: Array
    phases: Array
    lines: Array
    taps: Array
    padded: int
    run: int


def convolve(weight: Array, x: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.convolve` for weights (out_channels, 1, *kernel)."""
    layout, planes = _layout(x.shape[2:], geometry), x.shape[0] * x.shape[1]
    args = weight.reshape(len(weight), -1), x.reshape(planes, -1), *layout, out.reshape(len(out) * len(weight), -1)
    parts = _parts(out, layout, planes)
    _convolve_parallel(team(parts), parts, *args, parts)


def convolve_t(weight: Array, y: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.convolve_t` for weights (out_channels, 1, *kernel)."""
    layout, planes = _layout(out.shape[2:], geometry), out.shape[0] * out.shape[1]
    args = weight.reshape(len(weight), -1), y.reshape(len(y) * len(weight), -1), *layout, out.reshape(planes, -1)
    parts = _parts(y, layout, planes)
    _convolve_t_parallel(team(parts), parts, *args, parts)


def correlate(y: Array, x: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.correlate` for weights (out_channels, 1, *kernel)."""
    layout, channels = _layout(x.shape[2:], geometry), x.shape[1]
    args = y.reshape(len(y) * len(out), -1), x.reshape(len(x) * channels, -1), *layout, out.reshape(len(out), -1)
    parts = _parts(y, layout, channels)
    _correlate_parallel(team(parts), parts, *args, channels, parts)


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def _layout(sizes: Axes, geometry: Axes) -> _Layout:
    kernel, stride, before, dilation, outputs = (geometry[i : i + 3] for i in range(0, 15, 3))
    axes = zip(sizes, kernel, stride, before, dilation, outputs, strict=True)
    rooms = tuple(max(-(-(b + n) // s), o + (k - 1) * d // s) for n, k, s, b, d, o in axes)
    size, steps = prod(rooms), np.array(stride)[:, None]

    def at(places: Array) -> Array:
        """Return where elements (3, n) of the padded plane lie in its planes."""
        which = np.ravel_multi_index(tuple(places % steps), stride)
        inner = np.ravel_multi_index(tuple(places // steps), rooms)
        return np.asarray(which * size + inner)

    rows = np.indices((*sizes[:2], 1)).reshape(3, -1) + np.array(before)[:, None]
    first = np.array(before)[:, None] + np.array([[0], [0], [1]]) * np.arange(min(stride[2], sizes[2]))
    lines = np.indices((*outputs[:2], 1)).reshape(3, -1)
    taps = np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None]
    lines_at = np.asarray(np.ravel_multi_index(tuple(lines), rooms))
    run, phases = int(lines_at[-1]) + outputs[2], at(first)
    return _Layout(at(rows), phases - phases[0], lines_at, at(taps), prod(stride) * size, run)


def _parts(y: Array, layout: _Layout, most: int) -> int:
    return min(parts_for(y.size * len(layout.taps)), most)


# The functions below are compiled: their arguments are planes one after the other, a layout and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _spread(plane, rows, phases, padded):
    """Copy a plane to its place in `padded`; the padding has been cleared, and stays so."""
    width, stride = len(plane) // len(rows), len(phases)
    for row in range(len(rows)):
        for phase in range(stride):
            at, source = rows[row] + phases[phase], row * width + phase
            for w in range((width - phase + stride - 1) // stride):
                padded[np.uint64(at + w)] = plane[np.uint64(source + w * stride)]


@numba.njit(**INNER_SERIAL)
def _spread_rows(plane, rows, padded):
    """Copy a plane whose rows stay whole."""
    width = len(plane) // len(rows)
    for row in range(len(rows)):
        at, source = rows[row], row * width
        for w in range(width):
            padded[np.uint64(at + w)] = plane[np.uint64(source + w)]


@numba.njit(**INNER_SERIAL)
def _collect(padded, rows, phases, plane):
    """Copy a plane from its place in `padded`: the inverse of `_spread`."""
    width, stride = len(plane) // len(rows), len(phases)
    for row in range(len(rows)):
        for phase in range(stride):
            at, target = rows[row] + phases[phase], row * width + phase
            for w in range((width - phase + stride - 1) // stride):
                plane[np.uint64(target + w * stride)] = padded[np.uint64(at + w)]


@numba.njit(**INNER_SERIAL)
def _collect_rows(padded, rows, plane):
    """Copy a plane whose rows are whole: the inverse of `_spread_rows`."""
    width = len(plane) // len(rows)
    for row in range(len(rows)):
        at, target = rows[row], row * width
        for w in range(width):
            plane[np.uint64(target + w)] = padded[np.uint64(at + w)]


@numba.njit(**INNER_SERIAL)
def _add_taps(factors, padded, taps, run):
    """Add the multiples of `padded` that the taps meet to `run`: three at a time share what is read and written."""
    whole = len(taps) // 3 * 3
    for tap in range(0, whole, 3):
        first, second, third = factors[tap], factors[tap + 1], factors[tap + 2]
        a, b, c = taps[tap], taps[tap + 1], taps[tap + 2]
        for i in range(len(run)):
            sum_of_two = first * padded[np.uint64(a + i)] + second * padded[np.uint64(b + i)]
            run[np.uint64(i)] += sum_of_two + third * padded[np.uint64(c + i)]
    for tap in range(whole, len(taps)):
        factor, at = factors[tap], taps[tap]
        for i in range(len(run)):
            run[np.uint64(i)] += factor * padded[np.uint64(at + i)]


@numba.njit(**INNER_SERIAL)
def _convolve(weight, x, rows, phases, lines, taps, length, longest, out, low, high):
    padded, run = np.zeros(length, x.dtype), np.zeros(longest, x.dtype)
    channels = len(x) * len(weight) // len(out)
    each = len(weight) // channels
    for plane in range(low, high):
        if len(phases) == 1:
            _spread_rows(x[plane], rows, padded)
        else:
            _spread(x[plane], rows, phases, padded)
        for o in range(plane % channels * each, (plane % channels + 1) * each):
            run[:] = 0
            _add_taps(weight[o], padded, taps, run)
            _collect_rows(run, lines, out[plane // channels * len(weight) + o])


@numba.njit(**INNER_SERIAL)
def _convolve_part(part, weight, x, rows, phases, lines, taps, length, longest, out, parts):
    n = len(x)
    low, high = share(part, parts, n), share(part + 1, parts, n)
    _convolve(weight, x, rows, phases, lines, taps, length, longest, out, low, high)


@numba.njit(**SERIAL)
def _convolve_parallel(team, parts, *args):
    in_parts(_convolve_part, team, parts, args)


@numba.njit(**INNER_SERIAL)
def _convolve_t(weight, y, rows, phases, lines, taps, length, longest, out, low, high):
    padded, run = np.zeros(length, y.dtype), np.zeros(longest, y.dtype)
    channels = len(out) * len(weight) // len(y)
    each = len(weight) // channels
    for plane in range(low, high):
        padded[:] = 0
        for o in range(plane % channels * each, (plane % channels + 1) * each):
            _spread_rows(y[plane // channels * len(weight) + o], lines, run)  # between the rows it stays zero
            for tap in range(len(taps)):
                factor, at = weight[o, tap], taps[tap]
                for i in range(longest):
                    padded[np.uint64(at + i)] += factor * run[np.uint64(i)]
        if len(phases) == 1:
            _collect_rows(padded, rows, out[plane])
        else:
            _collect(padded, rows, phases, out[plane])


@numba.njit(**INNER_SERIAL)
def _convolve_t_part(part, weight, y, rows, phases, lines, taps, length, longest, out, parts):
    n = len(out)
    low, high = share(part, parts, n), share(part + 1, parts, n)
    _convolve_t(weight, y, rows, phases, lines, taps, length, longest, out, low, high)


@numba.njit(**SERIAL)
def _convolve_t_parallel(team, parts, *args):
    in_parts(_convolve_t_part, team, parts, args)


@numba.njit(**INNER_SUMS)
def _inner(run, padded, at):
    total = run.dtype.type(0)
    for i in range(len(run)):
        total += run[np.uint64(i)] * padded[np.uint64(at + i)]
    return total


@numba.njit(**INNER_SUMS)
def _inner_three(run, padded, a, b, c):
    first = second = third = run.dtype.type(0)
    for i in range(len(run)):
        value = run[np.uint64(i)]
        first += value * padded[np.uint64(a + i)]
        second += value * padded[np.uint64(b + i)]
        third += value * padded[np.uint64(c + i)]
    return first, second, third


@numba.njit(**INNER_SERIAL)
def _correlate(y, x, rows, phases, lines, taps, length, longest, out, channels, low, high):
    padded, run = np.zeros(length, x.dtype), np.zeros(longest, x.dtype)
    each, whole = len(out) // channels, len(taps) // 3 * 3
    out[low * each : high * each] = 0
    for c in range(low, high):
        for b in range(len(x) // channels):
            if len(phases) == 1:
                _spread_rows(x[b * channels + c], rows, padded)
            else:
                _spread(x[b * channels + c], rows, phases, padded)
            for o in range(c * each, (c + 1) * each):
                _spread_rows(y[b * len(out) + o], lines, run)
                for tap in range(0, whole, 3):
                    first, second, third = _inner_three(run, padded, taps[tap], taps[tap + 1], taps[tap + 2])
                    out[o, tap] += first
                    out[o, tap + 1] += second
                    out[o, tap + 2] += third
                for tap in range(whole, len(taps)):
                    out[o, tap] += _inner(run, padded, taps[tap])


@numba.njit(**INNER_SERIAL)
def _correlate_part(part, y, x, rows, phases, lines, taps, length, longest, out, channels, parts):
    low, high = share(part, parts, channels), share(part + 1, parts, channels)
    _correlate(y, x, rows, phases, lines, taps, length, longest, out, channels, low, high)


@numba.njit(**SERIAL)
def _correlate_parallel(team, parts, *args):
    in_parts(_correlate_part, team, parts, args)
