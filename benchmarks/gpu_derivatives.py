"""Compiled derivatives of NumPy functions on a GPU, compared with the host's loops: rows of ``gpu-numbers``.

A call ends when the host knows whether all values are finite, so calls are timed without the queue.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

import sparsebp as sb
from benchmarks.gpu_timing import measured, ratio
from benchmarks.harness import Row, refuse_difference
from sparsebp.core import backend


class DerivativePoint(NamedTuple):
    """The Hessian of a chained Rosenbrock function of so many variables, float64."""

    what: str
    size: int
    batch: int = 1


def rosenbrock(x: Any) -> Any:
    return np.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2)


def measure_derivative(point: DerivativePoint, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time the values on the device and on the host, after comparing them."""
    here = np.random.default_rng(0).standard_normal(point.size)
    there, hessian = xp.asarray(here), sb.sparse_hessian(rosenbrock, here, compiled=True)
    sides = {"time": partial(hessian.values, there), "host_loops": partial(hessian.values, here)}
    for _ in range(2):  # the first call is interpreted
        ours, expected = (backend.to_host(side()) for side in sides.values())
    refuse_difference("The Hessian", "the host's", abs(ours - expected).max() / abs(expected).max())
    found = measured(sides, xp, rounds, queue=False)
    return {"strategy": hessian.describe().split(": ")[1], **found,
            "host_loops_ratio": ratio(found["host_loops"], found["time"])}  # fmt: skip
