"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.clip import check_finite, clip_grad_norm, clip_grad_value, global_norm
from sparsebp.optim.combined import ChainedScheduler, SequentialLR
from sparsebp.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)
from sparsebp.optim.optimizer import Optimizer
from sparsebp.optim.optimizers import SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop
from sparsebp.optim.prediction import (
    PREDICTORS,
    FiniteDifferencePredictor,
    MomentumPredictor,
    OptimizerRulePredictor,
    Predictor,
    make_predictor,
)
from sparsebp.optim.update import DeviceUpdate, Update

__all__ = [
    "PREDICTORS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "ChainedScheduler",
    "CosineAnnealingLR",
    "DeviceUpdate",
    "ExponentialLR",
    "FiniteDifferencePredictor",
    "LRScheduler",
    "LinearLR",
    "MomentumPredictor",
    "MultiStepLR",
    "OneCycleLR",
    "Optimizer",
    "OptimizerRulePredictor",
    "Predictor",
    "RMSprop",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
    "Update",
    "check_finite",
    "clip_grad_norm",
    "clip_grad_value",
    "global_norm",
    "make_predictor",
]
