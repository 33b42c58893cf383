"""Ranks that train together: they compare what they are given, follow rank 0, and end together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.comm.transport import Transport
from sparsebp.core.errors import OptionError
from sparsebp.runtime.actions import buffers_of, trained_parameters
from sparsebp.runtime.agreement import check_same, checksums, collective_call, exchange, names_of_groups, options_of
from sparsebp.schedule import Schedule
from sparsebp.schedule.files import to_csv
from sparsebp.train.by_stage import Holders, deliver
from sparsebp.train.callbacks import Callback
from sparsebp.train.identity import options_given, samples_of, weights_of
from sparsebp.train.state import TrainingState, generators_of

# What the other ranks take over from rank 0.


def notify_on_rank_0(run: TrainingState, event: str, tell: Callable[[], None], holders: Holders | None = None) -> None:
    """Tell the callbacks of rank 0 of an event, and give all ranks their changes.

    Where ranks hold different parameters, `holders` says which, and rank 0 has all for now.

    Callbacks may change parameters, running statistics and the optimizer's options, and draw from random generators.
    All ranks call this together where a callback looks at the model.
    """
    transport = run.transport
    if transport is None or transport.size == 1 or event == "close" or not run.sees(event):
        tell()
        return
    arrays = run.model.parameters() | buffers_of(run.model)
    generators = generators_of(run.model)
    # Checksums tell what a callback has changed: most change nothing, and then nothing is sent, also at every step.
    before = (checksums(arrays), options_of(run.optimizer)) if transport.rank == 0 else ({}, [])
    given = _options_of_rank(run) if transport.rank == 0 else {}
    held = names_of_groups(run.optimizer)
    tell()
    if names_of_groups(run.optimizer) != held:
        raise OptionError("A callback has added parameters to the optimizer of one of several ranks", expected="the "
                          "same groups on all", got=f"another group on rank {transport.rank}",
                          remedy="Call add_param_group on every rank, before fit")  # fmt: skip
    changed: tuple[list[str], Any, dict[str, Any]] = [], None, {}
    if transport.rank == 0:
        others = [name for name, option in _options_of_rank(run).items() if option != given.get(name)]
        if others:
            raise OptionError("A callback has changed options on one of several ranks", expected="changes of "
                              "parameters, statistics or the optimizer's options", got=f"of {', '.join(others)}",
                              remedy="Set them on every rank, between two calls of fit")  # fmt: skip
        arrays = run.model.parameters() | buffers_of(run.model)  # statistics may be other arrays now
        now, options = checksums(arrays), options_of(run.optimizer)
        names = [name for name, fact in zip(arrays, now, strict=True) if before[0][fact] != now[fact]]
        states = {name: generator.bit_generator.state for name, generator in generators.items()}
        changed = names, None if options == before[1] else options, states
    names, options, states = transport.broadcast(changed)
    for name, state in states.items():
        generators[name].bit_generator.state = state
    everywhere = [name for name in names if holders is None or name not in run.model.parameters()]
    exchange(transport, {name: (0, arrays[name]) for name in everywhere})
    if holders is not None:
        deliver(run, holders, [name for name in names if name not in everywhere])
    if options is not None:
        for group, values in zip(getattr(run.optimizer, "param_groups", ()), options, strict=False):
            group.update(values)
        if not hasattr(run.optimizer, "param_groups"):
            run.optimizer.lr = options[0]["lr"]


def _options_of_rank(run: TrainingState) -> dict[str, Any]:
    """Return the options and modes that callbacks cannot change on one of several ranks."""
    modules = dict(run.model.modules()) if hasattr(run.model, "modules") else {}
    options = options_given(run) | {f"the mode of {name or 'the model'}": m.training for name, m in modules.items()}
    del options["groups"]  # the optimizer's, which all ranks get
    return options


@contextlib.contextmanager
def aborting_others(transport: Transport | None) -> Iterator[None]:
    """Abort the other ranks at an error, unless all ranks raise it: they can then go on with the same transport."""
    try:
        yield
    except BaseException as error:
        if transport is not None and not getattr(error, "raised_on_all_ranks", False):
            transport.abort(error)
        raise


def agree(run: TrainingState, facts: Mapping[str, Any], dataset: Any, validation: Any = None) -> None:
    """Check that all ranks are about to train the same thing, and agree on the seed and on rank 0's callbacks.

    Samples are compared for data sets of `sparsebp.data` only: asking another one for a batch may have effects, and
    its batches may be random. Ranks of a pipeline compare them again in every step.
    """
    transport: Any = run.transport
    own = collective_call(transport, lambda: _facts(run, dataset, validation))
    seeds = transport.share(run.seed if run.seed_given else None)
    if not any(seed is not None for seed in seeds):
        run.seed = transport.broadcast(run.seed)
        seeds = []
    events = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    run.seen_on_rank_0 = None
    run.seen_on_rank_0 = frozenset(transport.broadcast([event for event in events if run.sees(event)]))
    rng = None if not seeds else run.seed if run.seed_given else None
    check_same(transport, {**facts, "rng": rng, **own})


def _facts(run: TrainingState, dataset: Any, validation: Any) -> dict[str, Any]:
    """Return the values that all ranks must share, by their names in messages."""
    parameters, optimizer = run.model.parameters(), run.optimizer
    facts = {
        "accumulate": run.accumulate, "sharded": run.sharded,
        "replicas": 1 if run.replica_ranks is None else run.replica_ranks.size, "fusion": run.fusion,
        "clip_norm": run.clip_norm, "config": run.config, "the schedule": _order_of(run.schedule),
        "checkpoint_dir": "none" if run.checkpoint_dir is None else "a folder",
        "checkpoint_every": run.checkpoint_every, "the model": type(run.model).__name__,
        "the loss": _described(run.loss), "the predictor": _described(run.predictor),
        "the optimizer": type(optimizer).__name__, "the optimizer's options": options_of(optimizer),
        "the parameters of the optimizer's groups": names_of_groups(optimizer),
        "the optimizer's numbers of updates": dict(getattr(optimizer, "steps", {})),
        "the learning-rate schedule": _rates_of(run.lr_scheduler),
        "the names of parameters": list(parameters),
        "the trained parameters": list(trained_parameters(run.model, optimizer)),
    }  # fmt: skip
    layers = dict(run.model.modules()) if hasattr(run.model, "modules") else {}
    facts |= {f"the layer {name or 'that is the model'}": _described(layer) for name, layer in layers.items()}
    buffers = buffers_of(run.model)
    if run.apart:
        parameters = {}
    elif not run.sharded:
        kept = getattr(optimizer, "buffers", {})
        state = {f"{kind} of {name}": array for kind, arrays in kept.items() for name, array in arrays.items()}
        facts |= checksums(state, "the optimizer's")
    for name, some in (("the data set's", dataset), ("the validation set's", validation)):
        facts |= checksums(samples_of(some), name)
    return facts | checksums(weights_of(run.loss), "the loss's") | checksums(parameters | buffers)


def _rates_of(scheduler: Any) -> Any:
    """Describe a learning-rate schedule. A user's functions are compared step by step, by their rates."""
    if scheduler is None:
        return None
    own = vars(scheduler) if hasattr(scheduler, "__dict__") else {}
    lists = {
        name: value for name, value in own.items()
        if isinstance(value, list) and all(isinstance(number, int | float) for number in value)
    }  # fmt: skip
    inner = [_rates_of(one) for one in getattr(scheduler, "schedulers", ())]
    return _described(scheduler), lists, scheduler.state_dict(), inner


def _order_of(schedule: Any) -> str:
    """Return a schedule as text: its name or its CSV."""
    if isinstance(schedule, Schedule):
        return to_csv(schedule)
    path = Path(schedule)
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else str(schedule)


def _described(thing: Any) -> str:
    """Return the class of a layer, loss or predictor, with its plain options."""
    plain = (bool, int, float, str, tuple, type(None), np.dtype)
    options = {
        name: value for name, value in vars(thing).items()
        if isinstance(value, plain) and not name.startswith("_") and name != "device"
    } if hasattr(thing, "__dict__") else {}  # fmt: skip
    return f"{type(thing).__name__}({', '.join(f'{name}={value!r}' for name, value in sorted(options.items()))})"
