"""What steps leave on a device is read one step late: the device never waits for the host to look.

The numbers of a step are on their way to the host when its work has been given to the device, and are looked at when
that of the next step has been given, too. By then parameters have had one more update.
"""

from __future__ import annotations

import math
from collections import deque
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.backend.reading import Reading
from sparsebp.runtime.step import Step, Watch


class LateSteps:
    """The steps of an executor that wait to be looked at, in their order.

    Parameters
    ----------
    xp
        The namespace of the model's arrays.
    loss
        Its ``forward`` says what is wrong with a target.
    watch
        Is told of losses and of gradients that are not finite.
    """

    def __init__(self, xp: ModuleType, loss: Any, watch: Watch) -> None:
        self._xp, self._loss, self._watch = xp, loss, watch
        self._steps: deque[tuple[Step, Reading | None]] = deque()
        self._looked_at: list[Step] = []

    @property
    def waiting(self) -> bool:
        """Whether there are any."""
        return bool(self._steps or self._looked_at)

    def exchange(self, steps: list[Step]) -> list[Step]:
        """Take steps whose work is all given to the device; return those that another one has been given after.

        Raises
        ------
        Exception
            What is wrong with one that is looked at. Those after it are forgotten; `drain` returns those before it.
        """
        if not self.waiting and all(step.later is None for step in steps):
            return steps
        for step in steps:
            self._steps.append((step, self._reading(step)))
        left = 0  # those at the end whose numbers may still be computed
        while left < max(1, len(steps)) and left < len(self._steps) and self._steps[-1 - left][1] is not None:
            left += 1
        return self._look(len(self._steps) - left)

    def drain(self) -> list[Step]:
        """Return all steps, after waiting for their numbers.

        Raises
        ------
        Exception
            As `exchange`.
        """
        return self._look(len(self._steps))

    def forget(self) -> None:
        """Give up what waits."""
        self._steps.clear()
        self._looked_at = []

    def _reading(self, step: Step) -> Reading | None:
        if step.later is None:
            return None
        return Reading(step.later.packed(self._xp) if step.packed is None else step.packed)

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
        """Write the numbers of a step to their places, and say what is wrong with them."""
        step.later.unpack(numbers, step)  # type: ignore[union-attr]
        step.packed, step.update, step.flow = None, None, []
        for m, value in enumerate(step.values):
            if not math.isfinite(value):
                self._loss.forward(step.predictions[m], step.batches[m][1])  # says if it is the target's fault
            self._watch.loss(step, m, value)
        wrong = {name: np.float64(square) for name, square in step.squares.items() if not math.isfinite(square)}
        if wrong:
            self._watch.gradients(step, wrong)
