"""What a rank knows of the others while it waits for them: who has failed, who has come to its end."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparsebp.core.errors import TransportError
from sparsebp.core.locks import forkable_lock

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


class Peers:
    """The ends of all ranks, told over a communicator of their own, which this takes; any thread may ask."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.ends: dict[int, End] = {}
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
                self.ends[source] = pickle.loads(buffer)
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
        from mpi4py import MPI

        self.ends[self.rank], self._seen[self.rank] = end, time.monotonic()
        data = pickle.dumps(end)
        with self._lock:
            for rank in range(self.size):
                if rank != self.rank:
                    self._told += [self.comm.Isend([data, MPI.BYTE], dest=rank), data]

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

    def speaker(self) -> int | None:
        """Return the rank whose error is to be shown: the lowest that failed by itself. None if none has failed."""
        failed = {rank: end for rank, end in self.ends.items() if end.error is not None}
        return min((rank for rank, end in failed.items() if end.own), default=min(failed, default=None))
