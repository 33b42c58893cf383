"""Mean squared error."""

from __future__ import annotations

import numpy as np

from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import check_input


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
