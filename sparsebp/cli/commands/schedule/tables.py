"""What ``sparsebp schedule`` prints: tables, and a chart in the colours of the pictures."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from rich.text import Text

from sparsebp.bench.tools import report
from sparsebp.cli.commands.common import console, print_line, print_table
from sparsebp.schedule.pictures.gantt import COLOURS
from sparsebp.schedule.pictures.summary import most_stale


def _number(value: float) -> str:
    return f"{value:.4g}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _runs(numbers: Iterable[int]) -> str:
    """Write ascending numbers, those without a gap as ``4–7``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


COMPARED = (
    report.Column("builder", "builder", number=False),
    report.Column("workers", "workers"),
    report.Column("micro-batches", "microbatches"),
    report.Column("makespan", "makespan", _number),
    report.Column("per micro-batch", "per_microbatch", _number),
    report.Column("faster", "speedup", report.times),
    report.Column("bubble", "bubble", _share),
    report.Column("peak memory", "peak_memory", _number),
    report.Column("staleness", "staleness"),
)
_WORKERS = (
    report.Column("worker", "worker"),
    report.Column("stages", "stages", _runs, number=False),
    report.Column("busy", "busy", lambda busy: ", ".join(f"{s} {v:.1%}" for s, v in busy.items()), number=False),
    report.Column("peak memory", "peak_memory", _number),
)
_STAGES = (
    report.Column("stage", "stage"),
    report.Column("staleness F", "staleness", lambda entry: str(entry.get("forward", "–"))),
    report.Column("staleness B", "staleness", lambda entry: str(entry.get("backward", "–"))),
    report.Column("version difference F", "version_difference", lambda entry: str(entry.get("forward", "–"))),
    report.Column("version difference B", "version_difference", lambda entry: str(entry.get("backward", "–"))),
)


def compared(found: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a summary that a row of the comparison shows."""
    kept = ("name", "workers", "stages", "microbatches", "steps", "makespan", "bubble", "peak_memory")
    each = found["makespan"] / (found["microbatches"] * found["steps"])
    return {key: found[key] for key in kept} | {"per_microbatch": each, "staleness": most_stale(found)}


def print_summary(found: dict[str, Any]) -> None:
    """Print a summary: numbers, and a table of the workers; of the stages too if their weights may be stale."""
    out = console()
    path = found["critical_path"]
    shown = " ".join(path if len(path) <= 12 else [*path[:6], "…", *path[-6:]])
    lines = {
        "schedule": found["name"],
        "makespan": _number(found["makespan"]),
        "bubble": _share(found["bubble"]),
        "peak memory": _number(found["peak_memory"]),
        "critical path": f"{len(path)} cells: {shown}",
    }
    for name, text in lines.items():
        print_line(name, text, 14)
    out.print()
    print_table(_WORKERS, found["per_worker"])
    if found["per_stage"]:
        out.print()
        print_table(_STAGES, found["per_stage"])


def coloured(chart: str) -> Text:
    """Return a text chart whose boxes have the colours of the pictures, where the terminal has colours."""
    lines = chart.splitlines()
    texts = [Text(line) for line in lines]
    for line, text in zip(lines, texts, strict=True):
        for kind, colour in COLOURS.items() if line.startswith("worker") else ():
            text.highlight_regex(f"{kind}[0-9/]*─*", f"black on {colour}")
    return Text("\n").join(texts)
