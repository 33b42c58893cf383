"""Steps whose metrics are read one step late, so that a device never waits for the host."""

from __future__ import annotations

import math
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.graphs import Reading
from sparsebp.runtime.actions import Observer, Step

# Metrics of a step on a device are read one step late, so the device never waits for the host: they are on their way to
# the host when the step's work has been given to the device, and are checked when the next step's has been given, too.
# By then parameters have had one more update.


class DeferredSteps:
    """The steps of an executor whose metrics have not been checked, in their order."""

    def __init__(self, xp: ModuleType, loss: Any, observer: Observer) -> None:
        self._xp, self._loss, self._observer = xp, loss, observer
        self._steps: deque[tuple[Step, Reading | None]] = deque()
        self._looked_at: list[Step] = []

    @property
    def waiting(self) -> bool:
        """Whether any steps are pending."""
        return bool(self._steps or self._looked_at)

    def exchange(self, steps: list[Step]) -> list[Step]:
        """Take steps whose work is all given to the device; return earlier ones, checked."""
        if not self.waiting and all(step.later is None for step in steps):
            return steps
        for step in steps:
            metrics = step.later and (step.later.packed(self._xp) if step.packed is None else step.packed)
            self._steps.append((step, None if metrics is None else Reading(metrics)))
        left = 0  # steps at the end whose numbers may still be computed
        while left < max(1, len(steps)) and left < len(self._steps) and self._steps[-1 - left][1] is not None:
            left += 1
        return self._look(len(self._steps) - left)

    def drain(self) -> list[Step]:
        """Return all steps, after waiting for their numbers."""
        return self._look(len(self._steps))

    def forget(self) -> None:
        """Drop all steps."""
        self._steps.clear()
        self._looked_at = []

    def _look(self, count: int) -> list[Step]:
        for _ in range(count):
            step, reading = self._steps[0]
            if reading is not None:
                numbers = reading()
                try:
                    self._look_at(step, numbers)
                except Exception:  # after an interrupt it is looked at again
                    self._steps.clear()
                    raise
            self._looked_at.append(self._steps.popleft()[0])
        known, self._looked_at = self._looked_at, []
        return known

    def _look_at(self, step: Step, numbers: np.ndarray) -> None:
        """Write the numbers of a step to their places, and raise errors about them."""
        step.later.unpack(numbers, step)  # type: ignore[union-attr]
        step.packed, step.update, step.flow = None, None, []
        for m, value in enumerate(step.values):
            if not math.isfinite(value):
                self._loss.forward(step.predictions[m], step.targets[m])  # tells whether the target is at fault
            self._observer.loss(step, m, value)
        wrong = {name: np.float64(square) for name, square in step.squares.items() if not math.isfinite(square)}
        if wrong:
            self._observer.gradients(step, wrong)
