"""Whole training steps of convolutional networks against PyTorch, eager, with channels in front and channels last.

``python -m benchmarks convolution``. A step is forward, cross-entropy, backward and SGD with momentum: ours as
``Trainer(schedule="conventional")`` runs it, PyTorch's with ``fused=True``, its fastest form on a CPU. PyTorch's
steps run in a process of their own. What counts is the ratio over the faster of its two layouts, round by round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks import fusion
from benchmarks.processes.apart import Apart
from benchmarks.tools import peers, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, fits, with_threads
from benchmarks.tools.images import torch_twin
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

TARGETS = {"VGG-11": 1.0, "LeNet-5": 1.2, "MobileNetV2-style": 1.2}
"""Times PyTorch's speed, of its faster layout."""
OPTIMIZER = "SGD, momentum"
LAYOUTS = ("torch", "channels_last")


def measure(run: Run) -> Iterator[Row]:
    """Measure the steps of every network and batch size."""
    peers.import_torch()  # refused before anything is measured
    with Apart() as apart:
        for count in run.threads():
            for network, (make, shape, batches) in networks(run.quick).items():
                for batch in batches:
                    if fits(network, batch << 25, run.note):
                        yield measure_row(network, make, shape, batch, count, run.rounds, apart)


def networks(quick: bool = False) -> dict[str, tuple[Callable[[], Any], tuple[int, ...], tuple[int, ...]]]:
    """Return of each network: how it is made, a sample's shape, and the sizes of batches."""
    from sparsebp import models

    found: dict[str, Any] = {"LeNet-5": (partial(models.lenet5, rng=0), (1, 28, 28), (2,) if quick else (32, 128))}
    if not quick:
        found |= {
            "VGG-11": (partial(models.vgg11, rng=0), (3, 32, 32), (8, 32)),
            "MobileNetV2-style": (partial(models.mobilenetv2, rng=0), (3, 32, 32), (8, 32)),
        }
    return found


def measure_row(
    network: str, make: Callable[[], Any], shape: tuple[int, ...], batch: int, threads: int, rounds: Mapping[str, Any],
    apart: Apart,
) -> Row:  # fmt: skip
    """Time all sides in turn."""
    model = make()
    x, target = fusion.batch_of(model, shape, batch)
    executor = fusion.ours(model, OPTIMIZER)[0]["none"]
    timers = {"ours": timing.timer(lambda: executor.step([(x, target)]))}
    theirs, _ = apart.build(steps_in_torch, make, shape, batch, threads)
    timings = timing.in_turn(timers | theirs, **rounds)
    best = timing.Timing(tuple(map(min, *(timings[name].seconds for name in LAYOUTS))))
    row: Row = {"network": network, "batch": batch, "threads": threads, "target": TARGETS[network]}
    row |= timing.side_by_side(timings) | {"best_ratio": timing.ratio(best, timings["ours"])}
    return row | {"met": "met" if row["best_ratio"]["median"] >= row["target"] else "missed"}


def steps_in_torch(
    make: Callable[[], Any], shape: tuple[int, ...], batch: int, threads: int
) -> tuple[dict[str, Callable[[], object]], None]:
    """Return one whole step for each layout."""
    import torch

    from benchmarks import optim as updates

    torch.set_num_threads(threads)
    model = make()
    x, target = (torch.from_numpy(array) for array in fusion.batch_of(model, shape, batch))
    name, options = updates.OPTIMIZERS[OPTIMIZER]
    loss = torch.nn.CrossEntropyLoss()

    def step_of(layout: Any) -> Callable[[], None]:
        twin, inputs = torch_twin(model).to(memory_format=layout), x.to(memory_format=layout)
        optimizer = getattr(torch.optim, name)(twin.parameters(), **options, fused=True)

        def step() -> None:
            optimizer.zero_grad()
            loss(twin(inputs), target).backward()
            optimizer.step()

        return step

    formats = torch.contiguous_format, torch.channels_last
    return {name: step_of(layout) for name, layout in zip(LAYOUTS, formats, strict=True)}, None


def picture(result: Result) -> Any:
    """Draw the speed-up over both layouts, for the most threads."""
    threads, rows = with_threads(result, max)
    words = {"torch": ("over PyTorch", "#93c5fd"), "channels_last": ("over PyTorch, channels last", "#1e40af")}
    bars = [(text, colour, [row[f"{side}_ratio"]["median"] for row in rows])
            for side, (text, colour) in words.items()]  # fmt: skip
    labels = [f"{row['network']}, batch {row['batch']}" for row in rows]
    drawing, ax = pictures.bar_chart(labels, bars, f"times faster, {threads}", each=0.45)
    ax.axvline(1.0, color="#6b7280", linewidth=0.8, linestyle="--")
    pictures.legend_below(drawing)
    return drawing


_ROW = ("network", "batch", "threads")

BENCHMARK = Benchmark(
    name="convolution",
    title="Whole training steps of convolutional networks: float32, CPU",
    leaves_out="loading data; a step is forward, cross-entropy, backward, SGD with momentum",
    settings={"dtype": "float32", "targets": TARGETS, "optimizer": OPTIMIZER},
    rounds={"rounds": 11, "least_rounds": 3, "budget": 3.0},
    quick_rounds={"rounds": 1, "least_rounds": 1},
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("batch", "batch"),
        Column("threads", "threads"),
        Column("sparsebp", "ours", tables.seconds),
        Column("torch", "torch", tables.seconds),
        Column("torch, channels last", "channels_last", tables.seconds),
        Column("over torch", "torch_ratio", tables.times),
        Column("over channels last", "channels_last_ratio", tables.times),
        Column("over the faster", "best_ratio", tables.times),
        Column("target", "target", "≥ {:g}×".format),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time of a step": (*_ROW, "ours", *LAYOUTS),
        "Ratios": (*_ROW, *(f"{name}_ratio" for name in LAYOUTS), "best_ratio", "target", "met"),
    },
    short=(*_ROW, "ours", *LAYOUTS, "best_ratio", "target", "met"),
    picture=picture,
)
