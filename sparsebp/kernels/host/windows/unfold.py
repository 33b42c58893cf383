"""Windows laid side by side as columns, and added up again: what the products of convolutions read and write.

Where the windows of a tap meet the input is found before, once for each geometry, so that the loops over elements have
no condition.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, product, starmap
from math import prod

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_APART, INNER_SERIAL
from sparsebp.kernels.host.engine.simd import advance, clear, copy

Axes = tuple[int, ...]

TAPS, SINGLE, INPUTS, OUTPUTS, _WIDTH, _DEPTH, _PLANE, _OUT_D, _OUT_W, _STRIDE_D, _STRIDE_H, _STRIDE_W = range(12)
"""What a geometry says at which place: the number of taps; whether the windows are the elements of the input, one by
one; how many elements an input and an output have on all axes together; the input's width, depth and elements of a
plane; the sizes of outputs, and strides. A row for each tap comes behind."""
_HEAD = 12
_FIRST_D, _LOW_H, _HIGH_H, _LOW_W, _HIGH_W, _SHIFT, _ROW = range(7)
"""What a tap's row says: the depth at which it meets window 0; the rows and columns of outputs for which it lies in the
input; where it meets window 0 in a plane."""


@lru_cache(maxsize=256)  # small, and it takes as long as a small convolution
def geometry_of(kernel: Axes, stride: Axes, before: Axes, dilation: Axes, inputs: Axes, outputs: Axes) -> Array:
    """Return what the compiled functions want to know of windows: int64, a head and a row for each tap."""
    plane, taps = inputs[1] * inputs[2], []
    for tap in product(*map(range, kernel)):
        first = [t * d - b for t, d, b in zip(tap, dilation, before, strict=True)]
        met = starmap(_met, zip(outputs[1:], inputs[1:], stride[1:], first[1:], strict=True))
        taps.append([first[0], *next(met), *next(met), first[1] * inputs[2] + first[2]])
    ones, nothing = (1, 1, 1), (0, 0, 0)
    single = (kernel, stride, before, outputs) == (ones, ones, nothing, inputs)
    head = len(taps), single, prod(inputs), prod(outputs), inputs[2], inputs[0], plane, outputs[0], outputs[2], *stride
    return np.array([*head, *chain.from_iterable(taps)], np.int64)


def _met(outputs: int, length: int, stride: int, shift: int) -> tuple[int, int]:
    """Return from where, and to where, output o meets an input: ``0 <= o * stride + shift < length``."""
    low = min(max(0, -(shift // stride)), outputs)
    return low, max(low, min(outputs, (length - 1 - shift) // stride + 1))


# The functions below are compiled: their arguments are pointers and sizes.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_APART)
def copy_rows(out, out_row, source, row, stride, rows, n):
    """Copy rows of `n` numbers, ``out_row`` and ``row`` apart; those of `source` are `stride` apart."""
    for _ in range(rows):
        if stride == 1:
            for i in range(n):
                out[i] = source[i]
        else:
            for i in range(n):
                out[i] = source[i * stride]
        out, source = advance(out, out_row), advance(source, row)


@numba.njit(**INNER_APART)
def add_rows(out, out_row, stride, source, row, rows, n):
    """Add rows of `n` numbers, ``out_row`` and ``row`` apart, to others; those of `out` are `stride` apart."""
    for _ in range(rows):
        if stride == 1:
            for i in range(n):
                out[i] += source[i]
        else:
            for i in range(n):
                out[i * stride] += source[i]
        out, source = advance(out, out_row), advance(source, row)


@numba.njit(**INNER_SERIAL)
def _clear_outside(plane, size, g, tap):
    """Clear what lies outside the rows and columns that meet the input, of which there are some."""
    low_w, high_w, width = tap[_LOW_W], tap[_HIGH_W], g[_OUT_W]
    at = tap[_LOW_H] * width + low_w
    clear(plane, at)
    gap = width - high_w + low_w
    for _ in range(tap[_LOW_H] + 1, tap[_HIGH_H]):
        if gap > 0:
            clear(advance(plane, at + high_w - low_w), gap)
        at += width
    at += high_w - low_w
    clear(advance(plane, at), size - at)


@numba.njit(**INNER_SERIAL)
def unfold(x, sample, samples, channels, g, columns):
    """Write the windows of samples to columns (channels * taps, samples * outputs).

    Samples are `sample` numbers apart. Where windows are as many as inputs on the last axis, the rows of a tap lie one
    after the other in both: they are copied as one, over the elements in between that are cleared afterwards.
    """
    whole = g[_STRIDE_H] == 1 and g[_STRIDE_W] == 1 and g[_OUT_W] == g[_WIDTH]
    size, stride = g[OUTPUTS] // g[_OUT_D], g[_STRIDE_W]
    for c in range(channels):
        for t in range(g[TAPS]):
            tap = advance(g, _HEAD + t * _ROW)
            low_h, high_h, low_w, n = tap[_LOW_H], tap[_HIGH_H], tap[_LOW_W], tap[_HIGH_W] - tap[_LOW_W]
            for b in range(samples):
                for od in range(g[_OUT_D]):
                    d = od * g[_STRIDE_D] + tap[_FIRST_D]
                    if d < 0 or d >= g[_DEPTH] or low_h == high_h or n == 0:
                        clear(columns, size)
                    else:
                        plane = advance(x, b * sample + (c * g[_DEPTH] + d) * g[_PLANE] + tap[_SHIFT])
                        at = low_h * g[_OUT_W] + low_w
                        if whole:
                            copy(advance(columns, at), advance(plane, at), (high_h - 1 - low_h) * g[_OUT_W] + n)
                        else:
                            apart = g[_STRIDE_H] * g[_WIDTH]
                            source = advance(plane, low_h * apart + low_w * stride)
                            copy_rows(advance(columns, at), g[_OUT_W], source, apart, stride, high_h - low_h, n)
                        _clear_outside(columns, size, g, tap)
                    columns = advance(columns, size)


@numba.njit(**INNER_SERIAL)
def fold(columns, sample, samples, channels, g, x):
    """Write to samples, `sample` numbers apart, the sums of what `unfold` copies; taps come in their order.

    The columns that stand for padding are cleared where rows are added as one.
    """
    whole = g[_STRIDE_H] == 1 and g[_STRIDE_W] == 1 and g[_OUT_W] == g[_WIDTH]
    size, stride = g[OUTPUTS] // g[_OUT_D], g[_STRIDE_W]
    for c in range(channels):
        for b in range(samples):
            clear(advance(x, b * sample + c * g[INPUTS]), g[INPUTS])
        for t in range(g[TAPS]):
            tap = advance(g, _HEAD + t * _ROW)
            low_h, high_h, low_w, n = tap[_LOW_H], tap[_HIGH_H], tap[_LOW_W], tap[_HIGH_W] - tap[_LOW_W]
            for b in range(samples):
                for od in range(g[_OUT_D]):
                    d = od * g[_STRIDE_D] + tap[_FIRST_D]
                    if d >= 0 and d < g[_DEPTH] and low_h < high_h and n > 0:
                        plane = advance(x, b * sample + (c * g[_DEPTH] + d) * g[_PLANE] + tap[_SHIFT])
                        at = low_h * g[_OUT_W] + low_w
                        source = advance(columns, at)
                        if whole:
                            _clear_outside(columns, size, g, tap)
                            add_rows(advance(plane, at), 0, 1, source, 0, 1, (high_h - 1 - low_h) * g[_OUT_W] + n)
                        else:
                            apart = g[_STRIDE_H] * g[_WIDTH]
                            target = advance(plane, low_h * apart + low_w * stride)
                            add_rows(target, apart, stride, source, g[_OUT_W], high_h - low_h, n)
                    columns = advance(columns, size)
