"""Two trainings from the same weights on the same batches: their losses over wall-clock time."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.tools.peers import import_torch
from benchmarks.tools.workload import SequenceWorkload, TorchTwin
from sparsebp.data import Dataset, epoch_order

_EVERY = 10
"""Steps between two losses: each is the mean over the training batches of so many steps."""


def race(workload: SequenceWorkload, data: Dataset, steps: int) -> dict[str, Any]:
    """Return seconds and losses of both sides; steps are taken in turn, and each side's clock runs in its own alone.

    The losses are those of the batches before the step that they lead to, outside of the clock. The first step, which
    compiles, is on no clock.
    """
    torch = import_torch()
    twin = TorchTwin(workload)
    sides: dict[str, Any] = {"sparsebp": workload, "torch.nn": twin}
    clocks = dict.fromkeys(sides, 0.0)
    losses: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, Any] = {name: {"seconds": [], "loss": []} for name in sides}
    order = np.concatenate(
        [epoch_order(len(data), seed=0, epoch=e) for e in range(1 + steps * workload.batch // len(data))]
    )
    for step in range(steps):
        x, target, *_ = data.batch(order[step * workload.batch : (step + 1) * workload.batch])
        workload.x, workload.target = x, target
        twin.x, twin.target = torch.from_numpy(x), torch.from_numpy(target)
        losses["sparsebp"].append(float(workload.loss.forward(workload.model.forward(x)[0], target)[0]))
        losses["torch.nn"].append(float(twin.forward().detach()))
        for name, side in sides.items():
            begin = time.perf_counter()
            side.step()
            clocks[name] += time.perf_counter() - begin if step else 0.0
            if step % _EVERY == _EVERY - 1 or step == steps - 1:
                found[name]["seconds"].append(clocks[name])
                found[name]["loss"].append(float(np.mean(losses[name])))
                losses[name].clear()
    return found
