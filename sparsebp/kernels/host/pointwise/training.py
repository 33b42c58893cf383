"""The loss on the host: one pass over memory."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.host.engine.parts import INNER_SERIAL, SERIAL, parts_for, share
from sparsebp.kernels.host.engine.team import in_parts, team

_EXP_WEIGHT = 8  # an exponential costs about as much as this many multiply-adds


class TrainingKernels:
    """Host side of the training part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        parts = parts_for(logits.size * _EXP_WEIGHT)
        _softmax_cross_entropy_parallel(team(parts), parts, logits, target, losses, grad, parts)


@numba.njit(**INNER_SERIAL)
def _softmax_cross_entropy(logits, target, losses, grad, low, high):  # type: ignore[no-untyped-def]
    classes = logits.shape[1]
    zero = logits.dtype.type(0)
    for r in range(np.uint64(low), np.uint64(high)):
        row, slope, label = logits[r], grad[r], target[r]
        if label < 0 or label >= classes:
            slope[:] = np.nan
            losses[r] = np.nan
            continue
        top = row[0]
        for c in range(len(row)):
            if not row[c] <= top:  # a NaN becomes the maximum, and so reaches the loss and the gradient
                top = row[c]
        total = zero
        for c in range(len(row)):
            slope[c] = np.exp(row[c] - top)
            total += slope[c]
        losses[r] = np.log(total) - (row[np.uint64(label)] - top)
        for c in range(len(row)):
            slope[c] /= total
        slope[np.uint64(label)] -= logits.dtype.type(1)


@numba.njit(**INNER_SERIAL)
def _softmax_cross_entropy_part(part, logits, target, losses, grad, parts):  # type: ignore[no-untyped-def]
    n = len(logits)
    _softmax_cross_entropy(logits, target, losses, grad, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _softmax_cross_entropy_parallel(team, parts, *args):  # type: ignore[no-untyped-def]
    in_parts(_softmax_cross_entropy_part, team, parts, args)
