"""Launcher of the loss (``cuda/training.cu``)."""

from __future__ import annotations

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, real_define


class TrainingKernels(Launcher):
    """Device side of the training part of `sparsebp.kernels.api.Kernels`; shapes and dtypes are stated there."""

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row; a warp a row. A target outside [0, C) makes its row NaN."""
        rows, classes = logits.shape
        block = (WARP, BLOCK // WARP)
        self._launch(
            "training.cu",
            "softmax_cross_entropy",
            real_define(logits),
            ceil_div(rows, block[1]),
            block,
            (logits, target, losses, grad, np.int64(rows), np.int64(classes)),
        )
