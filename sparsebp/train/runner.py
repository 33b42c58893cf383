"""Binds an executor to a trainer: batches in, history and callbacks out, errors that say where."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sparsebp import backend
from sparsebp.errors import NonFiniteError
from sparsebp.schedule import Costs, Schedule
from sparsebp.train import finite
from sparsebp.train.actions import Step, Watch
from sparsebp.train.executor import Executor
from sparsebp.train.orders import found_order, order_of, reordered
from sparsebp.train.profile import Profile
from sparsebp.train.program import check_fits
from sparsebp.train.stages import Stages
from sparsebp.types import Array

if TYPE_CHECKING:
    from sparsebp.train.trainer import Trainer


SCHEDULE = "schedule.csv"
"""Where a trainer leaves the out-of-order schedule that it has found, in its folder for checkpoints."""


@dataclass(frozen=True)
class _Tag:
    """Which step it is: its number, epoch and learning rate, and when it began."""

    number: int
    epoch: int
    lr: float
    started: float


class Runner(Watch):
    """Runs the steps of one `Trainer.fit`.

    Attributes
    ----------
    begun
        Number of steps begun; the history may be one behind.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.begun = trainer.history.steps
        self._recorded = 0.0
        self._device = backend.device_of(next(iter(trainer.model.parameters().values())))
        stages = Stages(trainer.model)
        self._path = None if trainer.checkpoint_dir is None else trainer.checkpoint_dir / SCHEDULE
        found = found_order(self._path, stages) if trainer.schedule == "ooo" else None
        order = order_of(stages, trainer.fusion, trainer.accumulate, trainer.schedule)
        self._profile = Profile(stages) if trainer.schedule == "ooo" and found is None else None
        if self._profile is not None:
            check_fits(reordered(stages, Costs(), math.inf, None), stages)  # what cannot be had is said at once
        self._run(order if found is None else found)

    def _run(self, order: Schedule) -> None:
        trainer = self.trainer
        self.executor = Executor(
            trainer.model, trainer.loss, trainer.optimizer, order, clip_norm=trainer.clip_norm, watch=self
        )
        self.executor.observer = self._profile
        trainer.order = order

    def step(self, batches: Sequence[tuple[np.ndarray, np.ndarray]], epoch: int) -> None:
        """Run one step, and record and tell what is known by then."""
        trainer = self.trainer
        tag = _Tag(self.begun, epoch, float(trainer.optimizer.lr), time.perf_counter())
        moved = [(backend.to_device(x, self._device), backend.to_device(t, self._device)) for x, t in batches]
        self.begun += 1
        with np.errstate(over="ignore", invalid="ignore"):  # found by the checks, which say where
            with contextlib.nullcontext() if self._profile is None else self._profile.step():
                finished = self.executor.step(moved, tag)
            if trainer.lr_scheduler is not None and not trainer._waits_for_epochs:
                trainer.lr_scheduler.step()
            if any(callback.sees_model("step") for callback in trainer.callbacks):
                finished += self.executor.flush()
        self._record(finished)
        if self._profile is not None and self._profile.complete:
            costs, self._profile = self._profile.costs(), None
            self._run(reordered(self.executor.stages, costs, trainer.memory_cap, self._path))

    def flush(self) -> None:
        """Do what is left over, and record and tell it."""
        if self.executor.pending:
            with np.errstate(over="ignore", invalid="ignore"):
                finished = self.executor.flush()
            self._record(finished)

    def close(self) -> None:
        """Do what is left over after an error as well; what is not finite has been said by then."""
        with contextlib.suppress(NonFiniteError), np.errstate(over="ignore", invalid="ignore"):
            self._record(self.executor.flush(), tell=False)
        self.executor.close()

    def _record(self, steps: Iterable[Step], *, tell: bool = True) -> None:
        for step in steps:
            tag, targets = step.tag, [target for _, target in step.batches]
            right = [accuracy(p, t) for p, t in zip(step.predictions, targets, strict=True)]
            whole = right[0] if len(right) == 1 else sum(s * r for s, r in zip(step.shares, right, strict=True))
            now = time.perf_counter()
            self.trainer.history.add_step(
                loss=step.loss, accuracy=whole, grad_norm=step.norm(self.executor.stages.names), lr=tag.lr,
                seconds=now - max(tag.started, self._recorded), samples=sum(map(len, targets)),
            )  # fmt: skip
            self._recorded = now
            if tell:
                self.trainer._tell("step", self.trainer.history)

    # ---- what must not go on -----------------------------------------------------------------------------------------

    def loss(self, step: Step, m: int, value: float) -> None:
        """Stop if the loss is not finite."""
        if not math.isfinite(value):
            tag, (x, target) = step.tag, step.batches[m]
            raise finite.loss_error(
                tag.number, tag.epoch, value, self.trainer.model, x, target, step.predictions[m],
                self.trainer._last_good(),
            )  # fmt: skip

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """Stop: a gradient is not finite."""
        raise finite.gradient_error(step.tag.number, step.tag.epoch, grads, self.trainer._last_good())


def accuracy(prediction: Array, target: Array) -> float:
    """Return the share of rows whose largest entry is at the target; NaN for targets that are not classes."""
    if target.dtype.kind != "i" or prediction.ndim != target.ndim + 1:
        return math.nan
    return float((prediction.argmax(axis=-1) == target).mean())  # synchronize!
