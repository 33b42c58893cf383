"""Multi-stream out-of-order back-propagation with multi-region joint scheduling, for one device."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sparsebp.core.errors import MemoryLimitError, OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.fusion import Fusion, place_updates
from sparsebp.schedule.builders.joint import RegionTimes, Timeline, joint_schedule, make_regions
from sparsebp.schedule.builders.one_worker import conventional
from sparsebp.schedule.builders.options import builder
from sparsebp.schedule.builders.replicas import search_k
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph
from sparsebp.schedule.schedule import Schedule
from sparsebp.schedule.simulation.simulate import Simulation, simulate


@builder
def out_of_order(*, stages: int, regions: int | Sequence[Iterable[int]] = 8,
                 times: RegionTimes | None = None,
                 costs: Costs | None = None, memory_ratio: float = 1.1, k: int | None = 1,
                 fusion: Fusion | None = "backward", unweighted: Iterable[int] = (),
                 input_gradient: bool = False) -> Schedule:  # fmt: skip
    """Return a schedule of one worker's two streams: I and F on "main", W and U on "sub", where they fit best.

    The step begins with the backward and ends with the forward that follows it, so that weight gradients of late
    stages can run beside the forward of early ones. Algorithm 1 chooses which runs beside which region of the main
    stream. If the simulated peak of memory is too high, weight gradients of the first region run as soon as they are
    ready, then those of the first two regions, and so on, until it fits. If that is not enough (the main stream may be
    far ahead of the other), they go to the main stream, in the conventional order, region by region.

    Parameters
    ----------
    stages
        Number of stages.
    regions
        The stages of every region of the forward, or how many equal regions. Those of the backward are the same.
    times
        Times and speed-ups of regions with kernels beside them; by default taken from `costs`.
    costs
        Durations, bytes and slowdown, for the simulated memory and for `times`.
    memory_ratio
        Bound for the peak of memory, as a multiple of that of the conventional schedule (§8.2).
    k
        The weight gradients of the first k stages run on the main stream after the backward, the first stage's first.
        1 in the paper; more of them is reverse first-k scheduling for these stages (§6). None searches for the k of
        the shortest simulated makespan (`search_k`): where the streams are equals, as two CPU threads are, and weight
        gradients outweigh the main stream, that shares them out.
    fusion
        Where the updates go, see `place_updates`; None leaves them out (`synchronise` comes before updates).
    unweighted
        Stages without parameters.
    input_gradient
        Whether stage 0 has an I.

    Raises
    ------
    OptionError
        Regions do not list all stages in order; k is not in 0…stages, or the ratio is not positive.
    MemoryLimitError
        No schedule meets the ratio; the message names the least that one does.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, §4.1 and Algorithm 1.
    """
    if not memory_ratio > 0:
        raise OptionError("The memory ratio is not positive", expected="a positive multiple of the conventional peak",
                          got=memory_ratio, remedy="Raise it")  # fmt: skip
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
