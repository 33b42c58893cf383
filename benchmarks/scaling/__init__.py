"""Schedules on 8 to 4096 workers, simulated: ``python -m benchmarks scaling``, ``scaling-papers``."""

from benchmarks.scaling.workers import BENCHMARK

__all__ = ["BENCHMARK"]
