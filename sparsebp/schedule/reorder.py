"""Reordering weight gradients (out-of-order, list scheduling, modulo, reverse first-k …), and placing updates."""

from __future__ import annotations

import functools
import heapq
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import count as counter
from operator import itemgetter
from typing import Any, Literal, NamedTuple, ParamSpec, TypeAlias, TypeVar, get_args

from sparsebp.core.check import check_choice, check_flag, check_integer, check_number, check_positive, check_sequence
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.costs import Costs, Link, carry
from sparsebp.schedule.schedule import Action, Cell, Lane, Schedule, StepGraph, actions_of, trusted
from sparsebp.schedule.simulation import Simulation, simulate

# Placing updates: at the end, right before the next forward, or right after the gradient.

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


# The stages of each worker: contiguous chunks.


@dataclass(frozen=True)
class Partition:
    """The stages of a graph in `chunks` contiguous parts of nearly equal size; chunk c is on worker c mod `workers`."""

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
        """Return all F, I, W, B or U of a chunk and micro-batch: F in the order of the stages, others in reverse."""
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


# Algorithm 1 of the out-of-order paper: which weight gradient runs during which region of the main stream.


class Region(NamedTuple):
    """Consecutive stages of the backward (kind ``"I"``) or forward (``"F"``) on the main stream, in running order."""

    kind: Literal["F", "I"]
    stages: tuple[int, ...]


@dataclass(frozen=True)
class RegionTimes:
    """Times that Algorithm 1 needs, measured or `from_costs`.

    Attributes
    ----------
    main
        Time of a region's kernels on the main stream: ``T_main(R)``.
    sub
        Time of stage k's weight gradient (and update) while a region runs: ``T_sub(k, R)``.
    speedup
        Of running the two at the same time instead of one after the other.
    """

    main: Callable[[Region], float]
    sub: Callable[[int, Region], float]
    speedup: Callable[[int, Region], float]

    @classmethod
    def from_costs(cls, costs: Costs, input_gradient: bool = False) -> RegionTimes:
        """Return the sums of single actions' costs; streams slowed down by s and s' do ``1/s + 1/s'`` times as much."""

        def times(actions: Iterable[Action]) -> tuple[float, float]:
            """Return the time alone, and while the other stream is busy."""
            known = [(costs.duration(action), costs.slowdown_of(action)) for action in actions]
            return sum(duration for duration, _ in known), sum(duration * slowdown for duration, slowdown in known)

        @cache
        def of_region(region: Region) -> tuple[float, float]:
            actions = (Action(stage, region.kind, 0) for stage in region.stages)
            return times(action for action in actions if input_gradient or action != Action(0, "I", 0))

        @cache
        def of_stage(stage: int) -> tuple[float, float]:
            return times((Action(stage, "W", 0), Action(stage, "U")))

        def speedup(stage: int, region: Region) -> float:
            return sum(alone / beside if beside > 0 else 1.0 for alone, beside in (of_region(region), of_stage(stage)))

        return cls(lambda region: of_region(region)[1], lambda stage, region: of_stage(stage)[1], speedup)


def make_regions(stages: int, forward: int | Sequence[Iterable[int]]) -> list[Region]:
    """Return the regions of a step: the forward's reversed for the backward, then the forward's."""
    if isinstance(forward, int):
        count = min(forward, stages)
        forward = [range(i * stages // count, (i + 1) * stages // count) for i in range(count)]
    regions = [tuple(region) for region in forward]
    if [stage for region in regions for stage in region] != list(range(stages)):
        raise OptionError("The regions do not list all stages in order", expected=f"0 to {stages - 1}", got=regions)
    return [Region("I", region[::-1]) for region in regions[::-1]] + [Region("F", region) for region in regions]


class Timeline:
    """The main stream of a step by itself: backward, the first k stages' weight gradients, forward."""

    # In the first `conventional` regions, weight gradients are on the main stream too, each before its I.
    # main: The actions of the main stream. begin, length: Of every region.
    # ready, deadline: When a stage's weight gradient can start, and when its next forward starts.
    # beside: Stages whose weight gradients go to the other stream.

    def __init__(self, graph: StepGraph, regions: list[Region], times: RegionTimes, costs: Costs, *, k: int,
                 input_gradient: bool, conventional: int = 0) -> None:  # fmt: skip
        self.regions, self.times, self._costs = regions, times, costs
        self.main: list[Action] = []
        self.begin: list[float] = []
        self.length: list[float] = []
        self.ready = {graph.stages - 1: 0.0}
        self.deadline: dict[int, float] = {}
        self._now = 0.0
        self.beside = [stage for stage in range(k, graph.stages) if graph.weighted(stage)]
        first = [stage for stage in range(k) if graph.weighted(stage)]
        for i, region in enumerate(regions):
            if region.kind == "F":
                self._run_weight_gradients(first)
                first = []
            self.begin.append(self._now)
            stages = [stage for stage in region.stages if stage > 0 or region.kind == "F" or input_gradient]
            known = sum(costs.duration(Action(stage, region.kind, 0)) for stage in stages)
            scale = times.main(region) / known if known > 0 else 0.0  # a measured total may differ
            for stage in region.stages:
                if i < conventional and stage in self.beside:
                    self._run_weight_gradients([stage])
                    self.beside.remove(stage)
                if stage in stages:
                    self._run(Action(stage, region.kind, 0), scale)
            self.length.append(self._now - self.begin[-1])

    def _run(self, action: Action, scale: float) -> None:
        if action.kind == "F":
            self.deadline[action.stage] = self._now
        self._now += scale * self._costs.duration(action)
        if action.kind == "I":
            self.ready[action.stage - 1] = self._now
        self.main.append(action)

    def _run_weight_gradients(self, stages: list[int]) -> None:
        for stage in stages:
            self._now += self._costs.duration(Action(stage, "W", 0))
            self.main.append(Action(stage, "W", 0))


def joint_schedule(timeline: Timeline, early: int = 0) -> list[int]:
    """Return the stages in the order of their weight gradients on the second stream (Algorithm 1)."""
    # Of pairs of a weight gradient and a region with the same speed-up, the earlier region wins, then the stage whose
    # forward comes first. In the first `early` regions, weight gradients run as soon as they are ready. The paper
    # leaves open: a region in which nothing is ready yet moves on to when something is; a weight gradient that must end
    # before its stage's next forward cannot go to later regions; one that fits into no region goes before the
    # region of that forward.
    regions, ready, deadline = timeline.regions, timeline.ready, timeline.deadline
    lasts = [{stage: timeline.times.sub(stage, region) for stage in timeline.beside} for region in regions]
    speedup = [{stage: timeline.times.speedup(stage, region) for stage in timeline.beside} for region in regions]
    chosen: list[list[int]] = [[] for _ in regions]
    left = set(timeline.beside)
    for i in range(early):
        end = timeline.begin[i] + timeline.length[i]
        chosen[i] = sorted((stage for stage in left if ready[stage] <= end), reverse=True)
        left -= set(chosen[i])
    now = [0.0] * len(regions)
    open_regions = set(range(early, len(regions)))

    def best(i: int) -> tuple[float, int, int] | None:
        """Return the best (speed-up, -region, -stage) of a region; move its time on where nothing is ready yet."""
        usable = [
            stage for stage in left
            if max(ready[stage], timeline.begin[i] + now[i]) + lasts[i][stage] <= deadline[stage]
        ]  # fmt: skip
        if not usable:
            return None
        earliest = min(ready[stage] for stage in usable)
        now[i] = max(now[i], earliest - timeline.begin[i])
        if now[i] >= timeline.length[i]:
            return None
        at = max(timeline.begin[i] + now[i], earliest)  # the sum may round to less
        return max((speedup[i][stage], -i, -stage) for stage in usable if ready[stage] <= at)

    found: dict[int, tuple[float, int, int]] = {}  # the best of every region, recomputed where it has changed
    while left:
        for i in sorted(open_regions - found.keys()):
            pair = best(i)
            if pair is None:
                open_regions.remove(i)
            else:
                found[i] = pair
        if not found:
            break
        _, i, stage = max(found.values())
        i, stage = -i, -stage
        chosen[i].append(stage)
        left.remove(stage)
        now[i] += lasts[i][stage]
        changed = {i}
        while now[i] >= timeline.length[i]:
            open_regions.discard(i)
            if i + 1 == len(regions):
                break
            end = timeline.begin[i] + now[i]
            now[i] = timeline.length[i]
            now[i + 1] += max(0.0, end - timeline.begin[i + 1])
            i += 1
            changed.add(i)
        found = {other: pair for other, pair in found.items() if other not in changed and pair[2] != -stage}
    for stage in sorted(left):
        forward = next(i for i, region in enumerate(regions) if region.kind == "F" and stage in region.stages)
        chosen[forward - 1].append(stage)
    return [stage for stage_list in chosen for stage in stage_list]


# Options of builders have the same meaning everywhere, so they are checked by name, in one place.

P = ParamSpec("P")
S = TypeVar("S")

_LEAST = {"stages": 1, "microbatches": 1, "workers": 1, "chunks": 1, "group": 1, "streams": 1, "k": -(2**31)}


def builder(build: Callable[P, S]) -> Callable[P, S]:
    """Check the options of a builder before it runs; None stays where it is the default."""
    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def checked(*args: P.args, **options: P.kwargs) -> S:
        given: dict[str, Any] = options
        for name in given.keys() & parameters.keys():
            if given[name] is not None or "None" not in str(parameters[name].annotation):
                given[name] = _checked(name, given[name])
        if given.get("k") is not None and not 0 <= given["k"] <= given["stages"]:
            searches = ", or None to search" * ("None" in str(parameters["k"].annotation))
            expected = f"k in 0…{given['stages']}{searches}"
            raise OptionError("There are not that many first stages", expected=expected, got=given["k"])
        return build(*args, **options)

    return checked


def _checked(name: str, value: Any) -> Any:
    if name in _LEAST:
        return check_integer(name, value, _LEAST[name])
    if name in ("unweighted", "recomputed"):
        stages = check_sequence(name, value, "numbers of stages")
        return tuple(check_integer(f"a stage of {name}", stage, 0) for stage in stages)
    if name == "regions":
        if not isinstance(value, (list, tuple)):
            return check_integer(name, value, 1)
        regions = (check_sequence("a region", region, "stages") for region in value)
        return [[check_integer("a stage of a region", stage, 0) for stage in region] for region in regions]
    if name == "priority":
        return check_choice(name, value, ("first-ready", "first-stage"))
    if name == "input_gradient":
        return check_flag(name, value)
    if name in ("memory_ratio", "memory_limit"):
        return check_number(name, value, finite=False)
    kind: Any = {"costs": Costs, "times": RegionTimes, "throughput": Callable}.get(name, object)
    if not isinstance(value, kind):
        raise OptionError(f"{name} is of another kind", expected=kind.__name__, got=type(value).__name__)
    return value


# List scheduling: whenever a worker is free, it starts the most urgent of the actions that are ready.
# Gradient fast-forwarding, with or without modulo allocation: results that another worker needs first, W fills gaps.


def list_schedule(graph: StepGraph, allocation: Sequence[int], urgency: Callable[[Action], Any],
                  costs: Costs | None = None, *, memory: float = math.inf, patience: float = 0,
                  input_gradient: bool = True, name: str = "list",
                  recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return the schedule in which every worker starts the most urgent action that is ready and has room.

    Parameters
    ----------
    graph
        The actions, and what they need.
    allocation
        The worker of every stage. Each worker has one stream.
    urgency
        A sort key of F, I, W, S and U: the smallest goes first. Actions must not compare equal.
    costs
        Durations, link and bytes. Transfers take the time that they take in `simulate`.
    memory
        Bound of the saved activations of every worker (`MemoryCurve.saved`, in the units of ``costs.stages``, all
        activations kept): a forward without room waits until gradients have freed some. Room is set aside for the
        forwards of each worker's oldest micro-batch, so every bound that holds one micro-batch lets the step end.
    patience
        Of an action's duration, the share for which a worker waits rather than begin it, if an F or I that is more
        urgent is about to arrive from another worker. 0: none waits while it could work.
    input_gradient
        Whether stage 0 has an I.
    name, recomputed
        Of the schedule.

    Raises
    ------
    MemoryLimitError
        One micro-batch needs more than `memory`.
    OptionError
        The costs are of another model, or `memory` bounds a step that begins with the backward.

    Notes
    -----
    Coffman and Graham, "Optimal scheduling for two-processor systems", Acta Informatica 1972; the out-of-order paper's
    §2 and §4.1. With a bound, the problem is that of Qi et al., "Zero bubble pipeline parallelism", 2023, §3.
    """
    costs = costs or Costs()
    costs.check(graph)
    if graph.first == "I" and memory < math.inf:
        raise OptionError("A step that begins with the backward has no bound", expected='first="F", or no memory=',
                          got=f"memory={memory:g}")  # fmt: skip
    actions = [*graph.required(), *(graph.optional() if input_gradient else ())]
    scheduler = _ListScheduler(graph, actions, allocation, urgency, costs, check_number("patience", patience, 0))
    scheduler.bound(check_number("memory", memory, 0, finite=False))
    return Schedule.of(graph, scheduler.run(), name, recomputed)


class _ListScheduler:
    """One run of list scheduling."""

    # waiting: How many results an action waits for. followers: The actions that wait for one.
    # others, forwards: Ready actions, most urgent first: of every worker, and F, which need room, of every stage.
    # expected: Of every worker the F and I that another will have sent soon, and when.
    # held: Until when the parts of the network are occupied.
    # saved: What every stage's F saves. room: What every worker may still save. oldest: Its first micro-batch with
    # forwards left; left: what these save, and their number, of every micro-batch.

    def __init__(self, graph: StepGraph, actions: list[Action], allocation: Sequence[int],
                 urgency: Callable[[Action], Any], costs: Costs, patience: float) -> None:  # fmt: skip
        self.graph, self.allocation, self.urgency, self.costs = graph, allocation, urgency, costs
        self.patience = patience
        known = set(actions)
        self.waiting: dict[Action, int] = {}
        self.followers: defaultdict[Action, list[Action]] = defaultdict(list)
        for action in actions:
            needed = [needs for needs in graph.predecessors(action) if needs in known]
            self.waiting[action] = len(needed)
            for needs in needed:
                self.followers[needs].append(action)
        workers = range(max(allocation) + 1)
        self.own = [[stage for stage, owner in enumerate(allocation) if owner == worker] for worker in workers]
        self.orders: list[list[Action]] = [[] for _ in workers]
        self.others: list[list[tuple[Any, Action]]] = [[] for _ in workers]
        self.forwards: list[list[tuple[Any, Action]]] = [[] for _ in allocation]
        self.expected: list[list[tuple[float, Action]]] = [[] for _ in workers]
        self.held: dict[Any, tuple[float, Any]] = {}
        self.users = [
            {Action(stage, kind, 0).kind for kind in ("I", "W") if Action(stage, kind, 0) in known}
            for stage in range(graph.stages)
        ]
        self.started: set[Action] = set()
        self.ended: set[Action] = set()

    def bound(self, memory: float) -> None:
        """Bound the saved activations of every worker."""
        self.saved = [self.costs.bytes_of(stage).saved if users else 0 for stage, users in enumerate(self.users)]
        whole = [sum(self.saved[stage] for stage in own) for own in self.own]
        if max(whole) > memory:
            raise MemoryLimitError("One micro-batch saves more activations than the limit", got=f"{memory:g}",
                                   expected=f"memory={max(whole):g} or more", remedy="Raise the limit")  # fmt: skip
        self.room = [memory + 1e-9 * max(whole)] * len(self.own)  # sums of bytes round
        self.oldest = [0] * len(self.own)
        self.left = [[(saved, len(own))] * self.graph.microbatches for saved, own in zip(whole, self.own, strict=True)]

    def run(self) -> list[list[Action]]:
        """Run until nothing is left to do, and return every worker's order."""
        for action, count in self.waiting.items():
            if not count:
                self._release(action)
        idle, now, serial = [True] * len(self.own), 0.0, counter()
        # when; a tie-break; the action that ends, or None where something arrives; then for which actions
        running: list[tuple[float, int, Action | None, list[Action]]] = []
        while True:
            for worker in range(len(self.own)):
                begun = self._next(worker, now) if idle[worker] else None
                if begun is not None:
                    idle[worker] = False
                    self.orders[worker].append(begun)
                    end = now + self.costs.duration(begun)
                    heapq.heappush(running, (end, next(serial), begun, []))
                    if self.patience:
                        self._expect(begun, end)
            if not running:
                return self.orders
            now = running[0][0]
            while running and running[0][0] == now:
                _, _, ended, readers = heapq.heappop(running)
                if ended is not None:
                    worker = self.allocation[ended.stage]
                    idle[worker] = True
                    self._free(ended, worker)
                    sent: defaultdict[int, list[Action]] = defaultdict(list)
                    for follower in self.followers[ended]:
                        sent[self.allocation[follower.stage]].append(follower)
                    readers = sent.pop(worker, [])
                    for receiver, actions in sent.items():
                        arrival = self._arrival(ended, receiver, now, self.held)
                        heapq.heappush(running, (arrival, next(serial), None, actions))
                for reader in readers:
                    self.waiting[reader] -= 1
                    if not self.waiting[reader]:
                        self._release(reader)

    def _release(self, action: Action) -> None:
        into = self.forwards[action.stage] if action.kind == "F" else self.others[self.allocation[action.stage]]
        heapq.heappush(into, (self.urgency(action), action))

    def _arrival(self, action: Action, receiver: int, end: float, held: dict[Any, tuple[float, Any]]) -> float:
        """Return when the result of an action that ends at some time is at another worker."""
        size = self.costs.bytes_of(action.stage - (action.kind == "I")).output
        return carry(self.costs.link.route(self.allocation[action.stage], receiver), size, end, held, None)[1]

    def _expect(self, action: Action, end: float) -> None:
        """Record the F and I on other workers that wait for nothing but an action that has begun."""
        for follower in self.followers[action]:
            receiver = self.allocation[follower.stage]
            if receiver != self.allocation[action.stage] and follower.kind in "FI" and self.waiting[follower] == 1:
                arrival = self._arrival(action, receiver, end, dict(self.held))
                self.expected[receiver].append((arrival, follower))

    def _next(self, worker: int, now: float) -> Action | None:
        """Return the action that a worker starts now, None if it waits."""
        heaps = [self.others[worker]]
        for stage in self.own[worker]:
            heap = self.forwards[stage]
            while heap and heap[0][1] in self.started:
                heapq.heappop(heap)
            if heap and self._has_room(heap[0][1], worker):
                heaps.append(heap)
        heap = min(filter(None, heaps), default=[], key=itemgetter(0))
        if heap and self._waits(worker, now, *heap[0]):
            return None
        action = heapq.heappop(heap)[1] if heap else self._oldest_forward(worker)
        if action is not None and action.kind == "F":
            self._save(action, worker)
        return action

    def _waits(self, worker: int, now: float, urgency: Any, action: Action) -> bool:
        """Whether a worker waits for something more urgent rather than begin an action."""
        if not self.patience:
            return False
        expected = [entry for entry in self.expected[worker] if entry[0] > now and self.waiting[entry[1]]]
        self.expected[worker] = expected
        until = now + self.patience * self.costs.duration(action)
        return any(arrival < until and self.urgency(other) < urgency
                   and (other.kind == "I" or self._has_room(other, worker)) for arrival, other in expected)  # fmt: skip

    def _oldest_forward(self, worker: int) -> Action | None:
        """Return a less urgent forward that has room because it is of the worker's oldest micro-batch."""
        m = self.oldest[worker]
        for action in (Action(stage, "F", m) for stage in self.own[worker] if m < self.graph.microbatches):
            if not self.waiting[action] and action not in self.started and self._has_room(action, worker):
                return action
        return None

    def _has_room(self, forward: Action, worker: int) -> bool:
        oldest, m = self.oldest[worker], forward.microbatch or 0
        aside = self.left[worker][oldest][0] if oldest < m else 0
        return self.saved[forward.stage] + aside <= self.room[worker]

    def _save(self, forward: Action, worker: int) -> None:
        """Count the activations that a forward saves."""
        saved, left, m = self.saved[forward.stage], self.left[worker], forward.microbatch or 0
        self.started.add(forward)
        self.room[worker] -= saved
        left[m] = left[m][0] - saved, left[m][1] - 1
        while self.oldest[worker] < self.graph.microbatches and not left[self.oldest[worker]][1]:
            self.oldest[worker] += 1

    def _free(self, action: Action, worker: int) -> None:
        """Count the activations that no gradient reads any longer."""
        stage, kind, m = action
        if kind not in "IW":
            return
        self.ended.add(action)
        early = self.costs.bytes_of(stage).freed_by_input_gradient if "I" in self.users[stage] else 0
        self.room[worker] += early if kind == "I" else 0
        if all(Action(stage, user, m) in self.ended for user in self.users[stage]):
            self.room[worker] += self.saved[stage] - early


@builder
def fast_forward(*, workers: int, stages: int, microbatches: int = 1, k: int = 0, costs: Costs | None = None,
                 unweighted: Iterable[int] = (), input_gradient: bool = False,
                 recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return the schedule of gradient fast-forwarding: input gradients before weight gradients.

    Every worker has one contiguous part of the stages. Of the ready actions it runs first the F or I whose result
    another worker needs, then other F, then other I; weight gradients fill the gaps.

    Parameters
    ----------
    workers, stages, microbatches, unweighted, input_gradient
        As for `gpipe`.
    k
        Combines it with reverse first-k scheduling (§6): the weight gradients of the first k stages come last, first
        stage first, so that their synchronisation between data-parallel replicas starts with the most urgent one.
    costs
        Durations, which decide which actions are ready. Default: 1 for F, I and W.
    recomputed
        Stages that keep only their input and compute the rest again.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §5.2, Fig. 5b and 12b.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    allocation = Partition(graph, workers, workers).allocation()
    return _list_scheduled("fast-forward", graph, allocation, k, costs or Costs(), input_gradient, recomputed)


@builder
def modulo(*, workers: int, stages: int, microbatches: int = 1, group: int = 1, k: int = 0, costs: Costs | None = None,
           unweighted: Iterable[int] = (), input_gradient: bool = False,
           recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return gradient fast-forwarding with modulo allocation: stage s is on worker ``s // group % workers``.

    `group` neighbouring stages are dealt out together: larger groups need fewer transfers, and leave larger gaps. Other
    options are as in `fast_forward`.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §5.2.1 and §8.4.1, Fig. 5c and 12c.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    if stages <= (workers - 1) * group:
        got = f"{stages} stages in groups of {group}"
        raise OptionError("There are fewer groups of stages than workers", expected=f"{workers} or more", got=got,
                          remedy="Use fewer workers or smaller groups")  # fmt: skip
    allocation = [stage // group % workers for stage in range(stages)]
    name = "fast-forward, modulo" + (f" in groups of {group}" if group > 1 else "")
    return _list_scheduled(name, graph, allocation, k, costs or Costs(), input_gradient, recomputed)


def _list_scheduled(name: str, graph: StepGraph, allocation: Sequence[int], k: int, costs: Costs,
                    input_gradient: bool, recomputed: Iterable[int]) -> Schedule:  # fmt: skip
    def leaves(action: Action) -> bool:
        """Whether another worker needs the result."""
        to = action.stage + 1 if action.kind == "F" else action.stage - 1
        return 0 <= to < graph.stages and allocation[to] != allocation[action.stage]

    def urgency(action: Action) -> tuple[int, ...]:
        stage, m = action.stage, action.microbatch or 0
        if action.kind == "W":
            return (2, 1, stage, m) if stage < k else (2, 0, m, -stage)
        if action.kind == "I":
            return 1 - leaves(action), 1, m, -stage
        return 1 - leaves(action), 0, m, stage

    free = replace(costs, link=Link())  # the paper's order does not depend on transfers
    return list_schedule(graph, allocation, urgency, free, input_gradient=input_gradient, recomputed=recomputed,
                         name=name + (f", reverse first {k}" if k else ""))  # fmt: skip


# One worker: the conventional order, and list scheduling on the two streams of one device.


@builder
def conventional(*, stages: int, microbatches: int = 1, fusion: Fusion = "none", streams: int = 1,
                 unweighted: Iterable[int] = (), input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return the conventional schedule of one worker: F of all stages, then W and I of each from the last to the first.

    Several micro-batches accumulate their gradients: each runs forward and backward, one after the other.

    Parameters
    ----------
    stages, microbatches, unweighted, input_gradient
        As for `gpipe`.
    fusion
        Where the updates go: see `place_updates`.
    streams
        1, or 2: weight gradients on a second stream, in the same order.
    """
    if streams not in (1, 2):
        raise OptionError("Unknown number of streams", expected="1 or 2", got=streams)
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    main: list[Action] = []
    weights: list[Action] = []
    for m in range(microbatches):
        main += [Action(stage, "F", m) for stage in range(stages)]
        for stage in reversed(range(stages)):
            if graph.weighted(stage):
                (main if streams == 1 else weights).append(Action(stage, "W", m))
            if stage > 0 or input_gradient:
                main.append(Action(stage, "I", m))
    lanes = {"main": main, "sub": weights} if weights else {"main": main}
    name = "conventional" if streams == 1 else "conventional, two streams"
    return place_updates(Schedule.of(graph, [lanes], name), fusion)


@builder
def two_stream_list(*, stages: int, costs: Costs | None = None, fusion: Fusion | None = "backward",
                    unweighted: Iterable[int] = (), input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return a schedule of one worker's two streams: I, F and late W on "main", other W and U on "sub".

    The step begins with the backward and ends with the forward that follows it. The second stream takes weight
    gradients as they become ready, so that their inputs are still in the cache and are soon freed. When the main stream
    reaches a forward whose weight gradient the second stream has not started, or would wait for it long enough to
    compute another, the main stream computes weight gradients itself, beginning with those of the next forwards. The
    streams meet in the middle. Updates are planned right after their weight gradients.

    Parameters
    ----------
    stages, unweighted, input_gradient
        As for `gpipe`.
    costs
        Durations and slowdowns: all actions are planned as slowed down by the other stream.
    fusion
        Where the updates go, see `place_updates`; None leaves them out (`synchronise` comes before updates).

    Notes
    -----
    Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 1969; the graph is from Oh et al.,
    "Out-of-order backprop", EuroSys 2022, §4.1, where the streams are not equals.
    """
    costs = costs or Costs()
    graph = StepGraph(stages, unweighted=frozenset(unweighted), first="I")
    main: list[Action] = []
    sub: list[Action] = []
    ready = {stages - 1: 0.0}  # when the gradient at a stage's output is ready
    updated: dict[int, float] = {}
    waiting = [stage for stage in range(stages) if graph.weighted(stage)]
    now = beside = 0.0

    def time(*actions: Action) -> float:
        return sum(costs.duration(action) * costs.slowdown_of(action) for action in actions)

    def weigh(stage: int) -> float:
        return time(Action(stage, "W", 0), Action(stage, "U"))

    def run_beside(until: float) -> float:
        """Let the second stream take weight gradients, the last stage's first, that it can begin before `until`."""
        end = beside
        while waiting and max(end, ready[waiting[-1]]) < until:
            stage = waiting.pop()
            end = updated[stage] = max(end, ready[stage]) + weigh(stage)
            sub.append(Action(stage, "W", 0))
        return end

    for stage in reversed(range(stages)):
        if stage > 0 or input_gradient:
            now += time(Action(stage, "I", 0))
            main.append(Action(stage, "I", 0))
        if stage > 0:
            ready[stage - 1] = now
    for stage in range(stages):
        beside = run_beside(now)
        while waiting and (waiting[0] == stage or now + weigh(waiting[0]) <= updated.get(stage, now)):
            own = waiting.pop(0)
            main.append(Action(own, "W", 0))
            now += weigh(own)
            updated[own] = now
            beside = run_beside(now)
        now = max(now, updated.get(stage, 0.0)) + time(Action(stage, "F", 0))
        main.append(Action(stage, "F", 0))
    lanes = {"main": main, "sub": sub} if sub else {"main": main}
    schedule = Schedule.of(graph, [lanes], "out-of-order, list scheduling")
    return schedule if fusion is None else place_updates(schedule, fusion)


Priority: TypeAlias = Literal["first-ready", "first-stage"]


def synchronise(schedule: Schedule, *, priority: Priority = "first-stage", costs: Costs | None = None) -> Schedule:
    """Return `schedule` with one S per stage, on the stream ``"link"`` of its worker.

    All data-parallel replicas run the same schedule, so it describes one of them.

    Parameters
    ----------
    schedule
        Any without updates; `place_updates` comes afterwards.
    priority
        Which gradient goes next when the network is free and several wait: ``"first-ready"`` is wait-free
        back-propagation (Zhang et al., "Poseidon", USENIX ATC 2017), ``"first-stage"`` first sends the gradient that
        the next forward needs first (Peng et al., "ByteScheduler", SOSP 2019). A transfer is not interrupted.
    costs
        Durations, which decide when each is ready; S's matters most.

    Raises
    ------
    OptionError
        `priority` is unknown, or the schedule has S or U already.
    """
    check_choice("priority", priority, get_args(Priority))
    graph = schedule.graph
    if not graph.backward:
        raise OptionError("A schedule of forwards has nothing to synchronise", expected="a backward", got=schedule.name)
    if graph.synchronised or graph.updates != "none":
        raise OptionError("The schedule has synchronisations or updates already", expected="neither S nor U",
                          got=schedule.name, remedy="Synchronise first, then place the updates")  # fmt: skip
    costs = costs or Costs()
    simulation = simulate(schedule, costs)
    ready: dict[int, list[tuple[float, int]]] = {}
    for stage in range(graph.stages):
        if graph.weighted(stage):
            end = max(simulation.end(Action(stage, "W", m)) for m in range(graph.microbatches))
            ready.setdefault(schedule.allocation[stage], []).append((end, stage))
    links = [
        Lane(worker, "link", tuple(Action(stage, "S") for stage in _order(times, priority, costs)))
        for worker, times in ready.items()
    ]
    return replace(schedule, graph=replace(graph, synchronised=True), lanes=(*schedule.lanes, *links))


def _order(ready: Iterable[tuple[float, int]], priority: Priority, costs: Costs) -> list[int]:
    """Return the stages in the order in which one link serves them."""
    waiting, order, now = sorted(ready), [], 0.0
    while waiting:
        now = max(now, waiting[0][0])
        candidates = [entry for entry in waiting if entry[0] <= now]
        entry = candidates[0] if priority == "first-ready" else min(candidates, key=lambda entry: entry[1])
        waiting.remove(entry)
        order.append(entry[1])
        now += costs.duration(Action(entry[1], "S"))
    return order


@builder
def data_parallel(*, stages: int, microbatches: int = 1, fusion: Fusion = "forward",
                  priority: Priority = "first-ready", costs: Costs | None = None, unweighted: Iterable[int] = (),
                  input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return the conventional order for one of several data-parallel workers, with the synchronisations on its link.

    `fusion` places the updates, see `place_updates`: ``"forward"`` lets synchronisations run during the next forwards.
    `priority` and `costs` are as in `synchronise`, the other options as in `conventional`.
    """
    plain = conventional(stages=stages, microbatches=microbatches, unweighted=unweighted, input_gradient=input_gradient)
    plain = replace(without_updates(plain), name=f"data-parallel, {priority}")
    return place_updates(synchronise(plain, priority=priority, costs=costs), fusion)


@builder
def reverse_first_k(*, stages: int, k: int | None = None, costs: Costs | None = None,
                    memory_limit: float = math.inf, throughput: Callable[[Schedule], float] | None = None,
                    priority: Priority = "first-stage", unweighted: Iterable[int] = (), input_gradient: bool = False,
                    recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return Algorithm 2 for one of several data-parallel workers, with the synchronisations on its link.

    The step begins with the backward and ends with the next forward. W and I run as usual, but the W of the first k
    stages run at the end, the first stage's first: the next forward waits for their synchronisations.

    Parameters
    ----------
    stages, unweighted, input_gradient
        As for `gpipe`.
    k
        Number of first stages; None searches for it (`search_k`).
    costs
        Durations and bytes; the duration of S matters most.
    memory_limit
        Bound for the memory, in the units of ``costs.stages``: k is lowered until Algorithm 2's estimate stays below it
        (`largest_k`), and further until the simulated peak does, which counts weights and their gradients too.
    throughput
        Of a schedule, in any unit, for the search. By default the shortest simulated makespan wins.
    priority
        Of the synchronisations, see `synchronise`.
    recomputed
        Stages that keep only their input and compute the rest again (§6).

    Raises
    ------
    OptionError
        k is not in 0…stages.
    MemoryLimitError
        Even the conventional order needs more than `memory_limit`.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §5.1, §6, Fig. 4 and Algorithm 2.
    """
    costs = costs or Costs()
    graph = StepGraph(stages, unweighted=frozenset(unweighted), first="I")

    @cache
    def build(first: int) -> Schedule:
        backward: list[Action] = []
        for stage in reversed(range(stages)):
            backward += [Action(stage, "W", 0)] if stage >= first and graph.weighted(stage) else []
            backward += [Action(stage, "I", 0)] if stage > 0 or input_gradient else []
        late = [Action(stage, "W", 0) for stage in range(first) if graph.weighted(stage)]
        cells = [*backward, *late, *(Action(stage, "F", 0) for stage in range(stages))]
        schedule = Schedule.of(graph, [cells], f"reverse first-{first}", recomputed)
        return synchronise(schedule, priority=priority, costs=costs)

    def fits(first: int) -> bool:
        return memory_limit == math.inf or simulate(build(first), costs).peak <= memory_limit

    if not fits(0):
        raise MemoryLimitError("The conventional order needs more memory than the limit", got=f"{memory_limit:g}",
                               expected=f"memory_limit={simulate(build(0), costs).peak:g} or more",
                               remedy="Raise the limit, or recompute activations")  # fmt: skip
    most = largest_k(stages, memory_limit, costs)
    most = next(first for first in range(most, -1, -1) if fits(first))
    if k is None:
        measure = throughput or (lambda schedule: -simulate(schedule, costs).makespan)
        k = search_k(lambda first: measure(build(first)), stages, most)
    return build(next(first for first in range(min(k, most), -1, -1) if fits(first)))


def largest_k(stages: int, memory_limit: float, costs: Costs) -> int:
    """Return the largest k that Algorithm 2 allows (its lines 1 and 2).

    After the forward, ``M_fwd`` bytes are in use. The output gradients of the stages after the k-th are freed; the
    delayed weight gradients of the first k hold theirs: ``f(k) = M_fwd − Σ_{i>k} M(δO_i) + Σ_{i≤k} M(δW_i)`` must stay
    below `memory_limit`. M_fwd are the saved activations, M(δO) those of a stage, and M(δW) is the output's gradient
    that a delayed weight gradient keeps, all in the units of ``costs.stages``.
    """
    held = [costs.bytes_of(stage) for stage in range(stages)]
    total, k = 0.0, 0
    for entry in held:
        total += entry.saved + entry.output
        if total >= memory_limit:
            break
        k += 1
    return k


def search_k(throughput: Callable[[int], float], stages: int, most: int | None = None) -> int:
    """Return the k of the highest throughput, taken to be roughly a concave function of k (§5.1).

    k rises from 0 in steps of ``stages / 10``; then the neighbourhood of the best is searched in half the steps, and so
    on down to steps of 1. Ties go to the smallest. Every k is below `stages`, and at most `most`. `throughput` is
    called once for each k tried.
    """
    throughput = cache(throughput)
    limit = min(stages - 1, stages if most is None else most)
    stride = max(1, stages // 10)
    tried = range(0, limit + 1, stride)
    while True:
        best = max(tried, key=lambda k: (throughput(k), -k))
        if stride == 1:
            return best
        lowest, highest = max(0, best - stride), min(limit, best + stride)
        stride = math.ceil(stride / 2)
        tried = range(max(lowest, best - stride * ((best - lowest) // stride)), highest + 1, stride)


# Multi-stream out-of-order back-propagation with multi-region joint scheduling, for one device.


@builder
def out_of_order(*, stages: int, regions: int | Sequence[Iterable[int]] = 8,
                 times: RegionTimes | None = None,
                 costs: Costs | None = None, memory_ratio: float = 1.1, k: int | None = 1,
                 fusion: Fusion | None = "backward", unweighted: Iterable[int] = (),
                 input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return a schedule of one worker's two streams: I and F on "main", W and U on "sub", where they fit best.

    The step begins with the backward and ends with the forward that follows it, so that weight gradients of late
    stages can run during the forward of early ones. Algorithm 1 assigns them to regions of the main stream. If the
    simulated peak of memory is too high, weight gradients of the first region run as soon as they are ready, then those
    of the first two regions, and so on, until it fits. If that is not enough (the main stream may be far ahead of the
    other), they go to the main stream, in the conventional order, region by region.

    Parameters
    ----------
    stages, unweighted, input_gradient
        As for `gpipe`.
    regions
        The stages of every region of the forward, or how many equal regions. The backward has the same ones.
    times
        Times and speed-ups of regions and the kernels that run during them; by default taken from `costs`.
    costs
        Durations, bytes and slowdown, for the simulated memory and for `times`.
    memory_ratio
        Bound for the peak of memory, as a multiple of the conventional schedule's (§8.2).
    k
        The weight gradients of the first k stages run on the main stream after the backward, the first stage's first.
        1 in the paper; more of them is reverse first-k scheduling for these stages (§6). None searches for the k of
        the shortest simulated makespan (`search_k`): where the streams are equals, as two CPU threads are, and weight
        gradients outweigh the main stream, that balances them.
    fusion
        Where the updates go, see `place_updates`; None leaves them out (`synchronise` comes before updates).

    Raises
    ------
    OptionError
        Regions do not list all stages in order; k is not in 0…stages, or the ratio is not positive.
    MemoryLimitError
        No schedule meets the ratio; the message names the least possible ratio.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §4.1 and Algorithm 1.
    """
    check_positive("The memory ratio", memory_ratio, finite=False)
    costs = costs or Costs()
    plain = StepGraph(stages, unweighted=frozenset(unweighted), first="I")
    cut = make_regions(stages, regions)
    times = times or RegionTimes.from_costs(costs, input_gradient)
    reference = conventional(stages=stages, fusion="none" if fusion is None else fusion, unweighted=plain.unweighted,
                             input_gradient=input_gradient)  # fmt: skip
    allowed = simulate(reference, costs).peak

    def build(first: int, early: int, on_main: int) -> Schedule:
        timeline = Timeline(plain, cut, times, costs, k=first, input_gradient=input_gradient, conventional=on_main)
        lanes = {"main": timeline.main, "sub": [Action(stage, "W", 0) for stage in joint_schedule(timeline, early)]}
        name = "out-of-order"
        if early or on_main:
            name += f", {early or on_main} regions pre-scheduled" + " on main" * (on_main > 0)
        schedule = Schedule.of(plain, [{stream: cells for stream, cells in lanes.items() if cells}], name)
        return schedule if fusion is None else place_updates(schedule, fusion)

    def capped(first: int) -> Simulation:
        """Pre-schedule as few regions as it takes."""
        backward = sum(region.kind == "I" for region in cut)
        least = math.inf
        for early, on_main in [(i, 0) for i in range(backward + 1)] + [(0, i + 1) for i in range(backward)]:
            found = simulate(build(first, early, on_main), costs)
            share = found.peak / allowed if allowed else 1.0
            if share <= memory_ratio:
                return found
            least = min(least, share)
        raise MemoryLimitError("No order of the weight gradients stays below the memory ratio",
                               expected=f"memory_ratio={least:.4g} or more", got=memory_ratio,
                               remedy="Raise the ratio, or use the conventional schedule")  # fmt: skip

    def throughput(first: int) -> float:
        try:
            return -capped(first).makespan
        except MemoryLimitError:
            return -math.inf

    return capped(search_k(throughput, stages) if k is None else k).schedule
