"""A transport that counts what is handed to it: the volume that a rank sends, by kind of call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from sparsebp.comm.transport import Handle, Transport
from sparsebp.core.check import Array


class Counted(Transport):
    """Passes every call on to another transport, and counts calls and values of those that send arrays.

    Attributes
    ----------
    calls, values
        How often each was called, and the values of the arrays that it was given, by the name of the method.
    """

    def __init__(self, transport: Transport) -> None:
        self._carrier = transport
        self.rank, self.size, self.on_device = transport.rank, transport.size, transport.on_device
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.calls, self.values = Counter[str](), Counter[str]()

    def _count(self, name: str, array: Array) -> None:
        self.calls[name] += 1
        self.values[name] += array.size

    def isend(self, array: Array, to: int, tag: int) -> Handle:
        """Count, and send."""
        self._count("isend", array)
        return self._carrier.isend(array, to, tag)

    def irecv(self, out: Array, source: int, tag: int) -> Handle:
        """Receive."""
        return self._carrier.irecv(out, source, tag)

    def allreduce(self, array: Array) -> Handle:
        """Count, and sum."""
        self._count("allreduce", array)
        return self._carrier.allreduce(array)

    def reduce_scatter(self, array: Array, out: Array) -> Handle:
        """Count, and sum."""
        self._count("reduce_scatter", array)
        return self._carrier.reduce_scatter(array, out)

    def allgather(self, array: Array, out: Array) -> Handle:
        """Count, and gather."""
        self._count("allgather", array)
        return self._carrier.allgather(array, out)

    def exscan(self, array: Array, combine: Callable[[Array, Array], Array]) -> Array | None:
        """Count, and scan."""
        self._count("exscan", array)
        return self._carrier.exscan(array, combine)

    def share(self, value: Any) -> list[Any]:
        """Share."""
        return self._carrier.share(value)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Broadcast."""
        return self._carrier.broadcast(value, root)

    def barrier(self) -> None:
        """Wait for all."""
        self._carrier.barrier()

    def abort(self, error: BaseException) -> None:
        """Tell the others."""
        self._carrier.abort(error)

    def close(self) -> None:
        """Close."""
        self._carrier.close()
