"""Normalisation of the channels of vectors and sequences over the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_gy, check_input
from sparsebp.nn.layers.norm import BatchNorm2d, BatchNormSaved, Sums


class BatchNorm1dSaved(NamedTuple):
    """What the forward of `BatchNorm1d` leaves: that of images of width 1, and the shape of x."""

    image: BatchNormSaved
    shape: tuple[int, ...]


class BatchNorm1d(BatchNorm2d):
    """Normalise the channels of x (B, C) or (B, C, L), as `torch.nn.BatchNorm1d`.

    Options, parameters, buffers and errors are those of `BatchNorm2d`. In evaluation its Jacobian is diagonal; the
    batch's statistics couple the samples.
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the normalised x; `saved` is that of `BatchNorm2d` for images of width 1, and the shape of x.

        Raises
        ------
        ShapeError
            x has another number of axes or channels, or the batch's statistics are asked of one value a channel.
        """
        check_input(x)
        if x.ndim not in (2, 3):
            raise ShapeError("x has the wrong number of axes", expected=f"(B, {self.num_features}[, L])", got=x.shape,
                             remedy="Use BatchNorm2d for images")  # fmt: skip
        y, saved = super().forward(_image(x))
        return y.reshape(x.shape), BatchNorm1dSaved(saved, x.shape)

    def input_grad(self, gy: Array, saved: Any, kept: Sums | None = None) -> Array:
        """Return the input gradient, through the statistics where they are the batch's; add their sums to `kept`."""
        return super().input_grad(self._image_of(gy, saved), saved.image, kept).reshape(saved.shape)

    def weight_grad(self, gy: Array, saved: Any, kept: Sums | None = None) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel, from the sums in `kept` if they are there."""
        return super().weight_grad(self._image_of(gy, saved), saved.image, kept)

    def couples_samples(self, saved: Any) -> bool:
        """Whether the statistics were the batch's."""
        return super().couples_samples(saved.image)

    def jacobian_t(self, saved: Any) -> Any:
        """Return the diagonal of ``weight / sqrt(running_var + eps)``, shared by the batch.

        Raises
        ------
        OptionError
            The statistics were the batch's, so that every output depends on every sample.
        """
        return super().jacobian_t(saved.image)

    def _image_of(self, gy: Array, saved: BatchNorm1dSaved) -> Array:
        x = saved.image[0]
        check_gy(gy, saved.shape, x.dtype, x)
        return _image(gy)


def _image(x: Array) -> Array:
    return x.reshape(*x.shape, *[1] * (4 - x.ndim))
