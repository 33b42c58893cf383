"""Lone sequences and samples without a batch axis, as torch.nn's recurrent layers and cells take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from sparsebp import backend
from sparsebp.core.shortcuts import record
from sparsebp.core.types import Array
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Layer

L = TypeVar("L", bound=type[Layer])


class LoneSaved(NamedTuple):
    """What the forward of a lone sequence or sample saved: that of a batch of one; its states have no batch axis."""

    batch: Any

    @property
    def backward_choice(self) -> Any:
        """As the batch has it."""
        return self.batch.backward_choice

    @property
    def h_n(self) -> Array:
        """Last hidden states of a layer (num_layers · directions, H)."""
        return self.batch.h_n[:, 0]

    @property
    def c_n(self) -> Array:
        """Last cell states of an LSTM (num_layers · directions, H)."""
        return self.batch.c_n[:, 0]

    @property
    def c(self) -> Array:
        """Cell states of an LSTM's cell (1, H)."""
        return self.batch.c[:, 0]

    def __iter__(self) -> Iterator[Array]:
        """Yield the last states, where those of a batch are unpacked."""
        return (array[:, 0] for array in self.batch)


class LoneGradients(Gradients):
    """`Gradients` of a lone sequence or sample, from those of a batch of one."""

    __slots__ = ("_axis", "_batch")

    def __init__(self, layer: Layer, gy: Any, saved: LoneSaved, batch: Any, x_axis: int, axis: int) -> None:
        super().__init__(layer, gy, saved, lambda: batch.input_grad().squeeze(x_axis), batch.weight_grad)
        self._batch, self._axis = batch, axis

    def _of_state(self, name: str) -> Array:
        return self._once(name, lambda: getattr(self._batch, name).squeeze(self._axis))

    @property
    def h0(self) -> Array:
        """The gradient with respect to h0, of its shape; computed once."""
        return self._of_state("h0")

    @property
    def c0(self) -> Array:
        """The gradient with respect to c0, of its shape; computed once."""
        return self._of_state("c0")

    @property
    def hidden(self) -> Array:
        """The gradient with respect to a cell's h, of its shape; computed once."""
        return self._of_state("hidden")

    @property
    def cell(self) -> Array:
        """The gradient with respect to a cell's c, of its shape; computed once."""
        return self._of_state("cell")


def takes_lone(sample_axes: int, state_axis: int) -> Callable[[L], L]:
    """Let a recurrent layer or cell take an x of so many axes, without that of the batch; states are without it too.

    Parameters
    ----------
    sample_axes
        2 of a layer, (T, features), 1 of a cell.
    state_axis
        Where a batch is in the states: 1 of a layer, 0 of a cell.
    """

    def within(cls: L) -> L:
        forward, gradients = cls.forward, cls.gradients

        @functools.wraps(forward)
        def lone_forward(self: Any, x: Array, *state: Any, **options: Any) -> tuple[Array, Any]:
            xp, axis = backend.namespace(x=x), self.batch_axes[0]
            if x.ndim != sample_axes:
                return forward(self, x, *state, **options)
            named = {key: value if key == "lengths" else _with(value, state_axis) for key, value in options.items()}
            first = [_with(value, state_axis) for value in state[:1]]
            y, saved = forward(self, xp.expand_dims(x, axis), *first, *state[1:], **named)
            return y.squeeze(axis), LoneSaved(saved)

        @functools.wraps(gradients)
        def lone_gradients(self: Any, gy: Any, saved: Any, *last: Any, **named: Any) -> Gradients:
            if not isinstance(saved, LoneSaved):
                return gradients(self, gy, saved, *last, **named)
            axis = self.batch_axes[0]
            found = gradients(
                self, _with(gy, axis), saved.batch, *(_with(array, state_axis) for array in last),
                **{key: _with(array, state_axis) for key, array in named.items()},
            )  # fmt: skip
            return LoneGradients(self, gy, saved, found, axis, state_axis)

        found: Any = cls
        found.forward, found.gradients = lone_forward, lone_gradients
        found.lone, found.sample_axes = lambda self, saved: isinstance(saved, LoneSaved), sample_axes
        for name in ("forward_time_major", "stream"):  # the same for these two methods
            if hasattr(cls, name):
                setattr(cls, name, getattr(cls, name))
        for name in ("hidden_jacobians_t", "hidden_jacobian_t", "jacobian_t", "choices"):
            if callable(getattr(cls, name, None)):
                setattr(cls, name, _of_batch(getattr(cls, name)))
        record(cls)
        return cls

    return within


def _of_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take what a lone forward saved in the place of what a batch of one did."""

    @functools.wraps(method)
    def of_batch(self: Any, saved: Any, *rest: Any, **options: Any) -> Any:
        return method(self, saved.batch if isinstance(saved, LoneSaved) else saved, *rest, **options)

    return of_batch


def _with(value: Any, axis: int) -> Any:
    """Return an array, or each of some, with a batch of one on that axis."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_with(each, axis) for each in value)
    return backend.namespace(value).expand_dims(value, min(axis, value.ndim))
