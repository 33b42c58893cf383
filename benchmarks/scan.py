"""Every scan algorithm over T, and whether ``auto`` picks well: time, FLOPs, memory.

``python -m benchmarks scan``. The backward pass of RNN(1, 20) at B = 16 from the loss on its last hidden state to the
gradients of all parameters, by each algorithm in turn: our fused sequential recursion (``bp``), the fused chunked
scan, and the scans over stored Jacobians (``hybrid``, ``blelloch``), with ``torch.nn`` as the peer outside. Memory is
what a call allocates at its peak, read from the allocator in a run of its own.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, fits, with_threads
from benchmarks.tools.workload import SequenceWorkload, TorchTwin, chunk_count
from sparsebp.core import backend, tables, timing
from sparsebp.core.tables import Column

BATCH = 16
ALGORITHMS = ("bp", "chunked", "hybrid", "blelloch")
STORED = ("hybrid", "blelloch")


def measure(run: Run) -> Iterator[Row]:
    """Measure every length."""
    for count in run.threads():
        for length in run.settings["lengths"]:
            yield measure_row(length, run.rounds, run.note) | {"threads": count}


def measure_row(length: int, rounds: Mapping[str, Any], note: Callable[[str], None]) -> Row:
    """Time every algorithm at one length in one run; `note` takes why one was left out."""
    row: Row = {"length": length, "batch": BATCH}
    automatic = SequenceWorkload("RNN", length, BATCH)
    twin = TorchTwin(automatic)
    choice = automatic.choice()
    row |= {"chosen": choice.algorithm, "reason": choice.reason, "gradient_difference": automatic.agreement(twin)}
    calls = {
        "auto": timing.Call(automatic.backward, automatic.forward),
        "torch": timing.Call(twin.backward, twin.forward),
    }
    for name in ALGORITHMS:
        row[f"flops_{name}"] = flops(name, length, BATCH, automatic.hidden)
        if not fits(f"T = {length}, {name}", stored_bytes(name, length, BATCH, automatic.hidden), note):
            continue
        workload = SequenceWorkload("RNN", length, BATCH, backward=name)
        row[f"memory_{name}"] = peak_memory(workload)
        calls[name] = timing.Call(workload.backward, workload.forward)
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
    backend.release()  # memory that the pool still holds would not be counted
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
    from sparsebp.scan.algorithms import level_counts

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
    from sparsebp.nn.bptt import _scan_plan

    _scan_plan.cache_clear()


def picture(result: Result) -> Any:
    """Draw time and memory over T, one curve an algorithm, for the largest number of threads."""
    threads, rows = with_threads(result, max)
    drawing, axes = pictures.figure(1, 2, width=10.0, height=4.0)
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
    axes[0, 0].set_title(f"time, {threads}", fontsize=9)
    axes[0, 1].set_title("memory", fontsize=9)
    return drawing


def _of_each(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}_{name}" for name in ALGORITHMS)


BENCHMARK = Benchmark(
    name="scan",
    title="The backward pass of RNN(1, 20) by every algorithm: B = {batch}, float32, CPU",
    leaves_out="the forward pass; planning a scan over stored Jacobians, which happens once for a length",
    settings={
        "batch": BATCH,
        "targets": {"auto over the best": 1.15, "memory, Blelloch over chunked": 15.0},
        "dtype": "float32",
    },
    sizes={"lengths": (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)},
    quick={"lengths": (10, 30)},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 10.0},
    measure=measure,
    columns=(
        Column("T", "length"),
        Column("threads", "threads"),
        *(Column(f"`{name}`", f"time_{name}", tables.seconds, on_terminal=name != "hybrid") for name in ALGORITHMS),
        Column("torch.nn", "time_torch", tables.seconds),
        Column("`auto`", "time_auto", tables.seconds, on_terminal=False),
        Column("`auto` chose", "chosen", number=False),
        Column("`auto` over the best", "auto_over_best", lambda value: f"{value['median']:.2f}", on_terminal=False),
        *(Column(f"FLOPs, `{name}`", f"flops_{name}", tables.count, on_terminal=False) for name in ALGORITHMS),
        *(Column(f"memory, `{name}`", f"memory_{name}", tables.size, on_terminal=False) for name in ALGORITHMS),
        Column("Blelloch over chunked", "memory_ratio", tables.times),
    ),
    tables={
        "Time of the backward pass": ("length", "threads", *_of_each("time"), "time_torch", "time_auto"),
        "What `auto` chose": ("length", "threads", "chosen", "auto_over_best"),
        "FLOPs": ("length", *_of_each("flops")),
        "Peak memory": ("length", "threads", *_of_each("memory"), "memory_ratio"),
    },
    short=("length", "threads", "time_bp", "time_chunked", "time_blelloch", "time_torch", "chosen", "memory_ratio"),
    picture=picture,
)
