"""The trainer: forward, loss, gradients, clipping, update; checkpoints that continue bit for bit."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_integer, forward_of
from sparsebp.core.errors import NonFiniteError, OptionError, ShapeError
from sparsebp.data.dataset import Dataset, epoch_order
from sparsebp.nn.layer import inference_mode
from sparsebp.optim.lr_schedules import ChainedScheduler, reads_model
from sparsebp.runtime.actions import Batch, Stages, Step, Watch, check_even, check_live, options_of, trained_parameters
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.graphs import LENGTHS
from sparsebp.runtime.launch import together
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.runtime.search import SCHEDULE_NAME, OutOfOrderExecutor
from sparsebp.train.callbacks import EpochRecord, History, RunInfo
from sparsebp.train.checkpoint import (
    FILE_NAME,
    evaluation,
    load_checkpoint,
    run_folder,
    save_checkpoint,
    set_aside,
    training,
)
from sparsebp.train.data import as_dataset, batch_of, share_of
from sparsebp.train.ranks import (
    Training,
    agree,
    buffers_of_rank_0,
    earlier_schedule,
    executor_of,
    seconds_of_rank_0,
    staleness,
    telling,
)
from sparsebp.train.state import pack, restore

# Finding what is not finite, and saying where: the step, and the parameter or layer.


def nonfinite(arrays: Mapping[str, Array]) -> list[str]:
    """Return the names of the arrays that hold a NaN or an infinity."""
    found = []
    for name, array in arrays.items():
        xp = backend.namespace(array)
        if not bool(xp.isfinite(array).all()):  # synchronize!
            found.append(name)
    return found


def gradient_error(step: int, epoch: int, grads: Mapping[str, Array], last_good: str) -> NonFiniteError:
    """Return the exception for a gradient that is not finite."""
    names = nonfinite(grads)
    return NonFiniteError(f"The gradient is not finite at step {step} (epoch {epoch + 1})", expected="finite gradients",
                          got=f"NaN or infinity in {', '.join(names)}", remedy="Lower the learning rate, clip the "
                          f"gradient's norm, or use float64. {last_good}")  # fmt: skip


def check_counted(loss: Any, target: Array, step: int, epoch: int, last_good: str) -> None:
    """Refuse a batch, micro-batch or rank's share whose mean loss is NaN because it is one of nothing."""
    ignored = getattr(loss, "ignore_index", None)
    if ignored is None or target.dtype.kind not in "iu" or not bool((target == ignored).all()):  # synchronize!
        return
    raise NonFiniteError(f"The loss ignores a whole batch, micro-batch or rank's share at step {step} (epoch "
                         f"{epoch + 1})", expected="a position that counts",
                         got=f"ignore_index={ignored} at all {target.size} positions", remedy="Leave such samples out, "
                         "or use larger batches, fewer micro-batches (accumulate=) or fewer ranks. "
                         f"{last_good}")  # fmt: skip


def parameter_error(step: int, epoch: int, names: list[str], last_good: str) -> NonFiniteError:
    """Return the exception for parameters that are not finite, before step 0 or after an update."""
    when = "before training" if step == 0 else f"after step {step - 1} (epoch {epoch + 1})"
    return NonFiniteError(
        f"Parameters are not finite {when}", expected="finite parameters", got=f"NaN or infinity in {', '.join(names)}",
        remedy=f"Initialise or load the model again, or lower the learning rate. {last_good}"
    )  # fmt: skip


def loss_error(
    step: int, epoch: int, value: float, model: Any, x: Array, target: Array, prediction: Array | None, last_good: str
) -> NonFiniteError:
    """Return the exception for a loss that is not finite, naming the first place where finiteness is lost."""
    # The order of the search is that of the computation: parameters, the batch, the model's layers, the loss itself. No
    # `prediction` means that parameters have been updated since: what they were is not known any more.
    return NonFiniteError(f"The loss is not finite at step {step} (epoch {epoch + 1})", expected="a finite loss",
                          got=f"{value}; {_where(model, x, target, prediction)}", remedy="Lower the learning rate, "
                          f"clip the gradient's norm, or use float64. {last_good}")  # fmt: skip


def _where(model: Any, x: Array, target: Array, prediction: Array | None) -> str:
    if prediction is None:
        return _where_by_now(model, x, target)
    names = nonfinite(model.parameters())
    if names:
        return f"NaN or infinity in the parameters {', '.join(names)}"
    if nonfinite({"x": x}):
        return "NaN or infinity in the batch's input"
    if nonfinite({"prediction": prediction}):
        return f"NaN or infinity in the output of {_first_layer(model, x)}, with finite parameters"
    if target.dtype.kind == "f" and nonfinite({"target": target}):
        return "NaN or infinity in the batch's target"
    return f"the model's output is finite, the loss overflows (largest output {float(abs(prediction).max()):g})"


def _where_by_now(model: Any, x: Array, target: Array) -> str:
    if nonfinite({"x": x}):
        return "NaN or infinity in the batch's input"
    if target.dtype.kind == "f" and nonfinite({"target": target}):
        return "NaN or infinity in the batch's target"
    names = nonfinite(model.parameters())
    since = f"; since then it has come to the parameters {', '.join(names)}" if names else ""
    return f"the batch is finite, so that the model or the loss overflows{since}"


def _first_layer(model: Any, x: Array) -> str:
    """Return the name of the innermost layer whose output is the first not to be finite, in a forward's order."""
    # Layers are watched while the batch runs once more, in whatever way the model calls them.
    if not hasattr(model, "modules"):
        return "the model"
    found: list[str] = []
    watched: list[Any] = []
    for name, layer in model.modules():
        if any(layer is other for other in watched):
            continue  # a shared layer has its first name
        watched.append(layer)
        layer.forward = _watch(layer.forward, name or "the model", found)
    try:
        model.forward(x)
    finally:
        for layer in watched:
            del layer.forward  # the instance attribute goes, the class's method is seen again
    return found[0] if found else "the model"


def _watch(forward: Any, name: str, found: list[str]) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        y, saved = forward(*args, **options)
        if nonfinite({name: y}):
            found.append(name)
        return y, saved

    return watched


# Binds an executor to a trainer: batches in, history and callbacks out, errors that say where.


@dataclass(frozen=True)
class _Tag:
    """Which step it is: its number, epoch, learning rate and samples, and when it began."""

    number: int
    epoch: int
    lr: float
    started: float
    samples: int


class Runner(Watch):
    """Runs the steps of one `Trainer.fit`."""

    # begun: Number of steps begun; the history may be one behind.

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
        """Run one step, and record and tell what is known by then."""
        # `samples` is their number on all ranks together, where that is not the batches'.
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
        """Do what is left over, and end the threads."""
        # After an error what is left over may fail as well: the first error is the one to tell. Other ranks are not
        # there to do it together.
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
            check_counted(self.trainer.loss, target, tag.number, tag.epoch, self.trainer._last_good())
            raise loss_error(
                tag.number, tag.epoch, value, self.trainer.model, x, target, prediction, self.trainer._last_good()
            )

    def gradients(self, step: Step, grads: dict[str, Array]) -> None:
        """Stop: a gradient is not finite."""
        raise gradient_error(step.tag.number, step.tag.epoch, grads, self.trainer._last_good())


def accuracy(prediction: Array, target: Array) -> float:
    """Return the share of places whose largest entry is at the target; NaN for targets that are not classes."""
    # The classes are on axis 1, as losses have them, or last if only that fits. Ignored places count as wrong.
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


Arrays: TypeAlias = tuple[Any, Any] | tuple[Any, Any, Any]
"""Inputs and targets, or inputs, targets and lengths, with the sample first."""


class Trainer(Training):
    """Trains a model, step by step.

    Parameters
    ----------
    model
        A layer (`sparsebp.nn.Layer`): ``forward``, ``weight_grad``, ``parameters``, ``state_dict``…
    loss
        ``forward(prediction, target) -> (value, saved)`` with the mean over the batch, and ``input_grad(saved)``.
    optimizer
        ``begin()``, ``lr``, ``state_dict``, ``load_state_dict``, as `sparsebp.optim.Optimizer` has them; built on
        ``model.parameters()``, or on a part of them: the others stay as they are, and where no parameter of a layer is
        trained, or of those in front of it, its gradients are not computed.
    lr_scheduler
        A learning-rate schedule of `sparsebp.optim`, advanced after every step; None keeps the rate.
        `ReduceLROnPlateau` is advanced after every epoch, with the validation loss (without one, the training loss).
        A list of schedules is a `sparsebp.optim.ChainedScheduler`.
    clip_norm
        Largest Euclidean norm of the gradients of all that is trained together; None does not clip.
    fusion
        Where the optimizer's updates go (Jiang et al., "Optimizer fusion", 2021); the results are the same.
        ``"none"``: after all gradients, in one call. ``"forward"``: each right before the parameter's next use, and
        before anything else could see it: evaluation, checkpoints, the end of `fit` in whichever way, and callbacks,
        data sets and learning-rate schedules unless their class says ``reads_model = False`` (then nothing is gained).
        ``"backward"``: each as soon as its gradient is complete and nothing reads the old value, and the gradient's
        memory is given back at once; not with `clip_norm`, which needs all gradients. If such a step fails half-way,
        some parameters have had their update and others not; the next `fit` refuses to go on from there.
    accumulate
        Micro-batches that a step's samples are split into, one after the other: the memory of a smaller batch, with
        the gradients of the mean over the whole one (layers that look at a batch as a whole, as `BatchNorm2d`, see
        the micro-batches).
    schedule
        The order of a step's actions: ``"conventional"``, ``"ooo"`` (weight gradients on a second stream, out of
        order; Oh et al. 2022), a `sparsebp.schedule.Schedule` of one worker, or the path of one in action CSV. All but
        the first place the updates themselves, so `fusion` stays ``"none"``. ``"ooo"`` measures the first steps and
        keeps the fastest of several orders, the conventional one included, see `OutOfOrderExecutor`; it is kept for
        further calls of `fit`, and in `checkpoint_dir` as ``schedule.csv`` for further runs.
    memory_ratio
        With ``"ooo"``: bound for the simulated peak of memory, as a multiple of the conventional schedule's.
    graph
        On a GPU, capture the step into a CUDA graph and replay it, one graph for each shape of batches (a last, smaller
        batch runs as ever). Each graph has a step's memory of its own. None captures on a GPU what can be captured,
        True as well, False nothing. `RunInfo.graph` says if it is done, or why not: dropout, lengths and scans over
        stored Jacobians need the host during the step.
    callbacks
        See `sparsebp.train.callbacks`.
    checkpoint_dir
        Folder for checkpoints, created if need be; None writes none. A relative path is one of the folder that is the
        current one now, also if another one is later. A run that starts anew keeps the checkpoint of
        an earlier run beside its own as ``checkpoint.previous.safetensors``.
    checkpoint_every
        Steps between checkpoints within an epoch; one is written before the first step and after every epoch anyway.
    rng
        A seed or a `numpy.random.Generator`: the order of the samples is a function of it. None takes fresh entropy.
    config
        What else describes the run, in JSON types; it is kept in the checkpoint and must be equal on resume.
        Tuples count as lists, as in JSON.
    transport
        Between several ranks, each of which makes the same trainer, on the same model from the same seed, and calls
        `fit` with the same arguments. `schedule` then says who does what: a `Schedule` of as many workers, or the name
        of a builder (``"1f1b"``, ``"gpipe"``, ``"zb-h1"``, ``"pipedream"``, …), which makes it for the model's stages,
        with `accumulate` micro-batches; or ``"data-parallel"``: every rank has a share of each step's samples; or
        ``"reverse-first-k"``, which does, with the most urgent sums first. See "Several ranks" below.
    sharded
        With data-parallel replicas: whether each rank keeps the optimizer's state of its own part of the parameters
        alone.
    predictor, note
        With an asynchronous schedule: whose weights are read, and who is told how far they were from those that came;
        see `sparsebp.runtime.pipeline.PipelineExecutor`. The predictor's state is part of checkpoints.

    Attributes
    ----------
    current_schedule
        The schedule that steps run by now, or ran by last; None before `fit`.
    found_schedule
        With ``schedule="ooo"``: what was found, and what was measured; None until then.
    saved
        How many steps had been taken when the last checkpoint was written, or the one that `fit` went on from; on all
        ranks. None until then.
    times
        After `fit` by a pipeline's schedule: when the actions of this rank ran, in the last whole step; for
        `sparsebp.runtime.launch.measured`.

    Raises
    ------
    OptionError
        An option is of another type or out of range, `fusion` or `schedule` is unknown or does not go with the other
        options, the optimizer's parameters are not those that the model computes with, or `lr_scheduler` is of another
        optimizer.

    Notes
    -----
    On a GPU the host reads the numbers of a step when it has given the next one to the device, so that neither waits
    for the other: history and callbacks that do not look at the model are one step behind until the epoch ends. An
    error that a loss or a gradient is not finite, or that a class is not there, names its step; parameters have had
    that update and the next one by then. Whatever looks at the model (evaluation, checkpoints, callbacks without
    ``reads_model = False``) comes after all numbers have been read.

    **Several ranks.** Every rank has the whole model and computes its part of a step. Before anything that looks at the
    model (evaluation, checkpoints, callbacks) and at the end of `fit`, all of it is brought up to date on all ranks.
    The history is the same on all; its seconds are rank 0's, which the others take over when an epoch ends. Callbacks
    are called, and checkpoints written, on rank 0; a checkpoint is of the whole model, and any number of ranks, or
    none, may go on from it. Ranks share the evaluation after an epoch; `evaluate` and `predict` run where they are
    called. What is wrong before the first step is raised on all ranks, which can go on with another `fit`; a rank that
    fails later ends the others with `TransportError`. An asynchronous schedule (``"pipedream"``, ``"dualpipe-2018"``)
    makes an update after each of the `accumulate` micro-batches, each of which is a batch of its own to it; a step's
    loss and squared norm are their means.

    `fit` trains a model that is in evaluation mode as a whole in training mode; of one in training mode, layers that
    have been put into evaluation (``model[1].eval()``) stay so. All modes are afterwards what they were.
    """

    # ---- the public calls ----------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset | Arrays,
        *,
        epochs: int,
        batch_size: int,
        validation: Dataset | Arrays | None = None,
        lengths: Any = None,
        resume: bool = False,
    ) -> History:
        """Train for `epochs` epochs in all, and return the history.

        Parameters
        ----------
        dataset
            The training set; its order in epoch e is a function of (seed, e). Or arrays ``(x, target)``, or ``(x,
            target, lengths)``, with the sample first: NumPy, CuPy, or what ``numpy.asarray`` takes. `x` is converted to
            the model's dtype batch by batch; targets are integers, or have it already. Where a `SequenceClassifier` is
            time-major, the axes are exchanged.
        epochs
            Number of epochs of the whole run, those done before a resume included.
        batch_size
            Samples of a step; the last step of an epoch takes what is left.
        validation
            A second set, or arrays, evaluated after every epoch.
        lengths
            Of arrays of sequences padded at the end: the valid steps of every sample. The model's forward gets those of
            a batch as ``lengths=``.
        resume
            Go on from the checkpoint in `checkpoint_dir`. If there is none yet because the run was killed before the
            first could be written, training starts at the beginning; where no run ever began, it is refused.

        Raises
        ------
        NonFiniteError
            A loss, a gradient or a parameter is NaN or infinite; the message names the step and the place. The last
            good checkpoint is left as it was.
        ScheduleError
            The schedule cannot run.
        OptionError, ShapeError, DTypeError
            The schedule is not one of the model, a number is no integer or out of range, the data set is empty or none,
            `resume` comes without a folder, or the model does not take lengths. A parameter that the optimizer trains
            has been replaced in the model, before or by a callback, or the last step was broken off between updates.
        FileFormatError
            There is no run to resume, or its checkpoint is damaged, foreign, or of another run.
        OutputError
            The folder cannot be written, or another run is writing to it.
        """
        with telling(self.transport):
            if self._runner is not None:
                raise OptionError("This trainer is training already", expected="one fit at a time",
                                  got="fit within fit")  # fmt: skip
            training_set, held_out, shape, epochs = together(
                self.transport, lambda: self._asked(dataset, validation, lengths, epochs, batch_size, resume)
            )
            if self.transport is not None:
                agree(self, shape | {"epochs": epochs, "resume": resume, "validation samples": len(held_out or ())},
                      training_set, held_out)  # fmt: skip
            folder = self.checkpoint_dir if self._leads else None
            with run_folder(folder, resume=resume), training(self.model):
                return self._fit(training_set, held_out, epochs, shape, resume)

    def _fit(
        self, dataset: Dataset, validation: Dataset | None, epochs: int, shape: dict[str, int], resume: bool
    ) -> History:  # fmt: skip
        self._stale = together(self.transport, lambda: staleness(self.schedule, self.accumulate, self.transport))
        found = self._resumed(shape) if resume else None
        if found is None:
            check_even(self.optimizer, trained_parameters(self.model, self.optimizer))
            self.history = History()
            self._check_parameters(0)
        epoch, batch = (0, 0) if found is None else found
        steps = -(-shape["samples"] // shape["batch_size"])
        runner = self._runner = together(self.transport, lambda: Runner(self))
        failed = True
        try:
            if found is None:  # now that nothing is refused any more: an earlier run's checkpoint makes room
                self._begin(shape)
            first = self.history.steps
            self._tell("start", RunInfo(epochs, steps, first, resumed=first > 0, graph=runner.captures(dataset)))
            for e in range(epoch, epochs):
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

    def evaluate(
        self, dataset: Dataset | Arrays, *, batch_size: int = 100, lengths: Any = None
    ) -> tuple[float, float | None]:
        """Return the mean loss over `dataset` and, for class targets, the share of samples classified right.

        Layers are in evaluation mode meanwhile, and have their own modes again afterwards.

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
        """Return what `evaluate` does; ranks take turns at the batches."""
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
        """Return the model's outputs for all samples, in evaluation mode.

        Nothing else changes: afterwards layers have their own modes again, running statistics and random generators are
        as they were.

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
            As `fit`, or an output has not one row a sample.
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
        """Yield the number of samples, the model's output in evaluation mode and the target of every batch."""
        # Of the batches from `first` on, one in `each`.
        batch_size = check_integer("batch_size", batch_size, 1)
        self._flush()
        with evaluation(self.model):
            for start in range(first * batch_size, len(dataset), each * batch_size):
                indices = np.arange(start, min(start + batch_size, len(dataset)))
                batch = batch_of(dataset, indices, self.model)
                with inference_mode():
                    prediction, _ = forward_of(self.model, batch[0], **options_of(batch))
                yield len(indices), prediction, batch[1]

    # ---- one epoch, one step -------------------------------------------------------------------------------------

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
            runner.step([share_of(dataset, part, runner.own(part), self.model) for part in parts], epoch, len(indices))
            every = self.checkpoint_every
            if every is not None and runner.begun % every == 0 and batch + 1 < steps:
                self._save(epoch, batch + 1, shape)
        self._check_parameters(epoch)
        if self.transport is not None:
            seconds_of_rank_0(self.transport, self.history, steps)
        result = None if validation is None else self._evaluate(validation)
        record = self.history.end_epoch(epoch, steps, result)
        if isinstance(self.lr_scheduler, ChainedScheduler) or getattr(self.lr_scheduler, "needs_metric", False):
            self.lr_scheduler.step(record.train_loss if result is None else result[0])
        self._save(epoch + 1, 0, shape)
        self._tell("epoch", record)
        return record

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _resumed(self, shape: dict[str, int]) -> tuple[int, int] | None:
        """Take the state of the folder's checkpoint; return the epoch and the batch to go on with, None without one."""
        folder = self.checkpoint_dir
        path = None if folder is None or not self._leads else folder / FILE_NAME
        found = together(self.transport, lambda: load_checkpoint(path) if path is not None and path.exists() else None)
        if self.transport is not None:
            found = self.transport.broadcast(found)
        if found is None or folder is None:
            return None
        self.history = History()
        at: tuple[int, int] = together(self.transport, lambda: restore(self, found, shape, folder / FILE_NAME))
        self.saved = self.history.steps
        return at

    def _begin(self, shape: dict[str, int]) -> None:
        """Write the first checkpoint of a run that starts anew."""
        if self.checkpoint_dir is not None and self._leads:
            set_aside(self.checkpoint_dir)
        self._save(0, 0, shape)

    def _save(self, epoch: int, batch: int, shape: dict[str, int]) -> None:
        if self.checkpoint_dir is None:
            return
        self._check_parameters(epoch)
        path = self.checkpoint_dir / FILE_NAME
        if self._leads:  # the others come past here as well: on each it is known which step the checkpoint is of
            save_checkpoint(path, pack(self, shape | {"epoch": epoch, "batch": batch}))
        self.saved = self.history.steps
        self._tell("checkpoint", path)

    def _check_parameters(self, epoch: int) -> None:
        if self._runner is not None:
            self._runner.whole()
        names = nonfinite(self.model.parameters())
        if names:
            raise parameter_error(self.history.steps, epoch, names, self._last_good())
