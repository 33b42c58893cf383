"""A simulated schedule in the format of Chrome's traces: open it in https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

from sparsebp.core.errors import OptionError
from sparsebp.core.files import write_atomically
from sparsebp.schedule.actions import KINDS, Action, Kind, actions_of
from sparsebp.schedule.simulation.memory import USES
from sparsebp.schedule.simulation.simulate import Event, Simulation, Transfer


def chrome_trace(simulation: Simulation, *, unit: float = 1e6) -> dict[str, Any]:
    """Return a simulation as the dict of a trace: a process a worker, a thread a stream, counters for the memory.

    Parameters
    ----------
    simulation
        Of any schedule.
    unit
        Microseconds in a unit of the simulation's time: 1e6 if that is the second.

    Returns
    -------
    What ``json.dump`` takes. Transfers are spans of a track of their sender, and arrows from who makes to who reads.

    Raises
    ------
    OptionError
        `unit` is not positive, or not finite.

    Notes
    -----
    The Trace Event Format's phases: X (complete events), M (names), C (counters), b and e (spans that may overlap),
    s and f (arrows).
    """
    if not (unit > 0 and math.isfinite(unit * max(1.0, simulation.makespan))):
        raise OptionError("A unit of time takes no time, or all", expected="microseconds, more than 0", got=unit,
                          remedy="Pass 1e6 for seconds")  # fmt: skip
    events = [*_names(simulation), *_actions(simulation, unit), *_transfers(simulation, unit),
              *_memory(simulation, unit)]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": simulation.schedule.name}}


def write_trace(simulation: Simulation, path: str | os.PathLike[str], *, unit: float = 1e6) -> None:
    """Write `chrome_trace` to a JSON file, under a temporary name first.

    Raises
    ------
    OutputError
        The file cannot be written.
    OptionError
        `unit` is not positive, or not finite.
    """
    write_atomically(path, json.dumps(chrome_trace(simulation, unit=unit), allow_nan=False).encode())


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for number, lane in enumerate(simulation.schedule.lanes):
        process = {"ph": "M", "name": "process_name", "pid": lane.worker, "args": {"name": f"worker {lane.worker}"}}
        thread = {"ph": "M", "name": "thread_name", "pid": lane.worker, "tid": number, "args": {"name": lane.stream}}
        yield from (process, thread)


def _actions(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    for event in simulation.events:
        kinds = [action.kind for action in actions_of(event.cell)]
        details: dict[str, Any] = {"step": event.step}
        versions = [version for version in event.versions if version is not None]
        if versions:
            details["weight version"] = versions[0] if len(versions) == 1 else versions
        yield {
            "ph": "X", "name": str(event.cell), "cat": ", ".join(KINDS[kind] for kind in kinds),
            "pid": simulation.schedule.lanes[event.lane].worker, "tid": event.lane,
            "ts": event.start * unit, "dur": (event.end - event.start) * unit, "args": details,
        }  # fmt: skip


def _transfers(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    """Yield every transfer as a span of the sender's track for its receiver, and as an arrow from maker to reader.

    Viewers tie the end of an arrow to the box around its time, so arrows begin and end a little inside.
    """
    schedule = simulation.schedule
    for number, transfer in enumerate(simulation.transfers):
        span = {"name": f"to worker {transfer.receiver}", "cat": "transfer", "id": number, "pid": transfer.sender}
        yield {**span, "ph": "b", "ts": transfer.start * unit, "args": {"of": str(transfer.source)}}
        yield {**span, "ph": "e", "ts": transfer.end * unit}
        maker = simulation.event(transfer.source, transfer.step)
        reader = _reader(simulation, transfer)
        for phase, event, part in (("s", maker, 0.99), ("f", reader, 0.01)):
            lane = schedule.lanes[event.lane]
            yield {"ph": phase, "name": str(transfer.source), "cat": "data", "id": number, "pid": lane.worker,
                   "tid": event.lane, "ts": (event.start + part * (event.end - event.start)) * unit,
                   **({"bp": "e"} if phase == "f" else {})}  # fmt: skip


def _reader(simulation: Simulation, transfer: Transfer) -> Event:
    """Return the first event that uses what was transferred."""
    source = transfer.source
    wanted: tuple[tuple[int, Kind], ...] = ((source.stage + 1, "F"),)
    if source.kind != "F":
        wanted = (source.stage - 1, "I"), (source.stage - 1, "W")
    actions = [Action(stage, kind, source.microbatch) for stage, kind in wanted]
    events = [simulation.event(action, transfer.step) for action in actions if action in simulation.schedule]
    return min(events, key=lambda event: event.start)


def _memory(simulation: Simulation, unit: float) -> Iterator[dict[str, Any]]:
    for curve in simulation.memory:
        for number, time in enumerate(curve.times):
            uses = {use.replace("_", " "): getattr(curve, use)[number] for use in USES}
            yield {"ph": "C", "name": "memory", "pid": curve.worker, "ts": time * unit, "args": uses}
