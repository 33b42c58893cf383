"""A simulation in numbers, as JSON can hold them."""

from __future__ import annotations

from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.schedule.actions import Action, Kind
from sparsebp.schedule.simulation.simulate import Simulation


def summary(simulation: Simulation) -> dict[str, Any]:
    """Return what a simulation found.

    Returns
    -------
    ``name``, ``workers``, ``stages``, ``microbatches``, ``steps``; ``makespan``, ``bubble``, ``critical_path`` (cells),
    ``peak_memory`` (the largest of all workers); ``per_worker`` (stages, busy share of the main stream, peak memory);
    ``per_stage``: the largest staleness and version difference of any forward and any backward, see
    `Simulation.staleness` and `Simulation.version_difference`, or an empty list where there is one update a step or
    none, so that all are 0.
    """
    schedule, graph = simulation.schedule, simulation.schedule.graph
    peaks = [curve.peak for curve in simulation.memory]
    updated = range(graph.stages if graph.updates == "microbatch" else 0)
    return {
        "name": schedule.name,
        "workers": schedule.workers,
        "stages": graph.stages,
        "microbatches": graph.microbatches,
        "steps": simulation.steps,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "peak_memory": max(peaks),
        "critical_path": [str(event.cell) for event in simulation.critical_path],
        "per_worker": [
            {
                "worker": worker,
                "stages": [stage for stage in range(graph.stages) if schedule.allocation[stage] == worker],
                "busy": _busy(simulation, worker),
                "peak_memory": peak,
            }
            for worker, peak in enumerate(peaks)
        ],
        "per_stage": [_stage(simulation, stage) for stage in filter(graph.weighted, updated)],
    }  # fmt: skip


def most_stale(found: dict[str, Any]) -> int:
    """Return the largest staleness in a summary."""
    return max((max(entry["staleness"].values()) for entry in found["per_stage"]), default=0)


def _busy(simulation: Simulation, worker: int) -> dict[str, float]:
    lanes = {i: lane.stream for i, lane in enumerate(simulation.schedule.lanes) if lane.worker == worker}
    shares = dict.fromkeys(lanes.values(), 0.0)
    for event in simulation.events:
        if event.lane in lanes and simulation.makespan > 0:
            shares[lanes[event.lane]] += (event.end - event.start) / simulation.makespan
    return shares


def _stage(simulation: Simulation, stage: int) -> dict[str, Any]:
    kinds: dict[str, Kind] = {"forward": "F", "backward": "B"}
    entry: dict[str, Any] = {"stage": stage, "staleness": {}, "version_difference": {}}
    for name, kind in kinds.items():
        actions = [Action(stage, kind, m) for m in range(simulation.schedule.graph.microbatches)]
        for measure in ("staleness", "version_difference"):
            try:
                entry[measure][name] = max(getattr(simulation, measure)(action) for action in actions)
            except OptionError:  # a backward that is W alone reads no weights
                continue
    return entry
