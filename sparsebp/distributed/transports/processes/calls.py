"""What is under way over MPI: messages between two ranks, and collective calls of one or two exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sparsebp.core.errors import TransportError
from sparsebp.core.types import Array

KINDS = ("allreduce", "reduce_scatter", "allgather", "exscan", "share", "barrier")


class Waits(Protocol):
    """What a call asks of the transport that it is one of."""

    rank: int

    def wait(self, ready: Callable[[], bool], needs: Sequence[int], suspect: Callable[[], None] | None = None) -> None:
        """Return when `ready`."""

    def advance(self) -> None:
        """Let calls go on."""

    def ended(self, buffer: np.ndarray | None = None) -> None:
        """Note that a call was waited for."""


class Message:
    """A send, a receive, or any requests that only have to come to their end.

    Parameters
    ----------
    transport
        Whose it is.
    requests
        Of MPI: sends and receives, whose arrays mpi4py keeps alive until then.
    needs
        Ranks that the end depends on.
    out
        The array to receive, whose size is compared with what came; None for other requests.
    finish
        What to do with what has come.
    suspect
        What to look for when it takes long.
    """

    def __init__(
        self, transport: Waits, requests: list[Any], needs: Sequence[int], *, out: Array | None = None,
        finish: Callable[[], None] | None = None, suspect: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._transport, self._requests, self._needs = transport, requests, needs
        self._out, self._finish, self._suspect = out, finish, suspect
        self._taken = False
        self._error: TransportError | None = None

    def done(self) -> bool:
        """Say whether it has come to its end; MPI goes on meanwhile."""
        if self._requests:
            self._requests = [request for request in self._requests if not self._test(request)]
            self._transport.advance()
        return not self._requests

    def wait(self) -> None:
        """Return when it has come to its end."""
        if self._taken:
            return
        self._transport.wait(self.done, self._needs, self._suspect)
        self._taken = True
        self._transport.ended()
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()

    def _test(self, request: Any) -> bool:
        from mpi4py import MPI

        status = MPI.Status()
        try:
            if not request.Test(status):
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
    number
        How many this rank had made before.
    heading, headers
        The request that brings what the ranks say, and where to.
    first
        Requests of the first exchange.
    between
        What to do when they have ended; returns the requests of the second exchange, or None.
    finish
        What the thread that waits does at the end.
    work
        Memory that is used meanwhile.
    needs
        Ranks that the end depends on.
    same
        Whether all ranks must give arrays of one size.
    """

    def __init__(
        self, transport: Waits, number: int, heading: Any, headers: np.ndarray, first: list[Any],
        between: Callable[[], list[Any] | None] | None, finish: Callable[[], None] | None, work: np.ndarray | None,
        needs: Sequence[int], same: bool,
    ) -> None:  # fmt: skip
        self._transport, self.number, self._heading, self.headers = transport, number, heading, headers
        self._requests, self._between, self._finish, self._work = first, between, finish, work
        self._needs, self._same = needs, same
        self.ended = self._taken = False
        self._error: TransportError | None = None

    @staticmethod
    def header(kind: str, array: Array, number: int) -> np.ndarray:
        """Return what a rank says of a call: its kind, bytes and dtype, and its number."""
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
        self._work = None
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()

    def advance(self) -> None:
        """Go on if MPI has. The caller holds the lock."""
        from mpi4py import MPI

        try:
            self._requests = [request for request in self._requests if not request.Test()]
            if not self._requests and self._between is not None:
                between, self._between = self._between, None
                self._requests = between() or []
        except MPI.Exception as error:  # the headers may say why
            self._requests, self._between = [], None
            self._error = TransportError("A collective call could not be carried", got=error.Get_error_string())
        if self._heading is not None and self._heading.Test():
            self._heading = None
            self._error = self._difference() or self._error
        ended = not self._requests and self._between is None
        self.ended = self._heading is None and (ended or self._error is not None)

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
    return f"{KINDS[kind]} of {size} bytes of {np.dtype(chr(char))}, after {number} other calls"
