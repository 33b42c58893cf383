"""BENCH: side-by-side benchmarks, ``python -m benchmarks NAME``.

Each measures us and a peer in turn in one run, writes JSON and a picture, and prints the table last:
``bench.load("recurrent").run(quick=True)``. A further one is a module with a ``BENCHMARK``, and a line here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.tools.benchmark import Benchmark

MODULES = {
    "recurrent": "recurrent.training",
    "long-sequences": "recurrent.long_sequences",
    "inference": "recurrent.inference",
    "torch": "torch",
    "scan": "scan",
    "chains": "chains",
    "spgemm": "spgemm.products",
    "spgemm-sweep": "spgemm.sweep",
    "jacobian": "jacobian",
    "convergence": "convergence",
    "pruned": "pruned",
    "optim": "optim",
    "fusion": "fusion",
    "convolution": "convolution",
    "schedule": "schedule",
    "busy": "busy",
    "estimates": "estimates",
    "time-parallel": "ranks.time_parallel",
    "data-parallel": "ranks.data_parallel",
    "spectrain": "spectrain",
    "scaling": "scaling",
    "scaling-papers": "scaling.papers",
    "scaling-measured": "scaling.measured",
    "gpu-numbers": "gpu.numbers",
    "gpu-grid": "gpu.grid",
    "gpu-graphs": "gpu.graphs",
}
"""The benchmarks and their modules; those whose names begin with ``gpu`` are for a GPU."""

NAMES = tuple(MODULES)


def load(name: str) -> Benchmark:
    """Import and return the benchmark `name`, one of `NAMES`."""
    found: Benchmark = import_module(f"benchmarks.{MODULES[name]}").BENCHMARK
    return found
