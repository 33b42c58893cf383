"""Normalisation of the vectors of the trailing axes to mean 0 and variance 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.arrays import full, parameter_dtype
from sparsebp.nn.layer import Layer, check_gy, check_input


class LayerNorm(Layer):
    """``(x - mean) / sqrt(var + eps) · weight + bias`` over the trailing axes, as `torch.nn.LayerNorm`.

    Parameters
    ----------
    normalized_shape
        Lengths of the trailing axes that are normalised together; an integer stands for one axis.
    eps
        Added to the (biased) variance.
    elementwise_affine
        Whether there is a weight.
    bias
        Whether there is a bias as well; without a weight there is none.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64, of the parameters.

    Raises
    ------
    OptionError
        `normalized_shape` is empty or holds a length below 1, `eps` is negative, or a flag is no truth value.

    Notes
    -----
    Parameters: ``weight`` (ones) and ``bias`` (zeros), of shape `normalized_shape`. Source: Ba et al., "Layer
    Normalization", 2016, Eq. 4.
    """

    replayable = True

    def __init__(
        self, normalized_shape: int | Sequence[int], eps: float = 1e-5, elementwise_affine: bool = True,
        bias: bool = True, device: Any = None, dtype: Any = np.float32,
    ) -> None:  # fmt: skip
        super().__init__()
        given = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
        shape = tuple(check_integer("a length of normalized_shape", n, 1) for n in given)
        if not shape:
            raise OptionError(
                "Invalid normalized_shape", expected="at least one length, each 1 or more", got=shape,
                remedy="Pass the lengths of the trailing axes",
            )  # fmt: skip
        self.normalized_shape, self.eps = shape, check_number("eps", eps, 0)
        dtype, bias = parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("elementwise_affine", elementwise_affine):
            self.params["weight"] = full(shape, 1, dtype)
            if bias:
                self.params["bias"] = full(shape, 0, dtype)

    @property
    def stepwise(self) -> bool:
        """Whether each step of a sequence is normalised by itself."""
        return len(self.normalized_shape) == 1

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the normalised x; `saved` is it before the affine map, and 1/sqrt(var + eps).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x does not end in `normalized_shape`, or its dtype is not the weight's.
        """
        xp, weight = self._check(x), self.params.get("weight")
        axes = self._axes()
        centred = x - x.mean(axis=axes, keepdims=True)
        scale = 1 / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + self.eps)
        centred *= scale
        y = centred if weight is None else centred * weight
        return y + self.params["bias"] if "bias" in self.params else y, (centred, scale)

    def input_grad(self, gy: Array, saved: tuple[Array, Array]) -> Array:
        """Return ``(g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps)`` with g = gy · weight."""
        unit, scale = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        axes = self._axes()
        g = gy * self.params["weight"] if "weight" in self.params else gy
        return scale * (g - g.mean(axis=axes, keepdims=True) - unit * (g * unit).mean(axis=axes, keepdims=True))

    def weight_grad(self, gy: Array, saved: tuple[Array, Array]) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}``, summed over all leading axes."""
        unit, _ = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        leading = tuple(range(gy.ndim - len(self.normalized_shape)))
        sums = {"weight": gy * unit, "bias": gy}
        return {name: sums[name].sum(axis=leading) for name in self.params}

    def jacobian_t(self, saved: tuple[Array, Array]) -> Any:
        """Return a dense block for each normalised vector of a sample, per sample; the batch is the first axis."""
        from sparsebp.jacobians import block_jacobian_t

        unit, scale = saved
        if unit.ndim == len(self.normalized_shape):
            raise ShapeError(
                "x has no batch axis", expected="(B, …)", got=unit.shape, remedy="Add an axis in front"
            )  # fmt: skip
        n = math.prod(self.normalized_shape)
        positions = math.prod(unit.shape[1 : unit.ndim - len(self.normalized_shape)])
        unit, scale = unit.reshape(-1, positions, n), scale.reshape(-1, positions, 1, 1)
        eye = backend.namespace(unit).eye(n, dtype=unit.dtype)
        blocks = scale * self._block(unit, eye)
        return block_jacobian_t(blocks * self.params["weight"].reshape(-1) if "weight" in self.params else blocks)

    @property
    def sample_axes(self) -> int:  # type: ignore[override]
        """The normalised ones."""
        return len(self.normalized_shape)

    def lone(self, saved: tuple[Array, Array]) -> bool:
        """Whether x had no axis beside the normalised ones."""
        return saved[0].ndim == len(self.normalized_shape)

    def _block(self, unit: Array, eye: Array) -> Array:
        """Return the blocks but for the scale."""
        return eye - (1 + unit[..., :, None] * unit[..., None, :]) / eye.shape[0]

    def _check(self, x: Array) -> ModuleType:
        """Return the namespace of x; raise if it does not fit."""
        check_input(x)
        leading = x.ndim - len(self.normalized_shape)
        if leading < 0:
            raise ShapeError(
                "x has too few axes", expected=f"(…, {', '.join(map(str, self.normalized_shape))})", got=x.shape,
                remedy="Pass an array that ends in normalized_shape",
            )  # fmt: skip
        weight = self.params.get("weight")
        shape = (*(None for _ in range(leading)), *self.normalized_shape)
        return check_input(x, dtype=None if weight is None else weight.dtype, shape=shape, like=weight)

    def _axes(self) -> tuple[int, ...]:
        return tuple(range(-len(self.normalized_shape), 0))
