"""Counts what a training step asks of the device, on the stand-in for CuPy in a separate process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
LENGTH, BATCH = 64, 16
"""Of the counted step; no count hangs on the length, up to 65 536 rows T·B."""

Counts = dict[str, dict[str, int]]
"""``"launched"`` and ``"captured"``, then what is counted: launches (in a graph: besides it), host reads, uploads…"""


@cache
def step_counts(cell: str, backward: str) -> Counts:
    """Return what a training step of the recurrent classifier asks of the device, in steady state.

    Parameters
    ----------
    cell
        ``"RNN"`` (1 feature) or ``"GRU"`` (38 features), 20 units, the benchmarks' workload.
    backward
        Algorithm of the recurrent layer.
    """
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-m", "device.step_counts", cell, backward]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counts: Counts = json.loads(done.stdout)
    return counts


def _count(cell: str, backward: str) -> Counts:
    import strict_cupy

    strict_cupy.install()
    from benchmarks.workloads import SequenceWorkload
    from sparsebp.runtime.actions import Stages
    from sparsebp.runtime.executor import PlainExecutor
    from sparsebp.train.setup import schedule_of
    from strict_cupy import counted

    found = {}
    for mode, graph in (("launched", False), ("captured", True)):
        workload = SequenceWorkload(cell, LENGTH, BATCH, device="cuda", backward=backward)
        order = schedule_of(Stages(workload.model), "none", 1, "conventional")
        executor = PlainExecutor(workload.model, workload.loss, workload.optimizer, order, graph=graph)
        batch = [(workload.x, workload.target)]
        for number in range(4):
            executor.step(batch, number)
        with counted() as counts:
            executor.step(batch, 4)
        found[mode] = {
            "graphs": counts.graphs,
            "launches": counts.launches,
            "own kernels": counts.ours,
            "host reads": counts.d2h,
            "uploads": counts.h2d,
        }
    return found


if __name__ == "__main__":
    print(json.dumps(_count(*sys.argv[1:])))
