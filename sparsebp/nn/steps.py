"""A loss at every step of sequences: it sees the valid steps as rows, one sample's after the other's, and no padding.

So nothing of the padding counts, in any loss: neither in its mean nor in its count, gradient or accuracy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.nn.loss import ClassLoss
from sparsebp.nn.recurrent.lengths import parse_lengths
from sparsebp.nn.sequential import is_group, taking_lengths


class OutputSteps(NamedTuple):
    """What is known of a model's output."""

    kept: bool | None  # Whether it has the steps of the input; None if a layer does not say
    batch_axes: tuple[int, int]  # Where the samples are in an input and an output that have steps


def output_steps(model: Any) -> OutputSteps:
    """Return whether a model's output has steps, and where."""
    links = _links(model.stages() if hasattr(model, "stages") else [("", model)])
    first = links[0][1]
    if len(links) == 1:
        joins = False if getattr(first, "stepwise", False) else _joins_steps(first)
        return OutputSteps(None if joins is None else not joins, getattr(first, "batch_axes", (0, 0)))
    try:
        taking, joins = taking_lengths(links)
    except OptionError:  # a layer takes no lengths
        return OutputSteps(None, (0, 0))
    layers = [links[number][1] for number in taking]  # the others take their axes as they come
    said = all(_joins_steps(layer) is not None for layer in layers)
    axes = [getattr(layer, "batch_axes", (0, 0)) for layer in layers] or [(0, 0)]
    return OutputSteps(False if joins else True if said else None, (axes[0][0], axes[-1][1]))


def _joins_steps(layer: Any) -> bool | None:
    try:
        joins: bool | None = getattr(layer, "joins_steps", None)
    except OptionError:  # a branch of it takes no lengths
        return None
    return joins


def _links(stages: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the layers of a chain, those inside of groups one by one."""
    inner = [_links(layer._named(name)) if is_group(layer) else [(name, layer)] for name, layer in stages]
    return [link for links in inner for link in links]


@dataclass(frozen=True)
class ValidSteps:
    """The steps of a batch that a loss sees."""

    shape: tuple[int, int]  # of the batch's steps: (N, T), or (T, N) of a time-major model
    places: np.ndarray | None  # of the valid ones among all of them; None: all

    @classmethod
    def of(cls, model: Any, output: OutputSteps, x: Array, target: Array, lengths: Any) -> ValidSteps | None:
        """Return the valid steps of padded sequences; None if the model's output has none."""
        if output.kept is False:
            return None
        given, returned = output.batch_axes
        shape = (x.shape[given], x.shape[1 - given])
        shape = shape if returned == 0 else shape[::-1]
        if output.kept is None:
            if target.shape[:2] == shape:
                raise OptionError(f"{type(model).__name__} does not say whether its output has steps, as the target",
                                  expected="joins_steps = False in the class, for padded steps not to count, or True",
                                  got="neither")  # fmt: skip
            return None
        if target.shape[:2] != shape:
            raise ShapeError("The model's output has steps, which the target does not have", got=target.shape,
                             expected=f"({shape[0]}, {shape[1]}, …)",
                             remedy="Pass a target for every step, or join the steps (MeanOverSteps)")  # fmt: skip
        valid = parse_lengths(lengths, shape[1 - returned], shape[returned], np)
        if valid is None:
            return cls(shape, None)
        before_end = valid.valid[:, :, 0]
        return cls(shape, np.flatnonzero(before_end if returned else before_end.T))

    def rows(self, name: str, array: Array) -> Array:
        """Return the valid steps (M, …) of an array that has all of them on its first two axes."""
        if array.shape[:2] != self.shape:
            raise ShapeError(f"{name} does not have the steps of the batch", got=array.shape,
                             expected=f"({self.shape[0]}, {self.shape[1]}, …)")  # fmt: skip
        flat = array.reshape(-1, *array.shape[2:])
        return flat if self.places is None else flat[backend.namespace(array).asarray(self.places)]

    def spread(self, rows: Array) -> Array:
        """Return an array with all steps, whose valid ones are `rows`, the others 0."""
        xp = backend.namespace(rows)
        if self.places is None:
            return rows.reshape(*self.shape, *rows.shape[1:])
        whole = xp.zeros((self.shape[0] * self.shape[1], *rows.shape[1:]), rows.dtype)
        whole[xp.asarray(self.places)] = rows
        return whole.reshape(*self.shape, *rows.shape[1:])


def class_steps(loss: Any, model: Any, prediction: Array, target: Array) -> ValidSteps | None:
    """Return all steps if a prediction (N, T, C) has its classes last, where `ClassLoss` wants them on axis 1."""
    if prediction.ndim != 3 or not isinstance(loss, ClassLoss):
        return None
    steps = prediction.shape[:2]
    if target.dtype.kind == "f":  # probabilities
        last, first = target.shape == prediction.shape, True
    else:
        last, first = target.shape == steps, steps[1] == prediction.shape[2]
    return ValidSteps(steps, None) if last and not (first and not _features_last(model)) else None


def _features_last(model: Any) -> bool:
    """Whether the last layer with parameters has its features on the last axis, and none behind it moves them."""
    for _, layer in reversed(_links(model.stages() if hasattr(model, "stages") else [("", model)])):
        if not getattr(layer, "stepwise", False) and _joins_steps(layer) is not False:
            return False
        if layer.parameters():
            return True
    return False


def seen_by_loss(
    model: Any, loss: Any, x: Array, prediction: Array, target: Array, lengths: Any = None
) -> tuple[Array, Array, ValidSteps | None]:
    """Return prediction and target as a loss is to see them, and if these are rows of steps, which."""
    if lengths is None:
        valid = class_steps(loss, model, prediction, target)
    else:
        valid = ValidSteps.of(model, output_steps(model), x, target, lengths)
    if valid is None:
        return prediction, target, None
    return valid.rows("prediction", prediction), valid.rows("target", target), valid
