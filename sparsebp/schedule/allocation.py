"""The stages of each worker: contiguous chunks."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebp.core.errors import OptionError
from sparsebp.schedule.schedule import Action, StepGraph, trusted


@dataclass(frozen=True)
class Partition:
    """The stages of a graph in `chunks` contiguous parts of nearly equal size; chunk c is on worker c mod `workers`."""

    graph: StepGraph
    workers: int
    chunks: int
    input_gradient: bool = True

    def __post_init__(self) -> None:
        if self.graph.stages < self.chunks:
            raise OptionError("There are too few stages", expected=f"{self.chunks} or more", got=self.graph.stages,
                              remedy="Use fewer workers or chunks, or cut the model into more stages")  # fmt: skip

    def stages(self, chunk: int) -> range:
        """Return the stages of a chunk."""
        return range(chunk * self.graph.stages // self.chunks, (chunk + 1) * self.graph.stages // self.chunks)

    def allocation(self) -> tuple[int, ...]:
        """Return the worker of every stage."""
        return tuple(chunk % self.workers for chunk in range(self.chunks) for _ in self.stages(chunk))

    def cells(self, kind: str, chunk: int, microbatch: int) -> list[Action]:
        """Return all F, I, W, B or U of a chunk and micro-batch: F in the order of the stages, others in reverse."""
        if kind == "F":
            return [trusted(stage, "F", microbatch) for stage in self.stages(chunk)]
        cells = (self._cell(kind, stage, microbatch) for stage in reversed(self.stages(chunk)))
        return [cell for cell in cells if cell is not None]

    def _cell(self, kind: str, stage: int, microbatch: int) -> Action | None:
        weighted, differentiable = self.graph.weighted(stage), stage > 0 or self.input_gradient
        if kind == "B" and not (weighted and differentiable):
            kind = "W" if weighted else "I"
        if (kind in "WU" and not weighted) or (kind == "I" and not differentiable):
            return None
        return trusted(stage, kind, microbatch)  # type: ignore[arg-type]
