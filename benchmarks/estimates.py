"""What the cost model says, against what is measured.

``python -m benchmarks estimates``. The backward of one recurrent layer, RNN and GRU, over hidden sizes, lengths and
batches: what `choose_recurrent_backward` expects of ``bp``, against the median of that backward right after its
forward, as in training. And the products of ``python -m benchmarks spgemm``: ``plan.estimated_seconds(…)`` against a
call of the plan. Prices are those of this process, shipped or calibrated, as the result
says.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness, spgemm
from benchmarks.calibrate import backward_seconds, call_seconds
from benchmarks.harness import Benchmark, Result, Row, Run
from benchmarks.workloads import pairs
from sparsebp import nn
from sparsebp.core import tables, timing
from sparsebp.core.machine import machine, prices
from sparsebp.core.tables import Column
from sparsebp.scan import choose_recurrent_backward

WITHIN = 1.5
"""Ratio of said and measured, either way, within which an estimate is right."""
MOST = 1 << 31
"""Bytes beyond which a shape is left out."""
CELLS: dict[str, type[nn.RNN] | type[nn.GRU]] = {"RNN": nn.RNN, "GRU": nn.GRU}
VALUES = {"RNN": 6, "GRU": 18}
"""Values of a hidden unit, step and sample that a forward and a backward hold, the input's among them."""
BATCHES = (1, 16)


def measure_estimates(run: Run) -> Iterator[Row]:
    """Measure what is said of recurrent layers and of products."""
    found = prices()
    run.result["settings"] |= {"calibrated": found.calibrated, "prices": dict(found.measured)}
    for count in run.threads():
        for row in rows(run, count):
            yield judge_estimates(row) | {"threads": count}
    run.note(verdict(run.result["rows"]))
    run.note(_of(found.calibrated, found.measured))


def rows(run: Run, threads: int) -> Iterator[Row]:
    """Yield what is said and measured, of recurrent layers and of products."""
    hidden, lengths, budget = (run.settings[name] for name in ("hidden", "lengths", "budget"))
    for cell, kind in CELLS.items():
        for size in hidden:
            layer = kind(size, size, rng=0)
            for length in lengths:
                for batch in BATCHES:
                    if 4 * length * batch * size * VALUES[cell] <= MOST:
                        yield _recurrent_row(cell, layer, length, batch, budget)
    for pair in pairs(run.quick):
        plan, _ = spgemm.plan_pair(pair)
        for samples in (None, max(BATCHES)) if pair.batch_targets is not None else (None,):
            yield _product_row(pair.name, plan, spgemm.values(pair, samples), samples or 1, threads, budget)


def judge_estimates(row: Mapping[str, Any]) -> Row:
    """Return the row with its ratio, and whether that is within `WITHIN`."""
    ratio = row["said"] / row["measured"]["median"]
    return {**row, "ratio": ratio, "met": "yes" if 1 / WITHIN <= ratio <= WITHIN else "no"}


def verdict(judged: Iterable[Mapping[str, Any]]) -> str:
    """Say how many rows are right."""
    met = [row["met"] == "yes" for row in judged]
    return f"{sum(met)} of {len(met)} estimates are within {WITHIN}× of the measured median"


def _of(calibrated: bool, measured: Mapping[str, Any]) -> str:
    kind = "calibrated here" if calibrated else "as shipped"
    return f"Prices {kind}: measured on {measured.get('cpu')}, {str(measured.get('date'))[:10]}"


def _recurrent_row(cell: str, layer: nn.RNN | nn.GRU, length: int, batch: int, budget: float) -> Row:
    x = np.random.default_rng(0).standard_normal((length, batch, layer.input_size), dtype=np.float32)
    workers = machine(np).workers
    estimates = choose_recurrent_backward(
        layer.cell.name, length, batch, layer.hidden_size, workers=workers, input_size=layer.input_size
    ).estimates
    return {
        "name": f"{cell}, H = {layer.hidden_size}, B = {batch}",
        "size": f"T = {length}",
        "way": "bp",
        "said": estimates["bp"],
        "measured": _timed(partial(backward_seconds, layer, x, np.ascontiguousarray(x[::-1])), budget),
    }


def _product_row(
    name: str, plan: Any, data: tuple[np.ndarray, np.ndarray], batch: int, threads: int, budget: float
) -> Row:
    out = np.empty((plan.pattern.nnz, *data[0].shape[1:]), np.float32)
    return {
        "name": name,
        "size": f"B = {batch}" if batch > 1 else "shared",
        "way": plan.strategy,
        "said": plan.estimated_seconds(batch, threads),
        "measured": _timed(partial(call_seconds, partial(plan, *data, out=out)), budget),
    }


def _timed(measure: Callable[..., list[float]], budget: float) -> dict[str, float | int]:
    """Return median and quartiles of what `measure` finds, the garbage collector at rest."""
    gc.disable()
    try:
        return timing.Timing(tuple(measure(budget=budget))).to_dict()
    finally:
        gc.enable()


def draw_estimates(result: Result) -> Any:
    """Draw said over measured, a dot a row, recurrent layers and products, by what was measured."""
    drawing, axes = harness.figure(width=8.0, height=4.0)
    ax = axes[0, 0]
    kinds = {"RNN": "#1e40af", "GRU": "#93c5fd", "products": "#9a3412"}
    for kind, color in kinds.items():
        chosen = [
            row for row in result["rows"] if (row["name"][:3] if row["name"][:3] in kinds else "products") == kind
        ]
        ax.scatter(
            [row["measured"]["median"] for row in chosen], [row["ratio"] for row in chosen], 14, color, label=kind
        )
    for edge in (1 / WITHIN, 1.0, WITHIN):
        ax.axhline(edge, color="black", linewidth=0.8, linestyle="-" if edge == 1 else ":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("measured seconds (median)")
    ax.set_ylabel("said over measured")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing


ESTIMATES = Benchmark(
    name="estimates",
    title="What the cost model says against what is measured, float32 on the CPU",
    leaves_out="planning; the forward, and the gradient at a recurrent layer's input",
    sizes={"hidden": (8, 16, 20, 32, 64, 128), "lengths": (10, 100, 1000, 10_000, 30_000), "budget": 0.3},
    quick={"hidden": (4, 9), "lengths": (10, 40), "budget": 0.02},
    measure=measure_estimates,
    columns=(
        Column("what", "name", number=False),
        Column("T or values", "size", number=False),
        Column("threads", "threads"),
        Column("way", "way", number=False),
        Column("said", "said", tables.seconds),
        Column("measured", "measured", tables.seconds),
        Column("said over measured", "ratio", "{:.2f}×".format),
        Column("within 1.5×", "met", number=False),
    ),
    tables={"Said and measured": ("name", "size", "threads", "way", "said", "measured", "ratio", "met")},
    short=("name", "size", "threads", "said", "measured", "ratio"),
    in_short=lambda row: "H = 20, B = 16" in row["name"],  # the papers' hidden size
    picture=draw_estimates,
)
