"""What a rank of ``python -m benchmarks scaling-measured`` runs, see `benchmarks.processes.ranks`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.processes.replicas import SGD, mlp
from sparsebp import nn, optim
from sparsebp.comm.transport import Transport
from sparsebp.core.threads import set_threads
from sparsebp.runtime.actions import Run, Stages, Step
from sparsebp.runtime.pipeline import PipelineExecutor
from sparsebp.schedule import Action, Schedule
from sparsebp.schedule.builders import build, place_updates

TRANSFERS = 20
"""Round trips of each size."""


class TimedPipeline(PipelineExecutor):
    """A `PipelineExecutor` that notes when the parts of each cell ran; one machine's processes have the same clock.

    Attributes
    ----------
    spans
        Action, start and end; B as I and W.
    """

    spans: list[tuple[str, float, float]]

    def _runs(self, part: Action, count: int, names: dict[int, list[str]]) -> list[Run]:
        runs = super()._runs(part, count, names)

        def timed(step: Step) -> None:
            start = time.perf_counter()
            for run in runs:
                run(step)
            self.spans.append((str(part), start, time.perf_counter()))

        return [timed]


def schedule_of(name: str, given: Mapping[str, Any], ranks: int) -> Schedule:
    """Return the schedule of this name that the ranks run, updates at its end."""
    stages = Stages(mlp(given["width"], given["depth"]))
    found = build(name, strict=False, workers=ranks, stages=len(stages), microbatches=given["microbatches"],
                  unweighted=stages.unweighted, input_gradient=False, group=2)  # fmt: skip
    return place_updates(found)


def steps(name: str, transport: Transport, given: Mapping[str, Any]) -> Iterator[list[tuple[str, float, float]]]:
    """Run steps of a schedule and yield the spans of each, of all ranks."""
    model = mlp(given["width"], given["depth"])
    optimizer = optim.SGD(model.parameters(), **SGD)
    schedule = schedule_of(name, given, transport.size)
    executor = TimedPipeline(model, nn.CrossEntropyLoss(), optimizer, schedule, transport)
    rng = np.random.default_rng(1)
    shape = given["batch"], given["width"]
    batches = [(rng.standard_normal(shape, np.float32), rng.integers(given["width"], size=shape[0]))
               for _ in range(given["microbatches"])]  # fmt: skip
    for number in range(-2, given["steps"]):  # two to warm up
        executor.spans = []
        transport.barrier()
        executor.step(batches)
        every = transport.share(executor.spans)
        if number >= 0:
            yield [span for spans in every for span in spans]


def transfers(transport: Transport, sizes: list[int]) -> list[tuple[int, float]]:
    """Return bytes and seconds, half the fastest round trip's, of messages between the first two ranks."""
    found = []
    for size in sizes:
        array, trips = np.zeros(size // 4, np.float32), []
        for _ in range(TRANSFERS):
            transport.barrier()
            start = time.perf_counter()
            for sender in (0, 1):
                if transport.rank == sender:
                    transport.isend(array, 1 - sender, 0).wait()
                elif transport.rank == 1 - sender:
                    transport.irecv(array, sender, 0).wait()
            trips.append(time.perf_counter() - start)
        found.append((size, min(trips) / 2))
    return found


def work(transport: Transport, given: Mapping[str, Any]) -> dict[str, Any]:
    """Run all schedules; return the spans of every step, and the transfers."""
    set_threads(1)
    link = transfers(transport, given["sizes"])
    spans = {name: list(steps(name, transport, given)) for name in given["schedules"]}
    return {"spans": spans, "transfers": link}
