"""Training: the trainer, checkpoints, history and callbacks."""

from sparsebp.train.callbacks import (
    Callback,
    EpochRecord,
    History,
    JsonLines,
    ProgressBar,
    plot_history,
    save_loss_curve,
)
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
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
