"""A training and the ranks that it runs on: parts and options, checked; the executor; what only rank 0 does."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sparsebp.comm.transport import Transport, check_callable, check_transport
from sparsebp.core.check import Seed, check_choice, check_flag, check_integer, check_number, check_sequence, shown
from sparsebp.core.errors import OptionError
from sparsebp.core.files import kept_path
from sparsebp.data import ArrayDataset, BitstreamDataset, Dataset, ImageDataset
from sparsebp.nn.loss import check_mean
from sparsebp.optim import Predictor
from sparsebp.optim.lr_schedules import ChainedScheduler
from sparsebp.patterns.pattern import DeviceCopies
from sparsebp.runtime.actions import Stages, Watch, trained_parameters
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.launch import check_same, checksums, exchange, options_of, together
from sparsebp.runtime.pipeline import Note, PipelineExecutor
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.runtime.search import MEMORY_RATIO, FoundSchedule
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import BUILDERS, Fusion, build, conventional, data_parallel
from sparsebp.schedule.files import read_csv, to_csv
from sparsebp.train.callbacks import Callback, History
from sparsebp.train.checkpoint import FILE_NAME, checked_config, generators_of
from sparsebp.train.data import as_dataset

# What only rank 0 does while all train, and what the others take over from it.


def buffers_of_rank_0(transport: Transport, model: Any) -> None:
    """Give all replicas the running statistics of rank 0, which are those that count; all ranks call this."""
    layers = list(model.modules()) if hasattr(model, "modules") else []
    exchange(transport, {f"{name}.{key}": (0, array) for name, layer in layers for key, array in layer.buffers.items()})


def tell_on_rank_0(trainer: Any, event: str, tell: Callable[[], None]) -> None:
    """Tell callbacks of an event, on rank 0, and give all ranks what these have changed."""
    # Of parameters, of the optimizer's options, and of random generators, from which a callback may draw.
    # Where a callback sees the model at the event, all ranks call this together.
    transport = trainer.transport
    if transport is None or transport.size == 1 or event == "close" or not trainer._sees(event):
        tell()
        return
    parameters = trainer.model.parameters()
    generators = generators_of(trainer.model)
    before = (checksums(parameters), options_of(trainer.optimizer)) if transport.rank == 0 else ({}, [])
    tell()
    changed: tuple[list[str], Any, dict[str, Any]] = [], None, {}
    if transport.rank == 0:
        now, options = checksums(parameters), options_of(trainer.optimizer)
        names = [name for name, fact in zip(parameters, now, strict=True) if before[0][fact] != now[fact]]
        states = {name: generator.bit_generator.state for name, generator in generators.items()}
        changed = names, None if options == before[1] else options, states
    names, options, states = transport.broadcast(changed)
    for name, state in states.items():
        generators[name].bit_generator.state = state
    exchange(transport, {name: (0, parameters[name]) for name in names})
    if options is not None:
        for group, values in zip(getattr(trainer.optimizer, "param_groups", ()), options, strict=False):
            group.update(values)
        if not hasattr(trainer.optimizer, "param_groups"):
            trainer.optimizer.lr = options[0]["lr"]


def seconds_of_rank_0(transport: Transport, history: History, steps: int) -> None:
    """Give all ranks the seconds of rank 0's last `steps` steps; all ranks call this."""
    history.seconds[-steps:] = transport.broadcast(history.seconds[-steps:])


# What a training consists of: its parts and options, checked, and the schedule that they ask for.

REPLICAS, FIRST_K = "data-parallel", "reverse-first-k"
ON_RANKS = (
    REPLICAS,
    FIRST_K,
    *(name for name, make in BUILDERS.items() if "workers" in inspect.signature(make).parameters),
)
"""Names of schedules for several ranks."""
SCHEDULES = ("conventional", "ooo", *ON_RANKS)
"""Names of schedules; any other text is a path."""


def asynchronous(schedule: Any) -> bool:
    """Return whether a schedule's name is one whose updates come between micro-batches: its losses are others."""
    if not isinstance(schedule, str) or schedule not in ON_RANKS or schedule in (REPLICAS, FIRST_K):
        return False
    return build(schedule).graph.updates == "microbatch"


def staleness(schedule: str | os.PathLike[str] | Schedule, accumulate: int, transport: Transport | None) -> str | None:
    """Return what the losses of an asynchronous schedule depend on, in words; None with one update a step."""
    if isinstance(schedule, str):
        if not asynchronous(schedule):
            return None
        name = f"schedule={schedule}"
    else:
        given = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
        if given.graph.updates != "microbatch":
            return None
        name = f"a schedule of checksum {zlib.crc32(to_csv(given).encode()):08x}"
    ranks = 1 if transport is None else transport.size
    return f"{name}, accumulate={accumulate}, {ranks} {'rank' if ranks == 1 else 'ranks'}"


class Training:
    """Model, loss, optimizer, options, and how far they are; `Trainer` states the arguments, attributes and errors."""

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
            if value is not None and check_number(name, value) <= 0:
                raise OptionError(f"{name} is not positive", expected="more than 0, or None", got=value)
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
        self._runner: Any = None
        self._stale: str | None = None
        self.saved: int | None = None
        if transport is None and (sharded or predictor is not None or note is not None):
            raise OptionError("sharded, predictor and note are for several ranks", expected="transport= beside them",
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

    def _asked(
        self, dataset: Any, validation: Any, lengths: Any, epochs: Any, batch_size: Any, resume: Any
    ) -> tuple[Dataset, Dataset | None, dict[str, int], int]:
        """Return what `Trainer.fit` was asked for, checked: both data sets, sizes of a batch and of the set, epochs."""
        epochs, batch_size = check_integer("epochs", epochs, 0), check_integer("batch_size", batch_size, 1)
        training_set = as_dataset(dataset, self.model, lengths)
        held_out = None if validation is None else as_dataset(validation, self.model)
        if check_flag("resume", resume) and self.checkpoint_dir is None:
            raise OptionError("resume needs a folder", expected="checkpoint_dir", got=None)
        return training_set, held_out, {"batch_size": batch_size, "samples": len(training_set)}, epochs

    def _last_good(self) -> str:
        if self.checkpoint_dir is None or not (self.checkpoint_dir / FILE_NAME).exists():
            return "No checkpoint was written"
        return f"The last good checkpoint is {self.checkpoint_dir / FILE_NAME}"

    def _flush(self, *, wait: bool = True) -> None:
        """Do what the schedule has left over; with `wait` the model is then what the history says."""
        if self._runner is not None:
            self._runner.flush(wait=wait)

    def _tell(self, event: str, *args: Any) -> None:
        if self._sees(event) and self._runner is not None:
            self._runner.whole()

        def tell() -> None:
            for callback in self.callbacks if self._leads else ():
                getattr(callback, f"on_{event}")(*args)

        tell_on_rank_0(self, event, tell)

    def _sees(self, event: str) -> bool:
        """Whether the model is to be up to date at an event: for a callback, of rank 0 if there are several."""
        if self._seen is not None:
            return event in self._seen
        return any(callback.sees_model(event) for callback in self.callbacks)


def check_parts(model: Any, loss: Any, optimizer: Any, callbacks: Any) -> None:
    """Refuse what cannot be trained with, before anything is done."""
    for name, thing, wanted in (
        ("model", model, ("forward", "parameters", "state_dict")), ("loss", loss, ("forward",)),
        ("optimizer", optimizer, ("lr",)),
    ):  # fmt: skip
        lacking = [attribute for attribute in wanted if not hasattr(thing, attribute)]
        if lacking or isinstance(thing, type):
            raise OptionError(f"The {name} cannot be used", expected=", ".join(wanted), got="the class "
                              f"{thing.__name__} itself" if isinstance(thing, type) else f"{type(thing).__name__} "
                              f"without {', '.join(lacking)}")  # fmt: skip
    check_mean(loss)
    for callback in check_sequence("callbacks", callbacks, "callbacks"):
        if not hasattr(callback, "sees_model"):
            raise OptionError("Not a callback", expected="a sparsebp.train.Callback", got=type(callback).__name__,
                              remedy="Derive it from Callback")  # fmt: skip


def scheduler_of(given: Any, optimizer: Any) -> Any:
    """Return the learning-rate schedule of a trainer: the one given, or those given chained; None for none."""
    if given is None or (isinstance(given, list | tuple) and not given):
        return None
    chained = ChainedScheduler(given if isinstance(given, list | tuple) else [given])
    if chained.optimizer is not None and chained.optimizer is not optimizer:
        raise OptionError("The learning-rate schedule is of another optimizer", expected="the trainer's optimizer",
                          got=f"another {type(chained.optimizer).__name__}")  # fmt: skip
    return chained if isinstance(given, list | tuple) else given


def check_schedule(fusion: Any, accumulate: int, schedule: Any, clip_norm: float | None) -> None:
    """Refuse options that do not go together, before there is a model to run."""
    check_choice("fusion", fusion, get_args(Fusion))
    check_integer("accumulate", accumulate, 1)
    if not isinstance(schedule, str | os.PathLike | Schedule):
        raise OptionError("Not a schedule", expected="'conventional', 'ooo', a path, or a sparsebp.schedule.Schedule",
                          got=type(schedule).__name__)  # fmt: skip
    ooo, clips = schedule == "ooo", clip_norm is not None
    for wrong, problem, expected, got, remedy in (
        (fusion == "backward" and clips, "Backward-fusion updates before the norm of all gradients is known",
         "clip_norm=None", clip_norm, "Use fusion='forward', which clips by the norm, or leave clip_norm out"),
        (ooo and accumulate > 1, "Out-of-order scheduling is for one micro-batch a step",
         "accumulate=1", accumulate, "Use schedule='conventional', or a smaller batch"),
        (ooo and clips, "Out-of-order scheduling updates before the norm of all gradients is known",
         "clip_norm=None", clip_norm, "Use schedule='conventional', or leave clip_norm out"),
        (schedule == FIRST_K and accumulate > 1, "Reverse first-k scheduling is for one micro-batch a step",
         "accumulate=1", accumulate, "Use schedule='data-parallel', or a smaller batch"),
        (schedule != "conventional" and fusion != "none", "A schedule places the updates itself",
         "fusion='none' beside it", shown(fusion), "Leave fusion out, or use schedule='conventional'"),
    ):  # fmt: skip
        if wrong:
            raise OptionError(problem, expected=expected, got=got, remedy=remedy)


def check_ranks(schedule: Any, transport: Transport | None) -> None:
    """Refuse a schedule's name that is not for as many ranks, before there is a model to run."""
    if transport is not None:
        check_transport(transport)
    _check_known(schedule)
    if transport is None and isinstance(schedule, str) and schedule in ON_RANKS:
        raise OptionError(f"The schedule {schedule!r} is of several workers", expected="a transport between them",
                          got="transport=None", remedy="Pass transport=, under mpiexec that of MPI: mpiexec -n 4 "
                          "sparsebp train …; see the how-to guide on many workers")  # fmt: skip
    if transport is not None and transport.size > 1 and schedule in ("conventional", "ooo"):
        raise OptionError("Several ranks need a schedule of theirs", expected=", ".join(ON_RANKS), got=repr(schedule),
                          remedy="Pass schedule='1f1b', say, or start one process")  # fmt: skip


def _check_known(schedule: Any) -> None:
    """Refuse a text that is neither a schedule's name nor a file; what is a path for sure need not be there yet."""
    if not isinstance(schedule, str) or schedule in SCHEDULES or os.path.exists(schedule):
        return
    if os.path.dirname(schedule) or schedule.lower().endswith(".csv"):  # whoever reads it says that it is missing
        return
    near = difflib.get_close_matches(schedule.lower(), SCHEDULES, 1)
    raise OptionError(
        "Unknown schedule", expected=f"{', '.join(SCHEDULES)}, or the path of an action CSV", got=repr(schedule),
        remedy=f"Perhaps {near[0]!r} is meant" if near else "Pass one of the names, or a file that is there"
    )  # fmt: skip


def schedule_of(
    stages: Stages, fusion: Fusion, accumulate: int, schedule: str | os.PathLike[str] | Schedule, ranks: int = 1
) -> Schedule:  # fmt: skip
    """Return the schedule that the trainer's options ask for; `check_schedule` has seen them."""
    # But for `"ooo"` and `"reverse-first-k"`, which measure before they have one.
    if schedule == "conventional":
        return conventional(stages=len(stages), microbatches=accumulate, fusion=fusion, unweighted=stages.unweighted)
    if schedule == REPLICAS:
        return data_parallel(stages=len(stages), microbatches=accumulate, unweighted=stages.unweighted)
    if isinstance(schedule, str) and schedule in ON_RANKS:
        return build(
            schedule, workers=ranks, stages=len(stages), microbatches=accumulate, unweighted=stages.unweighted
        )  # fmt: skip
    given = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
    if given.graph.microbatches != accumulate:
        raise OptionError("The schedule has another number of micro-batches", expected=f"accumulate={accumulate}",
                          got=given.graph.microbatches, remedy="Pass accumulate= as the schedule has it")  # fmt: skip
    return given


def earlier_schedule(path: Path, stages: Stages) -> Schedule | None:
    """Return the out-of-order schedule that an earlier run has left at `path`, None if there is none of this model."""
    if not path.exists():
        return None
    found = read_csv(path)
    same = (len(stages), 1, stages.unweighted) == (found.graph.stages, found.graph.microbatches, found.graph.unweighted)
    return found if same else None


_COMPARED = 64
"""Samples of a data set that ranks compare."""
_PURE = (ArrayDataset.batch, BitstreamDataset.batch, ImageDataset.batch)
"""Functions of the indices alone."""


def executor_of(
    trainer: Training, stages: Stages, watch: Watch, found: Schedule | None = None
) -> Executor | PipelineExecutor | ReverseFirstKExecutor:
    """Return what runs the steps of a trainer: on one device, or on the ranks of its transport."""
    # By the schedule that was `found` before, or that the trainer's options ask for.
    parts, transport = (trainer.model, trainer.loss, trainer.optimizer), trainer.transport
    clips: dict[str, Any] = {"clip_norm": trainer.clip_norm, "watch": watch}
    if transport is not None and trainer.schedule == FIRST_K:
        _check_heeded(trainer, replicas=True, asynchronous=False)
        return ReverseFirstKExecutor(*parts, transport, **clips, sharded=trainer.sharded)
    ranks = 1 if transport is None else transport.size
    schedule = found or schedule_of(stages, trainer.fusion, trainer.accumulate, trainer.schedule, ranks)
    graph = schedule.graph
    if transport is not None:
        _check_heeded(trainer, replicas=graph.synchronised, asynchronous=graph.updates == "microbatch")
    if transport is None or (transport.size == 1 and graph.updates == "step" and not graph.synchronised):
        return Executor(*parts, schedule, **clips, graph=trainer.graph)
    if graph.synchronised:
        return ReplicaExecutor(*parts, schedule, transport, **clips, sharded=trainer.sharded)
    return PipelineExecutor(*parts, schedule, transport, **clips, predictor=trainer.predictor, note=trainer.note)


def _check_heeded(trainer: Training, *, replicas: bool, asynchronous: bool) -> None:
    """Refuse options that a schedule of this kind would not heed."""
    for wrong, name, expected in (
        (trainer.sharded and not replicas, "sharded", "schedule='data-parallel' or 'reverse-first-k'"),
        (trainer.note is not None and not asynchronous, "note", "an asynchronous pipeline, as schedule='pipedream'"),
        (trainer.predictor is not None and not asynchronous, "predictor", "schedule='dualpipe-2018'"),
    ):
        if wrong:
            raise OptionError(f"{name} is for other schedules", expected=expected, got=f"schedule={trainer.schedule!r}",
                              remedy=f"Leave {name} out")  # fmt: skip


@contextlib.contextmanager
def telling(transport: Transport | None) -> Iterator[None]:
    """Tell the other ranks of an error inside the ``with`` block, so that they do not wait for this one."""
    # But not of one that all ranks raise alike: they can go on, on the same transport.
    try:
        yield
    except BaseException as error:
        if transport is not None and not getattr(error, "alike", False):
            transport.abort(error)
        raise


def agree(trainer: Training, facts: Mapping[str, Any], dataset: Dataset, validation: Dataset | None = None) -> None:
    """Make sure that all ranks are about to train the same thing, and agree on what only rank 0 knows."""
    # Of a data set of `sparsebp.data` some samples are compared, of any other its length alone: to ask it for a batch
    # may have effects, and what it gives may be drawn anew each time. Ranks of a pipeline also compare what it gives
    # them in every step, which is the same for all; replicas have samples of their own, of which no other rank can
    # tell.
    transport: Any = trainer.transport
    own = together(transport, lambda: _facts(trainer, dataset, validation))
    seeds = transport.share(trainer.seed if trainer._seed_given else None)
    if not any(seed is not None for seed in seeds):
        trainer.seed = transport.broadcast(trainer.seed)
        seeds = []
    events = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    trainer._seen = None
    trainer._seen = frozenset(transport.broadcast([event for event in events if trainer._sees(event)]))
    rng = None if not seeds else trainer.seed if trainer._seed_given else None
    check_same(transport, {**facts, "rng": rng, **own})


def _facts(trainer: Training, dataset: Dataset, validation: Dataset | None) -> dict[str, Any]:
    """Return what is to be the same on all ranks, by what messages call it."""
    parameters, optimizer = trainer.model.parameters(), trainer.optimizer
    facts = {
        "accumulate": trainer.accumulate, "sharded": trainer.sharded, "fusion": trainer.fusion,
        "clip_norm": trainer.clip_norm, "config": trainer.config, "the schedule": _order_of(trainer.schedule),
        "checkpoint_dir": "none" if trainer.checkpoint_dir is None else "a folder",
        "checkpoint_every": trainer.checkpoint_every, "the model": type(trainer.model).__name__,
        "the loss": _described(trainer.loss), "the predictor": _described(trainer.predictor),
        "the optimizer": type(optimizer).__name__, "the optimizer's options": options_of(optimizer),
        "the optimizer's numbers of updates": dict(getattr(optimizer, "steps", {})),
        "the learning-rate schedule": _rates_of(trainer.lr_scheduler),
        "the names of parameters": list(parameters),
        "the trained parameters": list(trained_parameters(trainer.model, optimizer)),
    }  # fmt: skip
    layers = dict(trainer.model.modules()) if hasattr(trainer.model, "modules") else {}
    facts |= {f"the layer {name or 'that is the model'}": _described(layer) for name, layer in layers.items()}
    buffers = {f"{name}.{key}": array for name, layer in layers.items() for key, array in layer.buffers.items()}
    if not trainer.sharded:
        kept = getattr(optimizer, "buffers", {})
        state = {f"{kind} of {name}": array for kind, arrays in kept.items() for name, array in arrays.items()}
        facts |= checksums(state, "the optimizer's")
    for name, some in (("the data set's", dataset), ("the validation set's", validation)):
        facts |= checksums(_samples_of(some), name)
    return facts | checksums(_weights_of(trainer.loss), "the loss's") | checksums(parameters | buffers)


def _rates_of(scheduler: Any) -> Any:
    """Return what a learning-rate schedule says of itself; of functions of the user's own that is nothing."""
    # Those are compared step by step, by the rates that they make.
    if scheduler is None:
        return None
    own = vars(scheduler) if hasattr(scheduler, "__dict__") else {}
    lists = {
        name: value for name, value in own.items()
        if isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    }  # fmt: skip
    inner = [_rates_of(one) for one in getattr(scheduler, "schedulers", ())]
    return _described(scheduler), lists, scheduler.state_dict(), inner


def _weights_of(loss: Any) -> dict[str, Any]:
    """Return the arrays that a loss weighs classes or elements by."""
    found: dict[str, Any] = {}
    for name, value in vars(loss).items() if hasattr(loss, "__dict__") else ():
        for key, part in value.items() if isinstance(value, dict) else ((name, value),):
            if isinstance(part, DeviceCopies):
                found |= {str(key).strip("_"): array for array in part.on(np)}
    return found


def _order_of(schedule: Any) -> str:
    """Return a schedule as text: a name, or all that it says."""
    if isinstance(schedule, Schedule):
        return to_csv(schedule)
    path = Path(schedule)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else str(schedule)


def _samples_of(dataset: Any) -> dict[str, Any]:
    """Return some samples of a data set of ours; to ask another one for a batch may have effects."""
    if not len(dataset or ()) or getattr(type(dataset), "batch", None) not in _PURE:
        return {}
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _COMPARED)).astype(np.int64))
    return {("inputs", "targets", "lengths")[at]: part for at, part in enumerate(dataset.batch(indices))}


def _described(thing: Any) -> str:
    """Return the class of a layer, a loss or a predictor, with those of its attributes that are plain options."""
    plain = (bool, int, float, str, tuple, type(None), np.dtype)
    options = {
        name: value for name, value in vars(thing).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "device"
    } if hasattr(thing, "__dict__") else {}  # fmt: skip
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))})"
