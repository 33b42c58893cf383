"""Finding what is not finite, and saying where: the step, and the parameter or layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend
from sparsebp.core.errors import NonFiniteError
from sparsebp.core.types import Array


def nonfinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names of the arrays that hold a NaN or an infinity."""
    found = []
    for name, array in arrays.items():
        xp = backend.namespace(array)
        if not bool(xp.isfinite(array).all()):  # synchronize!
            found.append(name)
    return found


def gradient_error(step: int, epoch: int, grads: Mapping[str, Array], last_good: str) -> NonFiniteError:
    """Return the exception for a gradient that is not finite."""
    names = nonfinite(grads)
    return NonFiniteError(
        f"The gradient is not finite at step {step} (epoch {epoch + 1})",
        expected="finite gradients",
        got=f"NaN or infinity in {', '.join(names)}",
        remedy=f"Lower the learning rate, clip the gradient's norm, or use float64. {last_good}",
    )


def check_counted(loss: Any, target: Array, step: int, epoch: int, last_good: str) -> None:
    """Refuse a batch, micro-batch or rank's share whose mean loss is NaN because it is one of nothing.

    Raises
    ------
    NonFiniteError
        The loss ignores all of `target`.
    """
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None or target.dtype.kind not in "iu" or not bool((target == ignored).all()):  # synchronize!
        return
    raise NonFiniteError(
        f"The loss ignores a whole batch, micro-batch or rank's share at step {step} (epoch {epoch + 1})",
        expected="a position that counts", got=f"ignore_index={ignored} at all {target.size} positions",
        remedy="Leave such samples out, or use larger batches, fewer micro-batches (accumulate=) or fewer ranks. "
        f"{last_good}",
    )  # fmt: skip


def parameter_error(step: int, epoch: int, names: list[str], last_good: str) -> NonFiniteError:
    """Return the exception for parameters that are not finite, before step 0 or after an update."""
    when = "before training" if step == 0 else f"after step {step - 1} (epoch {epoch + 1})"
    return NonFiniteError(
        f"Parameters are not finite {when}",
        expected="finite parameters",
        got=f"NaN or infinity in {', '.join(names)}",
        remedy=f"Initialise or load the model again, or lower the learning rate. {last_good}",
    )


def loss_error(
    step: int, epoch: int, value: float, model: Any, x: Array, target: Array, prediction: Array | None, last_good: str
) -> NonFiniteError:
    """Return the exception for a loss that is not finite, naming the first place where finiteness is lost.

    The order of the search is that of the computation: parameters, the batch, the model's layers, the loss itself. No
    `prediction` means that parameters have been updated since: what they were is not known any more.
    """
    return NonFiniteError(
        f"The loss is not finite at step {step} (epoch {epoch + 1})",
        expected="a finite loss",
        got=f"{value}; {_where(model, x, target, prediction)}",
        remedy=f"Lower the learning rate, clip the gradient's norm, or use float64. {last_good}",
    )


def _where(model: Any, x: Array, target: Array, prediction: Array | None) -> str:
    if prediction is None:
        return _where_by_now(model, x, target)
    names = nonfinite(model.parameters())
    if names:
        return f"NaN or infinity in the parameters {', '.join(names)}"
    if nonfinite({"x": x}):
        return "NaN or infinity in the batch's input"
    if nonfinite({"prediction": prediction}):
        return f"NaN or infinity in the output of {_first_layer(model, x)}, with finite parameters"
    if target.dtype.kind == "f" and nonfinite({"target": target}):
        return "NaN or infinity in the batch's target"
    return f"the model's output is finite, the loss overflows (largest output {float(abs(prediction).max()):g})"


def _where_by_now(model: Any, x: Array, target: Array) -> str:
    if nonfinite({"x": x}):
        return "NaN or infinity in the batch's input"
    if target.dtype.kind == "f" and nonfinite({"target": target}):
        return "NaN or infinity in the batch's target"
    names = nonfinite(model.parameters())
    since = f"; since then it has come to the parameters {', '.join(names)}" if names else ""
    return f"the batch is finite, so that the model or the loss overflows{since}"


def _first_layer(model: Any, x: Array) -> str:
    """Return the name of the innermost layer whose output is the first that is not finite, in the order of a forward.

    Layers are watched while the batch runs once more, in whatever way the model calls them.
    """
    if not hasattr(model, "modules"):
        return "the model"
    found: list[str] = []
    watched: list[Any] = []
    for name, layer in model.modules():
        if any(layer is other for other in watched):
            continue  # a shared layer has its first name
        watched.append(layer)
        layer.forward = _watch(layer.forward, name or "the model", found)
    try:
        model.forward(x)
    finally:
        for layer in watched:
            del layer.forward  # the instance attribute goes, the class's method is seen again
    return found[0] if found else "the model"


def _watch(forward: Any, name: str, found: list[str]) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        y, saved = forward(*args, **options)
        if nonfinite({name: y}):
            found.append(name)
        return y, saved

    return watched
