"""What of a schedule the runtime of ``torch.distributed.pipelining`` can run, and how it calls it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action, Cell, Overlap
from sparsebp.schedule.schedule import Lane, Schedule


def for_torch(schedule: Schedule) -> Schedule:
    """Return `schedule` with the actions that PyTorch knows: see ``to_csv(…, torch=True)``.

    Raises
    ------
    ScheduleError
        PyTorch could not run it.
    """
    graph = schedule.graph
    for problem, got in (
        ("begins with backwards", 'first="I"' if graph.first == "I" else None),
        ("updates after every micro-batch", graph.updates if graph.updates == "microbatch" else None),
        ("recomputes activations", f"stages {sorted(schedule.recomputed)}" if schedule.recomputed else None),
    ):
        if got is not None:
            raise _refused(problem, got)
    lanes = [lane for lane in (_translated(schedule, lane) for lane in schedule.lanes) if lane.cells]
    for one, other in pairwise(lanes):
        if one.worker == other.worker:
            raise _refused("has several streams a worker", f"{one} and {other}")
    lanes = [replace(lane, stream="main") for lane in lanes]
    plain = replace(graph, updates="none", synchronised=False, first="F")
    written = replace(schedule, graph=replace(plain, unweighted=frozenset()), lanes=tuple(lanes))
    for action in written:
        gradient = Action(action.stage, "I", action.microbatch)
        if action.kind == "W" and written.place(gradient) > written.place(action):
            raise _refused("has a W before its I", f"{action} before {gradient}")
    return written


def _translated(schedule: Schedule, lane: Lane) -> Lane:
    return replace(lane, cells=tuple(cell for old in lane.cells for cell in _cells(schedule, old)))


def _cells(schedule: Schedule, cell: Cell) -> Iterator[Cell]:
    """Yield what stands for a cell: at most one."""
    if isinstance(cell, Overlap):
        yield Overlap(cell.forward, next(_actions(schedule, cell.backward)))
    else:
        yield from _actions(schedule, cell)


def _actions(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind in "SU":
        return
    if action.kind == "F" and not schedule.graph.weighted(stage) and Action(stage, "I", m) not in schedule:
        raise _refused("has a stage without backward", f"no backward of stage {stage}")
    alone = (action.kind == "I" and not schedule.graph.weighted(stage)) or (
        action.kind == "W" and Action(stage, "I", m) not in schedule
    )
    yield Action(stage, "B", m) if alone else action


def _refused(problem: str, got: str) -> ScheduleError:
    return ScheduleError(
        f"PyTorch cannot run the schedule: it {problem}", got=got,
        expected="F, then I, then W of every stage and micro-batch in one stream a worker",
        remedy="Write it without torch=True, or build another schedule",
    )  # fmt: skip
