"""Arrays that one rank has the right values of, for all others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Transport

_TAG = 0  # messages of one pair and tag arrive in their order, and all of a step's have been waited for


def exchange(transport: Transport, arrays: Mapping[str, tuple[int, Array]]) -> None:
    """Write to every array the values that its owner, the rank that comes with it, has for it.

    All ranks call it together, with arrays of the same names, in the same order, of the same shapes and dtypes.
    """
    rank, size = transport.rank, transport.size
    under_way = []
    others: dict[str, Array] = {}
    for name, (owner, array) in arrays.items():
        xp = backend.namespace(array)
        between = getattr(transport, "host", transport) if backend.is_host(xp) else transport  # NCCL's are devices
        if array.dtype.kind != "f" or array.size == 0:
            others[name] = array
            continue
        carrier = xp if between.on_device else np
        if owner == rank:
            given = carrier.ascontiguousarray(backend.as_namespace(array, carrier))
            under_way += [(between.isend(given, to, _TAG), given, None) for to in range(size) if to != rank]
        else:
            room = carrier.empty(array.shape, array.dtype)
            under_way.append((between.irecv(room, owner, _TAG), room, array))
    for handle, carried, target in under_way:
        handle.wait()
        if target is not None:
            target[...] = backend.as_namespace(carried, backend.namespace(target))
    mine = {name: backend.to_host(array).copy() for name, array in others.items() if arrays[name][0] == rank}
    for values in transport.share(mine):
        for name, value in values.items():
            others[name][...] = backend.as_namespace(value, backend.namespace(others[name]))
