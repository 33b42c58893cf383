"""Two threads where other processes have the cores: a training step beside busy processes, with one thread and two.

``sparsebp bench busy``. GRU(1, 16), T = 120, float32, and as many processes that never rest as the row says. What
counts is not how fast the median step is but how slow one in ten: a thread that waits for a core waits milliseconds.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.bench.tools import report, timing
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import SequenceWorkload

FEATURES, HIDDEN, LENGTH = 1, 16, 120
BATCHES = (1, 25, 128)
PROCESSES = (0, 1, 2)
STEPS, ROUNDS = 200, 4
TARGET = 1.3
"""Times the 90th percentile of one thread that the one of more may be."""

COLUMNS = (
    Column("B", "batch"),
    Column("busy processes", "processes"),
    Column("threads", "threads"),
    Column("one thread, p50", "one_p50", report.seconds),
    Column("one thread, p90", "one_p90", report.seconds),
    Column("threads, p50", "more_p50", report.seconds),
    Column("threads, p90", "more_p90", report.seconds),
    Column("p50 over one", "ratio_p50", report.times),
    Column("p90 over one", "ratio_p90", report.times),
    Column("target", "target"),
    Column("outcome", "met", number=False),
)
TABLES = {
    "The median step": ("batch", "processes", "threads", "one_p50", "more_p50", "ratio_p50"),
    "The 90th percentile": ("batch", "processes", "threads", "one_p90", "more_p90", "ratio_p90", "target", "met"),
}
SHORT = ("batch", "processes", "threads", "one_p90", "more_p90", "ratio_p90", "met")


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (2,),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``busy.json`` and ``busy.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`; each of `threads` is compared with one thread.
    """
    steps, batches, processes = (4, (2,), (0, 1)) if quick else (STEPS, BATCHES, PROCESSES)
    result = report.start(
        "busy",
        f"A training step of GRU({FEATURES}, {HIDDEN}) beside busy processes: T = {LENGTH}, float32, CPU",
        quick=quick,
        settings={"steps": steps, "batches": batches, "processes": processes, "threads": threads, "target": TARGET},
        leaves_out="nothing; a step is forward, cross-entropy, backward, Adam",
    )
    for count in timing.thread_counts_here(threads, result["notes"].append):
        for batch in batches:
            for busy in processes:
                row = measure_row(batch, busy, count, steps)
                result["rows"].append(row)
                echo(f"B={batch}, {busy} busy, threads={count}: p90 {report.times(row['ratio_p90'])} that of one")
    report.finish(result, COLUMNS, picture, out, echo)
    return result


def measure_row(batch: int, busy: int, threads: int, steps: int) -> dict[str, Any]:
    """Time so many steps with one thread and with `threads`, in turn by the quarter."""
    workload = SequenceWorkload("GRU", LENGTH, batch, input_size=FEATURES, hidden=HIDDEN)
    seconds: dict[int, list[float]] = {1: [], threads: []}
    with busy_processes(busy):
        for _ in range(ROUNDS):
            for count in seconds:
                with timing.threads(count):
                    seconds[count] += _steps(workload, -(-steps // ROUNDS))
    row: dict[str, Any] = {"batch": batch, "processes": busy, "threads": threads, "target": TARGET}
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


def picture(result: Mapping[str, Any]) -> Any:
    """Draw the 90th percentiles, one thread beside several."""
    rows = result["rows"]
    counts = sorted({row["threads"] for row in rows})
    drawing, axes = report.figure(1, 1, width=8.0, height=0.45 * len(rows) + 1.4)
    ax = axes[0, 0]
    more = f"{' or '.join(map(str, counts))} threads"
    for shift, side, color, label in ((-0.2, "one", "#9a3412", "one thread"), (0.2, "more", "#1e40af", more)):
        places = [i + shift for i in range(len(rows))]
        ax.barh(places, [row[f"{side}_p90"] * 1e3 for row in rows], height=0.4, color=color, label=label)
    ax.set_yticks(range(len(rows)), [_label(row, counts) for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds that nine steps in ten stay below", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing


def _label(row: Mapping[str, Any], counts: list[int]) -> str:
    busy = {0: "none busy", 1: "1 process busy"}.get(row["processes"], f"{row['processes']} processes busy")
    return f"B = {row['batch']}, {busy}" + (f", {row['threads']} threads" if len(counts) > 1 else "")
