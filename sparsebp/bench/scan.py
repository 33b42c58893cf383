"""Every scan algorithm over T, and whether ``auto`` picks well: time, FLOPs, memory.

``sparsebp bench scan``. The backward pass of RNN(1, 20) at B = 16 from the loss on its last hidden state to the
gradients of all parameters, by each algorithm in turn: our fused sequential recursion (``bp``), the fused chunked
scan, and the scans over stored Jacobians (``hybrid``, ``blelloch``), with ``torch.nn`` as the peer outside. Memory is
what a call allocates at its peak, read from the allocator in a run of its own.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparsebp.backend import memory
from sparsebp.bench.tools import report, timing
from sparsebp.bench.tools.environment import available_memory
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import SequenceWorkload, chunk_count

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCH = 16
ALGORITHMS = ("bp", "chunked", "hybrid", "blelloch")
STORED = ("hybrid", "blelloch")
SHARE = 0.6
"""Share of the available memory that one algorithm may take."""
TARGETS = {"auto over the best": 1.15, "memory, Blelloch over chunked": 15.0}

COLUMNS = (
    Column("T", "length"),
    Column("threads", "threads"),
    *(Column(f"`{name}`", f"time_{name}", report.seconds) for name in ALGORITHMS),
    Column("torch.nn", "time_torch", report.seconds),
    Column("`auto`", "time_auto", report.seconds),
    Column("`auto` chose", "chosen", number=False),
    Column("`auto` over the best", "auto_over_best", lambda value: f"{value['median']:.2f}"),
    *(Column(f"FLOPs, `{name}`", f"flops_{name}", report.count) for name in ALGORITHMS),
    *(Column(f"memory, `{name}`", f"memory_{name}", report.size) for name in ALGORITHMS),
    Column("Blelloch over chunked", "memory_ratio", report.times),
)
TABLES = {
    "Time of the backward pass": (
        "length",
        "threads",
        "time_bp",
        "time_chunked",
        "time_hybrid",
        "time_blelloch",
        "time_torch",
        "time_auto",
    ),
    "What `auto` chose": ("length", "threads", "chosen", "auto_over_best"),
    "FLOPs": ("length", "flops_bp", "flops_chunked", "flops_hybrid", "flops_blelloch"),
    "Peak memory": (
        "length",
        "threads",
        "memory_bp",
        "memory_chunked",
        "memory_hybrid",
        "memory_blelloch",
        "memory_ratio",
    ),
}
SHORT = ("length", "threads", "time_bp", "time_chunked", "time_blelloch", "time_torch", "chosen", "memory_ratio")
"""Columns of the README's table and of the terminal's."""


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (1, 2),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``scan.json`` and ``scan.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`.
    """
    lengths = (10, 30) if quick else LENGTHS
    rounds = {"rounds": 15, "least_rounds": 3, "budget": 10.0}
    if quick:
        rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1}
    result = report.start(
        "scan",
        f"The backward pass of RNN(1, 20) by every algorithm: B = {BATCH}, float32, CPU",
        quick=quick,
        settings={"batch": BATCH, "lengths": lengths, "threads": threads, "targets": TARGETS, "dtype": "float32"},
        leaves_out="the forward pass; planning a scan over stored Jacobians, which happens once for a length",
    )
    for count in timing.thread_counts_here(threads, result["notes"].append):
        with timing.threads(count):
            for length in lengths:
                row = measure_row(length, rounds, result["notes"].append) | {"threads": count}
                result["rows"].append(row)
                echo(
                    f"T={length} threads={count}: auto chose {row['chosen']}, "
                    f"{row['auto_over_best']['median']:.2f} of the best ({row['best']})"
                )
    report.finish(result, [c for c in COLUMNS if c.key in SHORT], picture, out, echo)
    return result


def measure_row(length: int, rounds: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """Time every algorithm at one length in one run; `note` takes why one was left out."""
    row: dict[str, Any] = {"length": length, "batch": BATCH}
    automatic = SequenceWorkload("RNN", length, BATCH)
    twin = automatic.twin()
    choice = automatic.choice()
    row |= {"chosen": choice.algorithm, "reason": choice.reason, "gradient_difference": automatic.agreement(twin)}
    calls = {"auto": automatic.backward_call(), "torch": twin.backward_call()}
    for name in ALGORITHMS:
        row[f"flops_{name}"] = flops(name, length, BATCH, automatic.hidden)
        need, have = stored_bytes(name, length, BATCH, automatic.hidden), available_memory()
        if have is not None and need > SHARE * have:
            note(
                f"T = {length}, {name}: left out, it needs {report.size(need)} and {report.size(have)} are free "
                f"(at most {SHARE:.0%} of that are taken)"
            )
            continue
        workload = SequenceWorkload("RNN", length, BATCH, backward=name)
        row[f"memory_{name}"] = peak_memory(workload)
        calls[name] = workload.backward_call()
    timings = timing.measure(calls, **rounds)
    _forget_plans()
    for name, measured in timings.items():
        row[f"time_{name}"] = measured.to_dict()
    best = min((name for name in timings if name != "auto"), key=lambda name: timings[name].median)
    row["best"] = best
    row["auto_over_best"] = timing.ratio(timings["auto"], timings[best])
    if "memory_blelloch" in row:
        row["memory_ratio"] = row["memory_blelloch"] / row["memory_chunked"]
    return row


def peak_memory(workload: SequenceWorkload) -> int:
    """Return the bytes that one backward pass allocates at its peak, gradients and workspace included."""
    workload.backward(workload.forward())  # compiled code and caches are no part of it
    kept = workload.forward()
    _forget_plans()
    gc.collect()
    memory.release()  # memory that the pool still holds would not be counted
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        workload.backward(kept)
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def flops(algorithm: str, length: int, batch: int, hidden: int) -> int:
    """Return the FLOPs of the products that `algorithm` does for a chain of dense hidden × hidden Jacobians."""
    from sparsebp.patterns import SparsityPattern
    from sparsebp.scan import plan_scan
    from sparsebp.scan.algorithms.counts import level_counts

    if algorithm == "hybrid":  # the plan chooses the levels of its up-sweep
        return int(plan_scan([SparsityPattern.dense(hidden, hidden)] * length, "hybrid", batch=batch).flops)
    levels = level_counts("linear" if algorithm == "bp" else algorithm, length, chunks=chunk_count(length))
    return 2 * batch * sum(level.mm * hidden**3 + level.mv * hidden**2 for level in levels)


def stored_bytes(algorithm: str, length: int, batch: int, hidden: int, itemsize: int = 4) -> int:
    """Return about how many bytes the stored Jacobians and their products take; 0 for the fused algorithms."""
    block = hidden * hidden * batch * itemsize
    return 2 * length * block if algorithm in STORED else 0


def _forget_plans() -> None:
    # The layers keep the plans of their last lengths, and a plan keeps its workspace: gigabytes at T = 30 000.
    from sparsebp.nn.recurrent.backward import _scan_plan

    _scan_plan.cache_clear()


def picture(result: Mapping[str, Any]) -> Any:
    """Draw time and memory over T, one curve an algorithm, for the largest number of threads."""
    most = max(row["threads"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["threads"] == most]
    drawing, axes = report.figure(1, 2, width=10.0, height=4.0)
    styles = {
        "bp": ("o-", "#1e40af"), "chunked": ("s-", "#0f766e"), "hybrid": ("^-", "#a16207"),
        "blelloch": ("v-", "#9a3412"), "torch": ("x--", "#6b7280"), "auto": ("*", "black"),
    }  # fmt: skip
    for ax, kind in ((axes[0, 0], "time"), (axes[0, 1], "memory")):
        for name, (style, color) in styles.items():
            found = [(row["length"], row[f"{kind}_{name}"]) for row in rows if f"{kind}_{name}" in row]
            if found:
                values = [value["median"] if isinstance(value, Mapping) else value for _, value in found]
                label = "torch.nn" if name == "torch" else name
                ax.plot([length for length, _ in found], values, style, color=color, markersize=5, label=label)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("sequence length T")
        ax.grid(alpha=0.3)
    axes[0, 0].set_ylabel("seconds, backward (median)")
    axes[0, 1].set_ylabel("bytes allocated at the peak")
    axes[0, 0].legend(fontsize=8)
    axes[0, 0].set_title(f"time, {most} thread{'s' if most > 1 else ''}", fontsize=9)
    axes[0, 1].set_title("memory", fontsize=9)
    return drawing
