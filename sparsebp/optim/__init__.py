"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.averaging import EMA
from sparsebp.optim.lr_curves import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)
from sparsebp.optim.lr_schedules import ChainedScheduler, LRScheduler, ReduceLROnPlateau, SequentialLR
from sparsebp.optim.optimizer import (
    DeviceUpdate,
    Optimizer,
    Update,
    check_finite,
    clip_grad_norm,
    clip_grad_value,
    global_norm,
)
from sparsebp.optim.prediction import (
    PREDICTORS,
    FiniteDifferencePredictor,
    MomentumPredictor,
    OptimizerRulePredictor,
    Predictor,
    make_predictor,
)
from sparsebp.optim.rules import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop

__all__ = [
    "EMA",
    "PREDICTORS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ChainedScheduler",
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "DeviceUpdate",
    "ExponentialLR",
    "FiniteDifferencePredictor",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "MomentumPredictor",
    "MultiStepLR",
    "NAdam",
    "OneCycleLR",
    "Optimizer",
    "OptimizerRulePredictor",
    "PolynomialLR",
    "Predictor",
    "RAdam",
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


def __dir__() -> list[str]:
    return sorted(__all__)
