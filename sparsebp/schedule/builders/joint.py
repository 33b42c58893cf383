"""Algorithm 1 of the out-of-order paper: which weight gradient runs beside which region of the main stream."""

from __future__ import annotations

from sparsebp.schedule.actions import Action
from sparsebp.schedule.builders.regions import Region, RegionProfile
from sparsebp.schedule.costs import Costs
from sparsebp.schedule.graph import StepGraph


class Timeline:
    """The main stream of a step by itself: backward, the first k stages' weight gradients, forward.

    Parameters
    ----------
    graph
        The step.
    regions
        Of the main stream, those of the backward first.
    profile
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

    def __init__(self, graph: StepGraph, regions: list[Region], profile: RegionProfile, costs: Costs, *, k: int,
                 input_gradient: bool, conventional: int = 0) -> None:  # fmt: skip
        self.regions, self.profile, self._costs = regions, profile, costs
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
            scale = profile.main(region) / known if known > 0 else 0.0  # a measured total may be another one
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
    lasts = [{stage: timeline.profile.sub(stage, region) for stage in timeline.beside} for region in regions]
    speedup = [{stage: timeline.profile.speedup(stage, region) for stage in timeline.beside} for region in regions]
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
