"""Pipelines times replicas: every pipeline has its share of the samples, and gradients are summed over pipelines."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sparsebp.comm.transport import Transport
from sparsebp.core.absent import held
from sparsebp.core.check import Array, check_flag
from sparsebp.core.errors import OptionError
from sparsebp.nn.init import Rows, rows_of
from sparsebp.nn.loss import check_counts
from sparsebp.optim.sharded import PieceOptimizer
from sparsebp.runtime.actions import Batch, Observer, Step, StepFunction, buffers_of, trained_parameters
from sparsebp.runtime.agreement import exchange
from sparsebp.runtime.pipeline import PipelineActions, PipelineExecutor
from sparsebp.runtime.replicas import (
    BUCKET_BYTES,
    Buckets,
    Countdown,
    Indices,
    ShardedBuckets,
    ShardedUpdates,
    begin_alike,
    bucket_names,
    drawing_rows,
    gathered,
    share_of_rank,
)
from sparsebp.schedule import Schedule, parts_of


class GridActions(PipelineActions):
    """`PipelineActions` of one of several pipelines. A sum begins when its bucket's gradients are complete."""

    replicas: Transport
    buckets: Buckets

    def join(self, replicas: Transport, buckets: Buckets) -> None:
        """Take the ranks with the same stages, and the sums over them."""
        check_counts(self.loss)
        self.replicas, self.buckets = replicas, buckets
        self._countdown = Countdown(self.stages[number] for number in self.own)
        self._rows: list[Rows] = []  # of every micro-batch, this pipeline's samples among all

    def share(self, step: Step) -> None:
        """Find the shares of the micro-batches, of all that counts in all pipelines."""
        counts = self.counts(step.targets, deferred=False)
        everyone = self.replicas.share((counts, [len(batch[1]) for batch in step.batches]))
        if any(count == 0 for _, samples in everyone for count in samples):
            raise OptionError("A micro-batch has fewer samples than there are replicas", expected=self.replicas.size,
                              got=min(map(sum, zip(*(samples for _, samples in everyone), strict=True))),
                              remedy="Use fewer micro-batches, larger batches, or drop_last=True")  # fmt: skip
        step.sums = self.summed is not None
        step.set_shares(counts, sum(sum(others) for others, _ in everyone))
        rank, own = self.replicas.rank, everyone[self.replicas.rank][1]
        each = list(zip(*(samples for _, samples in everyone), strict=True))
        self._rows = [Rows(sum(some[:rank]), own[m], sum(some)) for m, some in enumerate(each)]

    def draws_of(self, m: int) -> contextlib.AbstractContextManager[Any]:
        """Draw this pipeline's rows of one worker's draws for all samples."""
        return rows_of(lambda: self._rows[m])

    def forward(self, number: int, m: int, count: int) -> StepFunction:
        """F, with draws by rows."""
        run, stage = super().forward(number, m, count), self.stages[number]
        draws = hasattr(stage.layer, "generators") and stage.layer.generators()
        return drawing_rows(stage, run, lambda: self.draws_of(m)) if draws else run

    def weight_grad(self, number: int, m: int) -> StepFunction:
        """W; gradients that are complete with it go to their buckets."""
        run = super().weight_grad(number, m)
        names = dict.fromkeys(self.stages[number].parameters.values()).keys()

        def replica(step: Step) -> None:
            run(step)
            for name in names & step.grads.keys():
                self.buckets.add(name, step.grads.pop(name))
            for name in self._countdown.completed(names, len(step.batches)):
                self.buckets.put(step.grads, name)

        return replica


class ShardedGridActions(ShardedUpdates, GridActions):
    """`GridActions` that update this rank's shards."""

    buckets: ShardedBuckets

    def gather(self, step: Step) -> None:
        """Check all gradients, here and on the other ranks, before any of them is used; clip them."""
        grads = self.buckets.summed(self.buckets.all)
        self._look_at(step, self.names, grads)
        self._share(step)
        self._clip(step, grads)


class GridExecutor(PipelineExecutor):
    """One rank's part of the steps of several pipelines of the same stages, each with a share of the samples.

    The sums of gradients over the pipelines begin as soon as a stage's last W is done, while others still run. All
    pipelines make the same updates, so their parameters stay bitwise equal. As with `ReplicaExecutor`, gradients are
    those of the mean over all samples, dropout draws the rows of one worker's masks, and batch normalisation keeps
    separate statistics, of which the first pipeline's are used.

    Parameters
    ----------
    model, loss, optimizer, schedule, options
        As for `PipelineExecutor`; of a synchronous schedule in which no stage is replicated.
    transport
        Between the ranks of this pipeline.
    replicas
        Between the ranks that have the same stages, one of each pipeline.
    sharded
        Whether each of these keeps and updates its shard of the optimizer's state (ZeRO, stage 1), as with
        `ReplicaExecutor`; for a model that was built within `sparsebp.nn.deferred_init`.
    """

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, transport: Transport, replicas: Transport,
        sharded: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self._replicas, self._sharded = replicas, check_flag("sharded", sharded)
        self._shard_optimizer: PieceOptimizer | None = None
        if schedule.graph.updates == "microbatch" or schedule.replicated:
            kind = "replicates stages" if schedule.replicated else "updates after every micro-batch"
            raise OptionError(f"The schedule {kind}", expected="one update a step, and each stage on one rank of a "
                              "pipeline, as 1f1b or zb-v", got=f"{schedule.name or 'it'!r} and {replicas.size} "
                              "pipelines")  # fmt: skip
        super().__init__(model, loss, optimizer, schedule, transport, **options)
        if not self._gathered:
            raise OptionError("Gradients are summed over the pipelines before the first update",
                              expected="all gradients before the first U, on every rank",
                              got=f"the schedule {schedule.name or 'given'!r}")  # fmt: skip
        begin_alike(
            replicas, model, {"clip_norm": options.get("clip_norm")}, held(trained_parameters(model, optimizer))
        )

    def _make_actions(
        self, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer, own: Mapping[int, Collection[int]]
    ) -> PipelineActions:
        params = trained_parameters(self.stages.model, optimizer)
        lanes = [lane for lane in self.schedule.lanes if lane.worker == self._transport.rank]
        parts = [part for lane in lanes for cell in lane.cells for part in parts_of(cell)]
        complete: dict[str, int] = {}
        for place, part in enumerate(parts):
            if part.kind == "W":
                complete |= dict.fromkeys(self.stages[part.stage].parameters.values(), place)
        order = sorted(complete, key=complete.__getitem__)
        names = bucket_names(
            {name: params[name] for name in order}, complete, dict.fromkeys(order, len(parts)), BUCKET_BYTES
        )
        given: Any = loss, optimizer, clip_norm, observer, own, lambda step: self._share([step])
        if not self._sharded:
            actions = GridActions(self.stages, *given)
            actions.join(self._replicas, Buckets(params, names, self._replicas))
            return actions
        if not self._lacks:
            raise OptionError("The optimizer's state of a pipeline is sharded where each rank has its stages alone",
                              expected="a model built within deferred_init, on two ranks or more",
                              got="all parameters on every rank",
                              remedy="Build it so, or leave sharded out")  # fmt: skip
        buckets = ShardedBuckets(params, names, self._replicas)
        self._shard_optimizer = PieceOptimizer(optimizer, buckets.pieces)
        actions = ShardedGridActions(self.stages, loss, self._shard_optimizer, *given[2:])
        actions.join(self._replicas, buckets)
        return actions

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `PipelineExecutor.step`."""
        if self._shard_optimizer is not None:
            self._shard_optimizer.take()
        return super().step(batches, tag)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Gather the optimizer's state of each rank's own stages for now, on the first pipeline or everywhere."""
        actions = self._actions
        if self._shard_optimizer is not None and isinstance(actions, ShardedGridActions):
            gathered(self._shard_optimizer, actions.buckets, keep=everywhere or self._replicas.rank == 0)

    def own(self, indices: Indices) -> Indices:
        """Return this pipeline's part of a micro-batch's samples: equal parts, up to one sample."""
        return share_of_rank(indices, self._replicas)

    def flush(self, *, wait: bool = True) -> list[Step]:
        """As `PipelineExecutor.flush`; the buffers are those of the first pipeline."""
        apart = self._apart
        done = super().flush(wait=wait)
        if apart:
            exchange(self._replicas, {name: (0, array) for name, array in buffers_of(self.stages.model).items()})
        return done

    def _sum_over_ranks(self, count: int, step: Step) -> None:
        actions = self._actions
        if isinstance(actions, GridActions):
            actions.buckets.wait_all()
        if not isinstance(actions, ShardedGridActions):
            super()._sum_over_ranks(count, step)
            return
        markers, step.grads = step.grads, actions.buckets.summed(actions.buckets.all)
        super()._sum_over_ranks(count, step)
        for bucket in actions.buckets.all:
            for name, place in bucket.places.items():
                bucket.shard[place] = step.grads[name]
        step.grads = markers

    def _summed_like(self, name: str, param: Array) -> Array | None:
        actions = self._actions
        if not isinstance(actions, ShardedGridActions):
            return param
        return next((b.shard[b.places[name]] for b in actions.buckets.all if name in b.places), None)

    def _share(self, steps: Sequence[Step]) -> None:
        """Tell all ranks the numbers of all pipelines: the first micro-batch then has the loss and score of all."""
        super()._share(steps)
        for step in steps:
            known = [score for score in step.scores if score is not None]
            loss = sum(share * value for share, value in zip(step.shares, step.values, strict=True) if share)
            own = loss, sum(right for right, _ in known), sum(count for _, count in known), bool(known)
            everyone = self._replicas.share(own)
            count = len(step.values)
            step.values, step.shares, step.sums = [sum(one[0] for one in everyone)] * count, [1.0], False
            step.shares += [0.0] * (count - 1)
            if any(one[3] for one in everyone):
                step.scores = [(sum(one[1] for one in everyone), sum(one[2] for one in everyone))]
                step.scores += [(0.0, 0.0)] * (count - 1)
