"""Losses of predicted numbers."""

from __future__ import annotations

from sparsebp import backend
from sparsebp.core.arguments import check_number
from sparsebp.core.types import Array
from sparsebp.nn.losses.loss import ElementwiseLoss, Reduction


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


class L1Loss(ElementwiseLoss):
    """``|prediction - target|`` of every element, as `torch.nn.L1Loss`; the slope at 0 is 0.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    """

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the sizes and the signs of the differences."""
        xp, difference = backend.namespace(prediction), prediction - target
        return xp.abs(difference), xp.sign(difference)


class SmoothL1Loss(ElementwiseLoss):
    """``d² / (2 beta)`` where ``d = |prediction - target| < beta``, else ``d - beta / 2``, as `torch.nn.SmoothL1Loss`.

    Parameters
    ----------
    size_average, reduce, reduction
        As for `Loss`.
    beta
        Where the parabola ends, 0 or more; with 0 it is `L1Loss`.

    Raises
    ------
    OptionError
        An argument is another one.

    Notes
    -----
    Source: Girshick, "Fast R-CNN", 2015, Eq. 3.
    """

    def __init__(
        self, size_average: None = None, reduce: None = None, reduction: Reduction = "mean", beta: float = 1.0
    ) -> None:
        super().__init__(size_average, reduce, reduction)
        self.beta = check_number("beta", beta, 0)

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses, and ``d / beta`` between -1 and 1."""
        xp, difference = backend.namespace(prediction), prediction - target
        size = xp.abs(difference)
        if self.beta == 0:
            return size, xp.sign(difference)
        near = size < self.beta
        losses = xp.where(near, 0.5 * size * size / self.beta, size - 0.5 * self.beta)
        return losses, xp.where(near, difference / self.beta, xp.sign(difference))
