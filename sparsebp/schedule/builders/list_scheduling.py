"""List scheduling: whenever a worker is free, it starts the most urgent of the actions that are ready."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparsebp.schedule.actions import Action
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph


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
