"""What the pictures of a schedule write: into boxes, before rows, above."""

from __future__ import annotations

from sparsebp.schedule.actions import Action
from sparsebp.schedule.schedule import Lane, Schedule
from sparsebp.schedule.simulation.simulate import Simulation


def numbers(schedule: Schedule, action: Action) -> tuple[str, ...]:
    """Return the numbers that tell `action` from others of its kind and worker: micro-batch, stage, or both."""
    if action.microbatch is None or schedule.graph.microbatches == 1:
        return (str(action.stage),)
    if schedule.workers == schedule.graph.stages:
        return (str(action.microbatch),)
    return str(action.microbatch), str(action.stage)


def meaning(schedule: Schedule) -> str:
    """Return what the numbers are."""
    if schedule.graph.microbatches == 1:
        return "stage"
    return "micro-batch" if schedule.workers == schedule.graph.stages else "micro-batch over stage"


def row(schedule: Schedule, lane: Lane) -> str:
    """Return the name of a row: the worker, and the stream if it is not the only one."""
    alone = sum(other.worker == lane.worker for other in schedule.lanes) == 1
    return f"worker {lane.worker}" if alone and lane.stream == "main" else f"worker {lane.worker} {lane.stream}"


def title(simulation: Simulation) -> str:
    """Return name, makespan and bubble."""
    name = simulation.schedule.name
    return f"{name}: " * bool(name) + f"makespan {simulation.makespan:.4g}, bubble {simulation.bubble:.1%}"
