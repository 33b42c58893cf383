"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), as in torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp import backend, kernels
from sparsebp.optim.optimizer import Optimizer, Params, check_fraction, check_non_negative
from sparsebp.types import Array


class Adam(Optimizer):
    """torch.optim.Adam's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, maximize
        As in torch.optim.Adam; the decay is added to the gradient.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    buffer_names = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "eps", "weight_decay")
        for name, beta in zip(("betas[0]", "betas[1]"), group["betas"], strict=True):
            check_fraction(name, beta)

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], self.decoupled, group["maximize"])

    def _update(self, param: Array, grad: Array, buffers: list[Any], options: list[float], step: int) -> None:
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize = options
        kernels.get(backend.namespace(param)).adam_update(
            param, -grad if maximize else grad, buffers[0], buffers[1], lr, beta1, beta2, eps, weight_decay,
            bool(decoupled), step,
        )  # fmt: skip


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    decoupled = True

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, maximize=maximize)
