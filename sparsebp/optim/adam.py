"""Adam (Kingma & Ba 2015) and AdamW (Loshchilov & Hutter 2019), as in torch.optim."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebp import backend, kernels
from sparsebp.errors import OptionError
from sparsebp.optim.optimizer import Optimizer, non_negative
from sparsebp.types import Array


class Adam(Optimizer):
    """torch.optim.Adam's update, in place, one kernel a parameter.

    Parameters
    ----------
    params
        ``model.parameters()``.
    lr, betas, eps, weight_decay
        As in torch.optim.Adam; the decay is added to the gradient.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    buffer_names = ("exp_avg", "exp_avg_sq")
    decoupled = False

    def __init__(
        self, params: Mapping[str, Array], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0,
    ) -> None:  # fmt: skip
        if not all(0 <= beta < 1 for beta in betas):
            raise OptionError("Invalid betas", expected="two numbers in [0, 1)", got=betas, remedy="Pass others")
        self.betas = (float(betas[0]), float(betas[1]))
        self.eps = non_negative("eps", eps)
        self.weight_decay = non_negative("weight_decay", weight_decay)
        super().__init__(params, lr)

    def update(self, name: str, param: Array, grad: Array) -> None:
        """Update one parameter."""
        kernels.get(backend.namespace(param)).adam_update(
            param, grad, self.buffers["exp_avg"][name], self.buffers["exp_avg_sq"][name], self.lr, *self.betas,
            self.eps, self.weight_decay, self.decoupled, self.steps,
        )  # fmt: skip


class AdamW(Adam):
    """Adam with decoupled weight decay, as `torch.optim.AdamW`."""

    decoupled = True

    def __init__(
        self, params: Mapping[str, Array], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay)
