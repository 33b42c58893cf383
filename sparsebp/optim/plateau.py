"""The schedule that follows a loss: torch.optim.lr_scheduler.ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sparsebp.errors import OptionError
from sparsebp.optim.lr_scheduler import check_state, per_group
from sparsebp.optim.optimizer import Optimizer


class ReduceLROnPlateau:
    """Multiply the rates by `factor` when a metric has not improved for more than `patience` steps.

    Parameters
    ----------
    optimizer
        Its groups' rates are reduced.
    mode
        ``"min"``: less is better, as of a loss; ``"max"``: more, as of an accuracy.
    factor, patience, threshold, threshold_mode, cooldown, min_lr, eps
        As in torch.optim; `min_lr` is one rate, or one for each group.

    Raises
    ------
    OptionError
        A value is out of range.
    """

    needs_metric = True

    def __init__(
        self, optimizer: Optimizer, mode: Literal["min", "max"] = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: Literal["rel", "abs"] = "rel", cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        if not 0 <= factor < 1:
            raise OptionError("Invalid factor", expected="a number in [0, 1)", got=factor, remedy="Pass 0.1, say")
        for name, value, choices in (
            ("mode", mode, ("min", "max")),
            ("threshold_mode", threshold_mode, ("rel", "abs")),
        ):
            if value not in choices:
                raise OptionError(
                    f"Unknown {name}", expected=" or ".join(choices), got=value, remedy="Pass one of them"
                )
        self.optimizer, self.factor, self.patience, self.cooldown, self.eps = optimizer, factor, patience, cooldown, eps
        self.mode, self.threshold, self.threshold_mode = mode, threshold, threshold_mode
        self.min_lrs = per_group("min_lr", min_lr, optimizer)
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad, self.cooling = 0, 0

    def step(self, metric: float) -> None:
        """Take what has been observed, and reduce the rates if it is time."""
        metric = float(metric)
        if self._is_better(metric):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.cooling > 0:
            self.cooling, self.num_bad = self.cooling - 1, 0
        if self.num_bad > self.patience:
            self._reduce()
            self.cooling, self.num_bad = self.cooldown, 0

    def _is_better(self, metric: float) -> bool:
        sign = 1.0 if self.mode == "min" else -1.0
        if self.threshold_mode == "rel":
            return sign * metric < sign * self.best * (1.0 - sign * self.threshold)
        return sign * metric < sign * self.best - self.threshold

    def _reduce(self) -> None:
        for group, least in zip(self.optimizer.param_groups, self.min_lrs, strict=True):
            reduced = max(group["lr"] * self.factor, least)
            if group["lr"] - reduced > self.eps:
                group["lr"] = reduced

    def state_dict(self) -> dict[str, Any]:
        """Return ``best``, ``num_bad`` and ``cooling``; the rates themselves are part of the optimizer's state."""
        return {"best": self.best, "num_bad": self.num_bad, "cooling": self.cooling}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises
        ------
        FileFormatError
            Other names.
        """
        check_state(self, state)
        self.best, self.num_bad, self.cooling = float(state["best"]), int(state["num_bad"]), int(state["cooling"])
