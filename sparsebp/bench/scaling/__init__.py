"""Schedules on 8 to 4096 workers, simulated: ``sparsebp bench scaling``, and beside the papers ``scaling-papers``."""

from sparsebp.bench.scaling.workers import BENCHMARK

__all__ = ["BENCHMARK"]
