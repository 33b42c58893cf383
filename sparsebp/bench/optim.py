"""Optimizer updates, all parameters in one pass, against torch.optim and against one parameter after the other.

``sparsebp bench optim``. The gradients are there; what is timed is the update alone: ours in one call, ours name by
name, and `torch.optim` with ``foreach=False``, ``foreach=True`` and ``fused=True`` (where PyTorch has one), on the
parameters of networks with few large and many small tensors. All sides update the same arrays and keep buffers of
their own. An update does next to no arithmetic: its floor is the bytes that it must move, at the rate of a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.bench.tools import report, timing
from sparsebp.bench.tools.bandwidth import copy_bandwidth
from sparsebp.bench.tools.environment import available_memory
from sparsebp.bench.tools.report import Column
from sparsebp.core.errors import MissingDependencyError

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
SHARE = 0.7
"""Share of the available memory that a row may take."""

COLUMNS = (
    Column("network", "network", number=False),
    Column("tensors", "tensors"),
    Column("parameters", "parameters", report.count),
    Column("optimizer", "optimizer", number=False),
    Column("threads", "threads"),
    Column("sparsebp", "ours", report.seconds),
    Column("name by name", "loop", report.seconds),
    Column("torch", "unfused", report.seconds),
    Column("torch, foreach", "foreach", report.seconds),
    Column("torch, fused", "fused", report.seconds),
    Column("over name by name", "loop_ratio", report.times),
    Column("over torch", "unfused_ratio", report.times),
    Column("over foreach", "foreach_ratio", report.times),
    Column("over fused", "fused_ratio", report.times),
    Column("targets", "targets", number=False),
    Column("outcome", "met", number=False),
    Column("bytes moved", "moved", report.size),
    Column("× copy floor", "floor_times", report.times),
)
TABLES = {
    "Networks": ("network", "tensors", "parameters"),
    "Time of an update": ("network", "optimizer", "threads", "ours", "loop", "unfused", "foreach", "fused"),
    "Ratios": ("network", "optimizer", "threads", "loop_ratio", "unfused_ratio", "foreach_ratio", "fused_ratio"),
    "Targets, and the time of a copy of as many bytes": (
        "network",
        "optimizer",
        "threads",
        "moved",
        "floor_times",
        "targets",
        "met",
    ),
}
SHORT = ("network", "optimizer", "ours", "foreach_ratio", "fused_ratio", "met", "floor_times")
"""Columns of the README's table."""


def in_short(row: Mapping[str, Any]) -> bool:
    """Whether the README's table has the row."""
    return row["threads"] == 2 and row["optimizer"] in ("SGD, momentum", "Adam")


def run(
    out: Path | None = None,
    quick: bool = False,
    threads: tuple[int, ...] = (1, 2),
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Measure, print the table, write ``optim.json`` and ``optim.png``; return the result.

    Parameters are those of `sparsebp.bench.recurrent.run`.

    Raises
    ------
    MissingDependencyError
        PyTorch is not installed.
    """
    if timing.optional("torch") is None:
        raise MissingDependencyError("PyTorch is not installed, and is what this benchmark compares with",
                                     remedy="Install the extra: pip install 'sparsebp[torch]'")  # fmt: skip
    rounds = (
        {"rounds": 2, "least_rounds": 2, "warmup": 1} if quick else {"rounds": 15, "least_rounds": 3, "budget": 4.0}
    )
    result = report.start(
        "optim",
        "The update of all parameters, gradients given: float32, CPU",
        quick=quick,
        settings={"threads": threads, "dtype": "float32", "targets": TARGETS, "optimizers": OPTIMIZERS},
        leaves_out="forward and backward; whole steps are another comparison",
    )
    for network, shapes in networks(quick).items():
        for count in timing.thread_counts_here(threads, result["notes"].append):
            with timing.threads(count):
                for name in OPTIMIZERS:
                    row = measure_row(network, shapes, name, count, rounds, result["notes"].append)
                    if row is not None:
                        result["rows"].append(row)
                        echo(f"{network}, {name}, threads={count}: {report.times(row['foreach_ratio'])} over foreach")
    report.finish(result, [c for c in COLUMNS if c.key not in ("tensors", "moved", "targets")], picture, out, echo)
    return result


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


def measure_row(
    network: str, shapes: Shapes, optimizer: str, threads: int, rounds: Mapping[str, Any], note: Callable[[str], None]
) -> dict[str, Any] | None:
    """Time all sides in turn; None, and a note, where they do not fit into memory."""
    numbers = sum(math.prod(shape) for shape in shapes.values())
    need, have = 4 * numbers * (2 + 4 * 3 + 3), available_memory()  # all sides' buffers, and foreach's intermediates
    if have is not None and need > SHARE * have:
        note(f"{network}, {optimizer}: left out, it needs {report.size(need)} and {report.size(have)} are free")
        return None
    ours, calls = sides(shapes, optimizer)
    timings = timing.measure({name: timing.Call(_without_argument(call)) for name, call in calls.items()}, **rounds)
    moved = bytes_moved(ours)
    row: dict[str, Any] = {
        "network": network, "tensors": len(shapes), "parameters": numbers, "optimizer": optimizer, "threads": threads,
        "moved": moved, "floor_times": timings["ours"].median / (moved / copy_bandwidth(threads)),
    }  # fmt: skip
    row |= {name: measured.to_dict() for name, measured in timings.items()}
    row |= {f"{name}_ratio": timing.ratio(timings[name], timings["ours"]) for name in timings if name != "ours"}
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
        "met": f"missed: {', '.join(missed)}" if missed else "met",
    }


def _without_argument(side: Callable[[], object]) -> Callable[[object], object]:
    return lambda _: side()


def picture(result: Mapping[str, Any]) -> Any:
    """Draw the speed-up over foreach and fused, one pair of bars a network and optimizer, for the most threads."""
    most = max(row["threads"] for row in result["rows"])
    rows = [row for row in result["rows"] if row["threads"] == most]
    drawing, axes = report.figure(1, 1, width=8.0, height=0.28 * len(rows) + 1.4)
    ax = axes[0, 0]
    for shift, side, color in ((-0.2, "foreach", "#93c5fd"), (0.2, "fused", "#1e40af")):
        ratios = [row.get(f"{side}_ratio", {"median": 0.0})["median"] for row in rows]
        ax.barh([i + shift for i in range(len(rows))], ratios, height=0.4, color=color, label=f"over torch, {side}")
        ax.axvline(TARGETS[side], color=color, linewidth=0.8, linestyle="--")
    ax.set_yticks(range(len(rows)), [f"{row['network']}, {row['optimizer']}" for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(f"times faster, {most} threads (dashed: targets)", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing
