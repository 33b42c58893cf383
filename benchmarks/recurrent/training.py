"""Training a recurrent network: whole step and backward alone, against ``torch.nn`` and JAX on the same threads.

``python -m benchmarks recurrent``. Classifiers of 20 to 512 hidden units, float32, on the CPU. JAX runs in a process of
its own (`jax_twin`), which starts as many threads as a row says; where it is not installed, rows go without it. From
128 units on, the rate of the machine's matrix products is measured in the same rounds, and the step beside it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from benchmarks.processes.apart import Apart
from benchmarks.recurrent import jax_twin
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference
from benchmarks.tools.workload import LEARNING_RATE, SequenceWorkload, TorchTwin
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

PEERS = {"torch": "torch.nn", "jax": "JAX"}
WIDE = 128
"""Hidden size from which the products decide, and the target is their rate."""
TARGETS = {32: 3.0, WIDE - 1: 2.0}
"""Times faster than the best peer, up to so many hidden units."""
WIDE_SHARE, WEAK_SHARE, WEAK_TIMES = 0.85, 0.7, 1.2
"""From `WIDE` units on: the share of the rate of matrix products, and what a peer under `WEAK_SHARE` is beaten by."""
GEMM = 1024
"""Rows and columns of the matrices whose product gives the machine's rate."""
LONGEST = 1000
"""Steps up to which the backward alone is measured too."""
NO_JAX = "JAX is not installed (pip install 'sparsebp[peers]'): the best peer is torch.nn alone"


class Task(NamedTuple):
    """A recurrent classifier and its batch."""

    cell: str
    features: int
    hidden: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """The recurrent layer, as it is built."""
        return f"{self.cell}({self.features}, {self.hidden})"

    def workload(self) -> SequenceWorkload:
        """Build it."""
        cell, features, hidden, batch, length = self
        return SequenceWorkload(cell, length, batch, input_size=features, hidden=hidden)


TASKS = (
    Task("RNN", 1, 20, 16, 1000), Task("RNN", 1, 20, 16, 3000),
    Task("GRU", 38, 20, 16, 1000), Task("GRU", 38, 20, 16, 3000), Task("GRU", 38, 20, 1, 1000),
    Task("LSTM", 38, 20, 16, 1000),
    Task("GRU", 38, 64, 16, 300), Task("LSTM", 38, 64, 16, 300),
    Task("RNN", 64, 128, 32, 200), Task("GRU", 64, 128, 32, 200), Task("LSTM", 64, 128, 32, 200),
    Task("GRU", 128, 256, 32, 100), Task("LSTM", 128, 256, 32, 100),
    Task("RNN", 128, 512, 64, 50),
)  # fmt: skip
QUICK = (Task("RNN", 1, 20, 4, 40), Task("GRU", 3, WIDE, 2, 5))


def measure(run: Run) -> Iterator[Row]:
    """Measure every task, with a new process of JAX's for every number of threads."""
    has_jax = importlib.util.find_spec("jax") is not None
    if not has_jax:
        run.note(NO_JAX)
    for count in run.threads():
        with Apart(count) if has_jax else nullcontext(None) as apart:
            for task in run.settings["tasks"]:
                wanted = Task(*task)
                row = measure_row(wanted.workload(), run.rounds, apart=apart, backward=wanted.length <= LONGEST)
                yield row | judge(row) | {"threads": count}


def measure_row(
    workload: SequenceWorkload,
    rounds: Mapping[str, Any],
    clock: timing.Clock | None = None,
    apart: Apart | None = None,
    backward: bool = True,
) -> Row:
    """Time step and backward of one workload against its twins, after comparing their gradients.

    Without `apart` there is no JAX; the backward alone is left out if it is not wanted.
    """
    twin = TorchTwin(workload)
    choice = workload.choice()
    row: Row = {
        "model": f"{workload.cell}({workload.input_size}, {workload.hidden})",
        "cell": workload.cell,
        "hidden": workload.hidden,
        "length": workload.length,
        "batch": workload.batch,
        "dtype": workload.dtype.name,
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "gradient_difference": workload.agreement(twin),
    }
    sides: dict[str, Any] = {"ours": workload, "torch": twin}
    warm = rounds.get("warmup", 2)
    timers = {name: timing.timer(side.step, warm, clock) for name, side in sides.items()}
    if apart is not None:
        timers |= _timers_of_jax(workload, apart, row)
    if workload.hidden >= WIDE:
        timers["gemm"] = timing.timer(_gemm(workload.dtype), warm, clock)
    step = timing.in_turn(timers, **{name: value for name, value in rounds.items() if name != "warmup"})
    if apart is not None:
        best = min(jax_twin.UNROLLED, key=lambda unroll: step[f"jax{unroll}"].median)
        step["jax"], row["jax_unroll"] = step[f"jax{best}"], best
    parts = {"step": step}
    if backward:
        calls = {name: timing.Call(side.backward, side.forward) for name, side in sides.items()}
        parts["backward"] = timing.measure(calls, clock=clock, **rounds)
    for part, timings in parts.items():
        row |= {f"{part}_{name}": measured.to_dict() for name, measured in timings.items()}
        row[f"{part}_ratio"] = timing.ratio(timings["torch"], timings["ours"])
    return row | _beside_best(step) | _beside_products(step, workload.flops)


def _timers_of_jax(workload: SequenceWorkload, apart: Apart, row: Row) -> dict[str, Callable[[], float]]:
    """Build JAX's sides; compare their gradients at the first parameters with ours."""
    timers, theirs = apart.build(jax_twin.sides, workload.cell, workload.state, *workload.host_batch, LEARNING_RATE)
    row["jax_difference"] = max(map(workload.difference, theirs.values()))
    refuse_difference(f"{row['model']}, T = {workload.length}: a gradient", "JAX", row["jax_difference"])
    return timers


def _gemm(dtype: np.dtype) -> Callable[[], object]:
    a, out = np.ones((GEMM, GEMM), dtype), np.empty((GEMM, GEMM), dtype)
    return lambda: np.matmul(a, a, out=out)


def _beside_best(step: Mapping[str, timing.Timing]) -> Row:
    best = min((name for name in PEERS if name in step), key=lambda name: step[name].median)
    found: Row = {"best": PEERS[best], "best_ratio": timing.ratio(step[best], step["ours"])}
    if "jax" in step:
        found["jax_ratio"] = timing.ratio(step["jax"], step["ours"])
    return found


def _beside_products(step: Mapping[str, timing.Timing], flops: int) -> Row:
    """Return the rate of matrix products, and the shares of it at which ours and the best peer do their products."""
    if "gemm" not in step:
        return {}
    work = 2 * GEMM**3
    share = {
        name: timing.Timing(
            tuple(flops / side * gemm / work for side, gemm in zip(timed.seconds, step["gemm"].seconds, strict=True))
        ).median
        for name, timed in step.items()
    }
    return {
        "gemm_rate": work / step["gemm"].median,
        "share": share["ours"],
        "peer_share": max(share[name] for name in PEERS if name in share),
    }


def judge(row: Mapping[str, Any]) -> dict[str, str]:
    """Say what a row is to reach, and whether it does."""
    times = row["best_ratio"]["median"]
    wanted = next((least for most, least in TARGETS.items() if row["hidden"] <= most), None)
    if wanted is not None:
        missed = [f"{times:.2g}×"] if times < wanted else []
        return {"target": f"≥ {wanted:g}×", "met": report.outcome(missed)}
    least = WEAK_TIMES if row["peer_share"] < WEAK_SHARE else 1.0
    missed = [f"{row['share']:.0%} of GEMM"] if row["share"] < WIDE_SHARE else []
    missed += [f"{times:.2g}×"] if times < least else []
    return {"target": f"≥ {WIDE_SHARE:.0%} of GEMM, ≥ {least:g}×", "met": report.outcome(missed)}


def picture(result: Result) -> Any:
    """Draw the times of a training step and of the backward alone, ours beside the peers'."""
    rows = result["rows"]
    bars = (("torch", "step", "#9a3412"), ("jax", "step", "#166534"), ("ours", "step", "#1e40af"))
    names = {**PEERS, "ours": "sparsebp"}
    labels = [
        f"{row['model']}  B={row['batch']} T={row['length']}\n{tables.in_threads(row['threads'])}" for row in rows
    ]
    times = [(names[side], colour, [row.get(f"{part}_{side}", {}).get("median", 0.0) * 1e3 for row in rows])
             for side, part, colour in bars]  # fmt: skip
    drawing, ax = pictures.bar_chart(
        labels, times, "milliseconds a step (median), and how many times faster than the best peer", each=0.6
    )
    ax.set_xscale("log")
    ratios = [f" {row['best_ratio']['median']:.1f}×" for row in rows]
    ax.bar_label(ax.containers[-1], ratios, fontsize=7, color="#1e40af")
    pictures.legend_below(drawing, columns=3)
    ax.grid(axis="x", alpha=0.3)
    return drawing


def _percent(value: float) -> str:
    return f"{value:.0%}"


WHO = ("model", "batch", "length", "threads")
BENCHMARK = Benchmark(
    name="recurrent",
    title="Training a recurrent network on the CPU, float32, beside torch.nn and JAX",
    leaves_out="nothing; step = forward, cross-entropy, backward, Adam; backward = all parameters' gradients. JAX: one "
    "compiled step, the faster of lax.scan with unroll=1 and 8, compiling left out",
    settings={"targets": {"H <= 32": 3.0, "H < 128": 2.0, "share of GEMM": WIDE_SHARE}, "dtype": "float32"},
    sizes={"tasks": TASKS},
    quick={"tasks": QUICK},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 2.0},
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("B", "batch"),
        Column("T", "length"),
        Column("threads", "threads"),
        Column("step, sparsebp", "step_ours", tables.seconds),
        Column("over the best peer", "best_ratio", tables.times),
        Column("best peer", "best", number=False),
        Column("step, JAX", "step_jax", tables.seconds),
        Column("over JAX", "jax_ratio", tables.times),
        Column("JAX's unroll", "jax_unroll"),
        Column("step, torch.nn", "step_torch", tables.seconds),
        Column("over torch.nn", "step_ratio", tables.times),
        Column("target", "target", number=False),
        Column("outcome", "met", number=False),
        Column("GEMM, GFLOP/s", "gemm_rate", lambda rate: f"{rate / 1e9:.0f}"),
        Column("share of GEMM", "share", _percent),
        Column("best peer's share", "peer_share", _percent),
        Column("backward, sparsebp", "backward_ours", tables.seconds),
        Column("backward, torch.nn", "backward_torch", tables.seconds),
        Column("backward, over torch.nn", "backward_ratio", tables.times),
        Column("`auto` chose", "algorithm", number=False),
    ),
    tables={
        "The whole step": (*WHO, "step_ours", "step_jax", "step_torch", "jax_unroll"),
        "Ratios": (*WHO, "best_ratio", "best", "jax_ratio", "step_ratio"),
        "What it is to be": (*WHO, "best_ratio", "share", "target", "met"),
        "Beside the rate of matrix products": (*WHO, "gemm_rate", "share", "peer_share"),
        "Backward alone": (*WHO, "backward_ours", "backward_torch", "backward_ratio", "algorithm"),
    },
    short=(*WHO, "step_ours", "best_ratio", "best", "met"),
    in_short=lambda row: row["threads"] == 1 and row["batch"] > 1 and row["length"] <= 1000,  # a row a model
    picture=picture,
)  # fmt: skip
