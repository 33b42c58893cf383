"""A pipeline whose ranks hold their own stages alone: checkpoints, evaluation and whole models, stage by stage."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.comm.transport import DTYPES, Transport, host_of
from sparsebp.core import backend
from sparsebp.core.absent import Absent, is_absent
from sparsebp.core.check import Array
from sparsebp.nn.deferred import fill
from sparsebp.nn.layer import dotted
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.agreement import TAG, exchange
from sparsebp.train.checkpoint import Checkpoint, file_order, live_state, pack, save_checkpoint
from sparsebp.train.grouping import layers_in_order, renamed_tensor, renaming
from sparsebp.train.state import TrainingState


class Holders:
    """Which ranks hold each parameter of a model, and with it the optimizer's state of it."""

    def __init__(self, stages: Stages, ranks: Sequence[Sequence[int]]) -> None:
        # ranks: Of every stage.
        first = stages.model.shared_names()
        self._of: dict[str, set[int]] = {}
        for number, stage in enumerate(stages.all):
            for prefix, layer in stage.layer.modules(stage.name):
                for key in layer.params:
                    self._of.setdefault(first[dotted(prefix, key)], set()).update(ranks[number])
        self._first = first

    def of(self, name: str) -> list[int]:
        """Return the ranks that hold a parameter, by any of its names, or the optimizer's state of one."""
        return sorted(self._of[self._first[name]])

    def entries(self, run: TrainingState, *, optimizer: bool = True) -> dict[str, tuple[int, Array]]:
        """Return what rank 0 lacks of model and optimizer, by its name in a checkpoint: its sender, and the array."""
        arrays = {f"model.{name}": (name, array) for name, array in live_state(run.model).items()}
        for kind, buffers in run.optimizer.buffers.items() if optimizer else ():
            arrays |= {f"optimizer.{kind}.{name}": (name, array) for name, array in buffers.items()}
        found = {}
        for entry, (name, array) in arrays.items():
            if name in self._first and (ranks := self.of(name))[0] != 0:
                found[entry] = ranks[0], array
        return found


def save_by_stage(run: TrainingState, holders: Holders, path: Path) -> None:
    """Write a checkpoint on rank 0, which receives what it lacks, array by array; all ranks call it."""
    if not run.in_first_pipeline:
        return
    transport, lacking = host_of(run.pipeline_ranks), holders.entries(run)  # type: ignore[arg-type]
    if run.leads:
        save_checkpoint(path, pack(run), lambda name: _received(transport, lacking[name][1], lacking[name][0]))
        return
    arrays = {name: array for name, (_, array) in lacking.items()}
    for name in file_order(arrays):
        if lacking[name][0] == transport.rank:
            _send(transport, arrays[name], [0])


def gathered(run: TrainingState, holders: Holders, lacking: Mapping[str, tuple[int, Array]]) -> dict[str, np.ndarray]:
    """Return on rank 0 what it lacks, by its name in a checkpoint; all ranks call it."""
    transport, found = host_of(run.pipeline_ranks), {}  # type: ignore[arg-type]
    for name, (owner, array) in lacking.items() if run.in_first_pipeline else ():
        if transport.rank == owner:
            _send(transport, array, [0])
        elif transport.rank == 0:
            found[name] = _received(transport, array, owner)
    return found


def _send(transport: Transport, array: Array, ranks: Sequence[int]) -> None:
    if array.size:
        carried = np.ascontiguousarray(backend.to_host(array))
        for handle in [transport.isend(carried, rank, TAG) for rank in ranks]:
            handle.wait()


def _received(transport: Transport, like: Array, owner: int) -> np.ndarray:
    out = np.empty(like.shape, like.dtype)
    if out.size:
        transport.irecv(out, owner, TAG).wait()
    return out


@contextlib.contextmanager
def whole_on_rank_0(run: TrainingState, holders: Holders | None) -> Iterator[None]:
    """Let rank 0 hold the whole model and the optimizer's state for a while; all ranks call it."""
    if holders is None or not run.in_first_pipeline:
        yield
        return
    lacking, optimizer = holders.entries(run), run.optimizer
    found = gathered(run, holders, lacking)
    if not found:
        yield
        return
    params = run.model.parameters().items()
    received = [(array, found[f"model.{name}"]) for name, array in params if f"model.{name}" in found]
    before = {kind: dict(buffers) for kind, buffers in optimizer.buffers.items()}
    now = {kind: {name: found.get(f"optimizer.{kind}.{name}", array) for name, array in buffers.items()}
           for kind, buffers in before.items()}  # fmt: skip
    _put(run, {id(stand_in): array for stand_in, array in received}, now)
    try:
        yield
    finally:
        _put(run, {id(array): stand_in for stand_in, array in received}, before)


def _put(run: TrainingState, arrays: Mapping[int, Array], buffers: Mapping[str, Mapping[str, Array]]) -> None:
    fill(run.model, arrays)
    run.model.parameters()  # given out to the optimizer
    run.optimizer._fill(arrays, buffers)


def deliver(run: TrainingState, holders: Holders, names: Sequence[str]) -> None:
    """Send parameters that have changed on rank 0 to the ranks that hold them; all ranks call it."""
    transport, params = host_of(run.pipeline_ranks), run.model.parameters()  # type: ignore[arg-type]
    for name in names if run.in_first_pipeline else ():
        ranks = [rank for rank in holders.of(name) if rank != 0]
        if run.leads:
            _send(transport, params[name], ranks)
        elif transport.rank in ranks:
            xp = backend.namespace(params[name])
            params[name][...] = backend.as_namespace(_received(transport, params[name], 0), xp)
    if run.replica_ranks is not None:
        rank = transport.rank
        exchange(run.replica_ranks, {name: (0, params[name]) for name in names if rank in holders.of(name)})


def receive_checkpoint(run: TrainingState, file: Checkpoint | None) -> Checkpoint | None:
    """Return rank 0's checkpoint, `file`, on every rank: of model and optimizer what the rank holds, else stand-ins."""
    transport: Any = run.transport
    if transport is None:
        return None if file is None else Checkpoint(dict(file.tensors), file.state)
    told = None
    if file is not None:
        few, forms = {}, {}
        for name, (dtype, shape) in file.tensors.forms.items():  # type: ignore[attr-defined]
            if name.startswith(("model.", "optimizer.")) and dtype.kind == "f" and dtype in DTYPES:
                forms[name] = shape, dtype.str
            else:
                few[name] = file.tensors[name]
        told = forms, few, file.state
    told = transport.broadcast(told)
    if told is None:
        return None
    shapes, tensors, state = told
    layers = layers_in_order(run.model)
    rename = renaming(state, layers) or (lambda name: name)
    now = {f"model.{name}": array for name, array in live_state(run.model).items()}
    now |= {f"optimizer.{name}": array for name, array in live_state(run.optimizer).items()}
    wanted = [name for name in shapes if not is_absent(now.get(renamed_tensor(name, rename)))]
    everyone = list(map(set, transport.share(wanted)))
    host = host_of(transport)
    for name, (shape, dtype) in shapes.items():
        wanting = [rank for rank, names in enumerate(everyone) if name in names]
        like = Absent.like(np.broadcast_to(np.zeros((), dtype), shape))
        if run.leads and file is not None and wanting:
            array = file.tensors[name]
            _send(host, array, [rank for rank in wanting if rank != 0])
            tensors[name] = array if 0 in wanting else like
        else:
            tensors[name] = _received(host, like, 0) if transport.rank in wanting else like
    return Checkpoint(tensors, state)
