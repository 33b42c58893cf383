"""Where the updates of the weights go: at the end, right before the next forward, right after the gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from sparsebp.core.check import check_choice
from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, Cell, Lane, StepGraph, actions_of, trusted
from sparsebp.schedule.schedule import Schedule

Fusion: TypeAlias = Literal["none", "forward", "backward"]
FUSIONS: tuple[Fusion, ...] = get_args(Fusion)


def place_updates(schedule: Schedule, fusion: Fusion = "none", *, stream: str | None = None) -> Schedule:
    """Return `schedule` with one U a stage; those that it has are placed anew.

    Parameters
    ----------
    schedule
        Any with the same weights for all micro-batches of a step.
    fusion
        ``"none"``: all updates after the last gradient, first stage first.
        ``"forward"``: each right before the next forward that reads it: in a step that begins with the forwards, the
        updates are those of the step before, and the step then begins with them.
        ``"backward"``: each right after the last gradient of its stage, that of the last micro-batch. Where gradients
        are synchronised first: after the backward pass, in the order of their arrival.
    stream
        A stream of its own for the updates that follow gradients, so that they run beside the rest of the backward
        pass; by default they go to the stream of the weight gradient.

    Raises
    ------
    OptionError
        `fusion` is unknown, a stream is named for updates before forwards, or the schedule updates after every
        micro-batch.

    Notes
    -----
    Jiang et al., "Optimizer fusion", 2021, §3, Fig. 1: without limits on the workers the depth of the step's graph
    falls from 3 n to 2 n + 1 by ``"backward"``.
    """
    check_choice("fusion", fusion, FUSIONS)
    if stream is not None and fusion == "forward":
        raise OptionError("Updates before forwards have no stream", expected="stream=None", got=repr(stream))
    if schedule.graph.updates == "microbatch":
        raise OptionError("The schedule updates after every micro-batch", expected="one U a stage", got=schedule.name,
                          remedy="Take a synchronous schedule")  # fmt: skip
    plain = without_updates(schedule)
    stages = [stage for stage in range(plain.graph.stages) if plain.graph.weighted(stage)]
    places = {stage: _PLACES[fusion](plain, stage) for stage in stages}
    arrival = {stage: plain.places[Action(stage, "S")] if plain.graph.synchronised else stage for stage in stages}
    stages.sort(key=lambda stage: (places[stage], stage if fusion == "none" else arrival[stage]))
    updates: defaultdict[tuple[int, int], list[Cell]] = defaultdict(list)  # by the lane, and the cell that they precede
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
    """Return the schedule without U. Of a step that began with them, the forwards are now the beginning."""
    if schedule.graph.updates == "none":
        return schedule
    lanes = (replace(lane, cells=tuple(cell for cell in lane.cells if not _has(cell, "U"))) for lane in schedule.lanes)
    first = "F" if schedule.graph.first == "U" else schedule.graph.first
    graph = replace(schedule.graph, updates="none", first=first)
    name = schedule.name
    for fusion in FUSIONS:
        name = name.removesuffix(f", {fusion}-fusion")
    return replace(schedule, graph=graph, lanes=tuple(lane for lane in lanes if lane.cells), name=name)


# Which worker has which stages: contiguous chunks of them, and what a pipeline does with a chunk as a whole.


@dataclass(frozen=True)
class Partition:
    """The stages of a graph in `chunks` contiguous parts, as equal as can be; chunk c is on worker c mod `workers`."""

    graph: StepGraph
    workers: int
    chunks: int
    input_gradient: bool = True

    def __post_init__(self) -> None:
        if self.graph.stages < self.chunks:
            raise OptionError("There are too few stages", expected=f"{self.chunks} or more", got=self.graph.stages,
                              remedy="Use fewer workers or chunks, or cut the model into more stages")  # fmt: skip

    def stages(self, chunk: int) -> range:
        """Return the stages of a chunk."""
        return range(chunk * self.graph.stages // self.chunks, (chunk + 1) * self.graph.stages // self.chunks)

    def allocation(self) -> tuple[int, ...]:
        """Return the worker of every stage."""
        return tuple(chunk % self.workers for chunk in range(self.chunks) for _ in self.stages(chunk))

    def cells(self, kind: str, chunk: int, microbatch: int) -> list[Action]:
        """Return all F, I, W, B or U of a chunk and micro-batch: F with the data, the others against it."""
        if kind == "F":
            return [trusted(stage, "F", microbatch) for stage in self.stages(chunk)]
        cells = (self._cell(kind, stage, microbatch) for stage in reversed(self.stages(chunk)))
        return [cell for cell in cells if cell is not None]

    def _cell(self, kind: str, stage: int, microbatch: int) -> Action | None:
        weighted, differentiable = self.graph.weighted(stage), stage > 0 or self.input_gradient
        if kind == "B" and not (weighted and differentiable):
            kind = "W" if weighted else "I"
        if (kind in "WU" and not weighted) or (kind == "I" and not differentiable):
            return None
        return trusted(stage, kind, microbatch)  # type: ignore[arg-type]
