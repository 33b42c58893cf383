"""Algorithm 1 of the out-of-order paper: which weight gradient runs beside which region of the main stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph


@dataclass(frozen=True)
class Region:
    """Consecutive stages of the backward (kind ``"I"``) or forward (``"F"``) on the main stream, in running order."""

    kind: Literal["F", "I"]
    stages: tuple[int, ...]

    def actions(self) -> list[Action]:
        """Return the actions of the main stream. (A step that leaves I of stage 0 out skips it.)"""
        return [Action(stage, self.kind, 0) for stage in self.stages]


@dataclass(frozen=True)
class RegionTimes:
    """What Algorithm 1 knows of regions and kernels; measured, or `from_costs`.

    Attributes
    ----------
    main
        Time of a region's kernels on the main stream: ``T_main(R)``.
    sub
        Time of stage k's weight gradient (and update) beside a region: ``T_sub(k, R)``.
    speedup
        Of running the two at the same time instead of one after the other.
    """

    main: Callable[[Region], float]
    sub: Callable[[int, Region], float]
    speedup: Callable[[int, Region], float]

    @classmethod
    def from_costs(cls, costs: Costs, input_gradient: bool = False) -> RegionTimes:
        """Return what costs of single actions say: sums of what they take beside the other stream.

        Two streams that are slowed down by s and s' get ``1/s + 1/s'`` times as much done as one.
        """

        def times(actions: Iterable[Action]) -> tuple[float, float]:
            """Return the time by themselves, and beside the other stream."""
            known = [(costs.duration(action), costs.slowdown_of(action)) for action in actions]
            return sum(duration for duration, _ in known), sum(duration * slowdown for duration, slowdown in known)

        @cache
        def of_region(region: Region) -> tuple[float, float]:
            skipped = Action(0, "I", 0)
            return times(action for action in region.actions() if input_gradient or action != skipped)

        @cache
        def of_stage(stage: int) -> tuple[float, float]:
            return times((Action(stage, "W", 0), Action(stage, "U")))

        def speedup(stage: int, region: Region) -> float:
            return sum(alone / beside if beside > 0 else 1.0 for alone, beside in (of_region(region), of_stage(stage)))

        return cls(lambda region: of_region(region)[1], lambda stage, region: of_stage(stage)[1], speedup)


def make_regions(stages: int, forward: int | Sequence[Iterable[int]], backward: Sequence[Iterable[int]] | None,
                 ) -> list[Region]:  # fmt: skip
    """Return the regions of a step, those of the backward first.

    Parameters
    ----------
    stages
        Number of stages.
    forward
        The stages of each region of the forward; or how many regions as equal as can be.
    backward
        The stages of each region of the backward; None for those of the forward, reversed.

    Raises
    ------
    OptionError
        Regions do not list every stage once, from the first to the last (backward: from the last to the first).
    """
    if isinstance(forward, int):
        count = min(forward, stages)
        if count < 1:
            raise OptionError("There are no regions", expected="1 or more", got=forward, remedy="Raise regions")
        forward = [range(i * stages // count, (i + 1) * stages // count) for i in range(count)]
    there = [tuple(region) for region in forward]
    back = [region[::-1] for region in there[::-1]] if backward is None else [tuple(region) for region in backward]
    for name, regions, order in (("forward", there, range(stages)), ("backward", back, reversed(range(stages)))):
        listed, expected = [stage for region in regions for stage in region], list(order)
        if listed != expected:
            raise OptionError(
                f"The regions of the {name} do not list every stage once and in order", got=regions,
                expected=f"{expected[0]} to {expected[-1]}", remedy="List consecutive stages, region by region",
            )  # fmt: skip
    return [Region("I", region) for region in back] + [Region("F", region) for region in there]


class Timeline:
    """The main stream of a step by itself: backward, the first k stages' weight gradients, forward.

    Parameters
    ----------
    graph
        The step.
    regions
        Of the main stream, those of the backward first.
    times
        Times of the regions.
    costs
        Durations of single kernels, to place them within a region.
    k
        So many first stages have their weight gradients on the main stream, between backward and forward.
    input_gradient
        Whether stage 0 has an I.
    conventional
        In so many regions at the beginning, weight gradients are on the main stream too, each before its I.

    Attributes
    ----------
    main
        The actions of the main stream.
    begin, length
        Of every region.
    ready
        When a stage's weight gradient can start.
    deadline
        When its next forward starts.
    beside
        Stages whose weight gradients go to the other stream.
    """

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
            scale = times.main(region) / known if known > 0 else 0.0  # a measured total may be another one
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
    """Return the stages in the order of their weight gradients on the second stream.

    Of pairs of a weight gradient and a region that promise the same speed-up, the earlier region wins, then the stage
    whose forward comes first.

    Parameters
    ----------
    timeline
        The main stream.
    early
        In so many regions at the beginning, weight gradients run as soon as they are ready.

    Notes
    -----
    Oh et al., "Out-of-order backprop", EuroSys 2022, Algorithm 1. What the paper leaves open: a region in which nothing
    is ready yet moves on to when something is; a weight gradient that must end before its stage's next forward is no
    candidate beside later regions; what no region has room for goes before the region of that forward.
    """
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

    found: dict[int, tuple[float, int, int]] = {}  # the best of every region, found anew where it has changed
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
