"""What a trainer puts into a checkpoint, and how it takes it back after checking that it fits."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, SparseBPError
from sparsebp.nn.pruning import MASK
from sparsebp.train.callbacks import History
from sparsebp.train.checkpoint import Checkpoint, generators_of, load_checkpoint
from sparsebp.train.ranks import Training


def pack(trainer: Training, position: Mapping[str, int]) -> Checkpoint:
    """Return the checkpoint of `trainer` at `position` (epoch, batch, batch_size, samples)."""
    optimizer_arrays, optimizer_scalars = _split(trainer.optimizer.state_dict())
    tensors = {f"model.{name}": backend.to_host(array) for name, array in trainer.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": array for name, array in optimizer_arrays.items()}
    tensors |= {f"history.{name}": array for name, array in trainer.history.to_arrays().items()}
    state = {
        "seed": trainer.seed,
        "position": dict(position),
        "config": trainer.config,
        "asynchronous": trainer._stale,
        "optimizer": optimizer_scalars,
        "lr_scheduler": None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict(),
        "generators": {name: g.bit_generator.state for name, g in generators_of(trainer.model).items()},
        "epochs": [record.to_json() for record in trainer.history.epochs],
    }
    if trainer.predictor is not None:
        arrays, state["predictor"] = _split(trainer.predictor.state_dict())
        tensors |= {f"predictor.{name}": array for name, array in arrays.items()}
    return Checkpoint(tensors, state)


def restore(trainer: Training, checkpoint: Checkpoint, shape: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Check that `checkpoint` belongs to this run, load it into `trainer`, and return the next (epoch, batch)."""
    history = _checked_history(path, checkpoint)
    state = checkpoint.state
    position = state["position"]
    _check_order(path, state, trainer._stale)
    saved, now = state["config"], trainer.config
    # Another task explains the rest, and another value of an option why one side lacks a name ("constant": epochs).
    for name in sorted(saved | now, key=lambda name: (name != "task", (name in saved) != (name in now), name)):
        _check_same(path, name, saved.get(name), now.get(name))
    for name, value in shape.items():
        _check_same(path, name, position[name], value)
    if trainer._seed_given:
        _check_same(path, "the seed", state["seed"], trainer.seed)
    _check_same(path, "the learning-rate schedule", state["lr_scheduler"] is not None, trainer.lr_scheduler is not None)
    generators = generators_of(trainer.model)
    _check_same(path, "the layers that draw random numbers", sorted(state["generators"]), sorted(generators))
    weights = checkpoint.part("model")
    _check_weights(
        path, weights, trainer.model.state_dict(),
        "Build the model with the options of the first call, or start anew in another folder",
    )  # fmt: skip
    optimizer_state = checkpoint.part("optimizer") | state["optimizer"]
    _check_same(path, "the optimizer's state", sorted(optimizer_state), sorted(trainer.optimizer.state_dict()))

    _check_same(path, "the predictor", isinstance(state.get("predictor"), dict), trainer.predictor is not None)

    with _loading(path), _all_or_nothing(trainer):
        trainer.optimizer.load_state_dict(optimizer_state)
        if trainer.lr_scheduler is not None:
            trainer.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if not 0 <= trainer.optimizer.lr < math.inf:
            raise ValueError(f"a learning rate of {trainer.optimizer.lr}")
        for name, generator in generators.items():
            generator.bit_generator.state = state["generators"][name]
        trainer.model.load_state_dict(weights)
        if trainer.predictor is not None:
            trainer.predictor.load_state_dict(checkpoint.part("predictor") | state["predictor"])
    trainer.seed, trainer.history = state["seed"], history
    return position["epoch"], position["batch"]


def load_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Load weights, buffers and pruning masks of the checkpoint `path` into `model`, and nothing else."""
    # model: A layer of the checkpoint's architecture and dtype.
    # path: A checkpoint of a training or of `prune_checkpoint`, or the folder of one.
    take_weights(model, load_checkpoint(path), Path(path))


def take_weights(model: Any, checkpoint: Checkpoint, path: Path) -> None:
    """Do what `load_weights` does with a checkpoint that has been read already."""
    weights = checkpoint.part("model")
    remedy = "Build the model with the arguments of the checkpoint's run"
    _check_weights(path, weights, model.state_dict(), remedy)
    with _loading(path):
        model.load_state_dict(weights)


_KINDS: dict[str, tuple[type, ...]] = {
    "seed": (int,), "position": (dict,), "config": (dict,), "optimizer": (dict,), "lr_scheduler": (dict, type(None)),
    "generators": (dict,), "epochs": (list,),
}  # fmt: skip


def _checked_history(path: Path, checkpoint: Checkpoint) -> History:
    """Return the history in a checkpoint, after checking that its state has the form that `pack` gives it."""
    state = checkpoint.state
    odd = [name for name, kinds in _KINDS.items() if type(state.get(name, ...)) not in kinds]
    if not odd:
        counts = [state["position"].get(name) for name in ("epoch", "batch", "batch_size", "samples")]
        if any(type(count) is not int or count < least for count, least in zip(counts, (0, 0, 1, 1), strict=True)):
            odd = ["position"]
    if not odd and state["seed"] < 0:
        odd = ["seed"]
    if odd:
        raise FileFormatError(f"The checkpoint {path} does not hold the state of a run: {', '.join(odd)}",
                              expected="what Trainer.fit writes",
                              got=", ".join(f"{name} = {shown(state.get(name))}" for name in odd),
                              remedy="Take another copy, or start anew")  # fmt: skip
    with _loading(path):
        history = History.from_arrays(checkpoint.part("history"), state["epochs"])
        epoch, batch, batch_size, samples = counts
        steps = -(-samples // batch_size)
        if batch >= steps or (history.steps, len(history.epochs)) != (epoch * steps + batch, epoch):
            raise ValueError(f"{epoch=}, {batch=} after {history.steps} steps and {len(history.epochs)} epochs")
    return history


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Say of which file it is that something cannot be loaded from it."""
    try:
        yield
    except (SparseBPError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise FileFormatError(f"The checkpoint {path} is damaged, or of something else",
                              expected="a state that model, optimizer, schedule and generators take",
                              got=f"{type(error).__name__}: {error}",
                              remedy="Take another copy, or start anew") from error  # fmt: skip


@contextlib.contextmanager
def _all_or_nothing(trainer: Training) -> Iterator[None]:
    """Put everything that a checkpoint is loaded into back as it was if that fails half-way."""
    every: tuple[Any, ...] = (trainer.lr_scheduler, trainer.optimizer, trainer.predictor)  # rates, then their readers
    parts = [part for part in every if part is not None]
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    drawn = [(generator, generator.bit_generator.state) for generator in generators_of(trainer.model).values()]
    weights = [(array, array.copy()) for array in trainer.model.parameters().values()]
    try:
        yield
    except BaseException:
        for array, values in weights:
            array[...] = values
        for generator, state in drawn:
            generator.bit_generator.state = state
        for part, saved in zip(parts, before, strict=True):
            part.load_state_dict(saved)
        raise


def _split(state: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Split a flat state into arrays (on the host) and scalars."""
    arrays: dict[str, np.ndarray] = {}
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if hasattr(value, "ndim") and not isinstance(value, np.generic):
            arrays[name] = backend.to_host(value)
        else:
            scalars[name] = value.item() if isinstance(value, np.generic) else value
    return arrays, scalars


def _check_same(path: Path, name: str, saved: Any, now: Any) -> None:
    if saved != now:
        raise FileFormatError(
            f"The checkpoint {path} is of another run: {name} differs", expected=f"{now}", got=f"{saved} in the file",
            remedy="Resume with the options of the first call, or start anew in another folder"
        )  # fmt: skip


def _check_order(path: Path, state: Mapping[str, Any], now: str | None) -> None:
    """Refuse to go on in another order of updates: the same weights would be read later, or earlier."""
    saved = state.get("asynchronous", now)  # older checkpoints do not say
    if saved == now:
        return
    one = "a schedule with one update a step"
    raise FileFormatError(f"The checkpoint {path} is of a run in which updates came in another order",
                          expected=now or one, got=f"{saved or one} in the file", remedy="Resume with "
                          f"{saved or 'another schedule'} (mpiexec -n, --schedule, --accumulate), or start anew in "
                          "another folder")  # fmt: skip


def _check_weights(path: Path, weights: Mapping[str, np.ndarray], current: Mapping[str, Any], remedy: str) -> None:
    wanted = {name: (array.shape, str(array.dtype)) for name, array in current.items()}
    saved = {
        name: (array.shape, str(array.dtype))
        for name, array in weights.items()
        if name in wanted or not name.endswith(MASK)  # a pruned checkpoint brings its masks along
    }
    if saved != wanted:
        name = next(n for n in sorted(saved.keys() | wanted.keys()) if saved.get(n) != wanted.get(n))
        raise FileFormatError(f"The checkpoint {path} does not fit the model: parameter {name}",
                              expected=_shape_text(wanted.get(name)), got=_shape_text(saved.get(name)),
                              remedy=remedy)  # fmt: skip


def _shape_text(entry: tuple[tuple[int, ...], str] | None) -> str:
    return "no such parameter" if entry is None else f"shape {entry[0]}, {entry[1]}"
