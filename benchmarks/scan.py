"""Every scan algorithm over T, and whether ``auto`` picks well: time, FLOPs, memory.

``python -m benchmarks scan``. The backward pass of RNN(1, 20) at B = 16 from the loss on its last hidden state to the
gradients of all parameters, by each algorithm in turn: our fused sequential recursion (``bp``), the fused chunked
scan, and the scans over stored Jacobians (``hybrid``, ``blelloch``), with ``torch.nn`` as the peer outside. Memory is
the peak that a call allocates, read from the allocator in a separate run.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Overview, Result, Row, Run, columns, fits, refuse_difference, with_threads
from benchmarks.workloads import SequenceWorkload, TorchTwin, chunk_count
from sparsebp.core import host_pool, timing
from sparsebp.nn.recurrent.runs import _scan_plan
from sparsebp.patterns import SparsityPattern
from sparsebp.scan import plan_scan
from sparsebp.scan.algorithms import level_counts

# The scan of a chain of sparse matrices, against a loop over SciPy's products.
#
# ``python -m benchmarks chains``. ``plan_scan(patterns, "linear")`` is planned once; a call checks fifty arrays of
# values, multiplies, and returns fifty new vectors, as does the loop ``y = m @ y``. SciPy multiplies on one thread.

SIZES = ((50, 0.1), (200, 0.05), (1000, 0.01))
"""Rows and columns of every matrix, and its share of entries."""
TARGET = 2.0


def measure_chains(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for size, density in SIZES:
            matrices = random_matrices(run.settings["length"], size, density)
            for batch in (None, run.settings["batch"]):
                yield measure_chains_row(matrices, batch, run.rounds) | {"threads": count}


def random_matrices(length: int, size: int, density: float) -> list[Any]:
    """Return SciPy matrices whose products neither grow nor vanish, the same ones at every call."""
    from scipy.sparse import random_array

    rng = np.random.default_rng(size)
    found = []
    for _ in range(length):
        matrix = random_array((size, size), density=density, format="csr", rng=rng, dtype=np.float32)
        matrix.sum_duplicates()
        matrix.data[:] = rng.standard_normal(matrix.nnz) / np.sqrt(size * density)
        found.append(matrix)
    return found


def measure_chains_row(matrices: list[Any], batch: int | None, rounds: Any) -> Row:
    size, values = matrices[0].shape[0], [m.data for m in matrices]
    plan = plan_scan([SparsityPattern.from_scipy(m) for m in matrices], "linear", batch=batch or 1)
    shape = (size,) if batch is None else (size, batch)
    g = np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def loop() -> list[Any]:
        found, y = [], g
        for matrix in matrices:
            y = matrix @ y
            found.append(y)
        return found

    pairs = zip(plan(g, values), loop(), strict=True)
    worst = max(float(np.abs(ours - theirs).max() / np.abs(theirs).max()) for ours, theirs in pairs)
    refuse_difference(f"{len(matrices)} matrices of {size} rows", "SciPy", worst)
    timings = timing.measure({"ours": lambda: plan(g, values), "scipy": loop}, **rounds)
    row = timing.side_by_side(timings)
    matrix = f"{size} × {size}, {sum(m.nnz for m in matrices) // len(matrices)} entries"
    vectors = "one" if batch is None else f"{batch}"
    return {"matrix": matrix, "vectors": vectors} | row | harness.reaches(row, "scipy_ratio", TARGET, " SciPy")


CHAINS = Benchmark(
    name="chains",
    title="A chain of {length} random sparse matrices times vectors: the linear scan, float32, CPU",
    leaves_out="planning, done once for the patterns",
    settings={"dtype": "float32", "target": TARGET},
    sizes={"length": 50, "batch": 16},
    quick={"length": 3, "batch": 2},
    rounds={"rounds": 25, "least_rounds": 5, "budget": 2.0},
    measure=measure_chains,
    columns=columns(
        words={"matrix": "matrices"},
        numbers={"vectors": "vectors"},
        times={"scipy_ratio": "over SciPy"},
    ),
    short=("matrix", "vectors", "threads", "ours", "scipy", "scipy_ratio", "met"),
    overview=Overview(task="A chain of sparse matrices times vectors", peer="a loop with SciPy", ratio="scipy_ratio",
                      label="{matrix}", page="scans.md#chains-of-sparse-matrices"),
    picture=harness.bars("{matrix}; vectors: {vectors}", {"scipy_ratio": "over SciPy"},
                         "speed-up: SciPy's time over ours, median", (harness.SCIPY,), line=TARGET),
)  # fmt: skip


BATCH = 16
ALGORITHMS = ("bp", "chunked", "hybrid", "blelloch")
STORED = ("hybrid", "blelloch")


def measure_scan(run: Run) -> Iterator[Row]:
    for count in run.threads():
        for length in run.settings["lengths"]:
            yield measure_scan_row(length, run.rounds, run.note) | {"threads": count}


def measure_scan_row(length: int, rounds: Mapping[str, Any], note: Callable[[str], None]) -> Row:
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
    host_pool.release()  # memory that the pool still holds would not be counted
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
    _scan_plan.cache_clear()


def draw_scan(result: Result) -> Any:
    threads, rows = with_threads(result, max)
    drawing, axes = harness.figure(1, 2, width=10.0, height=4.0)
    styles = {
        "bp": ("o-", harness.BLUES[0]), "chunked": ("s-", harness.BLUES[2]), "hybrid": ("^-", harness.BLUES[1]),
        "blelloch": ("v-", harness.BLUES[3]), "torch": ("x--", harness.TORCH), "auto": ("*", "black"),
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
        ax.set_xlabel("sequence length T, steps")
    axes[0, 0].set_ylabel("backward, s, median")
    axes[0, 1].set_ylabel("peak of allocated memory, bytes")
    axes[0, 0].set_title(f"time, {threads}", fontsize=9)
    axes[0, 1].set_title("memory", fontsize=9)
    return drawing


SCAN = Benchmark(
    name="scan",
    title="The backward pass of RNN(1, 20) by every algorithm: B = {batch}, float32, CPU",
    leaves_out="the forward pass; planning a scan over stored Jacobians, done once per length",
    settings={
        "batch": BATCH, "targets": {"auto over the best": 1.15, "memory, Blelloch over chunked": 15.0},
        "dtype": "float32",
    },
    sizes={"lengths": (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)},
    quick={"lengths": (10, 30)},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 10.0},
    measure=measure_scan,
    columns=columns(
        words={"chosen": "`auto` chose"},
        seconds={
            **{f"time_{name}": f"`{name}`" for name in ALGORITHMS}, "time_torch": "torch.nn", "time_auto": "`auto`",
        },
        times={"memory_ratio": "Blelloch over chunked"},
        sizes={f"memory_{name}": f"memory, `{name}`" for name in ALGORITHMS},
        counts={f"flops_{name}": f"FLOPs, `{name}`" for name in ALGORITHMS},
        formats={"{0[median]:.2f}": {"auto_over_best": "`auto` over the best"}},
    ),
    short=("length", "threads", "time_bp", "time_chunked", "time_blelloch", "time_torch", "chosen", "memory_ratio"),
    in_short=lambda row: row["length"] in (10, 100, 1000, 10_000, 30_000),
    picture=draw_scan,
)  # fmt: skip
