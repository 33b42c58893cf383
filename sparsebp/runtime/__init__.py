"""Runs schedules on one device or several ranks, in any order that the graph of actions allows."""

from __future__ import annotations

from sparsebp.runtime.executor import Executor, PlainExecutor
from sparsebp.runtime.search import FoundSchedule, OutOfOrderExecutor

__all__ = ["Executor", "FoundSchedule", "OutOfOrderExecutor", "PlainExecutor"]


def __dir__() -> list[str]:
    return sorted(__all__)
