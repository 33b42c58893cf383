"""Ranks that are processes of MPI."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_flag, check_integer, check_number, shown
from sparsebp.core.errors import MissingDependencyError, OptionError, TransportError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.types import Array
from sparsebp.distributed.transport import DTYPES, Handle, Transport, check_callable, packed
from sparsebp.distributed.transports.processes.calls import Call, Message
from sparsebp.distributed.transports.processes.peers import TIMEOUT_SECONDS, End, Patience, Peers
from sparsebp.distributed.transports.processes.progress import Progress
from sparsebp.distributed.transports.processes.waiting import until
from sparsebp.distributed.transports.sums import parts_of, sum_in_order

_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SUSPICIOUS_SECONDS = 0.5
_SMALL_BYTES = 16384  # of all ranks' arrays together: one exchange of all is then faster than two of parts
_KEPT_BUFFERS = 16


def mpi() -> Any:
    """Import and return ``mpi4py.MPI``.

    Raises
    ------
    MissingDependencyError
        It, or an MPI library, is not installed.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the second: no MPI library
        raise MissingDependencyError(
            "mpi4py is not installed, or finds no MPI library", got=str(error).splitlines()[0],
            remedy="Install the extra `mpi`: pip install 'sparsebp[mpi]'",
        ) from error  # fmt: skip
    return MPI


class MPITransport(Transport):
    """Carries arrays between processes that ``mpiexec`` has started. All ranks make one at the same time.

    Sums are made in the order of the ranks, on each a part, which all then get: MPI's own all-reduce does not promise
    the same bits on other machines, or with the ranks placed otherwise. Every collective call says to the others which
    it is, so that ranks whose programs differ get an error and no wrong sums. All calls are one thread's.

    Parameters
    ----------
    comm
        A communicator of mpi4py's, which is copied; None takes all processes.
    progress
        Whether a thread of its own lets operations go on between the calls, as MPI does not by itself.
    on_device
        Whether MPI was built for the device's memory: messages and `allgather` then take CuPy's arrays as they are.
        Without, and for sums in any case, they are copied through the host.
    timeout
        Seconds after which a rank gives up to wait for others, by a `TransportError`. After 10 s it prints which ranks
        do not answer, and again whenever it has waited twice as long.

    Raises
    ------
    OptionError
        `comm` is no communicator, a flag no truth value, or `timeout` no positive number.
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
        self.timeout = check_timeout(timeout)
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
        self._most_tag = comm.Get_attr(MPI.TAG_UB)
        self.largest_tag = (self._most_tag + 1) // len(_CODES) - 1
        self._calls: list[Call] = []
        self._made = 0
        self._lock = forkable_lock()
        self._buffers: list[np.ndarray] = []  # bytes
        self._everyone = range(self.size)
        self._progress = Progress(self._go_on) if progress else None
        self._under_way = 0

    # ---- two ranks ---------------------------------------------------------------------------------------------------

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        """Begin to send."""
        self.check_message(array, to, tag)
        buffer, _ = self._buffer(array, read=True)
        request = self._messages.Isend(buffer, dest=to, tag=_tag(tag, array))
        return self._begun(Message(self, [request], (to,)))

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        """Begin to receive."""
        self.check_message(out, source, tag, written=True)
        buffer, finish = self._buffer(out, write=True)
        full = _tag(tag, out)
        others = [full - _CODES[out.dtype] + code for code in _CODES.values() if code != _CODES[out.dtype]]

        def suspect() -> None:
            if any(self._messages.Iprobe(source=source, tag=other) for other in others):
                raise TransportError(
                    f"Rank {self.rank} expected other data of rank {source}", expected=f"{out.dtype} {out.shape}",
                    got="another dtype", remedy="Give all ranks the same model, batches and schedule",
                )  # fmt: skip

        request = self._messages.Irecv(buffer, source=source, tag=full)
        return self._begun(Message(self, [request], (source,), out=out, finish=finish, suspect=suspect))

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    def allreduce(self, array: Array) -> Handle:
        """Begin to sum over all ranks, in their order."""
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
        """Begin to sum, and to keep this rank's part."""
        self.check_call(array, out, parts=self.size)
        buffer, _ = self._buffer(array, read=True, summed=True)
        own, finish = self._buffer(out, write=True, summed=True)
        parts = list(buffer.reshape(self.size, own.size))
        rows, work = self._rows(parts[self.rank])
        first = self._exchange(parts, rows, 0)
        return self._call("reduce_scatter", array, first, lambda: sum_in_order(rows, own.reshape(-1)), finish, work)

    def allgather(self, array: Array, out: Array) -> Handle:
        """Begin to gather the arrays of all ranks."""
        self.check_call(out, array, parts=self.size, written=True)
        buffer, _ = self._buffer(array, read=True)
        whole, finish = self._buffer(out, write=True)
        rows = list(whole.reshape(self.size, buffer.size))
        rows[self.rank][...] = buffer.reshape(-1)
        first = self._exchange([buffer] * self.size, rows, 0)
        return self._call("allgather", array, first, None, finish, None)

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        """Return what the ranks before this one combine to."""
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

        # One value of a type that is the whole vector: MPI cannot combine it in pieces, which only the sum of numbers
        # would survive.
        vector = MPI.Datatype.fromcode(buffer.dtype.char).Create_contiguous(buffer.size).Commit()
        ordered = MPI.Op.Create(operation, commute=False)
        try:
            whole = ([buffer, 1, vector], [result, 1, vector])
            first = [self._calls_comm.Iexscan(*whole, ordered)] if buffer.size else []
            self._call("exscan", array, first, None, None, None, needs=range(self.rank)).wait()
        finally:
            ordered.Free()
            vector.Free()
        if errors:
            raise errors[0]
        return backend.as_namespace(result, backend.namespace(array)) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        """Return the objects of all ranks."""
        data = np.frombuffer(packed(value), np.uint8)
        sizes = self._call("share", data, [], None, None, None, same=False)
        sizes.wait()
        rows = [np.empty(size, np.uint8) for size in sizes.headers[:, 1]]
        rows[self.rank] = data
        # Of the same number as the sizes were told with.
        self._begun(Message(self, self._exchange([data] * self.size, rows, 1, sizes.number), self._everyone)).wait()
        return [pickle.loads(row.tobytes()) for row in rows]

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the object of one rank."""
        check_integer("root", root, 0, self.size - 1)
        return self.share(value if self.rank == root else None)[root]

    def barrier(self) -> None:
        """Return when all ranks have come here."""
        self._call("barrier", np.empty(0, np.uint8), [], None, None, None).wait()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed, by itself or because another one had.

        ``sys.exit`` is no failure: the others go on until they wait for this rank, or come to the same place.
        """
        if isinstance(error, SystemExit):
            self.peers.tell(End(left=f"sys.exit({error.code!r})"))
            return
        self.peers.poll()  # has another one failed before?
        own = self.peers.speaker() is None
        self.peers.tell(End(f"{type(error).__name__}: {error}", own))

    def close(self) -> None:
        """End the thread of progress, and free the communicators where nothing is under way."""
        self.closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        if not self.peers.ends and not self._under_way:
            while len(self._comms) > 1:  # by the last one this process tells the others how it ends
                self._comms.pop(0).Free()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], bool], needs: Sequence[int], suspect: Callable[[], None] | None = None) -> None:
        """Return when `ready`, as handles do it; `needs` are the ranks that this depends on."""
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
        """Let collective calls go on from their first exchange to the second."""
        with self._lock:
            for call in self._calls:
                call.advance()
            self._calls = [call for call in self._calls if not call.ended]

    def ended(self, buffer: np.ndarray | None = None) -> None:
        """Note that an operation was waited for; `buffer` may be used again."""
        self._under_way -= 1
        if buffer is not None and buffer.base is not None and len(self._buffers) < _KEPT_BUFFERS:
            self._buffers.append(buffer.base)

    def _begun(self, operation: Any) -> Any:
        self._under_way += 1
        if self._progress is not None:
            self._progress.wake()
        return operation

    def _go_on(self) -> bool:
        """Do what the progress thread does, and return whether there is more of it."""
        self.peers.poll()
        self.advance()
        return self._under_way > 0

    def _call(self, kind: str, array: Array, first: list[Any], between: Callable[[], list[Any] | None] | None,
              finish: Callable[[], None] | None, work: Any, needs: Sequence[int] | None = None,
              same: bool = True) -> Call:  # fmt: skip
        self.check_open()
        header = Call.header(kind, array, self._made)
        headers = np.empty((self.size, header.size), np.int64)
        heading = self._calls_comm.Iallgather(header, headers)
        call = Call(self, self._made, heading, headers, first, between, finish, work,
                    self._everyone if needs is None else needs, same)  # fmt: skip
        self._made += 1
        with self._lock:
            self._calls.append(call)
        return self._begun(call)

    def _exchange(self, sent: Sequence[Array], received: Sequence[Array], part: int, call: int | None = None) -> list:
        """Begin to send and to receive an array for each other rank, in one of the two parts of a collective call.

        By messages, which MPICH copies in one piece: its own collective calls, where nobody waits for them, take one
        look of the rank for every 16 KiB. The number of the `call`, None for the next one, keeps them apart.
        """
        tag = (2 * (self._made if call is None else call) + part) % (self._most_tag + 1)
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        requests = [self._parts.Irecv(received[other], source=other, tag=tag) for other in reversed(others)]
        return requests + [self._parts.Isend(sent[other], dest=other, tag=tag) for other in others]

    def _rows(self, own: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
        """Return an array for every rank's values to sum, this rank's own among them, and the memory of the others."""
        work = self._take(own.dtype, (self.size - 1) * own.size)
        rows = list(work.reshape(self.size - 1, own.size))
        rows.insert(self.rank, own)
        return rows, work

    def _take(self, dtype: np.dtype, count: int) -> np.ndarray:
        """Return memory to work in, kept from earlier calls if it fits: fresh pages cost as much as the sum itself."""
        size = count * dtype.itemsize
        fitting = [number for number, one in enumerate(self._buffers) if size <= one.size <= 2 * size]
        base = self._buffers.pop(fitting[0]) if fitting else np.empty(size, np.uint8)
        return base[:size].view(dtype)

    def _buffer(
        self, array: Array, *, read: bool = False, write: bool = False, summed: bool = False
    ) -> tuple[Any, Callable[[], None] | None]:
        """Return what MPI is given for an array, and what is to be done when it has written to that."""
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


def check_timeout(timeout: float) -> float:
    """Return the seconds that a rank waits for others.

    Raises
    ------
    OptionError
        They are no positive number.
    """
    if check_number("timeout", timeout) <= 0:
        raise OptionError("timeout is not positive", expected="seconds, more than 0", got=timeout,
                          remedy="Leave it out for half an hour")  # fmt: skip
    return timeout


def _tag(tag: int, array: Array) -> int:
    """Return MPI's tag: the dtype is in it, since MPI compares sizes at most."""
    return tag * len(_CODES) + _CODES[array.dtype]
