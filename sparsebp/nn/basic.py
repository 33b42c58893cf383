"""Layers that rearrange their input: identity, flattening, padding, dropout."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from sparsebp.core import backend, host_pool
from sparsebp.core.check import (
    Array,
    Seed,
    check_flag,
    check_generator,
    check_integer,
    check_number,
    check_sequence,
    shown,
)
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.init import draw_rows
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.pool import SampleLayer


class Identity(Layer):
    """Return the input unchanged, as `torch.nn.Identity`.

    Parameters
    ----------
    *args, **options
        Anything; they have no effect.
    """

    replayable = True
    stepwise = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()

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


class Reshaping(Layer):
    """Base of `Flatten` and `Unflatten`: the elements in their order, in another shape."""

    replayable = True

    @abc.abstractmethod
    def _shape(self, x: Array) -> tuple[int, ...]:
        """Return the shape of the output."""

    def forward(self, x: Array) -> tuple[Array, Array]:
        """Return x reshaped; `saved` is x."""
        check_input(x)
        return x.reshape(self._shape(x)), x

    def input_grad(self, gy: Array, saved: Array) -> Array:
        """Return gy in the shape of x."""
        check_gy(gy, self._shape(saved), saved.dtype, saved)
        return gy.reshape(saved.shape)

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity: a sample's elements keep their order."""
        return identity_jacobian_t(saved)


class Flatten(Reshaping):
    """Make one axis of some, ``(B, …) -> (B, product of the rest)``, as `torch.nn.Flatten`.

    Parameters
    ----------
    start_dim, end_dim
        First and last of the axes that become one, counted from the end where negative.
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = check_integer("start_dim", start_dim, -64, 63)
        self.end_dim = check_integer("end_dim", end_dim, -64, 63)

    def couples_samples(self, saved: Array) -> bool:
        """Whether the batch is among the axes that became one."""
        first, last = self._axes(saved)
        return first == 0 < last

    def may_couple_samples(self) -> bool:
        """Whether the first of these axes may be the batch."""
        return self.start_dim == 0 or self.start_dim < -1

    def jacobian_t(self, saved: Array) -> Any:
        """Return the identity: a sample's elements keep their order.

        Raises
        ------
        OptionError
            The batch is among the axes that became one.
        """
        if self.couples_samples(saved):
            raise OptionError("The batch is among the flattened axes, so there is no Jacobian per sample",
                              expected="start_dim of 1 or more", got=self.start_dim,
                              remedy="Use input_grad")  # fmt: skip
        return super().jacobian_t(saved)

    def _shape(self, x: Array) -> tuple[int, ...]:
        first, last = self._axes(x)
        return (*x.shape[:first], prod(x.shape[first : last + 1]), *x.shape[last + 1 :])

    def _axes(self, x: Array) -> tuple[int, int]:
        first, last = (dim + x.ndim if dim < 0 else dim for dim in (self.start_dim, self.end_dim))
        if not 0 <= first <= last < x.ndim:
            raise ShapeError("x has no such axes to flatten",
                             expected=f"axes {self.start_dim} to {self.end_dim}, in this order",
                             got=x.shape)  # fmt: skip
        return first, last


class Unflatten(Reshaping):
    """Make several axes of one, as `torch.nn.Unflatten`: the way back of `Flatten`.

    Parameters
    ----------
    dim
        The axis, counted from the end if negative; not the batch.
    unflattened_size
        The lengths of the new axes; one of them may be -1, for the rest.
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim = check_integer("dim", dim, -64, 63)
        given = check_sequence("unflattened_size", unflattened_size, "lengths")
        self.unflattened_size = tuple(check_integer("a length of unflattened_size", n, -1) for n in given)
        if self.dim == 0 or not given or self.unflattened_size.count(-1) > 1:
            raise OptionError("Invalid axes to unflatten",
                              expected="dim other than the batch's, and lengths of which one may be -1",
                              got=f"dim={dim}, unflattened_size={self.unflattened_size}",
                              remedy="Pass Unflatten(1, (3, -1)), say")  # fmt: skip

    def _shape(self, x: Array) -> tuple[int, ...]:
        axis = self.dim + x.ndim if self.dim < 0 else self.dim
        if 0 < axis < x.ndim:
            known, length = prod(n for n in self.unflattened_size if n != -1), x.shape[axis]
            left = length // max(known, 1)
            sizes = tuple(left if n == -1 else n for n in self.unflattened_size)
            if prod(sizes) == length and (known or -1 not in self.unflattened_size):
                return (*x.shape[:axis], *sizes, *x.shape[axis + 1 :])
        raise ShapeError("x has no axis that unflattens so",
                         expected=f"axis {self.dim} of the lengths {self.unflattened_size}", got=x.shape)  # fmt: skip


class ZeroPad2d(SampleLayer):
    """Zeros around images (B, C, H, W) or (C, H, W), as `torch.nn.ZeroPad2d`.

    Parameters
    ----------
    padding
        How many lines: left, right, above, below; one number for all four. Where negative, lines are left out.
    """

    replayable = True

    sample_axes = 3

    def __init__(self, padding: int | Sequence[int]) -> None:
        super().__init__()
        four = padding if isinstance(padding, (tuple, list)) else (padding,) * 4
        if len(four) != 4:
            raise OptionError("Invalid padding", expected="a number, or left, right, above, below", got=shown(padding))
        left, right, above, below = (check_integer("a padding", n, -(2**31), 2**31) for n in four)
        self.padding = left, right, above, below

    def _forward(self, x: Array) -> tuple[Array, Array]:
        xp = check_input(x, shape=(None,) * 4)
        y = host_pool.empty(xp, self._shape(x), x.dtype)
        y.fill(0)
        inner, outer = self._windows(x)
        y[outer] = x[inner]
        return y, x

    def _input_grad(self, gy: Array, saved: Array) -> Array:
        xp = check_gy(gy, self._shape(saved), saved.dtype, saved)
        gx = host_pool.empty(xp, saved.shape, saved.dtype)
        inner, outer = self._windows(saved)
        if min(self.padding) < 0:
            gx.fill(0)
        gx[inner] = gy[outer]
        return gx

    def _jacobian_t(self, saved: Array) -> Any:
        """Return one entry 1 a row, shared by the batch: the pattern is a selection."""
        from sparsebp.jacobians import TransposedJacobian
        from sparsebp.patterns import pad_pattern

        _, channels, height, width = saved.shape
        pattern = pad_pattern(channels, (height, width), self.padding)
        return TransposedJacobian(pattern, backend.namespace(saved).ones(pattern.nnz, dtype=saved.dtype))

    def _shape(self, x: Array) -> tuple[int, ...]:
        left, right, above, below = self.padding
        height, width = x.shape[2] + above + below, x.shape[3] + left + right
        if height < 0 or width < 0:
            raise ShapeError("x is smaller than the part left out", expected=f"padding {self.padding} or more",
                             got=x.shape)  # fmt: skip
        return (*x.shape[:2], height, width)

    def _windows(self, x: Array) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return where in x and in the output that lies which both have."""
        left, right, above, below = self.padding
        inner, outer = [], []
        for length, before, behind in ((x.shape[2], above, below), (x.shape[3], left, right)):
            first, last = max(-before, 0), min(length, length + behind)
            inner.append(slice(first, max(last, first)))
            outer.append(slice(first + before, max(last, first) + before))
        return (..., *inner), (..., *outer)


class Dropout(Layer):
    """Zero elements with probability `p` and scale the rest by 1/(1-p) while training, as `torch.nn.Dropout`.

    Parameters
    ----------
    p
        Probability of a zero, 0 <= p <= 1.
    inplace
        Has no effect.
    rng
        Generator or seed; every forward draws a new mask.
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
        mask = self._mask(x)
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

    def _mask(self, x: Array) -> Array:
        """Draw the mask."""
        return dropout_mask(self.generator, x, self.p, self.batch_axes[0])


class Dropout2d(Dropout):
    """Zero whole channels of x (B, C, …) with probability `p` while training, as `torch.nn.Dropout2d`.

    Options and errors as for `Dropout`.

    Notes
    -----
    Source: Tompson et al., "Efficient object localization using convolutional networks", 2015, §3.2.
    """

    replayable = True
    capture_obstacle = Dropout.capture_obstacle

    def forward(self, x: Array) -> tuple[Array, tuple[Array, Array | None]]:
        """Return the masked x; `saved` holds x and the mask (None when nothing is dropped)."""
        check_input(x)
        if x.ndim not in (3, 4):
            raise ShapeError("x has no images", expected="(B, C, H, W) or (B, C, L)", got=x.shape,
                             remedy="Use Dropout for other arrays")  # fmt: skip
        return super().forward(x)

    def _mask(self, x: Array) -> Array:
        xp = backend.namespace(x)
        channels = dropout_mask(self.generator, xp.empty((*x.shape[:2], *[1] * (x.ndim - 2)), x.dtype), self.p)
        return xp.ascontiguousarray(xp.broadcast_to(channels, x.shape))


def dropout_mask(rng: np.random.Generator, like: Array, p: float, batch_axis: int = 0) -> Array:
    """Draw a mask of zeros and 1/(1-p) of the shape, dtype and namespace of `like`, with samples on `batch_axis`."""
    # One integer is drawn from `rng` and seeds the draw on the array's own device, so that no mask is transferred.
    xp = backend.namespace(like)
    if p == 1:
        return xp.zeros_like(like)

    def uniform(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        return xp.random.default_rng(int(rng.integers(2**31))).random(shape, dtype=like.dtype)

    mask = (draw_rows(rng, like.shape, uniform, batch_axis) >= p).astype(like.dtype)
    mask *= like.dtype.type(1 / (1 - p))
    return mask


def identity_jacobian_t(x: Array, batch_axis: int = 0) -> Any:
    """Return the identity `TransposedJacobian` for one sample of `x`, which has them on `batch_axis`."""
    from sparsebp.jacobians import TransposedJacobian
    from sparsebp.patterns import SparsityPattern

    size = prod(n for axis, n in enumerate(x.shape) if axis != batch_axis)
    return TransposedJacobian(SparsityPattern.identity(size), backend.namespace(x).ones(size, dtype=x.dtype))
