"""The learning-rate schedule that follows a loss, as torch.optim.lr_scheduler.ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

from sparsebp.core.arguments import check_choice, check_integer, check_number
from sparsebp.optim.checks import check_fraction
from sparsebp.optim.lr_scheduler import check_optimizer, check_state, in_state, per_group, rates_of
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

    needs_metric, chains, reads_model = True, True, False

    def __init__(
        self, optimizer: Optimizer, mode: Literal["min", "max"] = "min", factor: float = 0.1, patience: int = 10,
        threshold: float = 1e-4, threshold_mode: Literal["rel", "abs"] = "rel", cooldown: int = 0,
        min_lr: float | Sequence[float] = 0.0, eps: float = 1e-8,
    ) -> None:  # fmt: skip
        check_fraction("factor", factor)
        check_choice("mode", mode, ("min", "max"))
        check_choice("threshold_mode", threshold_mode, ("rel", "abs"))
        self.optimizer, self.factor = check_optimizer(optimizer), float(factor)
        self.patience, self.cooldown = check_integer("patience", patience, 0), check_integer("cooldown", cooldown, 0)
        self.eps, self.threshold = check_number("eps", eps, 0.0), check_number("threshold", threshold, 0.0)
        self.mode, self.threshold_mode = mode, threshold_mode
        self.min_lrs = per_group("min_lr", min_lr, optimizer)
        self.best = math.inf if mode == "min" else -math.inf
        self.num_bad, self.cooling = 0, 0
        self._last_lr = rates_of(optimizer)

    def step(self, metric: float) -> None:
        """Take what has been observed, and reduce the rates if it is time.

        Raises
        ------
        OptionError
            It is no number. Infinity and NaN are: they improve nothing.
        """
        metric = metric if isinstance(metric, float) else check_number("metric", metric, finite=False)
        if self._is_better(metric):
            self.best, self.num_bad = metric, 0
        else:
            self.num_bad += 1
        if self.cooling > 0:
            self.cooling, self.num_bad = self.cooling - 1, 0
        if self.num_bad > self.patience:
            self._reduce()
            self.cooling, self.num_bad = self.cooldown, 0
        self._last_lr = rates_of(self.optimizer)

    def get_last_lr(self) -> list[float]:
        """Return the rate of each group as this schedule has left it."""
        return list(self._last_lr)

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
            Other names, or values that are none of a schedule.
        """
        check_state(self, state)
        best = in_state(partial(check_number, finite=False), "best", state["best"])
        counts = [in_state(check_integer, name, state[name], 0, 2**62) for name in ("num_bad", "cooling")]
        self.best, (self.num_bad, self.cooling) = best, counts
        self._last_lr = rates_of(self.optimizer)
