"""Losses, accuracies and metrics of a whole data set, and predictions: all in evaluation mode."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_number, shown
from sparsebp.core.errors import NonFiniteError, OptionError, ShapeError
from sparsebp.core.shortcuts import forward_of
from sparsebp.data.dataset import Dataset
from sparsebp.nn.loss import count_of, summed
from sparsebp.nn.modes import inference_mode
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.nn.steps import ValidSteps, output_steps, seen_by_loss
from sparsebp.runtime.actions import Batch, options_of
from sparsebp.runtime.forward import ForwardPipeline
from sparsebp.train.batches import batch_of, in_order, origin_of, shape_of, with_state
from sparsebp.train.history import Evaluation
from sparsebp.train.loader import Loader
from sparsebp.train.nonfinite import CLEAN, Origin, cause, nonfinite, uncounted_error
from sparsebp.train.state import Metric, TrainingState, evaluation


class Scores(NamedTuple):
    """The sum of a batch's losses and what their mean divides by, how many positions are right, of how many; arrays."""

    total: float
    counted: float
    right: float
    positions: float
    arrays: tuple[np.ndarray, np.ndarray] | None  # for the trainer's metrics, and where nothing counts


def evaluation_batches(data: Dataset | Loader, batch_size: Any, stateful: Any) -> dict[str, Any]:
    """Return how batches of a set to evaluate are made."""
    if batch_size is None and not stateful and not isinstance(data, Loader):
        batch_size = 100
    return shape_of(data, batch_size=batch_size, drop_last=False, shuffle=None, stateful=stateful)


def scores_of(
    run: TrainingState, data: Dataset | Loader, shape: dict[str, Any], name: str, first: int = 0, each: int = 1,
    pipeline: ForwardPipeline | None = None,
) -> list[Scores]:  # fmt: skip
    """Return the numbers of the batches `first`, `first + each`, …, which the last rank of a pipeline has.

    `name` is the set's in messages.
    """
    ignored, sums = getattr(run.loss, "ignore_index", None), summed(run.loss)
    found = []
    for rows, batch, output in _outputs(run.model, data, shape, first, each, pipeline):
        if output is None:
            continue
        lengths = batch[2] if len(batch) > 2 else None
        prediction, target, _ = seen_by_loss(run.model, run.loss, batch[0], output, batch[1], lengths)
        counted, value = count_of(run.loss, target), float((sums or run.loss).forward(prediction, target)[0])
        total = value if sums is not None else value * counted if counted else 0.0
        if not math.isfinite(total):
            _check_data(run.model, batch, origin_of(data, rows, run.model, name), prediction, total)
        right, positions = count_right(prediction, target, ignored) or (0, 0)
        arrays = None
        if run.metrics or counted == 0:
            arrays = backend.to_host(prediction).copy(), backend.to_host(target)
        found.append(Scores(total, counted, float(right), float(positions), arrays))
    return found


def _check_data(model: Any, batch: Batch, origin: Origin, prediction: Array, value: float) -> None:
    """Raise an error if the data are why a loss is not finite, and warn if the model is."""
    found = origin.of(batch)
    if found:
        raise NonFiniteError(f"The loss over {origin.name} is not finite", expected="finite inputs and targets",
                             got=f"{value}; {found}", remedy=CLEAN)  # fmt: skip
    warnings.warn(f"The loss over {origin.name} is {value}: {cause(model, batch, prediction)}", RuntimeWarning,
                  stacklevel=2)  # fmt: skip


def whole_set(run: TrainingState, scores: Sequence[Scores]) -> Evaluation:
    """Return the numbers of a set from those of its batches."""
    counted, positions = (math.fsum(getattr(one, name) for one in scores) for name in ("counted", "positions"))
    if counted == 0:
        targets = [one.arrays[1] for one in scores if one.arrays] or [np.empty(0, np.int64)]
        raise uncounted_error(run.loss, targets, "over the whole set", "Pass a set of samples that count")
    loss = sum(one.total for one in scores) / counted
    right = sum(one.right for one in scores)
    metrics: dict[str, float] = {}
    if run.metrics:
        parts = list(zip(*(one.arrays for one in scores if one.arrays), strict=True))
        for name, metric in run.metrics.items():  # each gets arrays that it may write into
            metrics[name] = measured(name, metric, *map(joined, parts))
    return Evaluation(loss, right / positions if positions else None, metrics)


def predictions(
    model: Any, data: Dataset | Loader, shape: dict[str, Any], pipeline: ForwardPipeline | None = None
) -> Array | None:
    """Return the model's outputs for all samples of `data`, on the last rank of a pipeline; warn where not finite."""
    parts, wrong = [], ""
    for rows, batch, output in _outputs(model, data, shape, pipeline=pipeline):
        if output is None:
            continue
        if output.ndim == 0 or len(output) != len(rows):
            raise ShapeError("The model must return one row per sample", expected=f"({len(rows)}, ...)",
                             got=output.shape, remedy="Put the samples first")  # fmt: skip
        prediction = _without_padding(model, batch, output)
        wrong = wrong or _unpredicted(model, batch, origin_of(data, rows, model, "x"), prediction)
        xp = backend.namespace(getattr(data, "inputs", prediction))
        parts.append(backend.as_namespace(prediction, xp).copy())  # a layer may use its array again
    if wrong:
        warnings.warn(f"Predictions are not finite: {wrong}", RuntimeWarning, stacklevel=3)
    return joined(parts) if parts else None


def _without_padding(model: Any, batch: Batch, output: Array) -> Array:
    """Return an output with 0 past the end of each sample, if it has steps."""
    if len(batch) < 3 or batch[2] is None or not (kept := output_steps(model)).kept:
        return output
    steps = ValidSteps.of(model, kept, batch[0], output, batch[2])
    return steps.spread(steps.rows("The model's output", output))  # type: ignore[union-attr]


def _unpredicted(model: Any, batch: Batch, origin: Origin, prediction: Array) -> str:
    """Say why a prediction is not finite, if it is not; an infinity of finite inputs may be meant."""
    if not nonfinite({"prediction": prediction}):
        return ""
    unknown = bool(backend.namespace(prediction).isnan(prediction).any())  # synchronize!
    return origin.of(batch) or (cause(model, batch, prediction) if unknown else "")


def _outputs(
    model: Any, data: Dataset | Loader, shape: dict[str, Any], first: int = 0, each: int = 1,
    pipeline: ForwardPipeline | None = None,
) -> Iterator[tuple[np.ndarray, Batch, Array | None]]:  # fmt: skip
    """Yield the rows of the batches `first`, `first + each`, …, the batches, and outputs in evaluation mode."""
    if pipeline is not None and shape["stateful"]:
        raise OptionError("States are carried on one rank", expected="stateful=False", got="stages on several ranks")
    carried = CarriedState(model) if shape["stateful"] else None
    with evaluation(model):
        for source, indices in in_order(data, shape["batch_size"], first, each):
            batch = with_state(batch_of(source, indices, model), carried)
            if pipeline is not None:
                yield indices, batch, pipeline.run(batch)
                continue
            with inference_mode(), carried or contextlib.nullcontext():
                prediction, _ = forward_of(model, batch[0], **options_of(batch))
            yield indices, batch, prediction


def count_right(prediction: Array, target: Array, ignored: int | None) -> tuple[Array, Any] | None:
    """Return how many positions have the largest entry at the target, and of how many; None if there are no classes."""
    # Classes are on axis 1, as losses have them, or last if only that fits. A single number does not choose a class.
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


def joined(parts: Sequence[Array]) -> Array:
    """Return the arrays of all batches as one."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ShapeError("Batches have different shapes, and cannot be joined", expected="one shape for every sample",
                         got=", ".join(map(str, sorted(shapes))), remedy="Pad all to one length")  # fmt: skip
    return backend.namespace(*parts).concatenate(parts)


# Further numbers of a whole set.


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
