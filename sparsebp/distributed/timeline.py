"""When the actions of a step really ran, on all ranks, beside what the simulation says of the same durations."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np

from sparsebp.core.files import write_figure
from sparsebp.distributed.transport import Transport
from sparsebp.schedule import Action, Costs, Schedule, simulate
from sparsebp.schedule.pictures.gantt import gantt
from sparsebp.schedule.simulation.simulate import Event, Simulation

Times = Mapping[Action, tuple[float, float]]
"""When actions began and ended, in seconds of ``time.perf_counter()`` of the rank that ran them."""
_ROUNDS = 20
_TAG = 0


@dataclass(frozen=True)
class Timeline:
    """A step that ran: what `sparsebp.schedule.pictures.gantt` draws of a simulation, measured.

    Attributes
    ----------
    schedule
        What ran.
    events
        All actions, sorted by start; the first begins at 0. Seconds.
    uncertainty
        By how many seconds the clock of a rank may differ from that of rank 0 beyond what was corrected.
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
        """Return the simulation of the schedule with these durations and no time for messages.

        Each action takes the mean of its kind and stage over the micro-batches.
        """
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for event in self.events:
            action = cast(Action, event.cell)
            found[action.kind, action.stage].append(event.end - event.start)
        means = {key: fmean(times) for key, times in found.items()}
        return simulate(self.schedule, Costs(lambda action: means.get((action.kind, action.stage), 0.0)))


def clock_offset(transport: Transport) -> tuple[float, float]:
    """Return what to add to this rank's ``time.perf_counter()`` for that of rank 0, and how far that may be wrong.

    All ranks call this. Each asks rank 0 for the time, and takes the answer that came soonest: it was written somewhere
    between question and answer.
    """
    question, answer = np.zeros(1), np.zeros(1)
    best = (0.0, 0.0 if transport.rank == 0 else np.inf)
    for rank in range(1, transport.size):
        for _ in range(_ROUNDS):
            if transport.rank == 0:
                transport.irecv(question, rank, _TAG).wait()
                transport.isend(np.array([time.perf_counter()]), rank, _TAG).wait()
            elif transport.rank == rank:
                begun = time.perf_counter()
                transport.isend(question, 0, _TAG).wait()
                transport.irecv(answer, 0, _TAG).wait()
                ended = time.perf_counter()
                best = min(best, (float(answer[0]) - (begun + ended) / 2, (ended - begun) / 2), key=lambda one: one[1])
    return best


def measured(transport: Transport, schedule: Schedule, times: Times) -> Timeline | None:
    """Return the timeline of a step on all ranks, of what each says of its actions; all of them call this.

    None where no rank has run a step.
    """
    transport = getattr(transport, "host", transport)  # messages of a few bytes go from host to host
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
    """Write a picture of a timeline, and of the simulation of the same durations below it, on one scale of seconds.

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
