"""Upsampling by interpolation: every axis times one banded matrix."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_choice, check_flag, check_integer, check_positive, shown
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.layer import check_input
from sparsebp.nn.pool import ChannelProduct, ChannelSaved
from sparsebp.patterns.bands import interpolations
from sparsebp.patterns.builders import Resampling, resampling_pattern
from sparsebp.patterns.pattern import DeviceCopies
from sparsebp.patterns.windows import LONGEST

_AXES = {"nearest": (1, 2, 3), "nearest-exact": (1, 2, 3), "linear": (1,), "bilinear": (2,), "trilinear": (3,)}
"""By mode, how many axes x may have after the channels."""


class Upsample(ChannelProduct):
    """Resize x (B, C, L), (B, C, H, W) or (B, C, D, H, W) by interpolation, as `torch.nn.Upsample`.

    Parameters
    ----------
    size
        Lengths of the output's axes: one integer for all, or one per axis. Or pass `scale_factor`.
    scale_factor
        What the lengths are multiplied by, and rounded down: one positive number for all axes, or one per axis.
    mode
        ``"nearest"`` or ``"nearest-exact"``, on one to three axes; ``"linear"`` on one, ``"bilinear"`` on two,
        ``"trilinear"`` on three.
    align_corners
        Whether the outermost elements of input and output lie on each other, instead of the ends of the axes. Not for
        the nearest; None is False.
    recompute_scale_factor
        Whether positions follow from the rounded lengths of the output instead of `scale_factor`.

    Notes
    -----
    All samples share the Jacobian. An output has one entry for the nearest, up to 2, 4 or 8 for the linear modes.
    """

    sample_axes = 1  # there is no unbatched sample, as in PyTorch

    def __init__(
        self, size: int | Sequence[int] | None = None, scale_factor: float | Sequence[float] | None = None,
        mode: str = "nearest", align_corners: bool | None = None, recompute_scale_factor: bool | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if (size is None) == (scale_factor is None):
            raise OptionError("Upsample needs one of size and scale_factor", expected="one of them",
                              got=f"size={shown(size)}, scale_factor={shown(scale_factor)}")  # fmt: skip
        self.size = _each("size", size, lambda n: check_integer("size", n, 1, LONGEST))
        self.scale_factor = _each("scale_factor", scale_factor, lambda f: check_positive("scale_factor", f))
        self.mode = check_choice("mode of Upsample", mode, tuple(_AXES))
        self.align_corners = align_corners if align_corners is None else check_flag("align_corners", align_corners)
        self.recompute_scale_factor = bool(
            recompute_scale_factor is not None and check_flag("recompute_scale_factor", recompute_scale_factor)
        )
        if mode.startswith("nearest") and align_corners is not None:
            raise OptionError("align_corners has no meaning for the nearest element", expected="None",
                              got=align_corners)  # fmt: skip
        if self.recompute_scale_factor and scale_factor is None:
            raise OptionError("There is no scale factor to compute again", expected="scale_factor", got=f"size={size}")

    def _check_x(self, x: Array) -> ModuleType:
        xp, axes = check_input(x), _AXES[self.mode]
        if x.ndim - 2 not in axes:
            raise ShapeError(f"x has the wrong number of axes for mode={self.mode!r}", got=x.shape,
                             expected=" or ".join(f"{n + 2}: (B, C, …)" for n in axes))  # fmt: skip
        if 0 in x.shape[1:]:
            raise ShapeError("An axis of x behind the batch is empty", expected="at least one element on each",
                             got=x.shape, remedy="Skip empty images")  # fmt: skip
        return xp

    def _out_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:2], *(axis.outputs for axis in self._axes(shape)))

    def _axes(self, shape: tuple[int, ...]) -> tuple[Resampling, ...]:
        lengths, rule = shape[2:], self.mode if self.mode.startswith("nearest") else "linear"
        name, given = ("size", self.size) if self.scale_factor is None else ("scale_factor", self.scale_factor)
        each = given if isinstance(given, tuple) else (given,) * len(lengths)
        if len(each) != len(lengths):
            raise ShapeError(f"x does not fit {name}", expected=f"(B, C, …) with {len(each)} axes after the channels",
                             got=shape)  # fmt: skip
        counts, scales = each, (None,) * len(each)
        if self.scale_factor is not None:
            counts = tuple(int(length * scale) for length, scale in zip(lengths, each, strict=True))
            scales = scales if self.recompute_scale_factor else each
        if not 1 <= min(counts) <= max(counts) <= LONGEST:
            raise ShapeError("scale_factor makes an axis empty or too long",
                             expected=f"from 1 to {LONGEST} elements on each axis", got=counts)  # fmt: skip
        axes = zip(lengths, counts, scales, strict=True)
        return tuple(Resampling(*axis, rule, bool(self.align_corners)) for axis in axes)

    def _bands(self, shape: tuple[int, ...], dtype: np.dtype) -> list[DeviceCopies]:
        return interpolations(self._axes(shape), dtype)

    def _jacobian_t(self, saved: ChannelSaved) -> Any:
        from sparsebp.jacobians import TransposedJacobian

        pattern, values = resampling_pattern(saved.shape[1], self._axes(saved.shape), saved.dtype)
        return TransposedJacobian._unchecked(pattern, *values.on(backend.namespace(saved.first)))


def _each(name: str, value: Any, check: Any) -> Any:
    """Return a number, checked, or a tuple of numbers, one per axis; None stays None."""
    if isinstance(value, (tuple, list)):
        return tuple(map(check, value))
    return None if value is None else check(value)
