"""Data-parallel training: each rank has the whole model and computes a part of the samples; gradients are averaged."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from statistics import median
from typing import Any, ClassVar, TypeVar

import numpy as np

from sparsebp.comm.transport import Handle, Transport, host_of
from sparsebp.core import backend
from sparsebp.core.check import Array, check_flag
from sparsebp.core.errors import OptionError, ScheduleError, TransportError
from sparsebp.nn.init import Rows, rows_of
from sparsebp.nn.loss import check_counts
from sparsebp.optim.optimizer import square_sums
from sparsebp.optim.sharded import PieceOptimizer
from sparsebp.runtime.actions import (
    Actions,
    Batch,
    Observer,
    Stage,
    Stages,
    Step,
    StepFunction,
    buffers_of,
    in_sequence,
    is_ours,
    targets_of,
    trained_parameters,
)
from sparsebp.runtime.agreement import check_marks, check_same, checksums, exchange, mark_of, options_of
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.measure import TimedExecutor, measured_costs
from sparsebp.runtime.search import REPEATED, SearchingExecutor
from sparsebp.runtime.streams import parts_in
from sparsebp.schedule import Action, Costs, Kind, Schedule, StageBytes, simulate, validate
from sparsebp.schedule.builders import place_updates, reverse_first_k, search_k
from sparsebp.schedule.costs import Durations

# Gradients of many parameters in a few flat arrays, which are summed over all ranks as soon as they are full.

BUCKET_BYTES = 1 << 20
"""A bucket is full from this size on: large enough that a message's own cost (some 10 us) is small next to its bytes,
small enough that the last one, which nothing overlaps any more, is short."""


class Bucket:
    """The gradients of some parameters, one after the other in one array that is kept from step to step."""

    # names, sizes: The parameters, and how many elements each has.
    # flat: Their gradients: this rank's, then, once waited for, the sums over all ranks. Zeros at the end make it
    # divisible by the number of ranks.
    # views: The gradient of each parameter within `flat`, of the parameter's shape.
    flat: Array = None

    def __init__(self, params: Mapping[str, Array], transport: Transport) -> None:
        self.names, self.sizes = tuple(params), {name: param.size for name, param in params.items()}
        self.missing = len(params)
        self.summed = False
        self.handle: Handle | None = None
        self.lay_out(params, transport)

    def lay_out(self, params: Mapping[str, Array], transport: Transport) -> None:
        """Make the array, and the parameters' views of it."""
        first = next(iter(params.values()))
        length = -(-sum(self.sizes.values()) // transport.size) * transport.size
        self.flat = backend.namespace(first).zeros(length, first.dtype)
        self.views: dict[str, Array] = {}
        begin = 0
        for name, param in params.items():
            self.views[name] = self.flat[begin : begin + param.size].reshape(param.shape)
            begin += param.size

    def put(self, name: str, grad: Array | int) -> None:
        """Write this rank's gradient of a parameter, or 0."""
        self.views[name][...] = grad

    def add(self, name: str, grad: Array) -> None:
        """Add a further micro-batch's gradient of a parameter."""
        self.views[name] += grad

    def array(self, name: str) -> Array:
        """Return what stands for a parameter's gradient until its sum has arrived."""
        return self.views[name]


class Buckets:
    """Sums gradients over all ranks, bucket by bucket."""

    # The buckets are begun in their order, whatever the order in which they are filled: it is the same on all ranks.
    # parts: Names of parameters, bucket by bucket, in the order in which their gradients are sent: see `bucket_names`.
    # blocking: Whether to wait for each sum as soon as it has begun.
    # all: In the order of their sums. waited: Seconds that this rank has waited for sums, in all.

    kind: ClassVar[type[Bucket]] = Bucket

    def __init__(
        self, params: Mapping[str, Array], parts: Iterable[Iterable[str]], transport: Transport, *,
        blocking: bool = False,
    ) -> None:  # fmt: skip
        self.transport, self.blocking, self.waited = transport, blocking, 0.0
        self.all = [self.kind({name: params[name] for name in names}, transport) for names in parts]
        self._of = {name: bucket for bucket in self.all for name in bucket.names}
        self._next = 0
        self._begun: set[str] = set()  # parameters with a gradient here that is not complete

    def add(self, name: str, grad: Array) -> None:
        """Take over a micro-batch's gradient of a parameter, whose memory is free from then on."""
        bucket = self._of[name]
        (bucket.add if name in self._begun else bucket.put)(name, grad)
        self._begun.add(name)

    def put(self, grads: dict[str, Array], name: str) -> None:
        """Take over this rank's gradient of a parameter, zero if it has none; `grads` then has its view here."""
        bucket = self._of[name]
        if name not in self._begun:
            bucket.put(name, grads.get(name, 0))
        self._begun.discard(name)
        grads[name] = bucket.array(name)
        bucket.missing -= 1
        bucket.summed = False
        while self._next < len(self.all) and self.all[self._next].missing == 0:
            bucket = self.all[self._next]
            self._next += 1
            self.begin(bucket)
            if self.blocking:
                self.wait(bucket)
        if self._next == len(self.all):
            self._next = 0
            for bucket in self.all:
                bucket.missing = len(bucket.names)

    def begin(self, bucket: Bucket) -> None:
        """Begin to sum a full bucket."""
        bucket.handle = self.transport.allreduce(bucket.flat)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the sums of a bucket."""
        if bucket.summed:
            return
        if bucket.handle is None:
            raise ScheduleError("Gradients are used before they are all there", expected="every W before the U",
                                got=", ".join(bucket.names), remedy="Validate the schedule")  # fmt: skip
        self.timed(bucket.handle)
        bucket.handle, bucket.summed = None, True

    def timed(self, handle: Handle) -> None:
        """Wait, and add up for how long."""
        began = time.perf_counter()
        handle.wait()
        self.waited += time.perf_counter() - began

    def wait_all(self) -> None:
        """Wait for all sums."""
        for bucket in self.all:
            self.wait(bucket)

    def arriving(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield some of `names` whenever their sums are ready, bucket after bucket."""
        wanted = set(names)
        for bucket in self.all:
            here = [name for name in bucket.names if name in wanted]
            if here:
                self.wait(bucket)
                yield here


def bucket_names(
    params: Mapping[str, Array], complete: Mapping[str, int], used: Mapping[str, int], limit: int
) -> list[list[str]]:
    """Return the names of the parameters of each bucket: neighbours of one dtype."""
    # params: The parameters in the order in which their gradients are sent.
    # complete, used: When each one's gradient is complete, and when it is used: in one bucket all are complete before
    # any is used.
    # limit: Bytes from which on a bucket is full.
    out: list[list[str]] = []
    dtype: Any = None
    size, last, first = limit, 0, 0
    for name, param in params.items():
        last, first = max(last, complete[name]), min(first, used[name])
        if size >= limit or param.dtype != dtype or last > first:
            out.append([])
            dtype, size, last, first = param.dtype, 0, complete[name], used[name]
        out[-1].append(name)
        size += param.nbytes
    return out


class Countdown:
    """How many W the gradient of each parameter still lacks in a step."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._uses = Counter(name for stage in stages for name in set(stage.parameters.values()))
        self._left: dict[str, int] = {}

    def completed(self, names: Iterable[str], microbatches: int) -> Iterator[str]:
        """Count one W of some parameters, and yield those whose gradients are complete with it."""
        if not self._left:
            self._left = {name: uses * microbatches for name, uses in self._uses.items()}
        for name in names:
            self._left[name] -= 1
            if self._left[name] == 0:
                del self._left[name]
                yield name


# The actions of one replica: as for one worker, but it shares samples, sends gradients and waits for sums.


class Totals:
    """Numbers of a step over all ranks: samples, and how much they count, then the mean loss and the score."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.host = host_of(transport)
        # On every rank: a mark, how much a step counts, and the samples of every micro-batch.
        self._counts = np.empty((0, transport.size))
        self._own: list[Any] = []  # how much this rank's micro-batches count
        self._under_way: Handle | None = None  # until the counts have arrived
        self._sum: tuple[Handle, Array] | None = None  # how much all ranks' count, of counts that the host cannot read
        self._close_totals: dict[int, tuple[Handle, Array]] = {}  # by the identity of a step that is under way

    def open(self, batches: Sequence[Batch], counts: Sequence[Any], optimizer: Any) -> None:
        """Begin to count the samples of a step on all ranks, and to compare the optimizers' options."""
        self._counts, self._own, self._sum = np.zeros((2 + len(batches), self.transport.size)), list(counts), None
        unread = [count for count in counts if hasattr(count, "ndim")]
        known = math.nan if unread else sum(counts)
        samples = [len(batch[1]) for batch in batches]
        self._counts[:, self.transport.rank] = [mark_of(options_of(optimizer)), known, *samples]
        self._under_way = self.host.allreduce(self._counts)
        if unread:
            total = sum(unread).reshape(1)
            self._sum = self.transport.allreduce(total), total

    def samples(self, m: int) -> list[int]:
        """Return how many samples of a micro-batch of this step each rank has."""
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None
            check_marks(self._counts[0].tolist())
            if not self._counts[2:].any():
                raise OptionError("A step has no samples", expected="at least one, on some rank", got="none on any")
        return [int(count) for count in self._counts[2 + m]]

    def share(self, step: Step) -> None:
        """Make the step's shares relative to all ranks."""
        self.samples(0)
        if self._sum is None:
            step.set_shares(self._own, sum(self._counts[1].tolist()))
            return
        handle, total = self._sum
        handle.wait()
        step.set_shares(self._own, total[0])

    def rows(self, m: int) -> Rows:
        """Return this rank's rows among the samples of all ranks in a micro-batch."""
        samples, rank = self.samples(m), self.transport.rank
        return Rows(sum(samples[:rank]), samples[rank], sum(samples))

    def begin_sums(self, step: Step) -> None:
        """Begin to sum loss and score over all ranks, once all of this rank's are known."""
        there = [m for m, batch in enumerate(step.batches) if len(batch[1])]
        values: Any = step.values if step.later is None else step.later.losses
        scores: Any = dict(enumerate(step.scores)) if step.later is None else step.later.scores
        xp = np if step.later is None else backend.namespace(step.batches[0][1])
        sums = xp.zeros(3, np.float64)
        for m in there:
            share = step.shares[m]
            if hasattr(share, "ndim"):
                sums[0] += xp.where(share != 0, share * values[m], 0)
            elif share:
                sums[0] += share * values[m]
            if scores.get(m) is not None:
                sums[1] += scores[m][0]
                sums[2] += scores[m][1]
        transport = self.host if step.later is None else self.transport
        self._close_totals[id(step)] = transport.allreduce(sums), sums

    def close(self, step: Step) -> None:
        """Write the sums over all ranks to the step: its first micro-batch then has the loss and score of all."""
        told = self._close_totals.pop(id(step), None)
        if told is None:
            return
        handle, sums = told
        handle.wait()
        count = len(step.batches)
        step.shares, step.scores, step.sums = [1.0] + [0.0] * (count - 1), [(0.0, 0.0)] * count, False
        if step.later is not None:
            step.later.losses, step.later.scores = dict.fromkeys(range(count), sums[0]), {0: (sums[1], sums[2])}
            step.later.counts = {0: step.counted} if hasattr(step.counted, "ndim") else {}
            return
        loss, *step.scores[0] = sums.tolist()
        step.values = [loss] * count

    def forget(self) -> None:
        """Drop pending sums."""
        self._under_way = None
        self._close_totals.clear()


Indices = TypeVar("Indices", bound=Sequence[Any])


class ReplicaActions(Actions):
    """`Actions` of one of several replicas; micro-batches without samples on this rank are skipped."""

    def __init__(
        self, stages: Stages, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer, *,
        buckets: Buckets, totals: Totals,
    ) -> None:  # fmt: skip
        super().__init__(stages, loss, optimizer, clip_norm, observer)
        if totals.transport.size > 1:
            check_counts(loss)
        self.buckets, self.totals = buckets, totals
        self._countdown = Countdown(stages.all)
        self._ended = 0  # micro-batches whose loss is known

    def forward(self, number: int, m: int, count: int) -> StepFunction:
        """F; the last stage's shares the loss with the other ranks."""
        run = self._drawing(number, m, _unless_empty(super().forward(number, m, count), m))
        if number < len(self.stages) - 1:
            return run

        def last(step: Step) -> None:
            if not step.shares:
                self.share(step)
            run(step)
            if len(step.batches[m][1]) and step.later is None:
                step.set_score(m, self.observer.score(step.predictions[m], step.targets[m]))
            if m == count - 1 and step.update is None:  # the last micro-batch is empty
                step.update = self.optimizer.begin()
            self._ended += 1
            if self._ended == len(step.batches):
                self._ended = 0
                self.totals.begin_sums(step)

        return last

    def draws_of(self, m: int) -> contextlib.AbstractContextManager[Any]:
        """Draw this rank's rows of one worker's draws for all samples."""
        return rows_of(lambda: self.totals.rows(m))

    def share(self, step: Step) -> None:
        """Find the shares of the micro-batches, of all that counts on all ranks."""
        step.sums = self.summed is not None
        self.totals.share(step)

    def _drawing(self, number: int, m: int, run: StepFunction) -> StepFunction:
        """Return `run`, an F, in which layers draw this rank's rows of one worker's draws for all samples."""
        stage = self.stages[number]
        generators = stage.layer.generators() if hasattr(stage.layer, "generators") else {}
        if not generators:
            return run
        by_rows = drawing_rows(stage, run, lambda: self.draws_of(m))

        def draw(step: Step) -> None:
            by_rows(step)
            samples = self.totals.samples(m)
            if 0 in samples and any(samples):  # a rank without samples has not drawn
                states = {name: generator.bit_generator.state for name, generator in generators.items()}
                first = next(rank for rank, count in enumerate(samples) if count)
                for name, state in self.totals.host.broadcast(states, first).items():
                    generators[name].bit_generator.state = state

        return draw

    def input_grad(self, number: int, m: int) -> StepFunction:
        """I."""
        return _unless_empty(super().input_grad(number, m), m)

    def scan(self, m: int) -> StepFunction:
        """All I of a micro-batch at once."""
        return _unless_empty(super().scan(m), m)

    def weight_grad(self, number: int, m: int) -> StepFunction:
        """W; gradients that are complete with it go to their buckets."""
        run = _unless_empty(super().weight_grad(number, m), m)
        names = dict.fromkeys(self.stages[number].parameters.values())

        def replica(step: Step) -> None:
            run(step)
            for name in self._countdown.completed(names, len(step.batches)):
                self.buckets.put(step.grads, name)

        return replica

    def weight_grad_and_update(self, number: int, m: int, names: Sequence[str]) -> StepFunction:
        """W and U, one after the other: the update is made with the gradient of all ranks."""
        return in_sequence(self.weight_grad(number, m), self.update(names, gathered=False))

    def gather(self, step: Step) -> None:
        """Clip: wait for all gradients, and check them together. Otherwise only updates wait."""
        if self.clip_norm is not None:
            self.buckets.wait_all()
            super().gather(step)

    def apply_update(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update some parameters, in the order in which their gradients arrive."""
        for some in self.buckets.arriving(names):
            super().apply_update(step, some, gathered=gathered and self.clip_norm is not None)


def drawing_rows(
    stage: Stage, run: StepFunction, draws: Callable[[], contextlib.AbstractContextManager[Any]]
) -> StepFunction:
    """Return `run`, an F, in which a stage draws within `draws`, and refuses to draw in another way."""
    layer = stage.layer
    generators = layer.generators()
    foreign = {name: part.generator for name, part in layer.modules() if name in generators and not is_ours(part)}

    def draw(step: Step) -> None:
        before = {name: pickle.dumps(generator.bit_generator.state) for name, generator in foreign.items()}
        with draws() as drawn:
            run(step)
        for name, generator in foreign.items():
            if id(generator) not in drawn and pickle.dumps(generator.bit_generator.state) != before[name]:
                layer_name = f"{stage.name}.{name}".strip(".")
                raise OptionError(
                    f"The layer {layer_name} draws random numbers by itself: the same for every replica's samples",
                    expected="numbers that sparsebp.nn.draw_rows has drawn", got="others",
                    remedy="Draw by sparsebp.nn.draw_rows(self.generator, x.shape, make); see the guide 'Write a "
                    "layer'"
                )  # fmt: skip

    return draw


def share_of_rank(indices: Indices, transport: Transport) -> Indices:
    """Return this rank's part of a micro-batch's samples: equal parts, up to one sample."""
    size, rank = transport.size, transport.rank
    least, more = divmod(len(indices), size)
    begin = rank * least + min(rank, more)
    own: Indices = indices[begin : begin + least + (rank < more)]  # type: ignore[assignment]
    return own


def _unless_empty(run: StepFunction, m: int) -> StepFunction:
    """Return `run`, skipped for micro-batches without samples on this rank."""

    def replica(step: Step) -> None:
        if len(step.batches[m][1]):
            run(step)

    return replica


# Sharded optimizer state: each rank keeps and updates its shard of every bucket, and gathers the other ranks' shards.


class ShardedBucket(Bucket):
    """A `Bucket` of which every rank has a part of each parameter: one after the other, in one row per rank."""

    # The elements of a rank depend only on the parameter's size, not on the rest of the bucket, and so not on the order
    # of the sums: sums of squares are over the same elements in every schedule, and bitwise equal.
    # slots: Where every parameter begins in each row, and how many elements a row has of it; the last rows may have
    # fewer.
    # shard: This rank's row: first the sums of these gradients, then, updated, the parameters.
    # places: Where in `shard` each parameter's part is, as slices. bounds: Begin and end of the part in the parameter's
    # own elements.

    def lay_out(self, params: Mapping[str, Array], transport: Transport) -> None:
        """Make the array: one row per rank, padded with zeros; and this rank's shard."""
        first, rank, width = next(iter(params.values())), transport.rank, 0
        self.slots: dict[str, tuple[int, int]] = {}
        self.places: dict[str, slice] = {}
        self.bounds: dict[str, tuple[int, int]] = {}
        for name, size in self.sizes.items():
            length = -(-size // transport.size)
            begin, end = rank * length, min(size, (rank + 1) * length)
            if begin < end:
                self.places[name], self.bounds[name] = slice(width, width + end - begin), (begin, end)
            self.slots[name] = width, length
            width += length
        self._rows, self.dtype, self.xp = (transport.size, width), first.dtype, backend.namespace(first)
        self.open()

    def open(self) -> None:
        """Make the arrays, unless they are there."""
        if self.flat is None:
            self.flat, self.shard = (self.xp.zeros(size, self.dtype) for size in (prod(self._rows), self._rows[1]))

    def close(self) -> None:
        """Free the arrays between two steps."""
        self.flat = self.shard = None

    def put(self, name: str, grad: Array | int) -> None:
        """Write this rank's gradient of a parameter, or 0."""
        self.open()
        if isinstance(grad, int):
            begin, length = self.slots[name]
            self.flat.reshape(self._rows)[:, begin : begin + length] = grad
        else:
            for slots, part in self._pairs(name, self.flat, grad.reshape(-1)):
                slots[...] = part

    def add(self, name: str, grad: Array) -> None:
        """Add a further micro-batch's gradient of a parameter."""
        for slots, part in self._pairs(name, self.flat, grad.reshape(-1)):
            slots[...] += part

    def array(self, name: str) -> Array:
        """Return what stands for a parameter's gradient until its sum has arrived."""
        return self.flat

    def read(self, name: str, flat: Array, out: Array) -> None:
        """Write a parameter of `flat`, an array like the bucket's, to `out`, C-contiguous."""
        for slots, part in self._pairs(name, flat, out.reshape(-1)):
            part[...] = slots

    def _pairs(self, name: str, flat: Array, values: Array) -> Iterator[tuple[Array, Array]]:
        """Yield views of a parameter in `flat` and the matching `values`: all full rows, then the rest."""
        begin, length = self.slots[name]
        if length == 0:
            return
        full, rest = divmod(values.size, length)
        slots = flat.reshape(self._rows)[:, begin : begin + length]
        yield slots[:full], values[: full * length].reshape(full, length)
        if rest:
            yield slots[full, :rest], values[full * length :]


class ShardedBuckets(Buckets):
    """`Buckets` of which each rank has only its shards' sums."""

    kind = ShardedBucket
    all: list[ShardedBucket]  # type: ignore[assignment]

    def __init__(
        self, params: Mapping[str, Array], parts: Iterable[Iterable[str]], transport: Any, *, blocking: bool = False
    ) -> None:
        super().__init__(params, parts, transport, blocking=blocking)
        self.params = params

    def begin(self, bucket: ShardedBucket) -> None:  # type: ignore[override]
        """Begin to sum this rank's shard of a full bucket."""
        bucket.handle = self.transport.reduce_scatter(bucket.flat, bucket.shard)

    @property
    def pieces(self) -> dict[str, tuple[int, int]]:
        """Begin and end of this rank's part of every parameter that it has a part of."""
        return {name: piece for bucket in self.all for name, piece in bucket.bounds.items()}

    def holding(self, names: Iterable[str]) -> list[ShardedBucket]:
        """Return the buckets with any of `names`, in the order of their sums."""
        wanted = set(names)
        return [bucket for bucket in self.all if not wanted.isdisjoint(bucket.names)]

    def summed(self, buckets: Sequence[ShardedBucket]) -> dict[str, Array]:
        """Wait for the sums of this rank's shards, and return them by the parameters' names."""
        grads: dict[str, Array] = {}
        for bucket in buckets:
            self.wait(bucket)
            grads |= {name: bucket.shard[place] for name, place in bucket.places.items()}
        return grads

    def spread(self, bucket: ShardedBucket) -> Handle:
        """Begin to send this rank's updated shard to the others."""
        for name, (begin, end) in bucket.bounds.items():
            bucket.shard[bucket.places[name]] = self.params[name].reshape(-1)[begin:end]
        return self.transport.allgather(bucket.shard, bucket.flat)

    def take(self, bucket: ShardedBucket, handle: Handle) -> None:
        """Write the other ranks' shards to the parameters."""
        self.timed(handle)
        for name in bucket.names:
            bucket.read(name, bucket.flat, self.params[name])


class ShardedUpdates(Actions):
    """Updates of this rank's shards. A bucket is updated as a whole, with its first parameter."""

    buckets: ShardedBuckets
    optimizer: PieceOptimizer

    def apply_update(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update the buckets of some parameters, unless they are updated already."""
        buckets = self.buckets.holding(name for name in names if name in step.grads)
        grads = self.buckets.summed(buckets)
        if not gathered:
            self._look_at(step, [name for bucket in buckets for name in bucket.names], grads)
        under_way = []
        for bucket in buckets:
            own = {name: grads[name] for name in bucket.names if name in grads}
            step.update.apply(bucket.names, own)
            under_way.append((bucket, self.buckets.spread(bucket)))
        for bucket, handle in under_way:
            self.buckets.take(bucket, handle)
            for name in bucket.names:
                del step.grads[name]

    def _look_at(self, step: Step, names: Sequence[str], grads: Mapping[str, Array]) -> None:
        """Sum the squares of whole gradients over the shards of all ranks."""
        if not names:
            return
        rows = {name: row for row, name in enumerate(names)}
        squares = self.buckets.all[0].xp.zeros(len(names), np.float64)
        for some, sums in square_sums(grads):
            squares[[rows[name] for name in some]] = sums
        self.buckets.timed(self.buckets.transport.allreduce(squares))
        if step.later is not None:
            step.later.sums.append((list(names), squares))
            return
        found = dict(zip(names, squares.tolist(), strict=True))
        step.squares.update(found)
        wrong = {name: np.float64(square) for name, square in found.items() if not math.isfinite(square)}
        if wrong:
            self.observer.gradients(step, wrong)


class ShardedActions(ShardedUpdates, ReplicaActions):
    """`ReplicaActions` that update this rank's shards."""

    buckets: ShardedBuckets

    def gather(self, step: Step) -> None:
        """Clip: wait for all gradients, and check them together."""
        if self.clip_norm is None:
            return
        grads = self.buckets.summed(self.buckets.all)
        self._look_at(step, self.stages.names, grads)
        self._clip(step, grads)

    def apply_update(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update the buckets of some parameters, unless they are updated already."""
        super().apply_update(step, names, gathered=gathered and self.clip_norm is not None)


def gathered(optimizer: PieceOptimizer, buckets: ShardedBuckets, *, keep: bool) -> None:
    """Gather the optimizer state of all ranks, where `keep` says so; all ranks call this."""
    keep = keep and optimizer.parted  # the optimizer may have its whole state since the last step
    whole: dict[str, dict[str, Array]] = {kind: {} for kind in optimizer.kinds}
    for bucket in buckets.all:
        bucket.close()
    for bucket in buckets.all:
        bucket.open()
        for kind, names in optimizer.kinds.items():
            for name, piece in optimizer.buffers.get(kind, {}).items():
                if name in bucket.places:
                    bucket.shard[bucket.places[name]] = piece
            buckets.transport.allgather(bucket.shard, bucket.flat).wait()
            for name in bucket.names if keep else ():
                if name in names:
                    whole[kind][name] = array = bucket.xp.empty_like(buckets.params[name])
                    bucket.read(name, bucket.flat, array)
                    optimizer.expand(kind, name, array)
        bucket.close()
    if keep:
        optimizer.restore({kind: {name: whole[kind][name] for name in names if name in whole[kind]}
                           for kind, names in optimizer.kinds.items()})  # fmt: skip


def begin_alike(transport: Transport, model: Any, facts: Mapping[str, Any], params: Mapping[str, Array]) -> None:
    """Check that options and parameters are the same on all replicas, and give all of them rank 0's generators."""
    generators = model.generators() if hasattr(model, "generators") else {}
    states = {name: generator.bit_generator.state for name, generator in generators.items()}
    facts = {**facts, "the layers that draw random numbers": sorted(generators)}
    # Gradients are averaged, but never parameters: those that differ would do so to the end.
    first, *_ = check_same(transport, facts | checksums(params), states)
    for name, generator in generators.items():
        generator.bit_generator.state = first[name]


class ReplicaExecutor(PlainExecutor):
    """An `PlainExecutor` of one of several replicas, which all run the same schedule on their own part of the samples.

    Each S of the schedule sums the gradients of its stage over all ranks; neighbours share a bucket. A sum begins as
    soon as the gradients of its bucket, and of those before it in the schedule, are complete, and an update waits for
    its sum. S on a separate stream, as `synchronise` places them, overlap the computation; S among the computations are
    waited for at once. With updates before the next forwards (`place_updates` with ``fusion="forward"``, or after
    `reverse_first_k`) the remaining sums overlap those, too.

    The gradient is that of the mean over all ranks, whatever each one's share: see `PlainExecutor`. It equals one
    worker's with all samples, up to rounding. All ranks make the same update, so their parameters stay bitwise equal,
    also from run to run. Each `Step` returned has the loss of all samples, and the norm of the averaged gradient, which
    decides the clipping. Layers see only their own rank's samples. Batch normalisation therefore keeps separate
    statistics on each rank, and only rank 0's are used afterwards. Dropout draws its rows of one worker's mask
    (`sparsebp.nn.draw_rows`): the random generators begin with rank 0's states, and advance as one worker's.

    Parameters
    ----------
    model, loss, optimizer, clip_norm, observer
        As for `PlainExecutor`; the same on all ranks, except for `observer`.
    schedule
        Of one worker and one stream, with one S per stage, on that stream or a separate one, and one update per step.
    transport
        Between the ranks.
    sharded
        Whether each rank has the optimizer's state only for its shard of the parameters, updates that, and gathers the
        other shards; `gather_state` gathers the state (Rajbhandari et al., "ZeRO", SC 2020, stage 1). For the rules of
        `sparsebp.optim`, which are all element-wise.

    Attributes
    ----------
    bucket_bytes
        Bytes from which on a bucket is full.
    buckets
        The summed gradients; ``buckets.waited`` has the seconds that this rank has waited for sums.

    Notes
    -----
    After an error a rank's sums no longer match the other ranks': it takes no further steps, and `flush` does nothing.
    Tell the others by `Transport.abort`.

    Sums during the backward pass: Zhang et al., "Poseidon", USENIX ATC 2017; in buckets: Li et al., "PyTorch
    Distributed", VLDB 2020, §3.2; which go first: Oh et al., "Out-of-order backprop", EuroSys 2022, §5.1.
    """

    bucket_bytes: ClassVar[int] = BUCKET_BYTES
    plain: ClassVar[str] = "data-parallel"

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, schedule: Schedule, transport: Transport, *,
        clip_norm: float | None = None, observer: Observer | None = None, sharded: bool = False,
    ) -> None:  # fmt: skip
        self.sharded = check_flag("sharded", sharded)
        validate(schedule)
        self.transport = transport
        self._sent, self._blocking, compute = _without_syncs(schedule)
        self._totals, self._optimizer = Totals(transport), optimizer
        self._failed: str | None = None
        self._shard_optimizer: PieceOptimizer | None = None
        facts = {"the schedule": (schedule.graph, [lane.cells for lane in schedule.lanes]), "clip_norm": clip_norm}
        begin_alike(transport, model, facts, trained_parameters(model, optimizer))
        super().__init__(model, loss, optimizer, compute, clip_norm=clip_norm, observer=observer)
        self.schedule = schedule
        if schedule.graph.first == "U" and clip_norm is None:
            self._late = True  # the sums of a step arrive, and are checked, within the next one

    def _make_actions(self, loss: Any, optimizer: Any, clip_norm: float | None, observer: Observer) -> Actions:
        params = trained_parameters(self.stages.model, optimizer)
        names = self.stages.updated_at(self._sent, last=True)  # a parameter that several stages share: with the last
        sent = {name: params[name] for stage in self._sent for name in names.get(stage, ())}
        parts = bucket_names(sent, *self._times(), self.bucket_bytes)
        kind = ShardedBuckets if self.sharded else Buckets
        self.buckets = kind(params, parts, self.transport, blocking=self._blocking)
        rest: Any = {"buckets": self.buckets, "totals": self._totals}
        if not isinstance(self.buckets, ShardedBuckets):
            return ReplicaActions(self.stages, loss, optimizer, clip_norm, observer, **rest)
        self._shard_optimizer = PieceOptimizer(optimizer, self.buckets.pieces)
        return ShardedActions(self.stages, loss, self._shard_optimizer, clip_norm, observer, **rest)

    def gather_state(self, *, everywhere: bool = False) -> None:
        """Gather the optimizer's state for now, on rank 0 or everywhere, and take over rank 0's running statistics.

        All ranks call it after `flush`.
        """
        with self._failing():
            exchange(self.transport, {name: (0, array) for name, array in buffers_of(self.stages.model).items()})
            if self._shard_optimizer is not None and isinstance(self.buckets, ShardedBuckets):
                gathered(self._shard_optimizer, self.buckets, keep=everywhere or self.transport.rank == 0)

    @property
    def state_bytes(self) -> int:
        """The bytes of optimizer state that this rank needs for its steps."""
        buffers = getattr(self._actions.optimizer, "buffers", {})
        return sum(array.nbytes for arrays in buffers.values() for array in arrays.values())

    def _times(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return the places in the schedule where each parameter's gradient is complete, and where it is used."""
        first, parts = self._order.graph.first, [part for lane in self._order.lanes for part in parts_in(lane)]
        ended = {part.stage: place for place, part in enumerate(parts) if part.kind == "W"}
        if self.sharded:  # a bucket is updated as a whole: no action may read the old values any more
            ended |= {
                part.stage: place for place, part in enumerate(parts) if part.kind in "IW" and part.stage in ended
            }
        later = len(parts) if first == "U" else 0  # updates are of the step before
        updates = {part.stage: place + later for place, part in enumerate(parts) if part.kind == "U"}
        complete: dict[str, int] = {}
        for stage in sorted(ended, key=ended.__getitem__):
            complete |= dict.fromkeys(self.stages[stage].parameters.values(), ended[stage])
        names = self.stages.updated_at(updates, last=first != "U")
        return complete, {name: updates[stage] for stage, some in names.items() for name in some}

    def own(self, indices: Indices) -> Indices:
        """Return this rank's part of a micro-batch's samples: equal parts, up to one sample."""
        return share_of_rank(indices, self.transport)

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step, with the same number of micro-batches on all ranks; see `PlainExecutor.step`.

        This rank's micro-batches may be empty, but not all on all ranks.
        """
        if self._failed is not None:
            raise TransportError("A step of this rank has failed before", expected="the same steps on all ranks",
                                 got=self._failed, remedy="Make a new executor on every rank")  # fmt: skip
        with self._failing():
            if self._shard_optimizer is not None:
                self._shard_optimizer.take()
            counts = self._actions.counts(targets_of(self.stages, batches)[1], deferred=self._defers_metrics)
            self._totals.open(batches, counts, self._optimizer)
            return super().step(batches, tag)

    def _step(self, batches: Sequence[Batch], tag: Any) -> list[Step]:
        return self._close_totals(super()._step(batches, tag))

    def _finish(self) -> list[Step]:
        return self._close_totals(super()._finish())

    def _close_totals(self, steps: list[Step]) -> list[Step]:
        for step in steps:
            self._totals.close(step)
        return steps

    def flush(self, *, wait: bool = True) -> list[Step]:
        """Finish the last step, as `PlainExecutor.flush`; nothing once a call has failed."""
        if self._failed is not None:
            return []
        with self._failing():
            return super().flush(wait=wait)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Remember an error: this rank is then out of step with the others."""
        try:
            yield
        except BaseException as error:
            self._failed = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        """Drop unfinished work; see `PlainExecutor.close`."""
        super().close()
        self._totals.forget()


def _without_syncs(schedule: Schedule) -> tuple[list[int], bool, Schedule]:
    """Return the stages in the order of their S, whether S block, and the schedule without them."""
    lanes = [lane for lane in schedule.lanes if any(part.kind == "S" for part in parts_in(lane))]
    if not schedule.graph.synchronised or len(lanes) > 1:
        raise OptionError("The schedule does not say in which order gradients are synchronised",
                          expected="one S a stage, on one stream",
                          got=f"{schedule.name or 'one'} with S on {len(lanes)} streams",
                          remedy="Pass synchronise(schedule) on, with place_updates after it")  # fmt: skip
    sent = [part.stage for lane in lanes for part in parts_in(lane) if part.kind == "S"]
    blocking = any(part.kind != "S" for lane in lanes for part in parts_in(lane))
    kept = (replace(lane, cells=tuple(p for p in parts_in(lane) if p.kind != "S")) for lane in schedule.lanes)
    compute = tuple(lane for lane in kept if lane.cells)
    if len(compute) > 1:
        raise OptionError("A replica computes on one stream", expected="one stream, and another for the S",
                          got=", ".join(lane.stream for lane in compute))  # fmt: skip
    graph = replace(schedule.graph, synchronised=False)
    return sent, blocking, replace(schedule, graph=graph, lanes=compute)


# Reverse first-k scheduling that searches k with costs measured during training.

MEASURED = 5
"""Steps to measure, after one unmeasured step."""


class TimedReplica(TimedExecutor, ReplicaExecutor):
    """A `ReplicaExecutor` that records when every action ran, on a clock that stops while it waits for sums."""

    def _stamp(self) -> Any:
        stamp = super()._stamp()
        return stamp - self.buckets.waited if isinstance(stamp, float) else stamp

    def _bytes_of(self, action: Action, step: Step) -> StageBytes:
        if len(step.batches[action.microbatch or 0][1]):
            return super()._bytes_of(action, step)
        return StageBytes(0, 0, 0)  # another rank has the samples, and rank 0 decides

    def costs(self, sums: Mapping[int, float]) -> Costs:
        """Return the costs of all recorded actions, and of sums of every stage that take `sums` seconds."""
        noted = measured_costs(self.spans(), self.bytes)
        kinds: tuple[Kind, ...] = ("F", "I", "W", "U")
        if not backend.is_host(self._xp):  # its clock does not stop; no k changes the updates' duration
            kinds = kinds[:3]
        entries = {f"{stage}S": seconds for stage, seconds in sums.items()}
        for kind in kinds:
            entries |= {f"{stage}{kind}": noted.duration(Action(stage, kind, 0)) for stage in sums}
        return replace(noted, durations=Durations(entries))

    def sum_seconds(self, repeated: int = 3) -> dict[int, float]:
        """Return how long each stage's sums take while nothing else runs; all ranks call this."""
        transport = self.transport
        found = dict.fromkeys(range(len(self.stages)), 0.0)
        stage_of = {name: number for number, stage in enumerate(self.stages.all) for name in stage.parameters.values()}
        for bucket in self.buckets.all:
            scratch, seconds = backend.namespace(bucket.flat).zeros_like(bucket.flat), []
            for _ in range(repeated):
                transport.barrier()
                began = time.perf_counter()
                transport.allreduce(scratch).wait()
                backend.synchronize(backend.namespace(scratch))  # synchronize!
                seconds.append(time.perf_counter() - began)
            for name, size in bucket.sizes.items():
                found[stage_of[name]] += median(seconds) * size / max(1, bucket.flat.size)
        return found


class ReverseFirstKExecutor(SearchingExecutor):
    """Replicas that measure their first steps, search the k of reverse first-k scheduling, and go on with that."""

    # Rank 0 decides, from its actions' durations and the sums', and tells
    # the others; results are the same as with any schedule. Updates come right before the next forwards.
    # steps: How many to measure.
    # k: How many stages' weight gradients come last, in the order of the next forwards; None until it is known.
    # costs: Rank 0's measured ones, on all ranks; None until then.
    # Oh et al., "Out-of-order backprop", EuroSys 2022, §5.1 and Algorithm 2; `sparsebp.schedule.builders.search_k`.

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, transport: Transport, *, clip_norm: float | None = None,
        observer: Observer | None = None, sharded: bool = False, steps: int = MEASURED,
    ) -> None:  # fmt: skip
        self._parts = model, loss, optimizer
        self._options: dict[str, Any] = {
            "transport": transport, "clip_norm": clip_norm, "observer": observer, "sharded": sharded,
        }  # fmt: skip
        self.transport, self._wanted, self._left = transport, steps, steps + 1
        self.k: int | None = None
        self.costs: Costs | None = None
        self.stages = Stages(model, trained_parameters(model, optimizer))
        self.go_on_with(TimedReplica(*self._parts, self._schedule(0), **self._options))

    def _schedule(self, k: int) -> Schedule:
        size: dict[str, Any] = {"stages": len(self.stages), "unweighted": self.stages.unweighted}
        return place_updates(reverse_first_k(**size, k=k, costs=self.costs), "forward")

    def step(self, batches: Sequence[Batch], tag: Any = None) -> list[Step]:
        """Run one step; see `ReplicaExecutor.step`."""
        if len(batches) != 1:
            raise OptionError("Reverse first-k scheduling is for one micro-batch a step", expected="accumulate=1",
                              got=len(batches), remedy="Use another schedule, or a smaller batch")  # fmt: skip
        timed = self.inner if isinstance(self.inner, TimedReplica) else None
        if timed is not None:
            timed.counts = self._left <= self._wanted
        done = self.inner.step(batches, tag)
        if timed is not None:
            self._left -= 1
            if self._left == 0:
                done += timed.flush()
                self._search(timed)
        return done

    def _search(self, timed: TimedReplica) -> None:
        sums, found = timed.sum_seconds(), None
        if self.transport.rank == 0:
            self.costs = timed.costs(sums)
            # Several steps are simulated, since sums continue into the next one.
            k = search_k(lambda k: -simulate(self._schedule(k), self.costs, steps=REPEATED).makespan, len(self.stages))
            found = k, self.costs
        self.k, self.costs = self.transport.broadcast(found)
        timed.close()
        self.go_on_with(ReplicaExecutor(*self._parts, self._schedule(self.k), **self._options))
