"""What convolutions, transposed ones and `Linear` share: a weight of which a part can be pruned."""

from __future__ import annotations

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DTypeError, ShapeError
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer

MASK = "weight_mask"
"""The buffer's name, that of torch.nn.utils.prune."""


class Prunable(Layer):
    """A layer with a parameter ``weight`` of which a mask keeps a part.

    The mask is the buffer ``weight_mask``, bool, of the weight's shape; it is there once something has been pruned. The
    other weights are 0 whenever the layer runs, their gradients are 0, and the transposed Jacobian has no entries for
    them.
    """

    def keep_weights(self, kept: Array) -> None:
        """Keep the weights where `kept` is true, and set the others to 0, in place.

        Parameters
        ----------
        kept
            Bool, of the weight's shape, NumPy or CuPy; it is copied to the weight's device.

        Raises
        ------
        DTypeError, ShapeError
            It is something else.
        """
        weight = self.params["weight"]
        if kept is None or (backend.namespace(kept) and kept.dtype != bool):
            raise DTypeError("The mask has the wrong dtype", expected="bool", got=getattr(kept, "dtype", None),
                             remedy="Pass kept != 0")  # fmt: skip
        if kept.shape != weight.shape:
            raise ShapeError(
                "The mask does not fit the weight", expected=weight.shape, got=kept.shape,
                remedy="Pass one truth value for every weight",
            )  # fmt: skip
        self.buffers[MASK] = backend.as_namespace(kept, backend.namespace(weight)).copy()
        weight *= self.buffers[MASK]

    def buffer_for(self, name: str) -> Array | None:
        """Return room for the mask that a state brings to a layer that has none yet."""
        weight = self.params["weight"]
        return backend.namespace(weight).ones(weight.shape, dtype=bool) if name == MASK else None

    def masks(self) -> list[Array]:
        """Return the mask, if there is one."""
        return [self.buffers[MASK]] if MASK in self.buffers else []

    def _weight(self) -> Array:
        """Return the weight, with 0 for what is pruned: an optimizer's old momentum may have moved it."""
        weight = self.params["weight"]
        if MASK in self.buffers:
            weight *= self.buffers[MASK]
        return weight

    def _masked(self, gradient: Array) -> Array:
        """Return the weight's gradient, a new array, with 0 for what is pruned."""
        if MASK in self.buffers:
            gradient *= self.buffers[MASK]
        return gradient

    def _kept(self) -> np.ndarray | None:
        """Return the mask on the host, None without one."""
        return backend.to_host(self.buffers[MASK]) if MASK in self.buffers else None  # synchronize!
