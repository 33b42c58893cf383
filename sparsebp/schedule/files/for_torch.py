"""A schedule as ``torch.distributed.pipelining`` can run it: with the actions that it knows, and in its order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from sparsebp.core.errors import ScheduleError
from sparsebp.schedule.actions import Action, Cell, Lane, Overlap, parts_of
from sparsebp.schedule.schedule import Schedule


def for_torch(schedule: Schedule, *, sums: bool = False) -> Schedule:
    """Return `schedule` with the actions that PyTorch knows: see ``to_csv(…, torch=True)``.

    Parameters
    ----------
    schedule
        The schedule.
    sums
        Whether every stage is to have an S, on a stream ``"link"``, as soon as its gradients are there: in files with
        communication that is PyTorch's ``REDUCE_GRAD``, which also divides the gradients by the micro-batches.

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
            raise _not_for_torch(problem, got)
    lanes = [replace(lane, cells=tuple(new for cell in lane.cells for new in _torch_cells(schedule, cell)))
             for lane in schedule.lanes]  # fmt: skip
    lanes = [lane for lane in lanes if lane.cells]
    for one, other in pairwise(lanes):
        if one.worker == other.worker:
            raise _not_for_torch("has several streams a worker", f"{one} and {other}")
    links = [Lane(lane.worker, "link", tuple(_sums(lane, graph.microbatches))) for lane in lanes if sums]
    plain = replace(graph, updates="none", synchronised=sums, first="F", unweighted=frozenset())
    lanes = [replace(lane, stream="main") for lane in lanes]
    written = replace(schedule, graph=plain, lanes=(*lanes, *links))
    for action in (action for action in written if action.kind == "W"):
        gradient = Action(action.stage, "I", action.microbatch)
        if written.places[gradient] > written.places[action]:
            raise _not_for_torch("has a W before its I", f"{action} before {gradient}")
    return written


def _sums(lane: Lane, microbatches: int) -> Iterator[Action]:
    """Yield an S of every stage of a lane, in the order in which the last of its gradients come."""
    left: Counter[int] = Counter()
    for part in (part for cell in lane.cells for part in parts_of(cell) if part.kind == "W"):
        left[part.stage] += 1
        if left[part.stage] == microbatches:
            yield Action(part.stage, "S")


def _torch_cells(schedule: Schedule, cell: Cell) -> Iterator[Cell]:
    """Yield what stands for a cell: at most one."""
    if isinstance(cell, Overlap):
        yield from (Overlap(cell.forward, backward) for backward in _torch_actions(schedule, cell.backward))
    else:
        yield from _torch_actions(schedule, cell)


def _torch_actions(schedule: Schedule, action: Action) -> Iterator[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind in "SU":
        return
    weighted, differentiated = schedule.graph.weighted(stage), Action(stage, "I", m) in schedule
    if action.kind == "F" and not weighted and not differentiated:
        raise _not_for_torch("has a stage without backward", f"no backward of stage {stage}")
    alone = (action.kind == "I" and not weighted) or (action.kind == "W" and not differentiated)
    yield Action(stage, "B", m) if alone else action


def _not_for_torch(problem: str, got: str) -> ScheduleError:
    return ScheduleError(
        f"PyTorch cannot run the schedule: it {problem}", got=got,
        expected="F, then I, then W of every stage and micro-batch in one stream a worker",
        remedy="Write it without torch=True, or build another schedule",
    )  # fmt: skip
