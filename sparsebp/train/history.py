"""What a training run has seen: one value a step, one record an epoch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.core.arguments import shown
from sparsebp.core.errors import FileFormatError

STEP_FIELDS = ("loss", "accuracy", "grad_norm", "lr", "seconds")
_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float,), "float | None": (float, type(None))}


@dataclasses.dataclass(frozen=True)
class EpochRecord:
    """One epoch.

    Attributes
    ----------
    epoch, step
        Epoch number from 0, and the number of steps done when it ended.
    train_loss, train_accuracy
        Means over the epoch's samples, each taken before the step that used it; accuracy is None for a task without
        classes.
    validation_loss, validation_accuracy
        Means over the validation set after the epoch, None without one.
    seconds
        Wall-clock time of the epoch's training steps; validation and checkpoints are not in it.
    """

    epoch: int
    step: int
    train_loss: float
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """Return the record as a dict that JSON can hold."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, record: Any) -> EpochRecord:
        """Build the record back from `to_json`.

        Raises
        ------
        FileFormatError
            It is not what that returns.
        """
        kinds = {field.name: _KINDS[str(field.type)] for field in dataclasses.fields(cls)}
        fits = isinstance(record, dict) and record.keys() == kinds.keys()
        if not fits or any(isinstance(v, bool) or not isinstance(v, kinds[name]) for name, v in record.items()):
            raise FileFormatError("This is no record of an epoch", expected=", ".join(kinds), got=shown(record),
                                  remedy="Pass what to_json returned")  # fmt: skip
        return cls(**record)


class History:
    """The values of every step and the record of every epoch.

    Attributes
    ----------
    loss, accuracy, grad_norm, lr, seconds
        Lists of floats, one entry a step: the batch's mean loss, the share of its samples that were classified right
        (NaN for a task without classes), the gradient's norm before clipping, the learning rate, and the step's
        wall-clock time in seconds.
    samples
        List of ints: the batch size of every step.
    epochs
        List of `EpochRecord`.
    """

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.accuracy: list[float] = []
        self.grad_norm: list[float] = []
        self.lr: list[float] = []
        self.seconds: list[float] = []
        self.samples: list[int] = []
        self.epochs: list[EpochRecord] = []

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return len(self.loss)

    def add_step(
        self, *, loss: float, accuracy: float, grad_norm: float, lr: float, seconds: float, samples: int
    ) -> None:
        """Append one step."""
        for name, value in zip(STEP_FIELDS, (loss, accuracy, grad_norm, lr, seconds), strict=True):
            getattr(self, name).append(float(value))
        self.samples.append(int(samples))

    def end_epoch(self, epoch: int, steps: int, validation: tuple[float, float | None] | None) -> EpochRecord:
        """Append and return the record of an epoch that took the last `steps` steps."""
        last = slice(self.steps - steps, self.steps)
        weights = np.asarray(self.samples[last], np.float64)
        accuracy = float(np.average(self.accuracy[last], weights=weights))
        record = EpochRecord(
            epoch=epoch,
            step=self.steps,
            train_loss=float(np.average(self.loss[last], weights=weights)),
            train_accuracy=None if math.isnan(accuracy) else accuracy,
            validation_loss=None if validation is None else validation[0],
            validation_accuracy=None if validation is None else validation[1],
            seconds=float(np.sum(self.seconds[last])),
        )
        self.epochs.append(record)
        return record

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Return the steps' values as float64 arrays (steps,), and ``samples`` as int64."""
        arrays = {name: np.asarray(getattr(self, name), np.float64) for name in STEP_FIELDS}
        return arrays | {"samples": np.asarray(self.samples, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], epochs: list[dict[str, Any]]) -> History:
        """Build the history back from `to_arrays` and the records' `EpochRecord.to_json`.

        Raises
        ------
        FileFormatError
            They are not what those return.
        """
        kinds = dict.fromkeys(STEP_FIELDS, np.float64) | {"samples": np.int64}
        forms = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        steps = max((array.size for array in arrays.values()), default=0)
        wanted = {name: ((steps,), np.dtype(kind)) for name, kind in kinds.items()}
        if forms != wanted:
            raise FileFormatError("This is no history of steps", expected=wanted, got=forms,
                                  remedy="Pass what to_arrays returned")  # fmt: skip
        history = cls()
        for name in kinds:
            setattr(history, name, arrays[name].tolist())
        history.epochs = [EpochRecord.from_json(record) for record in epochs]
        return history
