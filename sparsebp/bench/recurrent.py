"""Training a recurrent network: whole step and backward alone, against ``torch.nn`` on the same threads.

``sparsebp bench recurrent``. RNN(1, 20) and GRU(38, 20), B = 16, T = 1000 and 3000, float32, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsebp.bench.tools import report, timing
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import CELLS, SequenceWorkload

BATCH = 16
LENGTHS = (1000, 3000)
TARGETS = {"step": 8.0, "backward": 10.0}

COLUMNS = (
    Column("model", "model", number=False),
    Column("T", "length"),
    Column("threads", "threads"),
    Column("step, sparsebp", "step_ours", report.seconds),
    Column("step, torch.nn", "step_torch", report.seconds),
    Column("step, over torch.nn", "step_ratio", report.times),
    Column("backward, sparsebp", "backward_ours", report.seconds),
    Column("backward, torch.nn", "backward_torch", report.seconds),
    Column("backward, over torch.nn", "backward_ratio", report.times),
    Column("`auto` chose", "algorithm", number=False),
)
TABLES = {
    "The whole step": ("model", "length", "threads", "step_ours", "step_torch", "step_ratio"),
    "Backward alone": ("model", "length", "threads", "backward_ours", "backward_torch", "backward_ratio", "algorithm"),
}
SHORT = ("model", "length", "threads", "step_ours", "step_torch", "step_ratio", "backward_ratio")
"""Columns of the README's table."""


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (1, 2),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``recurrent.json`` and ``recurrent.png``; return the result.

    Parameters
    ----------
    out
        Folder of the two files, ``runs/bench`` if None.
    quick
        One short sequence and few rounds: a smoke test whose numbers mean little.
    threads
        Numbers of threads, the same for both sides.
    echo
        Takes every line that is printed.

    Raises
    ------
    MissingDependencyError
        PyTorch, the peer, is not installed.
    """
    lengths = (40,) if quick else LENGTHS
    rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1} if quick else {"rounds": 21, "budget": 10.0}
    result = report.start(
        "recurrent",
        f"Training a recurrent network on the CPU: B = {BATCH}, hidden size 20, float32",
        quick=quick,
        settings={"batch": BATCH, "lengths": lengths, "threads": threads, "targets": TARGETS, "dtype": "float32"},
        leaves_out="nothing; step = forward, cross-entropy, backward, Adam; backward = all parameters' gradients",
    )
    for count in timing.thread_counts_here(threads, result["notes"].append):
        with timing.threads(count):
            for cell in CELLS:
                for length in lengths:
                    row = measure_row(SequenceWorkload(cell, length, BATCH), rounds) | {"threads": count}
                    result["rows"].append(row)
                    echo(
                        f"{row['model']} T={length} threads={count}: step {report.times(row['step_ratio'])}, "
                        f"backward {report.times(row['backward_ratio'])}"
                    )
    report.finish(result, COLUMNS, picture, out, echo)
    return result


def measure_row(
    workload: SequenceWorkload, rounds: Mapping[str, Any], clock: timing.Clock | None = None
) -> dict[str, Any]:
    """Time step and backward of one workload against its twin, after comparing their gradients."""
    twin = workload.twin()
    choice = workload.choice()
    row: dict[str, Any] = {
        "model": f"{workload.cell}({workload.input_size}, {workload.hidden})",
        "cell": workload.cell,
        "length": workload.length,
        "batch": workload.batch,
        "dtype": workload.dtype.name,
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "gradient_difference": workload.agreement(twin),
    }
    step = timing.measure({"ours": workload.step_call(), "torch": twin.step_call()}, clock=clock, **rounds)
    back = timing.measure({"ours": workload.backward_call(), "torch": twin.backward_call()}, clock=clock, **rounds)
    for part, timings in (("step", step), ("backward", back)):
        row[f"{part}_ours"] = timings["ours"].to_dict()
        row[f"{part}_torch"] = timings["torch"].to_dict()
        row[f"{part}_ratio"] = timing.ratio(timings["torch"], timings["ours"])
    return row


NAMES = {"torch": "torch.nn", "ours": "sparsebp", "step": "whole step", "backward": "backward alone"}


def picture(result: Mapping[str, Any]) -> Any:
    """Draw the times of a training step and of the backward alone, ours beside PyTorch's."""
    rows = result["rows"]
    drawing, axes = report.figure(1, 1, width=8.0, height=0.7 * len(rows) + 1.9)
    ax = axes[0, 0]
    labels = []
    bars = (("torch", "step", "#9a3412"), ("torch", "backward", "#fdba74"), ("ours", "step", "#1e40af"),
            ("ours", "backward", "#93c5fd"))  # fmt: skip
    for place, row in enumerate(rows):
        for at, (side, part, color) in enumerate(bars):
            label = f"{NAMES[side]}: {NAMES[part]}"
            height, time = place + 0.2 * (at - 1.5), row[f"{part}_{side}"]["median"] * 1e3
            ax.barh(height, time, 0.18, color=color, label=None if place else label)
            if side == "ours":
                ratio = f" {row[f'{part}_ratio']['median']:.1f}×"
                ax.annotate(ratio, (time, height), va="center", fontsize=7, color="#1e40af")
        labels.append(f"{row['model']}  T={row['length']}\n{row['threads']} thread{'s' if row['threads'] > 1 else ''}")
    ax.set_yticks(range(len(rows)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds (median), and how many times faster than torch.nn")
    drawing.legend(fontsize=8, loc="outside lower center", ncols=2)
    ax.grid(axis="x", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing
