"""The same training twice: with a scan for the backward, and with plain back-propagation (BPPSA Fig. 6)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from sparsebp.core.errors import ShapeError
from sparsebp.train.history import History

EARLY = 100
"""Steps over which rounding has not grown yet in a training that amplifies it."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs that differ in their backward algorithm alone.

    Attributes
    ----------
    backward, reference
        The two algorithms.
    steps
        Steps of each run.
    max_loss_difference
        Largest absolute difference of the two losses at the same step; `step_of_max` is that step, from 0.
    early_loss_difference
        The same over the first `EARLY` steps. Training can be chaotic: where it is, the last bit of one weight grows
        into a different curve within some hundred steps, whatever the algorithm, and the early difference is the one
        that tells a wrong gradient from rounding.
    final_losses
        The losses of the last step: (backward, reference).
    seconds
        Median wall-clock time of a training step: (backward, reference). The median leaves out the first steps'
        compilation.
    """

    backward: str
    reference: str
    steps: int
    max_loss_difference: float
    step_of_max: int
    early_loss_difference: float
    final_losses: tuple[float, float]
    seconds: tuple[float, float]

    @property
    def time_ratio(self) -> float:
        """Time of a reference step over that of a step with `backward`: above 1, `backward` is faster."""
        return self.seconds[1] / self.seconds[0]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as a dict that JSON can hold."""
        return dataclasses.asdict(self) | {"time_ratio": self.time_ratio}

    def describe(self) -> str:
        """Return the comparison as text."""
        return (
            f"{self.backward} against {self.reference}, {self.steps} steps from the same seed: "
            f"largest difference of losses {self.max_loss_difference:.3g} (step {self.step_of_max}; "
            f"{self.early_loss_difference:.3g} over the first {min(EARLY, self.steps)} steps), "
            f"step time {self.seconds[0] * 1e3:.2f} ms against {self.seconds[1] * 1e3:.2f} ms "
            f"(ratio {self.time_ratio:.2f})"
        )


def compare_backward(train: Callable[[str], History], backward: str, reference: str = "bp") -> Comparison:
    """Train with `backward` and with `reference`, and compare the losses step by step.

    Parameters
    ----------
    train
        ``train(algorithm)`` builds everything anew from the same seed, trains, and returns the history.
    backward, reference
        Algorithms of the recurrent layers' backward.

    Raises
    ------
    ShapeError
        The two runs took different numbers of steps, or none.
    """
    return compare_histories(train(backward), train(reference), backward, reference)


def compare_histories(first: History, second: History, backward: str, reference: str) -> Comparison:
    """Compare two runs that are done; see `compare_backward`."""
    if first.steps != second.steps or first.steps == 0:
        raise ShapeError(
            "The two runs cannot be compared step by step",
            expected="the same number of steps, at least 1",
            got=f"{first.steps} and {second.steps}",
            remedy="Train both with the same data, batch size and epochs",
        )
    difference = np.abs(np.asarray(first.loss) - np.asarray(second.loss))
    return Comparison(
        backward=backward,
        reference=reference,
        steps=first.steps,
        max_loss_difference=float(difference.max()),
        step_of_max=int(difference.argmax()),
        early_loss_difference=float(difference[:EARLY].max()),
        final_losses=(first.loss[-1], second.loss[-1]),
        seconds=(float(np.median(first.seconds)), float(np.median(second.seconds))),
    )
