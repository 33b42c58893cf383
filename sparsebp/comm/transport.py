"""The interface that carries arrays between the workers of a schedule.

Workers are *ranks*, numbered from 0; all of them run the same program on their own part of the work.
"""

from __future__ import annotations

import abc
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array, check_integer, shown
from sparsebp.core.errors import DTypeError, OptionError, ShapeError, TransportError

DTYPES = tuple(map(np.dtype, (np.float32, np.float64, np.int32, np.int64)))


class Handle(Protocol):
    """A running operation. Its arrays belong to the transport until `wait` has returned."""

    def wait(self) -> None:
        """Wait for the operation's end, or raise `TransportError` if another rank has failed or is gone."""

    def done(self) -> bool:
        """Whether `wait` would return at once; lets the operation progress meanwhile."""


class Transport(abc.ABC):
    """Carries arrays between ranks.

    Collective calls (`allreduce`, `reduce_scatter`, `allgather`, `exscan`, `share`, `broadcast`, `barrier`) are made by
    all ranks in the same order. Arrays are C-contiguous, of float32 or float64 (or of int32 or int64), NumPy's or
    CuPy's. All calls of a rank are made by one thread.

    Attributes
    ----------
    rank, size
        Number of this worker, from 0, and of all.
    on_device
        Whether it carries CuPy's arrays without a copy on the host.
    largest_tag
        Tags are from 0 to this.
    closed
        Whether `close` was called: no other call is possible any more.
    """

    rank: int
    size: int
    on_device: bool = False
    largest_tag: int = 2**31 - 1
    closed: bool = False

    def __repr__(self) -> str:
        """Show which rank this is."""
        return f"<{type(self).__name__}: rank {self.rank} of {self.size}{', closed' * self.closed}>"

    # ---- two ranks ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def isend(self, array: Array, to: int, tag: int) -> Handle:
        """Begin to send `array` to rank `to`. It must not be written to before the handle has been waited for.

        Nothing is buffered: the operation may not end before the receive has been posted. Messages of one pair of ranks
        and one tag arrive in the order in which they were sent.
        """

    @abc.abstractmethod
    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        """Begin to receive into `out`, of the sent array's shape and dtype; complete once `Handle.wait` has returned.

        `Handle.wait` raises `TransportError` if the message has another size.
        """

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def allreduce(self, array: Array) -> Handle:
        """Begin to replace `array` by its sum over all ranks, bitwise equal on all of them and in every run."""

    @abc.abstractmethod
    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        """Begin to write to `out` this rank's part of the sum of `array`, which has ``size`` times as many values."""

    @abc.abstractmethod
    def allgather(self, array: Array, out: Array) -> Handle:
        """Begin to write the `array` of every rank, one after the other, to `out`, of ``size`` times as many values."""

    @abc.abstractmethod
    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        """Return ``combine`` of the arrays of all ranks before this one, from rank 0 on; None on rank 0.

        `array` is one-dimensional, of the same size on all ranks. ``combine(earlier, later)`` is associative, not
        necessarily commutative; it returns an array of the same size, and does not write to its arguments.
        """

    @abc.abstractmethod
    def share(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in their order: small Python objects that can be pickled."""

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root`, which can be pickled."""
        check_integer("root", root, 0, self.size - 1)
        return self.share(value if self.rank == root else None)[root]

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks."""

    # ---- the end -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell all other ranks that this one has failed: whatever they wait for soon raises `TransportError`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop running operations, and end the transport's threads; refuse further calls."""

    # ---- for implementations -----------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Refuse a call after `close` by a `TransportError`."""
        if self.closed:
            raise TransportError("The transport is closed", expected="calls before close()", got="one after it",
                                 remedy="Close it at the end, or make another one on all ranks")  # fmt: skip

    def check_message(self, array: Array, peer: int, tag: int, *, written: bool = False) -> None:
        """Refuse arrays that cannot be sent or, if `written`, received into, unknown ranks, and tags out of range."""
        self.check_open()
        check_integer("The rank", peer, 0, self.size - 1)
        check_integer("The tag", tag, 0, self.largest_tag)
        self.check_array(array, written)

    def check_call(self, array: Array, part: Array | None = None, *, parts: int = 1, written: bool = False) -> None:
        """Refuse arrays that a collective call cannot take: `part` must have one of `parts` equal shares of `array`.

        `written` says which of the two is written to: `array`, else `part`.
        """
        self.check_open()
        self.check_array(array, written)
        if part is None:
            return
        self.check_array(part, not written)
        if part.dtype != array.dtype:
            raise DTypeError("The arrays of a collective call differ", expected=array.dtype, got=part.dtype)
        if part.size * parts != array.size:
            raise ShapeError("The arrays of a collective call do not go together",
                             expected=f"{parts} times as many values in one as in the other",
                             got=f"{array.size} and {part.size}")  # fmt: skip

    def check_array(self, array: Array, written: bool) -> None:
        """Refuse an array that cannot be carried."""
        backend.check_array("The array", array, written=written)
        if array.dtype not in DTYPES:
            raise DTypeError("The array cannot be carried", expected=" or ".join(map(str, DTYPES)), got=array.dtype)


def check_transport(transport: Any) -> Transport:
    """Return an argument that is a transport."""
    if isinstance(transport, Transport):
        return transport
    raise OptionError("Not a transport", expected="a sparsebp.comm Transport", got=shown(transport),
                      remedy="Pass the result of connect(), or the argument of run_ranks")  # fmt: skip


_SAME = "Give all ranks the same model, batches and schedule"


def host_of(transport: Transport) -> Transport:
    """Return the transport that carries the host's arrays: NCCL's are the device's."""
    host: Transport = getattr(transport, "host", transport)
    return host


def other_data(rank: int, source: int, expected: object, got: object, remedy: str = _SAME) -> TransportError:
    """Return the error of a message with other data than expected."""
    return TransportError(
        f"Rank {rank} expected other data of rank {source}", expected=expected, got=got, remedy=remedy
    )


def other_call(other: int, rank: int, expected: object, got: object) -> TransportError:
    """Return the error of a rank that makes another collective call than this one."""
    problem = f"Rank {other} makes another collective call than rank {rank}"
    return TransportError(problem, expected=expected, got=got, remedy=_SAME)


def packed(value: Any) -> bytes:
    """Return an object as bytes for other ranks."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise OptionError("The object cannot be sent to other ranks", expected="one that pickle takes", got=error,
                          remedy="Share numbers, texts, arrays, lists and dicts") from error  # fmt: skip


def check_callable(name: str, value: Any) -> None:
    """Refuse an argument that cannot be called."""
    if not callable(value):
        raise OptionError(f"{name} is not a function", expected="a function", got=shown(value))


# Sums over ranks: who sums which part, and in which order.


def parts_of(flat: Array, ranks: int) -> list[Array]:
    """Return the part of an array that each rank sums: as equal as can be, in the order of the ranks."""
    return [flat[rank * flat.size // ranks : (rank + 1) * flat.size // ranks] for rank in range(ranks)]


def sum_in_order(arrays: Sequence[Array], out: Array, add: Callable[..., Any] = np.add) -> None:
    """Write the sum of `arrays`, added in their order, to `out`; if that is one of them, the first may be lost."""
    if len(arrays) == 1:
        if arrays[0] is not out:
            out[...] = arrays[0]
        return
    total = arrays[0] if any(one is out for one in arrays[2:]) else out
    add(arrays[0], arrays[1], out=out if len(arrays) == 2 else total)
    for number, one in enumerate(arrays[2:], 3):
        add(total, one, out=out if number == len(arrays) else total)
