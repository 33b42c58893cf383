"""Data-parallel workers: the order of their sums, and reverse first-k, which moves weight gradients behind them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias, get_args

from sparsebp.core.check import check_choice
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.one_worker import conventional, search_k
from sparsebp.schedule.options import builder
from sparsebp.schedule.schedule import Action, Lane, Schedule, StepGraph
from sparsebp.schedule.simulation import simulate
from sparsebp.schedule.updates import Fusion, place_updates, without_updates

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
