"""When the actions of a step ran, on all ranks, compared with the simulation of the same durations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from sparsebp.comm.transport import Transport, host_of
from sparsebp.core.files import write_figure
from sparsebp.runtime.agreement import TAG
from sparsebp.schedule import Action, Costs, Overlap, Schedule, simulate
from sparsebp.schedule.plot import gantt
from sparsebp.schedule.simulation import Event, Simulation

Times = Mapping[Action, tuple[float, float]]
"""When actions began and ended, in seconds of ``time.perf_counter()`` of the rank that ran them."""
_ROUNDS = 20


@dataclass(frozen=True)
class Timeline:
    """A measured step, with the attributes of a `Simulation` that `sparsebp.schedule.plot` draws.

    Attributes
    ----------
    schedule
        The schedule that ran.
    events
        All actions, sorted by start; the first begins at 0. Seconds.
    uncertainty
        Seconds by which a rank's clock may differ from rank 0's after correction.
    """

    schedule: Schedule
    events: tuple[Event, ...]
    uncertainty: float
    steps: int = 1
    transfers: tuple[Any, ...] = ()

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max((event.end for event in self.events), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of the time in which ranks compute nothing, from 0 to 1."""
        busy = sum(event.end - event.start for event in self.events)
        return max(0.0, 1 - busy / (self.schedule.workers * self.makespan)) if self.makespan > 0 else 0.0

    def simulated(self) -> Simulation:
        """Return the simulation with these durations, means over micro-batches, and messages that take no time."""
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for event in self.events:
            action = cast(Action, event.cell)
            found[action.kind, action.stage].append(event.end - event.start)
        means = {key: fmean(times) for key, times in found.items()}
        overlaps = any(isinstance(cell, Overlap) for lane in self.schedule.lanes for cell in lane.cells)
        return simulate(self.schedule, Costs(
            lambda action: means.get((action.kind, action.stage), 0.0),
            slowdown=2.0 if overlaps else 1.0,  # a rank runs F, then B
        ))  # fmt: skip


def clock_offset(transport: Transport) -> tuple[float, float]:
    """Return the offset of rank 0's ``time.perf_counter()`` from this rank's, and its uncertainty; all ranks call it.

    Each asks rank 0 for the time, and takes the fastest answer: it was written between question and answer.
    """
    question, answer = np.zeros(1), np.zeros(1)
    best = (0.0, 0.0 if transport.rank == 0 else np.inf)
    for rank in range(1, transport.size):
        for _ in range(_ROUNDS):
            if transport.rank == 0:
                transport.irecv(question, rank, TAG).wait()
                transport.isend(np.array([time.perf_counter()]), rank, TAG).wait()
            elif transport.rank == rank:
                begun = time.perf_counter()
                transport.isend(question, 0, TAG).wait()
                transport.irecv(answer, 0, TAG).wait()
                ended = time.perf_counter()
                best = min(best, (float(answer[0]) - (begun + ended) / 2, (ended - begun) / 2), key=lambda one: one[1])
    return best


def measured(transport: Transport, schedule: Schedule, times: Times) -> Timeline | None:
    """Return the timeline of a step on all ranks, which all call this; None where no rank has run a step."""
    transport = host_of(transport)  # messages of a few bytes go from host to host
    offset, uncertainty = clock_offset(transport)
    own = [(*action, begin + offset, end + offset) for action, (begin, end) in times.items()]
    events, worst = [], 0.0
    lanes = {lane.worker: number for number, lane in reversed(list(enumerate(schedule.lanes)))}
    for rank, (rows, error) in enumerate(transport.share((own, uncertainty))):
        worst = max(worst, error)
        for stage, kind, microbatch, begin, end in rows:
            events.append(Event(Action(stage, kind, microbatch), lanes[rank], begin, end, (None,), 0))
    if not events:
        return None
    first = min(event.start for event in events)
    events = [event._replace(start=event.start - first, end=event.end - first) for event in events]
    return Timeline(schedule, tuple(sorted(events, key=lambda event: event.start)), worst)


def save_timeline(timeline: Timeline, path: Path) -> None:
    """Write a picture of a timeline, and of the simulation with the same durations below it, on one scale of seconds.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    OutputError
        The file cannot be written.
    """
    simulated = timeline.simulated()
    height = 1.6 + 0.5 * timeline.schedule.workers
    ax = gantt(cast(Simulation, timeline), memory=False)
    figure = ax.figure
    figure.set_size_inches(figure.get_size_inches()[0], 2 * height)
    figure.delaxes(ax)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"hspace": 0.55})
    gantt(cast(Simulation, timeline), above, memory=False)
    gantt(simulated, below, memory=False)
    for name, one, run in (("measured", above, timeline), ("simulated, messages at once", below, simulated)):
        title = f"{timeline.schedule.name}: ".removeprefix(": ")
        one.set_title(f"{title}{name}, {1e3 * run.makespan:.3g} ms, idle {run.bubble:.1%}", loc="left", fontsize=10,
                      pad=18)  # fmt: skip
    below.set_xlim(0, max(timeline.makespan, simulated.makespan))
    above.set_xlabel("")
    below.set_xlabel("seconds")
    write_figure(figure, path)
