"""Data-parallel training: when the weight gradients are synchronised, and reverse first-k scheduling that helps it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias, get_args

from sparsebp.core.arguments import check_choice
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.fusion import Fusion, place_updates, without_updates
from sparsebp.schedule.builders.one_worker import conventional
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph
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
    check_choice("priority", priority, get_args(Priority))
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


@builder
def data_parallel(*, stages: int, microbatches: int = 1, fusion: Fusion = "forward",
                  priority: Priority = "first-ready", costs: Costs | None = None, unweighted: Iterable[int] = (),
                  input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return the conventional order for one of several data-parallel workers, with the synchronisations on its link.

    Parameters
    ----------
    stages, microbatches, unweighted, input_gradient
        As `conventional` takes them.
    fusion
        Where the updates go, see `place_updates`. ``"forward"`` lets synchronisations go on beside the next forwards.
    priority, costs
        As `synchronise` takes them.
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
    stages run at the end, the first stage's first: their synchronisations are those that the next forward waits for.

    Parameters
    ----------
    stages
        Number of stages.
    k
        How many; None searches for it (`search_k`).
    costs
        Durations (S is the one that matters) and bytes.
    memory_limit
        Bound for the memory, in the units of ``costs.stages``: k is lowered until Algorithm 2's estimate stays below it
        (`largest_k`), and further until the simulated peak does, which counts weights and their gradients too.
    throughput
        Of a schedule, in any unit, for the search. By default the shortest simulated makespan wins.
    priority
        Of the synchronisations, see `synchronise`.
    unweighted
        Stages without parameters.
    input_gradient
        Whether stage 0 has an I.
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

    After the forward, ``M_fwd`` bytes are in use. The output gradients of the stages behind the k-th give theirs back;
    the delayed weight gradients of the first k hold theirs: ``f(k) = M_fwd − Σ_{i>k} M(δO_i) + Σ_{i≤k} M(δW_i)`` must
    stay below the limit. With M_fwd the saved activations, M(δO) those of a stage, M(δW) the output's gradient that a
    delayed weight gradient waits with.

    Parameters
    ----------
    stages
        Number of stages.
    memory_limit
        In the units of ``costs.stages``.
    costs
        Their bytes.
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
    on down to steps of 1. Of equals the smallest wins.

    Parameters
    ----------
    throughput
        Of k; measured once for each k that is tried.
    stages
        Number of stages: every k is below.
    most
        The largest k allowed.
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
