"""Orders of one worker: the conventional one, list scheduling on two streams, and out-of-order back-propagation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from sparsebp.core.check import check_positive
from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.options import builder
from sparsebp.schedule.regions import RegionTimes, Timeline, joint_schedule, make_regions
from sparsebp.schedule.schedule import Action, Schedule, StepGraph
from sparsebp.schedule.simulation import Simulation, simulate
from sparsebp.schedule.updates import Fusion, place_updates


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
