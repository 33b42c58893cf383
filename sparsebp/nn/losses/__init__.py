"""Losses: their value, and the gradient with respect to the prediction."""

from sparsebp.nn.losses.classes import CrossEntropyLoss, NLLLoss
from sparsebp.nn.losses.regression import MSELoss

__all__ = ["CrossEntropyLoss", "MSELoss", "NLLLoss"]
