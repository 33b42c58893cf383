"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.adam import Adam, AdamW
from sparsebp.optim.clip import check_finite, clip_grad_norm
from sparsebp.optim.optimizer import Optimizer
from sparsebp.optim.schedules import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    OneCycleLR,
    Schedule,
    StepLR,
)
from sparsebp.optim.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CosineAnnealingLR",
    "ExponentialLR",
    "LinearLR",
    "OneCycleLR",
    "Optimizer",
    "Schedule",
    "StepLR",
    "check_finite",
    "clip_grad_norm",
]
