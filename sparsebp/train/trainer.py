"""The trainer: forward, loss, gradients, clipping, update; checkpoints from which losses continue bitwise equal."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sparsebp.comm.transport import Transport, check_callable
from sparsebp.core import backend
from sparsebp.core.check import Array, Seed, check_flag, check_integer, check_positive, shown
from sparsebp.core.errors import NonFiniteError, OptionError, ShapeError
from sparsebp.core.files import kept_path
from sparsebp.core.shortcuts import forward_of
from sparsebp.data.dataset import Dataset, epoch_order
from sparsebp.nn.layer import inference_mode
from sparsebp.optim import Predictor
from sparsebp.optim.lr_schedules import ChainedScheduler, reads_model
from sparsebp.runtime.actions import Batch, Stages, Step, Watch, check_even, check_live, options_of, trained_parameters
from sparsebp.runtime.executor import MEMORY_RATIO, SCHEDULE_NAME, Executor, FoundSchedule, OutOfOrderExecutor
from sparsebp.runtime.launch import collective_call
from sparsebp.runtime.pipeline import Note, PipelineExecutor
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.runtime.streams import LENGTHS
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import Fusion
from sparsebp.train.callbacks import Callback, RunInfo, progress_of
from sparsebp.train.checkpoint import (
    FILE_NAME,
    EpochRecord,
    History,
    checked_config,
    evaluation,
    load_checkpoint,
    pack,
    restore,
    run_folder,
    save_checkpoint,
    set_aside,
    training,
)
from sparsebp.train.setup import (
    SCHEDULES,
    agree,
    as_dataset,
    batch_of,
    buffers_of_rank_0,
    check_parts,
    check_ranks,
    check_schedule,
    earlier_schedule,
    executor_of,
    scheduler_of,
    share_of,
    staleness,
    tell_on_rank_0,
    telling,
)

# Where a value that is not finite came from: the step, and the parameter or layer.


def nonfinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names of the arrays that hold a NaN or an infinity."""
    return [name for name, array in arrays.items() if not bool(backend.namespace(array).isfinite(array).all())]


def check_counted(loss: Any, target: Array, step: int, epoch: int, last_good: str) -> None:
    """Refuse a batch, micro-batch or rank's share in which the loss ignores every position: its mean is NaN."""
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None or target.dtype.kind not in "iu" or not bool((target == ignored).all()):  # synchronize!
        return
    raise NonFiniteError(f"The loss ignores a whole batch, micro-batch or rank's share at step {step} (epoch "
                         f"{epoch + 1})", expected="a position that counts",
                         got=f"ignore_index={ignored} at all {target.size} positions", remedy="Leave such samples out, "
                         "or use larger batches, fewer micro-batches (accumulate=) or fewer ranks. "
                         f"{last_good}")  # fmt: skip


def loss_error(
    step: int, epoch: int, value: float, model: Any, x: Array, target: Array, prediction: Array | None, last_good: str
) -> NonFiniteError:
    """Return the error for a loss that is not finite, naming the first place where finiteness is lost.

    Without `prediction`, parameters have been updated since.
    """
    return NonFiniteError(f"The loss is not finite at step {step} (epoch {epoch + 1})", expected="a finite loss",
                          got=f"{value}; {_where(model, x, target, prediction)}", remedy="Lower the learning rate, "
                          f"clip the gradient's norm, or use float64. {last_good}")  # fmt: skip


def _where(model: Any, x: Array, target: Array, prediction: Array | None) -> str:
    # In the order of the computation: parameters, the batch, the model's layers, the loss itself.
    names = nonfinite(model.parameters())
    if names and prediction is not None:
        return f"NaN or infinity in the parameters {', '.join(names)}"
    if nonfinite({"x": x}):
        return "NaN or infinity in the batch's input"
    if prediction is not None and nonfinite({"prediction": prediction}):
        return f"NaN or infinity in the output of {_first_layer(model, x)}, with finite parameters"
    if target.dtype.kind == "f" and nonfinite({"target": target}):
        return "NaN or infinity in the batch's target"
    if prediction is None:
        since = f"; since then it has come to the parameters {', '.join(names)}" if names else ""
        return f"the batch is finite, so that the model or the loss overflows{since}"
    return f"the model's output is finite, the loss overflows (largest output {float(abs(prediction).max()):g})"


def _first_layer(model: Any, x: Array) -> str:
    """Run the batch again and return the name of the innermost layer whose output is the first not to be finite."""
    if not hasattr(model, "modules"):
        return "the model"
    names: list[str] = []
    watched: list[Any] = []
    for name, layer in model.modules():
        if any(layer is other for other in watched):
            continue  # a shared layer has its first name
        watched.append(layer)
        layer.forward = _watch(layer.forward, name or "the model", names)
    try:
        model.forward(x)
    finally:
        for layer in watched:
            del layer.forward  # the instance attribute goes, the class's method is seen again
    return names[0] if names else "the model"


def _watch(forward: Any, name: str, names: list[str]) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        y, saved = forward(*args, **options)
        if nonfinite({name: y}):
            names.append(name)
        return y, saved

    return watched


# One `fit`: runs steps with an executor, records them in the history and tells callbacks.


@dataclass(frozen=True)
class _Tag:
    """A step's number, epoch, learning rate, start time and samples."""

    number: int
    epoch: int
    lr: float
    started: float
    samples: int


class Runner(Watch):
    """Runs the steps of one `Trainer.fit`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.begun = trainer.history.steps  # steps begun; the history may be one behind
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

    def step(self, batches: Sequence[Batch], epoch: int, samples: int | None = None) -> None:
        """Run one step; record and report all steps whose numbers are known by then.

        `samples` is their number on all ranks together, where that is not the batches'.
        """
        trainer = self.trainer
        check_live(trainer.model, self._trained)
        samples = sum(len(batch[1]) for batch in batches) if samples is None else samples
        tag = _Tag(self.begun, epoch, float(trainer.optimizer.lr), time.perf_counter(), samples)
        self.begun += 1
        with np.errstate(over="ignore", invalid="ignore"):  # the checks find these and say where
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
            trainer.found_schedule = chosen = self.executor.found
            if chosen is not None and trainer.checkpoint_dir is not None:
                chosen.save(trainer.checkpoint_dir)

    def captures(self, dataset: Any) -> str | None:
        """Say whether steps are captured into CUDA graphs, and if not, why; None where that was not asked for."""
        if self.trainer.graph is False or (self.trainer.graph is None and self._on_host):
            return None
        why = self.executor.uncaptured
        if getattr(dataset, "lengths", None) is not None:
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
        if isinstance(self.executor, ReplicaExecutor | ReverseFirstKExecutor):
            buffers_of_rank_0(self.executor.transport, self.trainer.model)
            self.executor.gather_state(everywhere=everywhere)

    def close(self, *, failed: bool = False) -> None:
        """Run deferred updates and end the threads.

        After an error these may fail as well, and the first error is the one to raise; other ranks are gone by then.
        """
        try:
            if failed and self.trainer.transport is not None:
                return
            quiet = contextlib.suppress(Exception if failed else NonFiniteError)
            with quiet, np.errstate(over="ignore", invalid="ignore"):
                self._record(self.executor.flush(), tell=False)
                self.gather_state(everywhere=True)
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
        """Return the share of rows with the largest entry at the target."""
        return _right(prediction, target)

    def loss(self, step: Step, m: int, value: float) -> None:
        """Stop if the loss is not finite."""
        if not math.isfinite(value):
            trainer, tag, (x, target) = self.trainer, step.tag, step.batches[m][:2]
            known = step.later is None and not isinstance(self.executor, PipelineExecutor)  # or other ranks' stages
            prediction = step.predictions[m] if known else None
            check_counted(trainer.loss, target, tag.number, tag.epoch, trainer._last_good())
            raise loss_error(tag.number, tag.epoch, value, trainer.model, x, target, prediction, trainer._last_good())

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """Stop: a gradient is not finite."""
        tag = step.tag
        raise NonFiniteError(f"The gradient is not finite at step {tag.number} (epoch {tag.epoch + 1})",
                             expected="finite gradients", got=f"NaN or infinity in {', '.join(nonfinite(grads))}",
                             remedy="Lower the learning rate, clip the gradient's norm, or use float64. "
                             f"{self.trainer._last_good()}")  # fmt: skip


def accuracy(prediction: Array, target: Array) -> float:
    """Return the share of positions whose largest entry is at the target; NaN for targets that are not classes."""
    right = _right(prediction, target)
    return math.nan if right is None else float(right)  # synchronize!


def _right(prediction: Array, target: Array) -> Array | None:
    # Classes are on axis 1, as losses have them, or last if only that fits. Ignored positions count as wrong.
    if target.dtype.kind != "i":
        return None
    shape = prediction.shape
    for axis, places in ((1, (*shape[:1], *shape[2:])), (-1, shape[:-1])):
        if prediction.ndim == target.ndim + 1 and target.shape == places:
            return (prediction.argmax(axis=axis) == target).mean()
    return None


Arrays: TypeAlias = tuple[Any, Any] | tuple[Any, Any, Any]
"""Inputs and targets, or inputs, targets and lengths, with the sample first."""


class Trainer:
    """Trains a model, step by step.

    Parameters
    ----------
    model
        A layer (`sparsebp.nn.Layer`).
    loss
        ``forward(prediction, target) -> (value, saved)``, a mean over the batch, and ``input_grad(saved)``.
    optimizer
        ``begin()``, ``lr``, ``state_dict``, ``load_state_dict``, as `sparsebp.optim.Optimizer` has them; built on
        ``model.parameters()`` or a part of them. The others stay as they are. A layer without trained parameters, and
        none in front of it, computes no gradients.
    lr_scheduler
        A schedule of `sparsebp.optim`, advanced after every step (`ReduceLROnPlateau`: after every epoch, with the
        validation loss, else the training loss); a list is a `sparsebp.optim.ChainedScheduler`. None keeps the rate.
    clip_norm
        Largest Euclidean norm of all trained gradients together; None does not clip.
    fusion
        When parameters are updated (Jiang et al., "Optimizer fusion", 2021); the results are the same.
        ``"none"``: after all gradients, in one call. ``"forward"``: right before a parameter's next use, and before
        anything else could see it: evaluation, checkpoints, the end of `fit`, and callbacks, data sets and
        learning-rate schedules unless their class says ``reads_model = False``. ``"backward"``: as soon as a gradient
        is complete and nothing reads the old value; the gradient's memory is freed at once. Not with `clip_norm`. If
        such a step fails half-way, some parameters are updated and others not, and the next `fit` refuses to go on.
    accumulate
        Micro-batches that a step's samples are split into: the memory of a smaller batch, with the gradients of the
        mean over the whole one. Layers that look at a batch as a whole, as `BatchNorm2d`, see the micro-batches.
    schedule
        The order of a step's actions: ``"conventional"``, ``"ooo"`` (weight gradients on a second stream, out of
        order; Oh et al. 2022), a `sparsebp.schedule.Schedule` of one worker, or the path of one in action CSV. All but
        the first place the updates themselves, so `fusion` stays ``"none"``. ``"ooo"`` measures several orders in the
        first steps and keeps the fastest (see `OutOfOrderExecutor`), for further calls of `fit`, and in
        `checkpoint_dir` as ``schedule.csv`` for further runs.
    memory_ratio
        With ``"ooo"``: bound on the simulated peak of memory, as a multiple of the conventional schedule's.
    graph
        On a GPU, capture the step into a CUDA graph for each shape of batches, and replay it; each graph holds its own
        memory for a whole step. None and True capture what can be captured (dropout, lengths and scans over stored
        Jacobians cannot: they need the host during the step), False nothing. `RunInfo.graph` says what was done.
    callbacks
        See `sparsebp.train.callbacks`.
    checkpoint_dir
        Folder for checkpoints, created if necessary; a relative path is resolved when the trainer is made. None writes
        no checkpoints. A run that starts anew keeps an earlier run's checkpoint as ``checkpoint.previous.safetensors``.
    checkpoint_every
        Steps between checkpoints within an epoch; one is always written before the first step and after every epoch.
    rng
        A seed or a `numpy.random.Generator` for the order of the samples. None takes fresh entropy.
    config
        Further description of the run, in JSON types (tuples become lists); it must be equal on resume.
    transport
        Connects several ranks, each of which makes the same trainer, on the same model from the same seed, and calls
        `fit` with the same arguments. `schedule` is then a `Schedule` of as many workers, or the name of a builder
        (``"1f1b"``, ``"gpipe"``, ``"zb-v"``, ``"pipedream"``, …), which makes it for the model's stages and
        `accumulate` micro-batches; or ``"data-parallel"``: every rank has a share of each step's samples; or
        ``"reverse-first-k"``: the same, with the most urgent sums first.
    sharded
        With data-parallel replicas: whether each rank keeps the optimizer's state of its own part only.
    predictor, note
        With an asynchronous schedule: predicts the weights that are read; called with how far they were from the later
        ones. See `sparsebp.runtime.pipeline.PipelineExecutor`. The predictor's state is part of checkpoints.

    Attributes
    ----------
    current_schedule
        The schedule of the last step; None before `fit`.
    found_schedule
        With ``"ooo"``: the chosen order and its measurements; None until then.
    should_stop
        False when `fit` begins; a callback sets it to True, and `fit` ends after the current epoch, on all ranks.
    saved
        Number of steps at the last checkpoint, written or resumed from; on all ranks. None until then.
    times
        After `fit` by a pipeline's schedule: when this rank's actions ran in the last whole step; for
        `sparsebp.runtime.launch.measured`.

    Raises
    ------
    OptionError
        An option is of another type or out of range, options exclude each other, the optimizer's parameters are not
        the model's, or `lr_scheduler` or `predictor` is of another optimizer.

    Notes
    -----
    On a GPU the host reads a step's numbers after it has launched the next one. History, and callbacks that do not look
    at the model, are one step behind until the epoch ends; an error (a loss or gradient that is not finite, a class
    that does not exist) names its step, and parameters have had one more update by then. Whatever looks at the model
    comes after all numbers have been read.

    **Several ranks.** Before anything that looks at the model (evaluation, checkpoints, callbacks) and at the end of
    `fit`, the model is brought up to date on all ranks. The history is the same on all, with rank 0's seconds.
    Callbacks run, and checkpoints are written, on rank 0; a checkpoint is of the whole model, and any number of ranks
    may go on from it. Ranks share the evaluation after an epoch; `evaluate` and `predict` run where they are called. An
    error before the first step is raised on all ranks, which can go on with another `fit`; a rank that fails later ends
    the others with `TransportError`. An asynchronous schedule (``"pipedream"``, ``"dualpipe-2018"``) updates after each
    of the `accumulate` micro-batches; a step's loss and squared norm are their means.

    `fit` switches a model that is in evaluation mode as a whole to training; in one that is in training mode, layers in
    evaluation (``model[1].eval()``) stay so. All modes are restored afterwards.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        *,
        lr_scheduler: Any | Sequence[Any] = None,
        clip_norm: float | None = None,
        fusion: Fusion = "none",
        accumulate: int = 1,
        schedule: str | os.PathLike[str] | Schedule = "conventional",
        memory_ratio: float = MEMORY_RATIO,
        graph: bool | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        rng: Seed = None,
        config: Mapping[str, Any] | None = None,
        transport: Transport | None = None,
        sharded: bool = False,
        predictor: Predictor | None = None,
        note: Note | None = None,
    ) -> None:
        check_parts(model, loss, optimizer, callbacks)
        trained_parameters(model, optimizer)
        for name, value in (("clip_norm", clip_norm), ("memory_ratio", memory_ratio)):
            if value is not None:
                check_positive(name, value)
        if checkpoint_every is not None:
            checkpoint_every = check_integer("checkpoint_every", checkpoint_every, 1)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.lr_scheduler = scheduler_of(lr_scheduler, optimizer)
        check_schedule(fusion, accumulate, schedule, clip_norm)
        check_ranks(schedule, transport)
        self.fusion, self.accumulate = fusion, int(accumulate)
        named = isinstance(schedule, Schedule) or schedule in SCHEDULES
        self.schedule = schedule if named else kept_path("schedule", schedule)
        self.memory_ratio, self.graph = memory_ratio, None if graph is None else check_flag("graph", graph)
        self.current_schedule: Schedule | None = None
        self.found_schedule: FoundSchedule | None = None
        self.times: dict[Action, tuple[float, float]] = {}
        self._runner: Runner | None = None
        self._stale: str | None = None
        self.saved: int | None = None
        self.should_stop = self._validates = False
        self._position: dict[str, int] = {}
        self._progress: tuple[Callback, ...] = ()
        if transport is None and (sharded or predictor is not None or note is not None):
            raise OptionError("sharded, predictor and note are for several ranks", expected="transport=",
                              got="transport=None")  # fmt: skip
        if predictor is not None and not isinstance(predictor, Predictor):
            raise OptionError("Not a predictor", expected="a sparsebp.optim.Predictor", got=shown(predictor),
                              remedy="Build one: MomentumPredictor(optimizer)")  # fmt: skip
        if note is not None:
            check_callable("note", note)
        if predictor is not None and predictor.optimizer is not optimizer:
            raise OptionError("The predictor is of another optimizer", expected="the trainer's optimizer",
                              got=f"another {type(predictor.optimizer).__name__}")  # fmt: skip
        self.predictor, self.note = predictor, note
        self.transport, self.sharded = transport, check_flag("sharded", sharded)
        self._leads = transport is None or transport.rank == 0
        self._seen: frozenset[str] | None = None  # with ranks: the events at which callbacks of rank 0 see the model
        self.clip_norm, self.checkpoint_every = clip_norm, checkpoint_every
        self.callbacks = tuple(callbacks)
        self.checkpoint_dir = None if checkpoint_dir is None else kept_path("checkpoint_dir", checkpoint_dir)
        self.config = checked_config(config or {})
        self.history = History()
        drawn = rng is None or isinstance(rng, np.random.Generator)
        self._seed_given = not drawn
        self.seed = int(np.random.default_rng(rng).integers(2**32)) if drawn else check_integer("rng", rng, 0)

    def fit(
        self,
        dataset: Dataset | Arrays,
        *,
        epochs: int,
        batch_size: int,
        validation: Dataset | Arrays | None = None,
        lengths: Any = None,
        resume: bool = False,
        verbose: bool | None = None,
    ) -> History:
        """Train for `epochs` epochs in all, and return the history.

        Parameters
        ----------
        dataset
            The training set; its order in epoch e is a function of (seed, e). Or arrays ``(x, target)`` or
            ``(x, target, lengths)`` with the sample first: NumPy, CuPy, or anything that ``numpy.asarray`` takes. `x`
            is converted to the model's dtype batch by batch; targets are integers or already have it. For a time-major
            `SequenceClassifier` the axes are exchanged.
        epochs
            Number of epochs in the whole run, including those before a resume.
        batch_size
            Samples of a step; the last step of an epoch takes the rest.
        validation
            A second set, or arrays, evaluated after every epoch.
        lengths
            Of arrays of sequences padded at the end: the valid steps of every sample, passed to the model's forward as
            ``lengths=``.
        resume
            Go on from the checkpoint in `checkpoint_dir`; from the beginning, if the run was killed before its first
            checkpoint.
        verbose
            Whether to show on standard error how far it is: a bar drawn by rich on a terminal, else (also without rich)
            one line an epoch. None: on a terminal, unless `callbacks` has a `ProgressBar`, or `JsonLines` on standard
            output, which show it themselves. On rank 0.

        Raises
        ------
        NonFiniteError
            A loss, gradient or parameter is NaN or infinite; the message names step and place. The last checkpoint
            stays.
        ScheduleError
            The schedule cannot run.
        OptionError, ShapeError, DTypeError
            The schedule does not fit the model, a number is out of range, the data set is empty or not one, `resume`
            comes without a folder, the model does not take lengths, a trained parameter has been replaced in the model,
            or the last step was broken off between updates.
        FileFormatError
            There is no run to resume, or its checkpoint is damaged, foreign, or of another run.
        OutputError
            The folder cannot be written, or another run is writing to it.
        """
        with telling(self.transport):
            if self._runner is not None:
                raise OptionError("This trainer is training already", expected="one fit at a time",
                                  got="fit within fit")  # fmt: skip
            training_set, held_out, shape, epochs = collective_call(
                self.transport, lambda: self._asked(dataset, validation, lengths, epochs, batch_size, resume, verbose)
            )
            self._progress = progress_of(verbose, self.callbacks)
            if self.transport is not None:
                agree(self, shape | {"epochs": epochs, "resume": resume, "validation samples": len(held_out or ())},
                      training_set, held_out)  # fmt: skip
            folder = self.checkpoint_dir if self._leads else None
            with run_folder(folder, resume=resume), training(self.model):
                return self._fit(training_set, held_out, epochs, shape, resume)

    def _asked(
        self, dataset: Any, validation: Any, lengths: Any, epochs: Any, batch_size: Any, resume: Any, verbose: Any
    ) -> tuple[Dataset, Dataset | None, dict[str, int], int]:
        """Check the arguments of `fit`; return both data sets, the sizes of a batch and of the set, and the epochs."""
        epochs, batch_size = check_integer("epochs", epochs, 0), check_integer("batch_size", batch_size, 1)
        training_set = as_dataset(dataset, self.model, lengths)
        held_out = None if validation is None else as_dataset(validation, self.model)
        if check_flag("resume", resume) and self.checkpoint_dir is None:
            raise OptionError("resume needs a folder", expected="checkpoint_dir", got=None)
        if verbose is not None:
            check_flag("verbose", verbose)
        return training_set, held_out, {"batch_size": batch_size, "samples": len(training_set)}, epochs

    def _fit(
        self, dataset: Dataset, validation: Dataset | None, epochs: int, shape: dict[str, int], resume: bool
    ) -> History:  # fmt: skip
        self._stale = collective_call(self.transport, lambda: staleness(self.schedule, self.accumulate, self.transport))
        resumed = self._resumed(shape) if resume else None
        if resumed is None:
            check_even(self.optimizer, trained_parameters(self.model, self.optimizer))
            self.history = History()
            self._check_parameters(0)
        epoch, batch = (0, 0) if resumed is None else resumed
        steps = -(-shape["samples"] // shape["batch_size"])
        self.should_stop, self._validates = False, validation is not None
        collective_call(self.transport, self._introduce)
        runner = self._runner = collective_call(self.transport, lambda: Runner(self))
        failed = True
        try:
            if resumed is None:  # now that nothing is refused any more: an earlier run's checkpoint makes room
                self._begin(shape)
            first = self.history.steps
            self._tell("start", RunInfo(epochs, steps, first, resumed=first > 0, graph=runner.captures(dataset)))
            for e in range(epoch, epochs):
                if self._stops():
                    break
                self._run_epoch(runner, dataset, validation, e, batch if e == epoch else 0, shape)
            self._tell("end", self.history)
            failed = False
        finally:
            try:
                runner.close(failed=failed)
            finally:
                self._runner = None
                self._tell("close")
        return self.history

    def _introduce(self) -> None:
        for callback in self.callbacks if self._leads else ():
            if hasattr(callback, "set_trainer"):
                callback.set_trainer(self)

    def _stops(self) -> bool:
        """Whether a callback of rank 0 has asked to stop; all ranks call this before every epoch."""
        if self.transport is not None:
            self.should_stop = self.transport.broadcast(self.should_stop)
        return self.should_stop

    def evaluate(
        self, dataset: Dataset | Arrays, *, batch_size: int = 100, lengths: Any = None
    ) -> tuple[float, float | None]:
        """Return the mean loss over `dataset` and, for class targets, the accuracy; all in evaluation mode.

        Parameters
        ----------
        dataset, lengths
            As in `fit`.
        batch_size
            Samples at a time.

        Raises
        ------
        OptionError, ShapeError, DTypeError
            As `fit`.
        """
        data = as_dataset(dataset, self.model, lengths)
        return self._mean(self._scores(data, batch_size))

    def _evaluate(self, dataset: Dataset, batch_size: int = 100) -> tuple[float, float | None]:
        """Do as `evaluate`; the batches are dealt out to the ranks."""
        if self.transport is None:
            return self.evaluate(dataset, batch_size=batch_size)
        rank, size = self.transport.rank, self.transport.size
        parts = self.transport.share(list(self._scores(dataset, batch_size, rank, size)))
        batches = -(-len(dataset) // batch_size)
        return self._mean(parts[number % size][number // size] for number in range(batches))

    def _scores(
        self, data: Dataset, batch_size: int, first: int = 0, each: int = 1
    ) -> Iterator[tuple[int, float, float]]:
        """Yield the number of samples, the loss and the accuracy of every batch."""
        for count, prediction, target in self._predictions(data, batch_size, first, each):
            value, _ = self.loss.forward(prediction, target)
            yield count, float(value), accuracy(prediction, target)

    @staticmethod
    def _mean(scores: Iterable[tuple[int, float, float]]) -> tuple[float, float | None]:
        total = correct = samples = 0.0
        for count, value, right in scores:
            total, correct, samples = total + value * count, correct + right * count, samples + count
        return total / samples, None if math.isnan(correct) else correct / samples

    def predict(self, x: Any, *, batch_size: int = 100, lengths: Any = None) -> Array:
        """Return the model's outputs for all samples, in evaluation mode, which leaves the model as it was.

        Parameters
        ----------
        x
            Inputs with the sample first, (N, …), as in `fit`.
        batch_size
            Samples at a time.
        lengths
            As in `fit`.

        Returns
        -------
        Array
            (N, …), the model's dtype; CuPy's if `x` is, else NumPy's.

        Raises
        ------
        OptionError, ShapeError, DTypeError
            As `fit`, or an output does not have one row per sample.
        """
        samples = np.shape(x)[0] if np.ndim(x) else 1
        data = as_dataset((x, np.zeros(samples, np.int64)), self.model, lengths)
        xp = backend.namespace(data.inputs)  # type: ignore[attr-defined]
        parts = []
        for count, prediction, _ in self._predictions(data, batch_size):
            if prediction.ndim == 0 or len(prediction) != count:
                raise ShapeError("The model's output has not one row a sample", expected=f"({count}, ...)",
                                 got=prediction.shape, remedy="Put the samples first")  # fmt: skip
            parts.append(backend.as_namespace(prediction, xp).copy())  # a layer may use its array again
        return xp.concatenate(parts)

    def _predictions(
        self, dataset: Dataset, batch_size: int, first: int = 0, each: int = 1
    ) -> Iterator[tuple[int, Array, Array]]:
        """Yield the samples, output and target of the batches `first`, `first + each`, …, in evaluation mode."""
        batch_size = check_integer("batch_size", batch_size, 1)
        self._flush()
        with evaluation(self.model):
            for start in range(first * batch_size, len(dataset), each * batch_size):
                indices = np.arange(start, min(start + batch_size, len(dataset)))
                batch = batch_of(dataset, indices, self.model)
                with inference_mode():
                    prediction, _ = forward_of(self.model, batch[0], **options_of(batch))
                yield len(indices), prediction, batch[1]

    def _run_epoch(
        self, runner: Runner, dataset: Dataset, validation: Dataset | None, epoch: int, first: int,
        shape: dict[str, int],
    ) -> EpochRecord:  # fmt: skip
        size = shape["batch_size"]
        order = epoch_order(len(dataset), seed=self.seed, epoch=epoch)
        steps = -(-len(dataset) // size)
        for batch in range(first, steps):
            indices = order[batch * size : (batch + 1) * size]
            parts = np.array_split(indices, min(self.accumulate, len(indices)))
            if reads_model(dataset):
                self._flush(wait=False)
            own: Any = runner.executor.own  # on a rank of replicas, its share of a micro-batch
            runner.step([share_of(dataset, part, own(part), self.model) for part in parts], epoch, len(indices))
            every = self.checkpoint_every
            if every is not None and runner.begun % every == 0 and batch + 1 < steps:
                self._save(epoch, batch + 1, shape)
        self._check_parameters(epoch)
        if self.transport is not None:
            self.history.seconds[-steps:] = self.transport.broadcast(self.history.seconds[-steps:])  # rank 0's
        result = None if validation is None else self._evaluate(validation)
        record = self.history.end_epoch(epoch, steps, result)
        if isinstance(self.lr_scheduler, ChainedScheduler) or getattr(self.lr_scheduler, "needs_metric", False):
            self.lr_scheduler.step(record.train_loss if result is None else result[0])
        self._save(epoch + 1, 0, shape)
        self._tell("epoch", record)
        return record

    def _resumed(self, shape: dict[str, int]) -> tuple[int, int] | None:
        """Load the folder's checkpoint, if there is one, and return the epoch and the batch to go on with."""
        folder = self.checkpoint_dir
        path = None if folder is None or not self._leads else folder / FILE_NAME
        checkpoint = collective_call(
            self.transport, lambda: load_checkpoint(path) if path is not None and path.exists() else None
        )
        if self.transport is not None:
            checkpoint = self.transport.broadcast(checkpoint)
        if checkpoint is None or folder is None:
            return None
        self.history = History()
        at: tuple[int, int] = collective_call(
            self.transport, lambda: restore(self, checkpoint, shape, folder / FILE_NAME)
        )
        self.saved, self._position = self.history.steps, dict(checkpoint.state["position"])
        return at

    def _begin(self, shape: dict[str, int]) -> None:
        """Write the first checkpoint of a run that starts anew."""
        if self.checkpoint_dir is not None and self._leads:
            set_aside(self.checkpoint_dir)
        self._save(0, 0, shape)

    def _save(self, epoch: int, batch: int, shape: dict[str, int]) -> None:
        self._position = shape | {"epoch": epoch, "batch": batch}
        if self.checkpoint_dir is None:
            return
        self._check_parameters(epoch)
        path = self.checkpoint_dir / FILE_NAME
        if self._leads:  # the other ranks keep track of `saved` as well
            save_checkpoint(path, pack(self, self._position))
        self.saved = self.history.steps
        self._tell("checkpoint", path)

    def _check_parameters(self, epoch: int) -> None:
        if self._runner is not None:
            self._runner.gather_state()
        names = nonfinite(self.model.parameters())
        if names:
            step = self.history.steps
            when = "before training" if step == 0 else f"after step {step - 1} (epoch {epoch + 1})"
            raise NonFiniteError(f"Parameters are not finite {when}", expected="finite parameters",
                                 got=f"NaN or infinity in {', '.join(names)}", remedy="Initialise or load the model "
                                 f"again, or lower the learning rate. {self._last_good()}")  # fmt: skip

    def _last_good(self) -> str:
        if self.checkpoint_dir is None or not (self.checkpoint_dir / FILE_NAME).exists():
            return "No checkpoint was written"
        return f"The last good checkpoint is {self.checkpoint_dir / FILE_NAME}"

    def _flush(self, *, wait: bool = True) -> None:
        """Run deferred updates; with `wait`, model and history then agree."""
        if self._runner is not None:
            self._runner.flush(wait=wait)

    def _tell(self, event: str, *args: Any) -> None:
        if self._sees(event) and self._runner is not None:
            self._runner.gather_state()

        def tell() -> None:
            for callback in (*self._progress, *self.callbacks) if self._leads else ():
                getattr(callback, f"on_{event}")(*args)

        tell_on_rank_0(self, event, tell)

    def _sees(self, event: str) -> bool:
        """Whether a callback (of rank 0, if there are several) looks at the model at this event."""
        if self._seen is not None:
            return event in self._seen
        return any(callback.sees_model(event) for callback in self.callbacks)
