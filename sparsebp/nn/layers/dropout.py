"""Dropout, with its own seeded generator and a saved mask."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_generator, check_number
from sparsebp.core.types import Array, Seed
from sparsebp.nn.layer import Layer, check_gy, check_input
from sparsebp.nn.layers.identity import identity_jacobian


class Dropout(Layer):
    """Zero elements with probability `p` and scale the rest by 1/(1-p) while training, as `torch.nn.Dropout`.

    Parameters
    ----------
    p
        Probability of a zero, 0 <= p <= 1.
    rng
        Generator or seed; every forward draws a new mask.

    Raises
    ------
    OptionError
        `p` is out of range, or `rng` is no seed.
    """

    replayable = True

    def __init__(self, p: float = 0.5, *, rng: Seed = None) -> None:
        super().__init__()
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

        return identity_jacobian(x) if mask is None else pointwise_jacobian_t(mask)


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
