"""Training a recurrent network: whole step and backward alone, against ``torch.nn`` on the same threads.

``sparsebp bench recurrent``. RNN(1, 20), GRU(38, 20) and LSTM(38, 20), B = 16, T = 1000 and 3000, float32, on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparsebp.bench.tools import pictures, report
from sparsebp.bench.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import SIZES, SequenceWorkload, TorchTwin
from sparsebp.core import timing

BATCH = 16


def measure(run: Run) -> Iterator[Row]:
    """Measure every cell at every length."""
    for count in run.threads():
        for cell in SIZES:
            for length in run.settings["lengths"]:
                yield measure_row(SequenceWorkload(cell, length, BATCH), run.rounds) | {"threads": count}


def measure_row(workload: SequenceWorkload, rounds: Mapping[str, Any], clock: timing.Clock | None = None) -> Row:
    """Time step and backward of one workload against its twin, after comparing their gradients."""
    twin = TorchTwin(workload)
    choice = workload.choice()
    row: Row = {
        "model": f"{workload.cell}({workload.input_size}, {workload.hidden})",
        "cell": workload.cell,
        "length": workload.length,
        "batch": workload.batch,
        "dtype": workload.dtype.name,
        "algorithm": choice.algorithm,
        "reason": choice.reason,
        "gradient_difference": workload.agreement(twin),
    }
    sides: dict[str, Any] = {"ours": workload, "torch": twin}
    step = timing.measure({name: side.step for name, side in sides.items()}, clock=clock, **rounds)
    back = timing.measure(
        {name: timing.Call(side.backward, side.forward) for name, side in sides.items()}, clock=clock, **rounds
    )
    for part, timings in (("step", step), ("backward", back)):
        row |= {f"{part}_{name}": measured.to_dict() for name, measured in timings.items()}
        row[f"{part}_ratio"] = timing.ratio(timings["torch"], timings["ours"])
    return row


def picture(result: Result) -> Any:
    """Draw the times of a training step and of the backward alone, ours beside PyTorch's."""
    rows = result["rows"]
    bars = (("torch", "step", "#9a3412"), ("torch", "backward", "#fdba74"), ("ours", "step", "#1e40af"),
            ("ours", "backward", "#93c5fd"))  # fmt: skip
    names = {"torch": "torch.nn", "ours": "sparsebp", "step": "whole step", "backward": "backward alone"}
    labels = [f"{row['model']}  T={row['length']}\n{report.in_threads(row['threads'])}" for row in rows]
    times = [(f"{names[side]}: {names[part]}", colour, [row[f"{part}_{side}"]["median"] * 1e3 for row in rows])
             for side, part, colour in bars]  # fmt: skip
    drawing, ax = pictures.bar_chart(
        labels, times, "milliseconds (median), and how many times faster than torch.nn", each=0.7
    )
    for (side, part, _), shown in zip(bars, ax.containers, strict=True):
        if side == "ours":
            ratios = [f" {row[f'{part}_ratio']['median']:.1f}×" for row in rows]
            ax.bar_label(shown, ratios, fontsize=7, color="#1e40af")
    drawing.legend(fontsize=8, loc="outside lower center", ncols=2)
    ax.grid(axis="x", alpha=0.3)
    return drawing


BENCHMARK = Benchmark(
    name="recurrent",
    title="Training a recurrent network on the CPU: B = {batch}, hidden size 20, float32",
    leaves_out="nothing; step = forward, cross-entropy, backward, Adam; backward = all parameters' gradients",
    settings={"batch": BATCH, "targets": {"step": 8.0, "backward": 10.0}, "dtype": "float32"},
    sizes={"lengths": (1000, 3000)},
    quick={"lengths": (40,)},
    rounds={"rounds": 21, "budget": 10.0},
    measure=measure,
    columns=(
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
    ),
    tables={
        "The whole step": ("model", "length", "threads", "step_ours", "step_torch", "step_ratio"),
        "Backward alone": (
            "model",
            "length",
            "threads",
            "backward_ours",
            "backward_torch",
            "backward_ratio",
            "algorithm",
        ),
    },
    short=("model", "length", "threads", "step_ours", "step_torch", "step_ratio", "backward_ratio"),
    picture=picture,
)
