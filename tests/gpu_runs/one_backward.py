"""One forward and one backward of each kind at the paper's size, for a profiler to look at; ``--quick``: few steps."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.gpu import Recurrence
from benchmarks.workloads import CELLS, chunk_count
from sparsebp import kernels
from sparsebp.core import backend

LENGTH, BATCH = 1000, 16


def main(length: int = LENGTH) -> None:
    """Run them."""
    cupy = backend.cupy()
    for cell in CELLS:
        run = Recurrence(kernels.get(cupy), cupy, cell, np.float32, length, BATCH)
        for call in (run.forward, run.backward(), run.backward(chunk_count(length))):
            call()
            cupy.cuda.Device().synchronize()
    print("profiled")


if __name__ == "__main__":
    main(9 if "--quick" in sys.argv[1:] else LENGTH)
