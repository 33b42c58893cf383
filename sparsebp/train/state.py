"""What is trained, how, and how far: the one thing that checkpoints, ranks, executors and callbacks look at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from sparsebp.comm.transport import Transport
from sparsebp.core.errors import NonFiniteError
from sparsebp.nn.recurrent.carried import CarriedState
from sparsebp.optim import Predictor
from sparsebp.runtime.pipeline import Note
from sparsebp.runtime.search import MEMORY_RATIO, FoundSchedule
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import Fusion
from sparsebp.train.callbacks import Callback
from sparsebp.train.history import History
from sparsebp.train.nonfinite import nonfinite

FILE_NAME = "checkpoint.safetensors"
BEST_NAME = "best.safetensors"
Metric: TypeAlias = Callable[[np.ndarray, np.ndarray], float]


@dataclass(kw_only=True, eq=False, repr=False)
class TrainingState:
    """The parts and options of a training, checked, and its progress. A `Trainer` is one; see there for the options."""

    model: Any
    loss: Any
    optimizer: Any
    lr_scheduler: Any = None
    clip_norm: float | None = None
    fusion: Fusion = "none"
    accumulate: int = 1
    schedule: str | os.PathLike[str] | Schedule = "conventional"
    memory_ratio: float = MEMORY_RATIO
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    graph: bool | None = None
    callbacks: tuple[Callback, ...] = ()
    checkpoint_dir: Path | None = None
    checkpoint_every: int | None = None
    config: dict[str, Any] = field(default_factory=dict)
    transport: Transport | None = None
    pipeline_ranks: Transport | None = None  # between the ranks of one pipeline; without replicas all
    replica_ranks: Transport | None = None  # between those with the same stages; None without replicas of pipelines
    sharded: bool = False
    predictor: Predictor | None = None
    note: Note | None = None
    seed: int = 0
    seed_given: bool = False

    history: History = field(default_factory=History)
    saved: int | None = None
    should_stop: bool = False
    current_schedule: Schedule | None = None
    found_schedule: FoundSchedule | None = None
    times: Mapping[Action, tuple[float, float]] = field(default_factory=dict)

    # Of the current `fit`, or the last one:
    position: dict[str, Any] = field(default_factory=dict)  # epoch, batch, and how batches are made
    asynchronous: str | None = None  # what losses depend on if updates come between micro-batches
    options_given: dict[str, Any] = field(default_factory=dict)  # as the run began with them
    fingerprints: dict[str, np.ndarray] = field(default_factory=dict)  # of its data
    carried: list[CarriedState] | None = None  # of each micro-batch, in a stateful fit
    validates: bool = False  # whether there is a validation set
    replaces: bool = False  # whether files of an earlier run may be replaced
    has_steps: bool = True  # whether any step may be taken, and so any file be written
    apart: bool = False  # whether ranks hold different parameters
    # With ranks: the events at which callbacks of rank 0 look at the model.
    seen_on_rank_0: frozenset[str] | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank runs callbacks and writes files."""
        return self.transport is None or self.transport.rank == 0

    @property
    def in_first_pipeline(self) -> bool:
        """Whether this rank's pipeline is the one of rank 0."""
        return self.replica_ranks is None or self.replica_ranks.rank == 0

    def sees(self, event: str) -> bool:
        """Whether a callback (of rank 0, if there are several) looks at the model at this event."""
        if self.seen_on_rank_0 is not None:
            return event in self.seen_on_rank_0
        return any(callback.sees_model(event) for callback in self.callbacks)

    def last_good(self) -> str:
        """Say which checkpoint to go back to."""
        if self.checkpoint_dir is None or not (self.checkpoint_dir / FILE_NAME).exists():
            return "No checkpoint was written"
        return f"The last good checkpoint is {self.checkpoint_dir / FILE_NAME}"

    def check_finite(self, epoch: int | None) -> None:
        """Refuse to save parameters or running statistics that no model would load; `epoch` None: before the run."""
        arrays, parameters = finite_arrays_of(self.model), self.model.parameters()
        names = nonfinite(arrays)
        if not names:
            return
        step = self.history.steps
        when = "before training" if step == 0 or epoch is None else f"after step {step} (epoch {epoch + 1})"
        of_parameters = [name for name in names if name in parameters]
        if of_parameters:
            raise NonFiniteError(f"Parameters are not finite {when}", expected="finite parameters",
                                 got=f"NaN or infinity in {', '.join(of_parameters)}", remedy="Initialise or load the "
                                 f"model again, or lower the learning rate. {self.last_good()}")  # fmt: skip
        raise NonFiniteError(f"Running statistics are not finite {when}", expected="finite statistics",
                             got=f"NaN or infinity in {', '.join(names)}: a batch brought NaN, infinity, or numbers "
                             f"whose squares overflow {arrays[names[0]].dtype} to that layer", remedy="Look for such "
                             "numbers in the data, scale the data, or lower the learning rate. "
                             f"{self.last_good()}")  # fmt: skip


# Training and evaluation modes of a model, restored afterwards, and its state besides parameters.


@contextlib.contextmanager
def training(model: Any) -> Iterator[None]:
    """Switch a model that is in evaluation to training; one in training keeps its layers that are in evaluation."""
    with _restored(model):
        if not getattr(model, "training", False) and hasattr(model, "train"):
            model.train()
        yield


@contextlib.contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Switch all layers to evaluation; random generators are restored afterwards as well."""
    drawn = [(generator, generator.bit_generator.state) for generator in generators_of(model).values()]
    with _restored(model):
        if hasattr(model, "eval"):
            model.eval()
        try:
            yield
        finally:
            for generator, state in drawn:
                generator.bit_generator.state = state


def generators_of(model: Any) -> dict[str, np.random.Generator]:
    """Return the random generators that layers draw from while training (dropout), sorted by name."""
    return dict(sorted(model.generators().items())) if hasattr(model, "generators") else {}


def finite_arrays_of(model: Any) -> dict[str, Any]:
    """Return the arrays that must be finite for a checkpoint to be written, and read again."""
    arrays: dict[str, Any] = model.finite_arrays() if hasattr(model, "finite_arrays") else model.parameters()
    return arrays


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    layers = [layer for _, layer in model.modules()] if hasattr(model, "modules") else [model]
    modes = [(layer, layer.training) for layer in layers if hasattr(layer, "training")]
    try:
        yield
    finally:
        if not modes and hasattr(model, "train"):  # the mode before is unknown
            model.train()
        for layer, mode in modes:
            layer.training = mode
