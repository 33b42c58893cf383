"""Layers that hand on what comes in: as it is, as one axis, or with a part of it dropped."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_generator, check_integer, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array, Seed
from sparsebp.nn.layer import Layer, check_gy, check_input


class Identity(Layer):
    """Return the input unchanged, as `torch.nn.Identity`."""

    replayable = True
    stepwise = True

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x itself."""
        check_input(x)
        return x, x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy itself."""
        check_gy(gy, saved.shape, saved.dtype, saved)
        return gy

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity, shared by the batch; products skip it."""
        return identity_jacobian_t(saved)


class Flatten(Layer):
    """Make one axis of some, ``(B, …) -> (B, product of the rest)``, as `torch.nn.Flatten`.

    Parameters
    ----------
    start_dim, end_dim
        First and last of the axes that become one, counted from the end where negative.

    Raises
    ------
    OptionError
        One of them is no integer.
    """

    replayable = True

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = check_integer("start_dim", start_dim, -64, 63)
        self.end_dim = check_integer("end_dim", end_dim, -64, 63)

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x reshaped; `saved` is x.

        Raises
        ------
        ShapeError
            x has no such axes, or the last one comes before the first.
        """
        check_input(x)
        return x.reshape(self._shape(x)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy in the shape of x."""
        check_gy(gy, self._shape(saved), saved.dtype, saved)
        return gy.reshape(saved.shape)

    def couples_samples(self, saved: Array) -> bool:
        """Whether the batch is among the axes that became one."""
        first, last = self._axes(saved)
        return first == 0 < last

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity: a sample's elements keep their order.

        Raises
        ------
        OptionError
            The batch is among the axes that became one.
        """
        if self.couples_samples(saved):
            raise OptionError(
                "The batch is among the axes that became one, so no sample has a Jacobian of its own",
                expected="start_dim of 1 or more", got=self.start_dim, remedy="Use input_grad",
            )  # fmt: skip
        return identity_jacobian_t(saved)

    def _shape(self, x: Array) -> tuple[int, ...]:
        first, last = self._axes(x)
        return (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])

    def _axes(self, x: Array) -> tuple[int, int]:
        first, last = (dim + x.ndim if dim < 0 else dim for dim in (self.start_dim, self.end_dim))
        if not 0 <= first <= last < x.ndim:
            raise ShapeError(
                "x has no such axes to flatten", expected=f"axes {self.start_dim} to {self.end_dim}, in this order",
                got=x.shape, remedy="Pass x with more axes, or other start_dim and end_dim",
            )  # fmt: skip
        return first, last


class Dropout(Layer):
    """Zero elements with probability `p` and scale the rest by 1/(1-p) while training, as `torch.nn.Dropout`.

    Parameters
    ----------
    p
        Probability of a zero, 0 <= p <= 1.
    inplace
        Has no effect: the input is never written to.
    rng
        Generator or seed; every forward draws a new mask.

    Raises
    ------
    OptionError
        `p` is out of range, `inplace` no truth value, or `rng` no seed.
    """

    replayable = True
    stepwise = True

    def __init__(self, p: float = 0.5, inplace: bool = False, *, rng: Seed = None) -> None:
        super().__init__()
        self.inplace = check_flag("inplace", inplace)
        self.p = check_number("p", p, 0, 1)
        self.generator: np.random.Generator = check_generator("rng", rng)

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array | None]]:
        """Return the masked x; `saved` holds x and the mask (None when nothing is dropped)."""
        check_input(x)
        if not self.training or self.p == 0:
            return x, (x, None)
        mask = dropout_mask(self.generator, x, self.p)
        return x * mask, (x, mask)

    def input_grad(self, gy: Array, saved: tuple[Array, Array | None]) -> Array:
        """Return gy times the mask of that forward."""
        x, mask = saved
        check_gy(gy, x.shape, x.dtype, x)
        return gy if mask is None else gy * mask

    def capture_obstacle(self) -> str | None:
        """While training, every mask has a seed from the host's generator."""
        return "draws the seed of its mask on the host" if self.training and self.p > 0 else None

    def jacobian_t(self, saved: tuple[Array, Array | None]) -> Any:
        """Return diag(mask) per sample, or the identity when nothing was dropped."""
        x, mask = saved
        from sparsebp.jacobians import pointwise_jacobian_t

        return identity_jacobian_t(x) if mask is None else pointwise_jacobian_t(mask)


def dropout_mask(rng: np.random.Generator, like: Array, p: float) -> Array:
    """Draw a mask of zeros and 1/(1-p) in the shape, dtype and namespace of `like`.

    One integer is drawn from `rng` and seeds the draw on the array's own device, so that no mask is transferred.
    """
    xp = backend.namespace(like)
    if p == 1:
        return xp.zeros_like(like)
    local = xp.random.default_rng(int(rng.integers(2**31)))
    mask = (local.random(like.shape, dtype=like.dtype) >= p).astype(like.dtype)
    mask *= like.dtype.type(1 / (1 - p))
    return mask


def identity_jacobian_t(x: Array, batch_axis: int = 0) -> Any:
    """Return the identity `TransposedJacobian` for one sample of `x`, which has them on `batch_axis`."""
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import SparsityPattern

    size = prod(n for axis, n in enumerate(x.shape) if axis != batch_axis)
    return TransposedJacobian(SparsityPattern.identity(size), backend.namespace(x).ones(size, dtype=x.dtype))
