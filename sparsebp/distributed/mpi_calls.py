"""What is under way over MPI: messages between two ranks, and collective calls of one or two exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebp.core.errors import TransportError
from sparsebp.core.types import Array

if TYPE_CHECKING:
    from sparsebp.distributed.mpi import MPITransport

KINDS = ("allreduce", "reduce_scatter", "allgather", "exscan", "share", "barrier")


class Message:
    """A send, a receive, or any request that only has to come to its end.

    Parameters
    ----------
    transport
        Whose it is.
    request
        Of MPI.
    buffer
        What MPI reads or writes: kept alive until then.
    needs
        Ranks that the end depends on.
    out
        The array to receive, whose size is compared with what came; None for other requests.
    finish
        What to do with the buffer then.
    suspect
        What to look for when it takes long.
    """

    def __init__(
        self, transport: MPITransport, request: Any, buffer: Any, needs: Sequence[int], *, out: Array | None = None,
        finish: Callable[[], None] | None = None, suspect: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._transport, self._request, self._buffer, self._needs = transport, request, buffer, needs
        self._out, self._finish, self._suspect = out, finish, suspect
        self._ended = self._taken = False
        self._error: TransportError | None = None

    def done(self) -> bool:
        """Say whether it has come to its end; MPI goes on meanwhile."""
        if not self._ended:
            self._ended = self._test()
            self._transport.advance()
        return self._ended

    def wait(self) -> None:
        """Return when it has come to its end."""
        if self._taken:
            return
        self._transport.wait(self.done, self._needs, self._suspect)
        self._taken, self._buffer = True, None
        self._transport.ended()
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()

    def _test(self) -> bool:
        from mpi4py import MPI

        status = MPI.Status()
        try:
            if not self._request.Test(status):
                return False
        except MPI.Exception as error:
            longer = error.Get_error_class() == MPI.ERR_TRUNCATE
            self._error = self._other("more" if longer else error.Get_error_string(), error)
            return True
        if self._out is not None and status.Get_count(MPI.BYTE) != self._out.nbytes:
            self._error = self._other(f"{status.Get_count(MPI.BYTE)} bytes")
        return True

    def _other(self, got: str, cause: Exception | None = None) -> TransportError:
        if self._out is None:
            error = TransportError("A message could not be carried", got=got)
        else:
            error = TransportError(
                f"Rank {self._transport.rank} expected other data of rank {self._needs[0]}",
                expected=f"{self._out.dtype} {self._out.shape}, {self._out.nbytes} bytes", got=got,
                remedy="Give all ranks the same model, batches and schedule",
            )  # fmt: skip
        error.__cause__ = cause
        return error


class Call:
    """A collective call: what all ranks say that it is, a first exchange, and perhaps a second one.

    Parameters
    ----------
    transport
        Whose it is.
    kind, heading, headers
        What this rank says; the request that brings what the others say, and where to.
    first
        Request of the first exchange, or None.
    between
        What to do when that has ended; returns the request of the second exchange, or None.
    finish
        What the thread that waits does at the end.
    work
        Memory that is used meanwhile.
    needs
        Ranks that the end depends on.
    same
        Whether all ranks must give arrays of one size.
    kept
        Arrays to keep alive meanwhile: mpi4py does not for every kind of request.
    """

    def __init__(
        self, transport: MPITransport, kind: str, heading: Any, headers: np.ndarray, first: Any,
        between: Callable[[], Any] | None, finish: Callable[[], None] | None, work: np.ndarray | None,
        needs: Sequence[int], same: bool, kept: tuple[Any, ...],
    ) -> None:  # fmt: skip
        self._transport, self._kind, self._heading, self.headers = transport, kind, heading, headers
        self._request, self._between, self._finish, self._work = first, between, finish, work
        self._needs, self._same, self._kept = needs, same, kept
        self.ended = self._taken = False
        self._error: TransportError | None = None

    @staticmethod
    def header(kind: str, array: Array, number: int) -> np.ndarray:
        """Return what a rank says of a call: the number of it, its kind, bytes and dtype."""
        return np.array([KINDS.index(kind), array.nbytes, ord(array.dtype.char), number], np.int64)

    def done(self) -> bool:
        """Say whether it has come to its end; MPI goes on meanwhile."""
        if not self.ended:
            self._transport.advance()
        return self.ended

    def wait(self) -> None:
        """Return when it has come to its end."""
        if self._taken:
            return
        self._transport.wait(self.done, self._needs)
        self._taken = True
        self._transport.ended(self._work)
        self._work, self._kept = None, ()
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()

    def advance(self, ahead: bool) -> bool:
        """Go on if MPI has, and return whether calls after this one may begin their second exchange.

        They may when all before them have: so the order is the same on all ranks. The caller holds the lock.
        """
        if self.ended:
            return ahead
        from mpi4py import MPI

        try:
            if self._request is not None and self._request.Test():
                self._request = None
            if self._request is None and self._between is not None and ahead:
                between, self._between = self._between, None
                self._request = between()
        except MPI.Exception as error:  # the headers may say why
            self._request = self._between = None
            self._error = TransportError(f"The {self._kind} could not be carried", got=error.Get_error_string())
        if self._heading is not None and self._heading.Test():
            self._heading = None
            self._error = self._difference() or self._error
        self.ended = self._heading is None and (
            self._error is not None or (self._request is None and self._between is None)
        )
        return ahead and self._between is None

    def _difference(self) -> TransportError | None:
        """Return what to say of a call that is another one on another rank."""
        own = self.headers[self._transport.rank]
        for rank, other in enumerate(self.headers):
            if list(own[:3] if self._same else own[:1]) != list(other[:3] if self._same else other[:1]):
                return TransportError(
                    f"Rank {rank} makes another collective call than rank {self._transport.rank}",
                    expected=_described(own), got=_described(other),
                    remedy="Give all ranks the same model, batches and schedule",
                )  # fmt: skip
        return None


def _described(header: np.ndarray) -> str:
    kind, size, char, number = map(int, header)
    return f"{KINDS[kind]} of {size} bytes of {np.dtype(chr(char))}, the {number}th call"


def parts(count: int, size: int) -> tuple[list[int], list[int]]:
    """Return sizes and begins of the parts of `count` values that `size` ranks sum: as equal as can be."""
    least, more = divmod(count, size)
    sizes = [least + (rank < more) for rank in range(size)]
    return sizes, [rank * least + min(rank, more) for rank in range(size)]


def sum_in_order(arrays: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of the rows to `out`, added in their order."""
    if len(arrays) == 1:
        out[...] = arrays[0]
        return
    np.add(arrays[0], arrays[1], out=out)
    for one in arrays[2:]:
        out += one
