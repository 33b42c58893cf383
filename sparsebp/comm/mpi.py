"""The transport over MPI: running calls, progress during computation, and the state of the ranks waited for."""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsebp.comm.launcher import say
from sparsebp.comm.transport import (
    DTYPES,
    Handle,
    Transport,
    check_callable,
    other_call,
    other_data,
    packed,
    parts_of,
    sum_in_order,
)
from sparsebp.core import backend
from sparsebp.core.check import Array, check_flag, check_positive, shown
from sparsebp.core.errors import MissingDependencyError, OptionError, TransportError
from sparsebp.core.locks import forkable_event, forkable_lock

# Operations under way: messages between two ranks, and collective calls of one or two exchanges.

KINDS = ("allreduce", "reduce_scatter", "allgather", "exscan", "share", "barrier")


class _Operation:
    """An operation of `transport`; its end depends on the ranks `needs`, and `finish` is run after it."""

    def __init__(self, transport: MPITransport, needs: Sequence[int], finish: Callable[[], None] | None) -> None:
        self._transport, self._needs, self._finish = transport, needs, finish
        self._taken = False
        self._error: TransportError | None = None
        self._suspect: Callable[[], None] | None = None  # checks for errors when it takes long
        self._work: np.ndarray | None = None  # memory that is used meanwhile

    def done(self) -> bool:
        raise NotImplementedError

    def wait(self) -> None:
        if self._taken:
            return
        self._transport.wait(self.done, self._needs, self._suspect)
        self._taken = True
        self._transport.ended(self._work)
        self._work = None
        if self._error is not None:
            raise self._error
        if self._finish is not None:
            self._finish()


class Message(_Operation):
    """A send, a receive, or any requests that only have to end."""

    # requests: Of MPI: sends and receives, whose arrays mpi4py keeps alive until then.
    # out: The array to receive, whose size is compared with the message's; None for other requests.

    def __init__(
        self, transport: MPITransport, requests: list[Any], needs: Sequence[int], *, out: Array | None = None,
        finish: Callable[[], None] | None = None, suspect: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(transport, needs, finish)
        self._requests, self._out, self._suspect = requests, out, suspect

    def done(self) -> bool:
        """Whether it has ended; lets MPI progress."""
        if self._requests:
            self._requests = [request for request in self._requests if not self._test(request)]
            self._transport.advance()
        return not self._requests

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
            wanted = f"{self._out.dtype} {self._out.shape}, {self._out.nbytes} bytes"
            error = other_data(self._transport.rank, self._needs[0], wanted, got)
        error.__cause__ = cause
        return error


class Call(_Operation):
    """A collective call: a header from every rank, a first exchange, and perhaps a second one."""

    # comm, number: The communicator that gathers the headers, and how many calls this rank had made before.
    # first: Requests of the first exchange.
    # between: Run when they have ended; returns the requests of the second exchange, or None.
    # finish: Run at the end by the thread that waits.
    # needs: The ranks that it waits for; None: all.
    # same: Whether all ranks must give arrays of one size.

    def __init__(
        self, transport: MPITransport, comm: Any, number: int, kind: str, array: Array, first: list[Any],
        between: Callable[[], list[Any] | None] | None = None, finish: Callable[[], None] | None = None,
        work: np.ndarray | None = None, *, needs: Sequence[int] | None = None, same: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(transport, range(transport.size) if needs is None else needs, finish)
        self.number, self._same, self.ended = number, same, False
        self._requests, self._between, self._work = first, between, work
        header = np.array([KINDS.index(kind), array.nbytes, ord(array.dtype.char), number], np.int64)
        self.headers = np.empty((transport.size, header.size), np.int64)
        self._heading = comm.Iallgather(header, self.headers)

    def done(self) -> bool:
        """Whether it has ended; lets MPI progress."""
        if not self.ended:
            self._transport.advance()
        return self.ended

    def advance(self) -> None:
        """Progress if MPI has. The caller holds the lock."""
        from mpi4py import MPI

        try:
            self._requests = [request for request in self._requests if not request.Test()]
            if not self._requests and self._between is not None:
                between, self._between = self._between, None
                self._requests = between() or []
        except MPI.Exception as error:  # the headers may explain it
            self._requests, self._between = [], None
            self._error = TransportError("A collective call could not be carried", got=error.Get_error_string())
        if self._heading is not None and self._heading.Test():
            self._heading = None
            self._error = self._difference() or self._error
        ended = not self._requests and self._between is None
        self.ended = self._heading is None and (ended or self._error is not None)

    def _difference(self) -> TransportError | None:
        """Return the error if another rank makes another call."""
        own = self.headers[self._transport.rank]
        for rank, other in enumerate(self.headers):
            if list(own[:3] if self._same else own[:1]) != list(other[:3] if self._same else other[:1]):
                return other_call(rank, self._transport.rank, _described(own), _described(other))
        return None


def _described(header: np.ndarray) -> str:
    kind, size, char, number = map(int, header)
    return f"{KINDS[kind]} of {size} bytes of {np.dtype(chr(char))}, after {number} other calls"


# The state of the other ranks during a wait: which have failed, which have ended, which wait too.

SILENT_SECONDS = 10.0
"""After which a rank reports which ranks it waits for, and again whenever the wait has doubled."""
TIMEOUT_SECONDS = 1800.0
"""After which it gives up: as long as PyTorch's Gloo waits."""
LEFT_SECONDS = 1.0  # the messages of a rank that has ended arrive long before
SETTLE_SECONDS = 3.0


@dataclass(frozen=True)
class End:
    """How a rank has ended."""

    error: str | None = None  # that it failed with
    own: bool = False  # whether the error was its own, not another rank's
    left: str | None = None  # how it ended, if not by an error or at the end of its program: `sys.exit(0)`, say


@dataclass(frozen=True)
class PeerWaits:
    """A rank's message that it has waited for long, or goes on."""

    still: bool


class Peers:
    """The ends of all ranks, told over a separate communicator, which this takes; any thread may ask."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.ends: dict[int, End] = {}
        self.waiting: set[int] = set()  # ranks that have waited for long
        self._seen: dict[int, float] = {}
        self._told: list[Any] = []  # requests and their data
        self._lock = forkable_lock()  # a handler of signals may come here again

    def poll(self) -> None:
        """Take in messages. Lets all MPI operations progress."""
        from mpi4py import MPI

        with self._lock:
            status = MPI.Status()
            while self.comm.Iprobe(source=MPI.ANY_SOURCE, status=status):
                buffer = bytearray(status.Get_count(MPI.BYTE))
                source = status.Get_source()
                self.comm.Recv([buffer, MPI.BYTE], source=source)
                told = pickle.loads(buffer)
                if isinstance(told, PeerWaits):
                    (self.waiting.add if told.still else self.waiting.discard)(source)
                else:
                    self.ends[source] = told
                    self._seen[source] = time.monotonic()

    def check(self, needs: Iterable[int]) -> None:
        """Raise `TransportError` if a rank has failed, or one of `needs` is gone."""
        if not self.ends:
            return
        for rank, end in self.ends.items():
            if end.error is not None and end.own:
                raise TransportError(f"Rank {rank} has failed", expected="all ranks to go on", got=end.error,
                                     remedy="See that rank's own error")  # fmt: skip
        for rank in needs:
            if rank in self.ends and time.monotonic() - self._seen[rank] > LEFT_SECONDS:
                end = self.ends[rank]
                raise TransportError(f"Rank {rank} has ended, and rank {self.rank} waits for it",
                                     expected="the same program on all ranks",
                                     got=end.error or end.left or "the end of its program",
                                     remedy="Let all ranks take the same number of steps")  # fmt: skip

    def tell(self, end: End) -> None:
        """Tell all others how this rank ends; only the first call counts."""
        if self.rank in self.ends:
            return
        self.ends[self.rank], self._seen[self.rank] = end, time.monotonic()
        self._send(end)

    def _send(self, told: End | PeerWaits) -> None:
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
        self._send(PeerWaits(still))

    def silent(self) -> list[int]:
        """Return the ranks that neither wait nor have ended: the others wait for them."""
        with self._lock:
            return [rank for rank in range(self.size) if rank not in self.waiting and rank not in self.ends]

    def settle(self, seconds: float | None = SETTLE_SECONDS) -> bool:
        """Wait until all ranks have told how they end, and return whether they have."""
        # At most for `seconds`; if that is None, forever, or until one has failed.
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

    def reports_waiting(self) -> bool:
        """Whether this rank, the lowest of those that wait, reports ranks that do not answer."""
        with self._lock:
            return self.rank == min(self.waiting, default=self.rank)

    def reporting_rank(self) -> int | None:
        """Return the rank that prints its error: the lowest that failed by itself. None if none has failed."""
        failed = {rank: end for rank, end in self.ends.items() if end.error is not None}
        return min((rank for rank, end in failed.items() if end.own), default=min(failed, default=None))


class Patience:
    """One wait of a rank for others: reports long waits, and gives up after `timeout` seconds."""

    def __init__(self, peers: Peers, timeout: float) -> None:
        self._peers, self._timeout = peers, timeout
        self._next, self._told, self._said = min(SILENT_SECONDS, timeout) / 2, False, False

    def look(self, waited: float) -> None:
        """Report or give up after `waited` seconds, if it is time."""
        if waited < self._next:
            return
        if not self._told:  # the others do the same: all wait for the rank that does not
            self._told, self._next = True, 2 * self._next
            self._peers.waits(still=True)
            return
        if waited >= self._timeout:
            raise TransportError(
                f"{self._who()} for {waited:.0f} s", expected=f"an answer within {self._timeout:.0f} s", got="none",
                remedy="Look at that rank, and whether its machine is there; connect(timeout=) waits longer"
            )  # fmt: skip
        self._next = min(2 * self._next, self._timeout)
        if self._peers.reports_waiting():
            self._said = True
            say(f"Warning: {self._who()} for {waited:.0f} s. It may compute, be stopped, or be gone; the run ends with "
                f"an error after {self._timeout:.0f} s.")  # fmt: skip

    def end(self, waited: float) -> None:
        """Report the end of a long wait."""
        if self._told:
            self._peers.waits(still=False)
        if self._said:
            say(f"Rank {self._peers.rank} goes on after {waited:.0f} s.")

    def _who(self) -> str:
        silent = self._peers.silent()
        if not silent:
            return "All ranks have waited for each other"
        return f"Rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))} did not answer"


# A thread that lets MPI progress while the rank computes.

PAUSE_SECONDS = 2e-4  # a look costs 4 microseconds, a sleep and the interpreter's lock some 30: a twelfth of a core


class Progress:
    """Calls ``go_on()`` repeatedly as long as it returns True, in a thread; `wake` restarts it."""

    # Each call takes the interpreter's lock for a moment: it runs during kernels that release it. An error ends the
    # thread; the next wait for an operation then meets it.

    def __init__(self, go_on: Callable[[], bool]) -> None:
        self._go_on = go_on
        self._work = forkable_event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="progress of MPI", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Restart the calls: an operation has begun."""
        self._work.set()

    def stop(self) -> None:
        """End the thread."""
        self._ended = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._ended:
                return
            self._work.clear()
            while not self._ended and self._go_on():
                time.sleep(PAUSE_SECONDS)


# Waiting without a busy core: MPI's own waiting calls would occupy one per rank, which the other ranks may need.

SPIN_SECONDS = 1e-4  # for a neighbour's message that has nearly arrived; shorter than the shortest useful sleep
MOST_SECONDS = 1e-3


def until(ready: Callable[[], bool], meanwhile: Callable[[float], None]) -> float:
    """Wait until `ready`, calling ``meanwhile(seconds)`` between checks, and return the seconds that took."""
    # The sleep grows with the wait, so that it adds an eighth at most.
    began = time.perf_counter()
    while not ready():
        waited = time.perf_counter() - began
        meanwhile(waited)
        if waited < SPIN_SECONDS:
            os.sched_yield()  # to another rank on this core
        else:
            time.sleep(min(waited / 8, MOST_SECONDS))
    return time.perf_counter() - began


_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SUSPICIOUS_SECONDS = 0.5
_SMALL_BYTES = 16384  # of all ranks' arrays together: one exchange of all is then faster than two of parts
_KEPT_BUFFERS = 16


def mpi() -> Any:
    """Import and return ``mpi4py.MPI``."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the second: no MPI library
        raise MissingDependencyError(
            "mpi4py is not installed, or finds no MPI library", got=str(error).splitlines()[0],
            remedy="Install the extra `mpi`: pip install 'sparsebp[mpi]'"
        ) from error  # fmt: skip
    return MPI


class MPITransport(Transport):
    """Carries arrays between processes that ``mpiexec`` has started. All ranks make one at the same time.

    Sums are made in the order of the ranks, a part on each, and then shared: MPI's own all-reduce does not guarantee
    bitwise equal results on other machines or with a different placement of ranks. Every collective call tells the
    others its kind, so that ranks running different programs get an error rather than wrong sums. All calls are made by
    one thread.

    Parameters
    ----------
    comm
        A communicator of mpi4py's, which is copied; None takes all processes.
    progress
        Whether a separate thread lets operations progress between the calls, which MPI does not do by itself.
    on_device
        Whether MPI was built for the device's memory: messages and `allgather` then take CuPy's arrays directly.
        Otherwise, and for sums in any case, they are copied through the host.
    timeout
        Seconds after which a rank stops waiting for others, by a `TransportError`. After 10 s it prints which ranks
        do not answer, and again whenever the wait has doubled.

    Raises
    ------
    OptionError
        `comm` is not a communicator, a flag not a bool, or `timeout` not a positive number.
    MissingDependencyError
        mpi4py, or an MPI library, is not installed.
    TransportError
        MPI does not let several threads call it, and `progress` needs that.
    """

    def __init__(
        self, comm: Any = None, *, progress: bool = False, on_device: bool = False, timeout: float = TIMEOUT_SECONDS
    ) -> None:
        check_flag("progress", progress)
        check_flag("on_device", on_device)
        self.timeout = check_positive("timeout", timeout)
        MPI = mpi()
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Intracomm):
            raise OptionError("Not a communicator", expected="one of mpi4py's, or None for all processes",
                              got=shown(comm), remedy="Pass MPI.COMM_WORLD, say")  # fmt: skip
        if progress and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise TransportError("MPI cannot be called by several threads", expected="MPI_THREAD_MULTIPLE",
                                 got=MPI.Query_thread(), remedy="Leave progress out")  # fmt: skip
        self._comms = [comm.Dup() for _ in range(4)]
        self._messages, self._calls_comm, self._parts, ends = self._comms
        self.peers = Peers(ends)
        self.rank, self.size, self.on_device = comm.rank, comm.size, on_device
        self._most_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # which need not have it on another communicator
        self.largest_tag = (self._most_tag + 1) // len(_CODES) - 1
        self._calls: list[Call] = []
        self._made = 0
        self._lock = forkable_lock()
        self._buffers: list[np.ndarray] = []  # bytes
        self._progress = Progress(self._go_on) if progress else None
        self._under_way = 0

    # ---- two ranks ---------------------------------------------------------------------------------------------------

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        self.check_message(array, to, tag)
        buffer, _ = self._buffer(array, read=True)
        request = self._messages.Isend(buffer, dest=to, tag=_tag(tag, array))
        return self._begun(Message(self, [request], (to,)))

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        self.check_message(out, source, tag, written=True)
        buffer, finish = self._buffer(out, write=True)
        full = _tag(tag, out)
        others = [full - _CODES[out.dtype] + code for code in _CODES.values() if code != _CODES[out.dtype]]

        def suspect() -> None:
            if any(self._messages.Iprobe(source=source, tag=other) for other in others):
                raise other_data(self.rank, source, f"{out.dtype} {out.shape}", "another dtype")

        request = self._messages.Irecv(buffer, source=source, tag=full)
        return self._begun(Message(self, [request], (source,), out=out, finish=finish, suspect=suspect))

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    def allreduce(self, array: Array) -> Handle:
        self.check_call(array, written=True)
        buffer, finish = self._buffer(array, read=True, write=True, summed=True)
        flat = buffer.reshape(-1)
        if flat.nbytes * self.size <= _SMALL_BYTES:  # every rank sums everything
            rows, work = self._rows(flat)
            first = self._exchange([flat] * self.size, rows, 0)
            return self._call("allreduce", array, first, lambda: sum_in_order(rows, flat), finish, work)
        parts = parts_of(flat, self.size)
        own = parts[self.rank]
        rows, work = self._rows(own)
        call = self._made

        def between() -> list[Any]:
            sum_in_order(rows, own)
            return self._exchange([own] * self.size, parts, 1, call)

        return self._call("allreduce", array, self._exchange(parts, rows, 0), between, finish, work)

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        self.check_call(array, out, parts=self.size)
        buffer, _ = self._buffer(array, read=True, summed=True)
        own, finish = self._buffer(out, write=True, summed=True)
        parts = list(buffer.reshape(self.size, own.size))
        rows, work = self._rows(parts[self.rank])
        first = self._exchange(parts, rows, 0)
        return self._call("reduce_scatter", array, first, lambda: sum_in_order(rows, own.reshape(-1)), finish, work)

    def allgather(self, array: Array, out: Array) -> Handle:
        self.check_call(out, array, parts=self.size, written=True)
        buffer, _ = self._buffer(array, read=True)
        whole, finish = self._buffer(out, write=True)
        rows = list(whole.reshape(self.size, buffer.size))
        rows[self.rank][...] = buffer.reshape(-1)
        first = self._exchange([buffer] * self.size, rows, 0)
        return self._call("allgather", array, first, finish=finish)

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        MPI = mpi()
        self.check_call(array)
        check_callable("combine", combine)
        buffer, _ = self._buffer(array, read=True, summed=True)
        result = np.empty_like(buffer)
        errors: list[BaseException] = []

        def operation(earlier: Any, both: Any, datatype: Any) -> None:
            try:
                a, b = (np.frombuffer(memory, buffer.dtype).reshape(buffer.shape) for memory in (earlier, both))
                xp = backend.namespace(array)
                b[...] = backend.to_host(combine(backend.as_namespace(a, xp), backend.as_namespace(b, xp)))
            except BaseException as error:  # raised below: MPI would end all processes
                errors.append(error)

        # One value whose type is the whole vector: MPI must not combine parts of it, which suits only sums of numbers.
        vector = MPI.Datatype.fromcode(buffer.dtype.char).Create_contiguous(buffer.size).Commit()
        ordered = MPI.Op.Create(operation, commute=False)
        try:
            whole = ([buffer, 1, vector], [result, 1, vector])
            first = [self._calls_comm.Iexscan(*whole, ordered)] if buffer.size else []
            self._call("exscan", array, first, needs=range(self.rank)).wait()
        finally:
            ordered.Free()
            vector.Free()
        if errors:
            raise errors[0]
        return backend.as_namespace(result, backend.namespace(array)) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        data = np.frombuffer(packed(value), np.uint8)
        sizes = self._call("share", data, [], same=False)
        sizes.wait()
        rows = [np.empty(size, np.uint8) for size in sizes.headers[:, 1]]
        rows[self.rank] = data
        # With the same number as the sizes.
        requests = self._exchange([data] * self.size, rows, 1, sizes.number)
        self._begun(Message(self, requests, range(self.size))).wait()
        return [pickle.loads(row.tobytes()) for row in rows]

    def barrier(self) -> None:
        self._call("barrier", np.empty(0, np.uint8), []).wait()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, by itself or because another one had.

        ``sys.exit`` is not a failure: the others go on until they wait for this rank, or reach the same place.
        """
        if isinstance(error, SystemExit):
            self.peers.tell(End(left=f"sys.exit({error.code!r})"))
            return
        self.peers.poll()  # has another one failed before?
        own = self.peers.reporting_rank() is None
        self.peers.tell(End(f"{type(error).__name__}: {error}", own))

    def close(self) -> None:
        """End the progress thread, and free the communicators where nothing is under way."""
        self.closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if not self.peers.ends and not self._under_way:
            while len(self._comms) > 1:  # over the last one this process tells the others how it ends
                self._comms.pop(0).Free()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], needs: Sequence[int], suspect: Callable[[], None] | None = None) -> None:
        """Wait until `ready`, which depends on the ranks `needs`, for handles."""
        look, patience = _SUSPICIOUS_SECONDS, Patience(self.peers, self.timeout)

        def meanwhile(waited: float) -> None:
            nonlocal look
            self.peers.poll()
            self.peers.check(needs)
            if suspect is not None and waited > look:
                look = 2 * waited
                suspect()
            patience.look(waited)

        patience.end(until(ready, meanwhile))

    def advance(self) -> None:
        """Let collective calls progress from their first exchange to the second."""
        with self._lock:
            for call in self._calls:
                call.advance()
            self._calls = [call for call in self._calls if not call.ended]

    def ended(self, buffer: np.ndarray | None = None) -> None:
        """Count an operation that was waited for; `buffer` may be reused."""
        self._under_way -= 1
        if buffer is not None and buffer.base is not None and len(self._buffers) < _KEPT_BUFFERS:
            self._buffers.append(buffer.base)

    def _begun(self, operation: Any) -> Any:
        self._under_way += 1
        if self._progress is not None:
            self._progress.wake()
        return operation

    def _go_on(self) -> bool:
        """Do the progress thread's work once, and return whether there is more."""
        self.peers.poll()
        self.advance()
        return self._under_way > 0

    def _call(self, kind: str, array: Array, first: list[Any], *exchange: Any, **options: Any) -> Call:
        self.check_open()
        call = Call(self, self._calls_comm, self._made, kind, array, first, *exchange, **options)
        self._made += 1
        with self._lock:
            self._calls.append(call)
        return self._begun(call)

    def _exchange(self, sent: Sequence[Array], received: Sequence[Array], part: int, call: int | None = None) -> list:
        """Begin to send and to receive an array for each other rank, in one of the two parts of a collective call."""
        # By messages, which MPICH copies in one piece: its own collective calls progress by 16 KiB at each call into
        # MPI. The number of the `call`, None for the next one, keeps them apart.
        tag = (2 * (self._made if call is None else call) + part) % (self._most_tag + 1)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [self._parts.Irecv(received[other], source=other, tag=tag) for other in reversed(others)]
        return requests + [self._parts.Isend(sent[other], dest=other, tag=tag) for other in others]

    def _rows(self, own: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return every rank's row to sum, this rank's own among them, and the memory of the others."""
        work = self._take(own.dtype, (self.size - 1) * own.size)
        rows = list(work.reshape(self.size - 1, own.size))
        rows.insert(self.rank, own)
        return rows, work

    def _take(self, dtype: np.dtype, count: int) -> np.ndarray:
        """Return working memory, kept from earlier calls if it fits: fresh pages cost as much as the sum itself."""
        size = count * dtype.itemsize
        fitting = [number for number, one in enumerate(self._buffers) if size <= one.size <= 2 * size]
        base = self._buffers.pop(fitting[0]) if fitting else np.empty(size, np.uint8)
        return base[:size].view(dtype)

    def _buffer(
        self, array: Array, *, read: bool = False, write: bool = False, summed: bool = False
    ) -> tuple[Any, Callable[[], None] | None]:
        """Return the buffer that MPI takes for an array, and the function to run when MPI has written to it."""
        xp = backend.namespace(array)
        if backend.is_host(xp):
            return array, None
        if self.on_device and not summed:
            backend.synchronize(xp)  # synchronize! MPI knows no streams
            return array, None
        host = backend.to_host(array) if read else np.empty(array.shape, array.dtype)  # synchronize!

        def finish() -> None:
            array[...] = backend.as_namespace(host, xp)

        return host, finish if write else None


def _tag(tag: int, array: Array) -> int:
    """Return MPI's tag, which includes the dtype, since MPI compares sizes at most."""
    return tag * len(_CODES) + _CODES[array.dtype]
