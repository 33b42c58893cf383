"""Optimizer updates, all parameters in one pass, against torch.optim and against one parameter after the other.

``python -m benchmarks optim``. The gradients are there; what is timed is the update alone: ours in one call, ours name
by name, and `torch.optim` with ``foreach=False``, ``foreach=True`` and ``fused=True`` (where PyTorch has one), on the
parameters of networks with few large and many small tensors. All sides update the same arrays and keep buffers of their
own. An update does next to no arithmetic: its floor is the bytes that it must move, at the rate of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.tools import peers, pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, fits, with_threads
from benchmarks.tools.environment import copy_bandwidth
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

Shapes = Mapping[str, tuple[int, ...]]

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 1e-3}),
    "SGD, momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}),
    "Adam": ("Adam", {"lr": 1e-3}),
    "AdamW": ("AdamW", {"lr": 1e-3}),
    "AMSGrad": ("Adam", {"lr": 1e-3, "amsgrad": True}),
    "Adagrad": ("Adagrad", {"lr": 1e-3}),
    "Adadelta": ("Adadelta", {"lr": 1e-3}),
    "RMSprop": ("RMSprop", {"lr": 1e-3}),
}
"""By name in the table: the class, of the same name here and in torch.optim, and its options."""
PEERS = {"unfused": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
"""The forms of torch.optim."""
TARGETS = {"foreach": 1.5, "fused": 1.0}


def measure(run: Run) -> Iterator[Row]:
    """Measure every optimizer on every network."""
    peers.import_torch()  # refused before anything is measured
    for network, shapes in networks(run.quick).items():
        need = 4 * sum(map(math.prod, shapes.values())) * (2 + 4 * 3 + 3)  # all sides' buffers, foreach's intermediates
        for count in run.threads():
            for name in OPTIMIZERS:
                if fits(f"{network}, {name}", need, run.note):
                    yield measure_row(network, shapes, name, count, run.rounds)


def networks(quick: bool = False) -> dict[str, Shapes]:
    """Return the parameters' shapes of each network, by name.

    SNN is the fully connected network of the 2018 DualPipe paper, 32 layers of 2048 units.
    """
    from sparsebp import models

    width = 32 if quick else 2048
    snn: Shapes = {
        f"{i}.{name}": shape for i in range(32) for name, shape in (("weight", (width, width)), ("bias", (width,)))
    }
    others: dict[str, Any] = {"LeNet-5": models.lenet5}
    if not quick:
        others |= {"MobileNetV2-style": models.mobilenetv2, "VGG-11": models.vgg11}
    shapes: dict[str, Shapes] = {
        name: {key: p.shape for key, p in make().parameters().items()} for name, make in others.items()
    }
    return {f"SNN, 32 × {width}": snn} | shapes


def measure_row(network: str, shapes: Shapes, optimizer: str, threads: int, rounds: Mapping[str, Any]) -> Row:
    """Time all sides in turn."""
    ours, calls = sides(shapes, optimizer)
    timings = timing.measure(calls, **rounds)
    moved = bytes_moved(ours)
    row: Row = {
        "network": network, "tensors": len(shapes), "parameters": sum(map(math.prod, shapes.values())),
        "optimizer": optimizer, "threads": threads,
        "moved": moved, "floor_times": timings["ours"].median / (moved / copy_bandwidth(threads)),
    }  # fmt: skip
    row |= timing.side_by_side(timings)
    return row | judge(row)


def sides(shapes: Shapes, optimizer: str) -> tuple[Any, dict[str, Callable[[], object]]]:
    """Return our optimizer, and one update by each side; all work on the same parameters and gradients."""
    import torch

    from sparsebp import optim

    rng = np.random.default_rng(0)
    params, grads = ({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()} for _ in range(2))
    cls, options = OPTIMIZERS[optimizer]
    ours = getattr(optim, cls)(params, **options)

    def name_by_name() -> None:
        update = ours.begin()
        for name, grad in grads.items():
            update.apply({name: grad})

    calls: dict[str, Callable[[], object]] = {"ours": lambda: ours.step(grads), "loop": name_by_name}
    twins = [torch.nn.Parameter(torch.from_numpy(param)) for param in params.values()]
    for twin, grad in zip(twins, grads.values(), strict=True):
        twin.grad = torch.from_numpy(grad)
    fused = ("SGD", "Adam", "AdamW", "Adagrad")  # those that PyTorch has fused on a CPU
    for name, form in PEERS.items():
        if name != "fused" or cls in fused:
            calls[name] = getattr(torch.optim, cls)(twins, **options, **form).step
    return ours, calls


def bytes_moved(optimizer: Any) -> int:
    """Return the bytes that an update must move: gradients read, parameters and buffers read and written."""
    parameters = sum(param.nbytes for param in optimizer.params.values())
    buffers = sum(array.nbytes for arrays in optimizer.buffers.values() for array in arrays.values())
    return 3 * parameters + 2 * buffers


def judge(row: Mapping[str, Any]) -> dict[str, str]:
    """Say what the row is to reach, and whether it does."""
    targets = {side: least for side, least in TARGETS.items() if f"{side}_ratio" in row}
    missed = [side for side, least in targets.items() if row[f"{side}_ratio"]["median"] < least]
    return {
        "targets": ", ".join(f"≥ {least:g}× {side}" for side, least in targets.items()),
        "met": report.outcome(missed),
    }


def picture(result: Result) -> Any:
    """Draw the speed-up over foreach and fused, one pair of bars a network and optimizer, for the most threads."""
    threads, rows = with_threads(result, max)
    colours = {"foreach": "#93c5fd", "fused": "#1e40af"}
    bars = [
        (f"over torch, {side}", colour, [row.get(f"{side}_ratio", {"median": 0.0})["median"] for row in rows])
        for side, colour in colours.items()
    ]
    labels = [f"{row['network']}, {row['optimizer']}" for row in rows]
    drawing, ax = pictures.bar_chart(labels, bars, f"times faster, {threads} (dashed: targets)", each=0.28)
    for side, colour in colours.items():
        ax.axvline(TARGETS[side], color=colour, linewidth=0.8, linestyle="--")
    pictures.legend_below(drawing)
    return drawing


_ROW = ("network", "optimizer", "threads")

BENCHMARK = Benchmark(
    name="optim",
    title="The update of all parameters, gradients given: float32, CPU",
    leaves_out="forward and backward; whole steps are another comparison",
    settings={"dtype": "float32", "targets": TARGETS, "optimizers": OPTIMIZERS},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 4.0},
    measure=measure,
    columns=(
        Column("network", "network", number=False),
        Column("tensors", "tensors", on_terminal=False),
        Column("parameters", "parameters", tables.count),
        Column("optimizer", "optimizer", number=False),
        Column("threads", "threads"),
        Column("sparsebp", "ours", tables.seconds),
        Column("name by name", "loop", tables.seconds),
        Column("torch", "unfused", tables.seconds),
        Column("torch, foreach", "foreach", tables.seconds),
        Column("torch, fused", "fused", tables.seconds),
        Column("over name by name", "loop_ratio", tables.times),
        Column("over torch", "unfused_ratio", tables.times),
        Column("over foreach", "foreach_ratio", tables.times),
        Column("over fused", "fused_ratio", tables.times),
        Column("targets", "targets", number=False, on_terminal=False),
        Column("outcome", "met", number=False),
        Column("bytes moved", "moved", tables.size, on_terminal=False),
        Column("× copy floor", "floor_times", tables.times),
    ),
    tables={
        "Networks": ("network", "tensors", "parameters"),
        "Time of an update": (*_ROW, "ours", "loop", *PEERS),
        "Ratios": (*_ROW, "loop_ratio", *(f"{peer}_ratio" for peer in PEERS)),
        "Targets, and the time of a copy of as many bytes": (*_ROW, "moved", "floor_times", "targets", "met"),
    },
    short=("network", "optimizer", "ours", "foreach_ratio", "fused_ratio", "met", "floor_times"),
    picture=picture,
)
