"""Asks the stand-in for CuPy, in a process of its own: what a training step costs, what ``auto`` chooses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

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
    counts: Counts = _in_a_process_of_its_own("count", cell, backward)
    return counts


@cache
def chosen_chunks(cell: str, length: int) -> int:
    """Return how many chunks ``auto`` takes on the device that the stand-in stands for, an H200; 1: the recursion."""
    return int(_in_a_process_of_its_own("chunks", cell, str(length)))


def _in_a_process_of_its_own(*arguments: str) -> Any:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    command = [sys.executable, "-m", "gpu_model.step", *arguments]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _chunks(cell: str, length: str) -> int:
    import strict_cupy

    cupy = strict_cupy.install()
    from sparsebp.bench.tools.workload import CELLS
    from sparsebp.scan.planning.recurrent import choose_recurrent_backward

    features, hidden = CELLS[cell.upper()]
    return choose_recurrent_backward(cell, int(length), BATCH, hidden, xp=cupy, input_size=features).chunks


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
    what, *of = sys.argv[1:]
    print(json.dumps(_count(*of) if what == "count" else _chunks(*of)))
