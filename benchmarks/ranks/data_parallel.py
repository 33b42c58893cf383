"""Data-parallel training of two ranks: which share of the sums of gradients is hidden behind what is computed.

``python -m benchmarks data-parallel``. It starts ``mpiexec`` itself: two processes of one thread each, an MLP whose
sums take a good part of a step. Ours are measured with sums that nothing goes on beside, with sums beside the backward
pass and the next forward, with those first that the next forward needs first, and with reverse first-k, k searched with
measured costs; the peer is PyTorch's ``DistributedDataParallel`` with gloo, in the same processes. The share hidden is
``1 - (step - computing) / sums``, where *computing* is the same schedule with sums that carry nothing (ranks still wait
for each other once a step, for its losses), and *sums* those of a step with nothing beside them.

On one machine the bytes are copied by the same cores that compute, so little can be hidden there. With a network of a
stated bandwidth each sum comes, besides, as much later as its bytes take there, for which no core works.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.processes.ranks import on_ranks
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.core import tables
from sparsebp.core.tables import Column
from sparsebp.core.timing import Timing, ratio

RANKS = 2
TARGETS = {"hidden": 0.6, "share": 0.2}
"""Of the sums, hidden by one of the schedules at least, where they are such a share of a step that hides nothing."""
SCHEDULES = {"waits": "no overlap", "overlap": "overlap", "priority": "priority", "reverse": "reverse first-k"}


def measure(run: Run) -> Iterator[Row]:
    """Measure every batch size, on this machine and with every bandwidth."""
    for batch in run.settings["batches"]:
        for gigabits in run.settings["gigabits"]:
            yield measure_row(run.settings, batch, gigabits, run.rounds["rounds"])


def measure_row(settings: Mapping[str, Any], batch: int, gigabits: float | None, rounds: int) -> Row:
    """Start the ranks, and make a row of what they have measured."""
    given = {
        "width": settings["width"], "depth": settings["depth"], "batch": batch, "rounds": rounds,
        "steps": settings["steps"], "bandwidth": None if gigabits is None else gigabits * 1e9 / 8,
        "peer": gigabits is None,
    }  # fmt: skip
    found = on_ranks(RANKS, "benchmarks.processes.replicas", progress=True, given=given)
    timings = {name: Timing(tuple(seconds)) for name, seconds in found["seconds"].items()}
    network = "this machine's memory" if gigabits is None else f"{gigabits:g} Gbit/s"
    row: Row = {"network": network, "batch": batch, "bytes": found["bytes"], "k": found["k"]}
    row |= {name: timing.to_dict() for name, timing in timings.items()}
    row |= {f"{name}_hidden": hidden(timings, name) for name in SCHEDULES if name != "waits"}
    row["share"] = timings["sums"].median / timings["waits"].median
    best = min((name for name in SCHEDULES), key=lambda name: timings[name].median)
    row["torch_ratio"] = ratio(timings["torch"], timings[best]) if "torch" in timings else None
    return row | {"met": judge(row)}


def hidden(timings: Mapping[str, Timing], name: str) -> dict[str, Any]:
    """Return the share of the sums that a schedule hides, round by round."""
    sides = (timings[name], timings[f"{name}, alone"], timings["sums"])
    rounds = zip(*(side.seconds for side in sides), strict=True)
    return Timing(tuple(1 - (step - computing) / sums for step, computing, sums in rounds)).to_dict()


def judge(row: Mapping[str, Any]) -> str:
    """Say whether a row reaches what it is to reach: only where sums are much of a step there is a target."""
    most = max(row[f"{name}_hidden"]["median"] for name in SCHEDULES if name != "waits")
    if row["share"] < TARGETS["share"]:
        return "no target: sums are short"
    return report.outcome([] if most >= TARGETS["hidden"] else [f"hidden ≥ {TARGETS['hidden']:.0%}"])


def share(value: Mapping[str, float] | float) -> str:
    """Write a share as ``72 % (65–80)``: the median, and the quartiles where there are some."""
    if not isinstance(value, Mapping):
        return f"{value:.0%}"
    return f"{value['median']:.0%} ({100 * value['low']:.0f}–{100 * value['high']:.0f})"


def picture(result: Result) -> Any:
    """Draw the time of a step by schedule, what computing takes of it, and the peer's."""
    drawing, axes = pictures.figure(width=7.0, height=0.7 + 0.5 * max(1, len(result["rows"])) * 3)
    ax = axes[0, 0]
    labels, place = [], 0.0
    step, alone, peer = "#93c5fd", "#1e40af", "#d1d5db"
    for row in result["rows"]:
        for name, heading in (*SCHEDULES.items(), ("torch", "PyTorch")):
            if row.get(name) is None:
                continue
            ax.barh(place, 1e3 * row[name]["median"], color=peer if name == "torch" else step, height=0.8)
            if f"{name}, alone" in row:
                ax.barh(place, 1e3 * row[f"{name}, alone"]["median"], color=alone, height=0.8)
            labels.append((place, f"{row['network']}, {row['batch']}: {heading}"))
            place += 1
        place += 0.6
    ax.set_yticks(*map(np.array, zip(*labels, strict=True)) if labels else ([],), fontsize=7)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds a step", fontsize=9)
    for colour, label in ((step, "a step"), (alone, "of it, computing alone"), (peer, "a step of PyTorch's replicas")):
        ax.barh(0, 0, color=colour, label=label)
    pictures.legend_below(drawing, columns=3)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing


BENCHMARK = Benchmark(
    name="data-parallel",
    title="Data-parallel training on {ranks} ranks: an MLP of {depth} layers of {width}, float32, one thread a rank",
    leaves_out="loading data",
    settings={"ranks": RANKS, "targets": TARGETS, "optimizer": "SGD, momentum"},
    sizes={"width": 1024, "depth": 6, "batches": (8, 64), "gigabits": (None, 10.0), "steps": 5},
    quick={"width": 24, "depth": 3, "batches": (4,), "gigabits": (None,), "steps": 1},
    rounds={"rounds": 11},
    quick_rounds={"rounds": 1},
    threads=None,
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("batch of a rank", "batch"),
        Column("gradients", "bytes", tables.size),
        Column("sums alone", "sums", tables.seconds),
        Column("of a step", "share", share),
        *(Column(heading, name, tables.seconds) for name, heading in SCHEDULES.items()),
        Column("computing alone", "overlap, alone", tables.seconds),
        Column("k", "k"),
        *(Column(f"{heading}: hidden", f"{name}_hidden", share) for name, heading in list(SCHEDULES.items())[1:]),
        Column("PyTorch's replicas", "torch", tables.seconds),
        Column("our fastest over PyTorch's", "torch_ratio", tables.times),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time of a step": ("network", "batch", *SCHEDULES, "overlap, alone"),
        "Sums, and PyTorch's replicas": ("network", "batch", "bytes", "sums", "torch", "torch_ratio"),
        "Sums hidden": ("network", "batch", "share", "overlap_hidden", "priority_hidden", "reverse_hidden", "k", "met"),
    },
    short=("network", "batch", "share", "overlap_hidden", "reverse_hidden", "torch_ratio", "met"),
    picture=picture,
)
