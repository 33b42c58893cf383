"""Losses: the mean of a batch, and its gradient with respect to the prediction."""

from __future__ import annotations

import math

import numpy as np

from sparsebp import backend, kernels
from sparsebp.core.errors import DTypeError, OptionError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_input


class CrossEntropyLoss:
    """Mean softmax cross-entropy of logits (N, C) against classes (N,), as `torch.nn.CrossEntropyLoss`."""

    def forward(self, prediction: Array, target: Array) -> tuple[float, Array]:
        """Return the mean loss and, as `saved`, its gradient with respect to the logits (one pass computes both).

        Parameters
        ----------
        prediction
            Logits (N, C), float32 or float64, N >= 1.
        target
            Classes (N,), any integer dtype, in [0, C).

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or N is 0.
        OptionError
            A class is out of range.
        """
        mean, grad = self.on_device(prediction, target)
        value = float(mean)  # synchronize!
        if math.isnan(value):  # as one that is not there makes it
            self._check_classes(target, prediction.shape[1])
        return value, grad

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return what `forward` does, the mean loss as a float64 array of shape (): the host reads nothing.

        A class out of range is not refused: it makes the loss NaN.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            As `forward`.
        """
        self._check(prediction, target)
        xp, n = backend.namespace(prediction), prediction.shape[0]
        losses, grad = xp.empty(n, dtype=prediction.dtype), xp.empty(prediction.shape, dtype=prediction.dtype)
        kernels.get(xp).softmax_cross_entropy(
            xp.ascontiguousarray(prediction), xp.ascontiguousarray(target, dtype=np.int64), losses, grad
        )
        grad *= prediction.dtype.type(1 / n)
        return losses.mean(dtype=np.float64), grad

    def input_grad(self, saved: Array) -> Array:
        """Return the gradient with respect to the prediction."""
        return saved

    @staticmethod
    def _check_classes(target: Array, classes: int) -> None:
        low, high = int(target.min()), int(target.max())  # synchronize!
        if low < 0 or high >= classes:
            raise OptionError(
                "target names a class that is not there", expected=f"classes from 0 to {classes - 1}",
                got=f"classes from {low} to {high}", remedy="Number the classes from 0, or give the model more outputs",
            )  # fmt: skip

    def _check(self, prediction: Array, target: Array) -> None:
        check_input(prediction, name="prediction", shape=(None, None))
        if target is None:
            raise DTypeError("target is missing", expected="an array of class numbers", got=None, remedy="Pass target")
        backend.namespace(prediction, target)
        if target.dtype.kind not in "iu":
            raise DTypeError(
                "target has the wrong dtype",
                expected="integers (class numbers)",
                got=target.dtype,
                remedy="Pass class numbers, not probabilities",
            )
        backend.check_array("target", target, shape=(prediction.shape[0],), contiguous=False)
        if prediction.shape[0] == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one row", got=prediction.shape, remedy="Skip empty batches"
            )


class MSELoss:
    """Mean over all elements of ``(prediction - target)²``, as `torch.nn.MSELoss`."""

    def forward(self, prediction: Array, target: Array) -> tuple[float, Array]:
        """Return the mean loss and, as `saved`, the difference. Shapes and dtypes must be equal.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            The arguments do not fit each other, or are empty.
        """
        value, difference = self.on_device(prediction, target)
        return float(value), difference  # synchronize!

    def on_device(self, prediction: Array, target: Array) -> tuple[Array, Array]:
        """Return what `forward` does, the mean loss as a float64 array of shape (): the host reads nothing.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            As `forward`.
        """
        check_input(prediction, name="prediction")
        check_input(target, name="target", dtype=prediction.dtype, shape=prediction.shape, like=prediction)
        if prediction.size == 0:
            raise ShapeError(
                "The batch is empty", expected="at least one element", got=prediction.shape, remedy="Skip empty batches"
            )
        difference = prediction - target
        return (difference * difference).mean(dtype=np.float64), difference

    def input_grad(self, saved: Array) -> Array:
        """Return the gradient with respect to the prediction."""
        return saved * saved.dtype.type(2 / saved.size)
