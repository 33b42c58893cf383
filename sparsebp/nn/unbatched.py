"""Unbatched sequences and samples, as torch.nn's recurrent layers and cells take them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.shortcuts import defines, record
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.layer import Layer

L = TypeVar("L", bound=type[Layer])


class UnbatchedSaved(NamedTuple):
    """Saved by the forward of an unbatched input: the value of a batch of one.

    It has the batch's `backward_choice`, and its last states, `h_n` and `c_n` of a layer and `c` of a cell, without the
    batch axis.
    """

    batch: Any
    axis: int  # of the batch in these: in a cell's c it is behind the one step

    def __getattr__(self, name: str) -> Any:
        if name == "backward_choice":
            return self.batch.backward_choice
        if name in ("h_n", "c_n", "c"):
            return getattr(self.batch, name).squeeze(self.axis)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[Array]:
        """Yield the last states, as the batch's value does."""
        return (array.squeeze(self.axis) for array in self.batch)


class UnbatchedGradients(Gradients):
    """`Gradients` of an unbatched input, from a batch of one: also with respect to the states that the batch's have."""

    __slots__ = ("_axis", "_batch")

    def __init__(self, layer: Layer, gy: Any, saved: UnbatchedSaved, batch: Any, x_axis: int, axis: int) -> None:
        super().__init__(layer, gy, saved, lambda: batch.input_grad().squeeze(x_axis), batch.weight_grad)
        self._batch, self._axis = batch, axis

    def __getattr__(self, name: str) -> Array:
        if name not in ("h0", "c0", "hidden", "cell"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self._once(name, lambda: getattr(self._batch, name).squeeze(self._axis))


def takes_unbatched(sample_axes: int, state_axis: int) -> Callable[[L], L]:
    """Let a recurrent layer or cell take unbatched inputs and states."""
    # sample_axes: axes of an unbatched x: 2 for a layer, (T, features), 1 for a cell.
    # state_axis: the batch axis of the states: 1 for a layer, 0 for a cell.

    def within(cls: L) -> L:
        forward, gradients = cls.forward, cls.gradients

        @functools.wraps(forward)
        def unbatched_forward(self: Any, x: Array, *state: Any, **options: Any) -> tuple[Array, Any]:
            xp, axis = backend.namespace(x=x), self.batch_axes[0]
            if x.ndim != sample_axes:
                return forward(self, x, *state, **options)
            named = {key: value if key == "lengths" else _with(value, state_axis) for key, value in options.items()}
            first = [_with(value, state_axis) for value in state[:1]]
            y, saved = forward(self, xp.expand_dims(x, axis), *first, *state[1:], **named)
            return y.squeeze(axis), UnbatchedSaved(saved, state_axis if sample_axes > 1 else 1)

        @functools.wraps(gradients)
        def unbatched_gradients(self: Any, gy: Any, saved: Any, *last: Any, **named: Any) -> Gradients:
            if not isinstance(saved, UnbatchedSaved):
                return gradients(self, gy, saved, *last, **named)
            axis = self.batch_axes[0]
            found = gradients(
                self, _with(gy, axis), saved.batch, *(_with(array, state_axis) for array in last),
                **{key: _with(array, state_axis) for key, array in named.items()},
            )  # fmt: skip
            return UnbatchedGradients(self, gy, saved, found, axis, state_axis)

        def unbatched(self: Any, saved: Any) -> bool:
            """Whether the forward had an unbatched sequence."""
            return isinstance(saved, UnbatchedSaved)

        found: Any = cls
        found.forward, found.gradients = unbatched_forward, unbatched_gradients
        found.unbatched, found.sample_axes, found.state_axis = unbatched, sample_axes, state_axis
        # the same for these
        for name in ("forward_time_major", "stream", "gradients_at_last", "replayable", "capture_obstacle"):
            if hasattr(cls, name):
                setattr(cls, name, getattr(cls, name))
        for name in ("hidden_jacobians_t", "hidden_jacobian_t", "jacobian_t", "choices"):
            if defines(cls, name):
                setattr(cls, name, _of_batch(getattr(cls, name)))
        record(cls)
        return cls

    return within


def _of_batch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a method take the saved value of an unbatched forward."""

    @functools.wraps(method)
    def of_batch(self: Any, saved: Any, *rest: Any, **options: Any) -> Any:
        return method(self, saved.batch if isinstance(saved, UnbatchedSaved) else saved, *rest, **options)

    return of_batch


def _with(value: Any, axis: int) -> Any:
    """Add a batch axis of length 1 to an array, or to each of several."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return type(value)(_with(each, axis) for each in value)
    return backend.namespace(value).expand_dims(value, min(axis, value.ndim))
