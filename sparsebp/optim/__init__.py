"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.adam import Adam, Adamax, AdamW, NAdam, RAdam
from sparsebp.optim.clip import check_finite, clip_grad_norm, clip_grad_value, global_norm
from sparsebp.optim.combined import ChainedScheduler, SequentialLR
from sparsebp.optim.lr_scheduler import LRScheduler
from sparsebp.optim.optimizer import Optimizer
from sparsebp.optim.optimizers import SGD, Adadelta, Adagrad, RMSprop
from sparsebp.optim.plateau import ReduceLROnPlateau
from sparsebp.optim.prediction import (
    PREDICTORS,
    FiniteDifferencePredictor,
    MomentumPredictor,
    OptimizerRulePredictor,
    Predictor,
    make_predictor,
)
from sparsebp.optim.schedules import (
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)
from sparsebp.optim.update import DeviceUpdate, Update

__all__ = [
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
