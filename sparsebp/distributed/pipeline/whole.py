"""Brings what each rank has of a model and its optimizer together, so that every rank has all of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.types import Array
from sparsebp.distributed.exchange import exchange
from sparsebp.distributed.transport import Transport
from sparsebp.nn.layer import dotted
from sparsebp.runtime.stages import Stages


def make_whole(
    transport: Transport, stages: Stages, optimizer: Any, owners: Sequence[int], predictor: Any = None
) -> None:
    """Give every rank the parameters, buffers, random generators and optimizer state of all stages.

    Parameters
    ----------
    transport
        All ranks call this together.
    stages
        Of the model.
    optimizer
        ``state_dict`` and ``load_state_dict`` as `sparsebp.optim.Optimizer` has them: what belongs to one parameter has
        a name that ends with the parameter's.
    owners
        The rank of every stage: that whose values count.
    predictor
        Has state like the optimizer's, of the parameters that it has seen updates of; None is none.
    """
    arrays: dict[str, tuple[int, Array]] = {}
    generators: dict[str, tuple[int, np.random.Generator]] = {}
    live = stages.model.parameters()
    for number, owner in enumerate(owners):
        stage = stages[number]
        arrays |= {name: (owner, live[name]) for name in stage.parameters.values()}
        if hasattr(stage.layer, "modules"):
            for prefix, layer in stage.layer.modules(stage.name):
                arrays |= {f"buffer {dotted(prefix, key)}": (owner, array) for key, array in layer.buffers.items()}
                if layer.generator is not None:
                    generators[prefix] = owner, layer.generator
    state = optimizer.state_dict()
    home = {name: arrays[name][0] for name in stages.names}
    numbers: dict[str, int] = {}
    for key, value in state.items():
        name = _parameter(key, home)
        if name is not None and isinstance(value, np.ndarray | type(live[name])):
            arrays[f"optimizer {key}"] = home[name], value
        elif name is not None:
            numbers[key] = home[name]
    exchange(transport, arrays)
    rank = transport.rank
    drawn = {key: made.bit_generator.state for key, (owner, made) in generators.items() if owner == rank}
    shared = transport.share((drawn, {key: state[key] for key, owner in numbers.items() if owner == rank}))
    for states, values in shared:
        state |= values
        for key, drawn_state in states.items():
            generators[key][1].bit_generator.state = drawn_state
    optimizer.load_state_dict(state)
    if predictor is not None:
        kept: dict[str, Any] = {}
        for key, value in predictor.state_dict().items():
            name = _parameter(key, home)
            if name is None or home[name] == rank:
                kept[key] = backend.to_host(value) if hasattr(value, "ndim") else value
        predictor.load_state_dict({key: value for part in transport.share(kept) for key, value in part.items()})


def _parameter(key: str, names: Mapping[str, Any]) -> str | None:
    """Return the parameter that an entry of an optimizer's state belongs to: the longest name that it ends with."""
    for at in range(len(key) + 1):
        if (at == 0 or key[at - 1] == ".") and key[at:] in names:
            return key[at:]
    return None
