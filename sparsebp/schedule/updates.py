"""Placing updates: at the end, right before the next forward, or right after the gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from sparsebp.core.check import check_choice
from sparsebp.core.errors import OptionError
from sparsebp.schedule.schedule import Action, Cell, Lane, Schedule, actions_of

Fusion: TypeAlias = Literal["none", "forward", "backward"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)


def place_updates(schedule: Schedule, fusion: Fusion = "none", *, stream: str | None = None) -> Schedule:
    """Return `schedule` with one U per stage; existing ones are placed anew.

    Parameters
    ----------
    schedule
        Any with the same weights for all micro-batches of a step.
    fusion
        ``"none"``: all updates after the last gradient, first stage first.
        ``"forward"``: each right before the next forward that reads it: a step that began with the forwards then
        begins with the updates of the step before.
        ``"backward"``: each right after the last gradient of its stage, from the last micro-batch. Where gradients
        are synchronised first: after the backward pass, in the order of their arrival.
    stream
        A separate stream for updates that follow gradients, so that they run during the rest of the backward pass; by
        default they go to the stream of the weight gradient.

    Raises
    ------
    OptionError
        `fusion` is unknown, a stream is named for updates before forwards, stages are replicated, or the schedule
        updates after every micro-batch.

    Notes
    -----
    Jiang et al., "Optimizer fusion", 2021, §3, Fig. 1: without limits on the workers ``"backward"`` reduces the depth
    of the step's graph from 3 n to 2 n + 1.
    """
    check_choice("fusion", fusion, FUSIONS)
    if stream is not None and fusion == "forward":
        raise OptionError("Updates before forwards have no stream", expected="stream=None", got=repr(stream))
    if schedule.replicated:
        raise OptionError("The sums and updates of replicated stages follow the step", got=schedule.name,
                          expected="a schedule without any", remedy="Take dualpipe-v in place of dualpipe")  # fmt: skip
    if schedule.graph.updates == "microbatch":
        raise OptionError("The schedule updates after every micro-batch", expected="one U a stage", got=schedule.name,
                          remedy="Take a synchronous schedule")  # fmt: skip
    if not schedule.graph.backward:
        raise OptionError("A schedule of forwards has nothing to update", expected="a backward", got=schedule.name)
    plain = without_updates(schedule)
    stages = [stage for stage in range(plain.graph.stages) if plain.graph.weighted(stage)]
    places = {stage: _PLACES[fusion](plain, stage) for stage in stages}
    arrival = {stage: plain.places[Action(stage, "S")] if plain.graph.synchronised else stage for stage in stages}
    stages.sort(key=lambda stage: (places[stage], stage if fusion == "none" else arrival[stage]))
    updates: defaultdict[tuple[int, int], list[Cell]] = defaultdict(list)  # by the lane and the next cell's position
    separate: defaultdict[int, list[Cell]] = defaultdict(list)  # by the worker
    for stage in stages:
        number, position = places[stage]
        into = updates[number, position] if stream is None else separate[plain.lanes[number].worker]
        into.append(Action(stage, "U"))
    begins = "U" if fusion == "forward" and plain.graph.first == "F" else plain.graph.first
    lanes = [
        replace(lane, cells=tuple(cell for at in range(len(lane.cells) + 1)
                                  for cell in (*updates.get((number, at), ()), *lane.cells[at : at + 1])))
        for number, lane in enumerate(plain.lanes)
    ]  # fmt: skip
    lanes += [Lane(worker, stream or "", tuple(cells)) for worker, cells in separate.items()]
    graph = replace(plain.graph, updates="step", first=begins)
    name = plain.name + (f", {fusion}-fusion" if fusion != "none" else "")
    return replace(plain, graph=graph, lanes=tuple(lanes), name=name)


def _at_end(schedule: Schedule, stage: int) -> tuple[int, int]:
    """The end of the backward pass, in the lane of the forwards; the gradients may be in another."""
    number, _ = schedule.places[Action(stage, "F", 0)]
    cells = schedule.lanes[number].cells
    if schedule.graph.first == "F":
        return number, len(cells)
    return number, next(position for position, cell in enumerate(cells) if _has(cell, "F"))


def _before_forward(schedule: Schedule, stage: int) -> tuple[int, int]:
    return min(schedule.places[Action(stage, "F", m)] for m in range(schedule.graph.microbatches))


def _after_gradient(schedule: Schedule, stage: int) -> tuple[int, int]:
    """Right after the stage's last W, and I if that is in the same lane; synchronised: see `place_updates`."""
    if schedule.graph.synchronised:
        return _at_end(schedule, stage)
    microbatches = range(schedule.graph.microbatches)
    lane = schedule.places[Action(stage, "W", 0)][0]
    gradients = [Action(stage, kind, m) for kind in ("W", "I") for m in microbatches]
    there = [schedule.places[gradient] for gradient in gradients if gradient in schedule]
    return lane, 1 + max(position for number, position in there if number == lane)


_PLACES: dict[Fusion, Callable[[Schedule, int], tuple[int, int]]] = {
    "none": _at_end,
    "forward": _before_forward,
    "backward": _after_gradient,
}


def _has(cell: Cell, kind: str) -> bool:
    return any(action.kind == kind for action in actions_of(cell))


def without_updates(schedule: Schedule) -> Schedule:
    """Return the schedule without U; a step that began with them now begins with the forwards."""
    if schedule.graph.updates == "none":
        return schedule
    lanes = (replace(lane, cells=tuple(cell for cell in lane.cells if not _has(cell, "U"))) for lane in schedule.lanes)
    first = "F" if schedule.graph.first == "U" else schedule.graph.first
    graph = replace(schedule.graph, updates="none", first=first)
    name = schedule.name
    for fusion in FUSIONS:
        name = name.removesuffix(f", {fusion}-fusion")
    return replace(schedule, graph=graph, lanes=tuple(lane for lane in lanes if lane.cells), name=name)
