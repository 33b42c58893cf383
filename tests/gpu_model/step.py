"""Counts what a training step asks of the device, on the stand-in for CuPy, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
PARTS = ("forward and loss", "backward", "optimizer")
LENGTH, BATCH = 64, 16
"""Of the counted step; no count hangs on the length."""

Counts = dict[str, dict[str, int]]
"""Part of the step, then what is counted: launches, host reads, uploads, bytes allocated."""


@cache
def step_counts(cell: str, backward: str) -> Counts:
    """Return what a step of the recurrent classifier asks, in steady state: parameters, tables and plans are there.

    Parameters
    ----------
    cell
        ``"RNN"`` (1 feature) or ``"GRU"`` (38 features), 20 units, the benchmarks' workload.
    backward
        Algorithm of the recurrent layer.
    """
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-m", "gpu_model.step", cell, backward]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting a step of {cell} failed:\n{done.stderr}")
    counts: Counts = json.loads(done.stdout)
    return counts


def _count(cell: str, backward: str) -> Counts:
    import strict_cupy

    strict_cupy.install()
    from sparsebp.bench.tools.workload import SequenceWorkload
    from strict_cupy import counted

    workload = SequenceWorkload(cell, LENGTH, BATCH, device="cuda", backward=backward)
    for _ in range(2):
        workload.step()
    with counted() as forward:
        kept = workload.forward()
    with counted() as back:
        gradients = workload.backward(kept)
    with counted() as update:
        workload.optimizer.step(gradients)
    return {
        part: {
            "launches": counts.launches,
            "own kernels": counts.ours,
            "host reads": counts.host_reads,
            "uploads": counts.h2d,
            "bytes allocated": counts.allocated,
        }
        for part, counts in zip(PARTS, (forward, back, update), strict=True)
    }


if __name__ == "__main__":
    print(json.dumps(_count(*sys.argv[1:])))
