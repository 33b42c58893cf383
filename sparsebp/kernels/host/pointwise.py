"""Kernels of one pass over memory on the host: cutting off, the loss."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, pointer
from sparsebp.kernels.host.engine.team import parallel, team

_EXP_WEIGHT = 8  # an exponential costs about as much as this many multiply-adds


class PointwiseKernels:
    """Host side of these kernels in `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def clamp(self, x: Array, low: float, high: float, out: Array) -> None:
        """Every element between the limits."""
        parts = parts_for(x.size)
        _clamp(team(parts), parts, x, x.dtype.type(low), x.dtype.type(high), out)

    def clamp_grad(self, gy: Array, y: Array, low: float, high: float, out: Array) -> None:
        """The gradient where y lies above the lower limit and not above the upper one, or is NaN."""
        parts = parts_for(y.size)
        _clamp_grad(team(parts), parts, gy, y, y.dtype.type(low), y.dtype.type(high), out)

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        parts = parts_for(logits.size * _EXP_WEIGHT)
        _softmax_cross_entropy(team(parts), parts, logits, target, losses, grad)


def add_between(rows: Array, bias: Array, low: float, high: float) -> None:
    """Add `bias` to every row, in place, and leave what comes of it between the limits; a NaN stays a NaN.

    Parameters
    ----------
    rows
        (R, n), real, C-contiguous.
    bias
        (n,), of that dtype.
    low, high
        The limits; `high` may be infinite.
    """
    parts = parts_for(rows.size)
    _add_between(team(parts), parts, rows, bias, rows.dtype.type(low), rows.dtype.type(high))


# The functions below are compiled: their arguments are arrays and bounds.
# mypy: disable-error-code="no-untyped-def"


@parallel(**SERIAL)
def _clamp(part, parts, x, low, high, out):
    start, stop = span(part, parts, len(x))
    source, target = pointer(x), pointer(out)
    for i in range(start, stop):
        value = source[i]
        value = low if value < low else value  # a NaN stays
        target[i] = high if value > high else value


@parallel(**SERIAL)
def _add_between(part, parts, rows, bias, low, high):
    start, stop = span(part, parts, len(rows))
    for row in range(start, stop):
        target, added = advance(pointer(rows), row * len(bias)), pointer(bias)
        for i in range(len(bias)):
            value = target[i] + added[i]
            value = low if value < low else value  # a NaN stays
            target[i] = high if value > high else value


@parallel(**SERIAL)
def _clamp_grad(part, parts, gy, y, low, high, out):
    start, stop = span(part, parts, len(y))
    gradients, values, target = pointer(gy), pointer(y), pointer(out)
    zero = gy.dtype.type(0)
    for i in range(start, stop):
        value, gradient = values[i], gradients[i]
        target[i] = gradient if (not value <= low) & (not value > high) else zero  # a NaN lets it through


@parallel(**SERIAL)
def _softmax_cross_entropy(part, parts, logits, target, losses, grad):
    low, high = span(part, parts, len(logits))
    classes = logits.shape[1]
    zero, one, nan = logits.dtype.type(0), logits.dtype.type(1), logits.dtype.type(np.nan)
    labels, loss = pointer(target), pointer(losses)
    for r in range(low, high):
        row, slope = advance(pointer(logits), r * classes), advance(pointer(grad), r * classes)
        label = labels[r]
        if label < 0 or label >= classes:
            for c in range(classes):
                slope[c] = nan
            loss[r] = nan
            continue
        top = row[0]
        for c in range(classes):
            if not row[c] <= top:  # a NaN becomes the maximum, and so reaches the loss and the gradient
                top = row[c]
        total = zero
        for c in range(classes):
            slope[c] = np.exp(row[c] - top)
            total += slope[c]
        loss[r] = np.log(total) - (row[label] - top)
        for c in range(classes):
            slope[c] /= total
        slope[label] -= one
