"""What a replica does for each action of its schedule, beside what one worker does: it shares, sends and waits."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.distributed.agreement import check_marks, mark_of, options_of
from sparsebp.distributed.data_parallel.buckets import Buckets
from sparsebp.distributed.transport import Handle, Transport
from sparsebp.nn.draws import Rows, rows_of
from sparsebp.runtime.actions import Actions, Run
from sparsebp.runtime.stages import Stages, is_ours
from sparsebp.runtime.step import Batch, Step, Watch


class Totals:
    """What a step has in common on all ranks: how many samples, then the mean loss and score over all of them."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.host: Transport = getattr(transport, "host", transport)  # NCCL's carries no arrays of the host
        self._counts = np.empty((0, transport.size))  # samples of every micro-batch on every rank, below the marks
        self._under_way: Handle | None = None  # until they are known
        self._told: dict[int, tuple[Handle, Array, bool | None]] = {}  # by the identity of a step that is under way

    def open(self, batches: Sequence[Batch], optimizer: Any) -> None:
        """Begin to count the samples of a step on all ranks, and to compare the options of the optimizer."""
        self._counts = np.zeros((1 + len(batches), self.transport.size))
        own = [len(batch[1]) for batch in batches]
        self._counts[:, self.transport.rank] = [mark_of(options_of(optimizer)), *own]
        self._under_way = self.host.allreduce(self._counts)

    def samples(self, m: int) -> list[int]:
        """Return how many samples of a micro-batch of this step each rank has."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
            check_marks(self._counts[0].tolist())
            if not self._counts[1:].any():
                raise OptionError("A step has no samples", expected="at least one, on some rank", got="none on any",
                                  remedy="Leave the step out")  # fmt: skip
        return [int(count) for count in self._counts[1 + m]]

    def share(self, step: Step) -> None:
        """Make the step's shares those in the samples of all ranks."""
        ranks = [self.samples(m) for m in range(len(step.batches))]
        total = sum(map(sum, ranks))
        step.shares = [samples[self.transport.rank] / total for samples in ranks]

    def rows(self, m: int) -> Rows:
        """Return which samples of a micro-batch of all ranks this one has."""
        samples, rank = self.samples(m), self.transport.rank
        return Rows(sum(samples[:rank]), samples[rank], sum(samples))

    def tell(self, step: Step) -> None:
        """Begin to sum loss and score over all ranks, when this one has all of its own."""
        there = [m for m, share in enumerate(step.shares) if share]
        values: Any = step.values if step.later is None else step.later.losses
        scores: Any = step.scores if step.later is None else step.later.scores
        scored = [m for m in there if (m in scores if step.later is not None else scores[m] is not None)]
        xp = np if step.later is None else backend.namespace(step.batches[0][1])
        sums = xp.zeros(3, np.float64)
        for m in there:
            sums[0] += step.shares[m] * values[m]
        for m in scored:
            sums[1] += step.shares[m] * scores[m]
        sums[2] = len(scored)
        transport = self.host if step.later is None else self.transport
        self._told[id(step)] = transport.allreduce(sums), sums, bool(scored) if there else None

    def close(self, step: Step) -> None:
        """Write the sums over all ranks to the step: each micro-batch then has the loss and score of all together."""
        told = self._told.pop(id(step), None)
        if told is None:
            return
        handle, sums, scored = told
        handle.wait()
        count = len(step.batches)
        step.shares = [1.0] + [0.0] * (count - 1)  # of equal numbers
        if step.later is not None:
            step.later.losses = dict.fromkeys(range(count), sums[0])
            if scored is None:  # no samples here: the others know whether there are scores; without, it is 0 / 0
                scored, sums[1] = True, sums[1] / sums[2].clip(0, 1)
            step.later.scores = dict.fromkeys(range(count), sums[1]) if scored else {}
            return
        loss, score, number = sums.tolist()
        step.values, step.scores = [loss] * count, [score if number else None] * count

    def forget(self) -> None:
        """Give up what is under way."""
        self._under_way = None
        self._told.clear()


class ReplicaActions(Actions):
    """`Actions` of one of several replicas; micro-batches of which this rank has no samples are passed over.

    Parameters
    ----------
    stages, loss, optimizer, clip_norm, watch
        As `Actions` takes them.
    buckets
        Where gradients are summed.
    totals
        The samples and the loss of all ranks.
    """

    def __init__(
        self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, watch: Watch, *,
        buckets: Buckets, totals: Totals,
    ) -> None:  # fmt: skip
        super().__init__(stages, loss, optimizer, clip_norm, watch)
        self.buckets, self.totals = buckets, totals
        self._holders = Counter(name for stage in stages.all for name in set(stage.parameters.values()))
        self._ended = 0  # micro-batches whose loss is there
        self._left: dict[str, int] = {}  # of each parameter, how many W its gradient still lacks

    def forward(self, number: int, m: int, count: int) -> Run:
        """F; the last stage's tells the others of the loss."""
        run = self._drawing(number, m, _unless_empty(super().forward(number, m, count), m))
        if number < len(self.stages) - 1:
            return run

        def last(step: Step) -> None:
            self.totals.share(step)
            run(step)
            if len(step.batches[m][1]) and step.later is None:
                score = self.watch.score(step.predictions[m], step.batches[m][1])
                step.scores[m] = None if score is None else float(score)
            if m == count - 1 and step.update is None:  # the last micro-batch is empty
                step.update = self.optimizer.begin()
            self._ended += 1
            if self._ended == len(step.batches):
                self._ended = 0
                self.totals.tell(step)

        return last

    def _drawing(self, number: int, m: int, run: Run) -> Run:
        """Return `run`, an F, in which layers draw this rank's rows of what one worker draws for all samples."""
        layer = self.stages[number].layer
        generators = layer.generators() if hasattr(layer, "generators") else {}
        if not generators:
            return run
        foreign = {name: part.generator for name, part in layer.modules() if name in generators and not is_ours(part)}

        def draw(step: Step) -> None:
            before = {name: pickle.dumps(generator.bit_generator.state) for name, generator in foreign.items()}
            with rows_of(lambda: self.totals.rows(m)) as drawn:
                run(step)
            for name, generator in foreign.items():
                if id(generator) not in drawn and pickle.dumps(generator.bit_generator.state) != before[name]:
                    raise _draws_alone(f"{self.stages[number].name}.{name}".strip("."))
            samples = self.totals.samples(m)
            if 0 in samples and any(samples):  # a rank without samples has not drawn
                states = {name: generator.bit_generator.state for name, generator in generators.items()}
                first = next(rank for rank, count in enumerate(samples) if count)
                for name, state in self.totals.host.broadcast(states, first).items():
                    generators[name].bit_generator.state = state

        return draw

    def input_grad(self, number: int, m: int) -> Run:
        """I."""
        return _unless_empty(super().input_grad(number, m), m)

    def scan(self, m: int) -> Run:
        """All I of a micro-batch at once."""
        return _unless_empty(super().scan(m), m)

    def weight_grad(self, number: int, m: int) -> Run:
        """W; gradients that are complete with it go to their buckets."""
        run = _unless_empty(super().weight_grad(number, m), m)
        names = dict.fromkeys(self.stages[number].parameters.values())

        def replica(step: Step) -> None:
            run(step)
            left = self._left
            if not left:
                left.update({name: uses * len(step.batches) for name, uses in self._holders.items()})
            for name in names:
                left[name] -= 1
                if left[name] == 0:
                    del left[name]
                    self.buckets.put(step.grads, name)

        return replica

    def weight_grad_and_update(self, number: int, m: int, names: Sequence[str]) -> Run:
        """W and U, one after the other: the update is made with the gradient of all ranks."""
        parts = self.weight_grad(number, m), self.update(names, gathered=False)

        def run(step: Step) -> None:
            for part in parts:
                part(step)

        return run

    def gather(self, step: Step) -> None:
        """Clip: wait for all gradients, and look at them together. Else nothing waits before the updates do."""
        if self.clip_norm is not None:
            self.buckets.wait_all()
            super().gather(step)

    def use(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update some parameters, those first whose gradients are there first."""
        for some in self.buckets.arriving(names):
            super().use(step, some, gathered=gathered and self.clip_norm is not None)


def _draws_alone(name: str) -> OptionError:
    return OptionError(
        f"The layer {name} draws random numbers by itself: the same for the samples of every replica",
        expected="numbers that sparsebp.nn.draw_rows has drawn", got="others",
        remedy="Draw by sparsebp.nn.draw_rows(self.generator, x.shape, make); see the how-to guide 'Write a layer'",
    )  # fmt: skip


def _unless_empty(run: Run, m: int) -> Run:
    """Return `run` for steps with samples of a micro-batch on this rank."""

    def replica(step: Step) -> None:
        if len(step.batches[m][1]):
            run(step)

    return replica
