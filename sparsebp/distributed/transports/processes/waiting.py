"""Waiting without a busy core: MPI's own waiting calls would take one a rank, which the other ranks may need."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SPIN_SECONDS = 1e-4  # a message of a neighbour's that is nearly here; shorter than the shortest sleep pays
MOST_SECONDS = 1e-3


def until(ready: Callable[[], bool], meanwhile: Callable[[float], None]) -> float:
    """Return, when `ready`, how many seconds that took; between two questions call ``meanwhile(seconds)``, and sleep.

    The sleep grows with what has been waited, so that it adds an eighth at most.
    """
    began = time.perf_counter()
    while not ready():
        waited = time.perf_counter() - began
        meanwhile(waited)
        if waited < SPIN_SECONDS:
            os.sched_yield()  # to another rank on this core
        else:
            time.sleep(min(waited / 8, MOST_SECONDS))
    return time.perf_counter() - began
