"""Losses: their value, and the gradient with respect to the prediction."""

from sparsebp.nn.losses.binary import BCEWithLogitsLoss
from sparsebp.nn.losses.classes import CrossEntropyLoss, NLLLoss
from sparsebp.nn.losses.regression import L1Loss, MSELoss, SmoothL1Loss

__all__ = ["BCEWithLogitsLoss", "CrossEntropyLoss", "L1Loss", "MSELoss", "NLLLoss", "SmoothL1Loss"]
