"""The loss on the host: one pass over memory."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import SERIAL, parts_for, span
from sparsebp.kernels.host.engine.simd import advance, pointer
from sparsebp.kernels.host.engine.team import parallel, team

_EXP_WEIGHT = 8  # an exponential costs about as much as this many multiply-adds


class TrainingKernels:
    """Host side of the training part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        parts = parts_for(logits.size * _EXP_WEIGHT)
        _softmax_cross_entropy(team(parts), parts, logits, target, losses, grad)


@parallel(**SERIAL)
def _softmax_cross_entropy(part, parts, logits, target, losses, grad):  # type: ignore[no-untyped-def]
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
