"""Loss and optimizer kernels on the host: one pass over memory each."""

from __future__ import annotations

import numba
import numpy as np

from sparsebp.kernels import checks
from sparsebp.kernels.host.parts import PARALLEL, SERIAL, parts_for, share
from sparsebp.types import Array

_EXP_WEIGHT = 8  # an exponential costs about as much as this many multiply-adds


class TrainingKernels:
    """Host side of the training part of `sparsebp.kernels.protocol.Kernels`; shapes and dtypes are stated there."""

    def softmax_cross_entropy(self, logits: Array, target: Array, losses: Array, grad: Array) -> None:
        """Loss and gradient of every row. A target outside [0, C) makes its row NaN instead of reading elsewhere."""
        checks.check_softmax_cross_entropy(logits, target, losses, grad)
        parts = parts_for(logits.size * _EXP_WEIGHT)
        if parts == 1:
            _softmax_cross_entropy(logits, target, losses, grad, 0, len(logits))
        else:
            _softmax_cross_entropy_parallel(logits, target, losses, grad, parts)

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
        arguments = (
            param.reshape(-1),
            grad.reshape(-1),
            (param if buffer is None else buffer).reshape(-1),  # without momentum the buffer is never touched
            real(lr),
            real(momentum),
            real(1.0 - dampening),
            real(weight_decay),
            bool(nesterov),
            bool(first),
            buffer is not None,
        )
        parts = parts_for(param.size)
        if parts == 1:
            _sgd(*arguments, 0, param.size)
        else:
            _sgd_parallel(*arguments, parts)

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
        """torch.optim.Adam's (decoupled: AdamW's) update, in place.

        The bias corrections are computed in float64 and enter as two factors: the step size ``lr / (1 - beta1**step)``
        and the root ``sqrt(1 - beta2**step)`` under the second moment's root.
        """
        checks.check_adam_update(param, grad, m, v, step)
        real = param.dtype.type
        arguments = (
            param.reshape(-1),
            grad.reshape(-1),
            m.reshape(-1),
            v.reshape(-1),
            real(lr / (1.0 - beta1**step)),
            real(beta1),
            real(1.0 - beta1),
            real(beta2),
            real(1.0 - beta2),
            real(eps),
            real(1.0 / (1.0 - beta2**step) ** 0.5),
            real(0.0 if decoupled else weight_decay),
            real(1.0 - lr * weight_decay if decoupled else 1.0),
        )
        parts = parts_for(4 * param.size)
        if parts == 1:
            _adam(*arguments, 0, param.size)
        else:
            _adam_parallel(*arguments, parts)


@numba.njit(**SERIAL)
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


@numba.njit(**PARALLEL)
def _softmax_cross_entropy_parallel(logits, target, losses, grad, parts):  # type: ignore[no-untyped-def]
    n = len(logits)
    for part in numba.prange(parts):
        _softmax_cross_entropy(logits, target, losses, grad, share(part, parts, n), share(part + 1, parts, n))


@numba.njit(**SERIAL)
def _sgd(param, grad, buffer, lr, momentum, fresh, weight_decay, nesterov, first, has_buffer, low, high):  # type: ignore[no-untyped-def]
    p, g, v = param[low:high], grad[low:high], buffer[low:high]
    decays = weight_decay != 0  # then 0 * infinity does not turn an infinite parameter into NaN
    if not has_buffer:
        for i in range(len(p)):
            p[i] -= lr * (g[i] + weight_decay * p[i] if decays else g[i])
        return
    for i in range(len(p)):
        step = g[i] + weight_decay * p[i] if decays else g[i]
        # the first buffer is the gradient itself; what an unset buffer holds must not get in, even as 0 * NaN
        v[i] = step if first else momentum * v[i] + fresh * step
        p[i] -= lr * (step + momentum * v[i] if nesterov else v[i])


@numba.njit(**PARALLEL)
def _sgd_parallel(param, grad, buffer, lr, momentum, fresh, weight_decay, nesterov, first, has_buffer, parts):  # type: ignore[no-untyped-def]
    n = len(param)
    for part in numba.prange(parts):
        low, high = share(part, parts, n), share(part + 1, parts, n)
        _sgd(param, grad, buffer, lr, momentum, fresh, weight_decay, nesterov, first, has_buffer, low, high)


@numba.njit(**SERIAL)
def _adam(param, grad, m, v, step_size, beta1, rest1, beta2, rest2, eps, root, weight_decay, shrink, low, high):  # type: ignore[no-untyped-def]
    p, g, mean, square = param[low:high], grad[low:high], m[low:high], v[low:high]
    decays = weight_decay != 0
    for i in range(len(p)):
        value = p[i] * shrink
        slope = g[i] + weight_decay * value if decays else g[i]
        mean[i] = beta1 * mean[i] + rest1 * slope
        square[i] = beta2 * square[i] + rest2 * slope * slope
        p[i] = value - step_size * mean[i] / (np.sqrt(square[i]) * root + eps)


@numba.njit(**PARALLEL)
def _adam_parallel(param, grad, m, v, step_size, beta1, rest1, beta2, rest2, eps, root, weight_decay, shrink, parts):  # type: ignore[no-untyped-def]
    n = len(param)
    for part in numba.prange(parts):
        low, high = share(part, parts, n), share(part + 1, parts, n)
        _adam(param, grad, m, v, step_size, beta1, rest1, beta2, rest2, eps, root, weight_decay, shrink, low, high)
