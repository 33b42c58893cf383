"""Normalisation of groups of channels, each sample by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.arrays import full, parameter_dtype
from sparsebp.nn.layer import Layer, check_gy, check_input


class GroupNorm(Layer):
    """Normalise groups of channels of x (B, C, …), each sample by itself, as `torch.nn.GroupNorm`.

    Parameters
    ----------
    num_groups
        Into how many groups the channels are split.
    num_channels
        C, a multiple of `num_groups`.
    eps
        Added to the (biased) variance.
    affine
        Whether every channel has a weight.
    device
        None or ``"cpu"``: layers are built on the host, and moved by `to`.
    dtype
        float32 or float64, of the parameters.
    bias
        Whether it has a bias beside the weight.

    Raises
    ------
    OptionError
        A number is below 1, `num_groups` does not divide `num_channels`, `eps` is negative, or a flag is no truth
        value.

    Notes
    -----
    Parameters: ``weight`` (ones) and ``bias`` (zeros), (C,). Source: Wu & He, "Group Normalization", 2018, Eq. 1 and 7.
    """

    replayable = True

    def __init__(
        self, num_groups: int, num_channels: int, eps: float = 1e-5, affine: bool = True, device: Any = None,
        dtype: Any = np.float32, *, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_groups = check_integer("num_groups", num_groups, 1)
        self.num_channels = check_integer("num_channels", num_channels, 1)
        if num_channels % num_groups:
            raise OptionError("The groups do not divide the channels", expected=f"a multiple of {num_groups} channels",
                              got=num_channels, remedy="Pass another num_groups")  # fmt: skip
        self.eps, dtype, bias = check_number("eps", eps, 0), parameter_dtype(dtype, device), check_flag("bias", bias)
        if check_flag("affine", affine):
            self.params["weight"] = full((self.num_channels,), 1, dtype)
            if bias:
                self.params["bias"] = full((self.num_channels,), 0, dtype)

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array]]:
        """Return the normalised x; `saved` is it before the affine map, and 1/sqrt(var + eps) of the groups.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x is not (B, C, …) with at least one number in each group, or its dtype is not the weight's.
        """
        weight = self.params.get("weight")
        xp = check_input(x, dtype=None if weight is None else weight.dtype, like=weight)
        if x.ndim < 2 or x.shape[1] != self.num_channels or 0 in x.shape[2:]:
            raise ShapeError("x has the wrong shape", expected=f"(B, {self.num_channels}, …), none of them empty",
                             got=x.shape, remedy="Pass channels behind the batch")  # fmt: skip
        grouped = self._grouped(x)
        centred = grouped - grouped.mean(axis=2, keepdims=True)
        scale = 1 / xp.sqrt((centred * centred).mean(axis=2, keepdims=True) + self.eps)
        centred *= scale
        unit = centred.reshape(x.shape)
        y = unit if weight is None else unit * self._each(weight, x.ndim)
        return y + self._each(self.params["bias"], x.ndim) if "bias" in self.params else y, (unit, scale)

    def input_grad(self, gy: Array, saved: tuple[Array, Array]) -> Array:
        """Return ``(g - mean(g) - x̂ mean(g x̂)) / sqrt(var + eps)`` of each group, with g = gy · weight."""
        unit, scale = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        g = self._grouped(gy * self._each(self.params["weight"], gy.ndim) if self.params else gy)
        u = self._grouped(unit)
        gx = scale * (g - g.mean(axis=2, keepdims=True) - u * (g * u).mean(axis=2, keepdims=True))
        return gx.reshape(unit.shape)

    def weight_grad(self, gy: Array, saved: tuple[Array, Array]) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel."""
        unit, _ = saved
        check_gy(gy, unit.shape, unit.dtype, unit)
        axes = (0, *range(2, gy.ndim))
        sums = {"weight": gy * unit, "bias": gy}
        return {name: sums[name].sum(axis=axes) for name in self.params}

    def jacobian_t(self, saved: tuple[Array, Array]) -> Any:
        """Return a dense block for each group of a sample, per sample."""
        from sparsebp.jacobians import block_jacobian_t

        unit, scale = self._grouped(saved[0]), saved[1][..., None]
        n = unit.shape[2]
        eye = backend.namespace(unit).eye(n, dtype=unit.dtype)
        blocks = scale * (eye - (1 + unit[..., :, None] * unit[..., None, :]) / n)
        if self.params:
            each = n * self.num_groups // self.num_channels
            weight = backend.namespace(unit).repeat(self.params["weight"], each)
            blocks = blocks * weight.reshape(self.num_groups, 1, n)
        return block_jacobian_t(blocks)

    def _grouped(self, x: Array) -> Array:
        """Return x as (B, groups, numbers of a group)."""
        return x.reshape(x.shape[0], self.num_groups, math.prod(x.shape[1:]) // self.num_groups)

    def _each(self, values: Array, ndim: int) -> Array:
        return values.reshape(-1, *[1] * (ndim - 2))
