"""Optimizer states in pieces: each rank has those of a part of every bucket, updates it, and gets the others' parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.distributed.data_parallel.actions import ReplicaActions
from sparsebp.distributed.data_parallel.buckets import Bucket, Buckets
from sparsebp.distributed.transport import Handle
from sparsebp.optim.clip import clip_grad_norm, clip_on_device, square_sums
from sparsebp.optim.pieces import PieceOptimizer
from sparsebp.runtime.step import Step


class DealtBucket(Bucket):
    """A `Bucket` of which every rank has a stretch of each parameter: one after the other, in a row of its own.

    So which elements a rank has depends on the parameter's size alone, not on what else is in the bucket, and with it
    on the order of the sums: sums of squares are of the same stretches in every schedule, and have the same bits.

    Attributes
    ----------
    slots
        Where every parameter begins in each row, and how many elements a row has of it; the last ones may have fewer.
    """

    def lay_out(self, params: Mapping[str, Array], ranks: int) -> None:
        """Make the array: a row a rank, with zeros where a parameter has no elements left."""
        first = next(iter(params.values()))
        self.slots: dict[str, tuple[int, int]] = {}
        width = 0
        for name, size in self.sizes.items():
            self.slots[name] = width, -(-size // ranks)
            width += self.slots[name][1]
        self._rows = ranks, width
        self.flat = backend.namespace(first).zeros(ranks * width, first.dtype)

    def put(self, name: str, grad: Array | int) -> Array:
        """Write this rank's gradient of a parameter, or 0, and return the array that it is in from then on."""
        if isinstance(grad, int):
            begin, length = self.slots[name]
            self.flat.reshape(self._rows)[:, begin : begin + length] = grad
        else:
            for room, part in self._pairs(name, self.flat, grad.reshape(-1)):
                room[...] = part
        return self.flat

    def read(self, name: str, flat: Array, out: Array) -> None:
        """Write a parameter of `flat`, an array like the bucket's, to `out`, C-contiguous."""
        for room, part in self._pairs(name, flat, out.reshape(-1)):
            part[...] = room

    def _pairs(self, name: str, flat: Array, values: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the places of a parameter in `flat` and what belongs there of its `values`: all full rows, the rest."""
        begin, length = self.slots[name]
        if length == 0:
            return
        full, rest = divmod(values.size, length)
        room = flat.reshape(self._rows)[:, begin : begin + length]
        yield room[:full], values[: full * length].reshape(full, length)
        if rest:
            yield room[full, :rest], values[full * length :]


class Shard:
    """This rank's part of a bucket.

    Attributes
    ----------
    flat
        As long on all ranks: first the sums of this part of the gradients, then, updated, of the parameters.
    places
        Where each parameter has its piece in `flat`, as slices.
    pieces
        Begin and end of each one's piece in the parameter's own elements.
    """

    def __init__(self, bucket: DealtBucket, rank: int, size: int) -> None:
        self.flat: Array = backend.namespace(bucket.flat).zeros(bucket.flat.size // size, bucket.flat.dtype)
        self.places: dict[str, slice] = {}
        self.pieces: dict[str, tuple[int, int]] = {}
        for name, (begin, length) in bucket.slots.items():
            first, last = rank * length, min(bucket.sizes[name], (rank + 1) * length)
            if first < last:
                self.places[name] = slice(begin, begin + last - first)
                self.pieces[name] = first, last

    def piece(self, name: str) -> Array:
        """Return the piece of a parameter."""
        return self.flat[self.places[name]]


class ShardedBuckets(Buckets):
    """`Buckets` of which each rank has the sums of its own part alone.

    Attributes
    ----------
    shards
        This rank's part of every bucket.
    """

    kind = DealtBucket
    all: list[DealtBucket]  # type: ignore[assignment]

    def __init__(
        self, params: Mapping[str, Array], parts: Iterable[Iterable[str]], transport: Any, *, blocking: bool = False
    ) -> None:
        super().__init__(params, parts, transport, blocking=blocking)
        self.params = params
        self.shards = {id(bucket): Shard(bucket, transport.rank, transport.size) for bucket in self.all}

    def begin(self, bucket: Bucket) -> None:
        """Begin to sum this rank's part of a full bucket."""
        bucket.handle = self.transport.reduce_scatter(bucket.flat, self.shards[id(bucket)].flat)

    def holding(self, names: Iterable[str]) -> list[DealtBucket]:
        """Return the buckets with any of `names`, in the order of their sums."""
        wanted = set(names)
        return [bucket for bucket in self.all if not wanted.isdisjoint(bucket.names)]

    def summed(self, buckets: Sequence[DealtBucket]) -> dict[str, Array]:
        """Return the sums of this rank's pieces, by the parameters' names, when they are there."""
        grads: dict[str, Array] = {}
        for bucket in buckets:
            self.wait(bucket)
            shard = self.shards[id(bucket)]
            grads |= {name: shard.piece(name) for name in shard.places}
        return grads

    def spread(self, bucket: Bucket) -> Handle:
        """Begin to give the others this rank's part of the parameters, once it is updated."""
        shard = self.shards[id(bucket)]
        for name, (begin, end) in shard.pieces.items():
            shard.piece(name)[...] = self.params[name].reshape(-1)[begin:end]
        return self.transport.allgather(shard.flat, bucket.flat)

    def take(self, bucket: DealtBucket, handle: Handle) -> None:
        """Write the others' parts to the parameters."""
        self.timed(handle)
        for name in bucket.names:
            bucket.read(name, bucket.flat, self.params[name])


class ShardedActions(ReplicaActions):
    """`ReplicaActions` that update this rank's pieces. A bucket is updated as a whole, when the first of it is."""

    buckets: ShardedBuckets
    optimizer: PieceOptimizer

    def gather(self, step: Step) -> None:
        """Clip: wait for all gradients, and look at them together."""
        if self.clip_norm is None:
            return
        grads = self.buckets.summed(self.buckets.all)
        self._look_at(step, self.stages.names, grads)
        if step.later is None:
            clip_grad_norm(grads, self.clip_norm, norm=step.norm(self.stages.names))
        elif grads:
            clip_on_device(grads, self.clip_norm, [sums for _, sums in step.later.sums])

    def use(self, step: Step, names: Sequence[str], *, gathered: bool) -> None:
        """Update the buckets of some parameters, unless they are updated already."""
        buckets = self.buckets.holding(name for name in names if name in step.grads)
        grads = self.buckets.summed(buckets)
        if not gathered or self.clip_norm is None:
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
        """Make the sums of squares of whole gradients from those of the pieces on all ranks."""
        if not names:
            return
        rows = {name: row for row, name in enumerate(names)}
        squares = backend.namespace(self.buckets.all[0].flat).zeros(len(names), np.float64)
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
            self.watch.gradients(step, wrong)


def gathered(optimizer: PieceOptimizer, buckets: ShardedBuckets, *, keep: bool) -> None:
    """Put the state of all ranks together, where `keep` says so; all ranks call this."""
    transport = buckets.transport
    whole: dict[str, dict[str, Array]] = {}
    for kind, names in optimizer.kinds.items():
        arrays: dict[str, Array] = {}
        for bucket in buckets.all:
            shard = buckets.shards[id(bucket)]
            xp = backend.namespace(shard.flat)
            own, out = xp.zeros_like(shard.flat), xp.empty_like(bucket.flat)
            for name, piece in optimizer.buffers.get(kind, {}).items():
                if name in shard.places:
                    own[shard.places[name]] = piece
            transport.allgather(own, out).wait()
            for name in bucket.names if keep else ():
                if name in names:
                    arrays[name] = xp.empty_like(buckets.params[name])
                    bucket.read(name, out, arrays[name])
        whole[kind] = {name: arrays[name] for name in names if name in arrays}
    if keep:
        optimizer.restore(whole)
