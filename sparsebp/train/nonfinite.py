"""Where a value that is not finite came from: the data set's sample, the step, the parameter or the layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.absent import held
from sparsebp.core.check import Array
from sparsebp.core.errors import NonFiniteError
from sparsebp.runtime.actions import Batch, options_of


def nonfinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names of the arrays, of those that are on this rank, that hold a NaN or an infinity."""
    return [name for name, array in held(arrays).items() if not bool(backend.namespace(array).isfinite(array).all())]


@dataclass(frozen=True)
class Origin:
    """Where a batch comes from: its samples' numbers in a data set, and the axis of the samples in its input."""

    rows: np.ndarray
    axis: int = 0
    name: str = "the data set"

    def of(self, batch: Batch) -> str | None:
        """Say where a batch's input or target is not finite; None if both are finite."""
        return self._first("input", batch[0], self.axis) or self._first("target", batch[1], 0)

    def _first(self, what: str, array: Array, axis: int) -> str | None:
        if array.dtype.kind != "f" or not nonfinite({what: array}):
            return None
        values = np.moveaxis(backend.to_host(array), axis, 0)
        bad = np.argwhere(~np.isfinite(values))
        (sample, *place), count = bad[0].tolist(), len(np.unique(bad[:, 0]))
        kind = "NaN" if np.isnan(values[tuple(bad[0])]) else "infinity"
        at = f", column {place[0]}" if len(place) == 1 else f", at {tuple(place)}" if place else ""
        known = len(self.rows) == len(values)
        row = f"row {self.rows[sample]} of {self.name}" if known else f"sample {sample} of the batch"
        more = "" if count == 1 else f", and in {count - 1} more {'row' if count == 2 else 'rows'} of the batch"
        return f"{kind} in the batch's {what}: {row}{at}{more}"


CLEAN = "Leave such rows out, or fill in the missing values (impute them)"


def uncounted_error(loss: Any, targets: Sequence[Array], where: str, remedy: str) -> NonFiniteError:
    """Return the error for targets none of which counts: the mean of their losses would be 0 / 0."""
    ignored, size = getattr(loss, "ignore_index", None), sum(target.size for target in targets)
    labels = np.unique(np.concatenate([backend.to_host(target).reshape(-1) for target in targets]))
    classes = [] if labels.dtype.kind == "f" else [int(label) for label in labels if label != ignored]
    got = f"{type(loss).__name__}.count returns 0"
    if not classes and ignored is not None:
        got = f"ignore_index={ignored} at all {size} positions"
    elif getattr(loss, "_weight", None) is not None:
        shown = ", ".join(map(str, classes[:8])) + (", …" if len(classes) > 8 else "")
        got = f"class weights that sum to 0: only the classes {shown} occur"
        remedy = f"Give these classes a weight above 0. {remedy}"
    return NonFiniteError(f"Nothing counts in the loss {where}", expected="a position that counts", got=got,
                          remedy=remedy)  # fmt: skip


def loss_error(
    step: int, epoch: int, value: float, model: Any, batch: Batch, prediction: Array | None, origin: Origin,
    last_good: str,
) -> NonFiniteError:  # fmt: skip
    """Return the error for a loss that is not finite, naming the first place where finiteness is lost.

    Without `prediction`, parameters have been updated since.
    """
    data = origin.of(batch)
    found = data or cause(model, batch, prediction)
    remedy = CLEAN if data else "Lower the learning rate, clip the gradient's norm, or use float64"
    return NonFiniteError(f"The loss is not finite at step {step + 1} (epoch {epoch + 1})", expected="a finite loss",
                          got=f"{value}; {found}", remedy=f"{remedy}. {last_good}")  # fmt: skip


def cause(model: Any, batch: Batch, prediction: Array | None) -> str:
    """Say where finiteness is lost in the loss of a batch that is finite."""
    # In the order of the computation: parameters, the model's layers, the loss itself.
    names = nonfinite(model.parameters())
    if names and prediction is not None:
        return f"NaN or infinity in the parameters {', '.join(names)}"
    if prediction is not None and nonfinite({"prediction": prediction}):
        return f"NaN or infinity in the output of {_first_layer(model, batch)}, with finite parameters"
    if prediction is None:
        since = f"; since then it has come to the parameters {', '.join(names)}" if names else ""
        return f"the batch is finite, so that the model or the loss overflows{since}"
    return f"the model's output is finite, the loss overflows (largest output {float(abs(prediction).max()):g})"


def _first_layer(model: Any, batch: Batch) -> str:
    """Run the batch again and return the name of the innermost layer whose output is the first not to be finite."""
    if not hasattr(model, "modules") or len(held(model.parameters())) < len(model.parameters()):
        return "the model"
    names: list[str] = []
    watched: list[Any] = []
    for name, layer in model.modules():
        if any(layer is other for other in watched):
            continue  # a shared layer has its first name
        watched.append(layer)
        layer.forward = _watch(layer.forward, name or "the model", names)
    try:
        model.forward(batch[0], **options_of(batch))
    finally:
        for layer in watched:
            del layer.forward  # the instance attribute goes, the class's method is seen again
    return names[0] if names else "the model"


def _watch(forward: Any, name: str, names: list[str]) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        y, saved = forward(*args, **options)
        if nonfinite({name: y}):
            names.append(name)
        return y, saved

    return watched
