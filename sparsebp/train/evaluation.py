"""Losses, accuracies and metrics of a whole data set, and predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_number, shown
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data.dataset import Dataset
from sparsebp.train.batches import shape_of
from sparsebp.train.loader import Loader

# Numbers of a whole set besides its loss.

Metric: TypeAlias = Callable[[np.ndarray, np.ndarray], float]


def check_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics of a trainer by name."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise OptionError("metrics are not functions by name", expected="a dict of functions (prediction, target)",
                          got=shown(metrics))  # fmt: skip
    for name in metrics:
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "accuracy"):
            raise OptionError("A metric has a name that cannot be a field", expected="an identifier, not loss or "
                              "accuracy, which are measured anyway", got=repr(name))  # fmt: skip
    return dict(metrics)


def measured(name: str, metric: Metric, prediction: np.ndarray, target: np.ndarray) -> float:
    """Return a metric of a whole set."""
    value: Any = metric(prediction, target)
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        value = value.item()
    return value if isinstance(value, float) else check_number(f"The metric {name}", value, finite=False)


def joined(parts: Sequence[Array]) -> Array:
    """Return the arrays of all batches as one."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ShapeError("Batches have different shapes, and cannot be joined", expected="one shape for every sample",
                         got=", ".join(map(str, sorted(shapes))), remedy="Pad all to one length")  # fmt: skip
    return backend.namespace(*parts).concatenate(parts)


def evaluation_batches(data: Dataset | Loader, batch_size: Any, stateful: Any) -> dict[str, Any]:
    """Return how batches of a set to evaluate are made."""
    if batch_size is None and not stateful and not isinstance(data, Loader):
        batch_size = 100
    return shape_of(data, batch_size=batch_size, drop_last=False, shuffle=None, stateful=stateful)


class Scores(NamedTuple):
    """The sum of a batch's losses and what their mean divides by, how many positions are right, of how many; arrays."""

    total: float
    counted: float
    right: float
    positions: float
    arrays: tuple[np.ndarray, np.ndarray] | None  # for the trainer's metrics, and where nothing counts


def count_right(prediction: Array, target: Array, ignored: int | None) -> tuple[Array, Any] | None:
    """Return how many positions have the largest entry at the target, and of how many; None if there are no classes."""
    # Classes are on axis 1, as losses have them, or last if only that fits. One number is no choice of a class.
    if target.dtype.kind not in "iu":
        return None
    xp, shape = backend.namespace(prediction), prediction.shape
    for axis, places in ((1, (*shape[:1], *shape[2:])), (-1, shape[:-1])):
        if prediction.ndim == target.ndim + 1 and target.shape == places and prediction.shape[axis] > 1:
            right = prediction.argmax(axis=axis) == target
            if ignored is None:
                return xp.count_nonzero(right), target.size
            counts = target != ignored
            return xp.count_nonzero(right & counts), xp.count_nonzero(counts)
    return None
