"""What a training step takes on many workers, simulated: pipelines, replicas of pipelines, data-parallel workers.

All replicas run the same schedule at the same time, so one of them is simulated; an S takes what a sum over all of them
takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.scaling.layers import Layer, cut
from benchmarks.scaling.machines import Machine
from sparsebp.schedule import Action, Costs, Schedule, Simulation, StepGraph, simulate
from sparsebp.schedule.builders import (
    dualpipe2018,
    fast_forward,
    gpipe,
    interleaved_one_f_one_b,
    modulo,
    one_f_one_b,
    pipedream,
    place_updates,
    reverse_first_k,
    synchronise,
    zero_bubble_h1,
    zero_bubble_h2,
)

CHUNKS = 2
"""Parts of the model a worker, for schedules that deal out more than one."""
PIPELINES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": partial(interleaved_one_f_one_b, chunks=CHUNKS),
    "zb-h1": zero_bubble_h1,
    "zb-h2": zero_bubble_h2,
    "fast-forward": partial(fast_forward, input_gradient=True),
    "modulo": partial(modulo, input_gradient=True),
}
"""Synchronous pipelines."""
ASYNCHRONOUS: dict[str, Callable[..., Schedule]] = {"pipedream": pipedream, "dualpipe": dualpipe2018}
"""Pipelines that update after every micro-batch."""
REPLICAS = ("dp-end", "dp-overlap", "dp-priority", "dp-reverse")
"""Data-parallel: sums behind the backward; beside it, first ready or first stage first; with reverse first-k."""


@dataclass(frozen=True)
class Found:
    """What a simulated step takes.

    Attributes
    ----------
    seconds
        Of a step among others.
    samples
        Of a step, on all replicas.
    bubble
        Share of the time in which workers do not compute, over one step by itself.
    peak
        Bytes that the fullest worker keeps: activations, gradients, weights; no optimizer state.
    detail
        Of the schedule: k of reverse first-k.
    """

    seconds: float
    samples: float
    bubble: float
    peak: float
    detail: int | None = None

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


def period(schedule: Schedule, costs: Costs, steps: int = 2) -> tuple[float, Simulation]:
    """Return the time from a step to the next, the mean over those after the first; and the first by itself."""
    one = simulate(schedule, costs)
    return (simulate(schedule, costs, steps=steps).makespan - one.makespan) / (steps - 1), one


def pipeline(name: str, layers: Sequence[Layer], machine: Machine, workers: int, microbatches: int, samples: float,
             replicas: int = 1) -> Found:  # fmt: skip
    """Return what a synchronous pipeline takes, or `replicas` of it side by side.

    Parameters
    ----------
    name
        One of `PIPELINES`.
    layers
        Of the model; they are cut into `CHUNKS` stages a worker.
    machine
        What they run on.
    workers, replicas
        Of a pipeline; how many pipelines.
    microbatches, samples
        Of a pipeline's step; samples of a micro-batch.
    """
    stages = cut(layers, workers * CHUNKS)
    costs = machine.costs(stages, samples, workers, replicas)
    options = {"costs": costs} if name in ("fast-forward", "modulo") else {}
    schedule = PIPELINES[name](workers=workers, stages=len(stages), microbatches=microbatches, **options)
    if replicas > 1:
        schedule = synchronise(schedule, costs=costs)
    seconds, one = period(place_updates(schedule), costs)
    return Found(seconds, samples * microbatches * replicas, one.bubble, one.peak)


def asynchronous(name: str, layers: Sequence[Layer], machine: Machine, workers: int, microbatches: int, samples: float,
                 slowdown: float = 2.0) -> Found:  # fmt: skip
    """Return what a micro-batch of an asynchronous pipeline takes among many, times `microbatches`.

    Parameters
    ----------
    name
        One of `ASYNCHRONOUS`.
    slowdown
        Of a forward and a backward that run side by side; at 2 both together take as long as one after the other.
    layers, machine, workers, microbatches, samples
        As for `pipeline`; a worker has one stage.
    """
    stages = cut(layers, workers)
    costs = machine.costs(stages, samples, workers, slowdown=slowdown)
    build = partial(ASYNCHRONOUS[name], workers=workers, stages=workers)
    one, more = (simulate(build(microbatches=count * microbatches), costs) for count in (1, 3))
    seconds = (more.makespan - one.makespan) / 2
    return Found(seconds, samples * microbatches, one.bubble, one.peak)


def data_parallel(name: str, layers: Sequence[Layer], machine: Machine, replicas: int, samples: float) -> Found:
    """Return what a step of data-parallel workers takes, every layer with a sum of its own.

    Parameters
    ----------
    name
        One of `REPLICAS`, or ``"dp-reverse-ready"``: reverse first-k with sums in the order of their readiness.
    samples
        Of a worker's step.
    layers, machine, replicas
        As for `pipeline`.
    """
    costs = machine.costs(layers, samples, 1, replicas)
    unweighted = tuple(number for number, layer in enumerate(layers) if not layer.weights)
    if name == "dp-end":
        schedule = sums_at_end(len(layers), frozenset(unweighted))
    else:
        schedule = reverse_first_k(
            stages=len(layers), k=None if "reverse" in name else 0, costs=costs, unweighted=unweighted,
            priority="first-ready" if name in ("dp-overlap", "dp-reverse-ready") else "first-stage",
            throughput=lambda found: -period(_updated(found), costs, 3)[0],
        )  # fmt: skip
    seconds, one = period(_updated(schedule), costs, 3)
    k = int(schedule.name.rpartition("-")[2]) if "reverse" in name else None
    return Found(seconds, samples * replicas, one.bubble, one.peak, k)


def sums_at_end(stages: int, unweighted: frozenset[int] = frozenset()) -> Schedule:
    """Return the conventional order without overlap: all sums after the backward, before the next forward."""
    graph = StepGraph(stages, unweighted=unweighted, first="I", synchronised=True)
    order = [stage for stage in range(stages) if graph.weighted(stage)]
    backward = [Action(stage, kind, 0) for stage in reversed(range(stages)) for kind in ("W", "I")
                if (kind == "I" and stage > 0) or (kind == "W" and graph.weighted(stage))]  # fmt: skip
    sums = [Action(stage, "S") for stage in order]
    cells = [*backward, *sums, *(Action(stage, "F", 0) for stage in range(stages))]
    return Schedule.of(graph, [cells], "sums at the end")


def _updated(schedule: Schedule) -> Schedule:
    """Return a data-parallel schedule with each update right before its forward, so that no sum is waited for early."""
    return replace(place_updates(schedule, "forward"), name=schedule.name)
