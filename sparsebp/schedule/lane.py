"""A lane of a schedule: what one stream of one worker does, in order."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebp.schedule.actions import Cell


@dataclass(frozen=True)
class Lane:
    """What one stream of one worker runs, in order.

    Attributes
    ----------
    worker
        Number of the worker (device, rank), from 0.
    stream
        Its name: ``"main"``, ``"sub"`` (a second stream of the same device), ``"link"`` (the worker's network).
    cells
        Actions, and overlaps of two.
    """

    worker: int
    stream: str
    cells: tuple[Cell, ...]

    def __str__(self) -> str:
        return f"worker {self.worker}, {self.stream}"
