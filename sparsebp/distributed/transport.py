"""What carries arrays between the workers of a schedule: one interface, whatever does it.

Workers are *ranks*, numbered from 0; all of them run the same program on their own part of the work.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Protocol

from sparsebp.core.types import Array


class Handle(Protocol):
    """An operation that has begun. Its arrays are the transport's until `wait` has returned."""

    def wait(self) -> None:
        """Return when the operation has come to its end.

        Raises
        ------
        TransportError
            It will never do so: another rank has failed, or is gone.
        """

    def done(self) -> bool:
        """Say whether `wait` would return at once; lets the operation go on meanwhile."""


class Transport(abc.ABC):
    """Carries arrays between ranks.

    Collective calls (`allreduce`, `reduce_scatter`, `allgather`, `exscan`, `share`, `broadcast`, `barrier`) are made by
    all ranks in the same order. Arrays are C-contiguous, of float32 or float64, NumPy's or CuPy's as the transport
    says in `on_device`.

    Attributes
    ----------
    rank, size
        Number of this worker, from 0, and of all.
    on_device
        Whether it carries CuPy's arrays without a copy on the host.
    """

    rank: int
    size: int
    on_device: bool = False

    # ---- two ranks ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def isend(self, array: Array, to: int, tag: int) -> Handle:
        """Begin to send `array` to rank `to`. It must not be written to before the handle has been waited for.

        Nothing is buffered on behalf of the caller: the operation may not end before the receive has been posted
        (rendezvous). Messages of one pair of ranks and one tag arrive in the order in which they were sent.
        """

    @abc.abstractmethod
    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        """Begin to receive into `out`, of the shape and dtype of what is sent; written when the handle was waited for.

        Raises
        ------
        TransportError
            From `Handle.wait`: what came has another size.
        """

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def allreduce(self, array: Array) -> Handle:
        """Begin to replace `array` by its sum over all ranks. The sum is bit for bit the same on all, and every time."""

    @abc.abstractmethod
    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        """Begin to write to `out` this rank's part of the sum of `array`, which has ``size`` times as many values."""

    @abc.abstractmethod
    def allgather(self, array: Array, out: Array) -> Handle:
        """Begin to write the `array` of every rank, one after the other, to `out`, of ``size`` times as many values."""

    @abc.abstractmethod
    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        """Return ``combine`` of the arrays of all ranks before this one, from rank 0 on; None on rank 0.

        Parameters
        ----------
        array
            One-dimensional, of the same size on all ranks.
        combine
            ``combine(earlier, later)``: associative, not necessarily commutative; returns an array of the same size,
            and leaves its arguments as they are.
        """

    @abc.abstractmethod
    def share(self, value: Any) -> list[Any]:
        """Return the `value` of every rank, in their order: small Python objects, for set-up and reports."""

    @abc.abstractmethod
    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the `value` of rank `root`."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come here."""

    # ---- the end -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def abort(self, error: BaseException) -> None:
        """Tell all other ranks that this one has failed: whatever they wait for raises `TransportError`, soon."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give up what is still under way, and end threads of the transport's own."""
