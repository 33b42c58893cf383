"""The loss of answers that are yes or no."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_input
from sparsebp.nn.losses.loss import ElementwiseLoss, Reduction
from sparsebp.patterns.copies import DeviceCopies, frozen


class BCEWithLogitsLoss(ElementwiseLoss):
    """Cross-entropy of ``sigmoid(prediction)`` against probabilities, as `torch.nn.BCEWithLogitsLoss`.

    ``-w (p t log σ(x) + (1 - t) log σ(-x))`` of every element, of the logits x and the targets t, w being `weight` and
    p `pos_weight`. Nothing overflows.

    Parameters
    ----------
    weight
        What each element counts, an array that broadcasts to the prediction; it is copied. None: all 1.
    size_average, reduce, reduction
        As for `Loss`. The mean divides by the number of elements, whatever they count.
    pos_weight
        What the part of the target counts, as `weight`; above 1 it raises recall.

    Raises
    ------
    OptionError, DTypeError, DeviceError
        An argument is another one.
    """

    def __init__(
        self, weight: Array | None = None, size_average: None = None, reduce: None = None,
        reduction: Reduction = "mean", pos_weight: Array | None = None,
    ) -> None:  # fmt: skip
        super().__init__(size_average, reduce, reduction)
        self._weights: dict[str, DeviceCopies] = {}
        for name, value in (("weight", weight), ("pos_weight", pos_weight)):
            if value is not None:
                check_input(value, name=name)
                self._weights[name] = DeviceCopies(frozen(backend.to_host(value).copy()))

    def element(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return the losses, and ``w ((1 - t) - (1 + (p - 1) t) σ(-x))``.

        Raises
        ------
        ShapeError, DTypeError
            A weight does not broadcast to the prediction, or has another dtype.
        """
        xp = backend.namespace(prediction)
        z, rest = xp.exp(-xp.abs(prediction)), 1 - target
        softplus = xp.maximum(-prediction, 0) + xp.log1p(z)  # -log σ(x)
        sigmoid = xp.where(prediction > 0, z, 1) / (1 + z)  # σ(-x)
        if "pos_weight" in self._weights:
            counts = 1 + (self._on(xp, "pos_weight", prediction) - 1) * target
            softplus, sigmoid = softplus * counts, sigmoid * counts
        losses, slopes = rest * prediction + softplus, rest - sigmoid
        if "weight" in self._weights:
            weight = self._on(xp, "weight", prediction)
            losses, slopes = losses * weight, slopes * weight
        return losses, slopes

    def _on(self, xp: ModuleType, name: str, prediction: Array) -> Any:
        (weight,) = self._weights[name].on(xp)
        shape = prediction.shape[1:]  # behind the axis in front that `element` gets
        try:
            fits = np.broadcast_shapes(weight.shape, shape) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ShapeError(f"{name} does not fit the prediction", expected=f"a shape that broadcasts to {shape}",
                             got=weight.shape, remedy="Build the loss with another one")  # fmt: skip
        backend.check_array(name, weight, dtype=prediction.dtype)
        return weight
