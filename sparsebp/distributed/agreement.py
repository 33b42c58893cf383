"""What ranks must have in common, compared before they work on it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from sparsebp import backend
from sparsebp.core import errors
from sparsebp.core.arguments import shown
from sparsebp.core.errors import OptionError, SparseBPError, TransportError
from sparsebp.core.types import Array
from sparsebp.distributed.transport import Transport

T = TypeVar("T")


def check_same(transport: Transport, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Compare `facts` with those of all ranks, and return what each has as `own`, in their order: a collective call.

    Raises
    ------
    OptionError
        They differ: on all ranks, with the name of the first one that does, and a rank that has it otherwise.
    """
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
                error.alike = True
                raise error
    return [value for _, value in everyone]


def together(transport: Transport | None, prepare: Callable[[], T]) -> T:
    """Return ``prepare()`` once no rank has refused: a collective call, after which none waits for one that has.

    What `prepare` refuses by an error of sparsebp is raised on all ranks, and they can go on with something else, on
    the same transport. It talks to other ranks by `check_same` at most; without a transport it is called, no more.

    Raises
    ------
    SparseBPError
        What this rank has refused; if it has not, what another one has, with its number.
    TransportError
        A rank has failed.
    """
    if transport is None:
        return prepare()
    found: Any = None
    refusal: SparseBPError | None = None
    try:
        found = prepare()
    except TransportError:
        raise
    except SparseBPError as error:
        if error.alike:
            raise
        refusal = error
    said = None if refusal is None else (type(refusal).__name__, *map(_text, _parts(refusal)))
    everyone = _shared(transport, "a refusal, or none", said)
    if refusal is not None:
        refusal.alike = True
        raise refusal
    for rank, other in enumerate(everyone):
        if other is not None:
            kind, problem, expected, got, remedy = other
            make: type[SparseBPError] = getattr(errors, kind, SparseBPError)
            told = make(f"Rank {rank}: {problem}", expected=expected, got=got, remedy=remedy)
            told.alike = True
            raise told
    result: T = found
    return result


def _parts(error: SparseBPError) -> tuple[object, ...]:
    return error.problem, error.expected, error.got, error.remedy


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _shared(transport: Transport, what: str, value: Any) -> list[Any]:
    """Return what all ranks share here; a rank that shares something else is at another place of the program."""
    everyone = transport.share((what, value))
    for rank, other in enumerate(everyone):
        if not isinstance(other, tuple) or other[:1] != (what,):
            raise TransportError(
                f"Rank {rank} is at another place of the program than rank {transport.rank}", expected=what,
                got=shown(other), remedy="Let all ranks run the same program, with the same options",
            )  # fmt: skip
    return [own for _, own in everyone]


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of every group of parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [{"lr": float(optimizer.lr)}]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def mark_of(options: list[dict[str, Any]]) -> float:
    """Return a number that is another one for other options of an optimizer, for a comparison at every step."""
    return float(zlib.crc32(repr(options).encode()))


def check_marks(marks: Sequence[float]) -> None:
    """Compare the `mark_of` of every rank's options, in the order of the ranks.

    Raises
    ------
    TransportError
        They differ: something has changed them on some ranks alone.
    """
    for rank, mark in enumerate(marks):
        if mark != marks[0]:
            raise TransportError(
                f"The optimizer of rank {rank} has other options than that of rank 0", expected="the same on all ranks",
                got="another learning rate, or another option",
                remedy="Change rates on all ranks alike: by the same learning-rate schedule, or by a callback that "
                "reads the model",
            )  # fmt: skip


def checksum(array: Array) -> str:
    """Return dtype, shape and a checksum of the values of an array, in words."""
    values = np.ascontiguousarray(backend.to_host(array))
    return f"{values.dtype} {values.shape}, checksum {zlib.crc32(values.tobytes()):08x}"


def checksums(arrays: Mapping[str, Array], what: str = "the parameter") -> dict[str, str]:
    """Return the `checksum` of every array, by `what` it is and its name."""
    return {f"{what} {name}": checksum(array) for name, array in arrays.items()}
