"""Binds an executor to a trainer: batches in, history and callbacks out, errors that say where."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import NonFiniteError
from sparsebp.core.types import Array
from sparsebp.distributed.data_parallel.executor import ReplicaExecutor
from sparsebp.distributed.data_parallel.search import ReverseFirstKExecutor
from sparsebp.distributed.pipeline.executor import PipelineExecutor
from sparsebp.optim.lr_scheduler import reads_model
from sparsebp.runtime.candidates import SCHEDULE_NAME
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.graphs import LENGTHS
from sparsebp.runtime.out_of_order import OutOfOrderExecutor
from sparsebp.runtime.stages import Stages, check_live, trained_parameters
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.train import finite
from sparsebp.train.rank_0 import buffers_of_rank_0
from sparsebp.train.ranks import executor_of
from sparsebp.train.training import Training, earlier_schedule


@dataclass(frozen=True)
class _Tag:
    """Which step it is: its number, epoch, learning rate and samples, and when it began."""

    number: int
    epoch: int
    lr: float
    started: float
    samples: int


class Runner(Watch):
    """Runs the steps of one `Trainer.fit`.

    Attributes
    ----------
    begun
        Number of steps begun; the history may be one behind.
    """

    def __init__(self, trainer: Training) -> None:
        self.trainer = trainer
        self.begun = trainer.history.steps
        self._recorded = 0.0
        self._trained = trained_parameters(trainer.model, trainer.optimizer)
        self._on_host = backend.is_host(backend.namespace(next(iter(self._trained.values()))))
        stages, parts = Stages(trainer.model, self._trained), (trainer.model, trainer.loss, trainer.optimizer)
        folder = trainer.checkpoint_dir
        found = None if trainer.found_schedule is None else trainer.found_schedule.schedule
        if trainer.schedule == "ooo" and found is None and folder is not None:
            found = earlier_schedule(folder / SCHEDULE_NAME, stages)
        self.executor: Executor | OutOfOrderExecutor | PipelineExecutor | ReverseFirstKExecutor
        if trainer.schedule == "ooo" and found is None:
            self.executor = OutOfOrderExecutor(
                *parts, watch=self, memory_ratio=trainer.memory_ratio, graph=trainer.graph
            )
        else:
            self.executor = executor_of(trainer, stages, self, found)
        trainer.current_schedule = self.executor.schedule

    def own(self, indices: Any) -> Any:
        """Return which samples of a micro-batch are computed here: on a rank of replicas its share."""
        return self.executor.own(indices)

    def step(self, batches: Sequence[Batch], epoch: int, samples: int | None = None) -> None:
        """Run one step, and record and tell what is known by then.

        `samples` is their number on all ranks together, where that is not the batches'.

        Raises
        ------
        OptionError
            Somebody has replaced a parameter that the optimizer trains.
        """
        trainer = self.trainer
        check_live(trainer.model, self._trained)
        samples = sum(len(batch[1]) for batch in batches) if samples is None else samples
        tag = _Tag(self.begun, epoch, float(trainer.optimizer.lr), time.perf_counter(), samples)
        self.begun += 1
        with np.errstate(over="ignore", invalid="ignore"):  # found by the checks, which say where
            finished = self.executor.step(batches, tag)
            scheduler = trainer.lr_scheduler
            if scheduler is not None and not getattr(scheduler, "needs_metric", False):
                if reads_model(scheduler):
                    finished += self.executor.flush(wait=False)
                scheduler.step()
            if trainer._sees("step"):
                finished += self.executor.flush()
        self._record(finished)
        trainer.current_schedule = self.executor.schedule
        if isinstance(self.executor, OutOfOrderExecutor) and trainer.found_schedule is not self.executor.found:
            self._keep(self.executor)

    def captures(self, dataset: Any) -> str | None:
        """Say whether steps are captured into CUDA graphs, and if not, why; None where that is not to be."""
        if self.trainer.graph is False or (self.trainer.graph is None and self._on_host):
            return None
        why = self.executor.uncaptured
        if getattr(dataset, "lengths", None) is not None:
            why = (*why, LENGTHS)
        if why:
            return f"Steps are not captured into a CUDA graph: {'; '.join(why)}"
        return "Steps are captured into a CUDA graph"

    def _keep(self, executor: OutOfOrderExecutor) -> None:
        """Keep the schedule that was found."""
        trainer = self.trainer
        trainer.found_schedule, trainer.current_schedule = executor.found, executor.schedule
        if executor.found is not None and trainer.checkpoint_dir is not None:
            executor.found.save(trainer.checkpoint_dir)

    def flush(self, *, wait: bool = True) -> None:
        """Do what is left over, and record and tell it; without `wait` what is known by then."""
        if self.executor.pending:
            with np.errstate(over="ignore", invalid="ignore"):
                finished = self.executor.flush(wait=wait)
            self._record(finished)

    def whole(self, *, everywhere: bool = False) -> None:
        """Bring the model up to date on all ranks, and the optimizer's state on rank 0, or everywhere."""
        self.flush()
        if isinstance(self.executor, ReplicaExecutor | ReverseFirstKExecutor):
            buffers_of_rank_0(self.executor.transport, self.trainer.model)
            self.executor.gather_state(everywhere=everywhere)

    def close(self, *, failed: bool = False) -> None:
        """Do what is left over, and end the threads.

        After an error what is left over may fail as well: the first error is the one to tell. Other ranks are not
        there to do it together.
        """
        try:
            if failed and self.trainer.transport is not None:
                return
            quiet = contextlib.suppress(Exception if failed else NonFiniteError)
            with quiet, np.errstate(over="ignore", invalid="ignore"):
                self._record(self.executor.flush(), tell=False)
                self.whole(everywhere=True)
        finally:
            self.trainer.times = dict(getattr(self.executor, "times", {}))
            self.executor.close()

    def _record(self, steps: Iterable[Step], *, tell: bool = True) -> None:
        for step in steps:
            tag, targets = step.tag, [batch[1] for batch in step.batches]
            right = [
                (math.nan if p is None else accuracy(p, t)) if score is None else score  # None: no samples here
                for p, t, score in zip(step.predictions, targets, step.scores, strict=True)
            ]
            whole = right[0] if len(right) == 1 else sum(s * r for s, r in zip(step.shares, right, strict=True))
            now = time.perf_counter()
            self.trainer.history.add_step(
                loss=step.loss, accuracy=whole, grad_norm=step.norm(self.executor.stages.names), lr=tag.lr,
                seconds=now - max(tag.started, self._recorded), samples=tag.samples,
            )  # fmt: skip
            self._recorded = now
            if tell:
                self.trainer._tell("step", self.trainer.history)

    def score(self, prediction: Array, target: Array) -> Array | None:
        """Return the share of rows whose largest entry is at the target."""
        return _right(prediction, target)

    # ---- what must not go on -----------------------------------------------------------------------------------------

    def loss(self, step: Step, m: int, value: float) -> None:
        """Stop if the loss is not finite."""
        if not math.isfinite(value):
            tag, (x, target) = step.tag, step.batches[m][:2]
            known = step.later is None and not isinstance(self.executor, PipelineExecutor)  # or other ranks' stages
            prediction = step.predictions[m] if known else None
            finite.check_counted(self.trainer.loss, target, tag.number, tag.epoch, self.trainer._last_good())
            raise finite.loss_error(
                tag.number, tag.epoch, value, self.trainer.model, x, target, prediction, self.trainer._last_good()
            )

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """Stop: a gradient is not finite."""
        raise finite.gradient_error(step.tag.number, step.tag.epoch, grads, self.trainer._last_good())


def accuracy(prediction: Array, target: Array) -> float:
    """Return the share of places whose largest entry is at the target; NaN for targets that are not classes.

    The classes are on axis 1, as losses have them, or last if only that fits. Ignored places count as wrong.
    """
    right = _right(prediction, target)
    return math.nan if right is None else float(right)  # synchronize!


def _right(prediction: Array, target: Array) -> Array | None:
    if target.dtype.kind != "i":
        return None
    shape = prediction.shape
    for axis, places in ((1, (*shape[:1], *shape[2:])), (-1, shape[:-1])):
        if prediction.ndim == target.ndim + 1 and target.shape == places:
            return (prediction.argmax(axis=axis) == target).mean()
    return None
