"""Ranks as threads of one process: for tests, and to run a schedule of several workers on one device."""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from functools import reduce
from typing import Any, TypeVar

from sparsebp.comm.transport import Handle, Transport, check_callable, other_call, other_data, packed
from sparsebp.core import backend
from sparsebp.core.check import Array, check_integer
from sparsebp.core.errors import TransportError
from sparsebp.core.locks import forkable_lock

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Transport], T]) -> list[T]:
    """Run ``work(transport)`` on `size` ranks, each a thread of this process, and return each one's result.

    Raises
    ------
    Exception
        The error of the first rank that failed; the others have been ended by then.
    OptionError
        `size` is below 1, or `work` not a function.
    """
    check_callable("work", work)
    world = _World(check_integer("size", size, 1))
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        transport = InProcess(world, rank)
        try:
            results[rank] = work(transport)
            world.leave(rank)
        except BaseException as error:  # raised again by the caller's thread
            transport.abort(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failed is not None:
        raise world.failed[1]
    return results


class _World:
    """Shared state of the ranks: messages under way, collective calls, the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition(forkable_lock())
        self.sent: dict[tuple[int, int, int], deque[_Operation]] = defaultdict(deque)
        self.posted: dict[tuple[int, int, int], deque[_Operation]] = defaultdict(deque)
        self.given: dict[int, dict[int, Any]] = {}  # collective call -> what each rank gave
        self.taken: dict[int, int] = defaultdict(int)
        self.failed: tuple[int, BaseException] | None = None
        self.left: set[int] = set()
        self.waiting: dict[int, Callable[[], bool]] = {}

    def wait(self, rank: int, ready: Callable[[], bool], needs: Callable[[], Collection[int]]) -> None:
        """Let `rank` wait until `ready`, which the ranks that it `needs` bring about. The caller holds `changed`."""
        self.waiting[rank] = ready
        try:
            while not ready():
                self._check(rank, needs())
                self.changed.wait()
        finally:
            del self.waiting[rank]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def _check(self, rank: int, needs: Collection[int]) -> None:
        if self.failed is not None:
            failed, error = self.failed
            raise TransportError(f"Rank {failed} has failed", expected="all ranks to go on",
                                 got=f"{type(error).__name__}: {error}".rstrip("."),
                                 remedy="See that rank's own error")  # fmt: skip
        for other in self.left.intersection(needs):
            raise TransportError(f"Rank {other} has ended, and rank {rank} waits for it",
                                 expected="the same program on all ranks", got="the end of its program",
                                 remedy="Let all ranks take the same number of steps")  # fmt: skip
        if len(self.waiting) + len(self.left) == self.size and not any(ready() for ready in self.waiting.values()):
            raise TransportError(
                "All ranks wait for each other", expected="a rank that goes on", got=f"{len(self.waiting)} that wait",
                remedy="Let every message have its receive, in an order that can come to an end"
            )  # fmt: skip


class _Operation:
    """A send or a receive; done when its other half has matched it."""

    def __init__(self, world: _World, array: Array, rank: int, peer: int) -> None:
        self.world, self.array, self.rank, self.peer, self.ended = world, array, rank, peer, False
        self.error: TransportError | None = None

    def wait(self) -> None:
        with self.world.changed:
            self.world.wait(self.rank, lambda: self.ended, lambda: (self.peer,))
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        with self.world.changed:
            return self.ended


class _Later:
    """A collective call that has begun."""

    def __init__(self, transport: InProcess, call: int, finish: Callable[[list[Any]], None]) -> None:
        self.transport, self.call, self.finish = transport, call, finish
        self.ended = False

    def wait(self) -> None:
        if not self.ended:
            self.finish(self.transport._collect(self.call))
            self.ended = True

    def done(self) -> bool:
        world = self.transport.world
        with world.changed:
            return self.ended or len(world.given.get(self.call, ())) == world.size


class InProcess(Transport):
    """One rank of `run_ranks`. Sums are made in the order of the ranks."""

    on_device = True

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.size = world, rank, world.size
        self._calls = 0

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        self.check_message(array, to, tag)
        operation = _Operation(self.world, array, self.rank, to)
        with self.world.changed:
            self.world.sent[self.rank, to, tag].append(operation)
            self._match(self.rank, to, tag)
        return operation

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        self.check_message(out, source, tag, written=True)
        operation = _Operation(self.world, out, self.rank, source)
        with self.world.changed:
            self.world.posted[source, self.rank, tag].append(operation)
            self._match(source, self.rank, tag)
        return operation

    def _match(self, source: int, to: int, tag: int) -> None:
        sent, posted = self.world.sent[source, to, tag], self.world.posted[source, to, tag]
        if sent and posted:
            one, other = sent.popleft(), posted.popleft()
            if one.array.shape == other.array.shape and one.array.dtype == other.array.dtype:
                other.array[...] = one.array
                backend.synchronize(backend.namespace(one.array))
            else:
                wanted, got = (f"{end.array.dtype} {end.array.shape}" for end in (other, one))
                other.error = other_data(to, source, wanted, got)
            one.ended = other.ended = True
            self.world.changed.notify_all()

    def allreduce(self, array: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            array[...] = reduce(lambda a, b: a + b, arrays)

        self.check_call(array, written=True)
        return _Later(self, self._give("allreduce", array.copy()), finish)

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            begin = self.rank * out.size
            parts = [one.reshape(-1)[begin : begin + out.size] for one in arrays]
            out.reshape(-1)[...] = reduce(lambda a, b: a + b, parts)

        self.check_call(array, out, parts=self.size)
        return _Later(self, self._give("reduce_scatter", array.copy()), finish)

    def allgather(self, array: Array, out: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            for rank, one in enumerate(arrays):
                out.reshape(-1)[rank * array.size : (rank + 1) * array.size] = one.reshape(-1)

        self.check_call(out, array, parts=self.size, written=True)
        return _Later(self, self._give("allgather", array.copy()), finish)

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        self.check_call(array)
        check_callable("combine", combine)
        arrays = self._collect(self._give("exscan", array.copy()))
        return reduce(combine, arrays[: self.rank]) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        return list(map(pickle.loads, self._collect(self._give("share", packed(value)))))

    def barrier(self) -> None:
        self._collect(self._give("barrier", None))

    def _give(self, kind: str, value: Any) -> int:
        """Give this rank's part of the next collective call, and return its number."""
        self.check_open()
        call, self._calls = self._calls, self._calls + 1
        what = f"{kind} of {value.nbytes} bytes of {value.dtype}" if hasattr(value, "nbytes") else kind
        with self.world.changed:
            self.world.given.setdefault(call, {})[self.rank] = what, value
            self.world.changed.notify_all()
        return call

    def _collect(self, call: int) -> list[Any]:
        """Wait for the values that all ranks gave, and return them in order."""
        world = self.world
        with world.changed:
            world.wait(
                self.rank, lambda: len(world.given[call]) == world.size,
                lambda: set(range(world.size)) - world.given[call].keys(),
            )  # fmt: skip
            given = [world.given[call][rank] for rank in range(world.size)]
            world.taken[call] += 1
            if world.taken[call] == world.size:
                del world.given[call], world.taken[call]
        own = given[self.rank][0]
        for rank, (what, _) in enumerate(given):
            if what != own:
                raise other_call(rank, self.rank, f"{own}, the {call + 1}th call", what)
        return [value for _, value in given]

    def abort(self, error: BaseException) -> None:
        with self.world.changed:
            if self.world.failed is None:
                self.world.failed = self.rank, error
            self.world.changed.notify_all()

    def close(self) -> None:
        self.closed = True
