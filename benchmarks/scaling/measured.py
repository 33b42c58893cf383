"""The simulator beside pipelines that run: ranks of one machine, their durations and transfers measured.

``python -m benchmarks scaling-measured``. It starts ``mpiexec`` itself, one thread a rank. Of every second step the
medians of the durations go into the costs, those of all schedules together; the other steps are what they are compared
with. Processes that share a machine slow each other down, and wait for its other users: that is part of the error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.processes.pipelines import schedule_of
from benchmarks.processes.ranks import on_ranks
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.core import tables
from sparsebp.core.tables import Column
from sparsebp.schedule import (
    Action,
    Costs,
    Durations,
    Link,
    Schedule,
    StageBytes,
    actions_of,
    compare,
    parse,
    parts_of,
    simulate,
)

TARGET = 0.15
"""Relative error of the length of a step, as for one worker."""
Spans = Sequence[tuple[str, float, float]]
"""Action, start, end: what a step's parts took, of all ranks."""


def measure(run: Run) -> Iterator[Row]:
    """Run the schedules on every number of ranks and simulate them."""
    given = dict(run.settings)
    for ranks in given["ranks"]:
        found = on_ranks(ranks, "benchmarks.processes.pipelines", given=given)
        link = fit_link(found["transfers"])
        entries = durations([step for spans in found["spans"].values() for step in spans[::2]])
        size = StageBytes(output=4 * given["batch"] * given["width"])
        for name, spans in found["spans"].items():
            schedule = schedule_of(name, given, ranks)
            yield {"schedule": name, "ranks": ranks} | row_of(schedule, Costs(Durations(entries), size, link),
                                                             spans[1::2])  # fmt: skip
        run.note(f"{ranks} ranks: a message takes {tables.seconds(link.latency)}, and {_bandwidth(link)}.")


def fit_link(transfers: Iterable[tuple[float, float]]) -> Link:
    """Return the link that fits measured transfers best: seconds = latency + bytes / bandwidth.

    Least squares of the relative errors over pairs of bytes and seconds, of two sizes at least. Neither latency nor
    bandwidth falls below 0; where seconds do not grow with the bytes, the bandwidth is infinite.
    """
    pairs = list(transfers)
    # Of latency · a + slope · b = 1, where a = 1 / seconds and b = bytes / seconds.
    a, b = [1 / seconds for _, seconds in pairs], [size / seconds for size, seconds in pairs]
    aa, ab, bb = (sum(x * y for x, y in zip(*both, strict=True)) for both in ((a, a), (a, b), (b, b)))
    determinant = aa * bb - ab * ab
    latency, slope = (sum(a) * bb - sum(b) * ab) / determinant, (sum(b) * aa - sum(a) * ab) / determinant
    if latency < 0:
        latency, slope = 0.0, sum(b) / bb
    if slope <= 0:
        return Link(sum(a) / aa)
    return Link(latency, 1 / slope)


def durations(steps: Sequence[Spans]) -> dict[str, float]:
    """Return the median of every stage's and kind's durations."""
    found: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, start, end in step:
            (action,) = actions_of(parse(name))
            found[f"{action.stage}{action.kind}"].append(end - start)
    return {key: median(values) for key, values in found.items()}


def row_of(schedule: Schedule, costs: Costs, steps: Sequence[Spans]) -> Row:
    """Simulate a schedule and compare it with its measured steps; every number is their median."""
    found = simulate(schedule, costs)
    errors = [compare(found, joined(schedule, step)) for step in steps]
    lengths = [max(end for _, _, end in step) - min(start for _, start, _ in step) for step in steps]
    row: Row = {
        "microbatches": schedule.graph.microbatches, "actions": sum(1 for _ in schedule), "measured": median(lengths),
        "simulated": found.makespan, "difference": found.makespan / median(lengths) - 1,
        "starts": median(error.mean_start for error in errors), "bubble": found.bubble,
    }  # fmt: skip
    return row | {"met": report.outcome([] if abs(row["difference"]) <= TARGET else [f"error ≤ {TARGET:.0%}"])}


def joined(schedule: Schedule, step: Spans) -> list[tuple[Action, float, float]]:
    """Return the spans of a schedule's actions, those of B from those of its parts."""
    of_part = {name: (start, end) for name, start, end in step}
    out = []
    for action in schedule:
        own = [of_part[str(part)] for part in parts_of(action)]
        out.append((action, min(start for start, _ in own), max(end for _, end in own)))
    return out


def _bandwidth(link: Link) -> str:
    return f"{tables.size(link.bandwidth)} a second" if link.bandwidth < float("inf") else "nothing for its bytes"


def picture(result: Result) -> Any:
    """Draw measured and simulated lengths of a step."""
    rows = result["rows"]
    colours = {"measured": "#9ca3af", "simulated": "#1e40af"}
    bars = [(key, colour, [1e3 * row[key] for row in rows]) for key, colour in colours.items()]
    labels = [f"{row['schedule']}, {row['ranks']} ranks" for row in rows]
    drawing, _ = pictures.bar_chart(labels, bars, "milliseconds a step", each=0.45)
    pictures.legend_below(drawing)
    return drawing


def _signed(value: Mapping[str, float] | float) -> str:
    return f"{value:+.1%}"


BENCHMARK = Benchmark(
    name="scaling-measured",
    title="Pipelines on ranks of this machine, measured and simulated: an MLP of {depth} layers of {width}, float32",
    leaves_out="loading of data; what ranks exchange before they start together",
    settings={"target": TARGET, "sizes": (1 << 10, 1 << 14, 1 << 18, 1 << 21)},
    sizes={"ranks": (2,), "width": 512, "depth": 8, "batch": 64, "microbatches": 8, "steps": 30,
           "schedules": ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "fast-forward", "modulo")},
    quick={"ranks": (2,), "width": 16, "depth": 4, "batch": 4, "microbatches": 2, "steps": 2,
           "schedules": ("1f1b", "zb-h1")},
    threads=None,
    measure=measure,
    columns=(
        Column("schedule", "schedule", number=False),
        Column("ranks", "ranks"),
        Column("micro-batches", "microbatches"),
        Column("actions", "actions"),
        Column("measured", "measured", tables.seconds),
        Column("simulated", "simulated", tables.seconds),
        Column("error", "difference", _signed),
        Column("mean error of starts", "starts", "{:.1%}".format),
        Column("bubble, simulated", "bubble", "{:.0%}".format),
        Column("outcome", "met", number=False),
    ),
    tables={
        "A step": ("schedule", "ranks", "microbatches", "actions", "measured", "simulated"),
        "Errors": ("schedule", "ranks", "difference", "starts", "bubble", "met"),
    },
    short=("schedule", "ranks", "measured", "simulated", "difference", "starts", "met"),
    picture=picture,
)  # fmt: skip
