"""What the actions of a schedule cost: time, bytes, transfers between workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from sparsebp.core.arguments import check_number, shown
from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, Cell, Kind, Overlap
from sparsebp.schedule.graph import StepGraph

DURATIONS: Mapping[Kind, float] = {"F": 1, "I": 1, "W": 1, "S": 0, "U": 0}
"""Where nothing else is said; a B takes as long as its I and W."""


def check_cost(name: str, value: Any) -> float:
    """Return a cost: a finite number, 0 or more.

    Raises
    ------
    OptionError
        It is something else.
    """
    try:
        return check_number(name, value, 0)
    except OptionError as error:
        raise OptionError(f"{name} cannot be", expected="a finite number, 0 or more", got=error.got,
                          remedy="Measure it again, or pass 0") from error  # fmt: skip


def _check_slowdown(value: float) -> float:
    try:
        return check_number("slowdown", value, 1)
    except OptionError as error:
        raise OptionError("Streams speed each other up", expected="a finite slowdown of 1 or more", got=error.got,
                          remedy="Pass 1 if they do not disturb each other") from error  # fmt: skip


@dataclass(frozen=True)
class StageBytes:
    """Memory of one stage: bytes, or any unit.

    Attributes
    ----------
    output
        Of one micro-batch's output. The gradient with respect to it has as many.
    saved
        What a forward keeps for the backward of one micro-batch, its input included.
    weights
        The weights. Their gradient has as many.

    Raises
    ------
    OptionError
        A number is negative or not finite.
    """

    output: float = 1
    saved: float = 1
    weights: float = 1

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_cost(f"The bytes of {entry.name}", getattr(self, entry.name))


class Side(NamedTuple):
    """One direction of a connection: it serves one transfer after the other.

    Attributes
    ----------
    key
        Which one it is.
    bandwidth
        Bytes a unit of time.
    """

    key: tuple[str, int, int]
    bandwidth: float


class Route(NamedTuple):
    """What a transfer takes: it begins when all sides are free, and arrives `latency` after the slowest has passed it.

    Attributes
    ----------
    sides
        Each is occupied for ``bytes / bandwidth`` from the begin on.
    latency
        Of the whole way.
    """

    sides: tuple[Side, ...]
    latency: float


@dataclass(frozen=True)
class Link:
    """The connection between any two workers, one for each direction.

    A transfer occupies it for ``bytes / bandwidth``, first come, first served; the data are there `latency` later.

    Raises
    ------
    OptionError
        The latency is negative or not finite; the bandwidth is not positive.
    """

    latency: float = 0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_cost("The latency of the link", self.latency)
        if check_number("The bandwidth of the link", self.bandwidth, finite=False) <= 0:
            raise OptionError("The bandwidth of the link is not positive", expected="a positive number, or inf",
                              got=self.bandwidth, remedy="Pass bytes a second")  # fmt: skip

    def route(self, sender: int, receiver: int) -> Route:
        """Return what a transfer between two workers takes."""
        return Route((Side(("pair", sender, receiver), self.bandwidth),), self.latency)

    def shares(self, worker: int) -> dict[tuple[str, int, int], float]:
        """Return for which share of its duration a worker's S occupies sides that transfers need, by their keys."""
        return {}


@dataclass(frozen=True)
class Costs:
    """Costs of all actions.

    Attributes
    ----------
    durations
        Seconds, or any unit: a mapping by kind, by action, or both (an action's own entry counts), or a function of the
        action. A mapping without an entry for a B takes the sum of its I and W. The default: F, I and W take 1, S and
        U take 0.
    stages
        Bytes of every stage, or one for all.
    link
        Between workers: the outputs of F and I travel over it.
    slowdown
        How much slower each of two streams of a worker runs while the other is busy: 1 if they do not disturb each
        other, 2 if they share the device evenly; a number, or a function of the action that is slowed down. Of n busy
        streams each runs ``1 + (n - 1) (slowdown - 1)`` times slower. The stream "link" is the network and disturbs
        none.

    Raises
    ------
    OptionError
        The durations are neither a mapping nor a function; the slowdown is below 1 or not finite.
    """

    durations: Mapping[Kind, float] | Mapping[Action, float] | Callable[[Action], float] = field(
        default_factory=lambda: dict(DURATIONS)
    )
    stages: tuple[StageBytes, ...] | StageBytes = StageBytes()
    link: Link = Link()
    slowdown: float | Callable[[Action], float] = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.durations, Mapping) and not callable(self.durations):
            raise OptionError("The durations say nothing of actions", expected="a mapping or a function",
                              got=shown(self.durations), remedy="Pass {'F': 1, 'I': 1, 'W': 1}, say")  # fmt: skip
        if not callable(self.slowdown):
            _check_slowdown(self.slowdown)
        if not isinstance(self.stages, StageBytes) and not (
            isinstance(self.stages, tuple) and all(isinstance(entry, StageBytes) for entry in self.stages)
        ):
            raise OptionError("stages are no bytes of stages", expected="StageBytes, or a tuple of them",
                              got=shown(self.stages), remedy="Pass StageBytes(output, saved, weights)")  # fmt: skip
        if not isinstance(self.link, Link):
            raise OptionError("link is none", expected="a Link", got=shown(self.link), remedy="Pass Link(latency)")

    def duration(self, action: Action) -> float:
        """Return what an action takes by itself.

        Raises
        ------
        OptionError
            There is no duration, or it is negative or not finite.
        """
        if isinstance(self.durations, Mapping):
            known: Mapping[Any, float] = self.durations
            value = known.get(action, known.get(action.kind))
            if value is None and action.kind == "B":
                return sum(self.duration(Action(action.stage, kind, action.microbatch)) for kind in ("I", "W"))
        else:
            value = self.durations(action)
        if value is None:
            raise OptionError(f"There is no duration of {action}", expected=f"an entry for {action} or {action.kind!r}",
                              got=None, remedy="Add one; 0 if it takes no time")  # fmt: skip
        check_cost(f"The duration of {action}", value)
        return value

    def durations_of(self, cells: Sequence[Cell], graph: StepGraph) -> list[float]:
        """Return what every one of many cells takes by itself.

        Raises
        ------
        OptionError
            As for `duration`.
        """
        by_stage: dict[tuple[int, Kind], float] = {}  # where no entry is of a single action
        general = not isinstance(self.durations, Mapping) or any(isinstance(key, Action) for key in self.durations)
        found = []
        for cell in cells:
            if isinstance(cell, Overlap):
                found.append(self.together(cell, graph))
            elif general:
                found.append(self.duration(cell))
            else:
                key = cell[0], cell[1]
                if key not in by_stage:
                    by_stage[key] = self.duration(cell)
                found.append(by_stage[key])
        return found

    def slowdown_of(self, action: Action) -> float:
        """Return how much slower an action runs while another stream is busy.

        Raises
        ------
        OptionError
            It is below 1 or not finite.
        """
        if not callable(self.slowdown):
            return self.slowdown
        return _check_slowdown(self.slowdown(action))

    def together(self, overlap: Overlap, graph: StepGraph) -> float:
        """Return what a forward and a backward take that start together on one worker.

        While both run, each is slowed down; then the longer one runs by itself. If the backward needs the forward, they
        run one after the other.
        """
        forward, backward = self.duration(overlap.forward), self.duration(overlap.backward)
        if overlap.forward in graph.predecessors(Action(overlap.backward.stage, "I", overlap.backward.microbatch)):
            return forward + backward
        first, second = self.slowdown_of(overlap.forward), self.slowdown_of(overlap.backward)
        both = min(forward * first, backward * second)
        return both + max(forward - both / first, backward - both / second)

    def bytes_of(self, stage: int) -> StageBytes:
        """Return the bytes of a stage."""
        return self.stages if isinstance(self.stages, StageBytes) else self.stages[stage]
