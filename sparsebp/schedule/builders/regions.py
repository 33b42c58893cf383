"""Regions of the main stream for joint scheduling, and what is known of kernels that run beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action
from sparsebp.schedule.costs import Costs


@dataclass(frozen=True)
class Region:
    """Consecutive stages of the backward (kind ``"I"``) or forward (``"F"``) on the main stream, in running order."""

    kind: Literal["F", "I"]
    stages: tuple[int, ...]

    def actions(self) -> list[Action]:
        """Return the actions of the main stream. (A step that leaves I of stage 0 out skips it.)"""
        return [Action(stage, self.kind, 0) for stage in self.stages]


@dataclass(frozen=True)
class RegionProfile:
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
    def from_costs(cls, costs: Costs, input_gradient: bool = False) -> RegionProfile:
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
