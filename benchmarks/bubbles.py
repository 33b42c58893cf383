"""Published tables of pipeline schedules, simulated: ``python -m benchmarks bubbles``. Nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns
from sparsebp.schedule import Costs, Durations, Kind, Link, StageBytes, simulate
from sparsebp.schedule.builders import build

ZERO_BUBBLE = "Qi et al., 2023"
"""Bubble rates, and the profiled times in ms that they are computed from (published in its appendix)."""

PROFILED = {24: (18.522, 18.086, 9.337, 0.601), 32: (18.513, 18.086, 9.331, 0.626), 64: (18.546, 18.097, 9.321, 0.762)}
"""F, I, W and a transfer of the 1.5B model on 8 workers, by the number of micro-batches."""

PUBLISHED = {
    "1f1b": (0.2431, 0.1985, 0.1240),
    "zb-h1": (0.1585, 0.1242, 0.0674),
    "zb-h2": (0.1083, 0.0837, 0.0444),
    "zb-1p": (0.1585, 0.1242, 0.0674),
    "zb-2p": (0.0433, 0.0039, 0.0026),
}

HIDDEN, HEADS, LENGTH = 2304, 24, 1024
"""Of the 1.5B model."""

KEPT_FOR_W = 32 * HIDDEN / (34 * HIDDEN + 5 * HEADS * LENGTH)
"""The part of a Transformer layer's activations that W reads, by the paper's count."""


def measure_bubbles(run: Run) -> Iterator[Row]:
    for position, (microbatches, (forward, inputs, weights, transfer)) in enumerate(PROFILED.items()):
        if run.quick and position:
            break
        durations: dict[Kind, float] = {"F": forward, "I": inputs, "W": weights}
        costs = Costs(durations, StageBytes(saved_for_weights=KEPT_FOR_W), Link(transfer))
        for name, published in PUBLISHED.items():
            schedule = build(name, workers=8, stages=8, microbatches=microbatches, costs=costs, strict=False)
            ours = simulate(schedule, costs).span_bubble
            yield {"source": ZERO_BUBBLE, "compared": f"bubble of {schedule.name}", "setting": "1.5B", "workers": 8,
                   "microbatches": microbatches, "published": published[position], "ours": ours}  # fmt: skip
    recomputing = Costs(Durations({"F": 1, "I": 2, "W": 1}))  # everything is computed again before the backward
    one, two = (simulate(build(name, workers=8, stages=16, microbatches=8), recomputing).makespan
                for name in ("1f1b", "interleaved-1f1b"))  # fmt: skip
    yield {"source": "torchtitan, December 2024", "compared": "speed-up of interleaved 1F1B over 1F1B", "workers": 8,
           "setting": "Llama 3.1 405B", "microbatches": 8, "published": 1.28, "ours": one / two}  # fmt: skip
    run.note("Bubble: of the worker with the longest time from its first action to its last, its idle share.")
    run.note(
        "ZB-1p and ZB-2p are found by another search than the paper's, within the activations of 8 and 16 "
        "micro-batches, of which I frees what W does not read."
    )
    run.note(
        "torchtitan: tokens a second on 512 GPUs (100 and 128); the table does not give the number of micro-batches, "
        "which is taken to be that of the workers, its default then. All-gathers, transfers and their overlap are left "
        "out."
    )


def draw_bubbles(result: harness.Result) -> Any:
    """Draw the bubbles; a speed-up has another scale."""
    bars = harness.bars("{compared}, {microbatches} micro-batches", {"published": "published", "ours": "simulated"},
                        "share of a worker's time", (harness.PAPER, harness.OURS))  # fmt: skip
    rows = result.get("shown") or result["rows"]
    return bars({**result, "shown": [row for row in rows if row["source"] == ZERO_BUBBLE]})


BUBBLES = Benchmark(
    name="bubbles",
    title="Pipeline schedules: published, and simulated from published times",
    leaves_out="everything but the times of actions and transfers",
    settings={"saved_for_weights": KEPT_FOR_W},
    threads=None,
    measure=measure_bubbles,
    columns=columns(
        words={"source": "source", "compared": "compared", "setting": "model"},
        numbers={"workers": "workers", "microbatches": "micro-batches"},
        formats={"{:.4f}": {"published": "published", "ours": "simulated"}},
    ),
    short=("source", "compared", "setting", "microbatches", "published", "ours"),
    in_short=lambda row: row["microbatches"] != 32,
    picture=draw_bubbles,
)  # fmt: skip
