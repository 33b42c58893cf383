"""A transport that counts what is handed to it: the volume that a rank sends, by kind of call."""

from __future__ import annotations

from collections import Counter
from typing import Any

from sparsebp.distributed.transport import Transport

COUNTED = ("isend", "allreduce", "reduce_scatter", "allgather", "exscan")


class Counted(Transport):
    """Passes every call on to another transport, and counts calls and values by name.

    Attributes
    ----------
    calls, values
        How often each of `COUNTED` was called, and the values of the arrays that it was given.
    """

    calls: Counter[str]
    values: Counter[str]

    def __init__(self, transport: Transport) -> None:
        self._carrier = transport
        self.rank, self.size, self.on_device = transport.rank, transport.size, transport.on_device
        self.reset()

    def reset(self) -> None:
        """Begin to count anew."""
        self.calls, self.values = Counter(), Counter()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_") or name in ("rank", "size", "on_device", "calls", "values", "reset"):
            return super().__getattribute__(name)
        carried = getattr(self._carrier, name)
        if name not in COUNTED:
            return carried

        def counted(array: Any, *rest: Any) -> Any:
            self.calls[name] += 1
            self.values[name] += array.size
            return carried(array, *rest)

        return counted


Counted.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]  # all are passed on
