"""Synchronisation of weight gradients between data-parallel replicas, on the network beside the computation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, TypeAlias

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import Lane, Schedule
from sparsebp.schedule.simulation.simulate import simulate

Priority: TypeAlias = Literal["first-ready", "first-stage"]


def synchronise(schedule: Schedule, *, priority: Priority = "first-stage", costs: Costs | None = None) -> Schedule:
    """Return `schedule` with one S a stage, on the stream ``"link"`` of its worker.

    All data-parallel replicas run the same schedule, so one of them is described.

    Parameters
    ----------
    schedule
        Any without updates; `place_updates` comes afterwards.
    priority
        Which gradient goes next when the network is free and several wait: ``"first-ready"`` is wait-free
        back-propagation (Zhang et al., "Poseidon", USENIX ATC 2017), ``"first-stage"`` sends that first which the next
        forward needs first (Peng et al., "ByteScheduler", SOSP 2019). What is under way is not interrupted.
    costs
        Durations, to know what is ready when; that of S is the one that matters.

    Raises
    ------
    OptionError
        `priority` is unknown, or the schedule has S or U already.
    """
    if not isinstance(priority, str) or priority not in ("first-ready", "first-stage"):
        raise OptionError("Unknown priority", expected="'first-ready' or 'first-stage'", got=repr(priority),
                          remedy="Pass one of them")  # fmt: skip
    graph = schedule.graph
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
