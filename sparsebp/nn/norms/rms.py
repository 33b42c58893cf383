"""Normalisation by the mean square of the trailing axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.nn.layer import check_gy
from sparsebp.nn.norms.layer import LayerNorm


class RMSNorm(LayerNorm):
    """``x / sqrt(mean(x²) + eps) · weight`` over the trailing axes, as `torch.nn.RMSNorm`.

    Parameters
    ----------
    normalized_shape
        Lengths of the trailing axes that are normalised together; an integer stands for one axis.
    eps
        Added to the mean square; None: the spacing of x's dtype at 1.
    elementwise_affine
        Whether there is a weight.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64, of the weight.

    Raises
    ------
    OptionError
        `normalized_shape` is empty or holds a length below 1, `eps` is negative, or the flag is no truth value.

    Notes
    -----
    Parameter: ``weight`` (ones), of shape `normalized_shape`. Source: Zhang & Sennrich, "Root Mean Square Layer
    Normalization", 2019, Eq. 4.
    """

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float | None = None, elementwise_affine: bool = True,
        device: Any = None, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__(normalized_shape, 0.0 if eps is None else eps, elementwise_affine, False, device, dtype)
        self._eps_of_dtype = eps is None

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the normalised x; `saved` is it before the weight, and 1/sqrt(mean(x²) + eps).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x does not end in `normalized_shape`, or its dtype is not the weight's.
        """
        xp = self._check(x)
        eps = np.finfo(x.dtype).eps if self._eps_of_dtype else self.eps
        scale = 1 / xp.sqrt((x * x).mean(axis=self._axes(), keepdims=True) + x.dtype.type(eps))
        unit = x * scale
        return unit * self.params["weight"] if self.params else unit, (unit, scale)

    def input_grad(self, gy: Array, saved: tuple[Array, Array]) -> Array:
        """Return ``(g - x̂ mean(g x̂)) / sqrt(mean(x²) + eps)`` with g = gy · weight."""
        unit, scale = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        g = gy * self.params["weight"] if self.params else gy
        return scale * (g - unit * (g * unit).mean(axis=self._axes(), keepdims=True))

    jacobian_t, lone = LayerNorm.jacobian_t, LayerNorm.lone

    def _block(self, unit: Array, eye: Array) -> Array:
        return eye - unit[..., :, None] * unit[..., None, :] / eye.shape[0]
