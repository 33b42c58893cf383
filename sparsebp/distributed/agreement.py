"""What ranks must have in common, compared before they work on it."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import shown
from sparsebp.core.errors import OptionError
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Transport


def check_same(transport: Transport, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Compare `facts` with those of all ranks, and return what each has as `own`, in their order: a collective call.

    Raises
    ------
    OptionError
        They differ: on all ranks, with the name of the first one that does, and a rank that has it otherwise.
    """
    everyone = transport.share((dict(facts), own))
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise OptionError(
                    f"Ranks differ in {name}", expected=f"{shown(first.get(name))}, as on rank 0",
                    got=f"{shown(other.get(name))} on rank {rank}",
                    remedy="Start all ranks with the same options, seeds and data",
                )  # fmt: skip
    return [value for _, value in everyone]


def checksum(array: Array) -> str:
    """Return dtype, shape and a checksum of the values of an array, in words."""
    values = np.ascontiguousarray(backend.to_host(array))
    return f"{values.dtype} {values.shape}, checksum {zlib.crc32(values.tobytes()):08x}"


def checksums(arrays: Mapping[str, Array], what: str = "the parameter") -> dict[str, str]:
    """Return the `checksum` of every array, by `what` it is and its name."""
    return {f"{what} {name}": checksum(array) for name, array in arrays.items()}
