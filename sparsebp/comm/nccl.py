"""Ranks with a GPU each: NCCL carries arrays between devices, another transport (MPI) messages between hosts.

NCCL knows no tags, and runs sends and receives in the order of their calls: a send without a receive blocks everything
after it. So there is a communicator of two ranks, and a stream, for each pair and direction: nothing else blocks the
messages from one rank to another, and they arrive in the order in which they were sent. Receives must be posted in that
order; each message's number and size also go from host to host, by its tag, and are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.comm.transport import (
    DTYPES,
    Handle,
    Transport,
    check_callable,
    other_call,
    other_data,
    parts_of,
    sum_in_order,
)
from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, MissingDependencyError, TransportError

_KINDS = ("allreduce", "reduce_scatter", "allgather", "exscan")
_TYPES = {np.dtype(np.float32): "NCCL_FLOAT32", np.dtype(np.float64): "NCCL_FLOAT64",
          np.dtype(np.int32): "NCCL_INT32", np.dtype(np.int64): "NCCL_INT64"}  # fmt: skip


def nccl() -> ModuleType:
    """Return CuPy's binding of NCCL."""
    try:
        from cupy.cuda import nccl as binding
    except ImportError as error:
        raise _missing(str(error)) from error
    if not getattr(binding, "available", True):
        raise _missing("a CuPy without it")
    return binding


def _missing(got: str) -> MissingDependencyError:
    return MissingDependencyError(
        "NCCL cannot be used", expected="cupy.cuda.nccl", got=got,
        remedy="Install the library of your CUDA version: pip install nvidia-nccl-cu13, or nvidia-nccl-cu12"
    )  # fmt: skip


class NCCLTransport(Transport):
    """Carries arrays between the GPUs of ranks. All ranks make one at the same time, with their device current.

    Handles order streams: after `Handle.wait` the current stream's later work sees the array, or may write to it; the
    host waits only until the other host has made the same call. Sums are made in the order of the ranks.

    Parameters
    ----------
    host
        The transport between the ranks' hosts; its failures are this one's.
    xp, binding
        CuPy and its binding of NCCL; None imports them.

    Raises
    ------
    MissingDependencyError, DeviceError
        CuPy or NCCL is not installed, or there is no GPU.
    """

    on_device = True

    def __init__(self, host: Transport, *, xp: Any = None, binding: Any = None) -> None:
        self.host, self.rank, self.size, self.largest_tag = host, host.rank, host.size, host.largest_tag
        self._xp = backend.cupy() if xp is None else xp
        self._nccl = nccl() if binding is None else binding
        self._stream = self._xp.cuda.Stream(non_blocking=True)
        ids = {(self.rank, other): self._nccl.get_unique_id() for other in range(self.size)}
        everywhere = {pair: one for own in host.share(ids) for pair, one in own.items()}
        make = self._nccl.NcclCommunicator
        self._world: Any = make(self.size, everywhere[0, 0], self.rank)
        self._channels: dict[tuple[int, int], _Channel] = {}
        pairs = [(a, b) for a in range(self.size) for b in range(self.size) if a != b]
        for a, b in sorted(pairs, key=lambda pair: (min(pair), max(pair), pair)):  # the same order on all ranks
            if self.rank in (a, b):
                comm = make(2, everywhere[a, b], int(self.rank == b))
                self._channels[a, b] = _Channel(comm, self._xp.cuda.Stream(non_blocking=True))
                # NCCL connects at the first message, which blocks until the other end calls.
                number = self._xp.zeros(1, np.float32)
                self._carried("send" if self.rank == a else "recv", a, b, number).stream.synchronize()

    # ---- two ranks ---------------------------------------------------------------------------------------------------

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        """Begin to send, after the current stream's work so far."""
        self.check_message(array, to, tag)
        channel = self._carried("send", self.rank, to, array)
        said = self.host.isend(_header(channel.next(), array), to, tag)
        return _OnStream(self, said, channel.stream.record(), (array,))

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        """Begin to receive, after the current stream's work so far."""
        self.check_message(out, source, tag, written=True)
        channel = self._carried("recv", source, self.rank, out)
        expected, came = _header(channel.next(), out), np.empty(3, np.int64)

        def compare() -> None:
            if list(came) != list(expected):
                raise other_data(self.rank, source, _described(expected), _described(came),
                                 "Receive in the order in which the other rank sends")  # fmt: skip

        return _OnStream(self, self.host.irecv(came, source, tag), channel.stream.record(), (out,), compare)

    def _carried(self, call: str, sender: int, receiver: int, array: Array) -> _Channel:
        """Give this rank's end of a message to its channel, and return that."""
        if sender == receiver:
            raise TransportError("A rank sends to itself", expected="another rank", got=sender)
        channel = self._channels[sender, receiver]
        channel.stream.wait_event(self._recorded())
        self._carry(channel.comm, call, array, 1 - channel.comm.rank_id(), channel.stream)
        return channel

    # ---- all ranks ---------------------------------------------------------------------------------------------------

    def allreduce(self, array: Array) -> Handle:
        self.check_call(array, written=True)

        def work() -> None:
            parts = parts_of(array.reshape(-1), self.size)
            own = parts[self.rank]
            rows = self._rows(own)
            self._exchange(parts, rows)
            sum_in_order(rows, own, self._xp.add)
            self._exchange([own] * self.size, parts)

        return self._call("allreduce", array, work, (array,))

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        self.check_call(array, out, parts=self.size)

        def work() -> None:
            parts = parts_of(array.reshape(-1), self.size)
            rows = self._rows(parts[self.rank])
            self._exchange(parts, rows)
            sum_in_order(rows, out.reshape(-1), self._xp.add)

        return self._call("reduce_scatter", array, work, (array, out))

    def allgather(self, array: Array, out: Array) -> Handle:
        self.check_call(out, array, parts=self.size, written=True)

        def work() -> None:
            rows = parts_of(out.reshape(-1), self.size)
            self._xp.copyto(rows[self.rank], array.reshape(-1))
            self._exchange([array] * self.size, rows)

        return self._call("allgather", array, work, (array, out))

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        """Combine the arrays of the ranks before this one, which are gathered here."""
        self.check_call(array)
        check_callable("combine", combine)
        rows = [self._xp.empty(array.shape, array.dtype) for _ in range(self.size)]
        rows[self.rank] = array
        self._call("exscan", array, lambda: self._exchange([array] * self.size, rows), rows).wait()
        return reduce(combine, rows[: self.rank]) if self.rank else None

    def share(self, value: Any) -> list[Any]:
        return self.host.share(value)

    def barrier(self) -> None:
        """Wait for all hosts."""
        self.host.barrier()

    # ---- the end -----------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException) -> None:
        """Tell the other hosts that this one has failed, and abort this device's operations."""
        self.host.abort(error)
        for comm in [self._world, *(channel.comm for channel in self._channels.values())]:
            if comm is not None:
                comm.abort()
        self._world = None
        self._channels.clear()

    def close(self) -> None:
        """Free NCCL's communicators, and close the hosts' transport."""
        self.closed = True
        for channel in self._channels.values():
            channel.stream.synchronize()
            channel.comm.destroy()
        self._channels.clear()
        if self._world is not None:  # it may be closed again
            self._stream.synchronize()
            self._world.destroy()
        self._world = None
        self.host.close()

    def check_array(self, array: Array, written: bool) -> None:
        """Refuse arrays of the host, too."""
        super().check_array(array, written)
        if not hasattr(array.data, "ptr"):
            raise DeviceError("NCCL carries arrays between GPUs", expected="an array of CuPy's",
                              got=type(array).__name__,
                              remedy="Move the model to the device, or use MPITransport")  # fmt: skip

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _recorded(self) -> Any:
        return self._xp.cuda.get_current_stream().record()

    def _carry(self, comm: Any, call: str, array: Array, peer: int, stream: Any) -> None:
        if array.size:
            kind = getattr(self._nccl, _TYPES[array.dtype])
            getattr(comm, call)(array.data.ptr, array.size, kind, peer, stream.ptr)

    def _exchange(self, sent: Sequence[Array], received: Sequence[Array]) -> None:
        """Send an array to each other rank, and receive one of each, all at once."""
        self._nccl.groupStart()
        for step in range(1, self.size):
            to, source = (self.rank + step) % self.size, (self.rank - step) % self.size
            self._carry(self._world, "send", sent[to], to, self._stream)
            self._carry(self._world, "recv", received[source], source, self._stream)
        self._nccl.groupEnd()

    def _rows(self, own: Array) -> list[Array]:
        return [own if rank == self.rank else self._xp.empty(own.size, own.dtype) for rank in range(self.size)]

    def _call(self, kind: str, array: Array, work: Callable[[], None], kept: Sequence[Array]) -> Handle:
        """Begin a collective call: its work goes to the common stream, its kind to the other hosts."""
        header = np.array([_KINDS.index(kind), array.nbytes, DTYPES.index(array.dtype)], np.int64)
        headers = np.empty((self.size, header.size), np.int64)
        said = self.host.allgather(header, headers)
        self._stream.wait_event(self._recorded())
        with self._stream:
            work()

        def compare() -> None:
            for rank, other in enumerate(headers):
                if list(other) != list(header):
                    raise other_call(rank, self.rank, _described_call(header), _described_call(other))

        return _OnStream(self, said, self._stream.record(), kept, compare)


class _Channel:
    """The channel from one rank to another: a communicator of the two, and a stream."""

    def __init__(self, comm: Any, stream: Any) -> None:
        self.comm, self.stream = comm, stream
        self._count = 0

    def next(self) -> int:
        """Return the number of the next message."""
        self._count += 1
        return self._count - 1


class _OnStream:
    """Work on one of NCCL's streams, for which the current stream waits."""

    def __init__(self, transport: NCCLTransport, said: Handle, ended: Any, kept: Sequence[Array],
                 compare: Callable[[], None] | None = None) -> None:  # fmt: skip
        self._transport, self._said, self._ended, self._kept, self._compare = transport, said, ended, kept, compare
        self._taken = False

    def wait(self) -> None:
        """Let the current stream wait; the host waits for the other hosts' calls."""
        if self._taken:
            return
        self._said.wait()
        if self._compare is not None:
            self._compare()
        self._transport._xp.cuda.get_current_stream().wait_event(self._ended)
        self._taken, self._kept = True, ()

    def done(self) -> bool:
        """Say whether it has come to its end, on the device too."""
        return self._said.done() and bool(self._ended.done)


def _header(number: int, array: Array) -> np.ndarray:
    return np.array([number, array.nbytes, DTYPES.index(array.dtype)], np.int64)


def _described_call(header: np.ndarray) -> str:
    return f"{_KINDS[header[0]]} of {header[1]} bytes of {DTYPES[header[2]]}"


def _described(header: np.ndarray) -> str:
    return f"{header[1]} bytes of {DTYPES[header[2]]}, number {header[0]}"
