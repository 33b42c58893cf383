"""What a step of time costs in long sequences beside short ones: forward and backward of recurrent layers on the CPU.

``python -m benchmarks long-sequences``. The work grows with the number of steps T, and the cost is to grow as fast and
no faster. Both lengths are measured in turn; there is no peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.workload import SIZES, SequenceWorkload
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

BATCH = 16
TARGET = 1.5
"""Times a step of the short sequence that one of the long may cost."""
PARTS = ("forward", "backward")


def measure(run: Run) -> Iterator[Row]:
    """Measure every cell."""
    for count in run.threads():
        for cell in SIZES:
            yield measure_row(cell, run.settings["lengths"], run.rounds) | {"threads": count}


def measure_row(cell: str, lengths: tuple[int, int], rounds: Mapping[str, Any]) -> Row:
    """Time forward and backward of one cell at both lengths, in turn."""
    workloads = {
        name: SequenceWorkload(cell, length, BATCH) for name, length in zip(("short", "long"), lengths, strict=True)
    }
    calls: dict[str, timing.Call | Callable[[], object]] = {}
    for name, workload in workloads.items():
        calls[f"forward_{name}"] = workload.forward
        calls[f"backward_{name}"] = timing.Call(workload.backward, workload.forward)
    timings = timing.measure(calls, **rounds)
    any_of = workloads["long"]
    row: Row = {"model": f"{cell}({any_of.input_size}, {any_of.hidden})", "long": lengths[1], "batch": BATCH}
    for name, length in zip(("short", "long"), lengths, strict=True):
        for part in PARTS:
            took = timings[f"{part}_{name}"].seconds
            timings[f"{part}_{name}"] = timing.Timing(tuple(seconds / length for seconds in took))
    row |= {name: timed.to_dict() for name, timed in timings.items()}
    missed = []
    for part in PARTS:
        row[f"{part}_ratio"] = timing.ratio(timings[f"{part}_long"], timings[f"{part}_short"])
        missed += [part] if row[f"{part}_ratio"]["median"] > TARGET else []
    return row | {"target": TARGET, "met": report.outcome(missed)}


def picture(result: Result) -> Any:
    """Draw what a step of time costs, short beside long."""
    rows = result["rows"]
    labels = [f"{row['model']}\n{tables.in_threads(row['threads'])}" for row in rows]
    colours = {"forward_short": "#93c5fd", "forward_long": "#1e40af", "backward_short": "#fdba74",
               "backward_long": "#9a3412"}  # fmt: skip
    times = [(key.replace("_", ", "), colour, [row[key]["median"] * 1e6 for row in rows])
             for key, colour in colours.items()]  # fmt: skip
    drawing, ax = pictures.bar_chart(labels, times, "microseconds a step of time (median)", each=0.7)
    pictures.legend_below(drawing)
    ax.grid(axis="x", alpha=0.3)
    return drawing


_COSTS = partial(Column, show=tables.seconds)

WHO = ("model", "long", "threads")
BENCHMARK = Benchmark(
    name="long-sequences",
    title="A step of time of recurrent layers in long sequences and in short ones: T = {lengths}, B = {batch}, float32",
    leaves_out="the optimizer; there is no peer. Forward includes the loss, backward is all parameters' gradients",
    settings={"batch": BATCH, "dtype": "float32"},
    sizes={"lengths": (1000, 30_000)},
    quick={"lengths": (10, 40)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 6.0},
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("T", "long"),
        Column("threads", "threads"),
        _COSTS("forward, short", "forward_short"),
        _COSTS("forward, long", "forward_long"),
        Column("forward, long over short", "forward_ratio", tables.times),
        _COSTS("backward, short", "backward_short"),
        _COSTS("backward, long", "backward_long"),
        Column("backward, long over short", "backward_ratio", tables.times),
        Column("target", "target", lambda value: f"≤ {value:g}×"),
        Column("outcome", "met", number=False),
    ),
    tables={
        f"{part.capitalize()}, a step of time": (
            *WHO, f"{part}_short", f"{part}_long", f"{part}_ratio", "target", "met",
        )
        for part in PARTS
    },
    short=("model", "threads", "forward_short", "forward_ratio", "backward_short", "backward_ratio", "target", "met"),
    picture=picture,
)  # fmt: skip
