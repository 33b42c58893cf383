"""What ranks must have in common, compared before they work on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparsebp.core.arguments import shown
from sparsebp.core.errors import TransportError
from sparsebp.distributed.transport import Transport


def check_equal(transport: Transport, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
    """Compare `facts` with those of all ranks, and return what each has as `own`, in their order: a collective call.

    Raises
    ------
    TransportError
        They differ: on all ranks, with the name of the first one that does, and a rank that has it otherwise.
    """
    everyone = transport.share((dict(facts), own))
    first = everyone[0][0]
    for rank, (other, _) in enumerate(everyone):
        for name in {**first, **other}:
            if first.get(name) != other.get(name):
                raise TransportError(
                    f"Rank {rank} has another {name} than rank 0", expected=shown(first.get(name)),
                    got=shown(other.get(name)), remedy="Give all ranks the same model and batches",
                )  # fmt: skip
    return [value for _, value in everyone]
