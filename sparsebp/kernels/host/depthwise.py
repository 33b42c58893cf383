"""Convolutions with one input channel a group, on the host: every tap is a multiple of the plane, moved.

A plane is first copied with its padding, so that the taps of all windows lie as far from each other as the windows do:
the loops over a plane are then one run of consecutive elements, without conditions, and the elements between two rows
of windows are computed for nothing. With a stride s, what the windows skip is put aside: the plane is stored as s
planes (on each axis), each with every s-th element.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.parts import PARALLEL, SERIAL, SUMS, parts_for, share
from sparsebp.types import Array

Axes = tuple[int, ...]


def convolve(weight: Array, x: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.convolve` for weights (out_channels, 1, *kernel)."""
    rooms, offsets = _layout(x.shape[2:], geometry)
    planes = x.shape[0] * x.shape[1]
    parts = _parts(out, offsets, planes)
    args = weight.reshape(len(weight), -1), x, geometry[3:6], geometry[6:9], rooms, offsets
    if parts == 1:
        _convolve(*args, 0, planes, out)
    else:
        _convolve_parallel(*args, parts, out)


def convolve_t(weight: Array, y: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.convolve_t` for weights (out_channels, 1, *kernel)."""
    rooms, offsets = _layout(out.shape[2:], geometry)
    planes = out.shape[0] * out.shape[1]
    parts = _parts(y, offsets, planes)
    args = weight.reshape(len(weight), -1), y, geometry[3:6], geometry[6:9], rooms, offsets
    if parts == 1:
        _convolve_t(*args, 0, planes, out)
    else:
        _convolve_t_parallel(*args, parts, out)


def correlate(y: Array, x: Array, geometry: Axes, out: Array) -> None:
    """Write `Kernels.correlate` for weights (out_channels, 1, *kernel)."""
    rooms, offsets = _layout(x.shape[2:], geometry)
    parts = _parts(y, offsets, x.shape[1])
    args, taps = (y, x, geometry[3:6], geometry[6:9], rooms, offsets), out.reshape(len(out), -1)
    if parts == 1:
        _correlate(*args, 0, x.shape[1], taps)
    else:
        _correlate_parallel(*args, parts, taps)


def _layout(sizes: Axes, geometry: Axes) -> tuple[Axes, Array]:
    """Return the axes of one of the planes of a padded plane, and where each tap of window 0 lies in them all."""
    kernel, stride, before, dilation, outputs = (geometry[i : i + 3] for i in range(0, 15, 3))
    axes = zip(sizes, kernel, stride, before, dilation, outputs, strict=True)
    rooms = tuple(max(-(-(b + n) // s), o + (k - 1) * d // s) for n, k, s, b, d, o in axes)
    taps = np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None]
    which = np.ravel_multi_index(tuple(taps % np.array(stride)[:, None]), stride)
    return rooms, which * int(np.prod(rooms)) + np.ravel_multi_index(tuple(taps // np.array(stride)[:, None]), rooms)


def _parts(y: Array, offsets: Array, most: int) -> int:
    return min(parts_for(y.size * len(offsets)), most)


# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**SERIAL)
def _row(d, h, rooms, stride, before):
    """Return where row (d, h) of a plane begins in its planes, before those of the last axis are told apart."""
    d, h = d + before[0], h + before[1]
    which = (d % stride[0]) * stride[1] + h % stride[1]
    return ((which * stride[2] * rooms[0] + d // stride[0]) * rooms[1] + h // stride[1]) * rooms[2]


@numba.njit(**SERIAL)
def _spread(x, rooms, stride, before, padded):
    """Copy a plane to its place in `padded`; the padding has been cleared, and stays so."""
    depth, height, width = x.shape
    size = rooms[0] * rooms[1] * rooms[2]
    for d in range(depth):
        for h in range(height):
            row, line = _row(d, h, rooms, stride, before), x[d, h]
            if stride[2] == 1:
                for w in range(width):
                    padded[np.uint64(row + before[2] + w)] = line[np.uint64(w)]
            else:
                for w in range(width):
                    at = w + before[2]
                    padded[np.uint64(row + at % stride[2] * size + at // stride[2])] = line[np.uint64(w)]


@numba.njit(**SERIAL)
def _collect(padded, rooms, stride, before, x):
    """Copy a plane from its place in `padded`: the inverse of `_spread`."""
    depth, height, width = x.shape
    size = rooms[0] * rooms[1] * rooms[2]
    for d in range(depth):
        for h in range(height):
            row, line = _row(d, h, rooms, stride, before), x[d, h]
            if stride[2] == 1:
                for w in range(width):
                    line[np.uint64(w)] = padded[np.uint64(row + before[2] + w)]
            else:
                for w in range(width):
                    at = w + before[2]
                    line[np.uint64(w)] = padded[np.uint64(row + at % stride[2] * size + at // stride[2])]


@numba.njit(**SERIAL)
def _widen(y, rooms, run):
    """Copy a plane of windows to `run`, which has the rows of a padded plane; between them it stays zero."""
    out_d, out_h, out_w = y.shape
    for d in range(out_d):
        for h in range(out_h):
            at, line = (d * rooms[1] + h) * rooms[2], y[d, h]
            for w in range(out_w):
                run[np.uint64(at + w)] = line[np.uint64(w)]


@numba.njit(**SERIAL)
def _narrow(run, rooms, y):
    """Copy a plane of windows from `run`: the inverse of `_widen`."""
    out_d, out_h, out_w = y.shape
    for d in range(out_d):
        for h in range(out_h):
            at, line = (d * rooms[1] + h) * rooms[2], y[d, h]
            for w in range(out_w):
                line[np.uint64(w)] = run[np.uint64(at + w)]


@numba.njit(**SERIAL)
def _scratch(shape, rooms, stride, dtype):
    """Return zeros for the planes of a padded plane, and for a run over the windows (depth, height, width)."""
    length = ((shape[0] - 1) * rooms[1] + shape[1] - 1) * rooms[2] + shape[2]
    planes = stride[0] * stride[1] * stride[2]
    return np.zeros(planes * rooms[0] * rooms[1] * rooms[2], dtype), np.zeros(length, dtype)


@numba.njit(**SERIAL)
def _convolve(weight, x, stride, before, rooms, offsets, low, high, out):
    padded, run = _scratch(out.shape[2:], rooms, stride, x.dtype)
    each = out.shape[1] // x.shape[1]
    for plane in range(low, high):
        b, c = divmod(plane, x.shape[1])
        _spread(x[b, c], rooms, stride, before, padded)
        for o in range(c * each, (c + 1) * each):
            run[:] = 0
            for tap in range(len(offsets)):
                factor, at = weight[o, tap], offsets[tap]
                for i in range(len(run)):
                    run[np.uint64(i)] += factor * padded[np.uint64(at + i)]
            _narrow(run, rooms, out[b, o])


@numba.njit(**PARALLEL)
def _convolve_parallel(weight, x, stride, before, rooms, offsets, parts, out):
    planes = x.shape[0] * x.shape[1]
    for part in numba.prange(parts):
        low, high = share(part, parts, planes), share(part + 1, parts, planes)
        _convolve(weight, x, stride, before, rooms, offsets, low, high, out)


@numba.njit(**SERIAL)
def _convolve_t(weight, y, stride, before, rooms, offsets, low, high, out):
    padded, run = _scratch(y.shape[2:], rooms, stride, y.dtype)
    each = y.shape[1] // out.shape[1]
    for plane in range(low, high):
        b, c = divmod(plane, out.shape[1])
        padded[:] = 0
        for o in range(c * each, (c + 1) * each):
            _widen(y[b, o], rooms, run)
            for tap in range(len(offsets)):
                factor, at = weight[o, tap], offsets[tap]
                for i in range(len(run)):
                    padded[np.uint64(at + i)] += factor * run[np.uint64(i)]
        _collect(padded, rooms, stride, before, out[b, c])


@numba.njit(**PARALLEL)
def _convolve_t_parallel(weight, y, stride, before, rooms, offsets, parts, out):
    planes = out.shape[0] * out.shape[1]
    for part in numba.prange(parts):
        low, high = share(part, parts, planes), share(part + 1, parts, planes)
        _convolve_t(weight, y, stride, before, rooms, offsets, low, high, out)


@numba.njit(**SUMS)
def _inner(run, padded, at):
    total = run.dtype.type(0)
    for i in range(len(run)):
        total += run[np.uint64(i)] * padded[np.uint64(at + i)]
    return total


@numba.njit(**SERIAL)
def _correlate(y, x, stride, before, rooms, offsets, low, high, out):
    padded, run = _scratch(y.shape[2:], rooms, stride, x.dtype)
    each = y.shape[1] // x.shape[1]
    out[low * each : high * each] = 0
    for c in range(low, high):
        for b in range(x.shape[0]):
            _spread(x[b, c], rooms, stride, before, padded)
            for o in range(c * each, (c + 1) * each):
                _widen(y[b, o], rooms, run)
                for tap in range(len(offsets)):
                    out[o, tap] += _inner(run, padded, offsets[tap])


@numba.njit(**PARALLEL)
def _correlate_parallel(y, x, stride, before, rooms, offsets, parts, out):
    channels = x.shape[1]
    for part in numba.prange(parts):
        low, high = share(part, parts, channels), share(part + 1, parts, channels)
        _correlate(y, x, stride, before, rooms, offsets, low, high, out)
