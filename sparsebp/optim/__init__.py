"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.rules import Adam
from sparsebp.optim.rules import Adamax
from sparsebp.optim.rules import AdamW
from sparsebp.optim.rules import NAdam
from sparsebp.optim.rules import RAdam
from sparsebp.optim.optimizer import check_finite
from sparsebp.optim.optimizer import clip_grad_norm
from sparsebp.optim.optimizer import clip_grad_value
from sparsebp.optim.optimizer import global_norm
from sparsebp.optim.lr_schedules import ChainedScheduler
from sparsebp.optim.lr_schedules import SequentialLR
from sparsebp.optim.lr_schedules import LRScheduler
from sparsebp.optim.optimizer import Optimizer
from sparsebp.optim.rules import SGD
from sparsebp.optim.rules import Adadelta
from sparsebp.optim.rules import Adagrad
from sparsebp.optim.rules import RMSprop
from sparsebp.optim.lr_schedules import ReduceLROnPlateau
from sparsebp.optim.prediction import PREDICTORS
from sparsebp.optim.prediction import FiniteDifferencePredictor
from sparsebp.optim.prediction import MomentumPredictor
from sparsebp.optim.prediction import OptimizerRulePredictor
from sparsebp.optim.prediction import Predictor
from sparsebp.optim.prediction import make_predictor
from sparsebp.optim.lr_schedules import ConstantLR
from sparsebp.optim.lr_schedules import CosineAnnealingLR
from sparsebp.optim.lr_schedules import CosineAnnealingWarmRestarts
from sparsebp.optim.lr_schedules import ExponentialLR
from sparsebp.optim.lr_schedules import LambdaLR
from sparsebp.optim.lr_schedules import LinearLR
from sparsebp.optim.lr_schedules import MultiStepLR
from sparsebp.optim.lr_schedules import OneCycleLR
from sparsebp.optim.lr_schedules import PolynomialLR
from sparsebp.optim.lr_schedules import StepLR
from sparsebp.optim.optimizer import DeviceUpdate
from sparsebp.optim.optimizer import Update

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
