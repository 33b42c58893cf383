"""A schedule: the actions of a training step, their graph, and their order on every stream.

``2I0`` is the input gradient of stage 2, micro-batch 0.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, TypeAlias, get_args

from sparsebp.core.check import check_choice, check_flag, check_integer, check_sequence, shown
from sparsebp.core.errors import FileFormatError, OptionError, ScheduleError
from sparsebp.core.locks import cached_property

Kind: TypeAlias = Literal["F", "I", "W", "B", "S", "U"]
KINDS: dict[Kind, str] = {
    "F": "forward",
    "I": "input gradient",
    "W": "weight gradient",
    "B": "input and weight gradient in one",
    "S": "synchronisation of the weight gradients between workers",
    "U": "update of the weights",
}
"""Meaning of the letters. F, I, W and B come from ``torch.distributed.pipelining``."""

_ACTION = re.compile(r"([0-9]{1,9})([FIWBSU])([0-9]{0,9})")
_OVERLAP = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class _Fields(NamedTuple):
    stage: int
    kind: Kind
    microbatch: int | None


class Action(_Fields):
    """One action of one stage of a model. A tuple, so that sets and mappings of many actions are fast.

    Parameters
    ----------
    stage : int
        Number of the stage, from 0 at the input. A stage is one layer or several.
    kind : Kind
        One of `KINDS`.
    microbatch : int or None, default None
        Number of the micro-batch. None for S and U that take the gradients of all micro-batches together.

    Raises
    ------
    OptionError
        The kind is unknown, a number is negative, or F, I, W or B has no micro-batch.
    """

    __slots__ = ()

    def __new__(cls, stage: int, kind: Kind, microbatch: int | None = None) -> Action:
        """Check and make an action."""
        if type(stage) is not int or (microbatch is not None and type(microbatch) is not int):
            stage = check_integer("stage", stage, -(2**31))
            microbatch = None if microbatch is None else check_integer("microbatch", microbatch, -(2**31))
        self = tuple.__new__(cls, (stage, kind, microbatch))
        if not isinstance(kind, str) or kind not in KINDS:
            raise OptionError("Unknown kind of action", expected=", ".join(KINDS), got=shown(kind))
        if stage < 0 or (microbatch is not None and microbatch < 0):
            raise OptionError("A stage or micro-batch is negative", expected="0 or more", got=str(self))
        if microbatch is None and kind not in "SU":
            raise OptionError(f"{kind} needs a micro-batch", expected=f"{stage}{kind}0, say", got=str(self))
        return self

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def trusted(stage: int, kind: Kind, microbatch: int | None = None) -> Action:
    """Return an action without a check, for loops over many whose numbers were checked before."""
    return tuple.__new__(Action, (stage, kind, microbatch))


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and a backward that one worker runs at the same time, as in ``(0F1;7B0)OVERLAP_F_B``.

    If the backward needs the forward (same micro-batch, last stage), the worker runs the forward first, then the
    backward.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.kind != "F" or self.backward.kind not in "BI":
            raise OptionError("An overlap joins a forward and a backward", expected="F and then B or I", got=str(self),
                              remedy="Put other actions in cells of their own")  # fmt: skip

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap
"""A lane's unit of work."""


@dataclass(frozen=True)
class Lane:
    """One stream of one worker: the cells that it runs, in order.

    Attributes
    ----------
    worker
        Number of the worker (device, rank), from 0.
    stream
        Its name: ``"main"``, ``"sub"`` (a second stream of the same device), ``"link"`` (the worker's network).
    cells
        Actions, and overlaps of two.
    """

    worker: int
    stream: str
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        return f"worker {self.worker}, {self.stream}"


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of a cell, one or two."""
    return (cell.forward, cell.backward) if isinstance(cell, Overlap) else (cell,)


def parts_of(cell: Cell) -> tuple[Action, ...]:
    """Return the actions of the graph in a cell, where a B is I and W."""
    if isinstance(cell, Overlap):
        return cell.forward, *parts_of(cell.backward)
    if cell.kind != "B":
        return (cell,)
    return trusted(cell.stage, "I", cell.microbatch), trusted(cell.stage, "W", cell.microbatch)


def parse(text: str) -> Cell:
    """Return the cell of a text that ``str`` wrote; another text raises `FileFormatError`."""
    if not isinstance(text, str):
        raise FileFormatError("A cell is not a text", expected="2I0, say", got=shown(text))
    text = text.strip()
    overlap = _OVERLAP.fullmatch(text)
    if overlap:
        return Overlap(_parse_action(overlap[1]), _parse_action(overlap[2]))
    return _parse_action(text)


def _parse_action(text: str) -> Action:
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise FileFormatError("A cell is not an action",
                              expected="[stage][F|I|W|B|S|U][micro-batch], as in 2I0, or (0F1;7B0)OVERLAP_F_B",
                              got=shown(text), remedy="Write a bubble as an empty cell")  # fmt: skip
    kind: Kind = match[2]  # type: ignore[assignment]
    return Action(int(match[1]), kind, int(match[3]) if match[3] else None)


# The graph of one training step: its actions, and the needs of each (the table of actions in the docs).

First: TypeAlias = Literal["F", "I", "U"]
Updates: TypeAlias = Literal["none", "step", "microbatch"]
Weights: TypeAlias = Literal["current", "stashed", "latest"]
MOST = 10_000_000
"""Forwards of a step at most: more would take minutes and gigabytes."""


@dataclass(frozen=True)
class StepGraph:
    """The actions of one training step of a chain of stages; a schedule places and orders them.

    Training repeats F, I, W, S, U forever, and a step may be cut out of that anywhere. `first` is where it begins:

    - ``"F"``: forward, backward, update.
    - ``"I"``: the backward of one batch, then the forward of the next with the new weights: F needs U (without U: S;
      without both: W). This is how the out-of-order paper states the problem (§2).
    - ``"U"``: the update from the gradients of the batch before, then forward and backward: F needs U.

    Parameters
    ----------
    stages, microbatches
        Their numbers, 1 or more.
    unweighted
        Stages without parameters: they have no W, S, U.
    updates
        ``"none"``: the step ends with the gradients. ``"step"``: one U per stage, from all micro-batches.
        ``"microbatch"``: one U after every micro-batch (asynchronous pipelines: PipeDream, the 2018 DualPipe).
    synchronised
        Whether the gradients of every stage are synchronised (one S each) before its U.
    first
        See above. Updates after every micro-batch need ``"F"``.
    weights
        Which version of its stage's weights a backward reads. ``"current"``: its forward's, and memory holds just one:
        an update waits for every I that reads the old one. ``"stashed"``: its forward's, kept next to newer ones.
        ``"latest"``: the newest. The last two need updates after every micro-batch.
    backward
        Whether the step has gradients. Without them (evaluation, prediction) it has forwards alone, and none of the
        options after `unweighted`.

    Raises
    ------
    OptionError
        A number is below 1, a stage is unknown, or the options exclude each other.
    """

    stages: int
    microbatches: int = 1
    unweighted: frozenset[int] = frozenset()
    updates: Updates = "none"
    synchronised: bool = False
    first: First = "F"
    weights: Weights = "current"
    backward: bool = True

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if (count := self.stages * self.microbatches) > MOST:
            raise OptionError("A step has too many forwards", expected=f"{MOST} at most", got=count,
                              remedy="Join stages or micro-batches")  # fmt: skip
        for name, choices in (("first", First), ("updates", Updates), ("weights", Weights)):
            check_choice(name, getattr(self, name), get_args(choices))
        check_flag("synchronised", self.synchronised)
        check_flag("backward", self.backward)
        stages = check_sequence("unweighted", self.unweighted, "numbers of stages")
        numbers = frozenset(check_integer("a stage of unweighted", stage, -1) for stage in stages)
        object.__setattr__(self, "unweighted", numbers)
        unknown = sorted(self.unweighted.difference(range(self.stages)))
        if unknown:
            raise OptionError("Unknown stages are unweighted", expected=f"0 to {self.stages - 1}", got=unknown)
        asynchronous = self.updates == "microbatch"
        if asynchronous == (self.weights == "current") or (asynchronous and self.first != "F"):
            expected = 'updates="microbatch" with weights "stashed" or "latest" and first="F", or others with "current"'
            got = f"updates={self.updates!r}, weights={self.weights!r}, first={self.first!r}"
            raise OptionError("updates, weights and first exclude each other", expected=expected, got=got)
        if not self.backward and (self.updates, self.first, self.synchronised) != ("none", "F", False):
            got = f"updates={self.updates!r}, first={self.first!r}, synchronised={self.synchronised}"
            raise OptionError("A step without backward has forwards alone", expected="no other option", got=got)
        if self.first == "U" and self.updates != "step":
            raise OptionError('first="U" needs updates', expected='updates="step"', got=repr(self.updates))

    def weighted(self, stage: int) -> bool:
        """Whether the stage has parameters."""
        return stage not in self.unweighted

    def required(self) -> Iterator[Action]:
        """Yield the actions that every schedule must have, B as I and W. I of stage 0 may be left out."""
        for stage in range(self.stages):
            for m in range(self.microbatches):
                yield trusted(stage, "F", m)
                if not self.backward:
                    continue
                if stage > 0:
                    yield trusted(stage, "I", m)
                if self.weighted(stage):
                    yield trusted(stage, "W", m)
            if self.weighted(stage) and self.backward:
                if self.synchronised:
                    yield from self._at_ends(stage, "S")
                if self.updates != "none":
                    yield from self._at_ends(stage, "U")

    def optional(self) -> Iterator[Action]:
        """Yield the actions that a schedule may have: the gradients with respect to the input of the model."""
        for m in range(self.microbatches) if self.backward else ():
            yield trusted(0, "I", m)

    def predecessors(self, action: Action) -> Iterator[Action]:
        """Yield the actions of the same step that `action` (not B) needs; an optional one counts if it is present."""
        yield from self.inputs(action)
        if action.kind == "F" and self.first != "F":
            yield from self.newest_weights(action.stage)

    def inputs(self, action: Action) -> Iterator[Action]:
        """Yield the predecessors of `action`, except those that make the weights of an F's stage."""
        stage, m = action.stage, action.microbatch
        if action.kind == "F":
            if stage > 0:
                yield trusted(stage - 1, "F", m)
        elif action.kind in "IW":
            if stage + 1 < self.stages:
                yield trusted(stage + 1, "I", m)
            if self.first != "I":
                yield trusted(stage, "F", m)
        elif action.kind == "S":
            yield from self._of(stage, "W", m)
        elif self.first != "U":
            if self.synchronised:
                yield trusted(stage, "S", m)
            yield from self._of(stage, "W", m)
            if self.weights == "current":
                yield from self._of(stage, "I", m)

    def newest_weights(self, stage: int) -> Iterator[Action]:
        """Yield the actions after which a forward reads the newest weights, in this step or the one before."""
        if not self.weighted(stage) or self.updates == "microbatch":
            return
        if self.updates == "step":
            yield trusted(stage, "U")
        elif self.synchronised:
            yield trusted(stage, "S")
        else:
            yield from self._of(stage, "W", None)

    def carried(self, action: Action) -> Iterator[Action]:
        """Yield the actions of the step before that `action` (not B) needs, where steps follow each other."""
        # Weights that are updated after every micro-batch are read as they are: nothing is waited for.
        stage, m = action.stage, action.microbatch
        if action.kind == "F" and self.first == "F":
            yield from self.newest_weights(stage)
        elif action.kind in "IW" and self.first == "I":
            yield trusted(stage, "F", m)
        elif action.kind == "U" and self.first == "U":
            if self.synchronised:
                yield trusted(stage, "S")
            yield from self._of(stage, "W", None)
            yield from self._of(stage, "I", None)

    def _at_ends(self, stage: int, kind: Literal["S", "U"]) -> Iterator[Action]:
        """Yield one action per stage, or one per micro-batch."""
        if self.updates == "microbatch":
            for m in range(self.microbatches):
                yield trusted(stage, kind, m)
        else:
            yield trusted(stage, kind)

    def _of(self, stage: int, kind: Literal["I", "W"], microbatch: int | None) -> Iterator[Action]:
        """Yield the gradients of one micro-batch, or of all if it is None."""
        for m in range(self.microbatches) if microbatch is None else (microbatch,):
            yield trusted(stage, kind, m)


# The cells of a schedule as a graph of numbers: dependencies by lane order, data and transfers.


class Send(NamedTuple):
    """Data that one worker sends to another: an F's output, or the gradient at the input of an I's stage."""

    # source: The action that makes it. receiver: The other worker. readers: Numbers of the cells that wait for it.
    source: Action
    receiver: int
    readers: list[int]


@dataclass(frozen=True)
class CellGraph:
    """All cells of a schedule, numbered lane after lane."""

    # lanes: The number of the lane of every cell.
    # numbers: The cell of every action; I and W are found within a B.
    # first: The number of the first cell of every lane.
    # followers: For every cell, the cells on the same worker that wait for it: the next in its lane, and its readers.
    # sends: For cells that other workers wait for, the data to send.
    # waits: For every cell, how many `followers` and `sends` entries name it.

    cells: tuple[Cell, ...]
    lanes: list[int]
    numbers: dict[Action, int]
    first: list[int]
    followers: list[list[int]]
    sends: dict[int, list[Send]]
    waits: list[int]

    def after(self, number: int) -> Iterator[int]:
        """Yield all cells of the step that wait for a cell."""
        yield from self.followers[number]
        for send in self.sends.get(number, ()):
            yield from send.readers

    def in_turn(self, ignored: Collection[tuple[int, int]] = ()) -> Iterator[int]:
        """Yield cells, each after all that it waits for; cycles, and cells that wait for them, are never reached."""
        waits = list(self.waits)
        for _, reader in ignored:
            waits[reader] -= 1
        ready = deque(number for number, count in enumerate(waits) if count == 0)
        while ready:
            number = ready.popleft()
            yield number
            for reader in self.after(number):
                if ignored and (number, reader) in ignored:
                    continue
                waits[reader] -= 1
                if waits[reader] == 0:
                    ready.append(reader)


def cell_graph(step: StepGraph, schedule: Sequence[Lane], places: Mapping[Action, tuple[int, int]]) -> CellGraph:
    """Return the graph of the cells of some lanes; `places` has every action's lane and its place there."""
    cells = tuple(cell for lane in schedule for cell in lane.cells)
    lanes = [number for number, lane in enumerate(schedule) for _ in lane.cells]
    first = list(accumulate((len(lane.cells) for lane in schedule), initial=0))[:-1]
    numbers = {action: first[lane] + position for action, (lane, position) in places.items()}
    graph = CellGraph(cells, lanes, numbers, first, [[] for _ in cells], {}, [0] * len(cells))
    weights = _weights(step, graph) if step.first != "F" else [[]] * step.stages
    workers = [schedule[lane].worker for lane in lanes]
    sent: dict[Action, Send] = {}  # all readers are on one worker, like all actions of a stage
    inputs, late = step.inputs, step.first != "F"
    for number, cell in enumerate(cells):
        worker = workers[number]
        local = {number - 1} if number > first[lanes[number]] else set()
        for part in parts_of(cell):
            for needed in inputs(part):
                source = numbers.get(needed, number)
                if workers[source] == worker:
                    local.add(source)
                    continue
                send = sent.get(needed)
                if send is None:
                    send = sent[needed] = Send(needed, worker, [])
                    graph.sends.setdefault(source, []).append(send)
                if not send.readers or send.readers[-1] != number:
                    send.readers.append(number)
                    graph.waits[number] += 1
            if late and part.kind == "F":
                local.update(weights[part.stage])
        local.discard(number)
        for source in local:
            graph.followers[source].append(number)
        graph.waits[number] += len(local)
    return graph


def carried(step: StepGraph, lanes: Sequence[Lane], cells: CellGraph) -> tuple[list[list[int]], list[int]]:
    """Return the cells that wait for each cell of the step before, and for how many each waits, in repeated steps."""
    weights = _weights(step, cells) if step.first == "F" else [[]] * step.stages
    followers: list[list[int]] = [[] for _ in cells.cells]
    waits = []
    for number, cell in enumerate(cells.cells):
        before = set()
        if number == cells.first[cells.lanes[number]]:  # the lane's last cell of the step before
            before.add(number + len(lanes[cells.lanes[number]].cells) - 1)
        for part in parts_of(cell):
            before.update(weights[part.stage] if part.kind == "F" else _last(cells, step.carried(part)))
        for source in before:
            followers[source].append(number)
        waits.append(len(before))
    return followers, waits


def _weights(step: StepGraph, graph: CellGraph) -> list[list[int]]:
    """Return, for every stage, the cells after which its newest weights are ready."""
    return [_last(graph, step.newest_weights(stage)) for stage in range(step.stages)]


def _last(graph: CellGraph, actions: Iterable[Action]) -> list[int]:
    """Return the last cell of each lane that has one of some actions: the others end before it."""
    last: dict[int, int] = {}
    for number in (graph.numbers[action] for action in actions if action in graph.numbers):
        last[graph.lanes[number]] = max(number, last.get(graph.lanes[number], 0))
    return list(last.values())


# A schedule: each stream's actions in order, and whether it can run to its end.


@dataclass(frozen=True)
class Schedule:
    """An order of the actions of a step on workers and their streams.

    A lane starts its next cell when the one before has ended and its data are ready. A schedule defines only this order
    and contains no times; `simulate` computes them.

    Attributes
    ----------
    graph
        The actions and their needs.
    lanes
        One lane per stream, sorted by worker.
    name
        Of the technique, for tables and pictures.
    recomputed
        Stages that keep only their input, and compute the rest again when their first gradient is asked for (Chen et
        al., "Training deep nets with sublinear memory cost", 2016).
    replicated
        Stages with weights on several workers. Each of those runs all actions of some micro-batches (in DualPipe those
        that enter at one end of the pipeline). Sums of their gradients over these workers, and updates from the sums,
        follow at the end of the step and are not in the schedule.
    places
        Number of the lane and position in it of every action; I and W are found within a B.

    Raises
    ------
    OptionError
        A cell is not an `Action` or an `Overlap`, or a recomputed or replicated stage is not there.
    ScheduleError
        An action is missing, doubled or foreign; a worker has nothing to do; a stage, or a micro-batch of a replicated
        stage, runs on several workers; or a replicated stage has S or U, or is in a step that begins with backwards.
    """

    graph: StepGraph
    lanes: tuple[Lane, ...]
    name: str = ""
    recomputed: frozenset[int] = frozenset()
    replicated: frozenset[int] = frozenset()
    places: dict[Action, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lanes = check_sequence("lanes", self.lanes, "lanes")
        for lane in lanes:
            if not isinstance(lane, Lane) or not isinstance(lane.cells, (tuple, list)):
                raise OptionError("A lane is not one", expected="a Lane of a tuple of actions", got=shown(lane),
                                  remedy="Use Schedule.of, which makes the lanes")  # fmt: skip
        object.__setattr__(self, "lanes", tuple(sorted(lanes, key=lambda lane: lane.worker)))
        object.__setattr__(self, "places", _places(self.graph, self.lanes))
        for name in ("recomputed", "replicated"):
            unknown = sorted(getattr(self, name) - frozenset(range(self.graph.stages)))
            if unknown:
                raise OptionError(f"Unknown stages are {name}", expected=f"0 to {self.graph.stages - 1}", got=unknown)
        _check_workers(self)

    @classmethod
    def of(cls, graph: StepGraph, workers: Sequence[Mapping[str, Iterable[Cell]] | Iterable[Cell]], name: str = "",
           recomputed: Iterable[int] = (), replicated: Iterable[int] = ()) -> Schedule:  # fmt: skip
        """Return a schedule from one entry per worker: cells of its main stream, or cells by the stream's name."""
        lanes = []
        for number, entry in enumerate(check_sequence("workers", workers, "lists of actions")):
            streams = entry if isinstance(entry, Mapping) else {"main": entry}
            for stream, cells in streams.items():
                cells = check_sequence(f"The lane {stream!r} of worker {number}", cells, "actions")  # noqa: PLW2901
                lanes.append(Lane(number, stream, tuple(cells)))
        return cls(graph, tuple(lanes), name, frozenset(recomputed), frozenset(replicated))

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self.lanes[-1].worker + 1

    @cached_property
    def allocation(self) -> tuple[int, ...]:
        """The worker of every stage, where its forwards run; of a replicated one, where its first micro-batch does."""
        return tuple(self.worker_of(stage, 0) for stage in range(self.graph.stages))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Return the worker that runs a stage for a micro-batch."""
        return self.lanes[self.places[trusted(stage, "F", microbatch)][0]].worker

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """Return the workers that have the weights of a stage, in the order of their first micro-batches of it."""
        if stage not in self.replicated:
            return (self.allocation[stage],)
        return tuple(dict.fromkeys(self.worker_of(stage, m) for m in range(self.graph.microbatches)))

    @cached_property
    def cells(self) -> CellGraph:
        """The cells as a graph of numbers, for algorithms that visit all of them."""
        return cell_graph(self.graph, self.lanes, self.places)

    @cached_property
    def carried(self) -> tuple[list[list[int]], list[int]]:
        """Which cells of the next step wait for each cell when the schedule is repeated; for how many each waits."""
        return carried(self.graph, self.lanes, self.cells)

    def __iter__(self) -> Iterator[Action]:
        """Iterate over all actions, lane after lane."""
        return (action for lane in self.lanes for cell in lane.cells for action in actions_of(cell))

    def __contains__(self, action: Action) -> bool:
        """Whether the schedule has the action, by itself or as part of a B."""
        return action in self.places


def _places(graph: StepGraph, lanes: Sequence[Lane]) -> dict[Action, tuple[int, int]]:
    required = set(graph.required())
    known = required.union(graph.optional())
    where: dict[Action, tuple[int, int]] = {}
    for number, lane in enumerate(lanes):
        for position, cell in enumerate(lane.cells):
            if isinstance(cell, Action) and cell in known and cell not in where:  # neither B nor overlap: most cells
                where[cell] = number, position
                continue
            if not isinstance(cell, (Action, Overlap)):
                raise OptionError("A cell is not an action", expected="an Action, or an Overlap of two",
                                  got=shown(cell), remedy="Make one of a text by parse('2I0')")  # fmt: skip
            for action in actions_of(cell):
                parts = [part for part in parts_of(action) if part in known]
                if not parts:
                    raise ScheduleError("A schedule has an action that its step has not", actions=[action],
                                        expected=f"an action of {graph}", got=f"{action} on {lane}")  # fmt: skip
                for part in parts:
                    if part in where:
                        got = f"{part} on {lanes[where[part][0]]} and on {lane}"
                        raise ScheduleError("An action is scheduled twice", expected="once", got=got, actions=[part])
                    where[part] = number, position
    missing = sorted(required - where.keys())
    if missing:
        listed = ", ".join(map(str, missing[:10])) + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
        forward = Action(missing[0].stage, "F", missing[0].microbatch or 0)  # says where its lane is
        expected = f"all {len(required)} actions of the step"
        raise ScheduleError("Actions are missing", expected=expected, got=f"none of {listed}", actions=[forward])
    return where


def _check_workers(schedule: Schedule) -> None:
    busy = {lane.worker for lane in schedule.lanes if lane.cells}
    idle = sorted(set(range(schedule.lanes[-1].worker + 1 if schedule.lanes else 1)) - busy)
    if idle:
        raise ScheduleError("A worker has nothing to do", expected="at least one action a worker", got=f"worker {idle}",
                            remedy="Use fewer workers, or give it a stage")  # fmt: skip
    names = [(lane.worker, lane.stream) for lane in schedule.lanes]
    if len(set(names)) < len(names):
        raise ScheduleError("A stream is there twice", expected="one lane a stream", got=names)
    if schedule.replicated and schedule.graph.first != "F":  # the sums of the step before come before its forwards
        raise ScheduleError("A step with replicated stages begins with the forwards", expected='first="F"',
                            got=repr(schedule.graph.first))  # fmt: skip
    workers, owners = [lane.worker for lane in schedule.lanes], schedule.allocation
    for action, (number, _) in schedule.places.items():
        worker, owner = workers[number], owners[action[0]]
        if action[0] in schedule.replicated:
            if action.microbatch is None:
                expected = "its sums and updates after the step"
                raise ScheduleError("A replicated stage has S or U", expected=expected, got=action, actions=[action],
                                    remedy="Leave them out")  # fmt: skip
            owner = schedule.worker_of(action.stage, action.microbatch)
        if worker != owner:
            expected, got = f"stage {action.stage} on worker {owner}", f"{action} on worker {worker}"
            raise ScheduleError("A stage runs on several workers", expected=expected, got=got, actions=[action],
                                remedy="Move it: only replicated stages are on several workers")  # fmt: skip


# Whether a schedule can run to its end, and every action reads the right weights.


def validate(schedule: Schedule) -> None:
    """Refuse a schedule that cannot run.

    `Schedule` has made sure that all actions are there, once each, and that every worker has some. This checks the
    order: lanes and data together must have no cycle, and settle which version of the weights each action reads.

    Raises
    ------
    ScheduleError
        Workers or streams wait for each other forever (the message has the cycle), or an update overwrites weights
        that a backward has yet to read, or runs at the same time as an action that reads them.
    """
    stuck = _stuck(schedule, frozenset())
    if not stuck:
        race = find_race(schedule)
        if race is None:
            return
        update, reader = (_describe(schedule, schedule.cells.numbers[action]) for action in race)
        raise ScheduleError("Weights are updated while they may be read",
                            expected="one of the two to wait for the other", got=f"{update} and {reader} at once",
                            remedy="Put both into one lane", actions=race)  # fmt: skip
    cycle = _cycle(schedule, stuck)
    hazards = _hazards(schedule)
    if not _stuck(schedule, hazards):  # nothing else is wrong: the order would run, with the wrong weights
        overwriting, late = next(pair for pair in pairwise(cycle) if (pair[1], pair[0]) in hazards)
        backward, written = _action(schedule, late, "I"), _action(schedule, overwriting, "U")
        raise ScheduleError("Weights are overwritten before they are read", actions=(written, backward),
                            expected=f"{backward} before {written}: its forward had the old weights",
                            got=f"{_describe(schedule, overwriting)} earlier than {_describe(schedule, late)}",
                            remedy="Move the update behind it, or keep old versions: weights='stashed'")  # fmt: skip
    waits = " waits for ".join(_describe(schedule, number) for number in cycle)
    actions = [actions_of(schedule.cells.cells[number])[0] for number in cycle[:-1]]
    raise ScheduleError("The schedule is deadlocked", expected="an order without a cycle", got=waits, actions=actions,
                        remedy="Reorder one of these lanes")  # fmt: skip


def _stuck(schedule: Schedule, ignored: Collection[tuple[int, int]]) -> set[int]:
    """Return the cells that are never reached, if the edges `ignored` are not waited for."""
    return set(range(len(schedule.cells.cells))).difference(schedule.cells.in_turn(ignored))


def _cycle(schedule: Schedule, stuck: Collection[int]) -> list[int]:
    """Return cells each of which waits for the next; the last is the first again."""
    source = {reader: number for number in sorted(stuck) for reader in schedule.cells.after(number) if reader in stuck}
    path, seen = [min(stuck)], {min(stuck): 0}
    while True:
        number = source[path[-1]]
        path.append(number)
        if number in seen:
            return path[seen[number] :]
        seen[number] = len(path) - 1


def _hazards(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the edges (backward, update) whose only reason is that the update overwrites the backward's weights."""
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "step" or graph.first == "U":
        return set()
    edges = set()
    for stage in filter(graph.weighted, range(graph.stages)):
        update = cells.numbers[Action(stage, "U")]
        for m in range(graph.microbatches):
            reader, gradient = cells.numbers.get(Action(stage, "I", m)), cells.numbers[Action(stage, "W", m)]
            follows = reader == update - 1 and cells.lanes[reader] == cells.lanes[update]
            if reader is not None and reader != gradient and not follows:
                edges.add((reader, update))
    return edges


def _action(schedule: Schedule, number: int, kind: Kind) -> Action:
    """Return the part of a cell that is of one kind."""
    cell = schedule.cells.cells[number]
    return next(part for part in parts_of(cell) if part.kind == kind)


def _describe(schedule: Schedule, number: int) -> str:
    lane = schedule.cells.lanes[number]
    position = number - schedule.cells.first[lane] + 1
    ending = "th" if position % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(position % 10, "th")
    return f"{schedule.cells.cells[number]} ({schedule.lanes[lane]}, {position}{ending})"


def find_race(schedule: Schedule) -> tuple[Action, Action] | None:
    """Return an update and an action that may read the weights before, after or while they are updated."""
    # Only graphs with updates after every micro-batch leave that open; it is settled where both are in one lane, or
    # where lanes and data make one wait for the other. The schedule must be free of deadlocks.
    graph, cells = schedule.graph, schedule.cells
    if graph.updates != "microbatch":
        return None
    clocks: list[list[int]] = []
    for stage in filter(graph.weighted, range(graph.stages)):
        readers: dict[int, dict[int, Action]] = {}  # lane -> cell -> action
        for action in (Action(stage, kind, m) for kind in ("F", "I") for m in range(graph.microbatches)):
            if action in cells.numbers and (action.kind == "F" or graph.weights == "latest"):
                readers.setdefault(cells.lanes[cells.numbers[action]], {})[cells.numbers[action]] = action
        for update in (Action(stage, "U", m) for m in range(graph.microbatches)):
            own = cells.lanes[cells.numbers[update]]
            for lane in readers.keys() - {own}:
                clocks = clocks or _clocks(schedule)
                later = sorted(readers[lane])
                later = later[bisect_left(later, cells.first[lane] + clocks[cells.numbers[update]][lane]) :]
                if later and clocks[later[0]][own] <= cells.numbers[update] - cells.first[own]:
                    return update, readers[lane][later[0]]
    return None


def _clocks(schedule: Schedule) -> list[list[int]]:
    """Return, for every cell, how many cells of each lane end before it starts, its own counted too (vector clocks)."""
    cells = schedule.cells
    clocks = [[0] * len(schedule.lanes) for _ in cells.cells]
    for number in cells.in_turn():
        lane, clock = cells.lanes[number], clocks[number]
        clock[lane] = number - cells.first[lane] + 1
        for reader in cells.after(number):
            clocks[reader] = [max(pair) for pair in zip(clocks[reader], clock, strict=True)]
    return clocks
