"""Gradients of many parameters in a few flat arrays, which are summed over all ranks as soon as they are full."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from sparsebp import backend
from sparsebp.core.errors import ScheduleError
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Handle, Transport

BUCKET_BYTES = 1 << 20
"""A bucket is full from this size on: large enough that what a message costs by itself (some 10 us) is little beside
its bytes, small enough that the last one, beside which nothing is computed any more, is short."""


class Bucket:
    """The gradients of some parameters, one after the other in one array that is kept from step to step.

    Attributes
    ----------
    names, sizes
        The parameters, and how many elements each has.
    flat
        Their gradients: those of this rank, then, once they have been waited for, the sums over all ranks. Zeros at the
        end make it as many equal parts as there are ranks.
    views
        The gradient of each parameter within `flat`, of the parameter's shape.
    """

    flat: Array

    def __init__(self, params: Mapping[str, Array], ranks: int) -> None:
        self.names, self.sizes = tuple(params), {name: param.size for name, param in params.items()}
        self.missing = len(params)
        self.summed = False
        self.handle: Handle | None = None
        self.lay_out(params, ranks)

    def lay_out(self, params: Mapping[str, Array], ranks: int) -> None:
        """Make the array, and say where each parameter is in it."""
        first = next(iter(params.values()))
        length = -(-sum(self.sizes.values()) // ranks) * ranks
        self.flat = backend.namespace(first).zeros(length, first.dtype)
        self.views: dict[str, Array] = {}
        begin = 0
        for name, param in params.items():
            self.views[name] = self.flat[begin : begin + param.size].reshape(param.shape)
            begin += param.size

    def put(self, name: str, grad: Array | int) -> Array:
        """Write this rank's gradient of a parameter, or 0, and return the array that it is in from then on."""
        view = self.views[name]
        view[...] = grad
        return view


class Buckets:
    """Sums gradients over all ranks, bucket by bucket.

    The buckets are begun in their order, whatever the order in which they are filled: it is the same on all ranks.

    Parameters
    ----------
    params
        The parameters.
    parts
        Their names, bucket by bucket, in the order in which their gradients are to be sent: see `parted`.
    transport
        Sums them.
    blocking
        Whether to wait for each sum as soon as it has begun.

    Attributes
    ----------
    all : list of Bucket
        In the order of their sums.
    waited
        Seconds that this rank has waited for sums, in all.
    """

    kind: ClassVar[type[Bucket]] = Bucket

    def __init__(
        self, params: Mapping[str, Array], parts: Iterable[Iterable[str]], transport: Transport, *,
        blocking: bool = False,
    ) -> None:  # fmt: skip
        self.transport, self.blocking, self.waited = transport, blocking, 0.0
        self.all = [self.kind({name: params[name] for name in names}, transport.size) for names in parts]
        self._of = {name: bucket for bucket in self.all for name in bucket.names}
        self._next = 0

    def put(self, grads: dict[str, Array], name: str) -> None:
        """Take over this rank's gradient of a parameter, zero if it has none; `grads` then has its place here."""
        bucket = self._of[name]
        grads[name] = bucket.put(name, grads.get(name, 0))
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
        """Return when the sums of a bucket are there.

        Raises
        ------
        ScheduleError
            They are not begun.
        """
        if bucket.summed:
            return
        if bucket.handle is None:
            raise ScheduleError("Gradients are used before they are all there", expected="every W before the U",
                                got=", ".join(bucket.names), remedy="Validate the schedule")  # fmt: skip
        self.timed(bucket.handle)
        bucket.handle, bucket.summed = None, True

    def timed(self, handle: Handle) -> None:
        """Wait, and note for how long."""
        began = time.perf_counter()
        handle.wait()
        self.waited += time.perf_counter() - began

    def wait_all(self) -> None:
        """Return when all sums are there."""
        for bucket in self.all:
            self.wait(bucket)

    def arriving(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Yield some of `names` whenever their sums are there, bucket after bucket."""
        wanted = set(names)
        for bucket in self.all:
            here = [name for name in bucket.names if name in wanted]
            if here:
                self.wait(bucket)
                yield here


def parted(
    params: Mapping[str, Array], complete: Mapping[str, int], used: Mapping[str, int], limit: int
) -> list[list[str]]:
    """Return the names of the parameters of each bucket: those that follow each other and have one dtype.

    Parameters
    ----------
    params
        The parameters in the order in which their gradients are to be sent.
    complete, used
        When each one's gradient is complete, and when it is used: of one bucket all are complete before any is used.
    limit
        Bytes from which on a bucket is full.
    """
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
