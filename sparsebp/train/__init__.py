"""TRAIN: binds a model, a loss and an optimizer; checkpoints, history, callbacks."""

from sparsebp.train.callbacks import Callback
from sparsebp.train.callbacks import JsonLines
from sparsebp.train.callbacks import ProgressBar
from sparsebp.train.checkpoint import Checkpoint
from sparsebp.train.checkpoint import load_checkpoint
from sparsebp.train.checkpoint import save_checkpoint
from sparsebp.train.callbacks import EpochRecord
from sparsebp.train.callbacks import History
from sparsebp.train.callbacks import plot_history
from sparsebp.train.callbacks import save_loss_curve
from sparsebp.train.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EpochRecord",
    "History",
    "JsonLines",
    "ProgressBar",
    "Trainer",
    "load_checkpoint",
    "plot_history",
    "save_checkpoint",
    "save_loss_curve",
]


def __dir__() -> list[str]:
    return sorted(__all__)
