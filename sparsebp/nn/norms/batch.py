"""Normalisation of the channels of vectors and sequences over the batch."""

from __future__ import annotations

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_input
from sparsebp.nn.layers.norm import BatchNorm2d, BatchNormSaved


class BatchNorm1d(BatchNorm2d):
    """Normalise the channels of x (B, C) or (B, C, L), as `torch.nn.BatchNorm1d`.

    Options, parameters, buffers and errors are those of `BatchNorm2d`. In evaluation its Jacobian is diagonal; the
    batch's statistics couple the samples.
    """

    def forward(self, x: Array) -> tuple[Array, BatchNormSaved]:
        """Return the normalised x; `saved` is that of `BatchNorm2d`, for an image of width 1.

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
        return y.reshape(x.shape), saved

    def input_grad(self, gy: Array, saved: BatchNormSaved) -> Array:
        """Return the input gradient, through the statistics where they are the batch's."""
        return super().input_grad(self._like(gy, saved), saved).reshape(gy.shape)

    def weight_grad(self, gy: Array, saved: BatchNormSaved) -> dict[str, Array]:
        """Return ``{"weight": Σ gy x̂, "bias": Σ gy}`` of every channel."""
        return super().weight_grad(self._like(gy, saved), saved)

    def _like(self, gy: Array, saved: BatchNormSaved) -> Array:
        """Return gy as an image; one of another number of axes stays without them and is refused."""
        check_input(gy, name="gy")
        return _image(gy) if gy.ndim in (2, 3) else gy.reshape(-1)


def _image(x: Array) -> Array:
    return x.reshape(*x.shape, *[1] * (4 - x.ndim))
