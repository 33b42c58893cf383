"""Rates of the host, measured."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from sparsebp import kernels
from sparsebp.backend.machine import Machine, machine


def calibrated(repeats: int = 3) -> Machine:
    """Return the host with measured rates: one batched dense product and one call that does nothing (some 10 ms).

    Parameters
    ----------
    repeats
        Each measurement is the fastest of this many.
    """
    k = kernels.get(np)
    size, batch, count = 20, 16, 64
    rng = np.random.default_rng(0)
    a = rng.standard_normal((count, size, size, batch), dtype=np.float32)
    out, index = np.empty_like(a), np.arange(count)
    none = index[:0]
    flops = 2.0 * count * size**3 * batch

    def fastest(chosen: np.ndarray) -> float:
        k.dense_matmul(a, chosen, a, chosen, out, chosen)  # compiled and warm
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            k.dense_matmul(a, chosen, a, chosen, out, chosen)
            times.append(time.perf_counter() - start)
        return min(times)

    call, busy = fastest(none), fastest(index)
    base = machine(np)
    per_worker = flops / max(busy - call, 1e-7) / base.workers
    return replace(base, flops=per_worker, call=call, source="measured: calibrated()")
