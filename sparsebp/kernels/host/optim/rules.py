"""The update rules of the optimizers, of numbers in order: `sparsebp.kernels.host.optim.optimizers` runs them.

Every rule rounds as torch.optim's tensor operations do, one after the other, so that float32 results stay together
over many steps: where those fuse a multiplication and an addition, `fma` stands here, and nowhere else. `at` holds the
addresses of parameter, gradient and buffers, `o` the options, as in `sparsebp.kernels.api`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from sparsebp.kernels.host.engine.parts import INNER_JIT
from sparsebp.kernels.host.engine.simd import (
    absolute,
    address,
    device,
    filled,
    fma,
    lanes,
    load_up_to,
    maximum,
    minimum,
    square_root,
    store_up_to,
)
from sparsebp.kernels.momenta import momenta

_momenta = numba.njit(**INNER_JIT)(momenta)


@device
def _gradient(p: Any, g: Any, i: int, left: int, decay: float, maximize: float) -> Any:
    """Return the gradient that the rule sees: negated to go uphill, with the decay added."""
    grad = load_up_to(g, i, left)
    if maximize != 0.0:
        grad = grad * -1.0
    if decay != 0.0:  # 0 * infinity would turn an infinite parameter into NaN
        grad = fma(load_up_to(p, i, left), decay, grad)
    return grad


@device
def _lerp(old: Any, new: Any, weight: float, like: Any) -> Any:
    """Go from `old` towards `new`, from the nearer end, as torch.lerp."""
    if abs(weight) < 0.5:
        return fma(new - old, weight, old)
    return fma(new - old, filled(like, weight) - 1.0, new)


@device
def _mean_square(old: Any, grad: Any, keep: float) -> Any:
    return fma(grad * (1.0 - keep), grad, old * keep)


def _sgd(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, v = address(at[0], like), address(at[1], like), address(at[2], like)
    lr, momentum, fresh, decay, nesterov, maximize = -o[0], o[1], 1.0 - o[2], o[3], o[4], o[5]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        if at[2] != 0:
            # the first buffer is the gradient itself, undampened
            buffer = grad if step == 1 else fma(grad, fresh, load_up_to(v, i, left) * momentum)
            store_up_to(v, i, buffer, left)
            grad = fma(buffer, momentum, grad) if nesterov != 0.0 else buffer
        store_up_to(p, i, fma(grad, lr, load_up_to(p, i, left)), left)


def _adam(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, m, v, top = (
        address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like), address(at[4], like),
    )  # fmt: skip
    lr, beta1, beta2, eps, decay, decoupled, maximize = o[0], o[1], o[2], o[3], o[4], o[5], o[6]
    step_size = -(lr / (1.0 - beta1 ** np.float64(step)))
    root = np.sqrt(1.0 - beta2 ** np.float64(step))
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        if at[4] != 0:
            square = maximum(load_up_to(top, i, left), square)
            store_up_to(top, i, square, left)
        store_up_to(p, i, param + mean * step_size / (square_root(square) / root + eps), left)


def _nadam(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, decoupled, maximize, momentum_decay = o[0], o[1], o[2], o[3], o[4], o[5], o[6], o[7]
    count = np.float64(step)
    now, then, product = _momenta(beta1, momentum_decay, count)
    of_grad, of_mean = -lr * (1.0 - now) / (1.0 - product), -lr * then / (1.0 - product * then)
    correction = 1.0 - beta2**count
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        root = square_root(square / correction) + eps
        store_up_to(p, i, param + grad * of_grad / root + mean * of_mean / root, left)


def _radam(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, decoupled, maximize = o[0], o[1], o[2], o[3], o[4], o[5], o[6]
    count = np.float64(step)
    correction1, correction2 = 1.0 - beta1**count, 1.0 - beta2**count
    longest = 2.0 / (1.0 - beta2) - 1.0
    length = longest - 2.0 * count * beta2**count / correction2
    rectified, rectifier = length > 5.0, 1.0  # else the variance is not known well enough
    if rectified:
        rectifier = ((length - 4.0) * (length - 2.0) * longest / ((longest - 4.0) * (longest - 2.0) * length)) ** 0.5
    scale = correction2**0.5
    coupled, keep = (0.0, 1.0 - lr * decay) if decoupled != 0.0 else (decay, 1.0)
    for i in range(low, high, lanes(p)):
        left = high - i
        param = load_up_to(p, i, left)
        if keep != 1.0:
            param = param * keep
        grad = _gradient(p, g, i, left, coupled, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        square = _mean_square(load_up_to(v, i, left), grad, beta2)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, square, left)
        change = mean / correction1 * lr
        if rectified:
            change = change * (scale / (square_root(square) + eps)) * rectifier
        store_up_to(p, i, param - change, left)


def _adamax(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, m, v = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, beta1, beta2, eps, decay, maximize = o[0], o[1], o[2], o[3], o[4], o[5]
    step_size = -(lr / (1.0 - beta1 ** np.float64(step)))
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        mean = _lerp(load_up_to(m, i, left), grad, 1.0 - beta1, m)
        largest = maximum(load_up_to(v, i, left) * beta2, absolute(grad) + eps)
        store_up_to(m, i, mean, left)
        store_up_to(v, i, largest, left)
        store_up_to(p, i, load_up_to(p, i, left) + mean * step_size / largest, left)


def _adagrad(like, at, o, step, low, high):  # type: ignore[no-untyped-def]
    p, g, s = address(at[0], like), address(at[1], like), address(at[2], like)
    lr, eps, decay, maximize = -(o[0] / (1.0 + (step - 1) * o[1])), o[2], o[3], o[4]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        total = fma(grad, grad, load_up_to(s, i, left))
        store_up_to(s, i, total, left)
        store_up_to(p, i, load_up_to(p, i, left) + grad * lr / (square_root(total) + eps), left)


def _adadelta(like, at, o, _, low, high):  # type: ignore[no-untyped-def]
    p, g, s, d = address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like)
    lr, rho, eps, decay, maximize = -o[0], o[1], o[2], o[3], o[4]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        square, moved = _mean_square(load_up_to(s, i, left), grad, rho), load_up_to(d, i, left)
        delta = square_root(moved + eps) / square_root(square + eps) * grad
        store_up_to(s, i, square, left)
        store_up_to(d, i, _mean_square(moved, delta, rho), left)
        store_up_to(p, i, fma(delta, lr, load_up_to(p, i, left)), left)


def _rmsprop(like, at, o, _, low, high):  # type: ignore[no-untyped-def]
    p, g, s, b, a = (
        address(at[0], like), address(at[1], like), address(at[2], like), address(at[3], like), address(at[4], like),
    )  # fmt: skip
    lr, alpha, eps, decay, momentum, maximize = -o[0], o[1], o[2], o[3], o[4], o[5]
    for i in range(low, high, lanes(p)):
        left = high - i
        grad = _gradient(p, g, i, left, decay, maximize)
        square = _mean_square(load_up_to(s, i, left), grad, alpha)
        store_up_to(s, i, square, left)
        if at[4] != 0:  # centered: the variance
            mean = _lerp(load_up_to(a, i, left), grad, 1.0 - alpha, a)
            store_up_to(a, i, mean, left)
            square = fma(mean * -1.0, mean, square)
        root, param = square_root(square) + eps, load_up_to(p, i, left)
        if at[3] != 0:
            buffer = load_up_to(b, i, left) * momentum + grad / root
            store_up_to(b, i, buffer, left)
            store_up_to(p, i, fma(buffer, lr, param), left)
        else:
            store_up_to(p, i, param + grad * lr / root, left)


def _scale(like, at, o, _, low, high):  # type: ignore[no-untyped-def]
    p = address(at[0], like)
    for i in range(low, high, lanes(p)):
        store_up_to(p, i, load_up_to(p, i, high - i) * o[0], high - i)


def _clamp(like, at, o, _, low, high):  # type: ignore[no-untyped-def]
    p = address(at[0], like)
    for i in range(low, high, lanes(p)):
        store_up_to(p, i, maximum(-o[0], minimum(o[0], load_up_to(p, i, high - i))), high - i)


RULES: dict[str, Any] = {
    "sgd": _sgd,
    "adam": _adam,
    "nadam": _nadam,
    "radam": _radam,
    "adamax": _adamax,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop,
    "scale": _scale,
    "clamp": _clamp,
}
