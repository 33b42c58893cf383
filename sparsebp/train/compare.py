"""Compares two backward algorithms: the losses of two runs, or the gradients of one batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.check import Array, Backward
from sparsebp.core.errors import ShapeError
from sparsebp.train.config import TrainConfig
from sparsebp.train.history import History

EARLY = 100
"""Steps over which rounding stays small even in a chaotic training."""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs that differ in their backward algorithm alone."""

    backward: str
    reference: str
    steps: int  # of each run
    max_loss_difference: float  # absolute, at the same step
    step_of_max: int  # from 1
    # Over the first `EARLY` steps. In a chaotic training, the last bit of one weight grows into another curve within
    # some hundred steps; only the early difference tells a wrong gradient from rounding.
    early_loss_difference: float
    final_losses: tuple[float, float]  # (backward, reference)
    seconds: tuple[float, float]  # median of a step, without the first, which compiles: (backward, reference)

    @property
    def time_ratio(self) -> float:
        """Time of a reference step over a step with `backward`."""
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
    """Compare the losses of two runs from the same seed, step by step, given their histories and algorithms.

    Raises
    ------
    ShapeError
        The runs took different numbers of steps, or none.
    """
    if first.steps != second.steps or first.steps == 0:
        raise ShapeError("The two runs cannot be compared step by step",
                         expected="the same number of steps, at least 1", got=f"{first.steps} and {second.steps}",
                         remedy="Train both with the same data, batch size and epochs")  # fmt: skip
    difference = np.abs(np.asarray(first.loss) - np.asarray(second.loss))
    return Comparison(
        backward, reference, first.steps, float(difference.max()), int(difference.argmax()) + 1,
        float(difference[:EARLY].max()), (first.loss[-1], second.loss[-1]), (_step_time(first), _step_time(second)),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Agreement:
    """One algorithm against plain back-propagation."""

    algorithm: str
    relative_difference: float  # ‖g - g_sequential‖ / ‖g_sequential‖ over all weight gradients together
    largest_difference: float  # absolute, of an entry
    parameter: str  # where that entry is

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)


COMPARED: tuple[Backward, ...] = ("chunked", "blelloch")
"""The scans whose gradients are compared."""


def gradient_agreement(
    config: TrainConfig, model: Any, loss: Any, batch: tuple[Array, Array], algorithms: Sequence[Backward] = COMPARED
) -> list[Agreement]:
    """Compare the weight gradients of `algorithms` with plain back-propagation, on a batch on the model's device.

    For a recurrent model, ``"blelloch"`` stores about 3·T·B·H² values.
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
    _, grads = nn.value_and_grad(model, loss)(*batch)
    return {name: backend.to_host(grad).astype("float64") for name, grad in grads.items()}


def _norm(arrays: dict[str, Array]) -> float:
    return math.sqrt(sum(float((array**2).sum()) for array in arrays.values()))
