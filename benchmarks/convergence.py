"""Convergence: LeNet-5 on real digits by scan and by back-propagation, from one seed (BPPSA §3.5, Fig. 6).

``python -m benchmarks convergence``. Batch 256, SGD with momentum as in the paper, and Adam; float32 and float64. The
loss of both runs is compared after every iteration: a scan computes the same gradients in another order of summation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.tools import images, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp import nn, optim
from sparsebp.core import tables
from sparsebp.core.check import Backward
from sparsebp.core.tables import Column
from sparsebp.data import load_mnist_images
from sparsebp.models import lenet5

ALGORITHM: Backward = "blelloch"
SEED, TEST, TEST_EVERY = 0, 500, 5
TARGETS = {"float32": 1e-4, "float64": 1e-10}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD, lr 1e-3, momentum 0.9": lambda params: optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adam, lr 1e-3": lambda params: optim.Adam(params, lr=1e-3),
}


def measure(run: Run) -> Iterator[Row]:
    """Train with every optimizer in either precision."""
    for dtype in TARGETS:
        data = load_mnist_images(test=TEST, dtype=dtype)
        for name in OPTIMIZERS:
            yield measure_row(name, dtype, data, run.settings["batch"], run.settings["iterations"])
    _add_rounding(run.result["rows"])


def measure_row(name: str, dtype: str, data: Any, batch: int, iterations: int) -> Row:
    """Train twice from the same weights on the same batches; compare the losses."""
    bp, scan = (train(name, dtype, data, batch, iterations, way) for way in ("bp", ALGORITHM))
    difference, test_difference = (largest_difference(scan[key], bp[key]) for key in ("loss", "test"))
    target = TARGETS[dtype]
    autograd = train_torch(name, dtype, data, batch, iterations)
    return {
        "optimizer": name, "dtype": dtype, "iterations": iterations, "first_loss": bp["loss"][0],
        "last_bp": bp["loss"][-1], "last_scan": scan["loss"][-1], "difference": difference,
        "test_difference": test_difference,
        "torch_difference": largest_difference(autograd, bp["loss"]), "target": target,
        "met": max(difference, test_difference) <= target,
        "step_bp": float(np.median(bp["seconds"])), "step_scan": float(np.median(scan["seconds"])),
        "losses_bp": bp["loss"], "losses_scan": scan["loss"], "test_bp": bp["test"], "test_scan": scan["test"],
    }  # fmt: skip


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses."""
    return float(np.max(np.abs(np.subtract(losses, reference)) / np.abs(reference)))


def _add_rounding(rows: Sequence[Row]) -> None:
    """Put into the float32 rows how far BP itself is from BP in float64: no scan can be expected to be nearer."""
    exact = {row["optimizer"]: row["losses_bp"] for row in rows if row["dtype"] == "float64"}
    for row in rows:
        if row["dtype"] == "float32":
            row["rounding"] = largest_difference(row["losses_bp"], exact[row["optimizer"]])


def train(name: str, dtype: str, data: Any, batch: int, iterations: int, backward: Backward) -> dict[str, list[float]]:
    """Train LeNet-5 and return the loss and the seconds of every iteration, and the test loss of every fifth."""
    train_set, test_set = data
    test_x, test_target = test_set.batch(np.arange(len(test_set)))
    model, loss = lenet5(dtype=dtype, rng=SEED), nn.CrossEntropyLoss()
    model.set_backward(backward)
    optimizer = OPTIMIZERS[name](model.parameters())
    found: dict[str, list[float]] = {"loss": [], "test": [], "seconds": []}
    steps = images.train(model, optimizer, train_set, batch, SEED, iterations)
    for step, (value, seconds) in enumerate(steps):
        found["seconds"].append(seconds)
        found["loss"].append(value)
        if step % TEST_EVERY == 0 or step == iterations - 1:
            found["test"].append(float(loss.forward(model(test_x), test_target)[0]))
    return found


def train_torch(name: str, dtype: str, data: Any, batch: int, iterations: int) -> list[float]:
    """Train the same network by PyTorch's autograd on the same batches and return the losses."""
    import torch

    train_set, _ = data
    twin = images.torch_twin(lenet5(dtype=dtype, rng=SEED))
    optimizer = (
        torch.optim.Adam(twin.parameters(), lr=1e-3)
        if name.startswith("Adam")
        else torch.optim.SGD(twin.parameters(), lr=1e-3, momentum=0.9)
    )
    losses = []
    for chosen in images.batches(len(train_set), batch, SEED, iterations):
        x, target = map(torch.from_numpy, train_set.batch(chosen))
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(twin(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def picture(result: Result) -> Any:
    """Draw training and test loss by iteration, the scan's dashed over that of BP, one column an optimizer."""
    rows = [row for row in result["rows"] if row["dtype"] == "float32"]
    drawing, axes = pictures.figure(2, len(rows), width=4.2 * len(rows), height=5.4)
    for column, row in enumerate(rows):
        for place, (kind, label) in enumerate((("losses", "training loss"), ("test", "test loss"))):
            ax, count = axes[place, column], row["iterations"]
            at = np.arange(count)
            if kind == "test":
                at = np.array([i for i in at if i % TEST_EVERY == 0 or i == count - 1])
            ax.plot(at, row[f"{kind}_bp"], color="#93c5fd", linewidth=4, label="back-propagation")
            ax.plot(at, row[f"{kind}_scan"], color="#9a3412", linewidth=1.2, linestyle="--", label="scan")
            ax.set_ylabel(label)
            ax.set_xlabel("iteration")
            ax.grid(alpha=0.3)
            ax.spines[["top", "right"]].set_visible(False)
        axes[0, column].set_title(f"{row['optimizer']}, {row['dtype']}", fontsize=10)
    axes[0, 0].legend(fontsize=8)
    return drawing


_RUN = ("optimizer", "dtype")

BENCHMARK = Benchmark(
    name="convergence",
    title="LeNet-5 on the real digits, batch {batch}: the loss by scan ({algorithm}, all levels) and layer by layer",
    leaves_out="nothing; a step is forward, loss, backward and update, the median over the iterations",
    settings={"seed": SEED, "targets": TARGETS, "algorithm": ALGORITHM},
    sizes={"batch": 256, "iterations": 100},
    quick={"batch": 16, "iterations": 3},
    threads=None,
    measure=measure,
    columns=(
        Column("optimizer", "optimizer", number=False),
        Column("dtype", "dtype", number=False),
        Column("iterations", "iterations"),
        Column("first loss", "first_loss", "{:.4f}".format),
        Column("last loss, BP", "last_bp", "{:.8f}".format),
        Column("last loss, scan", "last_scan", "{:.8f}".format),
        Column("largest relative difference", "difference", "{:.2e}".format),
        Column("of the test loss", "test_difference", "{:.2e}".format),
        Column("PyTorch's BP against our BP", "torch_difference", "{:.2e}".format),
        Column("our BP in float32 against float64", "rounding", "{:.2e}".format),
        Column("target", "target", "≤ {:.0e}".format),
        Column("met", "met", lambda v: "yes" if v else "no", number=False),
        Column("step, BP", "step_bp", tables.seconds),
        Column("step, scan", "step_scan", tables.seconds),
    ),
    tables={
        "Losses, and time of a step": (
            *_RUN,
            "iterations",
            "first_loss",
            "last_bp",
            "last_scan",
            "step_bp",
            "step_scan",
        ),
        "Relative differences of the losses": (
            *_RUN,
            "difference",
            "test_difference",
            "torch_difference",
            "rounding",
            "target",
            "met",
        ),
    },
    short=(*_RUN, "iterations", "last_bp", "last_scan", "difference", "target", "met"),
    picture=picture,
)
