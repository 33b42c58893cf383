"""Measuring what a model's actions cost, during training steps that count as any other."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Iterator
from typing import Any

from sparsebp import threads
from sparsebp.schedule import Action, Costs, StageBytes
from sparsebp.train.actions import Step
from sparsebp.train.program import Task
from sparsebp.train.stages import Stages

WARM, MEASURED = 1, 3
"""Steps before the clock runs (plans, buffers), and steps that are measured."""


class Profile:
    """Collects durations and bytes of every action while an executor of one stream runs steps.

    Parameters
    ----------
    stages
        Those of the model.
    """

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.steps = 0
        self._seconds: dict[Action, list[float]] = {}
        self._bytes: dict[int, StageBytes] = {}

    @property
    def complete(self) -> bool:
        """Whether enough steps have been seen."""
        return self.steps >= WARM + MEASURED

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step: on one core, as each of two streams has it."""
        with threads.one_blas_thread(), threads.serial_kernels():
            yield
        self.steps += 1

    def __call__(self, task: Task, step: Step, seconds: float) -> None:
        """Note what a task has taken, and of a forward, what it left."""
        if task.action is None or self.steps < WARM:
            return
        self._seconds.setdefault(task.action, []).append(seconds)
        if task.action.kind == "F" and task.action.stage not in self._bytes:
            number, m = task.action.stage, task.action.microbatch or 0
            output = step.predictions[m] if step.flow[m] is None else step.flow[m]
            kept = (step.for_input[m][number], step.for_weights[m][number])
            weights = sum(array.nbytes for array in self.stages[number].layer.parameters().values())
            self._bytes[number] = StageBytes(output.nbytes, _bytes(kept, set()), weights)

    def costs(self) -> Costs:
        """Return medians of the durations in seconds, and bytes; an action that no step needs takes no time."""
        durations: dict[Any, float] = {"F": 0.0, "I": 0.0, "W": 0.0, "U": 0.0}
        durations |= {action: statistics.median(seconds) for action, seconds in self._seconds.items()}
        return Costs(durations, tuple(self._bytes[number] for number in range(len(self.stages))))


def _bytes(kept: Any, seen: set[int]) -> int:
    """Return the bytes of all arrays within what a layer saved."""
    if id(kept) in seen:
        return 0
    seen.add(id(kept))
    if hasattr(kept, "nbytes"):
        return int(kept.nbytes)
    if dataclasses.is_dataclass(kept) and not isinstance(kept, type):
        kept = vars(kept)
    if isinstance(kept, dict):
        kept = kept.values()
    elif not isinstance(kept, list | tuple):
        return 0
    return sum(_bytes(entry, seen) for entry in kept)
