"""Training: the trainer, checkpoints, history and callbacks."""

from sparsebp.train.callbacks import Callback, JsonLines, ProgressBar, WeightAveraging
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sparsebp.train.history import EpochRecord, Evaluation, History, plot_history, save_loss_curve
from sparsebp.train.monitors import EarlyStopping, ModelCheckpoint
from sparsebp.train.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "EpochRecord",
    "Evaluation",
    "History",
    "JsonLines",
    "ModelCheckpoint",
    "ProgressBar",
    "Trainer",
    "WeightAveraging",
    "load_checkpoint",
    "plot_history",
    "save_checkpoint",
    "save_loss_curve",
]


def __dir__() -> list[str]:
    return sorted(__all__)
