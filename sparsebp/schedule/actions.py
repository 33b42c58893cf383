"""Actions of a training step, and their graph. ``2I0`` is the input gradient of stage 2, micro-batch 0."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias, get_args

from sparsebp.core.check import check_choice, check_flag, check_integer, check_sequence, shown
from sparsebp.core.errors import FileFormatError, OptionError

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

    def __post_init__(self) -> None:
        for name in ("stages", "microbatches"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if (count := self.stages * self.microbatches) > MOST:
            raise OptionError("A step has too many forwards", expected=f"{MOST} at most", got=count,
                              remedy="Join stages or micro-batches")  # fmt: skip
        for name, choices in (("first", First), ("updates", Updates), ("weights", Weights)):
            check_choice(name, getattr(self, name), get_args(choices))
        check_flag("synchronised", self.synchronised)
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
                if stage > 0:
                    yield trusted(stage, "I", m)
                if self.weighted(stage):
                    yield trusted(stage, "W", m)
            if self.weighted(stage):
                if self.synchronised:
                    yield from self._at_ends(stage, "S")
                if self.updates != "none":
                    yield from self._at_ends(stage, "U")

    def optional(self) -> Iterator[Action]:
        """Yield the actions that a schedule may have: the gradients with respect to the input of the model."""
        for m in range(self.microbatches):
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
