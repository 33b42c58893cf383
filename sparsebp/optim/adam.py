"""Adam (Kingma & Ba 2015), AMSGrad (Reddi et al. 2018) and AdamW (Loshchilov & Hutter 2019), as in torch.optim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.optim.checks import check_flags, check_fraction, check_non_negative
from sparsebp.optim.groups import Params
from sparsebp.optim.optimizer import Optimizer


class Adam(Optimizer):
    """torch.optim.Adam's update, in place.

    Parameters
    ----------
    params
        ``model.parameters()``, or groups; see `Optimizer`.
    lr, betas, eps, weight_decay, amsgrad, maximize
        As in torch.optim.Adam; the decay is added to the gradient.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    rule = "adam"
    decoupled = False

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize,
        })  # fmt: skip

    def _check(self, group: Mapping[str, Any]) -> None:
        check_non_negative(group, "lr", "eps", "weight_decay")
        check_flags(group, "amsgrad", "maximize")
        betas = group["betas"]
        if not isinstance(betas, tuple) or len(betas) != 2:
            raise OptionError("Invalid betas", expected="two numbers in [0, 1)", got=repr(betas),
                              remedy="Pass (0.9, 0.999), say")  # fmt: skip
        for name, beta in zip(("betas[0]", "betas[1]"), betas, strict=True):
            check_fraction(name, beta)

    def _buffers_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))

    def _options(self, group: Mapping[str, Any]) -> tuple[float, ...]:
        return (group["lr"], *group["betas"], group["eps"], group["weight_decay"], self.decoupled, group["maximize"])


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    decoupled = True

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
