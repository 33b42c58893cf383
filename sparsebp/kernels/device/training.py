"""Launchers of the loss and the optimizer updates (``cuda/training.cu``)."""

from __future__ import annotations

import math

import numpy as np

from sparsebp.kernels import checks
from sparsebp.kernels.device.base import BLOCK, WARP, Launcher, ceil_div, real_define
from sparsebp.types import Array

_MAX_BLOCKS = 4096
"""Blocks of an elementwise launch; more elements than threads are taken in strides."""


class TrainingKernels(Launcher):
    """Device side of the training part of `sparsebp.kernels.protocol.Kernels`; shapes and dtypes are stated there."""

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row; a warp a row. A target outside [0, C) makes its row NaN."""
        checks.check_softmax_cross_entropy(logits, target, losses, grad)
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

    def sgd_update(
        self,
        param: Array,
        grad: Array,
        buffer: Array | None,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        first: bool,
    ) -> None:
        """torch.optim.SGD's update, in place."""
        checks.check_sgd_update(param, grad, buffer, momentum)
        real = param.dtype.type
        scalars = (real(lr), real(momentum), real(1.0 - dampening), real(weight_decay))
        args = (param, grad, buffer, np.int64(param.size), *scalars, np.int32(nesterov), np.int32(first))
        self._elementwise("sgd_update", param, args)

    def adam_update(
        self,
        param: Array,
        grad: Array,
        m: Array,
        v: Array,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
        step: int,
    ) -> None:
        """torch.optim.Adam's (decoupled: AdamW's) update, in place; the bias corrections are worked out in float64."""
        checks.check_adam_update(param, grad, m, v, step)
        scalars = (
            lr / (1.0 - beta1**step),
            1.0 / math.sqrt(1.0 - beta2**step),
            beta1,
            1.0 - beta1,
            beta2,
            1.0 - beta2,
            eps,
            0.0 if decoupled else weight_decay,
            1.0 - lr * weight_decay if decoupled else 1.0,
        )
        args = (param, grad, m, v, np.int64(param.size), *(param.dtype.type(s) for s in scalars))
        self._elementwise("adam_update", param, args)

    def _elementwise(self, name: str, param: Array, args: tuple) -> None:
        grid = min(ceil_div(param.size, BLOCK), _MAX_BLOCKS)
        self._launch("training.cu", name, real_define(param), grid, (BLOCK,), args)
