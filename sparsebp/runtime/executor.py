"""Executors run the training steps of a model; the plain one, on one device, in the order of a schedule."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from sparsebp.core import backend, threads
from sparsebp.core.errors import OptionError
from sparsebp.runtime.actions import (
    Actions,
    Batch,
    DeferredMetrics,
    Observer,
    Stages,
    Step,
    check_complete,
    check_even,
    is_ours,
    trained_parameters,
)
from sparsebp.runtime.deferred import DeferredSteps
from sparsebp.runtime.streams import (
    Graphs,
    Program,
    Task,
    TwoStreams,
    check_fits,
    compile_program,
    fewer,
    without_frozen,
)
from sparsebp.schedule import Action, Schedule


class Executor(abc.ABC):
    """Runs the training steps of a model on this rank, in the order of a schedule.

    `PlainExecutor` runs them on one device, on one stream or two; `ReplicaExecutor` and `PipelineExecutor` on several
    ranks; `SearchingExecutor` on whichever of them it has found to be the fastest.
    """

    stages: Stages
    schedule: Schedule
    """Of the next step."""
    has_all_stages: ClassVar[bool] = True
    """Whether every stage runs on this rank."""
    times: Mapping[Action, tuple[float, float]] = {}
    """When the actions of the last whole step began and ended, where that is recorded."""

    @property
    @abc.abstractmethod
    def uncaptured(self) -> tuple[str, ...]:
        """Why steps are not captured into CUDA graphs; empty if they are, or will be once warm."""

    @property
    @abc.abstractmethod
    def pending(self) -> bool:
        """Whether `flush` has anything to do."""

    def own(self, indices: Any) -> Any:
        """Return the samples of a micro-batch that are computed here: all."""
        return indices

    @abc.abstractmethod
    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; return the steps whose numbers are known by now, which keep their `tag`."""

    @abc.abstractmethod
    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish all steps, so that the model is up to date; return those not returned yet, with `wait` all."""

    def gather_state(self, *, everywhere: bool = False) -> None:  # noqa: B027 (most ranks keep nothing apart)
        """Gather after `flush` what ranks keep apart, on rank 0 or everywhere; all ranks call it. Here: nothing."""

    def close(self) -> None:  # noqa: B027 (nothing may be left)
        """End threads, and drop what has not been flushed. A further `step` begins anew. Here: nothing."""


class PlainExecutor(Executor):
    """Forward, loss, gradients and updates of a model, in the order of a schedule.

    The results do not depend on the order, bitwise on a CPU, as long as every stage takes its micro-batches in turn.
    (Gradients of further micro-batches are added in the order of arrival; dropout draws and running statistics advance
    with the forwards.) An action's results are freed as soon as their last
    reader is done, gradients with their update.

    Parameters
    ----------
    model
        A layer; its `stages` are the schedule's.
    loss
        ``forward(prediction, target) -> (value, saved)`` with the mean over the batch, and ``input_grad(saved)``.
    optimizer
        ``begin() -> update`` with ``update.apply(grads)`` and ``update.remaining``; built on ``model.parameters()``, or
        on a part of them: stages that it does not train get no weight gradient, and stages before the first trained one
        get no gradient at all. ``params`` tells which parameters it trains (see `trained_parameters`); ``steps``, the
        number of updates by parameter name, shows whether an update was interrupted.
    schedule
        Of one worker, with one or two streams, and one update per step; W and U of stages that are not trained are left
        out. A step that begins with updates (``first="U"``) or with the backward (``first="I"``) leaves work for the
        next one, or for `flush`.
    clip_norm
        Largest Euclidean norm of all gradients together; None does not clip.
    observer
        Is told of losses, and of gradients that are not finite.
    graph
        Whether to capture steps into CUDA graphs, see `Trainer`; None: on a GPU.

    Raises
    ------
    OptionError
        The schedule is not for this model on one device, it updates before there is a norm to clip by, or the
        optimizer's parameters are not the model's.
    ScheduleError
        The schedule cannot run.

    Notes
    -----
    A step of several micro-batches has the mean over all of it: the mean of each micro-batch, and its gradient, are
    weighted by how much it counts (`sparsebp.nn.loss.Loss.count`; a loss without `count` is refused). One in which
    nothing counts has weight 0.

    On a GPU (with a loss that has ``on_device``) the host checks a step only after giving the next one to the device:
    `step` returns it, or raises its error, one step late, or `flush` does. Parameters have had one more update then.
    """

    plain: ClassVar[str] = "conventional"
    """A schedule that runs any model, for messages."""

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, *, clip_norm: float | None = None,
        observer: Observer | None = None, graph: bool | None = False,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self.schedule = schedule = without_frozen(schedule, self.stages)
        check_fits(schedule, self.stages, self.plain)
        observer = observer or Observer()
        self._order = schedule
        self._actions = self._make_actions(loss, optimizer, clip_norm, observer)
        self._actions.recomputed = schedule.recomputed
        self._programs: dict[int, Program] = {}
        program = self._program(schedule.graph.microbatches)
        if clip_norm is not None and not program.gathered:
            raise OptionError("The norm of all gradients is not known before the first update",
                              expected="all W before the first U, as with fusion='none' or fusion='forward'",
                              got=f"clip_norm={clip_norm} and the schedule {schedule.name or 'given'!r}",
                              remedy="Use fusion='forward', or do not clip by the norm")  # fmt: skip
        xp = backend.namespace(next(iter(model.parameters().values())))
        self._two = TwoStreams(xp) if len(program.streams) > 1 else None
        on_device = not backend.is_host(xp)
        # Each matrix product of this package enters this; once for the whole step, it takes a sixth of the time.
        own = not on_device and self.stages.ours and all(map(is_ours, (loss, optimizer)))
        self._around = threads.one_blas_thread if own else contextlib.nullcontext
        self._graphs = Graphs(self._actions) if graph or (graph is None and on_device) else None
        self._defers_metrics = on_device and hasattr(loss, "on_device")
        self._given = DeferredSteps(xp, loss, observer)
        self._pending: tuple[Step, Program] | None = None
        self._late = schedule.graph.first == "I"
        self._doubtful = True  # whether all parameters have had as many updates

    def _make_actions(self, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer) -> Actions:
        return Actions(self.stages, loss, optimizer, clip_norm, observer)

    @property
    def pending(self) -> bool:
        """Whether updates, or checks of steps, are outstanding."""
        return self._pending is not None or self._given.waiting

    @property
    def uncaptured(self) -> tuple[str, ...]:
        """Why steps are not captured into CUDA graphs; empty if they are, or will be once warm."""
        return ("graph=False",) if self._graphs is None else self._graphs.uncaptured

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step.

        Parameters
        ----------
        batches
            Input and target of every micro-batch; the last step of an epoch may have fewer than the schedule.
        tag
            Any value to keep in the `Step`.

        Returns
        -------
        list of Step
            The steps that are now complete and checked. Usually this is the current step. It is the previous one on a
            GPU, or if the schedule computes gradients during the next forward, and the one before that if both apply.

        Raises
        ------
        OptionError
            An update was interrupted before, by an error of the last step or before this executor was made. Some
            parameters are then one step ahead of others, and further steps would be wrong. Or the optimizer has more
            parameters than when this executor was made, or a stage or a trained parameter has been replaced.
        Exception
            Any error of an action. Unfinished work of the step before is still there for `flush`.
        """
        self.stages.check_current()
        done: list[Step] = []
        if self._doubtful:
            done = self.flush()
            check_even(self._actions.optimizer, self.stages.names)
        check_complete(self._actions.optimizer, self.stages)
        self._doubtful = True
        given = self._step(batches, tag)
        self._doubtful = False
        return done + self._given.exchange(given)

    def _step(self, batches: Sequence[Batch], tag: Any) -> list[Step]:
        program = self._program(len(batches))
        if self._graphs is not None and self._graphs.takes(batches):
            done = self._finish()
            captured = self._graphs.step(program, batches, tag)
            return done + (self._step(batches, tag) if captured is None else [captured])
        if self._pending is not None and self._pending[1] is not program:
            done = self._finish()
            return done + self._step(batches, tag)
        before = None if self._pending is None else self._pending[0]
        step = Step(batches, self.stages, tag)
        if self._defers_metrics:
            step.later = DeferredMetrics()
        if self._two is None or len(program.streams) == 1:  # of fewer micro-batches one stream may have nothing
            with self._around():
                self._run(program.streams[0], step, before)
        else:
            self._two.run(program, step, before)
            if program.gathered:
                self._actions.gather(step)
        if not program.lasting:
            return [step]
        self._pending = step, program
        if not self._late:
            return [step]
        return [] if before is None else [before]

    def _run(self, stream: Sequence[Task], step: Step, before: Step | None) -> None:
        for task in stream:
            if not task.old:
                task.run(step)
            elif before is not None:
                task.run(before)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step; return it, and on a GPU the one before, if they were not returned yet.

        Parameters and optimizer state are then the same as without any schedule. Without `wait`, steps whose numbers
        have not arrived are not returned.
        """
        done = self._given.exchange(self._finish())
        return done + self._given.drain() if wait else done

    def _finish(self) -> list[Step]:
        """Finish the last step; return it if it has all of its gradients only now."""
        if self._pending is None:
            return []
        step, program = self._pending
        if step.aborted:  # its own error has been raised
            self._pending = None
            return []
        step.resumed = True
        if self._two is not None and len(program.streams) > 1:
            self._two.finish(program, step)
        elif self._late:
            for task in program.streams[0]:
                if task.old and not task.updates:
                    task.run(step)
        self._actions.finish(step, gathered=program.gathered)
        self._pending = None
        return [step] if self._late else []

    def close(self) -> None:
        """End threads, and drop graphs and their memory, and work not done by `flush`. A further `step` starts anew."""
        if self._two is not None:
            self._two.stop(None if self._pending is None else self._pending[0])
        self._pending = None
        self._given.forget()
        if self._graphs is not None:
            self._graphs.forget()

    def _program(self, count: int) -> Program:
        if count not in self._programs:
            whole = self._order
            schedule = whole if count == whole.graph.microbatches else fewer(whole, count)
            self._programs[count] = compile_program(schedule, self.stages, self._actions)
        return self._programs[count]
