"""Algorithm 1 of out-of-order back-propagation: which weight gradient runs during which region of the main stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from sparsebp.core.errors import OptionError
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.schedule import Action, StepGraph


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
