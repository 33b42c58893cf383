"""The steps of one `fit`: run by an executor, recorded in the history, and checked."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import NonFiniteError, OptionError
from sparsebp.nn.loss import DEFAULT_IGNORED
from sparsebp.optim.lr_schedules import reads_model
from sparsebp.runtime.actions import Batch, Observer, Stages, Step, trained_parameters
from sparsebp.runtime.search import OutOfOrderExecutor
from sparsebp.runtime.streams import LENGTHS
from sparsebp.train.evaluation import count_right
from sparsebp.train.history import EpochRecord, Evaluation, History
from sparsebp.train.nonfinite import CLEAN, Origin, loss_error, nonfinite, uncounted_error
from sparsebp.train.setup import executor_of
from sparsebp.train.state import TrainingState


@dataclass(frozen=True)
class _Tag:
    """A step's number and epoch (from 0), rate, start time and samples, and where each micro-batch comes from."""

    number: int
    epoch: int
    lr: float
    started: float
    samples: int
    origins: Sequence[Origin]


_PART_NAMES = ("model", "loss", "optimizer", "clip_norm", "accumulate", "fusion", "schedule", "predictor")
_PARTS = attrgetter(*_PART_NAMES)


class Runner(Observer):
    """Runs steps and records each in the history, then calls `on_step`, once its numbers are known."""

    def __init__(self, run: TrainingState, on_step: Callable[[History], None] = lambda history: None) -> None:
        self.run, self._on_step = run, on_step
        self.begun = run.history.steps  # steps begun; the history may be one behind
        self._parts = _PARTS(run)
        self._recorded = 0.0
        self._make_executor()

    def _make_executor(self) -> None:
        run = self.run
        self._trained = trained_parameters(run.model, run.optimizer)
        self._on_host = backend.is_host(backend.namespace(next(iter(self._trained.values()))))
        ignored = getattr(run.loss, "ignore_index", None)
        self._ignored = None if ignored == DEFAULT_IGNORED and not self._on_host else ignored  # as the loss has it
        self.executor = executor_of(run, Stages(run.model, self._trained), self)
        run.current_schedule = self.executor.schedule

    def step(
        self, batches: Sequence[Batch], epoch: int, samples: int | None = None, origins: Sequence[Origin] = ()
    ) -> None:
        """Run one step; record and report all steps whose numbers are known by then.

        `samples` is their number on all ranks together, where that is not the batches'. `origins` are for messages.
        """
        run = self.run
        self.check_parts()
        if len(getattr(run.optimizer, "params", self._trained)) != len(self._trained):  # add_param_group
            self.flush()
            self.executor.close()
            self._make_executor()
        samples = sum(len(batch[1]) for batch in batches) if samples is None else samples
        tag = _Tag(self.begun, epoch, float(run.optimizer.lr), time.perf_counter(), samples, origins)
        self.begun += 1
        with np.errstate(over="ignore", invalid="ignore"):  # the checks find these and say where
            finished = self.executor.step(batches, tag)
            scheduler = run.lr_scheduler
            if scheduler is not None and not getattr(scheduler, "needs_metric", False):
                if reads_model(scheduler):
                    finished += self.executor.flush(wait=False)
                scheduler.step()
            if run.sees("step"):
                finished += self.executor.flush()
        self._record(finished)
        run.current_schedule = self.executor.schedule
        if isinstance(self.executor, OutOfOrderExecutor) and run.found_schedule is not self.executor.found:
            run.found_schedule = chosen = self.executor.found
            if chosen is not None and run.checkpoint_dir is not None:
                chosen.save(run.checkpoint_dir)

    def check_parts(self) -> None:
        """Refuse to go on with another model, loss or optimizer of the trainer, or with other options."""
        now = _PARTS(self.run)
        if now == self._parts:
            return
        others = [name for name, one, other in zip(_PART_NAMES, now, self._parts, strict=True) if one != other]
        raise OptionError("The trainer's parts have been replaced during a run", expected="those that it began with",
                          got=f"another {', '.join(others)}",
                          remedy="Set them between two calls of fit; within one, set options of the optimizer, as its "
                          "lr, and write into arrays")  # fmt: skip

    def captures(self, dataset: Any) -> str | None:
        """Say whether steps are captured into CUDA graphs, and if not, why; None where that was not asked for."""
        if self.run.graph is False or (self.run.graph is None and self._on_host):
            return None
        why = self.executor.uncaptured
        if getattr(dataset, "lengths", None) is not None or self.run.carried is not None:
            why = (*why, LENGTHS)
        if why:
            return f"Steps are not captured into a CUDA graph: {'; '.join(why)}"
        return "Steps are captured into a CUDA graph"

    def flush(self, *, wait: bool = True) -> None:
        """Run deferred updates and record finished steps; without `wait`, only the steps that are known by then."""
        if self.executor.pending:
            with np.errstate(over="ignore", invalid="ignore"):
                finished = self.executor.flush(wait=wait)
            self._record(finished)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Bring the model up to date on all ranks, and the optimizer's state on rank 0, or everywhere."""
        self.flush()
        self.executor.gather_state(everywhere=everywhere)

    def close(self, *, failed: bool = False) -> None:
        """Run deferred updates and end the threads.

        After an error these may fail as well, and the first error is the one to raise; other ranks are gone by then.
        """
        try:
            if failed and self.run.transport is not None:
                return
            quiet = contextlib.suppress(Exception if failed else NonFiniteError)
            with quiet, np.errstate(over="ignore", invalid="ignore"):
                self._record(self.executor.flush(), tell=False)
                self.gather_state(everywhere=True)
        finally:
            self.run.times = dict(self.executor.times)
            self.executor.close()

    def _record(self, steps: Iterable[Step], *, tell: bool = True) -> None:
        for step in steps:
            tag = step.tag
            for m, prediction in enumerate(step.predictions):
                if step.scores[m] is None and prediction is not None:  # None: no samples here
                    step.set_score(m, self.score(prediction, step.targets[m]))
            now, (right, scored) = time.perf_counter(), step.score
            self.run.history.add_step(
                loss=step.loss, accuracy=right, grad_norm=step.norm(self.executor.stages.names), lr=tag.lr,
                seconds=now - max(tag.started, self._recorded), samples=tag.samples,
                loss_weight=step.counted, accuracy_weight=scored,
            )  # fmt: skip
            self._recorded = now
            if tell:
                self._on_step(self.run.history)

    def end_epoch(self, steps: int, validation: Evaluation | None) -> EpochRecord:
        """Record the end of an epoch of `steps` steps; their seconds are rank 0's on all ranks."""
        history, transport = self.run.history, self.run.transport
        if transport is not None:
            history.seconds[-steps:] = transport.broadcast(history.seconds[-steps:])
        return history.end_epoch(steps, validation)

    def score(self, prediction: Array, target: Array) -> tuple[Array, Any] | None:
        """Return how many positions have the largest entry at the target, and of how many."""
        return count_right(prediction, target, self._ignored)

    def loss(self, step: Step, m: int, value: float) -> None:
        """Stop if the loss is not finite."""
        if not math.isfinite(value):
            run, tag, batch = self.run, step.tag, step.batches[m]
            if step.counted == 0:
                raise uncounted_error(run.loss, step.targets, f"at step {tag.number + 1} (epoch {tag.epoch + 1})",
                                      "Leave such samples out, or use larger batches")  # fmt: skip
            if step.later is not None:
                _check_seen(run.loss, batch[1])
            known = step.later is None and self.executor.has_all_stages
            prediction = step.predictions[m] if known else None
            place = tag.number, tag.epoch, value, run.model, batch, prediction
            raise loss_error(*place, self._origin(step, m), run.last_good())

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """Stop: a gradient is not finite."""
        tag, wrong = step.tag, ", ".join(nonfinite(grads))
        data = [self._origin(step, m).of(batch) for m, batch in enumerate(step.batches)]
        found = next((f"; {one}" for one in data if one), "")
        remedy = CLEAN if found else "Lower the learning rate, clip the gradient's norm, or use float64"
        raise NonFiniteError(f"The gradient is not finite at step {tag.number + 1} (epoch {tag.epoch + 1})",
                             expected="finite gradients", got=f"NaN or infinity in {wrong}{found}",
                             remedy=f"{remedy}. {self.run.last_good()}")  # fmt: skip

    def _origin(self, step: Step, m: int) -> Origin:
        return step.tag.origins[m] if step.tag.origins else Origin(np.empty(0, np.int64))


def _check_seen(loss: Any, target: Array) -> None:
    """Refuse the default `ignore_index` in targets on a GPU: the loss does not look for it there."""
    ignored = getattr(loss, "ignore_index", None)
    if ignored == DEFAULT_IGNORED and bool((target == ignored).any()):  # synchronize!
        raise OptionError("On a GPU the loss does not look for its default ignore_index", expected="another one",
                          got=f"targets of {ignored}", remedy="Number the positions to ignore -1, say, and build the "
                          "loss with ignore_index=-1")  # fmt: skip
