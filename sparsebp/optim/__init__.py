"""Optimizers, learning-rate schedules and clipping; names and arguments as in torch.optim."""

from sparsebp.optim.adadelta import Adadelta
from sparsebp.optim.adagrad import Adagrad
from sparsebp.optim.adam import Adam, AdamW
from sparsebp.optim.chained import ChainedScheduler
from sparsebp.optim.clip import check_finite, clip_grad_norm, clip_grad_value, global_norm
from sparsebp.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from sparsebp.optim.optimizer import Optimizer
from sparsebp.optim.plateau import ReduceLROnPlateau
from sparsebp.optim.rmsprop import RMSprop
from sparsebp.optim.sgd import SGD
from sparsebp.optim.update import DeviceUpdate, Update

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "ChainedScheduler",
    "CosineAnnealingLR",
    "DeviceUpdate",
    "ExponentialLR",
    "LRScheduler",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "Optimizer",
    "RMSprop",
    "ReduceLROnPlateau",
    "SequentialLR",
    "StepLR",
    "Update",
    "check_finite",
    "clip_grad_norm",
    "clip_grad_value",
    "global_norm",
]
