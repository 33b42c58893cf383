"""Two threads where other processes have the cores: a training step beside busy processes, with one thread and two.

``python -m benchmarks busy``. GRU(1, 16), T = 120, float32, and as many processes that never rest as the row says. What
counts is not how fast the median step is but how slow one in ten: a thread that waits for a core waits milliseconds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.tools import peers, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.workload import SequenceWorkload
from sparsebp.core import tables
from sparsebp.core.tables import Column

FEATURES, HIDDEN, LENGTH = 1, 16, 120
ROUNDS = 4
TARGET = 1.3
"""Times the 90th percentile of one thread that the one of more may be."""


def measure(run: Run) -> Iterator[Row]:
    """Measure one thread beside so many, for every batch and number of busy processes."""
    for count in run.threads():
        for batch in run.settings["batches"]:
            for busy in run.settings["processes"]:
                yield measure_row(batch, busy, count, run.settings["steps"])


def measure_row(batch: int, busy: int, threads: int, steps: int) -> Row:
    """Time so many steps with one thread and with `threads`, in turn by the quarter."""
    workload = SequenceWorkload("GRU", LENGTH, batch, input_size=FEATURES, hidden=HIDDEN)
    seconds: dict[int, list[float]] = {1: [], threads: []}
    with busy_processes(busy):
        for _ in range(ROUNDS):
            for count in seconds:
                with peers.threads(count):
                    seconds[count] += _steps(workload, -(-steps // ROUNDS))
    row: Row = {"batch": batch, "processes": busy, "threads": threads, "target": TARGET}
    for name, count in (("one", 1), ("more", threads)):
        row |= {f"{name}_p{q}": float(np.percentile(seconds[count], q)) for q in (50, 90)}
        row[f"{name}_max"] = max(seconds[count])
    row |= {f"ratio_p{q}": row[f"more_p{q}"] / row[f"one_p{q}"] for q in (50, 90)}
    return row | {"met": "met" if row["ratio_p90"] <= TARGET else "missed"}


def _steps(workload: SequenceWorkload, steps: int) -> list[float]:
    workload.step()
    taken = []
    for _ in range(steps):
        start = time.perf_counter()
        workload.step()
        taken.append(time.perf_counter() - start)
    return taken


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Have so many processes compute all the time inside the ``with`` block."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        if others:
            time.sleep(0.2)  # until they have started
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def picture(result: Result) -> Any:
    """Draw the 90th percentiles, one thread beside several."""
    rows = result["rows"]
    counts = sorted({row["threads"] for row in rows})
    more = f"{' or '.join(map(str, counts))} threads"
    bars = [(words, colour, [row[f"{side}_p90"] * 1e3 for row in rows])
            for side, colour, words in (("one", "#9a3412", "one thread"), ("more", "#1e40af", more))]  # fmt: skip
    labels = [_label(row, counts) for row in rows]
    drawing, _ = pictures.bar_chart(labels, bars, "milliseconds that nine steps in ten stay below", each=0.45)
    pictures.legend_below(drawing)
    return drawing


def _label(row: Row, counts: Sequence[int]) -> str:
    busy = {0: "none busy", 1: "1 process busy"}.get(row["processes"], f"{row['processes']} processes busy")
    return f"B = {row['batch']}, {busy}" + (f", {row['threads']} threads" if len(counts) > 1 else "")


BENCHMARK = Benchmark(
    name="busy",
    title=f"A training step of GRU({FEATURES}, {HIDDEN}) beside busy processes: T = {LENGTH}, float32, CPU",
    leaves_out="nothing; a step is forward, cross-entropy, backward, Adam",
    settings={"target": TARGET},
    sizes={"steps": 200, "batches": (1, 25, 128), "processes": (0, 1, 2)},
    quick={"steps": 4, "batches": (2,), "processes": (0, 1)},
    threads=(2,),
    measure=measure,
    columns=(
        Column("B", "batch"),
        Column("busy processes", "processes"),
        Column("threads", "threads"),
        Column("one thread, p50", "one_p50", tables.seconds),
        Column("one thread, p90", "one_p90", tables.seconds),
        Column("threads, p50", "more_p50", tables.seconds),
        Column("threads, p90", "more_p90", tables.seconds),
        Column("p50 over one", "ratio_p50", tables.times),
        Column("p90 over one", "ratio_p90", tables.times),
        Column("target", "target"),
        Column("outcome", "met", number=False),
    ),
    tables={
        "The median step": ("batch", "processes", "threads", "one_p50", "more_p50", "ratio_p50"),
        "The 90th percentile": ("batch", "processes", "threads", "one_p90", "more_p90", "ratio_p90", "target", "met"),
    },
    short=("batch", "processes", "threads", "one_p90", "more_p90", "ratio_p90", "met"),
    picture=picture,
)
