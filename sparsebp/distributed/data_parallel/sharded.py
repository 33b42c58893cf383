"""Optimizer states in pieces: each rank has those of a part of every bucket, updates it, and gets the others' parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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

    def __init__(self, bucket: Bucket, rank: int, size: int) -> None:
        length = bucket.flat.size // size
        self.flat: Array = backend.namespace(bucket.flat).zeros(length, bucket.flat.dtype)
        self.places: dict[str, slice] = {}
        self.pieces: dict[str, tuple[int, int]] = {}
        begin = -rank * length  # of the parameter, seen from this part
        for name, view in bucket.views.items():
            first, last = max(0, begin), min(length, begin + view.size)
            if first < last:
                self.places[name] = slice(first, last)
                self.pieces[name] = first - begin, last - begin
            begin += view.size

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

    def __init__(
        self, params: Mapping[str, Array], parts: Iterable[Iterable[str]], transport: Any, *, blocking: bool = False
    ) -> None:
        super().__init__(params, parts, transport, blocking=blocking)
        self.params = params
        self.shards = {id(bucket): Shard(bucket, transport.rank, transport.size) for bucket in self.all}

    def begin(self, bucket: Bucket) -> None:
        """Begin to sum this rank's part of a full bucket."""
        bucket.handle = self.transport.reduce_scatter(bucket.flat, self.shards[id(bucket)].flat)

    def holding(self, names: Iterable[str]) -> list[Bucket]:
        """Return the buckets with any of `names`, in the order of their sums."""
        wanted = set(names)
        return [bucket for bucket in self.all if not wanted.isdisjoint(bucket.names)]

    def summed(self, buckets: Sequence[Bucket]) -> dict[str, Array]:
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

    def take(self, bucket: Bucket, handle: Handle) -> None:
        """Write the others' parts to the parameters."""
        self.timed(handle)
        for name, view in bucket.views.items():
            self.params[name][...] = view


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
            begin = 0
            for name, view in bucket.views.items():
                if keep and name in names:
                    arrays[name] = out[begin : begin + view.size].reshape(view.shape).copy()
                begin += view.size
        whole[kind] = {name: arrays[name] for name in names if name in arrays}
    if keep:
        optimizer.restore(whole)
