"""Ranks that are threads of one process: for tests, and to run a schedule of several workers on one device."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import TransportError
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Handle, Transport

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Transport], T]) -> list[T]:
    """Run ``work(transport)`` on `size` ranks, each a thread of this process, and return what each returned.

    Raises
    ------
    Exception
        Of the first rank that failed; the others have been ended by then.
    OptionError
        `size` is below 1.
    """
    world = _World(check_integer("size", size, 1))
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        transport = InProcess(world, rank)
        try:
            results[rank] = work(transport)
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
    """What the ranks have in common: messages under way, collective calls, the first failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.sent: dict[tuple[int, int, int], deque[_Operation]] = defaultdict(deque)
        self.posted: dict[tuple[int, int, int], deque[_Operation]] = defaultdict(deque)
        self.given: dict[int, dict[int, Any]] = {}  # collective call -> what each rank gave
        self.taken: dict[int, int] = defaultdict(int)
        self.failed: tuple[int, BaseException] | None = None

    def wait(self, ready: Callable[[], bool]) -> None:
        """Return when `ready`, with the condition held by the caller."""
        while not ready():
            if self.failed is not None:
                rank, error = self.failed
                raise TransportError(
                    f"Rank {rank} has failed", expected="all ranks to go on", got=f"{type(error).__name__}: {error}",
                    remedy="See that rank's own error",
                )  # fmt: skip
            self.changed.wait()


class _Operation:
    """A send or a receive; done when its other half was there."""

    def __init__(self, world: _World, array: Array) -> None:
        self.world, self.array, self.ended = world, array, False
        self.error: TransportError | None = None

    def wait(self) -> None:
        with self.world.changed:
            self.world.wait(lambda: self.ended)
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
        operation = _Operation(self.world, array)
        with self.world.changed:
            self.world.sent[self.rank, to, tag].append(operation)
            self._match(self.rank, to, tag)
        return operation

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        operation = _Operation(self.world, out)
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
                other.error = TransportError(
                    f"Rank {to} expected other data of rank {source}",
                    expected=f"{other.array.dtype} {other.array.shape}", got=f"{one.array.dtype} {one.array.shape}",
                    remedy="Give all ranks the same model, batches and schedule",
                )  # fmt: skip
            one.ended = other.ended = True
            self.world.changed.notify_all()

    def allreduce(self, array: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            array[...] = reduce(lambda a, b: a + b, arrays)

        return _Later(self, self._give(array.copy()), finish)

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            begin = self.rank * out.size
            parts = [one.reshape(-1)[begin : begin + out.size] for one in arrays]
            out.reshape(-1)[...] = reduce(lambda a, b: a + b, parts)

        return _Later(self, self._give(array.copy()), finish)

    def allgather(self, array: Array, out: Array) -> Handle:
        def finish(arrays: list[Array]) -> None:
            for rank, one in enumerate(arrays):
                out.reshape(-1)[rank * array.size : (rank + 1) * array.size] = one.reshape(-1)

        return _Later(self, self._give(array.copy()), finish)

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        arrays = self.share(array.copy())
        return reduce(combine, arrays[: self.rank]) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        return self._collect(self._give(value))

    def broadcast(self, value: Any, root: int = 0) -> Any:
        return self.share(value)[root]

    def barrier(self) -> None:
        self.share(None)

    def _give(self, value: Any) -> int:
        """Give this rank's part of the next collective call, and return its number."""
        call, self._calls = self._calls, self._calls + 1
        with self.world.changed:
            self.world.given.setdefault(call, {})[self.rank] = value
            self.world.changed.notify_all()
        return call

    def _collect(self, call: int) -> list[Any]:
        """Return what all ranks gave, in their order, when it is there."""
        world = self.world
        with world.changed:
            world.wait(lambda: len(world.given[call]) == world.size)
            values = [world.given[call][rank] for rank in range(world.size)]
            world.taken[call] += 1
            if world.taken[call] == world.size:
                del world.given[call], world.taken[call]
        return values

    def abort(self, error: BaseException) -> None:
        with self.world.changed:
            if self.world.failed is None:
                self.world.failed = self.rank, error
            self.world.changed.notify_all()

    def close(self) -> None:
        pass
