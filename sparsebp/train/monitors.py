"""Callbacks that follow one number of the epochs: early stopping, checkpoints of the best epoch."""

from __future__ import annotations

import contextlib
import math
import os
import re
import string
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from sparsebp.core import backend
from sparsebp.core.check import check_choice, check_flag, check_integer, check_number
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.core.files import kept_path, prepare_folder
from sparsebp.optim.lr_schedules import check_monitor, usual_mode
from sparsebp.train.callbacks import Callback, RunInfo, WeightAveraging
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, pack, save_checkpoint
from sparsebp.train.grouping import layers_in_order, renaming
from sparsebp.train.history import VALIDATION, EpochRecord, History
from sparsebp.train.state import BEST_NAME, FILE_NAME, TrainingState


def validated_weights(trainer: TrainingState) -> Mapping[str, Any]:
    """Return the state of the model that the validation set is evaluated with: its averages, if there are any."""
    with contextlib.ExitStack() as stack:
        for callback in trainer.callbacks:
            if isinstance(callback, WeightAveraging):
                stack.enter_context(callback.ema.averaged())
        state: Mapping[str, Any] = trainer.model.state_dict()
        return state


# Callbacks that follow one number of the epochs' records. Its best value so far is a function of the history, which is
# part of checkpoints: so a resumed run goes on as if it had not stopped.

Mode: TypeAlias = Literal["auto", "min", "max"]


def check_measured(monitor: str, trainer: TrainingState) -> None:
    """Refuse a number that this `fit` does not measure."""
    if monitor.startswith(VALIDATION) and not trainer.validates:
        raise OptionError(f"{monitor} is not measured", expected="fit(..., validation=...)", got="none",
                          remedy="Pass a validation set, or monitor the train_loss")  # fmt: skip
    if usual_mode(monitor) is None and monitor.removeprefix(VALIDATION) not in trainer.metrics:
        raise OptionError(f"{monitor} is not measured", expected="a metric of Trainer(metrics=...)",
                          got=", ".join(trainer.metrics) or "none")  # fmt: skip


class _Monitor(Callback):
    """Knows the best epoch so far."""

    trainer: TrainingState

    def __init__(self, monitor: str, mode: Mode, min_delta: float = 0.0) -> None:
        self.monitor = check_monitor(monitor)
        self.mode: Mode | None = usual_mode(monitor) if check_choice("mode", mode, get_args(Mode)) == "auto" else mode
        if self.mode is None:
            raise OptionError(f"Whether less or more of {monitor} is better is not known", expected="mode='min' or "
                              "mode='max'", got="mode='auto'")  # fmt: skip
        self.min_delta = check_number("min_delta", min_delta, 0.0)
        self.best, self.best_epoch = math.nan, 0

    def set_trainer(self, trainer: TrainingState) -> None:
        """Keep the trainer; refuse a `fit` that does not measure the number."""
        self.trainer = trainer
        check_measured(self.monitor, trainer)

    def on_start(self, info: RunInfo) -> None:
        """Go through the epochs before a resume."""
        self.best, self.best_epoch = math.inf if self.mode == "min" else -math.inf, 0
        for record in self.trainer.history.epochs:
            self._improves(record)

    def _improves(self, record: EpochRecord) -> bool:
        """Whether this epoch is the best so far; if so, it is from now on."""
        value = record.to_json().get(self.monitor)
        if value is None:
            raise OptionError(f"Epoch {record.epoch} has no {self.monitor}", expected="a number", got=None,
                              remedy="Monitor a loss: accuracies are of classes")  # fmt: skip
        if not (self.best - value if self.mode == "min" else value - self.best) > self.min_delta:
            return False
        self.best, self.best_epoch = value, record.epoch
        return True

    def _warn_if_nan(self, record: EpochRecord) -> None:
        if math.isnan(record.to_json()[self.monitor]):
            warnings.warn(f"{self.monitor} of epoch {record.epoch} is NaN: it is not taken for an improvement",
                          RuntimeWarning, stacklevel=2)  # fmt: skip

    def _warn_if_none(self, consequence: str) -> None:
        if self.best_epoch == 0 and self.trainer.history.epochs:
            warnings.warn(f"No epoch had a finite {self.monitor}: {consequence}", RuntimeWarning, stacklevel=2)


class EarlyStopping(_Monitor):
    """Ends `fit` after an epoch when a loss or an accuracy has stopped improving, as in Keras and Lightning.

    Parameters
    ----------
    monitor
        ``"validation_loss"``, ``"validation_accuracy"``, ``"train_loss"`` or ``"train_accuracy"``, or
        ``"validation_<name>"`` of one of the trainer's `metrics`.
    patience
        Epochs in a row without an improvement after which training ends; 0 is as 1. A NaN is no improvement, and comes
        with a `RuntimeWarning`.
    min_delta
        A change counts as an improvement if it is larger than this, in the units of `monitor`.
    mode
        ``"min"`` or ``"max"`` is better; ``"auto"`` knows: less of a loss, more of an accuracy. It does not know
        metrics.
    restore_best
        Whether the model gets the weights and running statistics of its best epoch at the end of `fit`, also after all
        epochs; if no epoch had a finite value, a `RuntimeWarning` says so. The optimizer stays as it is. With the
        trainer's `checkpoint_dir` they are kept there as well, in ``best.safetensors``, for a run that resumes.

    Attributes
    ----------
    best, best_epoch
        The best value and its epoch, from 1; NaN and 0 before any.
    stopped_epoch
        The epoch after which it has ended training; None if it has not.

    Raises
    ------
    OptionError
        An argument is out of range; at the start of `fit`, there is no validation set to monitor; after the first
        epoch, there is no accuracy.
    FileFormatError
        At the start of a resumed `fit`: the best weights are not in ``best.safetensors``.
    """

    def __init__(
        self, monitor: str = "validation_loss", patience: int = 3, min_delta: float = 0.0, mode: Mode = "auto",
        restore_best: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(monitor, mode, min_delta)
        self.patience = check_integer("patience", patience, 0)
        self.restore_best = check_flag("restore_best", restore_best)
        self.stopped_epoch: int | None = None
        self._weights: Mapping[str, Any] | None = None
        self._written = True  # whether they are in the run's folder

    def sees_model(self, event: str) -> bool:
        """At a checkpoint it writes weights that it has."""
        return event != "checkpoint" and super().sees_model(event)

    def set_trainer(self, trainer: TrainingState) -> None:
        """Keep the trainer; refuse a `fit` that does not measure the number, or has two that restore weights."""
        super().set_trainer(trainer)
        restoring = [one for one in trainer.callbacks if isinstance(one, EarlyStopping) and one.restore_best]
        if len(restoring) > 1:
            raise OptionError("Several callbacks restore the best weights", expected="one with restore_best=True",
                              got=len(restoring))  # fmt: skip

    def on_start(self, info: RunInfo) -> None:
        """Take up the best epoch before a resume; a run that had ended ends at once."""
        super().on_start(info)
        self.stopped_epoch = self._weights = None
        history = self.trainer.history
        if self.restore_best and self.best_epoch > 0:
            if history.epochs[self.best_epoch - 1].step == history.steps:  # it may have been killed before the file
                self._keep()
                self._write()
            else:
                self._weights = self._kept()
        self._stop_if_due(len(history.epochs))

    def on_epoch(self, record: EpochRecord) -> None:
        """Compare the epoch with the best one."""
        if self._improves(record) and self.restore_best:
            self._keep()
        self._warn_if_nan(record)
        self._stop_if_due(record.epoch)

    def on_checkpoint(self, path: Path) -> None:
        """Write the best weights, now that the run's checkpoint has their epoch in its history."""
        self._write()

    def on_end(self, history: History) -> None:
        """Restore the best weights."""
        if self._weights is not None:
            self.trainer.model.load_state_dict(self._weights)
        elif self.restore_best:
            self._warn_if_none("no weights are restored, the model keeps the last ones")
        self._weights = None

    def _stop_if_due(self, epoch: int) -> None:
        if epoch - self.best_epoch >= max(1, self.patience):
            self.stopped_epoch, self.trainer.should_stop = epoch, True

    def _keep(self) -> None:
        self.trainer.check_finite(self.best_epoch - 1)
        validates = self.monitor.startswith("validation")
        self._weights = validated_weights(self.trainer) if validates else self.trainer.model.state_dict()
        self._written = False

    def _write(self) -> None:
        if not self._written and self._weights and self.trainer.checkpoint_dir is not None and self.trainer.has_steps:
            tensors = {f"model.{name}": backend.to_host(array) for name, array in self._weights.items()}
            state = self._said() | {"layers": layers_in_order(self.trainer.model)}
            save_checkpoint(self.trainer.checkpoint_dir / BEST_NAME, Checkpoint(tensors, state))
            self._written = True

    def _kept(self) -> Mapping[str, Any]:
        path = cast(Path, self.trainer.checkpoint_dir) / BEST_NAME  # a run that goes on has a folder
        checkpoint = load_checkpoint(path)
        rename = renaming(checkpoint.state, layers_in_order(self.trainer.model)) or (lambda name: name)
        if {key: value for key, value in checkpoint.state.items() if key != "layers"} != self._said():
            raise FileFormatError(f"{path} has not the run's best weights", expected=self._said(),
                                  got=checkpoint.state, remedy="Resume with restore_best=False, or with the arguments "
                                  "of the first call")  # fmt: skip
        return {rename(name): array for name, array in checkpoint.part("model").items()}

    def _said(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "best": self.best, "epoch": self.best_epoch}


_NUMBER = r"[-+.,%\s\deinfaEINFA]+"  # as a field of a file's name may write it


class ModelCheckpoint(_Monitor):
    """Writes a checkpoint of its own after every epoch, or after the best ones, as in Keras and Lightning.

    The file is written under a temporary name and renamed. It is one of the trainer's checkpoints:
    ``load_checkpoint(path).part("model")`` are the weights for ``model.load_state_dict``, and in another folder, as
    ``checkpoint.safetensors``, `Trainer.fit` resumes from it. With `WeightAveraging` these are the model's own weights;
    the averages, which were validated, are ``part("callbacks.WeightAveraging.averages")``.

    Parameters
    ----------
    path
        The file. Its name may have fields of `EpochRecord`, as ``"{epoch:03d} {validation_loss:.3f}.safetensors"``
        (epochs count from 1); else each file replaces the one before. The folder is created if necessary. A run that
        starts anew does not replace files of an earlier one, unless `fit` is to overwrite them.
    monitor, mode
        As in `EarlyStopping`; for `save_best_only`.
    save_best_only
        Whether to write only after an epoch that is better than all before it, also those before a resume. A NaN never
        is; if no epoch was, a `RuntimeWarning` at the end says so.

    Attributes
    ----------
    best, best_epoch
        With `save_best_only`: the best value and its epoch, from 1; NaN and 0 before any.
    last_path
        The file last written; None before.

    Raises
    ------
    OptionError
        An argument is out of range, or `path` has another field. As `EarlyStopping`, with `save_best_only`.
    OutputError
        The folder or the file cannot be written, or there is a file of an earlier run.
    """

    def __init__(
        self, path: str | os.PathLike[str], monitor: str = "validation_loss", mode: Mode = "auto",
        save_best_only: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(monitor, mode)
        self.path, self.save_best_only = kept_path("path", path), check_flag("save_best_only", save_best_only)
        self.last_path: Path | None = None
        metrics = dict.fromkeys(re.findall(r"\{validation_(\w+)", self.path.name), 0.0)  # any name may be one
        self._path_of(EpochRecord(1, 1, 0.0, 0.0, 0.0, 0.0, 0.0, metrics))
        if set("{}").intersection(str(Path(path).parent)):
            raise OptionError("The folder of the checkpoint has fields", expected="fields in the file's name alone",
                              got=str(path))  # fmt: skip

    def set_trainer(self, trainer: TrainingState) -> None:
        """Keep the trainer, and create the folder; refuse a `fit` that does not measure what is asked for."""
        self.trainer = trainer
        if self.save_best_only:
            super().set_trainer(trainer)
        test = 0.0 if trainer.validates else None
        metrics = dict.fromkeys(trainer.metrics, 0.0) if trainer.validates else {}
        self._path_of(EpochRecord(1, 1, 0.0, 0.0, test, test, 0.0, metrics))
        if self.path.parent == trainer.checkpoint_dir and self.path.name in (FILE_NAME, BEST_NAME):
            raise OptionError(f"The trainer writes {self.path.name} itself", expected="another name or folder",
                              got=str(self.path))  # fmt: skip
        if trainer.has_steps:
            prepare_folder(self.path.parent)
            earlier = None if trainer.replaces else self._earlier()
            if earlier is not None:
                raise OutputError(f"{earlier} is of an earlier run", expected=f"no file {self.path.name}", got="one",
                                  remedy="Give ModelCheckpoint another path, or replace such files by "
                                  "fit(..., overwrite=True)")  # fmt: skip

    def _earlier(self) -> Path | None:
        """Return a file that has this name, with whatever numbers in its fields."""
        parts = string.Formatter().parse(self.path.name)
        name = "".join(re.escape(text) + ("" if field is None else _NUMBER) for text, field, *_ in parts)
        return next((path for path in sorted(self.path.parent.glob("*")) if re.fullmatch(name, path.name)), None)

    def on_start(self, info: RunInfo) -> None:
        """Go through the epochs before a resume."""
        if self.save_best_only:
            super().on_start(info)

    def on_epoch(self, record: EpochRecord) -> None:
        """Write the file."""
        if not self.save_best_only or self._improves(record):
            self._write(record)
        if self.save_best_only:
            self._warn_if_nan(record)

    def on_end(self, history: History) -> None:
        """Say if no epoch has had a file."""
        if self.save_best_only:
            self._warn_if_none(f"no checkpoint has been written to {self.path}")

    def _write(self, record: EpochRecord) -> None:
        self.trainer.check_finite(record.epoch - 1)
        self.last_path = self._path_of(record)
        save_checkpoint(self.last_path, pack(self.trainer))

    def _path_of(self, record: EpochRecord) -> Path:
        fields = record.to_json()
        try:
            return self.path.with_name(self.path.name.format(**fields))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise OptionError("The name of the checkpoint is not understood", expected=f"in braces any of "
                              f"{', '.join(name for name, value in fields.items() if value is not None)}",
                              got=self.path.name) from error  # fmt: skip
