"""RUNTIME: runs a schedule on one device, in any order that the graph of actions allows."""

from __future__ import annotations

from sparsebp.runtime.candidates import FoundSchedule
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.out_of_order import OutOfOrderExecutor

__all__ = ["Executor", "FoundSchedule", "OutOfOrderExecutor"]


def __dir__() -> list[str]:
    return sorted(__all__)
