"""A check shared by many tests: results do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from sparsebp.core.threads import get_threads, most_threads, serial_kernels, set_threads


def assert_same_for_any_number_of_threads(run: Callable[[], Iterable[np.ndarray]]) -> None:
    """Results of `run` are bitwise equal with one thread, with all threads, and with kernels that start none."""
    found, before = [], get_threads()
    try:
        for threads in (1, most_threads()):
            set_threads(threads)
            found.append(list(run()))
    finally:
        set_threads(before)
    with serial_kernels():
        found.append(list(run()))
    for results in found[1:]:
        for first, other in zip(found[0], results, strict=True):
            np.testing.assert_array_equal(other, first)
