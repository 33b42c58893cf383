"""How far the gradients of the scans lie from those of plain back-propagation, on a real batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from sparsebp import backend
from sparsebp.core.types import Array, Backward
from sparsebp.recipes.config import TrainConfig


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


def backward_choice(model: Any, x: Array) -> Any:
    """Return what the model's recurrent layers choose for a batch x (T, B, I), with ``algorithm`` and ``reason``."""
    _, saved = model.forward(x)
    return getattr(saved, "rnn", saved).backward_choice


def _gradients(
    config: TrainConfig, state: Any, algorithm: Backward, loss: Any, batch: tuple[Array, Array]
) -> dict[str, Array]:
    model = dataclasses.replace(config, backward=algorithm).build_model()
    model.load_state_dict(state)
    model.eval()
    prediction, saved = model.forward(batch[0])
    _, loss_saved = loss.forward(prediction, batch[1])
    grads = model.weight_grad(loss.input_grad(loss_saved), saved)
    return {name: backend.to_host(grad).astype("float64") for name, grad in grads.items()}


def _norm(arrays: dict[str, Array]) -> float:
    return math.sqrt(sum(float((array**2).sum()) for array in arrays.values()))
