"""What one training step holds between its actions, and what is told of it.

Everything that one action leaves for others has a place of its own for each reader, who empties it: an array is freed
as soon as its last reader is done, in whichever order and on whichever thread they run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from sparsebp.core.types import Array
from sparsebp.optim.clip import total_norm

Batch: TypeAlias = tuple[Array, ...]
"""Input, target and, of sequences padded at the end, their lengths."""


@dataclass
class Later:
    """What a step leaves on the device for the host to read when it has given the next one to the device.

    Attributes
    ----------
    losses, scores
        The loss of every micro-batch and, where the `Watch` has one, its score, of shape ().
    sums
        Names of gradients, and the sums of their squares.
    """

    losses: dict[int, Array] = field(default_factory=dict)
    scores: dict[int, Array] = field(default_factory=dict)
    sums: list[tuple[list[str], Array]] = field(default_factory=list)

    def packed(self, xp: ModuleType) -> Array:
        """Return all of these numbers in one float64 array."""
        parts = [*self.losses.values(), *self.scores.values(), *(sums for _, sums in self.sums)]
        packed, at = xp.empty(sum(part.size for part in parts), np.float64), 0
        for part in parts:
            packed[at : at + part.size] = part
            at += part.size
        return packed

    def unpack(self, packed: np.ndarray, step: Step) -> None:
        """Write the numbers of `packed` to where `step` has them."""
        numbers = iter(packed.tolist())
        for m in self.losses:
            step.values[m] = next(numbers)
        for m in self.scores:
            step.scores[m] = next(numbers)
        for names, _ in self.sums:
            step.squares.update((name, next(numbers)) for name in names)


class Step:
    """The state of one training step: activations, gradients, the update, and what is reported of it.

    Attributes
    ----------
    batches
        Input and target of every micro-batch.
    tag
        The caller's, to know the step by.
    shares
        The share of the step's samples that each micro-batch has.
    options
        What forwards take beside the input of every micro-batch: lengths, or nothing.
    saved, shapes
        What the forward of each stage saved, and the shape of its input, until the gradient at its output is there.
    for_input, for_weights
        From then on the stage's `Gradients`, for I and for W.
    values, predictions
        Loss and output of every micro-batch. The output of a step that was replayed is not kept.
    scores
        What the `Watch` says of every micro-batch; None where it has said nothing yet.
    grads, own
        Gradients by the name of the parameter, until they are used; and which of them are sums that this step made, so
        that it may add to them in place.
    squares
        The sum of squares of each gradient that has been looked at.
    update
        The optimizer's update, from the last loss on.
    events, aborted
        What streams tell each other: what is done, and that nothing more is to be done.
    marks
        On a GPU, the device's events beside them.
    held
        On a GPU with two streams, arrays that a stream has been given work on: their memory must not be used again by
        the stream that they came from before the other is done with them.
    later
        On a GPU, what the host reads after the step; None: it reads as it goes.
    packed
        The numbers of `later` once they are there, where a graph writes them.
    resumed
        Whether what is left over is done apart from a further step; an interrupted one may have done part of it.
    """

    __slots__ = ("aborted", "batches", "events", "flow", "for_input", "for_weights", "grads", "held", "later", "marks",
                 "options", "own", "packed", "predictions", "resumed", "saved", "scores", "shapes", "shares", "squares",
                 "tag", "update", "values")  # fmt: skip

    def __init__(self, batches: Sequence[Batch], stages: int, tag: Any) -> None:
        count = len(batches)
        samples = [len(batch[1]) for batch in batches]
        self.batches, self.tag = batches, tag
        self.shares = [n / max(1, sum(samples)) for n in samples]
        self.flow: list[Any] = [batch[0] for batch in batches]
        self.options = [options_of(batch) for batch in batches]
        self.values = [math.nan] * count
        self.scores: list[float | None] = [None] * count
        self.predictions: list[Any] = [None] * count
        self.saved, self.shapes, self.for_input, self.for_weights = (_table(count, stages) for _ in range(4))
        self.grads: dict[str, Array] = {}
        self.own: set[str] = set()
        self.squares: dict[str, float] = {}
        self.update: Any = None
        self.events: list[bool] = []
        self.aborted = self.resumed = False
        self.marks: list[Any] = []
        self.held: list[Any] | None = None
        self.later: Later | None = None
        self.packed: Array = None

    @property
    def loss(self) -> float:
        """The mean loss over all samples of the step."""
        if len(self.values) == 1:
            return self.values[0]
        return sum(share * value for share, value in zip(self.shares, self.values, strict=True))

    def norm(self, names: Sequence[str]) -> float:
        """Return the Euclidean norm of all gradients, before clipping; `names` says the order of summation."""
        return total_norm(self.squares[name] for name in names)


class Watch:
    """Looks at what an executor computes, and raises where training must stop. This one raises nothing.

    On a GPU it is told when the next step has been given to the device, see `sparsebp.runtime.late`.
    """

    def score(self, prediction: Array, target: Array) -> Array | None:
        """Return one more number of a micro-batch as an array of shape (), without reading it; None for none.

        It is asked for on a GPU alone, within the step, and becomes the step's ``scores[m]``.
        """
        return None

    def loss(self, step: Step, m: int, value: float) -> None:
        """The loss of micro-batch `m` is there."""

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """The sum of squares of one of these gradients is not finite."""


def options_of(batch: Batch) -> dict[str, Any]:
    """Return what the model's forward takes beside the input of a batch."""
    return {"lengths": batch[2]} if len(batch) > 2 else {}


def _table(count: int, stages: int) -> list[list[Any]]:
    """Return a place for every micro-batch and stage."""
    return [[None] * stages for _ in range(count)]
