"""What a rank of a pipeline does for each action: as on one device, but for what comes from others and goes to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

from sparsebp.core.types import Array
from sparsebp.optim.clip import clip_grad_norm
from sparsebp.runtime.actions import Actions, Run
from sparsebp.runtime.stages import Stages
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.schedule import Kind

Shared: TypeAlias = Callable[[Step], None]


class RankStep(Step):
    """A step, or one micro-batch of an asynchronous one, as a rank of a pipeline has it.

    Attributes
    ----------
    outbox
        What is to be sent: the output of F, or the gradient of I, of a stage and micro-batch.
    """

    __slots__ = ("outbox",)

    def __init__(self, batches: Sequence[Batch], stages: int, tag: Any) -> None:
        super().__init__(batches, stages, tag)
        self.outbox: dict[tuple[Kind, int, int], Array] = {}


class PipelineActions(Actions):
    """The actions of some of the stages.

    Parameters
    ----------
    stages, loss, optimizer, clip_norm, watch
        As for `Actions`.
    own
        The numbers of the stages that this rank has.
    share
        Makes the numbers of a step known to all ranks; before the first update, where all gradients are there by then.
    """

    def __init__(
        self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, watch: Watch, own: Collection[int],
        share: Shared,
    ) -> None:  # fmt: skip
        super().__init__(stages, loss, optimizer, clip_norm, watch)
        self.own, self._share = frozenset(own), share
        held = {name for number in own for name in stages[number].parameters.values()}
        self.names = tuple(name for name in stages.names if name in held)

    def forward(self, number: int, m: int, count: int) -> Run:
        """F; an output that another rank needs goes to the outbox."""
        forward, last = super().forward(number, m, count), number == len(self.stages) - 1
        if number + 1 in self.own or last:
            return forward

        def run(step: Step) -> None:
            forward(step)
            step.outbox["F", number, m] = step.flow[m]  # type: ignore[attr-defined]
            step.flow[m] = None

        return run

    def _behind(self, number: int) -> Any:
        return super()._behind(number) if {number, number + 1} <= self.own else None

    def _loss(self, m: int, count: int) -> Run:
        loss = super()._loss(m, count)

        def run(step: Step) -> None:
            loss(step)
            score = self.watch.score(step.predictions[m], step.batches[m][1])
            step.scores[m] = math.nan if score is None else float(score)  # synchronize!

        return run

    def _place(self, step: Step, m: int, number: int, gy: Array) -> None:
        if number in self.own:
            super()._place(step, m, number, gy)
        else:
            step.outbox["I", number + 1, m] = gy  # type: ignore[attr-defined]

    def receive(self, step: Step, kind: Kind, number: int, m: int, array: Array) -> None:
        """Take the output of the stage before an own one, or the gradient at an own one's output."""
        if kind == "F":
            step.flow[m] = array
        else:
            self._place(step, m, number - 1, array)

    def gather(self, step: Step) -> None:
        """Look at all gradients together, here and on the other ranks, before any of them is used; clip them."""
        grads = step.grads = {name: step.grads[name] for name in self.names}
        if grads:
            self._look(step, grads)
        self._share(step)
        if self.clip_norm is not None and grads:
            clip_grad_norm(grads, self.clip_norm, norm=step.norm(self.stages.names))
