"""Training steps of PyTorch's models with and without `sparsebp.torch.accelerate`, on the same threads.

``python -m benchmarks torch``. Four parts, each a model of torch.nn, softmax cross-entropy and torch's fused Adam:

- *script*: Embedding, GRU(32), Linear on sequences of up to 300 numbers, packed; a step is the mean of an epoch's;
- *packed*: packed sequences of lengths 1 … T (pytorch#149194, whose model has two layers of LSTM), and GRU(38, 20);
- *long*: more than 65 535 steps (pytorch#133751: cuDNN refuses them), for an LSTM of 24 units;
- *grid*: RNN, GRU and LSTM of 8 to 512 units.

Every call is run by the kernels, also where `accelerate` leaves it to PyTorch, so that the rows say where it should.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference, with_threads
from benchmarks.tools.peers import import_torch
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

CLASSES, WORDS = 10, 1000
OURS = "sparsebp"
TARGETS = {"small": 12.0, "packed": 18.0, "any": 1.0}
"""Times faster: at 20 units and 1000 steps, packed at 20 units, and everywhere."""


@dataclass(frozen=True)
class Task:
    """One model and its data.

    Attributes
    ----------
    part
        ``"script"``, ``"packed"``, ``"long"`` or ``"grid"``.
    cell
        ``"RNN"``, ``"GRU"`` or ``"LSTM"``.
    features, hidden, layers
        Of the recurrent layer.
    batch, length
        B and T.
    batches
        How many batches are trained on, one after the other.
    """

    part: str
    cell: str
    features: int
    hidden: int
    batch: int
    length: int
    layers: int = 1
    batches: int = 1

    @property
    def name(self) -> str:
        """The recurrent layer, as it is built."""
        return f"{self.cell}({self.features}, {self.hidden}" + (f", {self.layers})" if self.layers > 1 else ")")

    @property
    def packed(self) -> bool:
        """Whether sequences of different lengths are packed."""
        return self.part in ("script", "packed")

    @property
    def target(self) -> float:
        """Times faster that it is to be."""
        if self.part == "packed" and self.hidden == 20:
            return TARGETS["packed"]
        small = self.part == "grid" and self.hidden == 20 and self.length >= 1000
        return TARGETS["small" if small else "any"]


def tasks(settings: Mapping[str, Any]) -> Iterator[Task]:
    """Yield every task of a run."""
    script, long = settings["script"], settings["long"]
    yield Task("script", "GRU", 32, 32, script["batch"], script["length"], batches=script["batches"])
    for length in settings["packed"]:
        yield Task("packed", "GRU", 38, 20, 16, length)
        yield Task("packed", "LSTM", 16, 32, 16, length, layers=2)
    yield Task("long", "LSTM", 4, 24, 2, long)
    for cell in settings["cells"]:
        for batch, length, largest in settings["shapes"]:
            for hidden in settings["hidden"]:
                if hidden <= largest:
                    yield Task("grid", cell, settings["features"], hidden, batch, length)


def measure(run: Run) -> Iterator[Row]:
    """Measure every task, and note where the layer should be left alone."""
    import_torch()
    slower: dict[str, set[str]] = {}
    for count in run.threads():
        for task in tasks(run.settings):
            row = measure_row(task, run.rounds) | {"threads": count}
            if row["accelerate"] == OURS and row["ratio"]["median"] < 1:
                slower.setdefault(task.cell, set()).add(f"H = {task.hidden}, B = {task.batch}, T = {task.length}")
            yield row
    run.note(advice(slower))


def advice(slower: Mapping[str, set[str]]) -> str:
    """Say which tasks of the grid `accelerate` should leave to PyTorch besides those that it does leave."""
    said = [f"{cell}: {', '.join(sorted(places))}" for cell, places in sorted(slower.items())]
    return f"slower than torch.nn, and yet not left to it by accelerate: {'; '.join(said) or 'nothing'}"


def measure_row(task: Task, rounds: Mapping[str, Any]) -> Row:
    """Time a step of the model as it is and of its accelerated copy, in turn, after comparing their gradients."""
    from sparsebp.torch.modules import is_faster

    plain = Side(task)
    ours = plain.accelerated()
    difference = ours.difference(plain)
    refuse_difference(f"{task.name}, T = {task.length}, B = {task.batch}: a gradient", "torch.nn", difference)
    if task.part == "long":  # seconds a step
        rounds = {**rounds, "rounds": min(3, rounds["rounds"]), "least_rounds": min(3, rounds["least_rounds"])}
    timings = {
        name: timing.Timing(tuple(seconds / task.batches for seconds in found.seconds))
        for name, found in timing.measure({"ours": ours.epoch, "torch": plain.epoch}, **rounds).items()
    }
    ours_runs = is_faster(task.cell, task.hidden, False, task.length, task.packed)
    row: Row = {
        "part": task.part, "model": task.name, "cell": task.cell, "hidden": task.hidden, "batch": task.batch,
        "length": task.length, "gradient_difference": difference,
        "accelerate": OURS if ours_runs else "torch.nn", "target": task.target,
    }  # fmt: skip
    row |= {name: timing_.to_dict() for name, timing_ in timings.items()}
    row["ratio"] = timing.ratio(timings["torch"], timings["ours"])
    reached = row["ratio"]["median"] >= task.target
    if not ours_runs and task.target <= 1:
        return row | {"met": "left to PyTorch"}
    return row | {"met": report.outcome([] if reached else [f"≥ {task.target:g}×"])}


class Side:
    """A model of torch.nn, its batches and its optimizer."""

    def __init__(self, task: Task) -> None:
        torch = import_torch()
        self._task = task
        torch.manual_seed(0)
        rng = np.random.default_rng(0)
        parts = {
            "rnn": getattr(torch.nn, task.cell)(task.features, task.hidden, task.layers),
            "head": torch.nn.Linear(task.hidden, CLASSES),
        }
        if task.part == "script":
            parts["embedding"] = torch.nn.Embedding(WORDS, task.features)
        self.model = torch.nn.ModuleDict(parts)
        self.batches = [self._batch(torch, rng) for _ in range(task.batches)]
        self._begin(torch)

    def _begin(self, torch: Any) -> None:
        self.loss = torch.nn.CrossEntropyLoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)

    def _batch(self, torch: Any, rng: np.random.Generator) -> tuple[Any, Any, Any]:
        """Return inputs (T, B) or (T, B, features), lengths or None, and classes."""
        task = self._task
        shape = (task.length, task.batch)
        if task.part == "script":
            x = torch.from_numpy(rng.integers(0, WORDS, shape))
            lengths = torch.from_numpy(rng.integers(max(1, task.length // 10), task.length + 1, task.batch))
        else:
            x = torch.from_numpy(rng.standard_normal((*shape, task.features), dtype=np.float32))
            lengths = torch.linspace(1, task.length, task.batch).round().long() if task.packed else None
        return x, lengths, torch.from_numpy(rng.integers(0, CLASSES, task.batch))

    def accelerated(self) -> Side:
        """Return a copy whose recurrent layer is ours, whatever `accelerate` would do."""
        from sparsebp.torch.modules import OURS

        side = copy.deepcopy(self)
        side.model["rnn"].__class__ = OURS[type(side.model["rnn"])]
        side._begin(import_torch())
        return side

    def epoch(self) -> None:
        """Run a whole training step on every batch."""
        for batch in self.batches:
            self.backward(batch)
            self.optimizer.step()

    def backward(self, batch: tuple[Any, Any, Any]) -> None:
        """Run the forward pass and the backward pass, with the gradients of the last step dropped."""
        from torch.nn.utils.rnn import pack_padded_sequence

        x, lengths, target = batch
        self.optimizer.zero_grad(set_to_none=True)
        if "embedding" in self.model:
            x = self.model["embedding"](x)
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, enforce_sorted=False)
        _, last = self.model["rnn"](x)
        h_n = last[0] if self._task.cell == "LSTM" else last
        self.loss(self.model["head"](h_n[-1]), target).backward()

    def difference(self, peer: Side) -> float:
        """Return the largest ``‖ours − theirs‖ / ‖theirs‖`` over the gradients of all parameters on the first batch."""
        for side in (self, peer):
            side.backward(side.batches[0])
        theirs = dict(peer.model.named_parameters())
        return max(
            float((mine.grad - theirs[name].grad).norm() / theirs[name].grad.norm().clamp_min(1e-30))
            for name, mine in self.model.named_parameters()
        )


def picture(result: Result) -> Any:
    """Draw how many times faster over the number of units, and below it the scripts."""
    _, rows = with_threads(result, max)
    drawing, axes = pictures.figure(2, 1, width=8.0, height=8.5)
    curves, bars = axes[:, 0]
    grid = [row for row in rows if row["part"] == "grid"]
    shapes = dict.fromkeys((row["cell"], row["batch"], row["length"]) for row in grid)
    styles = {"RNN": "-", "GRU": "--", "LSTM": ":"}
    colours = dict(
        zip(dict.fromkeys(shape[1:] for shape in shapes), ("#7e22ce", "#1e40af", "#9a3412", "#166534"), strict=False)
    )
    for cell, batch, length in shapes:
        points = [row for row in grid if (row["cell"], row["batch"], row["length"]) == (cell, batch, length)]
        curves.plot([row["hidden"] for row in points], [row["ratio"]["median"] for row in points], styles[cell],
                    marker=".", color=colours[batch, length], label=f"{cell}, B = {batch}, T = {length}")  # fmt: skip
    curves.axhline(1, color="#888888", linewidth=0.8)
    curves.set_xscale("log", base=2)
    curves.set_yscale("log", base=2)
    curves.set_xlabel("hidden size")
    curves.set_ylabel("times faster than torch.nn")
    curves.legend(fontsize=8, ncols=2)
    others = [row for row in rows if row["part"] != "grid"]
    bars.barh(range(len(others)), [row["ratio"]["median"] for row in others], color="#1e40af")
    bars.set_yticks(range(len(others)), [f"{row['part']}: {row['model']}\nB = {row['batch']}, T = {row['length']}"
                                         for row in others], fontsize=8)  # fmt: skip
    bars.invert_yaxis()
    bars.set_xlabel("times faster than torch.nn")
    return drawing


BENCHMARK = Benchmark(
    name="torch",
    title="Training PyTorch's recurrent models on the CPU, with and without accelerate: float32",
    leaves_out="nothing; a step is forward, cross-entropy, backward and torch's fused Adam, packing among it",
    settings={"targets": TARGETS, "features": 32, "cells": ("RNN", "GRU", "LSTM")},
    sizes={
        "script": {"batch": 32, "length": 300, "batches": 4}, "packed": (100, 1000), "long": 66_000,
        "hidden": (8, 20, 64, 128, 256, 512),
        "shapes": ((16, 10, 512), (16, 100, 512), (16, 1000, 128)),  # B, T, and the largest layer
    },
    quick={
        "script": {"batch": 3, "length": 10, "batches": 2}, "packed": (8,), "long": 40, "hidden": (8,),
        "shapes": ((2, 6, 8),),
    },
    rounds={"rounds": 9, "least_rounds": 5, "budget": 3.0},
    measure=measure,
    columns=(
        Column("part", "part", number=False),
        Column("model", "model", number=False),
        Column("B", "batch"),
        Column("T", "length"),
        Column("threads", "threads"),
        Column("accelerated", "ours", tables.seconds),
        Column("torch.nn", "torch", tables.seconds),
        Column("over torch.nn", "ratio", tables.times),
        Column("accelerate runs", "accelerate", number=False),
        Column("target", "target", lambda value: f"≥ {value:g}×"),
        Column("outcome", "met", number=False),
    ),
    tables={
        "The times of a step": ("part", "model", "batch", "length", "threads", "ours", "torch", "ratio"),
        "What it is to be": ("part", "model", "batch", "length", "threads", "accelerate", "target", "met"),
    },
    short=("part", "model", "batch", "length", "threads", "ours", "torch", "ratio"),
    in_short=lambda row: row["part"] != "grid",
    picture=picture,
)  # fmt: skip
