"""Magnitude pruning: removes the weights of smallest absolute value, shared over the layers in one of three ways."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np

from sparsebp.core import backend
from sparsebp.core import masks as masking
from sparsebp.core.absent import is_absent, refuse
from sparsebp.core.check import check_choice, check_number
from sparsebp.core.errors import NonFiniteError, OptionError
from sparsebp.nn.layer import Layer, check_layer, dotted
from sparsebp.nn.linear import Prunable

PruneMethod = Literal["class_blind", "class_uniform", "class_distribution"]


@dataclasses.dataclass(frozen=True)
class PruneReport:
    """The weights that pruning kept.

    Attributes
    ----------
    method
        How the pruned weights were shared out over the layers.
    kept, total
        Kept weights and all weights by the layer's dotted name; biases do not count.
    """

    method: str
    kept: dict[str, int]
    total: dict[str, int]

    @property
    def sparsity(self) -> float:
        """The share of all weights that is pruned."""
        return 1 - sum(self.kept.values()) / sum(self.total.values())

    def to_json(self) -> dict[str, Any]:
        """Return the report as a dict that JSON can hold."""
        return dataclasses.asdict(self) | {"sparsity": self.sparsity}

    def __str__(self) -> str:
        rows = [(name, self.kept[name], total) for name, total in self.total.items()]
        rows.append(("all", sum(self.kept.values()), sum(self.total.values())))
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(
            f"{name:{width}}  {kept:>10} of {total:>10}  {kept / total:7.2%}" for name, kept, total in rows
        )


def prune(model: Layer, amount: float, method: PruneMethod = "class_uniform", *, optimizer: Any = None) -> PruneReport:
    """Prune the weights of the convolutions and `Linear` layers of `model` by magnitude, in place.

    Every such layer gets the buffer ``weight_mask``, which travels with `state_dict`; of layers that share a weight the
    first one has it, for all. Pruned weights stay 0 in further training, whatever the optimizer does. They count in a
    second call, so that a larger `amount` prunes further.

    Parameters
    ----------
    model
        A layer, or a model that contains some. Biases and all other parameters are left alone.
    amount
        Share of the weights that is pruned afterwards, from 0 to below 1; it is rounded to whole weights.
    method
        ``"class_uniform"``: the same share of every layer. ``"class_blind"``: the smallest of all weights together.
        ``"class_distribution"``: in every layer the weights below λ times their standard deviation, with one λ
        for all layers that meets `amount`. The classes of the paper are the layers here.
    optimizer
        An optimizer of `model`, to set its buffers (momentum) of pruned weights to 0. Without it, old buffers stay, and
        have no effect.

    Returns
    -------
    PruneReport
        Kept and total weights of every layer.

    Raises
    ------
    OptionError
        `amount` or `method` is out of range, the model has no weights that can be pruned, nothing would be left, or
        `optimizer` updates other weights.
    NonFiniteError
        A weight is NaN or infinite: such weights have no order.

    Notes
    -----
    Ties are broken by position, so the result is a function of the weights alone. A layer may lose all of its weights;
    it then passes its bias on. Source: See, Luong & Manning,
    "Compression of Neural Machine Translation Models via Pruning", CoNLL 2016, §3.2.
    """
    check_choice("pruning method", method, get_args(PruneMethod))
    amount = check_number("The amount to prune", amount, 0, math.nextafter(1, 0))
    check_layer("model", model)
    layers: dict[str, Prunable] = {}
    for name, layer in model.modules():
        shared = any(layer.params.get("weight") is other.params["weight"] for other in layers.values())
        if isinstance(layer, Prunable) and not shared:
            layers[name] = layer
    sizes = {name: layer.params["weight"].size for name, layer in layers.items()}
    if sum(sizes.values()) == 0:
        raise OptionError("There is nothing to prune", expected="a model with convolutions or linear layers",
                          got=type(model).__name__)  # fmt: skip
    _check_optimizer(optimizer, layers)
    if any(is_absent(layer.params["weight"]) for layer in layers.values()):
        refuse("pruned")
    masks = _masks(layers, amount, method)
    if not any(mask.any() for mask in masks.values()):
        raise OptionError("Pruning would leave no weight at all", expected="an amount that leaves at least one weight",
                          got=f"{amount} of {sum(sizes.values())} weights", remedy="Prune less")  # fmt: skip
    for name, layer in layers.items():
        layer.keep_weights(masks[name].reshape(layer.params["weight"].shape))
    if optimizer is not None:
        _forget(optimizer, layers)
    return PruneReport(method, {name: int(mask.sum()) for name, mask in masks.items()}, sizes)


def _masks(layers: dict[str, Prunable], amount: float, method: PruneMethod) -> dict[str, np.ndarray]:
    """Return the flat mask of every layer, on the host."""
    magnitudes = {name: _magnitudes(layer, method == "class_distribution") for name, layer in layers.items()}
    if method == "class_uniform":
        return {name: _largest(m, amount) for name, m in magnitudes.items()}
    together = _largest(np.concatenate(list(magnitudes.values())), amount)
    ends = np.cumsum([len(m) for m in magnitudes.values()])
    return dict(zip(magnitudes, np.split(together, ends[:-1]), strict=True))


def _magnitudes(layer: Prunable, in_deviations: bool) -> np.ndarray:
    """Return the absolute weights, flat, float64 on the host; -1 for pruned ones: they go first."""
    # `in_deviations`: in units of the standard deviation of the layer's weights that are left.
    weight = backend.to_host(layer.params["weight"]).reshape(-1).astype(np.float64)
    magnitudes = np.abs(weight)
    if not np.isfinite(magnitudes).all():
        raise NonFiniteError("A weight that is not finite cannot be ranked", expected="finite weights",
                             got=f"{int((~np.isfinite(magnitudes)).sum())} of {magnitudes.size} values not finite",
                             remedy="Load the last good checkpoint")  # fmt: skip
    known = layer._host_mask()
    mask = np.ones(len(weight), bool) if known is None else known.reshape(-1)
    if in_deviations:
        deviation = weight[mask].std() if mask.any() else 0.0
        # All weights alike: above λ times their deviation of 0 for every λ, so they stay.
        magnitudes = magnitudes / deviation if deviation else np.where(magnitudes > 0, np.inf, 0.0)
    magnitudes[~mask] = -1
    return magnitudes


def _largest(magnitudes: np.ndarray, amount: float) -> np.ndarray:
    """Return where the largest are, all but the share `amount`; -1 is never among them. Of ties the first go."""
    mask = magnitudes >= 0
    gone = round(amount * len(magnitudes))
    if gone:
        largest_gone = np.partition(magnitudes, gone - 1)[gone - 1]  # a full sort takes ten times as long
        mask &= magnitudes >= largest_gone
        ties = np.flatnonzero(magnitudes == largest_gone)
        mask[ties[: gone - np.count_nonzero(magnitudes < largest_gone)]] = False
    return mask


def _check_optimizer(optimizer: Any, layers: dict[str, Prunable]) -> None:
    """Check that `optimizer` is None or one that updates the weights of `layers`."""
    if optimizer is None:
        return
    owned = getattr(optimizer, "params", None)
    if not isinstance(owned, Mapping) or not hasattr(optimizer, "buffers"):
        raise OptionError("optimizer is not an optimizer", expected="an optimizer of sparsebp.optim, or None",
                          got=type(optimizer).__name__)  # fmt: skip
    for name, layer in layers.items():
        weight = layer.params["weight"]
        if owned.get(dotted(name, "weight"), weight) is not weight:
            raise OptionError("The optimizer does not belong to the model", expected="one built on model.parameters()",
                              got=f"{type(optimizer).__name__} on another weight of layer {name!r}", remedy="Build it "
                              "after model.to(...), from the parameters of the model that is pruned")  # fmt: skip


def _forget(optimizer: Any, layers: dict[str, Prunable]) -> None:
    """Set the optimizer's buffers of pruned weights to 0."""
    names = {id(array): name for name, array in optimizer.params.items()}
    for layer in layers.values():
        name, mask = names.get(id(layer.params["weight"])), layer._mask()
        for buffers in optimizer.buffers.values():
            array = None if name is None else buffers.get(name)
            if array is not None:
                array[...] = masking.kept(array, mask)
