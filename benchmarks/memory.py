"""The memory of a rank that trains its own stages of a pipeline, with checkpoints, evaluation and Adam.

``python -m benchmarks memory``. The resident memory of each process over what it has before the model is built, at most
(Linux: ``VmHWM``), against that of one worker divided by the ranks.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Benchmark, Row, Run, columns
from benchmarks.processes import on_ranks
from sparsebp import nn, optim
from sparsebp.comm.transport import Transport
from sparsebp.core.tables import Column
from sparsebp.train import Trainer

MOST = 1.15
"""Of one worker's memory divided by the ranks; the activations of a stage come on top."""


def measure_memory(run: Run) -> Iterator[Row]:
    """Measure every grid, with models that are built by stage, and the pipelines with whole models too."""
    sizes = {key: run.settings[key] for key in ("width", "depth", "batch", "microbatches")}
    for built in ("by stage", "whole"):
        whole = 0
        for ranks, replicas, sharded in run.settings["grids"]:
            if built == "whole" and replicas > 1:
                continue
            grid: dict[str, Any] = {"replicas": replicas, "sharded": sharded}
            found = on_ranks(ranks, memory_of_rank, **grid, deferred=built == "by stage", **sizes)
            most, stages = max(found["peak"]), ranks // replicas
            whole = whole or most
            limit = MOST * whole / stages + found["activations"]
            row: Row = {"ranks": ranks, "replicas": replicas, "sharded": sharded, "built": built, "most_bytes": most,
                        "weights_bytes": found["weights"], "share": most / (whole / stages),
                        "activations_bytes": found["activations"]}  # fmt: skip
            if built == "by stage" and ranks > 1 and replicas == 1:
                row |= {"target": f"≤ {limit / 2**20:.0f} MiB", "met": "met" if most <= limit else "missed"}
            yield row


def memory_of_rank(
    transport: Transport, width: int, depth: int, batch: int, microbatches: int, replicas: int, sharded: bool,
    deferred: bool,
) -> dict[str, Any]:  # fmt: skip
    """Train a small model, then the model, and return the memory of every rank."""
    _train(transport, 8, depth, batch, microbatches, replicas, sharded, deferred)  # compiles
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    weights = _train(transport, width, depth, batch, microbatches, replicas, sharded, deferred)
    peak = transport.share(_resident("VmHWM") - before)
    # A stage's input of every micro-batch, and the outputs of its two layers of one.
    return {"peak": peak, "weights": weights, "activations": 4 * width * (batch + 2 * batch // microbatches)}


def _train(
    transport: Transport, width: int, depth: int, batch: int, microbatches: int, replicas: int, sharded: bool,
    deferred: bool,
) -> int:  # fmt: skip
    with nn.deferred_init() if deferred else contextlib.nullcontext():
        layers = [nn.Stage(nn.Linear(width, width, rng=number), nn.Tanh()) for number in range(depth - 1)]
        model = nn.Sequential(*layers, nn.Linear(width, width, rng=depth))
    alone = transport.size == 1
    options: dict[str, Any] = {} if alone else {"transport": transport, "schedule": "1f1b", "replicas": replicas}
    options |= {"sharded": True} if sharded else {}
    rng = np.random.default_rng(0)
    x, target = rng.standard_normal((2 * batch, width)).astype(np.float32), rng.integers(0, width, 2 * batch)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, nn.CrossEntropyLoss(), optim.Adam(model.parameters()), accumulate=microbatches, rng=0,
                          checkpoint_dir=folder, **options)  # fmt: skip
        trainer.fit((x, target), epochs=2, batch_size=batch, validation=(x[:batch], target[:batch]), verbose=False)
        if deferred or transport.rank == 0:
            trainer.evaluate((x, target))
    return sum(array.size * array.itemsize for array in model.parameters().values())


def _resident(key: str) -> int:
    """Return a number of bytes that the system tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


MEMORY = Benchmark(
    name="memory",
    title="Memory of a rank of a pipeline: {depth} layers of {width}, float32, Adam, {microbatches} micro-batches",
    leaves_out="Python, its modules and compiled kernels",
    settings={"schedule": "1f1b"},
    # of grids: ranks, how many pipelines they are, and whether these shard the optimizer's state
    sizes={
        "width": 1400, "depth": 16, "batch": 64, "microbatches": 4,
        "grids": ((1, 1, False), (2, 1, False), (4, 1, False), (4, 2, False), (4, 2, True)),
    },
    quick={
        "width": 64, "depth": 8, "batch": 16, "microbatches": 2,
        "grids": ((1, 1, False), (2, 1, False), (4, 2, True)),
    },
    threads=None,
    measure=measure_memory,
    columns=columns(
        Column("pipelines", "replicas"), Column("state", "sharded", lambda value: "sharded" if value else "whole"),
        Column("most memory of a rank", "most_bytes", _mebibytes),
        Column("× one worker ÷ stages' ranks", "share", lambda value: f"{value:.2f}"),
        Column("weights of the whole model", "weights_bytes", _mebibytes),
        Column("activations of a stage", "activations_bytes", _mebibytes),
        words={"built": "model"},
    ),
    short=("built", "ranks", "replicas", "sharded", "most_bytes", "share", "target", "met"),
    picture=harness.bars(
        "{built}, ranks {ranks}, pipelines {replicas}, sharded {sharded}",
        {"most_bytes": "most memory of a rank", "weights_bytes": "weights of the whole model"}, "MiB", unit=2.0**-20,
    ),
)  # fmt: skip
