"""Data-parallel training: each rank has the whole model and computes a share of the samples; gradients are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from sparsebp.core.arguments import check_flag
from sparsebp.core.errors import OptionError, TransportError
from sparsebp.distributed.agreement import check_same, checksums
from sparsebp.distributed.data_parallel.actions import ReplicaActions, Totals
from sparsebp.distributed.data_parallel.buckets import BUCKET_BYTES, Buckets, parted
from sparsebp.distributed.data_parallel.sharded import ShardedActions, ShardedBuckets, gathered
from sparsebp.distributed.transport import Transport
from sparsebp.optim.pieces import PieceOptimizer
from sparsebp.runtime.actions import Actions
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.stages import trained_parameters
from sparsebp.runtime.step import Batch, Step, Watch
from sparsebp.schedule import Action, Schedule, parts_of, validate

Indices = TypeVar("Indices", bound=Sequence[Any])


class ReplicaExecutor(Executor):
    """An `Executor` of one of several replicas, which all run the same schedule on their own share of the samples.

    Each S of the schedule sums the gradients of its stage over all ranks; neighbours share a bucket. A sum begins as
    soon as the gradients of its bucket, and of those before it in the schedule, are complete, and an update waits for
    its own. So the S of a stream of their own, as `synchronise` places them, go on beside what is computed; S among
    what is computed are waited for at once. With updates before the next forwards (`place_updates` with
    ``fusion="forward"``, or after `reverse_first_k`) what is left of the sums goes on beside those, too.

    The gradient is the mean over the samples of all ranks, whatever the size of each one's share: equal to one worker's
    with all samples, to rounding. All ranks then make the same update, so that their parameters stay the same, bit for
    bit, as they are from run to run. The `Step`\\ s returned have the loss of all samples, and the norm of the averaged
    gradient, by which they are clipped. Layers see the samples of their own rank alone: batch normalisation has its own
    statistics on each, of which those of rank 0 count. Dropout draws its rows of one worker's mask
    (`sparsebp.nn.draw_rows`): the random generators begin with rank 0's states, and go on as those of one worker.

    Parameters
    ----------
    model, loss, optimizer, clip_norm, watch
        As `Executor` takes them; the same on all ranks, except for `watch`.
    schedule
        Of one worker and one stream, with one S a stage, on that stream or on one of its own, and one update a step.
    transport
        Between the ranks.
    sharded
        Whether each rank has the optimizer's state of its own part of the parameters alone, updates that, and gets the
        others' parts; `gather_state` makes it whole (Rajbhandari et al., "ZeRO", SC 2020, stage 1). For the rules of
        `sparsebp.optim`, which all go element by element.

    Attributes
    ----------
    bucket_bytes
        Bytes from which on a bucket is full.
    buckets
        Where gradients are summed; ``buckets.waited`` has the seconds that this rank has waited for that.

    Raises
    ------
    OptionError
        As `Executor`; or the schedule has no S; or ranks differ in their parameters or schedules.
    ScheduleError
        The schedule cannot run.

    Notes
    -----
    After an error a rank's sums are not those that the others wait for: it takes no further steps, and `flush` does
    nothing. Let the others know by `Transport.abort`.

    Sums beside the backward pass: Zhang et al., "Poseidon", USENIX ATC 2017; in buckets: Li et al., "PyTorch
    Distributed", VLDB 2020, §3.2; which go first: Oh et al., "Out-of-order backprop", EuroSys 2022, §5.1.
    """

    bucket_bytes: ClassVar[int] = BUCKET_BYTES
    plain: ClassVar[str] = "data-parallel"

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, transport: Transport, *,
        clip_norm: float | None = None, watch: Watch | None = None, sharded: bool = False,
    ) -> None:  # fmt: skip
        self.sharded = check_flag("sharded", sharded)
        validate(schedule)
        self.transport = transport
        self._sent, self._blocking, compute = _apart(schedule)
        self._totals, self._optimizer = Totals(transport), optimizer
        self._failed: str | None = None
        self._pieces: PieceOptimizer | None = None
        generators = model.generators() if hasattr(model, "generators") else {}
        facts = {
            "the schedule": (schedule.graph, [lane.cells for lane in schedule.lanes]), "clip_norm": clip_norm,
            "the layers that draw random numbers": sorted(generators),
        }  # fmt: skip
        states = {name: generator.bit_generator.state for name, generator in generators.items()}
        first, *_ = check_same(transport, facts | checksums(trained_parameters(model, optimizer)), states)
        for name, generator in generators.items():
            generator.bit_generator.state = first[name]
        super().__init__(model, loss, optimizer, compute, clip_norm=clip_norm, watch=watch)
        self.schedule = schedule
        if schedule.graph.first == "U" and clip_norm is None:
            self._late = True  # the sums of a step are there, and looked at, within the next one

    def _make_actions(self, loss: Any, optimizer: Any, clip_norm: float | None, watch: Watch) -> Actions:
        params = trained_parameters(self.stages.model, optimizer)
        parts = parted({name: params[name] for name in self._names_of(self._sent)}, *self._times(), self.bucket_bytes)
        kind = ShardedBuckets if self.sharded else Buckets
        self.buckets = kind(params, parts, self.transport, blocking=self._blocking)
        rest: Any = {"buckets": self.buckets, "totals": self._totals}
        if not isinstance(self.buckets, ShardedBuckets):
            return ReplicaActions(self.stages, loss, optimizer, clip_norm, watch, **rest)
        pieces = {name: piece for shard in self.buckets.shards.values() for name, piece in shard.pieces.items()}
        self._pieces = PieceOptimizer(optimizer, pieces)
        return ShardedActions(self.stages, loss, self._pieces, clip_norm, watch, **rest)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Make the optimizer's state whole on rank 0, or everywhere, until the next step; all ranks call this.

        Call `flush` first. Where optimizer states are not sharded they are whole anyway.
        """
        if self._pieces is not None and isinstance(self.buckets, ShardedBuckets):
            keep = everywhere or self.transport.rank == 0
            with self._failing():
                gathered(self._pieces, self.buckets, keep=keep)

    @property
    def state_bytes(self) -> int:
        """The bytes of optimizer state that this rank needs for its steps."""
        buffers = getattr(self._actions.optimizer, "buffers", {})
        return sum(array.nbytes for arrays in buffers.values() for array in arrays.values())

    def _names_of(self, stages: Sequence[int]) -> list[str]:
        """Return the parameters of `stages` in this order; what several hold comes with the last of them."""
        names = self.stages.updated_at(stages, last=True)
        return [name for stage in stages for name in names.get(stage, ())]

    def _times(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the places in the schedule where the gradient of each parameter is complete, and where it is used."""
        first, parts = self._order.graph.first, _parts([cell for lane in self._order.lanes for cell in lane.cells])
        ended = {part.stage: place for place, part in enumerate(parts) if part.kind == "W"}
        if self.sharded:  # a bucket is updated as a whole: nothing may read the old values any more
            ended |= {
                part.stage: place for place, part in enumerate(parts) if part.kind in "IW" and part.stage in ended
            }
        later = len(parts) if first == "U" else 0  # they are those of the step before
        updates = {part.stage: place + later for place, part in enumerate(parts) if part.kind == "U"}
        complete: dict[str, int] = {}
        for stage in sorted(ended, key=ended.__getitem__):
            complete |= dict.fromkeys(self.stages[stage].parameters.values(), ended[stage])
        names = self.stages.updated_at(updates, last=first != "U")
        return complete, {name: updates[stage] for stage, some in names.items() for name in some}

    def own(self, indices: Indices) -> Indices:
        """Return which of a micro-batch's samples this rank computes: a stretch of them, as long as the others'."""
        size, rank = self.transport.size, self.transport.rank
        least, more = divmod(len(indices), size)
        begin = rank * least + min(rank, more)
        own: Indices = indices[begin : begin + least + (rank < more)]  # type: ignore[assignment]
        return own

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; all ranks do, with as many micro-batches.

        Parameters
        ----------
        batches, tag
            As `Executor.step` takes them; any of this rank's micro-batches may be empty, though not all on all ranks.

        Returns
        -------
        list of Step
            As `Executor.step` returns them; of a schedule that begins with updates, the step before.

        Raises
        ------
        OptionError
            As `Executor.step`; or no rank has a sample.
        TransportError
            Another rank has failed, or this one has in an earlier step; or its optimizer has other options.
        Exception
            Whatever an action raises.
        """
        if self._failed is not None:
            raise TransportError("A step of this rank has failed before", expected="the same steps on all ranks",
                                 got=self._failed, remedy="Make a new executor on every rank")  # fmt: skip
        with self._failing():
            if self._pieces is not None:
                self._pieces.take()
            self._totals.open(batches, self._optimizer)
            return super().step(batches, tag)

    def _step(self, batches: Sequence[Batch], tag: Any) -> list[Step]:
        return self._told(super()._step(batches, tag))

    def _finish(self) -> list[Step]:
        return self._told(super()._finish())

    def _told(self, steps: list[Step]) -> list[Step]:
        for step in steps:
            self._totals.close(step)
        return steps

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Do what the last step has left over, as `Executor.flush`; nothing once one of its calls has failed."""
        if self._failed is not None:
            return []
        with self._failing():
            return super().flush(wait=wait)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember an error: from then on this rank is not where the others are."""
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Give up what `flush` has not done; see `Executor.close`."""
        super().close()
        self._totals.forget()


def _apart(schedule: Schedule) -> tuple[list[int], bool, Schedule]:
    """Return the stages in the order of their S, whether S wait for their end, and the schedule without them.

    Raises
    ------
    OptionError
        It has none, or they stand on more than one stream.
    """
    lanes = [lane for lane in schedule.lanes if any(part.kind == "S" for part in _parts(lane.cells))]
    if not schedule.graph.synchronised or len(lanes) > 1:
        raise OptionError(
            "The schedule does not say in which order gradients are synchronised",
            expected="one S a stage, on one stream", got=f"{schedule.name or 'one'} with S on {len(lanes)} streams",
            remedy="Pass synchronise(schedule) on, with place_updates after it",
        )  # fmt: skip
    sent = [part.stage for lane in lanes for part in _parts(lane.cells) if part.kind == "S"]
    blocking = any(part.kind != "S" for lane in lanes for part in _parts(lane.cells))
    kept = (replace(lane, cells=tuple(p for p in _parts(lane.cells) if p.kind != "S")) for lane in schedule.lanes)
    compute = tuple(lane for lane in kept if lane.cells)
    if len(compute) > 1:
        raise OptionError("A replica computes on one stream", expected="one stream beside that of the S",
                          got=", ".join(lane.stream for lane in compute), remedy="Join them")  # fmt: skip
    graph = replace(schedule.graph, synchronised=False)
    return sent, blocking, replace(schedule, graph=graph, lanes=compute)


def _parts(cells: Sequence[Any]) -> list[Action]:
    return [part for cell in cells for part in parts_of(cell)]
