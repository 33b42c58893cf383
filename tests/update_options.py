"""Options of update rules, as rows of the kernels."""

from __future__ import annotations

import numpy as np

from sparsebp.kernels.checks import UPDATE_OPTIONS

DEFAULTS = {
    "lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1, "nesterov": 0.0, "maximize": 0.0, "beta1": 0.8,
    "beta2": 0.95, "eps": 1e-3, "decoupled": 0.0, "lr_decay": 0.1, "rho": 0.8, "alpha": 0.9,
    "momentum_decay": 0.3,
}  # fmt: skip


def options_of(rule: str, count: int = 1, **changed: float) -> np.ndarray:
    """Return the options of `count` parameters, (count, options)."""
    values = DEFAULTS | changed
    return np.array([[values[name] for name in UPDATE_OPTIONS[rule]]] * count).reshape(count, -1)
