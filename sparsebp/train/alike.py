"""What ranks compare before they train, and what they take over from rank 0 while they do."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.distributed.pipeline.whole import exchange
from sparsebp.distributed.transport import Transport


def check_same(transport: Transport, facts: Mapping[str, Any]) -> None:
    """Refuse to go on where ranks differ in what must be the same on all; all ranks call it together.

    Raises
    ------
    OptionError
        The message names the first difference, and the ranks.
    """
    every = transport.share(dict(facts))
    for rank, other in enumerate(every):
        for name in facts:
            if other.get(name) != every[0].get(name):
                raise OptionError(
                    f"Ranks differ in {name}", expected=f"{every[0].get(name)}, as on rank 0",
                    got=f"{other.get(name)} on rank {rank}", remedy="Start all ranks with the same options and seeds",
                )  # fmt: skip


def checksums(arrays: Mapping[str, Any], what: str = "the parameter") -> dict[str, str]:
    """Return shape, dtype and a checksum of every array, by `what` it is and its name."""
    found = {}
    for name, array in arrays.items():
        values = np.ascontiguousarray(backend.to_host(array))
        code = zlib.crc32(values.view(np.uint8).reshape(-1).data) if values.size else 0
        found[f"{what} {name}"] = f"{values.dtype} {values.shape}, checksum {code:08x}"
    return found


def described(thing: Any) -> str:
    """Return the class of a layer, a loss or a predictor, with those of its attributes that are plain options."""
    plain = (bool, int, float, str, tuple, type(None), np.dtype)
    options = {
        name: value for name, value in vars(thing).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "device"
    } if hasattr(thing, "__dict__") else {}  # fmt: skip
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))})"


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the options of every group of parameters."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return [{"lr": float(optimizer.lr)}]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def told(trainer: Any, event: str, tell: Callable[[], None]) -> None:
    """Tell callbacks of an event, on rank 0, and give all ranks what these have changed of parameters and options.

    Where a callback sees the model at the event, all ranks call this together.
    """
    transport = trainer.transport
    if transport is None or transport.size == 1 or event == "close" or not trainer._sees(event):
        tell()
        return
    parameters = trainer.model.parameters()
    before = (checksums(parameters), options_of(trainer.optimizer)) if transport.rank == 0 else ({}, [])
    tell()
    changed: tuple[list[str], Any] = [], None
    if transport.rank == 0:
        now, options = checksums(parameters), options_of(trainer.optimizer)
        names = [name for name, fact in zip(parameters, now, strict=True) if before[0][fact] != now[fact]]
        changed = names, None if options == before[1] else options
    names, options = transport.broadcast(changed)
    exchange(transport, {name: (0, parameters[name]) for name in names})
    if options is not None:
        for group, values in zip(getattr(trainer.optimizer, "param_groups", ()), options, strict=False):
            group.update(values)
        if not hasattr(trainer.optimizer, "param_groups"):
            trainer.optimizer.lr = options[0]["lr"]
