"""Convolutions with one input channel a group, on the host: every tap is a multiple of the plane, moved.

A plane is first copied with its padding, so that the taps of all windows lie as far from each other as the windows do:
the loops over a plane are then one run of consecutive elements, without conditions, and the elements between two rows
of windows are computed for nothing. With a stride s, what the windows skip is put aside: the plane is stored as s
planes (on each axis), each with every s-th element.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_APART, INNER_SERIAL, INNER_SUMS, SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, clear, pointer
from sparsebp.kernels.host.engine.team import parallel, team

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


def convolve(weight: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.convolve` for weights (out_channels, 1, *kernel)."""
    layout, planes = _layout(*windows), x.shape[0] * x.shape[1]
    parts = _parts(out, layout, planes)
    _convolve(team(parts), parts, weight.reshape(len(weight), -1), x.reshape(planes, -1), *layout, out)


def convolve_t(weight: Array, y: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.convolve_t` for weights (out_channels, 1, *kernel)."""
    layout, planes = _layout(*windows), out.shape[0] * out.shape[1]
    parts = _parts(y, layout, planes)
    _convolve_t(team(parts), parts, weight.reshape(len(weight), -1), y, *layout, out.reshape(planes, -1))


def correlate(y: Array, x: Array, windows: Sequence[Axes], out: Array) -> None:
    """Write `Kernels.correlate` for weights (out_channels, 1, *kernel)."""
    layout, (batch, channels) = _layout(*windows), x.shape[:2]
    parts = _parts(y, layout, channels)
    _correlate(team(parts), parts, y, x.reshape(batch, channels, -1), *layout, out.reshape(len(out), -1))


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def _layout(kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes) -> _Layout:
    axes = zip(inputs, kernel, stride, before, dilation, outputs, strict=True)
    rooms = tuple(max(-(-(b + n) // s), o + (k - 1) * d // s) for n, k, s, b, d, o in axes)
    size, steps = prod(rooms), np.array(stride)[:, None]

    def at(places: Array) -> Array:
        """Return where elements (3, n) of the padded plane lie in its planes."""
        which = np.ravel_multi_index(tuple(places % steps), stride)
        inner = np.ravel_multi_index(tuple(places // steps), rooms)
        return np.asarray(which * size + inner)

    rows = np.indices((*inputs[:2], 1)).reshape(3, -1) + np.array(before)[:, None]
    first = np.array(before)[:, None] + np.array([[0], [0], [1]]) * np.arange(min(stride[2], inputs[2]))
    lines = np.indices((*outputs[:2], 1)).reshape(3, -1)
    taps = np.indices(kernel).reshape(3, -1) * np.array(dilation)[:, None]
    lines_at = np.asarray(np.ravel_multi_index(tuple(lines), rooms))
    run, phases = int(lines_at[-1]) + outputs[2], at(first)
    return _Layout(at(rows), phases - phases[0], lines_at, at(taps), prod(stride) * size, run)


def _parts(y: Array, layout: _Layout, most: int) -> int:
    return min(parts_for(y.size * len(layout.taps)), most)


# The functions below are compiled: their arguments are arrays, a layout and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def _cleared(numbers):
    """Write zeros to an array: `np.zeros` would be compiled anew for each size's type."""
    clear(pointer(numbers), len(numbers))


@numba.njit(**INNER_APART)
def _spread(plane, width, rows, phases, stride, padded):
    """Copy the rows of a plane to their places in `padded`; the padding has been cleared, and stays so."""
    for row in range(len(rows)):
        source, target = advance(plane, row * width), advance(pointer(padded), pointer(rows)[row])
        if stride == 1:
            for w in range(width):
                target[w] = source[w]
        else:
            for phase in range(stride):
                at = pointer(phases)[phase]
                for w in range((width - phase + stride - 1) // stride):
                    target[at + w] = source[phase + w * stride]


@numba.njit(**INNER_APART)
def _collect(padded, width, rows, phases, stride, plane):
    """Copy the rows of a plane from their places in `padded`: the inverse of `_spread`."""
    for row in range(len(rows)):
        source, target = advance(pointer(padded), pointer(rows)[row]), advance(plane, row * width)
        if stride == 1:
            for w in range(width):
                target[w] = source[w]
        else:
            for phase in range(stride):
                at = pointer(phases)[phase]
                for w in range((width - phase + stride - 1) // stride):
                    target[phase + w * stride] = source[at + w]


@numba.njit(**INNER_SERIAL)
def _add_taps(factors, padded, taps, run):
    """Write to `run` the sum of the multiples of `padded` that the taps meet.

    Three at a time share what is read and written.
    """
    whole, n, out = len(taps) // 3 * 3, len(run), pointer(run)
    clear(out, n)
    for tap in range(0, whole, 3):
        first, second, third = factors[tap], factors[tap + 1], factors[tap + 2]
        a, b = advance(pointer(padded), taps[tap]), advance(pointer(padded), taps[tap + 1])
        c = advance(pointer(padded), taps[tap + 2])
        for i in range(n):
            sum_of_two = first * a[i] + second * b[i]
            out[i] += sum_of_two + third * c[i]
    for tap in range(whole, len(taps)):
        factor, a = factors[tap], advance(pointer(padded), taps[tap])
        for i in range(n):
            out[i] += factor * a[i]


@parallel(**SERIAL)
def _convolve(part, parts, weight, x, rows, phases, lines, taps, length, longest, out):
    planes, size = x.shape
    low, high = span(part, parts, planes)
    padded, run = np.empty(length, x.dtype), np.empty(longest, x.dtype)
    _cleared(padded)
    each, out_size = len(out) * len(weight) // planes, out.shape[2] * out.shape[3] * out.shape[4]
    for plane in range(low, high):
        _spread(advance(pointer(x), plane * size), size // len(rows), rows, phases, len(phases), padded)
        for o in range(plane * each, (plane + 1) * each):
            _add_taps(advance(pointer(weight), o % len(weight) * len(taps)), padded, taps, run)
            _collect(run, out.shape[4], lines, phases, 1, advance(pointer(out), o * out_size))


@numba.njit(**INNER_SERIAL)
def _add_run(factors, run, taps, padded):
    """Add the multiples of `run` to the places in `padded` that the taps meet: the transpose of `_add_taps`."""
    for tap in range(len(taps)):
        factor, target, source = factors[tap], advance(pointer(padded), taps[tap]), pointer(run)
        for i in range(len(run)):
            target[i] += factor * source[i]


@parallel(**SERIAL)
def _convolve_t(part, parts, weight, y, rows, phases, lines, taps, length, longest, out):
    planes, size = out.shape
    low, high = span(part, parts, planes)
    padded, run = np.empty(length, y.dtype), np.empty(longest, y.dtype)
    _cleared(run)  # between the rows it stays zero
    each, y_size = len(y) * len(weight) // planes, y.shape[2] * y.shape[3] * y.shape[4]
    for plane in range(low, high):
        _cleared(padded)
        for o in range(plane * each, (plane + 1) * each):
            _spread(advance(pointer(y), o * y_size), y.shape[4], lines, phases, 1, run)
            _add_run(advance(pointer(weight), o % len(weight) * len(taps)), run, taps, padded)
        _collect(padded, size // len(rows), rows, phases, len(phases), advance(pointer(out), plane * size))


@numba.njit(**INNER_SUMS)
def _inner(run, padded, at, total):
    """Add the inner product with what a tap meets to a zero."""
    left, right = pointer(run), advance(pointer(padded), at)
    for i in range(len(run)):
        total += left[i] * right[i]
    return total


@numba.njit(**INNER_SUMS)
def _inner_three(run, padded, a, b, c, zero):
    first = second = third = zero
    left, at = pointer(run), pointer(padded)
    right_a, right_b, right_c = advance(at, a), advance(at, b), advance(at, c)
    for i in range(len(run)):
        value = left[i]
        first += value * right_a[i]
        second += value * right_b[i]
        third += value * right_c[i]
    return first, second, third


@numba.njit(**INNER_SERIAL)
def _add_inner(run, padded, taps, sums, zero):
    """Add the inner products of `run` and what the taps meet to `sums`."""
    whole = len(taps) // 3 * 3
    for tap in range(0, whole, 3):
        first, second, third = _inner_three(run, padded, taps[tap], taps[tap + 1], taps[tap + 2], zero)
        sums[tap] += first
        sums[tap + 1] += second
        sums[tap + 2] += third
    for tap in range(whole, len(taps)):
        sums[tap] += _inner(run, padded, taps[tap], zero)


@parallel(**SERIAL)
def _correlate(part, parts, y, x, rows, phases, lines, taps, length, longest, out):
    batch, channels, size = x.shape
    low, high = span(part, parts, channels)
    padded, run = np.empty(length, x.dtype), np.empty(longest, x.dtype)
    _cleared(padded)
    _cleared(run)
    each, y_size, zero = len(out) // channels, y.shape[2] * y.shape[3] * y.shape[4], x.dtype.type(0)
    clear(advance(pointer(out), low * each * len(taps)), (high - low) * each * len(taps))
    for c in range(low, high):
        for b in range(batch):
            plane = advance(pointer(x), (b * channels + c) * size)
            _spread(plane, size // len(rows), rows, phases, len(phases), padded)
            for o in range(c * each, (c + 1) * each):
                _spread(advance(pointer(y), (b * len(out) + o) * y_size), y.shape[4], lines, phases, 1, run)
                _add_inner(run, padded, taps, advance(pointer(out), o * len(taps)), zero)
