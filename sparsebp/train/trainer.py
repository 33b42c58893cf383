"""The training loop: forward, loss, weight gradients, clipping, update; with checkpoints that continue bit for bit."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.data.dataset import Dataset, epoch_order
from sparsebp.errors import OptionError, ShapeError
from sparsebp.files import prepare_folder
from sparsebp.schedule import Schedule
from sparsebp.train import finite
from sparsebp.train.callbacks import Callback, RunInfo
from sparsebp.train.candidates import FoundSchedule
from sparsebp.train.checkpoint import FILE_NAME, PREVIOUS_NAME, load_checkpoint, save_checkpoint
from sparsebp.train.history import EpochRecord, History
from sparsebp.train.orders import Fusion, check_order
from sparsebp.train.out_of_order import MEMORY_CAP
from sparsebp.train.runner import Runner, accuracy
from sparsebp.train.state import pack, restore
from sparsebp.types import Array, Seed


class Trainer:
    """Trains a model, step by step.

    Parameters
    ----------
    model
        A layer (`sparsebp.nn.Layer`): ``forward``, ``weight_grad``, ``parameters``, ``state_dict``…
    loss
        ``forward(prediction, target) -> (value, saved)`` with the mean over the batch, and ``input_grad(saved)``.
    optimizer
        ``begin()``, ``lr``, ``state_dict``, ``load_state_dict``, as `sparsebp.optim.Optimizer` has them; built on
        ``model.parameters()``.
    lr_scheduler
        A learning-rate schedule of `sparsebp.optim`, advanced after every step; None keeps the rate.
        `ReduceLROnPlateau` is advanced after every epoch, with the validation loss (without one, the training loss).
    clip_norm
        Largest Euclidean norm of all gradients together; None does not clip.
    fusion
        Where the optimizer's updates go (Jiang et al., "Optimizer fusion", 2021); the results are the same.
        ``"none"``: after all gradients, in one call. ``"forward"``: each right before the parameter's next use, and
        before anything else could see it: evaluation, checkpoints, callbacks that read the model, the end of `fit` in
        whichever way. ``"backward"``: each as soon as its gradient is complete and nothing reads the old value, and
        the gradient's memory is given back at once; not with `clip_norm`, which needs all gradients.
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
    memory_cap
        With ``"ooo"``: bound for the simulated peak of memory, as a multiple of the conventional order's.
    graph
        On a GPU, capture the step into a CUDA graph and replay it, one graph for each shape of batches (a last, smaller
        batch runs as ever). Losses and norms are read after the step: an error that one is not finite comes when the
        parameters have been updated. Each graph has a step's memory of its own. `RunInfo.graph` says if it is done, or
        why not: dropout, recurrent layers, scans and `clip_norm` need the host during the step.
    callbacks
        See `sparsebp.train.callbacks`.
    checkpoint_dir
        Folder for checkpoints, created if need be; None writes none. A run that starts anew keeps the checkpoint of
        an earlier run beside its own as ``checkpoint.previous.safetensors``.
    checkpoint_every
        Steps between checkpoints within an epoch; one is written before the first step and after every epoch anyway.
    rng
        A seed or a `numpy.random.Generator`: the order of the samples is a function of it. None takes fresh entropy.
    config
        What else describes the run, in JSON types; it is kept in the checkpoint and must be equal on resume.

    Attributes
    ----------
    order
        The schedule that steps run by now, or ran by last; None before `fit`.
    found_schedule
        With ``schedule="ooo"``: what was found, and what was measured; None until then.

    Raises
    ------
    OptionError
        `clip_norm`, `accumulate`, `memory_cap` or `checkpoint_every` is not positive,
        `fusion` or `schedule` is unknown or does not
        go with the other options, or the seed is negative.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        *,
        lr_scheduler: Any = None,
        clip_norm: float | None = None,
        fusion: Fusion = "none",
        accumulate: int = 1,
        schedule: str | os.PathLike[str] | Schedule = "conventional",
        memory_cap: float = MEMORY_CAP,
        graph: bool = False,
        callbacks: Sequence[Callback] = (),
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        rng: Seed = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        positive = {"clip_norm": clip_norm, "checkpoint_every": checkpoint_every, "memory_cap": memory_cap}
        for name, value in positive.items():
            if value is not None and not value > 0:
                raise OptionError(
                    f"{name} is not positive", expected="more than 0, or None", got=value, remedy=f"Raise {name}"
                )
        self.model, self.loss, self.optimizer, self.lr_scheduler = model, loss, optimizer, lr_scheduler
        self.fusion, self.accumulate, self.schedule = fusion, accumulate, schedule
        self.memory_cap, self.graph = memory_cap, graph
        self.order: Schedule | None = None
        self.found_schedule: FoundSchedule | None = None
        self._runner: Runner | None = None
        self.clip_norm, self.checkpoint_every = clip_norm, checkpoint_every
        self._waits_for_epochs = getattr(lr_scheduler, "needs_metric", False)
        self.callbacks = tuple(callbacks)
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.config = dict(config or {})
        self.history = History()
        check_order(fusion, accumulate, schedule, clip_norm)
        self._seed_given = isinstance(rng, int | np.integer)
        self.seed = int(rng) if isinstance(rng, int | np.integer) else _draw_seed(rng)
        if self.seed < 0:
            raise OptionError("The seed is negative", expected="0 or more", got=self.seed, remedy="Pass rng=0 or more")

    # ---- the public calls ----------------------------------------------------------------------------------------

    def fit(
        self,
        dataset: Dataset,
        *,
        epochs: int,
        batch_size: int,
        validation: Dataset | None = None,
        resume: bool = False,
    ) -> History:
        """Train for `epochs` epochs in all, and return the history.

        Parameters
        ----------
        dataset
            The training set; its order in epoch e is a function of (seed, e).
        epochs
            Number of epochs of the whole run, those done before a resume included.
        batch_size
            Samples of a step; the last step of an epoch takes what is left.
        validation
            A second set, evaluated after every epoch.
        resume
            Go on from the checkpoint in `checkpoint_dir`. If there is none yet (killed before the first could be
            written), training starts at the beginning.

        Raises
        ------
        NonFiniteError
            A loss, a gradient or a parameter is NaN or infinite; the message names the step and the place. The last
            good checkpoint is left as it was.
        ScheduleError
            The schedule cannot run.
        OptionError, ShapeError
            The schedule is not one of the model, `epochs` is negative, `batch_size` is not positive, the data set is
            empty, or `resume` without a folder.
        FileFormatError
            The checkpoint is damaged, foreign, or of another run.
        OutputError
            The folder cannot be written.
        """
        _check_fit(dataset, epochs=epochs, batch_size=batch_size)
        if validation is not None and len(validation) == 0:
            raise ShapeError("The validation set is empty", expected="at least one sample", got=0, remedy="Pass None")
        if resume and self.checkpoint_dir is None:
            raise OptionError(
                "resume needs a folder", expected="checkpoint_dir", got=None, remedy="Pass checkpoint_dir="
            )
        shape = {"batch_size": batch_size, "samples": len(dataset)}
        epoch, batch = self._start(shape, resume=resume)
        steps = -(-len(dataset) // batch_size)
        runner = self._runner = Runner(self)
        first = self.history.steps
        self._tell("start", RunInfo(epochs, steps, first, resumed=first > 0, graph=runner.captures()))
        try:
            for e in range(epoch, epochs):
                self._run_epoch(runner, dataset, validation, e, batch if e == epoch else 0, shape)
            self._tell("end", self.history)
        finally:
            runner.close()
            self._runner = None
            self._tell("close")
        return self.history

    def evaluate(self, dataset: Dataset, *, batch_size: int = 100) -> tuple[float, float | None]:
        """Return the mean loss over `dataset` and, for class targets, the share of samples classified right."""
        _check_fit(dataset, epochs=0, batch_size=batch_size)
        self._flush()
        _mode(self.model, "eval")
        total = correct = 0.0
        for start in range(0, len(dataset), batch_size):
            indices = np.arange(start, min(start + batch_size, len(dataset)))
            x, target = self._to_model(dataset.batch(indices))
            prediction, _ = self.model.forward(x)
            value, _ = self.loss.forward(prediction, target)
            total += value * len(indices)
            correct += accuracy(prediction, target) * len(indices)
        _mode(self.model, "train")
        return total / len(dataset), None if math.isnan(correct) else correct / len(dataset)

    # ---- one epoch, one step -------------------------------------------------------------------------------------

    def _run_epoch(
        self, runner: Runner, dataset: Dataset, validation: Dataset | None, epoch: int, first: int,
        shape: dict[str, int],
    ) -> EpochRecord:  # fmt: skip
        size = shape["batch_size"]
        order = epoch_order(len(dataset), seed=self.seed, epoch=epoch)
        steps = -(-len(dataset) // size)
        _mode(self.model, "train")
        for batch in range(first, steps):
            indices = order[batch * size : (batch + 1) * size]
            parts = np.array_split(indices, min(self.accumulate, len(indices)))
            runner.step([dataset.batch(part) for part in parts], epoch)
            every = self.checkpoint_every
            if every is not None and runner.begun % every == 0 and batch + 1 < steps:
                self._save(epoch, batch + 1, shape)
        self._check_parameters(epoch)
        result = None if validation is None else self.evaluate(validation)
        record = self.history.end_epoch(epoch, steps, result)
        if self._waits_for_epochs:
            self.lr_scheduler.step(record.train_loss if result is None else result[0])
        self._save(epoch + 1, 0, shape)
        self._tell("epoch", record)
        return record

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def _start(self, shape: dict[str, int], *, resume: bool) -> tuple[int, int]:
        """Prepare folder and state; return the epoch and the batch to begin with."""
        self.history = History()
        folder = self.checkpoint_dir
        if folder is not None:
            prepare_folder(folder)
            path = folder / FILE_NAME
            if resume and path.exists():
                checkpoint = load_checkpoint(path)
                return restore(self, checkpoint, shape, path)
            if path.exists():
                os.replace(path, folder / PREVIOUS_NAME)
        self._check_parameters(0)
        self._save(0, 0, shape)
        return 0, 0

    def _save(self, epoch: int, batch: int, shape: dict[str, int]) -> None:
        if self.checkpoint_dir is None:
            return
        self._check_parameters(epoch)
        path = self.checkpoint_dir / FILE_NAME
        save_checkpoint(path, pack(self, shape | {"epoch": epoch, "batch": batch}))
        self._tell("checkpoint", path)

    def _check_parameters(self, epoch: int) -> None:
        self._flush()
        names = finite.nonfinite(self.model.parameters())
        if names:
            raise finite.parameter_error(self.history.steps, epoch, names, self._last_good())

    def _last_good(self) -> str:
        if self.checkpoint_dir is None or not (self.checkpoint_dir / FILE_NAME).exists():
            return "No checkpoint was written"
        return f"The last good checkpoint is {self.checkpoint_dir / FILE_NAME}"

    # ---- small things --------------------------------------------------------------------------------------------

    def _to_model(self, batch: tuple[np.ndarray, np.ndarray]) -> tuple[Array, Array]:
        device = backend.device_of(next(iter(self.model.parameters().values())))
        return backend.to_device(batch[0], device), backend.to_device(batch[1], device)

    def _flush(self) -> None:
        """Do what the schedule has left over: the model is then what the history says."""
        if self._runner is not None:
            self._runner.flush()

    def _tell(self, event: str, *args: Any) -> None:
        if any(callback.sees_model(event) for callback in self.callbacks):
            self._flush()
        for callback in self.callbacks:
            getattr(callback, f"on_{event}")(*args)


def _draw_seed(rng: Seed) -> int:
    return int(np.random.default_rng(rng).integers(2**32))


def _check_fit(dataset: Dataset, *, epochs: int, batch_size: int) -> None:
    if len(dataset) == 0:
        raise ShapeError(
            "The data set is empty", expected="at least one sample", got=0, remedy="Pass a data set with samples"
        )
    for name, value, least in (("epochs", epochs, 0), ("batch_size", batch_size, 1)):
        if value < least:
            raise OptionError(f"{name} is too small", expected=f"{least} or more", got=value, remedy=f"Raise {name}")


def _mode(model: Any, mode: str) -> None:
    switch = getattr(model, mode, None)
    if switch is not None:
        switch()
