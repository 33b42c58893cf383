"""Softmax over one axis, and its logarithm."""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer, check_gy, check_input


class Softmax(Layer):
    """``exp(x) / Σ exp(x)`` over one axis, as `torch.nn.Softmax`.

    Parameters
    ----------
    dim
        Number of the axis, from the end where negative; None: the last one. (In PyTorch None is deprecated, and not
        always the last one.)

    Raises
    ------
    OptionError
        It is no integer.
    """

    replayable = True

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        self.dim = -1 if dim is None else check_integer("dim", dim, -64, 63)

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is mapped by itself: the axis is the last one, of features."""
        return self.dim == -1

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the softmax of x, of its shape; `saved` is y.

        Raises
        ------
        OptionError
            x has no axis `dim`.
        """
        xp = check_input(x)
        if not -max(x.ndim, 1) <= self.dim < max(x.ndim, 1):
            raise OptionError("x has no such axis", expected=f"dim from {-x.ndim} to {x.ndim - 1}", got=self.dim,
                              remedy="Pass the number of an axis of x")  # fmt: skip
        y = self._of(xp, xp.atleast_1d(x)).reshape(x.shape)
        return y, y

    def _of(self, xp: ModuleType, x: Array) -> Array:
        if x.size == 0:
            return x.copy()
        with np.errstate(invalid="ignore"):  # infinities give NaN
            y = xp.exp(x - x.max(axis=self.dim, keepdims=True))
        y /= y.sum(axis=self.dim, keepdims=True)
        return y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``y (gy - Σ gy y)``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        g, y = xp.atleast_1d(gy), xp.atleast_1d(saved)
        return (y * (g - (g * y).sum(axis=self.dim, keepdims=True))).reshape(saved.shape)

    def lone(self, saved: Array) -> bool:
        """Whether x was one vector."""
        return saved.ndim < 2

    def couples_samples(self, saved: Array) -> bool:
        """Whether the axis is that of the batch."""
        return saved.ndim > 1 and self.dim in (0, -saved.ndim)

    def jacobian_t(self, saved: Array) -> Any:
        """Return a dense block ``diag(y) - y yᵀ`` for each place on a sample's other axes, per sample.

        Raises
        ------
        OptionError
            The axis is that of the batch.
        """
        from sparsebp.jacobians import axis_jacobian_t

        if self.couples_samples(saved):
            raise OptionError(
                f"{type(self).__name__} over the batch couples the samples, so no sample has a Jacobian of its own",
                expected="dim of another axis than the first", got=self.dim, remedy="Use input_grad",
            )  # fmt: skip
        axis, shape = self.dim % max(saved.ndim, 1), saved.shape
        n = shape[axis]
        y = saved.reshape(shape[0], prod(shape[1:axis]), n, prod(shape[axis + 1 :]))
        eye = backend.namespace(saved).eye(n, dtype=saved.dtype)
        return axis_jacobian_t(self._blocks(y, eye[:, :, None]))

    def _blocks(self, y: Array, eye: Array) -> Array:
        return y[:, :, :, None] * (eye - y[:, :, None])


class LogSoftmax(Softmax):
    """``x - log Σ exp(x)`` over one axis, as `torch.nn.LogSoftmax`: the logarithm of `Softmax`, without its rounding.

    Parameters
    ----------
    dim
        As for `Softmax`.

    Raises
    ------
    OptionError
        It is no integer.
    """

    def _of(self, xp: ModuleType, x: Array) -> Array:
        if x.size == 0:
            return x.copy()
        with np.errstate(invalid="ignore", divide="ignore"):  # infinities give NaN
            y = x - x.max(axis=self.dim, keepdims=True)
            y -= xp.log(xp.exp(y).sum(axis=self.dim, keepdims=True))
        return y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``gy - exp(y) Σ gy``."""
        xp = check_gy(gy, saved.shape, saved.dtype, saved)
        g, y = xp.atleast_1d(gy), xp.atleast_1d(saved)
        return (g - xp.exp(y) * g.sum(axis=self.dim, keepdims=True)).reshape(saved.shape)

    couples_samples, jacobian_t, lone = Softmax.couples_samples, Softmax.jacobian_t, Softmax.lone

    def _blocks(self, y: Array, eye: Array) -> Array:
        """Return ``I - p 1ᵀ`` with the probabilities p down the rows, so that each row is an input's."""
        return eye - backend.namespace(y).exp(y)[:, :, :, None]
