"""BENCH: side-by-side benchmarks, ``python -m benchmarks NAME``.

Each measures us and a peer in turn in one run, writes JSON and a picture, and prints the table last:
``benchmarks.load("recurrent").run(quick=True)``. A further one is a `Benchmark` in a module, and its name here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.harness import Benchmark

MODULES = {
    "recurrent": "recurrent", "long-sequences": "recurrent", "inference": "recurrent", "torch": "recurrent",
    "scan": "scan", "chains": "scan", "linear": "linear", "spgemm": "spgemm", "spgemm-sweep": "spgemm",
    "filters": "filters",
    "factor": "factor", "factor-kinds": "factor_kinds", "solvers": "solvers", "kept-pattern": "kept_pattern",
    "function-jacobian": "functions", "derivatives": "derivatives", "least-squares": "fits",
    "sparse-grad": "sparse_grad",
    "jacobian": "jacobians", "convergence": "training", "pruned": "jacobians", "optim": "training",
    "fusion": "training", "convolution": "training", "layers": "layers", "schedule": "schedules", "busy": "schedules",
    "time-parallel": "ranks", "data-parallel": "ranks", "memory": "memory", "spectrain": "schedules",
    "scaling": "scaling", "scaling-papers": "scaling", "scaling-measured": "scaling", "bubbles": "bubbles",
    "vanishing": "vanishing", "others": "others", "others-speech": "others", "one-step": "one_step",
    "thresholds": "thresholds", "choices": "thresholds", "sharing": "thresholds",
    "gpu-numbers": "gpu", "gpu-grid": "gpu", "gpu-graphs": "gpu",
    "gpu-peers": "gpu_peers",
}  # fmt: skip
"""The benchmarks and their modules; those whose names begin with ``gpu`` are for a GPU."""

NAMES = tuple(MODULES)


def load(name: str) -> Benchmark:
    """Import and return the benchmark `name`, one of `NAMES`: the object of that name, in capitals, of its module."""
    found: Benchmark = getattr(import_module(f"benchmarks.{MODULES[name]}"), name.upper().replace("-", "_"))
    return found
