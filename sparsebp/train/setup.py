"""What a training is given, checked: options, schedule, data; its executor; ranks, which agree and follow rank 0."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np

from sparsebp.comm.transport import Transport, check_transport
from sparsebp.core import backend
from sparsebp.core.check import (
    Array,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_sequence,
    did_you_mean,
    shown,
)
from sparsebp.core.errors import OptionError, ShapeError
from sparsebp.data import ArrayDataset, BitstreamDataset, ImageDataset, WithPositions
from sparsebp.data.dataset import real_array
from sparsebp.nn.loss import check_mean
from sparsebp.nn.sequential import is_group, taking_lengths
from sparsebp.optim import Predictor
from sparsebp.optim.lr_schedules import ChainedScheduler, ReduceLROnPlateau, with_parts
from sparsebp.patterns.pattern import DeviceCopies
from sparsebp.runtime.actions import Stages, Watch, trained_parameters
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.launch import (
    check_same,
    checksum,
    checksums,
    collective_call,
    exchange,
    names_of_groups,
    options_of,
)
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import BUILDERS, Fusion, build, conventional, data_parallel
from sparsebp.schedule.files import read_csv, to_csv
from sparsebp.train.callbacks import Callback, check_measured
from sparsebp.train.checkpoint import buffers_of, generators_of, steps_of
from sparsebp.train.loader import Loader, Samples

# What the other ranks take over from rank 0.


def buffers_of_rank_0(transport: Transport, model: Any) -> None:
    """Give all replicas the running statistics of rank 0; all ranks call this."""
    exchange(transport, {name: (0, array) for name, array in buffers_of(model).items()})


def tell_on_rank_0(trainer: Any, event: str, tell: Callable[[], None]) -> None:
    """Tell the callbacks of rank 0 of an event, and give all ranks their changes.

    Callbacks may change parameters, running statistics and the optimizer's options, and draw from random generators.
    All ranks call this together where a callback looks at the model.
    """
    transport = trainer.transport
    if transport is None or transport.size == 1 or event == "close" or not trainer._sees(event):
        tell()
        return
    arrays = trainer.model.parameters() | buffers_of(trainer.model)
    generators = generators_of(trainer.model)
    before = (checksums(arrays), options_of(trainer.optimizer)) if transport.rank == 0 else ({}, [])
    given = _told(trainer) if transport.rank == 0 else {}
    held = names_of_groups(trainer.optimizer)
    tell()
    if names_of_groups(trainer.optimizer) != held:
        raise OptionError("A callback has added parameters to the optimizer of one of several ranks", expected="the "
                          "same groups on all", got=f"another group on rank {transport.rank}",
                          remedy="Call add_param_group on every rank, before fit")  # fmt: skip
    changed: tuple[list[str], Any, dict[str, Any]] = [], None, {}
    if transport.rank == 0:
        others = [name for name, option in _told(trainer).items() if option != given.get(name)]
        if others:
            raise OptionError("A callback has changed options on one of several ranks", expected="changes of "
                              "parameters, statistics or the optimizer's options", got=f"of {', '.join(others)}",
                              remedy="Set them on every rank, between two calls of fit")  # fmt: skip
        arrays = trainer.model.parameters() | buffers_of(trainer.model)  # statistics may be other arrays now
        now, options = checksums(arrays), options_of(trainer.optimizer)
        names = [name for name, fact in zip(arrays, now, strict=True) if before[0][fact] != now[fact]]
        states = {name: generator.bit_generator.state for name, generator in generators.items()}
        changed = names, None if options == before[1] else options, states
    names, options, states = transport.broadcast(changed)
    for name, state in states.items():
        generators[name].bit_generator.state = state
    exchange(transport, {name: (0, arrays[name]) for name in names})
    if options is not None:
        for group, values in zip(getattr(trainer.optimizer, "param_groups", ()), options, strict=False):
            group.update(values)
        if not hasattr(trainer.optimizer, "param_groups"):
            trainer.optimizer.lr = options[0]["lr"]


def _told(trainer: Any) -> dict[str, Any]:
    """Return the options and modes that callbacks cannot change on one of several ranks."""
    modules = dict(trainer.model.modules()) if hasattr(trainer.model, "modules") else {}
    options = options_given(trainer) | {f"the mode of {name or 'the model'}": m.training for name, m in modules.items()}
    del options["groups"]  # the optimizer's, which all ranks get
    return options


# Options, and the schedule that they name.

REPLICAS, FIRST_K = "data-parallel", "reverse-first-k"
_PIPELINES = (name for name, make in BUILDERS.items() if "workers" in inspect.signature(make).parameters)
ON_RANKS = (REPLICAS, FIRST_K, *_PIPELINES)
"""Names of schedules for several ranks."""
SCHEDULES = ("conventional", "ooo", *ON_RANKS)
"""Names of schedules; any other text is a path."""


def asynchronous(schedule: Any) -> bool:
    """Return whether a schedule's name is one with updates between micro-batches, which change the losses."""
    if not isinstance(schedule, str) or schedule not in ON_RANKS or schedule in (REPLICAS, FIRST_K):
        return False
    return build(schedule).graph.updates == "microbatch"


def staleness(schedule: str | os.PathLike[str] | Schedule, accumulate: int, transport: Transport | None) -> str | None:
    """Describe the dependencies of the losses of an asynchronous schedule; None with one update per step."""
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


def check_parts(model: Any, loss: Any, optimizer: Any, callbacks: Any) -> None:
    """Check the parts of a trainer."""
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
        if not hasattr(callback, "sees_model") or isinstance(callback, type):
            got = f"the class {callback.__name__} itself" if isinstance(callback, type) else type(callback).__name__
            raise OptionError("Not a callback", expected="a sparsebp.train.Callback", got=got,
                              remedy="Derive it from Callback")  # fmt: skip


def scheduler_of(given: Any, optimizer: Any) -> Any:
    """Return the learning-rate schedule given, or a list of them chained, or None."""
    if given is None or (isinstance(given, list | tuple) and not given):
        return None
    chained = ChainedScheduler(given if isinstance(given, list | tuple) else [given])
    if chained.optimizer is not None and chained.optimizer is not optimizer:
        raise OptionError("The learning-rate schedule is of another optimizer", expected="the trainer's optimizer",
                          got=f"another {type(chained.optimizer).__name__}")  # fmt: skip
    return chained if isinstance(given, list | tuple) else given


def check_predictor(predictor: Any, optimizer: Any) -> None:
    """Refuse what is not a predictor of this optimizer."""
    if predictor is None:
        return
    if not isinstance(predictor, Predictor):
        raise OptionError("Not a predictor", expected="a sparsebp.optim.Predictor", got=shown(predictor),
                          remedy="Build one: MomentumPredictor(optimizer)")  # fmt: skip
    if predictor.optimizer is not optimizer:
        raise OptionError("The predictor is of another optimizer", expected="the trainer's optimizer",
                          got=f"another {type(predictor.optimizer).__name__}")  # fmt: skip


def check_schedule(fusion: Any, accumulate: int, schedule: Any, clip_norm: float | None) -> None:
    """Refuse options that exclude each other."""
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
         "fusion='none'", shown(fusion), "Leave fusion out, or use schedule='conventional'"),
    ):  # fmt: skip
        if wrong:
            raise OptionError(problem, expected=expected, got=got, remedy=remedy)


def check_ranks(schedule: Any, transport: Transport | None) -> None:
    """Refuse an unknown schedule, and one for another number of ranks."""
    if transport is not None:
        check_transport(transport)
    # A path need not exist yet: its reader reports that it is missing.
    path = not isinstance(schedule, str) or os.path.dirname(schedule) or schedule.lower().endswith(".csv")
    if not path and schedule not in SCHEDULES and not os.path.exists(schedule):
        raise OptionError(
            "Unknown schedule", expected=f"{', '.join(SCHEDULES)}, or the path of an action CSV", got=repr(schedule),
            remedy=did_you_mean(schedule, SCHEDULES) or "Pass one of the names, or a file that is there",
        )  # fmt: skip
    if transport is None and isinstance(schedule, str) and schedule in ON_RANKS:
        raise OptionError(f"The schedule {schedule!r} is of several workers", expected="a transport between them",
                          got="transport=None", remedy="Pass transport=, under mpiexec that of MPI: mpiexec -n 4 "
                          "sparsebp train …; see the how-to guide on many workers")  # fmt: skip
    if transport is not None and transport.size > 1 and schedule in ("conventional", "ooo"):
        raise OptionError("Several ranks need a schedule of theirs", expected=", ".join(ON_RANKS), got=repr(schedule),
                          remedy="Pass schedule='1f1b', say, or start one process")  # fmt: skip


def schedule_of(
    stages: Stages, fusion: Fusion, accumulate: int, schedule: str | os.PathLike[str] | Schedule, ranks: int = 1
) -> Schedule:  # fmt: skip
    """Return the schedule of checked options, except ``"ooo"`` and ``"reverse-first-k"``, which measure first."""
    if schedule == "conventional":
        return conventional(stages=len(stages), microbatches=accumulate, fusion=fusion, unweighted=stages.unweighted)
    if schedule == REPLICAS:
        return data_parallel(stages=len(stages), microbatches=accumulate, unweighted=stages.unweighted)
    if isinstance(schedule, str) and schedule in ON_RANKS:
        size: dict[str, Any] = {"stages": len(stages), "microbatches": accumulate, "unweighted": stages.unweighted}
        return build(schedule, workers=ranks, **size)
    given = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
    if given.graph.microbatches != accumulate:
        raise OptionError("The schedule has another number of micro-batches", expected=f"accumulate={accumulate}",
                          got=given.graph.microbatches, remedy="Pass accumulate= as the schedule has it")  # fmt: skip
    return given


def earlier_schedule(earlier: Path | Schedule, stages: Stages) -> Schedule | None:
    """Return an out-of-order schedule found earlier, or that of a run's file, if it is of these stages, else None."""
    if isinstance(earlier, Path):
        if not earlier.exists():
            return None
        earlier = read_csv(earlier)
    graph = earlier.graph
    same = (len(stages), 1, stages.unweighted) == (graph.stages, graph.microbatches, graph.unweighted)
    return earlier if same else None


_COMPARED = 64
"""Samples of a data set that ranks compare."""
_FINGERPRINT_SAMPLES, _FINGERPRINT_BYTES = 1024, 2**22
"""Samples of a data set that a checkpoint describes, and about how many bytes of them, but at least `_COMPARED`."""
_PURE = (ArrayDataset.batch, BitstreamDataset.batch, ImageDataset.batch)
"""Functions of the indices alone."""


def executor_of(
    trainer: Any, stages: Stages, watch: Watch, found: Schedule | None = None
) -> Executor | PipelineExecutor | ReverseFirstKExecutor:
    """Return the executor of a trainer's steps, by the schedule `found` earlier or that of its options."""
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


def _check_heeded(trainer: Any, *, replicas: bool, asynchronous: bool) -> None:
    """Refuse options that a schedule of this kind ignores."""
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
    """Abort the other ranks at an error, unless all ranks raise it: they can then go on with the same transport."""
    try:
        yield
    except BaseException as error:
        if transport is not None and not getattr(error, "raised_on_all_ranks", False):
            transport.abort(error)
        raise


def agree(trainer: Any, facts: Mapping[str, Any], dataset: Any, validation: Any = None) -> None:
    """Check that all ranks are about to train the same thing, and agree on the seed and on rank 0's callbacks.

    Samples are compared for data sets of `sparsebp.data` only: asking another one for a batch may have effects, and
    its batches may be random. Ranks of a pipeline compare them again in every step.
    """
    transport: Any = trainer.transport
    own = collective_call(transport, lambda: _facts(trainer, dataset, validation))
    seeds = transport.share(trainer.seed if trainer._seed_given else None)
    if not any(seed is not None for seed in seeds):
        trainer.seed = transport.broadcast(trainer.seed)
        seeds = []
    events = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    trainer._seen = None
    trainer._seen = frozenset(transport.broadcast([event for event in events if trainer._sees(event)]))
    rng = None if not seeds else trainer.seed if trainer._seed_given else None
    check_same(transport, {**facts, "rng": rng, **own})


def _facts(trainer: Any, dataset: Any, validation: Any) -> dict[str, Any]:
    """Return the values that all ranks must share, by their names in messages."""
    parameters, optimizer = trainer.model.parameters(), trainer.optimizer
    facts = {
        "accumulate": trainer.accumulate, "sharded": trainer.sharded, "fusion": trainer.fusion,
        "clip_norm": trainer.clip_norm, "config": trainer.config, "the schedule": _order_of(trainer.schedule),
        "checkpoint_dir": "none" if trainer.checkpoint_dir is None else "a folder",
        "checkpoint_every": trainer.checkpoint_every, "the model": type(trainer.model).__name__,
        "the loss": _described(trainer.loss), "the predictor": _described(trainer.predictor),
        "the optimizer": type(optimizer).__name__, "the optimizer's options": options_of(optimizer),
        "the parameters of the optimizer's groups": names_of_groups(optimizer),
        "the optimizer's numbers of updates": dict(getattr(optimizer, "steps", {})),
        "the learning-rate schedule": _rates_of(trainer.lr_scheduler),
        "the names of parameters": list(parameters),
        "the trained parameters": list(trained_parameters(trainer.model, optimizer)),
    }  # fmt: skip
    layers = dict(trainer.model.modules()) if hasattr(trainer.model, "modules") else {}
    facts |= {f"the layer {name or 'that is the model'}": _described(layer) for name, layer in layers.items()}
    buffers = buffers_of(trainer.model)
    if not trainer.sharded:
        kept = getattr(optimizer, "buffers", {})
        state = {f"{kind} of {name}": array for kind, arrays in kept.items() for name, array in arrays.items()}
        facts |= checksums(state, "the optimizer's")
    for name, some in (("the data set's", dataset), ("the validation set's", validation)):
        facts |= checksums(_samples_of(some), name)
    return facts | checksums(_weights_of(trainer.loss), "the loss's") | checksums(parameters | buffers)


def _rates_of(scheduler: Any) -> Any:
    """Describe a learning-rate schedule. A user's functions are compared step by step, by their rates."""
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
    """Return a loss's weights of classes or elements."""
    weights: dict[str, Any] = {}
    for name, value in vars(loss).items() if hasattr(loss, "__dict__") else ():
        for key, part in value.items() if isinstance(value, dict) else ((name, value),):
            if isinstance(part, DeviceCopies):
                weights |= {str(key).strip("_"): array for array in part.on(np)}
    return weights


def _order_of(schedule: Any) -> str:
    """Return a schedule as text: its name or its CSV."""
    if isinstance(schedule, Schedule):
        return to_csv(schedule)
    path = Path(schedule)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else str(schedule)


def _samples_of(dataset: Any, count: int = _COMPARED) -> dict[str, Any]:
    """Return `count` samples of a data set of `sparsebp.data`, spread over it."""
    inner = dataset.dataset if type(dataset) is WithPositions else dataset
    if getattr(type(inner), "batch", None) not in _PURE or not len(dataset):
        return {}
    batch = dataset.batch(_spread(len(dataset), count))
    return {("inputs", "targets", "lengths")[at]: part for at, part in enumerate(batch)}


def _spread(samples: int, count: int) -> np.ndarray:
    return np.unique(np.linspace(0, samples - 1, min(samples, count)).astype(np.int64))


def _described(thing: Any) -> str:
    """Return the class of a layer, loss or predictor, with its plain options."""
    plain = (bool, int, float, str, tuple, type(None), np.dtype)
    options = {
        name: value for name, value in vars(thing).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "device"
    } if hasattr(thing, "__dict__") else {}  # fmt: skip
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))})"


# Numbers of a whole set besides its loss.

Metric: TypeAlias = Callable[[np.ndarray, np.ndarray], float]


def check_metrics(metrics: Any) -> dict[str, Metric]:
    """Return the metrics of a trainer by name."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping) or not all(map(callable, metrics.values())):
        raise OptionError("metrics are not functions by name", expected="a dict of functions (prediction, target)",
                          got=shown(metrics))  # fmt: skip
    for name in metrics:
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "accuracy"):
            raise OptionError("A metric has a name that cannot be a field", expected="an identifier, not loss or "
                              "accuracy, which are measured anyway", got=repr(name))  # fmt: skip
    return dict(metrics)


def measured(name: str, metric: Metric, prediction: np.ndarray, target: np.ndarray) -> float:
    """Return a metric of a whole set."""
    value: Any = metric(prediction, target)
    if isinstance(value, np.generic) or getattr(value, "shape", None) == ():
        value = value.item()
    return value if isinstance(value, float) else check_number(f"The metric {name}", value, finite=False)


def joined(parts: Sequence[Array]) -> Array:
    """Return the arrays of all batches as one."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ShapeError("Batches have different shapes, and cannot be joined", expected="one shape for every sample",
                         got=", ".join(map(str, sorted(shapes))), remedy="Pad all to one length")  # fmt: skip
    return backend.namespace(*parts).concatenate(parts)


def check_monitors(trainer: Any) -> None:
    """Refuse learning-rate schedules that follow a number that is not measured, or do not say which they follow."""
    for scheduler in with_parts(trainer.lr_scheduler):
        monitor = getattr(scheduler, "monitor", None)
        if monitor is not None:
            check_measured(monitor, trainer)
        elif isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "max":
            raise OptionError("ReduceLROnPlateau would follow the loss, of which more is not better", expected="a "
                              "monitor=, as 'validation_accuracy'", got="mode='max' and monitor=None")  # fmt: skip


# The run that a checkpoint is of: its options as they were given, and its data.


def options_given(trainer: Any) -> dict[str, Any]:
    """Return the options that losses depend on, by their names in messages, in JSON types.

    What training moves (a scheduled rate, a schedule's steps) is left out, and functions cannot be told apart.
    """
    optimizer, scheduler, loss, model = trainer.optimizer, trainer.lr_scheduler, trainer.loss, trainer.model
    groups, held = options_of(optimizer), names_of_groups(optimizer)
    moved = scheduler.get_last_lr() if hasattr(scheduler, "get_last_lr") else []
    for number, group in enumerate(groups):
        base = group.pop("initial_lr", None)
        if base is not None and moved[number : number + 1] == [group["lr"]]:  # else it has been set by hand
            group["lr"] = base
    firsts = [min(names, default="") for names in held] or [""]  # groups may come in another order
    options: dict[str, Any] = {
        "the optimizer": type(optimizer).__name__, "groups": dict(zip(firsts, groups, strict=True))
    }  # fmt: skip
    weights = {name: checksum(array) for name, array in _weights_of(loss).items()}
    options |= {
        "the learning-rate schedule": None if scheduler is None else _schedule_given(scheduler),
        "clip_norm": trainer.clip_norm, "accumulate": trainer.accumulate, "the loss": _given(loss) | weights,
        "the predictor": None if trainer.predictor is None else _given(trainer.predictor),
    }  # fmt: skip
    layers = dict(model.modules()) if hasattr(model, "modules") else {}
    options |= {f"the layer {name or 'that is the model'}": _given(layer) for name, layer in layers.items()}
    described: dict[str, Any] = json.loads(json.dumps(options, default=str), parse_constant=str)  # NaN equals itself
    return described


def _schedule_given(scheduler: Any) -> dict[str, Any]:
    inner = [_schedule_given(one) for one in getattr(scheduler, "schedulers", ())]
    moving = scheduler.state_dict()
    given = {name: value for name, value in _given(scheduler).items() if name not in moving}
    return given | ({"schedulers": inner} if inner else {})


def _given(thing: Any) -> dict[str, Any]:
    """Return a class with its options: of a user's class, what its constructor takes and the object keeps."""
    kind, own = type(thing), getattr(thing, "__dict__", {})
    names = own.keys() - {"training", "device", "inplace"}
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        with contextlib.suppress(TypeError, ValueError):  # a class without a signature
            names &= inspect.signature(kind).parameters.keys()
    options = {name: _fields(own[name]) for name in sorted(names) if not name.startswith("_")}
    return {"class": kind.__name__} | {name: value for name, value in options.items() if _plain(value)}


def _fields(value: Any) -> Any:
    """Return a dataclass, as a pooling layer's windows, as a dict."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | np.dtype)


def fingerprint(dataset: Any) -> dict[str, np.ndarray]:
    """Return numbers that tell a data set from another: for each array, those of some samples, float64 (2, samples).

    A sample's number is a weighted sum of its values; the second row is how far it may be off where the same data are
    computed by another machine. Nothing is known of data sets whose batches may be random or have effects.
    """
    size = sum(part.nbytes for part in _samples_of(dataset, 1).values())
    count = min(_FINGERPRINT_SAMPLES, max(_COMPARED, _FINGERPRINT_BYTES // max(1, size)))
    numbers = {}
    for name, part in _samples_of(dataset, count).items():
        axis = getattr(dataset, "sample_axis", 0) if name == "inputs" else 0
        array = np.moveaxis(backend.to_host(part), axis, 0)
        rows = array.reshape(len(array), -1).astype(np.float64)
        with np.errstate(all="ignore"):
            sums, norms = rows @ np.cos(np.arange(rows.shape[1])), np.sqrt((rows**2).sum(axis=1) * rows.shape[1])
        numbers[name] = np.stack((sums, norms * (1e-6 if array.dtype.kind == "f" else 1e-12)))
    return numbers


# Batches of an epoch.


def shape_of(data: Any, *, batch_size: Any, drop_last: Any, shuffle: Any, stateful: Any) -> dict[str, Any]:
    """Check how an epoch's batches are to be made, and return it with the number of samples; a loader has its own."""
    drop_last, stateful = check_flag("drop_last", drop_last), check_flag("stateful", stateful)
    shuffle = None if shuffle is None else check_flag("shuffle", shuffle)
    if isinstance(data, Loader):
        if batch_size is not None or drop_last or shuffle:
            raise OptionError("The batches are made already", expected="no batch_size, drop_last or shuffle",
                              got=f"batch_size={shown(batch_size)}, drop_last={drop_last}, shuffle={shuffle}",
                              remedy="Choose them where the batches are made: DataLoader(…, batch_size=…)")  # fmt: skip
        return {"batch_size": None, "samples": None, "drop_last": False, "shuffle": False, "stateful": stateful}
    if batch_size is None:
        raise OptionError("batch_size is missing", expected="the samples of a step", got="None")
    batch_size, samples = check_integer("batch_size", batch_size, 1), len(data)
    if stateful and shuffle:
        raise OptionError("Shuffled batches cannot go on with the sequences of the last one", expected="shuffle=False",
                          got="shuffle=True and stateful=True")  # fmt: skip
    shape = {"batch_size": batch_size, "samples": samples, "drop_last": drop_last, "stateful": stateful,
             "shuffle": not stateful if shuffle is None else shuffle}  # fmt: skip
    if steps_of(shape) == 0:
        raise OptionError("drop_last leaves no batch", expected=f"a batch_size up to {samples} samples", got=batch_size)
    if stateful and samples % batch_size and not drop_last:
        raise OptionError("The last batch cannot go on with all sequences of the one before: it is smaller",
                          expected=f"a divisor of {samples} samples, or drop_last=True", got=batch_size)  # fmt: skip
    return shape


# Data sets and arrays to train on: the axis of the samples, lengths of padded sequences, batches on the device.


def as_dataset(data: Any, model: Any, lengths: Any = None, *, targets: bool = True) -> Any:
    """Return `data`, or the data set of its arrays ``(x, target)`` or ``(x, target, lengths)``, sample first.

    Iterables and functions become a `Loader`. Without `targets`, arrays and its batches may be x alone.
    """
    make = partial(_of_arrays, model)
    array, sized = hasattr(data, "__array__") or backend.has_device_memory(data), hasattr(data, "__len__")
    batches = hasattr(data, "batch") and sized and not array  # a table may have such a column
    iterable = callable(data) or (hasattr(data, "__iter__") and not array)
    samples = hasattr(data, "__getitem__") and sized and not (iterable or array)
    if not targets and not (_holds_arrays(data) if isinstance(data, list | tuple) else iterable or samples or batches):
        data = (data,)
    if not targets and isinstance(data, tuple):
        x, *more = data
        x = real_array("x", x)
        data = x, np.zeros(x.shape[:1] or 1, np.int64), *more[1:]
    if isinstance(data, tuple):
        if len(data) not in (2, 3) or (len(data) == 3 and lengths is not None):
            raise OptionError("The arrays to train on are not understood", expected="(x, target), or with lengths",
                              got=f"{len(data)} arrays{'' if lengths is None else ' and lengths='}")  # fmt: skip
        dataset: Any = make(*(*data, lengths)[:3])
    elif lengths is not None:
        raise OptionError("lengths belong to arrays", expected="data that have them themselves", got="both",
                          remedy="Pass ArrayDataset(x, target, lengths=...), or batches (x, target, "
                          "lengths)")  # fmt: skip
    elif batches:
        dataset = data
        _check_axis(dataset, model)
    elif samples:
        dataset = Samples(data, make, targets=targets)
    elif iterable:
        return Loader(data, make, targets=targets)
    else:
        raise OptionError("Not a data set", expected="arrays (x, target), len(…) and batch(indices), or an iterable of "
                          "batches", got=type(data).__name__,
                          remedy="Pass a tuple of arrays, an ArrayDataset, or a DataLoader")  # fmt: skip
    if len(dataset) == 0:
        raise ShapeError("The data set is empty", expected="at least one sample", got=0)
    if getattr(dataset, "lengths", None) is not None:
        check_takes_lengths(model)
    return dataset


def _holds_arrays(data: Any) -> bool:
    """Whether these are arrays ``(x, target)``, or a list of such batches, not a list that numpy.asarray takes."""
    first = data[0] if isinstance(data, list) and data else data
    return isinstance(first, tuple) and bool(first) and getattr(first[0], "ndim", 0) > 0


def _of_arrays(model: Any, x: Any, target: Any, lengths: Any) -> ArrayDataset:
    """Return the data set of arrays, the sample first, whose batches the model takes."""
    first = sample_axis(model)
    dtype = getattr(model, "input_dtype", None) or next(iter(model.parameters().values())).dtype
    dataset = ArrayDataset(x, target, dtype=dtype, lengths=lengths, batch_first=first == 0)
    if first == 1 and dataset.inputs.ndim != 3:
        raise ShapeError("x has the wrong shape", expected="(N, T, I): samples, steps, features",
                         got=dataset.inputs.shape)  # fmt: skip
    return dataset


def batch_of(dataset: Any, indices: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return input, target, lengths and reset, if any, of some samples, on the model's device."""
    batch = dataset.batch(indices)
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3, 4):
        raise OptionError("The data set's batch is not understood", expected="input and target, or with lengths, or "
                          "with lengths (or None) and a reset", got=type(batch).__name__)  # fmt: skip
    while batch[-1] is None and len(batch) > 2:
        batch = batch[:-1]
    if len(batch) > 2 and batch[2] is not None:
        check_takes_lengths(model)
    device = backend.device_of(next(iter(model.parameters().values())))
    more = (None if part is None else np.array(part) for part in batch[2:])
    return *(_own(array, device) for array in batch[:2]), *more


def share_of(dataset: Any, indices: np.ndarray, own: np.ndarray, model: Any) -> tuple[Array, ...]:
    """Return this rank's samples `own` of a micro-batch, as `batch_of`; a data set is never asked for none."""
    if len(own):
        return batch_of(dataset, own, model)
    x, target, *more = batch_of(dataset, indices[:1], model)
    at = (slice(None),) * sample_axis(model) + (slice(0),)
    return x[at], target[:0], *(None if part is None else part[:0] for part in more)


def _own(array: Array, device: str) -> Array:
    """Return a copy: a data set may fill the same array again for the next micro-batch."""
    moved = backend.to_device(array, device)
    return moved.copy() if moved is array else moved


def axis_of(dataset: Any, model: Any) -> int:
    """Return the sample axis of a data set's inputs, for messages."""
    given = getattr(dataset, "sample_axis", None)
    return int(getattr(model, "batch_axes", (0, 0))[0] if given is None else given)


def sample_axis(model: Any) -> int:
    """Return the sample axis of the model's input."""
    given, returned = getattr(model, "batch_axes", (0, 0))
    if returned != 0:
        raise OptionError("The model is time-major: its output has the samples second", expected="batch_first=True",
                          got="batch_first=False", remedy="Build the layer with batch_first=True")  # fmt: skip
    return int(given)


def _check_axis(dataset: Any, model: Any) -> None:
    """Refuse sequences whose steps the model would read as samples, as far as both have sample axes."""
    given = getattr(dataset, "sample_axis", None)
    first = model.stages()[0][1] if hasattr(model, "stages") else model
    if given is None or getattr(type(first), "batch_axes", (0, 0)) == (0, 0):  # it does not say
        return
    if given != first.batch_axes[0]:
        raise OptionError(
            "The model reads the data set's steps as samples", expected=f"samples on axis {first.batch_axes[0]}",
            got=f"on axis {given} of the data set's batches",
            remedy="Pass the arrays (x, target) themselves, or give data set and recurrent layer the same batch_first"
        )  # fmt: skip


def check_takes_lengths(model: Any) -> None:
    """Raise `OptionError` unless ``model.forward`` takes ``lengths``, and so do the stages that a step runs."""
    stages = model.stages() if hasattr(model, "stages") else [("", model)]
    if len(stages) > 1 or is_group(stages[0][1]):
        taking_lengths(stages)
        return
    taken = inspect.signature(stages[0][1].forward).parameters
    if "lengths" not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise OptionError("The model does not take lengths", expected="forward(x, lengths=...), as SequenceClassifier "
                          "and GRU have it", got=f"{type(stages[0][1]).__name__}.forward({', '.join(taken)})",
                          remedy="Leave lengths out, or make one layer of the model that hands them on")  # fmt: skip
