"""Scans beside plain back-propagation: the gradients of a batch, and the losses of a training (BPPSA Fig. 6)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array, Backward
from sparsebp.nn import value_and_grad
from sparsebp.recipes.config import TrainConfig
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
        Median wall-clock time of a training step: (backward, reference). The first step, which compiles, does not
        count where there are others.
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


def _step_time(history: History) -> float:
    return float(np.median(history.seconds[1:] or history.seconds))


def compare_histories(first: History, second: History, backward: str, reference: str) -> Comparison:
    """Compare the losses of two runs from the same seed, step by step.

    Parameters
    ----------
    first, second
        What the runs' `fit` returned.
    backward, reference
        The algorithms of their backward passes.

    Raises
    ------
    ShapeError
        The two runs took different numbers of steps, or none.
    """
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
        seconds=(_step_time(first), _step_time(second)),
    )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One algorithm against plain back-propagation.

    Attributes
    ----------
    algorithm
        The scan's.
    relative_difference
        ``‖g - g_sequential‖ / ‖g_sequential‖`` over all weight gradients together.
    largest_difference
        Largest absolute difference of an entry; `parameter` holds it.
    """

    algorithm: str
    relative_difference: float
    largest_difference: float
    parameter: str

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)


def gradient_agreement(
    config: TrainConfig,
    model: Any,
    loss: Any,
    batch: tuple[Array, Array],
    algorithms: Sequence[Backward] = ("chunked", "blelloch"),
) -> list[Agreement]:
    """Compare the weight gradients of `algorithms` with plain back-propagation.

    Parameters
    ----------
    config
        Of the run that `model` belongs to.
    model
        A trained model; its weights are copied.
    loss
        As the trainer takes it.
    batch
        Input and target (B,) on the model's device. For a recurrent model ``blelloch``
        stores about 3·T·B·H² values.
    algorithms
        Algorithms to compare.
    """
    state = model.state_dict()
    reference = _gradients(config, state, "bp", loss, batch)
    norm = _norm(reference)
    results = []
    for algorithm in algorithms:
        grads = _gradients(config, state, algorithm, loss, batch)
        differences = {name: grads[name] - reference[name] for name in reference}
        largest = {name: float(abs(difference).max()) for name, difference in differences.items()}
        name = max(largest, key=lambda n: largest[n])
        results.append(Agreement(algorithm, _norm(differences) / norm if norm else 0.0, largest[name], name))
    return results


def _gradients(
    config: TrainConfig, state: Any, algorithm: Backward, loss: Any, batch: tuple[Array, Array]
) -> dict[str, Array]:
    model = dataclasses.replace(config, backward=algorithm).build_model()
    model.load_state_dict(state)
    model.eval()
    _, grads = value_and_grad(model, loss)(*batch)
    return {name: backend.to_host(grad).astype("float64") for name, grad in grads.items()}


def _norm(arrays: dict[str, Array]) -> float:
    return math.sqrt(sum(float((array**2).sum()) for array in arrays.values()))
