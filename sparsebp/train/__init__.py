"""TRAIN: binds a model, a loss and an optimizer; checkpoints, callbacks, comparison with plain BP."""

from sparsebp.train.callbacks import Callback, JsonLines, ProgressBar
from sparsebp.train.candidates import FoundSchedule
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sparsebp.train.compare import Comparison, compare_backward, compare_histories
from sparsebp.train.executor import Executor
from sparsebp.train.history import EpochRecord, History
from sparsebp.train.out_of_order import OutOfOrderExecutor
from sparsebp.train.plot import plot_history, save_loss_curve
from sparsebp.train.prune_checkpoint import prune_checkpoint
from sparsebp.train.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "Comparison",
    "EpochRecord",
    "Executor",
    "FoundSchedule",
    "History",
    "JsonLines",
    "OutOfOrderExecutor",
    "ProgressBar",
    "Trainer",
    "compare_backward",
    "compare_histories",
    "load_checkpoint",
    "plot_history",
    "prune_checkpoint",
    "save_checkpoint",
    "save_loss_curve",
]
