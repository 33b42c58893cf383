"""`value_and_grad`: a loss and its gradients with respect to a model's parameters, or to some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparsebp.core import masks as masking
from sparsebp.core.check import Array, shown
from sparsebp.core.errors import OptionError
from sparsebp.core.packed import unpacked
from sparsebp.core.shortcuts import forward_of
from sparsebp.nn.gradients import Gradients, gradients_of, without_pruned
from sparsebp.nn.steps import seen_by_loss


def value_and_grad(
    model: Any, loss: Any, params: Iterable[str] | None = None
) -> Callable[..., tuple[float, dict[str, Array]]]:
    """Return a function that computes a loss and its gradients with respect to the model's parameters.

    Parameters
    ----------
    model
        A layer or model.
    loss
        ``forward(prediction, target) -> (value, saved)`` and ``input_grad(saved)``, as `CrossEntropyLoss` has them.
    params
        The names of the parameters to differentiate with respect to, or a mapping by these names, as
        ``optimizer.params``; None: all. Layers that have none of them compute no weight gradients, and the layers of a
        `Sequential` before the first that has one no gradients at all.

    Returns
    -------
    callable
        ``function(x, target, **options) -> (value, grads)``: the loss as a float, and a dict with the names of
        ``model.parameters()``, or of `params` alone, which an optimizer's `step` takes. `options` go to the model's
        forward (``lengths=``, say). A loss at every step of sequences sees the valid steps (M, …), as in
        `sparsebp.train.Trainer.fit`.

    Raises
    ------
    OptionError
        `model` or `loss` has no forward, a name is not one of ``model.parameters()``, or the names of the gradients
        differ from the parameters.

    Examples
    --------
    >>> import numpy as np, sparsebp as sb
    >>> model, loss = sb.nn.Linear(2, 3, rng=0), sb.nn.CrossEntropyLoss()
    >>> value, grads = sb.value_and_grad(model, loss)(np.ones((4, 2), np.float32), np.array([0, 1, 2, 0]))
    >>> sorted(grads)
    ['bias', 'weight']
    """
    for name, part in (("model", model), ("loss", loss)):
        if not callable(getattr(part, "forward", None)):
            raise OptionError(f"{name} cannot be differentiated", expected="an object with forward and a way back",
                              got=type(part).__qualname__)  # fmt: skip
    names = None if params is None else _checked_names(model, params)

    def function(x: Array, target: Array, **options: Any) -> tuple[float, dict[str, Array]]:
        prediction, saved = forward_of(model, x, **options)
        prediction, target, steps = seen_by_loss(model, loss, x, unpacked(prediction), target, options.get("lengths"))
        value, loss_saved = loss.forward(prediction, target)
        gy = loss.input_grad(loss_saved)
        gradients = gradients_of(model, gy if steps is None else steps.spread(gy), saved)
        return float(value), gradients.weight_grad() if names is None else _some_weight_grads(gradients, names)

    return function


def _checked_names(model: Any, params: Any) -> list[str]:
    """Return the names of some of a model's parameters, in the model's order."""
    live = list(model.parameters())
    given = [params] if isinstance(params, str) or not isinstance(params, Iterable) else list(params)
    unknown = [name for name in given if name not in live]
    if unknown or isinstance(params, str):
        raise OptionError("params are not names of the model's parameters", expected=f"some of {', '.join(live)}",
                          got=shown(params if isinstance(params, str) else unknown[0]))  # fmt: skip
    return [name for name in live if name in given]


def _some_weight_grads(gradients: Gradients, names: Sequence[str]) -> dict[str, Array]:
    """W of some parameters of a model, summed over their uses as `Layer.summed` does it."""
    model = gradients.layer
    live = model.parameters()
    names = _checked_names(model, names)  # a part may have been replaced
    found = gradients.uses({id(live[name]) for name in names})
    uses = model.shared_names() if hasattr(model, "shared_names") else {name: name for name in found}
    total: dict[str, Array] = {}
    for name, first in reversed(uses.items()):
        if name in found and first in names:
            total[first] = total[first] + found[name] if first in total else found[name]
    if total.keys() != set(names):
        raise OptionError(f"{type(model).__name__} does not give the gradients of its parameters",
                          expected=", ".join(names), got=", ".join(found) or "none")  # fmt: skip
    total = {name: total[name] for name in names}
    return without_pruned(model, total) if masking.owners else total
