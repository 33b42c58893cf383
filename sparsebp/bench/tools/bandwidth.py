"""What the memory of this machine can do: the rate at which large arrays are copied."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

_SIZE = 1 << 27
"""Bytes of each array: several times the last cache."""


@cache
def copy_bandwidth(threads: int, repeats: int = 7) -> float:
    """Return the bytes a second that `threads` threads read and write while they copy, the best of `repeats`."""
    source, target = np.ones(_SIZE // 8), np.ones(_SIZE // 8)
    halves = [*zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)]
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            begin = time.perf_counter()
            for done in [pool.submit(np.copyto, *half) for half in halves]:
                done.result()
            best = min(best, time.perf_counter() - begin)
    return 2 * _SIZE / best
