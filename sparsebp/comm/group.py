"""Some of the ranks of a transport, with numbers of their own: the pipelines of a grid, or their replicas."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from sparsebp.comm.transport import Handle, Transport, check_callable, host_of, other_call, packed, sum_in_order
from sparsebp.core import backend
from sparsebp.core.check import Array

_KINDS = ("allreduce", "reduce_scatter", "allgather", "exscan", "share", "barrier")


class _Call:
    """A call of all ranks: messages under way, the others' headers, and what is done once all have ended."""

    def __init__(
        self, transport: GroupTransport, headers: np.ndarray, heading: Sequence[Handle], handles: Sequence[Handle],
        finish: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        self._transport, self._headers = transport, headers
        self._heading, self._handles, self._finish = list(heading), list(handles), finish
        self._ended = False

    def wait(self) -> None:
        if self._ended:
            return
        for handle in self._heading:
            handle.wait()
        rank = self._transport.rank
        for other, header in enumerate(self._headers):  # whoever makes another call does not send these arrays
            if list(header) != list(self._headers[rank]):
                raise other_call(other, rank, *map(_described, (self._headers[rank], header)))
        for handle in self._handles:
            handle.wait()
        self._ended = True
        if self._finish is not None:
            self._finish()

    def done(self) -> bool:
        return self._ended or all(handle.done() for handle in (*self._heading, *self._handles))


def _described(header: np.ndarray) -> str:
    kind, size, char = map(int, header)
    return f"{_KINDS[kind]} of {size} bytes of {np.dtype(chr(char))}" if size >= 0 else _KINDS[kind]


class GroupTransport(Transport):
    """The ranks `members` of a transport, in that order, of which this is one; each of them makes one.

    Messages go over that transport, and calls of all ranks are made of messages, each rank with each: for groups of a
    few. Two ranks may be together in one group only. The failure of any rank of the transport ends all waits.
    """

    def __init__(self, whole: Transport, members: Sequence[int]) -> None:
        self._whole, self._members = whole, list(members)
        self.rank, self.size = self._members.index(whole.rank), len(self._members)
        self.on_device = whole.on_device
        self._data, self._header = whole.largest_tag, whole.largest_tag - 1  # tags
        self.largest_tag = whole.largest_tag - 2
        self._others = [rank for rank in range(self.size) if rank != self.rank]
        if host_of(whole) is not whole:
            self.host = GroupTransport(host_of(whole), members)

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        self.check_message(array, to, tag)
        return self._whole.isend(array, self._members[to], tag)

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        self.check_message(out, source, tag, written=True)
        return self._whole.irecv(out, self._members[source], tag)

    def _call(
        self, kind: str, like: Array | None, given: Sequence[Array], taken: Sequence[Array],
        finish: Callable[[], None] | None = None,
    ) -> Handle:  # fmt: skip
        """Begin to send each other rank its array, and to receive its."""
        self.check_open()
        headers = np.empty((self.size, 3), np.int64)
        size, char = (-1, ord("b")) if like is None else (like.nbytes, ord(like.dtype.char))
        headers[self.rank] = _KINDS.index(kind), size, char
        own, others = [headers[self.rank]] * len(self._others), [headers[rank] for rank in self._others]
        heading = self._swap(host_of(self._whole), own, others, self._header)
        return _Call(self, headers, heading, self._swap(self._whole, given, taken, self._data), finish)

    def _swap(self, over: Transport, given: Sequence[Array], taken: Sequence[Array], tag: int) -> list[Handle]:
        peers = [self._members[rank] for rank in self._others]
        sends = [over.isend(array, rank, tag) for rank, array in zip(peers, given, strict=False)]
        return sends + [over.irecv(array, rank, tag) for rank, array in zip(peers, taken, strict=False)]

    def _sum(self, kind: str, mine: Array, given: Sequence[Array], out: Array) -> Handle:
        """Begin to send `given`; `out` is the sum, in the order of the ranks, of `mine` and the others' for this."""
        others = [backend.namespace(mine).empty_like(mine) for _ in self._others]
        arrays = list(others)
        arrays.insert(self.rank, mine)
        return self._call(kind, out, given, others, lambda: sum_in_order(arrays, out))

    def allreduce(self, array: Array) -> Handle:
        self.check_call(array, written=True)
        return self._sum("allreduce", array, [array] * len(self._others), array)

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        self.check_call(array, out, parts=self.size)
        parts = array.reshape(self.size, -1)
        return self._sum("reduce_scatter", parts[self.rank], [parts[r] for r in self._others], out.reshape(-1))

    def allgather(self, array: Array, out: Array) -> Handle:
        self.check_call(out, array, parts=self.size, written=True)
        return self._gather("allgather", array, out)

    def _gather(self, kind: str, array: Array, out: Array) -> Handle:
        parts, flat = out.reshape(self.size, -1), array.reshape(-1)
        parts[self.rank] = flat
        return self._call(kind, array, [flat] * len(self._others), [parts[rank] for rank in self._others])

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        self.check_call(array)
        check_callable("combine", combine)
        arrays = backend.namespace(array).empty((self.size, array.size), array.dtype)
        self._gather("exscan", array, arrays).wait()
        return reduce(combine, list(arrays[: self.rank])) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        host: Any = host_of(self)
        text = packed(value)
        sizes = np.empty(self.size, np.int64)
        host._gather("share", np.array([len(text)]), sizes).wait()
        given = np.frombuffer(text.ljust(-(-len(text) // 4) * 4), np.int32)
        taken = [np.empty(-(-int(sizes[rank]) // 4), np.int32) for rank in self._others]
        host._call("share", None, [given] * len(taken), taken).wait()
        values = [pickle.loads(array.tobytes()[: sizes[rank]]) for rank, array in zip(self._others, taken, strict=True)]
        values.insert(self.rank, pickle.loads(text))
        return values

    def barrier(self) -> None:
        self._call("barrier", None, [], []).wait()

    def abort(self, error: BaseException) -> None:
        self._whole.abort(error)

    def close(self) -> None:
        self.closed = True
