"""A training on several ranks: the executor that a schedule asks for, and the check that all ranks do the same."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import OptionError
from sparsebp.distributed.data_parallel import ReplicaExecutor
from sparsebp.distributed.data_parallel_search import ReverseFirstKExecutor
from sparsebp.distributed.pipeline import PipelineExecutor
from sparsebp.distributed.transport import Transport
from sparsebp.distributed.whole import exchange
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.stages import Stages
from sparsebp.runtime.step import Watch
from sparsebp.schedule import Schedule
from sparsebp.train.callbacks import Callback
from sparsebp.train.training import FIRST_K, Training, schedule_of


def executor_of(
    trainer: Training, stages: Stages, watch: Watch, found: Schedule | None = None
) -> Executor | PipelineExecutor | ReverseFirstKExecutor:
    """Return what runs the steps of a trainer: on one device, or on the ranks of its transport.

    By the schedule that was `found` before, or that the trainer's options ask for.
    """
    parts, transport = (trainer.model, trainer.loss, trainer.optimizer), trainer.transport
    clips: dict[str, Any] = {"clip_norm": trainer.clip_norm, "watch": watch}
    if transport is not None and trainer.schedule == FIRST_K:
        return ReverseFirstKExecutor(*parts, transport, **clips, sharded=trainer.sharded)
    ranks = 1 if transport is None else transport.size
    schedule = found or schedule_of(stages, trainer.fusion, trainer.accumulate, trainer.schedule, ranks)
    graph = schedule.graph
    if transport is None or (transport.size == 1 and graph.updates == "step" and not graph.synchronised):
        return Executor(*parts, schedule, **clips, graph=trainer.graph)
    if graph.synchronised:
        return ReplicaExecutor(*parts, schedule, transport, **clips, sharded=trainer.sharded)
    return PipelineExecutor(*parts, schedule, transport, **clips, predictor=trainer.predictor, note=trainer.note)


def buffers_of_rank_0(transport: Transport, model: Any) -> None:
    """Give all replicas the running statistics of rank 0, which are those that count; all ranks call this."""
    layers = model.modules() if hasattr(model, "modules") else []
    exchange(transport, {f"{name}.{key}": (0, array) for name, layer in layers for key, array in layer.buffers.items()})


@contextlib.contextmanager
def telling(transport: Transport | None) -> Iterator[None]:
    """Tell the other ranks of an error inside the ``with`` block, so that they do not wait for this one."""
    try:
        yield
    except BaseException as error:
        if transport is not None:
            transport.abort(error)
        raise


def agree(trainer: Training, facts: Mapping[str, Any]) -> None:
    """Make sure that all ranks are about to train the same thing, and agree on what only rank 0 knows.

    Raises
    ------
    OptionError
        They are not; see `check_same`.
    """
    transport: Any = trainer.transport
    if not trainer._seed_given:
        trainer.seed = transport.broadcast(trainer.seed)
    events = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    trainer._seen = None
    trainer._seen = frozenset(transport.broadcast([event for event in events if trainer._sees(event)]))
    parameters = trainer.model.parameters()
    facts = dict(facts) | {
        "rng": trainer.seed, "accumulate": trainer.accumulate, "sharded": trainer.sharded,
        "clip_norm": trainer.clip_norm, "config": trainer.config,
        "checkpoint_dir": "none" if trainer.checkpoint_dir is None else "a folder",
        "checkpoint_every": trainer.checkpoint_every, "the model": type(trainer.model).__name__,
        "the optimizer": type(trainer.optimizer).__name__, "the names of parameters": list(parameters),
    }  # fmt: skip
    check_same(transport, facts | checksums(parameters))


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


def checksums(arrays: Mapping[str, Any]) -> dict[str, str]:
    """Return shape, dtype and a checksum of every array, by "the parameter" and its name."""
    found = {}
    for name, array in arrays.items():
        values = np.ascontiguousarray(backend.to_host(array))
        code = zlib.crc32(values.view(np.uint8).reshape(-1).data) if values.size else 0
        found[f"the parameter {name}"] = f"{values.dtype} {values.shape}, checksum {code:08x}"
    return found
