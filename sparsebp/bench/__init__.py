"""BENCH: side-by-side benchmarks, ``sparsebp bench NAME``.

Each measures us and a peer in turn in one run, writes JSON and a picture, and prints the table last:
``bench.load("recurrent").run(quick=True)``. A further one is a module with a ``BENCHMARK``, and its name here;
``gpu-grid`` is ``grid`` in the folder ``gpu``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsebp.bench.tools.benchmark import Benchmark

NAMES = (
    "recurrent", "torch", "scan", "spgemm", "jacobian", "convergence", "pruned", "optim", "fusion", "schedule", "busy",
    "estimates", "time-parallel", "data-parallel", "spectrain", "scaling", "scaling-papers", "scaling-measured",
    "gpu-numbers", "gpu-grid", "gpu-graphs",
)  # fmt: skip
"""The benchmarks, each a module of this name; those that begin with ``gpu`` are for a GPU."""


def load(name: str) -> Benchmark:
    """Import and return the benchmark `name`, one of `NAMES`."""
    module = name.replace("-", "." if name.startswith(("gpu-", "scaling-")) else "_")
    found: Benchmark = import_module(f"sparsebp.bench.{module}").BENCHMARK
    return found
