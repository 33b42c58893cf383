"""List scheduling: whenever a worker is free, it starts the most urgent of the actions that are ready.

Gradient fast-forwarding, with modulo allocation or without: what another worker waits for comes first, W fills gaps.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.partition import Partition
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule


def list_schedule(graph: StepGraph, actions: Iterable[Action], allocation: Sequence[int],
                  urgency: Callable[[Action], Any], costs: Costs) -> list[list[Action]]:  # fmt: skip
    """Return the order in which each worker runs its actions, if none ever waits while one of them is ready.

    Parameters
    ----------
    graph
        Says what an action needs.
    actions
        What is to be done: F, I, W, S, U, no B. What they need besides is taken to be there.
    allocation
        The worker of every stage.
    urgency
        A sort key: the smallest goes first. Actions must not compare equal.
    costs
        Durations. Transfers are taken to be free.

    Returns
    -------
    list of list of Action
        One order a worker.

    Notes
    -----
    Coffman and Graham, "Optimal scheduling for two-processor systems", Acta Informatica 1972; the out-of-order paper's
    §2 and §4.1.
    """
    waiting: dict[Action, int] = {}
    followers: defaultdict[Action, list[Action]] = defaultdict(list)
    todo = set(actions)
    for action in todo:
        needed = [needs for needs in graph.predecessors(action) if needs in todo]
        waiting[action] = len(needed)
        for needs in needed:
            followers[needs].append(action)
    workers = max(allocation) + 1
    orders: list[list[Action]] = [[] for _ in range(workers)]
    ready: list[list[tuple[Any, Action]]] = [[] for _ in range(workers)]
    idle = [True] * workers
    running: list[tuple[float, int, Action]] = []  # when it ends, on which worker

    def release(action: Action) -> None:
        heapq.heappush(ready[allocation[action.stage]], (urgency(action), action))

    for action, count in waiting.items():
        if not count:
            release(action)
    now = 0.0
    while True:
        for worker in range(workers):
            if idle[worker] and ready[worker]:
                _, action = heapq.heappop(ready[worker])
                orders[worker].append(action)
                heapq.heappush(running, (now + costs.duration(action), worker, action))
                idle[worker] = False
        if not running:
            return orders
        now = running[0][0]
        while running and running[0][0] == now:
            _, worker, ended = heapq.heappop(running)
            idle[worker] = True
            for follower in followers[ended]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    release(follower)


@builder
def fast_forward(*, workers: int, stages: int, microbatches: int = 1, k: int = 0, costs: Costs | None = None,
                 unweighted: Iterable[int] = (), input_gradient: bool = False,
                 recomputed: Iterable[int] = ()) -> Schedule:  # fmt: skip
    """Return the schedule of gradient fast-forwarding: input gradients before weight gradients.

    Every worker has one contiguous part of the stages. It runs, of what is ready, first the F or I whose result another
    worker needs, then other F, then other I; weight gradients fill the gaps.

    Parameters
    ----------
    workers, stages, microbatches, unweighted
        As for `gpipe`.
    k
        Combines it with reverse first-k scheduling (§6): the weight gradients of the first k stages come last, first
        stage first, so that their synchronisation between data-parallel replicas starts with the most urgent one.
    costs
        Durations, to know what is ready when. Default: 1 for F, I and W.
    input_gradient
        Whether stage 0 has an I.
    recomputed
        Stages that keep only their input and compute the rest again.

    Raises
    ------
    OptionError
        There are fewer stages than workers, a number is below 1, or k is not in 0…stages.

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

    Parameters
    ----------
    workers, stages, microbatches, k, costs, unweighted, input_gradient, recomputed
        As for `fast_forward`.
    group
        How many neighbouring stages are dealt out together: more of them need fewer transfers, and leave larger gaps.

    Raises
    ------
    OptionError
        There are fewer groups than workers, a number is below 1, or k is not in 0…stages.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §5.2.1 and §8.4.1, Fig. 5c and 12c.
    """
    graph = StepGraph(stages, microbatches, frozenset(unweighted))
    if stages <= (workers - 1) * group:
        raise OptionError(
            "There are fewer groups of stages than workers", got=f"{stages} stages in groups of {group}",
            expected=f"groups of 1 stage or more, one for each of {workers} workers",
            remedy="Use fewer workers or smaller groups",
        )  # fmt: skip
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

    actions = [*graph.required(), *(graph.optional() if input_gradient else ())]
    orders = list_schedule(graph, actions, allocation, urgency, costs)
    return Schedule.of(graph, orders, name + (f", reverse first {k}" if k else ""), recomputed)
