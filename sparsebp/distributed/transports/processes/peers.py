"""What a rank knows of the others while it waits for them: who has failed, who has come to its end, who waits too."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparsebp.core.errors import TransportError
from sparsebp.core.locks import forkable_lock
from sparsebp.distributed.transports.processes.launcher import say

SILENT_SECONDS = 10.0
"""After which a rank says whom it waits for, and again whenever it has waited twice as long."""
TIMEOUT_SECONDS = 1800.0
"""After which it gives up: as long as PyTorch's Gloo waits."""
LEFT_SECONDS = 1.0  # what a rank that has ended had sent is here long before
SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class End:
    """How a rank has ended.

    Attributes
    ----------
    error
        What it failed with, None if it did not.
    own
        Whether that was its own error; else it only heard of another rank's.
    left
        What it ended by, if that was no error and not the end of its program: ``sys.exit(0)``, say.
    """

    error: str | None = None
    own: bool = False
    left: str | None = None


@dataclass(frozen=True)
class Waits:
    """A rank says that it has waited for long, or that it goes on."""

    still: bool


class Peers:
    """The ends of all ranks, told over a communicator of their own, which this takes; any thread may ask."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.ends: dict[int, End] = {}
        self.waiting: set[int] = set()  # those that have waited for long
        self._seen: dict[int, float] = {}
        self._told: list[Any] = []  # requests and what they send
        self._lock = forkable_lock()  # a handler of signals may come here again

    def poll(self) -> None:
        """Take in what has come. Lets MPI go on meanwhile, with everything that is under way."""
        from mpi4py import MPI

        with self._lock:
            status = MPI.Status()
            while self.comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
                buffer = bytearray(status.Get_count(MPI.BYTE))
                source = status.Get_source()
                self.comm.Recv([buffer, MPI.BYTE], source=source)
                told = pickle.loads(buffer)
                if isinstance(told, Waits):
                    (self.waiting.add if told.still else self.waiting.discard)(source)
                else:
                    self.ends[source] = told
                    self._seen[source] = time.monotonic()

    def check(self, needs: Iterable[int]) -> None:
        """Refuse to wait any longer for ranks of which one has failed, or is gone.

        Raises
        ------
        TransportError
            That is so.
        """
        if not self.ends:
            return
        for rank, end in self.ends.items():
            if end.error is not None and end.own:
                raise TransportError(
                    f"Rank {rank} has failed", expected="all ranks to go on", got=end.error,
                    remedy="See that rank's own error",
                )  # fmt: skip
        for rank in needs:
            if rank in self.ends and time.monotonic() - self._seen[rank] > LEFT_SECONDS:
                end = self.ends[rank]
                raise TransportError(
                    f"Rank {rank} has ended, and rank {self.rank} waits for it",
                    expected="the same program on all ranks", got=end.error or end.left or "the end of its program",
                    remedy="Let all ranks take the same number of steps",
                )  # fmt: skip

    def tell(self, end: End) -> None:
        """Tell all others how this rank ends; only the first time counts."""
        if self.rank in self.ends:
            return
        self.ends[self.rank], self._seen[self.rank] = end, time.monotonic()
        self._send(end)

    def _send(self, told: End | Waits) -> None:
        from mpi4py import MPI

        data = pickle.dumps(told)
        with self._lock:
            for rank in range(self.size):
                if rank != self.rank:
                    self._told += [self.comm.Isend([data, MPI.BYTE], dest=rank), data]

    def waits(self, *, still: bool) -> None:
        """Tell all others that this rank has waited for long, or that it goes on."""
        with self._lock:
            (self.waiting.add if still else self.waiting.discard)(self.rank)
        self._send(Waits(still))

    def silent(self) -> list[int]:
        """Return the ranks that neither wait nor have ended: those that the others wait for."""
        with self._lock:
            return [rank for rank in range(self.size) if rank not in self.waiting and rank not in self.ends]

    def settle(self, seconds: float | None = SETTLE_SECONDS) -> bool:
        """Wait until all ranks have told how they end, and return whether they have.

        At most for `seconds`; if that is None, for ever, or until one has failed.
        """
        began = time.monotonic()
        while True:
            self.poll()
            if len(self.ends) == self.size:
                return True
            waited = time.monotonic() - began
            failed = any(end.error is not None for end in self.ends.values())
            if (waited > seconds) if seconds is not None else failed:
                return False
            time.sleep(min(waited / 8, 1e-2) + 1e-5)

    def speaks_of_waiting(self) -> bool:
        """Say whether it is for this rank to speak of those that do not answer: the lowest of those that wait."""
        with self._lock:
            return self.rank == min(self.waiting, default=self.rank)

    def speaker(self) -> int | None:
        """Return the rank whose error is to be shown: the lowest that failed by itself. None if none has failed."""
        failed = {rank: end for rank, end in self.ends.items() if end.error is not None}
        return min((rank for rank, end in failed.items() if end.own), default=min(failed, default=None))


class Patience:
    """One wait of a rank for others: it tells of it when it takes long, and gives up in the end.

    Parameters
    ----------
    peers
        What the rank knows of the others.
    timeout
        Seconds after which it gives up.
    """

    def __init__(self, peers: Peers, timeout: float) -> None:
        self._peers, self._timeout = peers, timeout
        self._next, self._told, self._said = min(SILENT_SECONDS, timeout) / 2, False, False

    def look(self, waited: float) -> None:
        """Do what is to be done after so many seconds.

        Raises
        ------
        TransportError
            They are too many.
        """
        if waited < self._next:
            return
        if not self._told:  # the others tell so too: who does not is the one that all wait for
            self._told, self._next = True, 2 * self._next
            self._peers.waits(still=True)
            return
        if waited >= self._timeout:
            raise TransportError(
                f"{self._who()} for {waited:.0f} s", expected=f"an answer within {self._timeout:.0f} s", got="none",
                remedy="See what that rank does, and whether its machine is there; connect(timeout=) waits longer",
            )  # fmt: skip
        self._next = min(2 * self._next, self._timeout)
        if self._peers.speaks_of_waiting():
            self._said = True
            say(f"Warning: {self._who()} for {waited:.0f} s. It may compute, be stopped, or be gone; the run ends with "
                f"an error after {self._timeout:.0f} s.")  # fmt: skip

    def end(self, waited: float) -> None:
        """Tell that the wait is over, if it took long."""
        if self._told:
            self._peers.waits(still=False)
        if self._said:
            say(f"Rank {self._peers.rank} goes on after {waited:.0f} s.")

    def _who(self) -> str:
        silent = self._peers.silent()
        if not silent:
            return "All ranks have waited for each other"
        return f"Rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not answer"
