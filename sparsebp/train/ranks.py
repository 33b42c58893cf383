"""A training on several ranks: the executor that a schedule asks for, and the check that all ranks do the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.errors import OptionError
from sparsebp.data import ArrayDataset, BitstreamDataset, Dataset, ImageDataset
from sparsebp.distributed.agreement import check_same, checksums, options_of, together
from sparsebp.distributed.data_parallel.executor import ReplicaExecutor
from sparsebp.distributed.data_parallel.search import ReverseFirstKExecutor
from sparsebp.distributed.pipeline.executor import PipelineExecutor
from sparsebp.distributed.transport import Transport
from sparsebp.patterns.copies import DeviceCopies
from sparsebp.runtime.executor import Executor
from sparsebp.runtime.stages import Stages, trained_parameters
from sparsebp.runtime.step import Watch
from sparsebp.schedule import Schedule
from sparsebp.schedule.files.action_csv import to_csv
from sparsebp.train.callbacks import Callback
from sparsebp.train.training import FIRST_K, Training, schedule_of

_COMPARED = 64
"""Samples of a data set that ranks compare."""
_PURE = (ArrayDataset.batch, BitstreamDataset.batch, ImageDataset.batch)
"""Functions of the indices alone."""


def executor_of(
    trainer: Training, stages: Stages, watch: Watch, found: Schedule | None = None
) -> Executor | PipelineExecutor | ReverseFirstKExecutor:
    """Return what runs the steps of a trainer: on one device, or on the ranks of its transport.

    By the schedule that was `found` before, or that the trainer's options ask for.
    """
    parts, transport = (trainer.model, trainer.loss, trainer.optimizer), trainer.transport
    clips: dict[str, Any] = {"clip_norm": trainer.clip_norm, "watch": watch}
    if transport is not None and trainer.schedule == FIRST_K:
        _check_heeded(trainer, replicas=True, asynchronous=False)
        return ReverseFirstKExecutor(*parts, transport, **clips, sharded=trainer.sharded)
    ranks = 1 if transport is None else transport.size
    schedule = found or schedule_of(stages, trainer.fusion, trainer.accumulate, trainer.schedule, ranks)
    graph = schedule.graph
    if transport is not None:
        _check_heeded(trainer, replicas=graph.synchronised, asynchronous=graph.updates == "microbatch")
    if transport is None or (transport.size == 1 and graph.updates == "step" and not graph.synchronised):
        return Executor(*parts, schedule, **clips, graph=trainer.graph)
    if graph.synchronised:
        return ReplicaExecutor(*parts, schedule, transport, **clips, sharded=trainer.sharded)
    return PipelineExecutor(*parts, schedule, transport, **clips, predictor=trainer.predictor, note=trainer.note)


def _check_heeded(trainer: Training, *, replicas: bool, asynchronous: bool) -> None:
    """Refuse options that a schedule of this kind would not heed.

    Raises
    ------
    OptionError
        The message says which.
    """
    for wrong, name, expected in (
        (trainer.sharded and not replicas, "sharded", "schedule='data-parallel' or 'reverse-first-k'"),
        (trainer.note is not None and not asynchronous, "note", "an asynchronous pipeline, as schedule='pipedream'"),
        (trainer.predictor is not None and not asynchronous, "predictor", "schedule='dualpipe-2018'"),
    ):
        if wrong:
            raise OptionError(f"{name} is for other schedules", expected=expected, got=f"schedule={trainer.schedule!r}",
                              remedy=f"Leave {name} out")  # fmt: skip


@contextlib.contextmanager
def telling(transport: Transport | None) -> Iterator[None]:
    """Tell the other ranks of an error inside the ``with`` block, so that they do not wait for this one.

    But not of one that all ranks raise alike: they can go on, on the same transport.
    """
    try:
        yield
    except BaseException as error:
        if transport is not None and not getattr(error, "alike", False):
            transport.abort(error)
        raise


def agree(trainer: Training, facts: Mapping[str, Any], dataset: Dataset, validation: Dataset | None = None) -> None:
    """Make sure that all ranks are about to train the same thing, and agree on what only rank 0 knows.

    Of a data set of `sparsebp.data` some samples are compared, of any other its length alone: to ask it for a batch may
    have effects, and what it gives may be drawn anew each time. Ranks of a pipeline also compare what it gives them in
    every step, which is the same for all; replicas have samples of their own, of which no other rank can tell.

    Raises
    ------
    OptionError
        They are not; see `check_same`.
    """
    transport: Any = trainer.transport
    own = together(transport, lambda: _facts(trainer, dataset, validation))
    seeds = transport.share(trainer.seed if trainer._seed_given else None)
    if not any(seed is not None for seed in seeds):
        trainer.seed = transport.broadcast(trainer.seed)
        seeds = []
    events = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    trainer._seen = None
    trainer._seen = frozenset(transport.broadcast([event for event in events if trainer._sees(event)]))
    rng = None if not seeds else trainer.seed if trainer._seed_given else None
    check_same(transport, {**facts, "rng": rng, **own})


def _facts(trainer: Training, dataset: Dataset, validation: Dataset | None) -> dict[str, Any]:
    """Return what is to be the same on all ranks, by what messages call it."""
    parameters, optimizer = trainer.model.parameters(), trainer.optimizer
    facts = {
        "accumulate": trainer.accumulate, "sharded": trainer.sharded, "fusion": trainer.fusion,
        "clip_norm": trainer.clip_norm, "config": trainer.config, "the schedule": _order_of(trainer.schedule),
        "checkpoint_dir": "none" if trainer.checkpoint_dir is None else "a folder",
        "checkpoint_every": trainer.checkpoint_every, "the model": type(trainer.model).__name__,
        "the loss": _described(trainer.loss), "the predictor": _described(trainer.predictor),
        "the optimizer": type(optimizer).__name__, "the optimizer's options": options_of(optimizer),
        "the optimizer's numbers of updates": dict(getattr(optimizer, "steps", {})),
        "the learning-rate schedule": _rates_of(trainer.lr_scheduler),
        "the names of parameters": list(parameters),
        "the trained parameters": list(trained_parameters(trainer.model, optimizer)),
    }  # fmt: skip
    layers = dict(trainer.model.modules()) if hasattr(trainer.model, "modules") else {}
    facts |= {f"the layer {name or 'that is the model'}": _described(layer) for name, layer in layers.items()}
    buffers = {f"{name}.{key}": array for name, layer in layers.items() for key, array in layer.buffers.items()}
    if not trainer.sharded:
        kept = getattr(optimizer, "buffers", {})
        state = {f"{kind} of {name}": array for kind, arrays in kept.items() for name, array in arrays.items()}
        facts |= checksums(state, "the optimizer's")
    for name, some in (("the data set's", dataset), ("the validation set's", validation)):
        facts |= checksums(_samples_of(some), name)
    return facts | checksums(_weights_of(trainer.loss), "the loss's") | checksums(parameters | buffers)


def _rates_of(scheduler: Any) -> Any:
    """Return what a learning-rate schedule says of itself; of functions of the user's own that is nothing.

    Those are compared step by step, by the rates that they make.
    """
    if scheduler is None:
        return None
    own = vars(scheduler) if hasattr(scheduler, "__dict__") else {}
    lists = {
        name: value for name, value in own.items()
        if isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    }  # fmt: skip
    inner = [_rates_of(one) for one in getattr(scheduler, "schedulers", ())]
    return _described(scheduler), lists, scheduler.state_dict(), inner


def _weights_of(loss: Any) -> dict[str, Any]:
    """Return the arrays that a loss weighs classes or elements by."""
    found: dict[str, Any] = {}
    for name, value in vars(loss).items() if hasattr(loss, "__dict__") else ():
        for key, part in value.items() if isinstance(value, dict) else ((name, value),):
            if isinstance(part, DeviceCopies):
                found |= {str(key).strip("_"): array for array in part.on(np)}
    return found


def _order_of(schedule: Any) -> str:
    """Return a schedule as text: a name, or all that it says."""
    if isinstance(schedule, Schedule):
        return to_csv(schedule)
    path = Path(schedule)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else str(schedule)


def _samples_of(dataset: Any) -> dict[str, Any]:
    """Return some samples of a data set of ours; to ask another one for a batch may have effects."""
    if not len(dataset or ()) or getattr(type(dataset), "batch", None) not in _PURE:
        return {}
    indices = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _COMPARED)).astype(np.int64))
    return {("inputs", "targets", "lengths")[at]: part for at, part in enumerate(dataset.batch(indices))}


def _described(thing: Any) -> str:
    """Return the class of a layer, a loss or a predictor, with those of its attributes that are plain options."""
    plain = (bool, int, float, str, tuple, type(None), np.dtype)
    options = {
        name: value for name, value in vars(thing).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "device"
    } if hasattr(thing, "__dict__") else {}  # fmt: skip
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))})"
