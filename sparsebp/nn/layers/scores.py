"""What attention does with the products of queries and keys: masks, as torch.nn takes them, and softmax."""

from __future__ import annotations

import math
from types import ModuleType
from typing import NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.types import Array


class Pairs(NamedTuple):
    """The pairs of steps of an attention: B samples, so many heads, T steps that look at S."""

    batch: int
    heads: int
    steps: int
    looked_at: int

    def masks(
        self, xp: ModuleType, like: Array, attn_mask: Array | None, key_padding_mask: Array | None, valid: Array | None
    ) -> list[Array]:
        """Return masks (B, heads, T, S), each of these axes full or of length 1: True is left out, a number is added.

        Parameters
        ----------
        like
            An array of the products' dtype.
        attn_mask
            (T, S) or (B · heads, T, S), bool or of that dtype.
        key_padding_mask
            (B, S), likewise.
        valid
            (B, S), bool, False for what is left out.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            A mask does not fit.
        """
        batch, heads, steps, looked_at = self
        found = []
        if attn_mask is not None:
            _check("attn_mask", attn_mask, ((steps, looked_at), (batch * heads, steps, looked_at)), like)
            found.append(attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.reshape(self))
        if key_padding_mask is not None:
            _check("key_padding_mask", key_padding_mask, ((batch, looked_at),), like)
            found.append(key_padding_mask[:, None, None])
        if valid is not None:
            found.append(~valid[:, None, None])
        return found

    def masked(self, xp: ModuleType, products: Array, masks: list[Array]) -> Array:
        """Return products (B · heads, T, S or more) with the masks; what stands behind S is left alone."""
        if not masks:
            return products
        more, shaped = products.shape[-1] - self.looked_at, products.reshape(*self[:3], products.shape[-1])
        for each in masks:
            mask = each
            if more:
                mask = xp.concatenate([mask, xp.zeros((*mask.shape[:3], more), mask.dtype)], axis=3)
            left_out = mask.dtype == bool
            shaped = xp.where(mask, shaped.dtype.type(-math.inf), shaped) if left_out else shaped + mask
        return shaped.reshape(products.shape)


def softmax(scores: Array, masked: bool = False) -> None:
    """Turn scores into weights that add up to 1 along the last axis, in place.

    Where masks leave a step nothing to look at, its weights are 0, as in torch's scaled_dot_product_attention.
    """
    if scores.size == 0:
        return
    xp = backend.namespace(scores)
    most = scores.max(axis=-1, keepdims=True)
    if masked:
        most = xp.where(most == -math.inf, most.dtype.type(0), most)  # exp(-inf) = 0
    with np.errstate(invalid="ignore"):  # infinities give NaN
        scores -= most
        xp.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= xp.where(total == 0, total.dtype.type(1), total) if masked else total


def softmax_grad(g: Array, y: Array) -> None:
    """Turn the gradient at a softmax's output y into that at its input, ``y (g - Σ g y)``, in place."""
    g -= (g * y).sum(axis=-1, keepdims=True)
    g *= y


def _check(name: str, mask: Array, shapes: tuple[tuple[int, ...], ...], like: Array) -> None:
    backend.namespace(**{name: mask}, like=like)
    if mask.dtype not in (bool, like.dtype):
        raise DTypeError(f"{name} has the wrong dtype", expected=f"bool or {like.dtype}", got=mask.dtype,
                         remedy="Pass True for what is left out, or numbers of x's dtype")  # fmt: skip
    if mask.shape not in shapes:
        raise ShapeError(f"{name} has the wrong shape", expected=" or ".join(map(str, shapes)), got=mask.shape,
                         remedy="Pass a mask for the steps of query and key")  # fmt: skip
