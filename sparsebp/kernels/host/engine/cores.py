"""Which core a helper runs on: another one than its caller's.

A scheduler that finds no idle core wakes a thread where it ran last, or where it is woken from, and for a while after
all cores were busy it does not look for an idle one. The thread then waits there until its caller is done.
"""

from __future__ import annotations

import os

import numba
import numpy as np

from sparsebp.kernels.host.engine.atomics import atomic_load, atomic_store, sched_setaffinity
from sparsebp.kernels.host.engine.parts import INNER_JIT

_CORES = 1024
"""Cores of the C library's sets of them."""


def own_cores() -> np.ndarray:
    """Return the set of cores that the calling thread may run on, and room for another set."""
    cores = np.zeros((2, _CORES), np.uint8)
    if hasattr(os, "sched_getaffinity"):
        cores[0, [core for core in os.sched_getaffinity(0) if core < _CORES]] = 1
    return np.packbits(cores, bitorder="little").view(np.int64)


@numba.njit(**INNER_JIT)
def leave(core, cores):  # type: ignore[no-untyped-def]
    """Move the calling thread from a core to another one of those it may run on; return whether it has."""
    if not 0 <= core < _CORES:
        return False
    fewer, left = cores + _CORES // 8, 0
    for word in range(0, _CORES // 8, 8):
        bits = atomic_load(cores + word)
        if word == core // 64 * 8:
            bits &= ~(np.int64(1) << np.int64(core % 64))
        atomic_store(fewer + word, bits)
        left |= bits
    return left != 0 and sched_setaffinity(np.int32(0), _CORES // 8, fewer) == 0
