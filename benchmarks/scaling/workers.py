"""Strong and weak scaling of every schedule on 8 to 4096 simulated workers, with the memory of a worker.

``python -m benchmarks scaling``. Nothing is timed: the costs of layers come from their FLOPs and a stated rate, those
of transfers and sums from a network with contention, and two runs give the same numbers. A model has few layers, so
many workers are pipelines side by side: the schedule's workers times its replicas, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.scaling.layers import Layer, flat, joined, resnet, transformer, vgg16
from benchmarks.scaling.machines import A100
from benchmarks.scaling.steps import ASYNCHRONOUS, PIPELINES, REPLICAS, Found, asynchronous, data_parallel, pipeline
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.core import tables
from sparsebp.core.tables import Column

ROUNDS = 4
"""Micro-batches of a pipeline for each of its workers, where there are samples enough."""
LABELS = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved", "zb-h1": "ZB-H1", "zb-h2": "ZB-H2",
    "fast-forward": "fast-forward", "modulo": "fast-forward, modulo", "dp-end": "sums at the end",
    "dp-overlap": "sums beside", "dp-priority": "first stage first", "dp-reverse": "reverse first-k",
    "pipedream": "PipeDream", "dualpipe": "DualPipe (2018)",
}  # fmt: skip
"""The schedules in words."""
KEPT = ("gpipe", "1f1b", "zb-h2", "modulo", "dp-reverse")
"""Whose memory is shown."""


class Model(NamedTuple):
    """A model and how it is trained.

    Attributes
    ----------
    layers, stages
        What data-parallel workers sum apart; what pipelines may be cut into.
    workers
        Of a pipeline at most.
    batch
        Samples of a step where it stays the same for all numbers of workers.
    each
        Samples of a worker's step where the batch grows with the workers.
    most
        Samples of a micro-batch at most.
    """

    layers: Sequence[Layer]
    stages: Sequence[Layer]
    workers: int
    batch: int
    each: int
    most: int


def models() -> dict[str, Model]:
    """Return the models by name."""
    vgg, blocks = vgg16(), resnet()
    gpt = transformer(62, 2560, 1024, 50_257, 32)
    return {
        "VGG-16": Model(vgg, vgg, 4, 4096, 32, 32),
        "ResNet-50-like": Model(flat(blocks), [joined(block) for block in blocks], 8, 4096, 64, 32),
        "GPT-like": Model(gpt, gpt, 32, 256, 4, 1),
    }


def measure(run: Run) -> Iterator[Row]:
    """Simulate every model on every number of workers."""
    run.result["settings"] |= {"machine": A100.name, "rate": A100.rate, "rounds": ROUNDS}
    for name, model in models().items():
        if name in run.settings["models"]:
            for kind in ("strong", "weak"):
                for count in run.settings["workers"]:
                    yield {"model": name, "scaling": kind, "workers": count} | simulate_row(model, kind, count)
    run.note(
        "Efficiency: what the FLOPs of the step take at the full rate on all workers, over the simulated time from a "
        "step to the next. A dash: there are fewer samples than workers or pipelines; asynchronous pipelines have no "
        "replicas."
    )
    run.note(f"Machine: {A100.name}; {1e6 * A100.overhead:.0f} µs an action beside its FLOPs.")
    run.note("Memory: activations, gradients and weights of the fullest worker, no optimizer state, no recomputation.")


def simulate_row(model: Model, kind: str, count: int) -> Row:
    """Simulate every schedule of a model on `count` workers."""
    workers = min(model.workers, count)
    replicas = count // workers
    batch = model.batch if kind == "strong" else model.each * count
    row: Row = {"batch": batch, "pipeline": f"{workers} × {replicas}"}
    calls: dict[str, Callable[[], Found]] = {}
    share = batch // replicas  # samples of a pipeline
    if share:
        samples = min(model.most, max(1, share // (ROUNDS * workers)))
        microbatches = share // samples
        row |= {"microbatches": microbatches, "samples": samples}
        common = (model.stages, A100, workers, microbatches, samples)
        calls |= {name: partial(pipeline, name, *common, replicas) for name in PIPELINES}
        if replicas == 1:
            calls |= {name: partial(asynchronous, name, *common) for name in ASYNCHRONOUS}
    if batch >= count:
        calls |= {name: partial(data_parallel, name, model.layers, A100, count, batch / count) for name in REPLICAS}
    for name, call in calls.items():
        found = call()
        row[name] = A100.alone(model.layers, found.samples) / count / found.seconds
        row[f"{name}_peak"] = found.peak
        if found.detail is not None:
            row["k"] = found.detail
    return row


def picture(result: Result) -> Any:
    """Draw the efficiency by the number of workers: a row a model, strong scaling to the left, weak to the right."""
    rows = result["rows"]
    names = list(dict.fromkeys(row["model"] for row in rows))
    drawing, axes = pictures.figure(len(names), 2, width=9.0, height=2.6 * len(names) + 0.9)
    colours = ["#9ca3af", "#6b7280", "#93c5fd", "#60a5fa", "#1e40af", "#86efac", "#15803d", "#fdba74", "#f97316",
               "#dc2626", "#7f1d1d"]  # fmt: skip
    for line, name in enumerate(names):
        for column, kind in enumerate(("strong", "weak")):
            ax = axes[line, column]
            own = [row for row in rows if (row["model"], row["scaling"]) == (name, kind)]
            for key, colour in zip((*PIPELINES, *REPLICAS), colours, strict=True):
                points = [(row["workers"], row[key]) for row in own if key in row]
                style = "--" if key in REPLICAS else "-"
                ax.plot(*zip(*points, strict=True), style, color=colour, marker=".", linewidth=1.2, label=LABELS[key])
            ax.set_xscale("log", base=2)
            ax.set_ylim(0, 1)
            ax.set_title(f"{name}, {kind} scaling", fontsize=9)
            ax.set_xlabel("workers", fontsize=8)
            ax.set_ylabel("efficiency", fontsize=8)
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    pictures.legend_below(drawing, handles, labels, columns=4)
    return drawing


def _share(value: float) -> str:
    return f"{value:.1%}"


_RUN = ("model", "scaling", "workers")
BENCHMARK = Benchmark(
    name="scaling",
    title="Schedules on many simulated workers: share of the full rate that a training step reaches",
    leaves_out="everything that the costs do not say: loading of data, normalisation and activations, stragglers",
    settings={"targets": {}},
    sizes={"workers": (8, 32, 128, 512, 4096), "models": ("VGG-16", "ResNet-50-like", "GPT-like")},
    quick={"workers": (64,), "models": ("VGG-16",)},
    threads=None,
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("scaling", "scaling", number=False),
        Column("workers", "workers"),
        Column("batch", "batch", on_terminal=False),
        Column("pipeline × replicas", "pipeline", on_terminal=False),
        Column("micro-batches", "microbatches", on_terminal=False),
        Column("samples of each", "samples", on_terminal=False),
        *(Column(LABELS[name], name, _share) for name in (*PIPELINES, *REPLICAS, *ASYNCHRONOUS)),
        Column("k", "k", on_terminal=False),
        *(
            Column(f"memory, {LABELS[name]}", f"{name}_peak", tables.size, on_terminal=name in KEPT)
            for name in (*KEPT, *ASYNCHRONOUS)
        ),
    ),
    tables={
        "What runs": (*_RUN, "batch", "pipeline", "microbatches", "samples", "k"),
        "Efficiency of pipelines that deal out one part of the model": (*_RUN, "gpipe", "1f1b", "zb-h1", "zb-h2",
                                                                         "fast-forward"),
        "Of those that deal out more": (*_RUN, "interleaved", "modulo"),
        "Of data-parallel workers": (*_RUN, *REPLICAS),
        "Of asynchronous pipelines, and their memory": (*_RUN, *ASYNCHRONOUS, *(f"{n}_peak" for n in ASYNCHRONOUS)),
        "Memory of a worker": (*_RUN, *(f"{name}_peak" for name in KEPT)),
    },
    short=(*_RUN, "1f1b", "zb-h2", "modulo", "dp-overlap", "dp-reverse"),
    in_short=lambda row: row["scaling"] == "weak" and row["workers"] in (8, 4096),
    picture=picture,
)  # fmt: skip
