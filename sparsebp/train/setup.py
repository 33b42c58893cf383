"""The options of a training, checked, and the executor that they ask for."""

from __future__ import annotations

import inspect
import os
import zlib
from typing import Any, get_args

from sparsebp.comm.group import GroupTransport
from sparsebp.comm.transport import Transport, check_transport
from sparsebp.core.check import check_choice, check_integer, check_sequence, did_you_mean, shown
from sparsebp.core.errors import OptionError
from sparsebp.nn.loss import check_mean
from sparsebp.optim import Predictor
from sparsebp.optim.lr_schedules import ChainedScheduler, ReduceLROnPlateau, with_parts
from sparsebp.runtime.actions import Observer, Stages
from sparsebp.runtime.executor import Executor, PlainExecutor
from sparsebp.runtime.grid import GridExecutor
from sparsebp.runtime.pipeline import PipelineExecutor, check_fits_ranks, own_stages
from sparsebp.runtime.replicas import ReplicaExecutor, ReverseFirstKExecutor
from sparsebp.runtime.search import SCHEDULE_NAME, OutOfOrderExecutor
from sparsebp.schedule import Schedule
from sparsebp.schedule.builders import BUILDERS, Fusion, build, conventional, data_parallel, discover_builders
from sparsebp.schedule.files import read_csv, to_csv, without_weights
from sparsebp.train.monitors import check_measured
from sparsebp.train.state import TrainingState

# Options, and the schedule that they name.

REPLICAS, FIRST_K = "data-parallel", "reverse-first-k"


def pipelines() -> tuple[str, ...]:
    """Return the names of pipelines to train with, registered builders' among them."""
    return tuple(name for name, make in BUILDERS.items()
                 if "workers" in inspect.signature(make).parameters and name != "forward-only")  # fmt: skip


def on_ranks() -> tuple[str, ...]:
    """Return the names of schedules for several ranks."""
    return (REPLICAS, FIRST_K, *pipelines())


def schedule_names() -> tuple[str, ...]:
    """Return the names of schedules; any other text is a path."""
    return ("conventional", "ooo", *on_ranks())


def asynchronous(schedule: Any) -> bool:
    """Return whether a schedule's name is one with updates between micro-batches, which change the losses."""
    return isinstance(schedule, str) and schedule in pipelines() and build(schedule).graph.updates == "microbatch"


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
    if not path and schedule not in schedule_names():
        discover_builders()
    names = schedule_names()
    if not path and schedule not in names and not os.path.exists(schedule):
        raise OptionError(
            "Unknown schedule", expected=f"{', '.join(names)}, or the path of an action CSV", got=repr(schedule),
            remedy=did_you_mean(schedule, names) or "Pass one of the names, or a file that is there",
        )  # fmt: skip
    if transport is None and isinstance(schedule, str) and schedule in on_ranks():
        raise OptionError(f"The schedule {schedule!r} is of several workers", expected="a transport between them",
                          got="transport=None", remedy="Pass transport=, under mpiexec that of MPI: mpiexec -n 4 "
                          "sparsebp train …; see the how-to guide on many workers")  # fmt: skip
    if transport is not None and transport.size > 1 and schedule in ("conventional", "ooo"):
        raise OptionError("Several ranks need a schedule of theirs", expected=", ".join(on_ranks()), got=repr(schedule),
                          remedy="Pass schedule='1f1b', say, or start one process")  # fmt: skip


def check_replicas(
    replicas: Any, schedule: Any, transport: Transport | None
) -> tuple[Transport | None, Transport | None]:
    """Return the transport of this rank's pipeline, and the one between its replicas; None if there are none."""
    replicas = check_integer("replicas", replicas, 1)
    if replicas == 1:
        return transport, None
    pipelined = not isinstance(schedule, str) or schedule not in ("conventional", "ooo", REPLICAS, FIRST_K)
    if transport is None or not pipelined:
        raise OptionError("replicas are of pipelines", expected="a transport, and schedule='1f1b' or another pipeline",
                          got=f"schedule={schedule!r}" + " and no transport" * (transport is None),
                          remedy="Use schedule='data-parallel' for replicas that have all stages")  # fmt: skip
    if transport.size % replicas:
        raise OptionError("The ranks cannot be divided into pipelines", expected=f"a multiple of {replicas} ranks",
                          got=transport.size, remedy="Start another number of ranks")  # fmt: skip
    size = transport.size // replicas
    first = transport.rank // size * size
    return (GroupTransport(transport, range(first, first + size)),
            GroupTransport(transport, range(transport.rank % size, transport.size, size)))  # fmt: skip


def schedule_of(
    stages: Stages, fusion: Fusion, accumulate: int, schedule: str | os.PathLike[str] | Schedule, ranks: int = 1
) -> Schedule:  # fmt: skip
    """Return the schedule of checked options, except ``"ooo"`` and ``"reverse-first-k"``, which measure first."""
    if schedule == "conventional":
        return conventional(stages=len(stages), microbatches=accumulate, fusion=fusion, unweighted=stages.unweighted)
    if schedule == REPLICAS:
        return data_parallel(stages=len(stages), microbatches=accumulate, unweighted=stages.unweighted)
    if isinstance(schedule, str) and schedule in pipelines():
        given = build(schedule, workers=ranks, stages=len(stages), microbatches=accumulate,
                      unweighted=stages.unweighted, strict=False)  # fmt: skip
    else:
        given = schedule if isinstance(schedule, Schedule) else read_csv(schedule)
    if not given.graph.backward:
        raise OptionError("The schedule has forwards alone", expected="gradients to train with", got=shown(given.name))
    if given.graph.microbatches != accumulate:
        raise OptionError("The schedule has another number of micro-batches", expected=f"accumulate={accumulate}",
                          got=given.graph.microbatches, remedy="Pass accumulate= as the schedule has it")  # fmt: skip
    return without_weights(given, stages.unweighted) if given.graph.stages == len(stages) else given


def _earlier_schedule(run: TrainingState, stages: Stages) -> Schedule | None:
    """Return the out-of-order schedule found by an earlier `fit`, or by an earlier run in the folder, if it fits."""
    path = None if run.checkpoint_dir is None else run.checkpoint_dir / SCHEDULE_NAME
    if run.found_schedule is not None:
        if _is_of(run.found_schedule.schedule, stages):
            return run.found_schedule.schedule
        run.found_schedule = None  # other parameters are trained now
    earlier = read_csv(path) if path is not None and path.exists() else None
    return earlier if earlier is not None and _is_of(earlier, stages) else None


def _is_of(schedule: Schedule, stages: Stages) -> bool:
    graph = schedule.graph
    return (len(stages), 1, stages.unweighted) == (graph.stages, graph.microbatches, graph.unweighted)


def stages_by_rank(run: TrainingState, stages: Stages) -> list[list[int]]:
    """Return the stages that every rank runs."""
    transport, everything = run.pipeline_ranks, list(range(len(stages)))
    if run.transport is None or transport is None or run.transport.size == 1 or run.schedule in (REPLICAS, FIRST_K):
        return [everything] * (1 if transport is None else transport.size)
    schedule = schedule_of(stages, run.fusion, run.accumulate, run.schedule, transport.size)
    if schedule.graph.synchronised:
        return [everything] * transport.size
    check_fits_ranks(schedule, stages, transport, predicts=run.predictor is not None)
    return [own_stages(schedule, rank % transport.size) for rank in range(run.transport.size)]


def executor_of(run: TrainingState, stages: Stages, observer: Observer) -> Executor:
    """Return the executor of a training's steps, by the schedule that its options name."""
    parts, transport = (run.model, run.loss, run.optimizer), run.pipeline_ranks
    clips: dict[str, Any] = {"clip_norm": run.clip_norm, "observer": observer}
    if transport is not None and run.schedule == FIRST_K:
        _check_heeded(run, replicas=True, asynchronous=False)
        return ReverseFirstKExecutor(*parts, transport, **clips, sharded=run.sharded)
    found = _earlier_schedule(run, stages) if run.schedule == "ooo" else None
    if run.schedule == "ooo" and found is None:
        return OutOfOrderExecutor(*parts, observer=observer, memory_ratio=run.memory_ratio, graph=run.graph)
    ranks = 1 if transport is None else transport.size
    schedule = found or schedule_of(stages, run.fusion, run.accumulate, run.schedule, ranks)
    graph = schedule.graph
    if transport is not None:
        _check_heeded(
            run,
            replicas=graph.synchronised or run.replica_ranks is not None,
            asynchronous=graph.updates == "microbatch",
        )
    if transport is not None and run.replica_ranks is not None:
        return GridExecutor(*parts, schedule, transport, run.replica_ranks, **clips, sharded=run.sharded)
    if transport is None or (transport.size == 1 and graph.updates == "step" and not graph.synchronised):
        return PlainExecutor(*parts, schedule, **clips, graph=run.graph)
    if graph.synchronised:
        return ReplicaExecutor(*parts, schedule, transport, **clips, sharded=run.sharded)
    return PipelineExecutor(*parts, schedule, transport, **clips, predictor=run.predictor, note=run.note)


def _check_heeded(run: TrainingState, *, replicas: bool, asynchronous: bool) -> None:
    """Refuse options that a schedule of this kind ignores."""
    for wrong, name, expected in (
        (run.sharded and not replicas, "sharded", "schedule='data-parallel' or 'reverse-first-k', or replicas="),
        (run.note is not None and not asynchronous, "note", "an asynchronous pipeline, as schedule='pipedream'"),
        (run.predictor is not None and not asynchronous, "predictor", "schedule='dualpipe-2018'"),
    ):
        if wrong:
            raise OptionError(f"{name} is for other schedules", expected=expected, got=f"schedule={run.schedule!r}",
                              remedy=f"Leave {name} out")  # fmt: skip


def check_monitors(run: TrainingState) -> None:
    """Refuse learning-rate schedules that follow a number that is not measured, or do not say which they follow."""
    for scheduler in with_parts(run.lr_scheduler):
        monitor = getattr(scheduler, "monitor", None)
        if monitor is not None:
            check_measured(monitor, run)
        elif isinstance(scheduler, ReduceLROnPlateau) and scheduler.mode == "max":
            raise OptionError("ReduceLROnPlateau would follow the loss, of which more is not better", expected="a "
                              "monitor=, as 'validation_accuracy'", got="mode='max' and monitor=None")  # fmt: skip
