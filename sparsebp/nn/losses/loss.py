"""What all losses share: how the losses of elements or samples become one number, and the gradient behind it."""

from __future__ import annotations

import abc
from typing import Any, Literal

import numpy as np

from sparsebp.core.arguments import check_choice, check_number
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_gy, check_input

Reduction = Literal["mean", "sum", "none"]


class Loss(abc.ABC):
    """Base of the losses, with torch.nn's `reduction`.

    Parameters
    ----------
    size_average, reduce
        Only None: they keep the other arguments where PyTorch has them, which says the same by `reduction`.
    reduction
        ``"mean"`` or ``"sum"``: the loss is one number. ``"none"``: it is an array with the loss of every element or
        position, and the gradient at it goes to `input_grad`.

    Raises
    ------
    OptionError
        An argument is another one.
    """

    def __init__(self, size_average: None = None, reduce: None = None, reduction: Reduction = "mean") -> None:
        for name, value in (("size_average", size_average), ("reduce", reduce)):
            if value is not None:
                raise OptionError(f"{name} is no longer used", expected="None", got=value,
                                  remedy="Pass reduction='mean', 'sum' or 'none'")  # fmt: skip
        self.reduction: Reduction = check_choice("reduction", reduction, ("mean", "sum", "none"))

    def forward(self, prediction: Array, target: Array) -> tuple[Any, Array]:
        """Return the loss, a float (an array for ``reduction="none"``), and what `input_grad` needs.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or there is nothing to take the mean of.
        """
        return self._read(*self.on_device(prediction, target))

    def _read(self, value: Array, saved: Array) -> tuple[Any, Array]:
        """Return what `on_device` did, a reduced loss as a float."""
        return (value if self.reduction == "none" else float(value)), saved  # synchronize!

    @abc.abstractmethod
    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return what `forward` does, a reduced loss as a float64 array of shape (): the host reads nothing.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            As `forward`.
        """

    def input_grad(self, saved: Array, gy: Any = None) -> Array:
        """Return the gradient with respect to the prediction, of its shape.

        Parameters
        ----------
        saved
            As `forward` returned it.
        gy
            The gradient at the loss: a number, 1 if it is None. With ``reduction="none"`` an array of the loss's shape
            and the prediction's dtype.

        Raises
        ------
        OptionError
            `gy` is None where the loss is an array, or no number where it is one.
        ShapeError, DTypeError, DeviceError
            `gy` is another array.
        """
        if self.reduction != "none":
            return saved if gy is None else saved * saved.dtype.type(check_number("gy", gy, finite=False))
        shape = self._loss_shape(saved)
        if gy is None:
            raise OptionError(
                "The gradient at a loss with reduction='none' is missing", expected=f"gy, an array {shape}", got=None,
                remedy="Pass input_grad(saved, gy), or use reduction='mean' or 'sum'",
            )  # fmt: skip
        check_gy(gy, shape, saved.dtype, saved)
        return saved * self._spread(gy, saved)

    def _loss_shape(self, saved: Array) -> tuple[int, ...]:
        """Return the shape of the losses before they are reduced."""
        return saved.shape

    def _spread(self, gy: Array, saved: Array) -> Array:
        """Return gradients at the losses so that they meet the elements that each loss is made of."""
        return gy

    def _check_some(self, prediction: Array) -> None:
        """Refuse the mean of nothing."""
        if self.reduction == "mean" and prediction.size == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one element", got=prediction.shape, remedy="Skip empty batches"
            )


def check_mean(loss: Any) -> None:
    """Refuse a loss whose value over a batch is not the mean over its parts, which training takes it for.

    Raises
    ------
    OptionError
        Its `reduction` is another one.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction != "mean":
        raise OptionError(
            "Training takes the mean over samples, micro-batches and ranks", expected="a loss with reduction='mean'",
            got=f"reduction={reduction!r}", remedy="Build the loss anew, or use value_and_grad and an optimizer",
        )  # fmt: skip


class ElementwiseLoss(Loss):
    """Base of the losses of every element by itself: prediction and target have one shape."""

    @abc.abstractmethod
    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses of the elements and their slopes at the prediction, new arrays of its shape."""

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return what `forward` does, a reduced loss as a float64 array of shape (): the host reads nothing.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            As `forward`.
        """
        check_input(prediction, name="prediction")
        check_input(target, name="target", dtype=prediction.dtype, shape=prediction.shape, like=prediction)
        self._check_some(prediction)
        # An axis in front: of arrays without any, NumPy would make numbers.
        losses, slopes = self.element(prediction[None], target[None])
        losses, slopes = losses.reshape(prediction.shape), slopes.reshape(prediction.shape)
        if self.reduction == "none":
            return losses, slopes
        if self.reduction == "sum":
            return losses.sum(dtype=np.float64), slopes
        slopes *= slopes.dtype.type(1 / losses.size)
        return losses.mean(dtype=np.float64), slopes
