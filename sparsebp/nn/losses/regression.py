"""Losses of predicted numbers."""

from __future__ import annotations

from sparsebp.core.types import Array
from sparsebp.nn.losses.loss import ElementwiseLoss


class MSELoss(ElementwiseLoss):
    """``(prediction - target)²`` of every element, as `torch.nn.MSELoss`; shapes and dtypes must be equal.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    """

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the squares, and twice the differences."""
        difference = prediction - target
        return difference * difference, difference + difference
