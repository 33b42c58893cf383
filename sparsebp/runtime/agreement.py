"""Ranks compare what they are about to do, refuse it together, and send each other correct values."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from sparsebp.comm.transport import Transport, host_of
from sparsebp.core import backend, errors
from sparsebp.core.absent import crc_of
from sparsebp.core.check import Array, shown
from sparsebp.core.errors import OptionError, SparseBPError, TransportError

TAG = 0  # messages of one pair and tag arrive in their order, and all of a step's have been waited for


# Comparing the ranks' options and data before they begin.

T = TypeVar("T")


def check_same(transport: Transport, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Compare `facts` over all ranks, and return each rank's `own`, in their order: a collective call."""
    everyone = _shared(transport, "a comparison", (dict(facts), own))
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                error = OptionError(
                    f"Ranks differ in {name}", expected=f"{shown(first.get(name))}, as on rank 0",
                    got=f"{shown(other.get(name))} on rank {rank}",
                    remedy="Start all ranks with the same options, seeds and data",
                )  # fmt: skip
                error.raised_on_all_ranks = True
                raise error
    return [value for _, value in everyone]


def collective_call(transport: Transport | None, prepare: Callable[[], T]) -> T:
    """Return ``prepare()`` once no rank has raised an error: a collective call."""
    # An error of sparsebp in `prepare` is raised on all ranks, which can go on, on the same transport. `prepare` talks
    # to other ranks by `check_same` at most; without a transport it is just called.
    if transport is None:
        return prepare()
    found: Any = None
    refusal: SparseBPError | None = None
    try:
        found = prepare()
    except TransportError:
        raise
    except SparseBPError as error:
        if error.raised_on_all_ranks:
            raise
        refusal = error
    said = None
    if refusal is not None:
        parts = refusal.problem, refusal.expected, refusal.got, refusal.remedy
        said = type(refusal).__name__, *(None if part is None else str(part) for part in parts)
    everyone = _shared(transport, "a refusal, or none", said)
    if refusal is not None:
        refusal.raised_on_all_ranks = True
        raise refusal
    for rank, other in enumerate(everyone):
        if other is not None:
            kind, problem, expected, got, remedy = other
            make: type[SparseBPError] = getattr(errors, kind, SparseBPError)
            told = make(f"Rank {rank}: {problem}", expected=expected, got=got, remedy=remedy)
            told.raised_on_all_ranks = True
            raise told
    result: T = found
    return result


def _shared(transport: Transport, what: str, value: Any) -> list[Any]:
    """Return the values of all ranks; one that shares something else is elsewhere in the program."""
    everyone = transport.share((what, value))
    for rank, other in enumerate(everyone):
        if not isinstance(other, tuple) or other[:1] != (what,):
            raise TransportError(f"Rank {rank} is at another place of the program than rank {transport.rank}",
                                 expected=what, got=shown(other),
                                 remedy="Let all ranks run the same program, with the same options")  # fmt: skip
    return [own for _, own in everyone]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of every group of parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [{"lr": float(optimizer.lr)}]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def names_of_groups(optimizer: Any) -> list[list[str]]:
    """Return the names of the parameters of every group."""
    return [list(group["params"]) for group in getattr(optimizer, "param_groups", ())]


def mark_of(options: list[dict[str, Any]]) -> float:
    """Return a checksum of an optimizer's options, to compare at every step."""
    return float(zlib.crc32(repr(options).encode()))


def check_marks(marks: Sequence[float]) -> None:
    """Compare the ranks' `mark_of`, in their order."""
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            raise TransportError(f"The optimizer of rank {rank} has other options than rank 0's",
                                 expected="the same on all ranks", got="another learning rate, or another option",
                                 remedy="Change rates on all ranks alike: by the same learning-rate schedule, or by a "
                                 "callback that reads the model")  # fmt: skip


def checksum(array: Array) -> str:
    """Return dtype, shape and a checksum of an array's values as text."""
    return f"{array.dtype} {array.shape}, checksum {crc_of(backend.to_host(array)):08x}"


def checksums(arrays: Mapping[str, Array], what: str = "the parameter") -> dict[str, str]:
    """Return every array's `checksum` by `what` it is and its name."""
    return {f"{what} {name}": checksum(array) for name, array in arrays.items()}


# Arrays whose correct values one rank has, sent to all others.


def exchange(transport: Transport, arrays: Mapping[str, tuple[int, Array]]) -> None:
    """Write the values of each array's owner, a rank, to it on all ranks."""
    # All ranks call it together, with arrays of the same names, in the same order, of the same shapes and dtypes.
    rank, size = transport.rank, transport.size
    under_way = []
    others: dict[str, Array] = {}
    for name, (owner, array) in arrays.items():
        xp = backend.namespace(array)
        between = host_of(transport) if backend.is_host(xp) else transport
        if array.dtype.kind != "f" or array.size == 0:
            others[name] = array
            continue
        carrier = xp if between.on_device else np
        if owner == rank:
            given = carrier.ascontiguousarray(backend.as_namespace(array, carrier))
            under_way += [(between.isend(given, to, TAG), given, None) for to in range(size) if to != rank]
        else:
            buffer = carrier.empty(array.shape, array.dtype)
            under_way.append((between.irecv(buffer, owner, TAG), buffer, array))
    for handle, carried, target in under_way:
        handle.wait()
        if target is not None:
            target[...] = backend.as_namespace(carried, backend.namespace(target))
    mine = {name: backend.to_host(array).copy() for name, array in others.items() if arrays[name][0] == rank}
    for values in transport.share(mine):
        for name, value in values.items():
            others[name][...] = backend.as_namespace(value, backend.namespace(others[name]))
