"""What only rank 0 does while all train, and what the others take over from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsebp.distributed.agreement import checksums, options_of
from sparsebp.distributed.exchange import exchange
from sparsebp.distributed.transport import Transport
from sparsebp.train.history import History
from sparsebp.train.modes import generators_of


def buffers_of_rank_0(transport: Transport, model: Any) -> None:
    """Give all replicas the running statistics of rank 0, which are those that count; all ranks call this."""
    layers = list(model.modules()) if hasattr(model, "modules") else []
    exchange(transport, {f"{name}.{key}": (0, array) for name, layer in layers for key, array in layer.buffers.items()})


def tell_on_rank_0(trainer: Any, event: str, tell: Callable[[], None]) -> None:
    """Tell callbacks of an event, on rank 0, and give all ranks what these have changed.

    Of parameters, of the optimizer's options, and of random generators, from which a callback may draw.

    Where a callback sees the model at the event, all ranks call this together.
    """
    transport = trainer.transport
    if transport is None or transport.size == 1 or event == "close" or not trainer._sees(event):
        tell()
        return
    parameters = trainer.model.parameters()
    generators = generators_of(trainer.model)
    before = (checksums(parameters), options_of(trainer.optimizer)) if transport.rank == 0 else ({}, [])
    tell()
    changed: tuple[list[str], Any, dict[str, Any]] = [], None, {}
    if transport.rank == 0:
        now, options = checksums(parameters), options_of(trainer.optimizer)
        names = [name for name, fact in zip(parameters, now, strict=True) if before[0][fact] != now[fact]]
        states = {name: generator.bit_generator.state for name, generator in generators.items()}
        changed = names, None if options == before[1] else options, states
    names, options, states = transport.broadcast(changed)
    for name, state in states.items():
        generators[name].bit_generator.state = state
    exchange(transport, {name: (0, parameters[name]) for name in names})
    if options is not None:
        for group, values in zip(getattr(trainer.optimizer, "param_groups", ()), options, strict=False):
            group.update(values)
        if not hasattr(trainer.optimizer, "param_groups"):
            trainer.optimizer.lr = options[0]["lr"]


def seconds_of_rank_0(transport: Transport, history: History, steps: int) -> None:
    """Give all ranks the seconds of rank 0's last `steps` steps; all ranks call this."""
    history.seconds[-steps:] = transport.broadcast(history.seconds[-steps:])
