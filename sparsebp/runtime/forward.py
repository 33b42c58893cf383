"""The forward of a model whose stages are on several ranks: batches follow each other from rank to rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sparsebp.comm.transport import Transport
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.shortcuts import forward_of
from sparsebp.nn.modes import inference_mode
from sparsebp.runtime.actions import Batch, Stages, options_of
from sparsebp.runtime.pipeline import P2PBuffers
from sparsebp.schedule import Action
from sparsebp.schedule.lowering import Message


class ForwardPipeline:
    """Runs batches through the stages, each on its rank; all ranks call it with the same batches."""

    # owners: The rank of every stage. A rank is at most one batch ahead of the next one.

    def __init__(self, stages: Stages, owners: Sequence[int], transport: Transport) -> None:
        self._stages, self._owners, self._rank = stages, owners, transport.rank
        xp = backend.namespace(next(iter(stages.model.parameters().values())))
        self._p2p = P2PBuffers(transport, xp, stages.stashed)

    @property
    def last(self) -> int:
        """The rank that has the outputs."""
        return self._owners[-1]

    def run(self, batch: Batch) -> Array | None:
        """Return the output of a batch on the last stage's rank, None elsewhere."""
        x: Any = batch[0]
        options = options_of(batch)
        self._p2p.begin([tuple((part.shape, part.dtype.str) for part in (x, *batch[2:3]) if part is not None)])
        for number, owner in enumerate(self._owners):
            if owner != self._rank:
                continue
            if number and self._owners[number - 1] != owner:
                message = self._message(number - 1)
                self._p2p.post(message)
                x = self._p2p.take(message)
            x = self._forward(number, x, options)
            if number + 1 < len(self._owners) and self._owners[number + 1] != owner:
                self._p2p.send(self._message(number), x)
        self._p2p.end()
        return x if self.last == self._rank else None

    def _forward(self, number: int, x: Array, options: Mapping[str, Any]) -> Array:
        given = options if options and number in self._stages.taking_lengths else {}
        with inference_mode():
            return forward_of(self._stages[number].layer, x, **given)[0]

    def _message(self, number: int) -> Message:
        return Message(Action(number, "F", 0), self._owners[number], self._owners[number + 1], number)
