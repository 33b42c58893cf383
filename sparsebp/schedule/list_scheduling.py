"""List scheduling: whenever a worker is free, it starts the most urgent of the actions that are ready.

Gradient fast-forwarding, with or without modulo allocation: results that another worker needs first, W fills gaps.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count as counter
from operator import itemgetter
from typing import Any

from sparsebp.core.check import check_number
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.allocation import Partition
from sparsebp.schedule.costs import Costs, Link, carry
from sparsebp.schedule.options import builder
from sparsebp.schedule.schedule import Action, Schedule, StepGraph


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
