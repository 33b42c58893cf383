"""Layers of samples with so many axes: a batch of them, or a lone one without the batch axis, as torch.nn takes it."""

from __future__ import annotations

import abc
from typing import Any, NamedTuple

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.nn.layer import Layer
from sparsebp.nn.work import Work


class Lone(NamedTuple):
    """What the forward of a lone sample saved: that of a batch of one."""

    batch: Any


class SampleLayer(Layer):
    """The base of layers whose samples have `sample_axes` axes. Subclasses say what a batch (B, …) does.

    A lone sample gets a batch axis in front, and what comes of it loses it. It has no batch for a scan: in a chain, the
    layer runs its `input_grad`.
    """

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output for x (B, …) or a lone sample (…), and what the way back needs.

        Raises
        ------
        ShapeError, DTypeError, DeviceError
            x has another number of axes, is too small, or does not fit the layer in another way.
        """
        backend.namespace(x=x)
        if x.ndim != self.sample_axes:
            return self._forward(x)
        y, saved = self._forward(x[None])
        return y[0], Lone(saved)

    def input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at x, of its shape."""
        if not isinstance(saved, Lone):
            return self._input_grad(gy, saved)
        return self._input_grad(_batch_of(gy), saved.batch)[0]

    def weight_grad(self, gy: Array, saved: Any) -> dict[str, Array]:
        """Return the gradients of the parameters, summed over batch and positions."""
        if not isinstance(saved, Lone):
            return self._weight_grad(gy, saved)
        return self._weight_grad(_batch_of(gy), saved.batch)

    def jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of a sample; its elements are counted channels first."""
        return self._jacobian_t(saved.batch if isinstance(saved, Lone) else saved)

    def input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost of `input_grad`."""
        if not isinstance(saved, Lone):
            return self._input_grad_work(shape, saved)
        return self._input_grad_work((1, *shape), saved.batch)

    def lone(self, saved: Any) -> bool:
        """Whether the forward had a lone sample."""
        return isinstance(saved, Lone)

    @abc.abstractmethod
    def _forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output for a batch, and what the way back needs."""

    @abc.abstractmethod
    def _input_grad(self, gy: Array, saved: Any) -> Array:
        """Return the gradient at a batch."""

    def _weight_grad(self, gy: Array, saved: Any) -> dict[str, Array]:
        """Return the gradients of the parameters: there are none."""
        return {}

    @abc.abstractmethod
    def _jacobian_t(self, saved: Any) -> Any:
        """Return the transposed Jacobian of each sample of a batch."""

    def _input_grad_work(self, shape: tuple[int, ...], saved: Any) -> Work:
        """Return the cost for a batch of `shape`: a few elementwise passes."""
        return super().input_grad_work(shape, saved)


def _batch_of(gy: Array) -> Array:
    backend.namespace(gy=gy)
    return gy[None]
