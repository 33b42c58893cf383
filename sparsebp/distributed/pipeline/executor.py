"""Runs the training steps of a model whose stages are on several ranks, in the order that a schedule says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import OptionError, TransportError
from sparsebp.distributed.agreement import check_marks, checksum, mark_of, options_of
from sparsebp.distributed.pipeline.actions import PipelineActions, RankStep
from sparsebp.distributed.pipeline.checks import check_fits_ranks
from sparsebp.distributed.pipeline.messages import Mail
from sparsebp.distributed.pipeline.versions import Note, Versions
from sparsebp.distributed.pipeline.whole import make_whole
from sparsebp.distributed.transport import Transport
from sparsebp.optim import Predictor
from sparsebp.runtime.actions import Run
from sparsebp.runtime.program import fewer, without_frozen
from sparsebp.runtime.stages import Stages, check_even, trained_parameters
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.schedule import Action, Schedule, actions_of, parts_of
from sparsebp.schedule.builders import place_updates
from sparsebp.schedule.lowering.lower import lower
from sparsebp.schedule.lowering.programs import Await, Compute, Message, Post, RankProgram, Send, Sent

Task: TypeAlias = Callable[[list[RankStep]], None]
"""Does something for the steps under way: one, or one a micro-batch."""


class _Program(NamedTuple):
    """What a rank does in a step, and how many updates ahead the weights are that its actions stand for."""

    tasks: list[Task]
    ahead: dict[Action, int]


class PipelineExecutor:
    """One rank's part of the steps of a model whose stages are on several ranks.

    Every rank has the whole model, and computes and updates its own stages alone: `flush` brings the others' up to
    date. The gradients are those of one worker, up to the rounding of their sums; bit for bit, if micro-batches come
    to every stage in their order.

    Parameters
    ----------
    model, loss, optimizer
        As for `sparsebp.runtime.executor.Executor`; the same on all ranks, from the same seed.
    schedule
        For the model's stages and as many workers as there are ranks; worker and rank have the same number. Without
        updates it gets them at its end.
    transport
        Between the ranks.
    clip_norm
        Largest Euclidean norm of the gradients of all stages together; None does not clip.
    watch
        Is told of losses, on the last stage's rank, and of gradients that are not finite, on their stage's.
    predictor
        Predicts the weights that forwards and backwards read, in an asynchronous schedule with ``weights="latest"``;
        None: they read the newest ones. Built on `optimizer`.
    note
        Is told of each `Distance` of an asynchronous schedule's own stages as soon as it is known; None measures none.

    Raises
    ------
    OptionError
        The schedule is not one of this model on these ranks, stages on several ranks share a parameter or a random
        generator, there is no norm to clip by before the first update, or nothing to predict.
    ScheduleError
        The schedule cannot run.

    Notes
    -----
    In `times` is when each action of this rank began and ended, of the last step with all micro-batches, by
    ``time.perf_counter()``; see `sparsebp.distributed.timeline`.

    In an asynchronous schedule (``updates="microbatch"``) every micro-batch is a batch of its own: the gradient is that
    of its own mean, and every stage is updated by it. A step is the stream of the schedule's micro-batches; the
    pipeline fills at its beginning and drains at its end. Its loss is the mean over the samples, its squared norm the
    mean of the micro-batches'. The learning rate is that of the step's beginning. Which version an action reads is that
    of the schedule (`Simulation.version`), whatever the ranks' speeds: results are the same on every run.

    The numbers of a step (losses, scores, sums of squares) become known to all ranks once a step, before the first
    update where the schedule has all gradients by then: a number that is not finite then stops all ranks before any
    parameter has changed.
    """

    uncaptured = ("ranks wait for each other on the host",)

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, transport: Transport, *,
        clip_norm: float | None = None, watch: Watch | None = None, predictor: Predictor | None = None,
        note: Note | None = None,
    ) -> None:  # fmt: skip
        self.stages = Stages(model, trained_parameters(model, optimizer))
        schedule = without_frozen(schedule, self.stages)
        if schedule.graph.updates == "none":
            schedule = place_updates(schedule)
        check_fits_ranks(schedule, self.stages, transport, predicts=predictor is not None)
        self.schedule, self._transport = schedule, transport
        self._owners = schedule.allocation
        self._own = [stage for stage, rank in enumerate(self._owners) if rank == transport.rank]
        self._actions = PipelineActions(
            self.stages, loss, optimizer, clip_norm, watch or Watch(), self._own, lambda step: self._share([step])
        )
        xp = backend.namespace(next(iter(model.parameters().values())))
        self._mail = Mail(transport, xp)
        names = {number: tuple(dict.fromkeys(self.stages[number].parameters.values())) for number in self._own}
        stashed = schedule.graph.weights == "stashed"
        live = model.parameters()
        self._predictor = predictor
        self._versions = Versions(names, live, stashed=stashed, predictor=predictor, note=note)
        self._asynchronous = schedule.graph.updates == "microbatch"
        self._programs: dict[int, _Program] = {}
        self.times: dict[Action, tuple[float, float]] = {}
        programs = lower(schedule)
        self._gathered = all(_gathers(program) for program in programs)
        if clip_norm is not None and not self._gathered:
            raise OptionError(
                "The norm of all gradients is not known before the first update",
                expected="all gradients before the first U, on every rank", remedy="Do not clip by the norm",
                got=f"clip_norm={clip_norm} and the schedule {schedule.name or 'given'!r}",
            )  # fmt: skip
        self._compiled(schedule.graph.microbatches)
        self._failed = False
        self._apart = False  # whether other ranks have updated their stages since these were brought up to date
        self._begun = False
        self._samples: list[str] = []

    @property
    def pending(self) -> bool:
        """Whether the parameters of other ranks' stages have changed since they were last brought up to date here."""
        return self._apart

    @property
    def reads(self) -> dict[Action, int]:
        """Which version of its stage's weights each own F and I of the last asynchronous step has read, from 0."""
        return self._versions.reads

    def own(self, indices: Any) -> Any:
        """Return which samples of a micro-batch this rank computes: all."""
        return indices

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step, on all ranks with the same batches.

        Parameters
        ----------
        batches
            Input and target of every micro-batch; the last step of an epoch may have fewer than the schedule.
        tag
            Whatever the caller wants to find in the `Step`.

        Returns
        -------
        list of Step
            This one, with its numbers; the predictions are there on the rank of the last stage.

        Raises
        ------
        TransportError
            Another rank has failed, or a step has failed before; or ranks have other samples, or other options of the
            optimizer.
        Exception
            Whatever an action raises. Some stages may have been updated then, and no further step is right.
        """
        if self._failed:
            raise TransportError("A step has failed on this rank", expected="no step after it", got="a further step",
                                 remedy="Start all ranks again, from a checkpoint")  # fmt: skip
        if not self._begun:
            check_even(self._actions.optimizer, self.stages.names)
            self._begun = True
        self._failed = True
        steps = self._new(batches, tag)
        self._mail.begin([_form(batch) for batch in batches])
        self._samples = _checksums(batches)
        program = self._compiled(len(batches))
        self._versions.begin(program.ahead)
        self._apart = True
        for task in program.tasks:
            task(steps)
        self._mail.end()
        if not self._gathered:
            self._share(steps)
        self._failed = False
        return [self._joined(steps, batches, tag)]

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Bring the parameters, buffers and optimizer state of all stages up to date on this rank.

        All ranks call it together. Nothing is left over of a step, so there is none to return.
        """
        if self._apart:
            make_whole(self._transport, self.stages, self._actions.optimizer, self._owners, self._predictor)
            self._apart = False
        return []

    def close(self) -> None:
        """Nothing is left over."""

    # ---- one step ----------------------------------------------------------------------------------------------------

    def _new(self, batches: Sequence[Batch], tag: Any) -> list[RankStep]:
        parts = [[batch] for batch in batches] if self._asynchronous else [batches]
        steps = [RankStep(part, len(self.stages), tag) for part in parts]
        for step in steps:
            step.update = self._actions.optimizer.begin()
            if 0 not in self._actions.own:
                step.flow = [None] * len(step.flow)
        return steps

    def _joined(self, steps: list[RankStep], batches: Sequence[Batch], tag: Any) -> Step:
        if not self._asynchronous:
            return steps[0]
        whole = Step(batches, len(self.stages), tag)
        for m, step in enumerate(steps):
            whole.values[m], whole.scores[m], whole.predictions[m] = step.values[0], step.scores[0], step.predictions[0]
            for name, square in step.squares.items():
                whole.squares[name] = whole.squares.get(name, 0.0) + square / len(steps)
        return whole

    def _share(self, steps: Sequence[Step]) -> None:
        """Make losses, scores and sums of squares known to all ranks, and that samples and options are the same."""
        last = self._transport.rank == self._owners[-1]
        numbers = [(step.values, step.scores) for step in steps] if last else None
        own = (numbers, [step.squares for step in steps], self._samples, mark_of(options_of(self._actions.optimizer)))
        shared = self._transport.share(own)
        check_marks([mark for _, _, _, mark in shared])
        for rank, (_, _, samples, _) in enumerate(shared):
            if samples != shared[0][2]:
                raise TransportError(
                    f"Rank {rank} has other samples than rank 0", expected="the same batches on all ranks",
                    got="inputs or targets of another checksum", remedy="Give all ranks the same data, in one order",
                )  # fmt: skip
        for number, step in enumerate(steps):
            step.values, step.scores = (list(part) for part in shared[self._owners[-1]][0][number])
            step.squares = {name: value for _, squares, _, _ in shared for name, value in squares[number].items()}

    # ---- programs ----------------------------------------------------------------------------------------------------

    def _compiled(self, count: int) -> _Program:
        if count not in self._programs:
            whole = self.schedule
            schedule = whole if count == whole.graph.microbatches else fewer(whole, count)
            program = lower(schedule)[self._transport.rank]
            ahead = self._versions.ahead(schedule) if self._asynchronous else {}
            self._programs[count] = _Program(self._tasks(program, count), ahead)
        return self._programs[count]

    def _tasks(self, program: RankProgram, count: int) -> list[Task]:
        tasks: list[Task] = []
        ends = {
            (part.stage, part.microbatch): part
            for one in program.instructions
            if isinstance(one, Compute)
            for part in parts_of(one.cell)
            if part.kind in "IW"
        }  # the last part of each backward
        parts = [part for one in program.instructions if isinstance(one, Compute) for part in parts_of(one.cell)]
        names = self.stages.updated_at([part.stage for part in parts if part.kind == "U"], last=True)
        gathers, whole = self._gathered, count == self.schedule.graph.microbatches
        for one in program.instructions:
            match one:
                case Compute(cell):
                    for action in actions_of(cell):
                        if action.kind == "U" and gathers:
                            tasks.append(self._gather)
                            gathers = False
                        runs = [run for part in parts_of(action) for run in self._runs(part, count, names)]
                        last = ends.get((action.stage, action.microbatch)) in parts_of(action)
                        task = self._versioned(action, runs, last) if self._asynchronous else _each(runs)
                        tasks.append(self._timed(action, task) if whole else task)
                case Post(message) | Await(message) | Send(message) | Sent(message):
                    if message.source.kind == "F" or message.source.stage > self.stages.first:
                        tasks.append(self._carries(one, message))
                case _:
                    raise OptionError("A pipeline has no replicas", expected="no S", got=str(one), remedy="Leave S out")
        if gathers:
            tasks.append(self._gather)
        return tasks

    def _gather(self, steps: list[RankStep]) -> None:
        self._actions.gather(steps[0])

    def _runs(self, part: Action, count: int, names: dict[int, list[str]]) -> list[Run]:
        """Return what a part of a cell runs: one function, or none."""
        number, m, actions = part.stage, part.microbatch or 0, self._actions
        if self._asynchronous:  # each micro-batch is a step of its own
            m, count = 0, 1
        if part.kind == "F":
            return [actions.forward(number, m, count)]
        if part.kind == "I":
            return [actions.input_grad(number, m)] if number > self.stages.first else []
        if not self.stages[number].parameters:
            return []
        if part.kind == "W":
            return [actions.weight_grad(number, m)]
        # The update of a shared parameter is with another stage's.
        return [actions.update(names[number], gathered=self._gathered)] if number in names else []

    def _timed(self, action: Action, task: Task) -> Task:
        def timed(steps: list[RankStep]) -> None:
            begin = time.perf_counter()
            task(steps)
            self.times[action] = begin, time.perf_counter()

        return timed

    def _versioned(self, action: Action, runs: Sequence[Run], last: bool) -> Task:
        """Return a task of an asynchronous schedule; with `last` a micro-batch's backward is over behind it."""
        versions, number, kind, m = self._versions, action.stage, action.kind, action.microbatch or 0

        def compute(steps: list[RankStep]) -> None:
            with versions.reading(number, kind, m):
                for run in runs:
                    run(steps[m])
            if last:
                versions.release(number, m)

        def update(steps: list[RankStep]) -> None:
            grads = {name: steps[m].grads[name] for name in self.stages[number].parameters.values()}
            versions.updating(number)
            for run in runs:
                run(steps[m])
            versions.updated(number, grads)

        return update if kind == "U" else compute

    def _carries(self, one: Post | Await | Send | Sent, message: Message) -> Task:
        mail, actions, (number, kind, m) = self._mail, self._actions, message.source
        which, place = (m or 0, 0) if self._asynchronous else (0, m or 0)
        match one:
            case Post():
                return lambda steps: mail.post(message)
            case Await():
                own = number + 1 if kind == "F" else number
                return lambda steps: actions.receive(steps[which], kind, own, place, mail.take(message))
            case Send():
                return lambda steps: mail.send(message, steps[which].outbox.pop((kind, number, place)))
            case Sent():
                return lambda steps: mail.sent(message)


def _each(runs: Sequence[Run]) -> Task:
    def task(steps: list[RankStep]) -> None:
        for run in runs:
            run(steps[0])

    return task


def _gathers(program: RankProgram) -> bool:
    """Whether a rank has all its gradients, and has sent what others need of it, before its first update."""
    kinds = [part.kind for one in program.instructions if isinstance(one, Compute) for part in parts_of(one.cell)]
    return "U" not in kinds or set(kinds[kinds.index("U") :]) == {"U"}


def _form(batch: Batch) -> tuple[Any, ...]:
    """Return what the shapes that a micro-batch has inside the model follow from."""
    return tuple((part.shape, part.dtype.str) for part in (batch[0], *batch[2:]))


def _checksums(batches: Sequence[Batch]) -> list[str]:
    """Return the checksum of every array of samples on the host; what is on a device is not read."""
    return [checksum(part) for batch in batches for part in batch if isinstance(part, np.ndarray)]
