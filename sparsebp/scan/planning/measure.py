"""Measure the steps of a planned scan one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import ShapeError
from sparsebp.core.types import Array
from sparsebp.scan.planning.planned import PlannedScan
from sparsebp.scan.running.arguments import check_arguments
from sparsebp.scan.running.run import run_steps, workspace_of


def step_times(
    plan: PlannedScan, g: Array, data: Sequence[Array], injections: Sequence[Array | None] | None, repeats: int
) -> list[float]:
    """Return the least time of every step in `repeats` runs; see `ScanPlan.profile`."""
    repeats = check_integer("repeats", repeats, 1)
    arguments = check_arguments(plan, g, data, injections)
    if arguments.stacked:
        raise ShapeError(
            "Stacked data has no steps of its own: its levels run in one kernel call each",
            expected="a list with one array a Jacobian",
            got=f"an array of shape {arguments.data.shape}",
            remedy="Pass list(data)",
        )
    stamps: list[float] = []

    def stamp() -> None:
        backend.synchronize(arguments.xp)  # synchronize!
        stamps.append(time.perf_counter())

    least = [float("inf")] * len(plan.steps)
    with workspace_of(plan, arguments) as workspace:
        for run in range(repeats + 1):
            stamps.clear()
            stamp()
            run_steps(plan, arguments, workspace, stamp)
            if run:  # the first one compiles and warms up
                least = [min(pair) for pair in zip(least, map(float.__sub__, stamps[1:], stamps), strict=True)]
    return least
