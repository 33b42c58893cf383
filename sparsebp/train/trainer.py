"""The trainer: forward, loss, gradients, clipping, update; checkpoints from which losses continue bitwise equal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from sparsebp.comm.transport import Transport, check_callable
from sparsebp.core.absent import is_absent
from sparsebp.core.check import Array, Seed, check_flag, check_integer, check_positive
from sparsebp.core.errors import OptionError
from sparsebp.core.files import kept_path
from sparsebp.core.reprs import call_text, nested
from sparsebp.data.dataset import Dataset, epoch_order
from sparsebp.nn.deferred import absent_in
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.optim import Predictor
from sparsebp.optim.lr_schedules import EpochLoss, reads_model, takes_metric
from sparsebp.runtime.actions import Stages, check_even, trained_parameters
from sparsebp.runtime.agreement import collective_call
from sparsebp.runtime.forward import ForwardPipeline
from sparsebp.runtime.pipeline import Note, forget_initial_values, hold_stages
from sparsebp.runtime.search import MEMORY_RATIO
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import Fusion
from sparsebp.train.batches import as_dataset, origin_of, shape_of, share_of, steps_of, with_state
from sparsebp.train.by_stage import Holders, gathered, receive_checkpoint, save_by_stage, whole_on_rank_0
from sparsebp.train.callbacks import Callback, RunInfo, progress_of
from sparsebp.train.checkpoint import checked_config, live_state, open_checkpoint, pack, restore, save_checkpoint
from sparsebp.train.evaluation import (
    Metric,
    Scores,
    check_metrics,
    evaluation_batches,
    predictions,
    scores_of,
    whole_set,
)
from sparsebp.train.folder import run_folder
from sparsebp.train.history import EpochRecord, Evaluation, History
from sparsebp.train.identity import fingerprint, options_given
from sparsebp.train.loader import Loader
from sparsebp.train.monitors import ModelCheckpoint
from sparsebp.train.ranks import aborting_others, agree, notify_on_rank_0
from sparsebp.train.runner import Runner
from sparsebp.train.setup import (
    check_monitors,
    check_parts,
    check_predictor,
    check_ranks,
    check_replicas,
    check_schedule,
    schedule_names,
    scheduler_of,
    stages_by_rank,
    staleness,
)
from sparsebp.train.state import BEST_NAME, FILE_NAME, TrainingState, training

Arrays: TypeAlias = tuple[Any, Any] | tuple[Any, Any, Any]
"""Inputs and targets, or inputs, targets and lengths, with the sample first."""
Batches: TypeAlias = Iterable[Any] | Callable[..., Iterable[Any]]
"""Batches ``(x, target)``, or with lengths, with the sample first, or a function that returns them anew."""


class Trainer(TrainingState):
    """Trains a model, step by step.

    Parameters
    ----------
    model
        A layer (`sparsebp.nn.Layer`).
    loss
        ``forward(prediction, target) -> (value, saved)``, a mean over the batch, and ``input_grad(saved)``. What the
        mean divides by is ``count(target)``. Everything that averages (micro-batches, ranks, epochs, `evaluate`)
        weights means by these counts. A loss without it trains whole batches on one worker; `evaluate` counts samples.
    optimizer
        ``begin()``, ``lr``, ``state_dict``, ``load_state_dict``, as `sparsebp.optim.Optimizer` has them; built on
        ``model.parameters()`` or a part of them. The others stay as they are. A layer without trained parameters, and
        none in front of it, computes no gradients.
    lr_scheduler
        A schedule of `sparsebp.optim`, advanced after every step (`ReduceLROnPlateau`: after every epoch, with its
        `monitor`); a list is a `sparsebp.optim.ChainedScheduler`. None keeps the rate.
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
    metrics
        Further numbers of the validation set and of `evaluate`: functions ``metric(prediction, target) -> float`` by
        name, of the outputs and targets of *all* samples, concatenated, as NumPy arrays (so the whole set's outputs are
        in memory). They are in the records of the history as ``validation_<name>``, and so in JSON lines, checkpoints
        and progress; callbacks and `ReduceLROnPlateau` can monitor them.
    graph
        On a GPU, capture the step into a CUDA graph for each shape of batches, and replay it; each graph holds its own
        memory for a whole step. None and True capture what can be captured (dropout, lengths and scans over stored
        Jacobians cannot: they need the host during the step), False nothing. `RunInfo.graph` says what was done.
    callbacks
        See `sparsebp.train.callbacks`.
    checkpoint_dir
        Folder for checkpoints, created if necessary; a relative path is resolved when the trainer is made. None writes
        no checkpoints. A folder in which a run has been trained is refused, unless `fit` resumes it or is to overwrite
        it.
    checkpoint_every
        Steps between checkpoints within an epoch; one is always written before the first step and after every epoch.
        An evaluation (``epochs=0``) writes none.
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
    replicas
        How many pipelines of the schedule there are, each with an equal share of every micro-batch; their number
        divides that of the ranks. Ranks ``[0, n)`` are the first pipeline, of n = ranks ÷ replicas stages, ``[n, 2n)``
        the second, and so on. Gradients are summed over the pipelines while they still run backward, see
        `sparsebp.runtime.grid.GridExecutor`. For a synchronous schedule of a pipeline.
    sharded
        With data-parallel replicas, or replicas of pipelines: whether each rank keeps the optimizer's state of its own
        part only.
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
    may go on from it, also where its layers are grouped into other stages. Ranks share the evaluation after an epoch;
    `evaluate` and `predict` run where they are called. An error before the first step is raised on all ranks, which can
    go on with another `fit`; a rank that fails later ends the others with `TransportError`. An asynchronous schedule
    (``"pipedream"``, ``"dualpipe-2018"``) updates after each of the `accumulate` micro-batches; a step's loss and
    squared norm are their means.

    **A pipeline with the memory of its stages.** If the model was built within `sparsebp.nn.deferred_init`, a rank of a
    pipeline makes and keeps the parameters, gradients and optimizer state of its own stages alone. Rank 0 writes a
    checkpoint array by array, as the others send them; evaluations, `evaluate` and `predict` run through the pipeline,
    on all ranks together, which all get the result. Rank 0 gathers the whole model for callbacks that look at it
    (``reads_model``), and `gather_model` returns it there.

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
        metrics: Mapping[str, Metric] | None = None,
        graph: bool | None = None,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        rng: Seed = None,
        config: Mapping[str, Any] | None = None,
        transport: Transport | None = None,
        replicas: int = 1,
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
        check_schedule(fusion, accumulate, schedule, clip_norm)
        check_ranks(schedule, transport)
        pipeline_ranks, replica_ranks = check_replicas(replicas, schedule, transport)
        named = isinstance(schedule, Schedule) or schedule in schedule_names()
        if transport is None and (sharded or predictor is not None or note is not None):
            raise OptionError("sharded, predictor and note are for several ranks", expected="transport=",
                              got="transport=None")  # fmt: skip
        check_predictor(predictor, optimizer)
        if note is not None:
            check_callable("note", note)
        drawn = rng is None or isinstance(rng, np.random.Generator)
        super().__init__(
            model=model, loss=loss, optimizer=optimizer, lr_scheduler=scheduler_of(lr_scheduler, optimizer),
            clip_norm=clip_norm, fusion=fusion, accumulate=int(accumulate),
            schedule=schedule if named else kept_path("schedule", schedule), memory_ratio=memory_ratio,
            metrics=check_metrics(metrics), graph=None if graph is None else check_flag("graph", graph),
            callbacks=tuple(callbacks),
            checkpoint_dir=None if checkpoint_dir is None else kept_path("checkpoint_dir", checkpoint_dir),
            checkpoint_every=checkpoint_every, config=checked_config(config or {}), transport=transport,
            pipeline_ranks=pipeline_ranks, replica_ranks=replica_ranks,
            sharded=check_flag("sharded", sharded), predictor=predictor, note=note,
            seed=int(np.random.default_rng(rng).integers(2**32)) if drawn else check_integer("rng", rng, 0),
            seed_given=not drawn,
        )  # fmt: skip
        self._runner: Runner | None = None
        self._pipeline: tuple[Holders, ForwardPipeline] | None = None  # where ranks hold different parameters
        self._validation: dict[str, Any] = {}  # how batches of the validation set are made
        self._options_left: dict[str, Any] | None = None  # the options as the last fit has left them
        self._progress: tuple[Callback, ...] = ()

    def __repr__(self) -> str:
        """Show the options that are not the default, then model, loss and optimizer."""
        parts = ("model", "loss", "optimizer", "lr_scheduler")
        head = call_text(self, [*parts, "callbacks", "rng", "transport"])
        return nested(head, ((part, getattr(self, part)) for part in parts if getattr(self, part) is not None))

    def fit(
        self,
        dataset: Dataset | Arrays | Batches,
        *,
        epochs: int,
        batch_size: int | None = None,
        validation: Dataset | Arrays | Batches | None = None,
        lengths: Any = None,
        resume: bool = False,
        overwrite: bool = False,
        verbose: bool | None = None,
        drop_last: bool = False,
        shuffle: bool | None = None,
        validation_batch_size: int | None = None,
        stateful: bool = False,
    ) -> History:
        """Train for `epochs` epochs in all, and return the history.

        Another call trains the same model further, with the optimizer and the schedule as they are, and is a run of its
        own: epochs are numbered from 1 again, and `history` is a new one, which has the steps of the earlier calls as
        `History.earlier_steps` only. With ``resume=True`` the run in `checkpoint_dir` and its history go on.

        Parameters
        ----------
        dataset
            The training set; its order in epoch e is a function of (seed, e). Or arrays ``(x, target)`` or
            ``(x, target, lengths)`` with the sample first: NumPy, CuPy, or anything that ``numpy.asarray`` takes. `x`
            is converted to the model's dtype batch by batch; targets are integers or already have it. For a time-major
            `SequenceClassifier` the axes are exchanged. A map-style ``Dataset`` of PyTorch, of single samples.

            Or batches of such arrays in their own order and sizes: a list, a PyTorch ``DataLoader``, another iterable,
            or a function that returns one for every epoch, and may take the epoch's number, from 0. A generator serves
            for one epoch. All ranks must get the same batches. In a resumed epoch, batches trained on before are made
            again and left out; `OptionError`, if they are others now.
        epochs
            Number of epochs in the whole run, including those before a resume. With 0, no step is taken and no file
            is written.
        batch_size
            Samples of a step; the last step of an epoch takes the rest. Only batches that come made have none.
        validation
            A second set, or arrays, evaluated after every epoch. A function that takes the epoch's number gets 0.
        lengths
            Of arrays of sequences padded at the end: the valid steps of every sample, passed to the model's forward as
            ``lengths=``. If the model has an output for every step, (N, T, …), and the target one, (N, T, …), the loss
            sees the valid steps as rows, (M, …): padded ones do not count. Classes are then the last axis.
        resume
            Go on from the checkpoint in `checkpoint_dir`; from the beginning, if the run was killed before its first
            checkpoint. Options that losses depend on (of optimizer, schedule, loss and layers, `clip_norm`,
            `accumulate`, `config`) and the data must be those of the first call. Data sets of `sparsebp.data` and
            arrays are compared by some samples, others by their number of samples alone.
        overwrite
            Replace the files of an earlier run: the checkpoint and the best weights in `checkpoint_dir`, and those of
            `ModelCheckpoint`. Otherwise a run that starts anew is refused where they are.
        verbose
            Whether to show on standard error how far it is: a bar drawn by rich on a terminal, else (also without rich)
            one line per epoch. None: on a terminal and in a notebook, unless `callbacks` has a `ProgressBar`, or
            `JsonLines` on standard output, which show it themselves. On rank 0.
        drop_last
            Leave out an epoch's last batch if it is smaller than the others, as `torch.utils.data.DataLoader` does.
        shuffle
            Draw another order of the samples for every epoch. False: the order of the data set. None: True unless
            `stateful`.
        validation_batch_size
            Samples of `validation` at a time; the numbers depend on it by rounding only. None: 100; if `stateful`,
            `batch_size`.
        stateful
            Batches go on with the sequences of the last one, sample by sample: recurrent layers begin with the state in
            which they ended (`sparsebp.nn.CarriedState`), and no gradient goes back into the last batch. Every epoch,
            and every validation, begins with zeros; so does a sequence after `reset_states`, or where a batch says so
            by its fourth part: ``(x, target, lengths or None, reset)``, a bool or one for each sample. All batches have
            one size. On one rank; steps are not captured into CUDA graphs.

        Raises
        ------
        NonFiniteError
            A loss, gradient or parameter is NaN or infinite; the message names step and place: if it is in the data,
            row and column. Nothing counts in the loss of a step, or of the validation set: all is ignored, or the class
            weights sum to 0. The last checkpoint stays.
        ScheduleError
            The schedule cannot run.
        OptionError, ShapeError, DTypeError
            The schedule does not fit the model, a number is out of range, the data set is empty or not one, `resume`
            comes without a folder, the model does not take lengths, a trained parameter has been replaced in the model,
            or the last step was broken off between updates.
        FileFormatError
            There is no run to resume, or its checkpoint is damaged, foreign, or of another run, with other options or
            data.
        OutputError
            The folder cannot be written, another run is writing to it, or it holds an earlier run that is neither
            resumed nor overwritten.
        """
        with aborting_others(self.transport):
            if self._runner is not None:
                raise OptionError("This trainer is training already", expected="one fit at a time",
                                  got="fit within fit")  # fmt: skip
            batches = {"batch_size": batch_size, "drop_last": drop_last, "shuffle": shuffle, "stateful": stateful}
            training_set, held_out, shape, epochs = collective_call(
                self.transport, lambda: self._checked_arguments(
                    dataset, validation, lengths, epochs, batches, validation_batch_size, resume, overwrite, verbose
                )
            )  # fmt: skip
            self._progress = progress_of(verbose, self.callbacks)
            if self.transport is not None:
                held = 0 if held_out is None or isinstance(held_out, Loader) else len(held_out)
                agree(self, shape | {"epochs": epochs, "resume": resume, "overwrite": overwrite,
                      "validation samples": held, "validation_batch_size": validation_batch_size,
                      "metrics": list(self.metrics)}, training_set, held_out)  # fmt: skip
            self._hold()
            folder, self.has_steps = self.checkpoint_dir if self.leads else None, epochs > 0
            with run_folder(folder, resume=resume, overwrite=overwrite, writes=self.has_steps), training(self.model):
                collective_call(self.transport, lambda: self._describe(training_set, held_out))
                try:
                    return self._fit(training_set, held_out, epochs, shape, resume, overwrite)
                finally:
                    self._options_left = options_given(self)

    def _lacks(self) -> bool:
        return hasattr(self.model, "modules") and bool(absent_in([self.model]))

    def _hold(self) -> None:
        """Make the parameters that this rank holds of a model that was built without memory; all ranks call it."""
        transport, lacks = self.transport, self._lacks()
        self.apart = lacks if transport is None else any(transport.share(lacks))
        if not self.apart:
            self._pipeline = None
            return
        stages = Stages(self.model, trained_parameters(self.model, self.optimizer))
        by_rank = collective_call(transport, lambda: stages_by_rank(self, stages))
        own = by_rank[0 if transport is None else transport.rank]
        collective_call(transport, lambda: hold_stages(stages, self.optimizer, own))
        self.apart = len(set(map(tuple, by_rank))) > 1
        if self.pipeline_ranks is not None and self.apart and self._pipeline is None:
            by_rank = by_rank[: self.pipeline_ranks.size]
            ranks = [[rank for rank, some in enumerate(by_rank) if number in some] for number in range(len(stages))]
            stages = Stages(self.model, trained_parameters(self.model, self.optimizer))
            self._pipeline = (
                Holders(stages, ranks), ForwardPipeline(stages, [some[0] for some in ranks], self.pipeline_ranks)
            )  # fmt: skip

    @property
    def _holders(self) -> Holders | None:
        return None if self._pipeline is None else self._pipeline[0]

    def gather_model(self) -> dict[str, Any] | None:
        """Return the state of the whole model on rank 0, as ``model.state_dict()``, None elsewhere; all ranks call it.

        It has the memory of the whole model. Of ranks that hold their own stages alone it is the one place where all
        parameters meet: load it into a model that was built without `sparsebp.nn.deferred_init`.
        """
        self._hold()
        self._flush()
        holders = self._holders
        if holders is None:
            return dict(self.model.state_dict()) if self.leads else None
        found = gathered(self, holders, holders.entries(self, optimizer=False))
        if not self.leads:
            return None
        return {name: found.get(f"model.{name}", array) if is_absent(array) else array.copy()
                for name, array in live_state(self.model).items()}  # fmt: skip

    def _describe(self, dataset: Dataset | Loader, validation: Dataset | Loader | None) -> None:
        """Note what checkpoints say of the run: its options, as they were given, and its data."""
        now = options_given(self)
        if now != self._options_left:  # else: as training has moved them, by a callback that sets the rate, say
            self.options_given = now
        sets = {"training": dataset, "validation": validation}
        self.fingerprints = {
            f"{which}.{name}": numbers for which, some in sets.items() for name, numbers in fingerprint(some).items()
        }

    def _checked_arguments(
        self, dataset: Any, validation: Any, lengths: Any, epochs: Any, batches: dict[str, Any], held_size: Any,
        resume: Any, overwrite: Any, verbose: Any,
    ) -> tuple[Dataset | Loader, Dataset | Loader | None, dict[str, Any], int]:  # fmt: skip
        """Check the arguments of `fit`; return both data sets, how batches are made, and the epochs."""
        self.lr_scheduler = scheduler_of(self.lr_scheduler, self.optimizer)  # which may be another one since __init__
        check_predictor(self.predictor, self.optimizer)
        self.callbacks = tuple(sorted(self.callbacks, key=lambda one: isinstance(one, ModelCheckpoint)))  # saves others
        epochs = check_integer("epochs", epochs, 0)
        training_set = as_dataset(dataset, self.model, lengths)
        held_out = None if validation is None else as_dataset(validation, self.model, name="validation set")
        shape = shape_of(training_set, **batches)
        if any(isinstance(data, Loader) and data.once and epochs > 1 for data in (training_set, held_out)):
            raise OptionError("A generator can be gone through once", expected="epochs=1", got=epochs,
                              remedy="Pass the function that makes it, or a list of the batches")  # fmt: skip
        stateful = shape["stateful"]
        if stateful and self.transport is not None:
            raise OptionError("States are carried on one rank", expected="no transport", got="stateful=True")
        carried = [CarriedState(self.model) for _ in range(self.accumulate)] if stateful else None
        if held_size is not None:
            held_size = check_integer("validation_batch_size", held_size, 1)
        if held_out is not None:
            if held_size is None and not isinstance(held_out, Loader):
                held_size = shape["batch_size"] if stateful else 100
            self._validation = shape_of(
                held_out, batch_size=held_size, drop_last=False, shuffle=None, stateful=stateful
            )  # fmt: skip
        if check_flag("resume", resume) and self.checkpoint_dir is None:
            raise OptionError("resume needs a folder", expected="checkpoint_dir", got=None)
        if check_flag("overwrite", overwrite) and resume:
            raise OptionError("A run is resumed or overwritten", expected="one of resume and overwrite", got="both")
        if verbose is not None:
            check_flag("verbose", verbose)
        self.carried = carried
        return training_set, held_out, shape, epochs

    def _fit(
        self, dataset: Dataset | Loader, validation: Dataset | Loader | None, epochs: int, shape: dict[str, Any],
        resume: bool, overwrite: bool,
    ) -> History:  # fmt: skip
        self.asynchronous = collective_call(
            self.transport, lambda: staleness(self.schedule, self.accumulate, self.transport)
        )
        resumed = self._resumed(shape) if resume else None
        if resumed is None:
            check_even(self.optimizer, trained_parameters(self.model, self.optimizer))
            self._check_parameters(None)
            earlier, self.history = self.history, History()
            self.history.earlier_steps = earlier.earlier_steps + earlier.steps
        epoch, batch = (0, 0) if resumed is None else resumed
        steps = dataset.steps if isinstance(dataset, Loader) else steps_of(shape)
        self.should_stop, self.validates = False, validation is not None
        self.replaces = overwrite or resumed is not None
        collective_call(self.transport, self._set_trainer)
        collective_call(self.transport, lambda: check_monitors(self))
        runner = self._runner = collective_call(self.transport, lambda: Runner(self, partial(self._tell, "step")))
        failed = True
        try:
            if resumed is None and epochs and not isinstance(validation, Loader | None) and self._pipeline is None:
                self._try_validation(validation)
            if resumed is None and epochs:  # now that nothing is refused any more: an earlier run makes room
                self._begin(shape)
            first, before = self.history.steps, self.history.earlier_steps
            self._tell("start", RunInfo(epochs, steps, first, first > 0, runner.captures(dataset), before or None))
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
                self._runner = self.carried = None
                self._tell("close")
        return self.history

    def _set_trainer(self) -> None:
        for callback in self.callbacks if self.leads else ():
            if hasattr(callback, "set_trainer"):
                callback.set_trainer(self)

    def _stops(self) -> bool:
        """Whether a callback of rank 0 has asked to stop; all ranks call this before every epoch."""
        if self.transport is not None:
            self.should_stop = self.transport.broadcast(self.should_stop)
        return self.should_stop

    def reset_states(self) -> None:
        """Begin all sequences of ``fit(…, stateful=True)`` anew with the next batch: for callbacks.

        Raises
        ------
        OptionError
            No such fit is running.
        """
        if self._runner is None or self.carried is None:
            raise OptionError("There are no states to reset", expected="a fit with stateful=True under way", got="none")
        for carried in self.carried:
            carried.reset()

    def evaluate(
        self, dataset: Dataset | Arrays | Batches, *, batch_size: int | None = None, lengths: Any = None,
        stateful: bool = False,
    ) -> Evaluation:  # fmt: skip
        """Return the mean loss over `dataset` and, for class targets, the accuracy; all in evaluation mode.

        The mean is the loss of all samples in one batch, up to rounding, whatever `batch_size`: every batch has the
        weight of what counts in it (`sparsebp.nn.loss.Loss.count`). Accuracy leaves out positions that the loss
        ignores. Outputs and targets of all samples are kept only if the trainer has `metrics`.

        Parameters
        ----------
        dataset, lengths
            As in `fit`.
        batch_size
            Samples at a time; None: 100, or those of batches that come made.
        stateful
            As in `fit`, from zeros; with a `batch_size`.

        Returns
        -------
        Evaluation
            The tuple (loss, accuracy), with the attributes `loss`, `accuracy` and `metrics`. A loss that is not finite
            although the data are comes with a `RuntimeWarning` that says where it arises.

        Raises
        ------
        NonFiniteError
            An input or target is NaN or infinite, and the loss with it: the message names row and column. Or nothing
            counts in the loss of the whole set.
        OptionError, ShapeError, DTypeError
            As `fit`.
        """
        data = as_dataset(dataset, self.model, lengths)
        shape = evaluation_batches(data, batch_size, stateful)
        if self.apart or self._lacks():
            self._hold()
        self._flush()
        if self._pipeline is None:
            return whole_set(self, scores_of(self, data, shape, "the data set"))
        with aborting_others(self.transport):
            return whole_set(self, self._scores(data, shape, "the data set"))

    def predict(
        self, x: Any, *, batch_size: int | None = None, lengths: Any = None, stateful: bool = False
    ) -> Array:  # fmt: skip
        """Return the model's outputs for all samples, in evaluation mode, which leaves the model as it was.

        Parameters
        ----------
        x
            Inputs with the sample first, (N, …), as in `fit`. Or arrays ``(x, target)``, a data set or batches as in
            `fit`, whose targets are not read; data sets and batches may be of inputs alone. A list is an array, unless
            it is of tuples of arrays, which are batches.
        batch_size, stateful
            As in `evaluate`.
        lengths
            As in `fit`. If the output has steps, those past a sample's end are 0.

        Returns
        -------
        Array
            (N, …), the model's dtype; CuPy's if `x` is, else NumPy's. Where an output is not finite because an input is
            not, a `RuntimeWarning` names row and column, since the other rows are right; where it is NaN although the
            inputs are finite, the layer.

        Raises
        ------
        OptionError, ShapeError, DTypeError
            As `fit`, or an output does not have one row per sample.
        """
        data = as_dataset(x, self.model, lengths, targets=False)
        shape = evaluation_batches(data, batch_size, stateful)
        if self.apart or self._lacks():
            self._hold()
        self._flush()
        if self._pipeline is None or self.pipeline_ranks is None:
            return predictions(self.model, data, shape)
        pipeline = self._pipeline[1]
        with aborting_others(self.transport):
            return self.pipeline_ranks.broadcast(predictions(self.model, data, shape, pipeline), pipeline.last)

    def _scores(self, data: Dataset | Loader, shape: dict[str, Any], name: str) -> list[Scores]:
        """Return the numbers of all batches, on all ranks, which run their own stages of each."""
        pipeline: Any = self._pipeline and self._pipeline[1]
        own = scores_of(self, data, shape, name, pipeline=pipeline)
        found: list[Scores] = self.pipeline_ranks.broadcast(own, pipeline.last)  # type: ignore[union-attr]
        return found

    def _run_epoch(
        self, runner: Runner, dataset: Dataset | Loader, validation: Dataset | Loader | None, epoch: int, first: int,
        shape: dict[str, Any],
    ) -> EpochRecord:  # fmt: skip
        steps, last = first, steps_of(shape)
        if self.carried is not None and first == 0:
            self.reset_states()
        for source, indices in self._batches(dataset, epoch, first, shape):
            steps += 1
            parts = np.array_split(indices, min(self.accumulate, len(indices)))
            own: Any = runner.executor.own  # on a rank of replicas, its share of a micro-batch
            batches = [share_of(source, part, own(part), self.model) for part in parts]
            states: Sequence[CarriedState | None] = self.carried or [None] * len(parts)
            batches = [with_state(batch, state) for batch, state in zip(batches, states, strict=False)]
            origins = [origin_of(dataset, own(part), self.model) for part in parts]
            runner.step(batches, epoch, len(indices), origins)
            every = self.checkpoint_every
            if every is not None and runner.begun % every == 0 and steps != last:
                self._save(epoch, steps, shape, dataset)
        self._check_parameters(epoch)
        record = runner.end_epoch(steps, None if validation is None else self._validated(validation))
        if takes_metric(self.lr_scheduler):
            self.lr_scheduler.step(EpochLoss(record.to_json()))
        self.position = shape | {"epoch": epoch + 1, "batch": 0}
        self._tell("epoch", record)  # first: the checkpoint holds what callbacks change
        self._save(epoch + 1, 0, shape)
        return record

    def _try_validation(self, validation: Dataset) -> None:
        """Evaluate one batch before the first step: what does not fit must not cost an epoch."""
        shape = self._validation
        collective_call(
            self.transport, lambda: scores_of(self, validation, shape, "the validation set", each=len(validation))
        )

    def _validated(self, validation: Dataset | Loader) -> Evaluation:
        """Evaluate the validation set: its batches are dealt out to the ranks, those of a loader to rank 0."""
        self._tell("validation_start")
        rank, size = (0, 1) if self.transport is None else (self.transport.rank, self.transport.size)
        size = 1 if isinstance(validation, Loader) else size
        if self._pipeline is not None:
            scores = self._scores(validation, self._validation, "the validation set")
            result = collective_call(self.transport, lambda: whole_set(self, scores))
            self._tell("validation_end")
            return result
        own = scores_of(self, validation, self._validation, "the validation set", rank, size) if rank < size else []
        if self.transport is None:
            result = whole_set(self, own)
        else:
            parts = self.transport.share(own)
            scores = [parts[number % size][number // size] for number in range(sum(map(len, parts)))]
            whole = collective_call(self.transport, lambda: whole_set(self, scores) if self.leads else None)
            result = self.transport.broadcast(whole)
        self._tell("validation_end")
        return result

    def _batches(
        self, data: Dataset | Loader, epoch: int, first: int, shape: dict[str, Any]
    ) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield the data set and the samples of each batch of an epoch, from number `first` on."""
        if isinstance(data, Loader):
            batches: Iterator[Any] = data.rest_of(epoch, first, self.position.get("checksum", ""), self.transport)
        else:
            order = epoch_order(len(data), seed=self.seed, epoch=epoch) if shape["shuffle"] else np.arange(len(data))
            size = shape["batch_size"]
            batches = (order[batch * size : (batch + 1) * size] for batch in range(first, steps_of(shape) or 0))
        while True:
            if reads_model(data):
                self._flush(wait=False)
            batch = next(batches, None)
            if batch is None:
                return
            yield (batch, np.arange(len(batch))) if isinstance(data, Loader) else (data, batch)

    def _resumed(self, shape: dict[str, Any]) -> tuple[int, int] | None:
        """Load the folder's checkpoint, if there is one, and return the epoch and the batch to go on with."""
        folder = self.checkpoint_dir
        path = None if folder is None or not self.leads else folder / FILE_NAME
        with contextlib.ExitStack() as stack:
            file = collective_call(
                self.transport,
                lambda: stack.enter_context(open_checkpoint(path)) if path is not None and path.exists() else None,
            )
            checkpoint = receive_checkpoint(self, file)
        if checkpoint is None or folder is None:
            return None
        at: tuple[int, int] = collective_call(
            self.transport, lambda: restore(self, checkpoint, shape, folder / FILE_NAME)
        )
        if self.apart:
            forget_initial_values(self.model)
        self.saved, self.position = self.history.steps, dict(checkpoint.state["position"])
        return at

    def _begin(self, shape: dict[str, Any]) -> None:
        """Write the first checkpoint of a run that starts anew."""
        self._save(0, 0, shape)
        if self.checkpoint_dir is not None and self.leads:
            (self.checkpoint_dir / BEST_NAME).unlink(missing_ok=True)

    def _save(self, epoch: int, batch: int, shape: dict[str, Any], data: Any = None) -> None:
        if self._runner is not None:
            self._runner.check_parts()
        self.position = shape | {"epoch": epoch, "batch": batch}
        if isinstance(data, Loader) and data.last is not None:
            self.position["checksum"] = data.last.checksum
        if self.checkpoint_dir is None:
            return
        self._check_parameters(epoch)
        path = self.checkpoint_dir / FILE_NAME
        if self._holders is not None:
            save_by_stage(self, self._holders, path)
        elif self.leads:  # the other ranks keep track of `saved` as well
            save_checkpoint(path, pack(self))
        self.saved = self.history.steps
        self._tell("checkpoint", path)

    def _check_parameters(self, epoch: int | None) -> None:
        if self._runner is not None:
            self._runner.gather_state()
        self.check_finite(epoch)

    def _flush(self, *, wait: bool = True) -> None:
        """Run deferred updates; with `wait`, model and history then agree."""
        if self._runner is not None:
            self._runner.flush(wait=wait)

    def _tell(self, event: str, *args: Any) -> None:
        sees = self.sees(event) and self._runner is not None
        if sees and self._runner is not None:
            self._runner.gather_state()

        def tell() -> None:
            for callback in (*self._progress, *self.callbacks) if self.leads else ():
                getattr(callback, f"on_{event}")(*args)

        holders = self._holders if sees else None
        with whole_on_rank_0(self, holders):
            notify_on_rank_0(self, event, tell, holders)
