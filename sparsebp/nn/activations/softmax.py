"""Softmax over the last axis."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer, check_gy, check_input


class Softmax(Layer):
    """``exp(x) / Σ exp(x)`` over the last axis, as `torch.nn.Softmax`.

    Parameters
    ----------
    dim
        -1, or the number of the last axis.

    Raises
    ------
    OptionError
        It is no such number.
    """

    replayable = True

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = check_integer("dim", dim, -1)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return the softmax of x (B, …, n); `saved` is y.

        Raises
        ------
        ShapeError
            x has no axis beside the batch.
        OptionError
            `dim` is not the last axis of x.
        """
        xp = check_input(x)
        if x.ndim < 2:
            raise ShapeError("x has no axis beside the batch", expected="(B, …, n)", got=x.shape, remedy="Add an axis")
        if self.dim not in (-1, x.ndim - 1):
            raise OptionError(
                "Softmax works over the last axis only", expected=f"dim=-1 or dim={x.ndim - 1}", got=self.dim,
                remedy="Move the axis to the end before",
            )  # fmt: skip
        with np.errstate(invalid="ignore"):  # a row of infinities gives NaN
            y = xp.exp(x - x.max(axis=-1, keepdims=True)) if x.size else x.copy()
        y /= y.sum(axis=-1, keepdims=True)
        return y, y

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return ``y (gy - Σ gy y)``."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return saved * (gy - (gy * saved).sum(axis=-1, keepdims=True))

    def jacobian_t(self, saved: Array) -> Any:
        """Return a dense block ``diag(y) - y yᵀ`` for each position between batch and last axis, per sample."""
        from sparsebp.jacobians import block_jacobian_t

        n = saved.shape[-1]
        y = saved.reshape(saved.shape[0], int(np.prod(saved.shape[1:-1])), n)
        eye = backend.namespace(saved).eye(n, dtype=saved.dtype)
        return block_jacobian_t(y[..., :, None] * (eye - y[..., None, :]))
