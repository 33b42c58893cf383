"""Windows laid side by side as columns, and added up again: what the products of convolutions read and write.

Where the windows of a tap meet the input is found before the loops over elements, so that these have no condition.
"""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels.host.engine.parts import INNER_SERIAL

# The functions below are compiled: their arguments are arrays, tuples of sizes and bounds.
# mypy: disable-error-code="no-untyped-def"


@numba.njit(**INNER_SERIAL)
def axes(geometry):
    """Return kernel, stride, padding before, dilation and outputs on the three axes: `geometry` is one after the other.

    As one tuple of integers they are one argument of a kernel.
    """
    return geometry[0:3], geometry[3:6], geometry[6:9], geometry[9:12], geometry[12:15]


@numba.njit(**INNER_SERIAL)
def single(geometry, inputs):
    """Say whether the windows are the elements of the input, one by one."""
    kernel, stride, before, _, outputs = axes(geometry)
    return kernel == (1, 1, 1) and stride == (1, 1, 1) and before == (0, 0, 0) and outputs == inputs


@numba.njit(**INNER_SERIAL)
def met(outputs, length, stride, shift):
    """Return from where, and to where, output o meets an input: ``0 <= o * stride + shift < length``."""
    low = min(max(0, -(shift // stride)), outputs)
    return low, max(low, min(outputs, (length - 1 - shift) // stride + 1))


@numba.njit(**INNER_SERIAL)
def _clear(out, low, high):
    for i in range(low, high):
        out[np.uint64(i)] = 0


@numba.njit(**INNER_SERIAL)
def _clear_outside(out, at, rows, width, low_h, high_h, low_w, high_w):
    """Clear what lies outside the rows and columns that meet the input."""
    for row in range(rows):
        meets = row >= low_h and row < high_h and high_w > low_w
        _clear(out, at, at + (low_w if meets else width))
        if meets:
            _clear(out, at + high_w, at + width)
        at += width


@numba.njit(**INNER_SERIAL)
def unfold(x, samples, channels, geometry, columns):
    """Write the windows of a range of samples and of channels to columns (channels * taps, samples * outputs).

    Where windows are as many as inputs on the last axis, the rows of a tap lie one after the other in both: they are
    copied as one, over the elements in between that are cleared afterwards.
    """
    _, all_channels, depth, height, width = x.shape
    kernel, stride, before, dilation, (out_d, out_h, out_w) = axes(geometry)
    source, out = x.reshape(x.size), columns.reshape(columns.size)
    whole = stride[1] == 1 and stride[2] == 1 and out_w == width
    at = 0
    for c in range(channels[0], channels[1]):
        for kd in range(kernel[0]):
            for kh in range(kernel[1]):
                shift_h = kh * dilation[1] - before[1]
                low_h, high_h = met(out_h, height, stride[1], shift_h)
                for kw in range(kernel[2]):
                    shift_w = kw * dilation[2] - before[2]
                    low_w, high_w = met(out_w, width, stride[2], shift_w)
                    for b in range(samples[0], samples[1]):
                        for od in range(out_d):
                            d = od * stride[0] + kd * dilation[0] - before[0]
                            if d < 0 or d >= depth:
                                _clear(out, at, at + out_h * out_w)
                            else:
                                plane = ((b * all_channels + c) * depth + d) * height * width
                                if whole:
                                    skip = plane - at + shift_h * width + shift_w
                                    last = (high_h - 1) * out_w + high_w if high_w > low_w and high_h > low_h else 0
                                    for i in range(at + low_h * out_w + low_w, at + last):
                                        out[np.uint64(i)] = source[np.uint64(i + skip)]
                                else:
                                    for oh in range(low_h, high_h):
                                        row = plane + (oh * stride[1] + shift_h) * width + shift_w
                                        line = at + oh * out_w
                                        if stride[2] == 1:
                                            for o in range(low_w, high_w):
                                                out[np.uint64(line + o)] = source[np.uint64(row + o)]
                                        else:
                                            for o in range(low_w, high_w):
                                                out[np.uint64(line + o)] = source[np.uint64(row + o * stride[2])]
                                _clear_outside(out, at, out_h, out_w, low_h, high_h, low_w, high_w)
                            at += out_h * out_w


@numba.njit(**INNER_SERIAL)
def fold(columns, samples, channels, geometry, x):
    """Write to a range of samples and of channels of x the sums of what `unfold` copies; taps come in their order.

    The columns that stand for padding are cleared where rows are added as one.
    """
    _, all_channels, depth, height, width = x.shape
    kernel, stride, before, dilation, (out_d, out_h, out_w) = axes(geometry)
    target, source = x.reshape(x.size), columns.reshape(columns.size)
    whole = stride[1] == 1 and stride[2] == 1 and out_w == width
    size = depth * height * width
    at = 0
    for c in range(channels[0], channels[1]):
        for b in range(samples[0], samples[1]):
            _clear(target, (b * all_channels + c) * size, (b * all_channels + c + 1) * size)
        for kd in range(kernel[0]):
            for kh in range(kernel[1]):
                shift_h = kh * dilation[1] - before[1]
                low_h, high_h = met(out_h, height, stride[1], shift_h)
                for kw in range(kernel[2]):
                    shift_w = kw * dilation[2] - before[2]
                    low_w, high_w = met(out_w, width, stride[2], shift_w)
                    for b in range(samples[0], samples[1]):
                        for od in range(out_d):
                            d = od * stride[0] + kd * dilation[0] - before[0]
                            if d >= 0 and d < depth:
                                plane = ((b * all_channels + c) * depth + d) * height * width
                                if whole:
                                    _clear_outside(source, at, out_h, out_w, low_h, high_h, low_w, high_w)
                                    skip = plane - at + shift_h * width + shift_w
                                    last = (high_h - 1) * out_w + high_w if high_w > low_w and high_h > low_h else 0
                                    for i in range(at + low_h * out_w + low_w, at + last):
                                        target[np.uint64(i + skip)] += source[np.uint64(i)]
                                else:
                                    for oh in range(low_h, high_h):
                                        row = plane + (oh * stride[1] + shift_h) * width + shift_w
                                        line = at + oh * out_w
                                        if stride[2] == 1:
                                            for o in range(low_w, high_w):
                                                target[np.uint64(row + o)] += source[np.uint64(line + o)]
                                        else:
                                            for o in range(low_w, high_w):
                                                target[np.uint64(row + o * stride[2])] += source[np.uint64(line + o)]
                            at += out_h * out_w
