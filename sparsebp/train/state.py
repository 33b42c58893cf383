"""What a trainer puts into a checkpoint, and how it takes it back after checking that it fits."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparsebp import backend
from sparsebp.errors import FileFormatError
from sparsebp.nn.prunable import MASK
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint
from sparsebp.train.history import History

if TYPE_CHECKING:
    from sparsebp.train.trainer import Trainer


def pack(trainer: Trainer, position: Mapping[str, int]) -> Checkpoint:
    """Return the checkpoint of `trainer` at `position` (epoch, batch, batch_size, samples)."""
    optimizer_arrays, optimizer_scalars = _split(trainer.optimizer.state_dict())
    tensors = {f"model.{name}": backend.to_host(array) for name, array in trainer.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": array for name, array in optimizer_arrays.items()}
    tensors |= {f"history.{name}": array for name, array in trainer.history.to_arrays().items()}
    state = {
        "seed": trainer.seed,
        "position": dict(position),
        "config": trainer.config,
        "optimizer": optimizer_scalars,
        "lr_scheduler": None if trainer.lr_scheduler is None else trainer.lr_scheduler.state_dict(),
        "generators": {name: g.bit_generator.state for name, g in _generators(trainer.model)},
        "epochs": [record.to_json() for record in trainer.history.epochs],
    }
    return Checkpoint(tensors, state)


def restore(trainer: Trainer, checkpoint: Checkpoint, shape: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Check that `checkpoint` belongs to this run, load it into `trainer`, and return the next (epoch, batch).

    Raises
    ------
    FileFormatError
        Something differs; nothing has been changed then.
    """
    state = checkpoint.state
    position = state["position"]
    for name, value in shape.items():
        _check_same(path, name, position[name], value)
    for name in sorted(set(state["config"]) | set(trainer.config)):
        _check_same(path, name, state["config"].get(name), trainer.config.get(name))
    if trainer._seed_given:
        _check_same(path, "the seed", state["seed"], trainer.seed)
    _check_same(path, "the learning-rate schedule", state["lr_scheduler"] is not None, trainer.lr_scheduler is not None)
    generators = sorted(name for name, _ in _generators(trainer.model))
    _check_same(path, "the layers that draw random numbers", sorted(state["generators"]), generators)
    weights = checkpoint.part("model")
    _check_weights(
        path, weights, trainer.model.state_dict(),
        "Build the model with the options of the first call, or start anew in another folder",
    )  # fmt: skip
    optimizer_state = checkpoint.part("optimizer") | state["optimizer"]
    _check_same(path, "the optimizer's state", sorted(optimizer_state), sorted(trainer.optimizer.state_dict()))

    trainer.model.load_state_dict(weights)
    trainer.optimizer.load_state_dict(optimizer_state)
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.load_state_dict(state["lr_scheduler"])
    for name, generator in _generators(trainer.model):
        generator.bit_generator.state = state["generators"][name]
    trainer.seed = int(state["seed"])
    trainer.history = History.from_arrays(checkpoint.part("history"), state["epochs"])
    return int(position["epoch"]), int(position["batch"])


def load_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Load weights, buffers and pruning masks of the checkpoint `path` into `model`, and nothing else.

    Parameters
    ----------
    model
        A layer of the checkpoint's architecture and dtype.
    path
        A checkpoint of a training or of `prune_checkpoint`, or the folder of one.

    Raises
    ------
    FileFormatError
        It is no checkpoint, or of another architecture; nothing has been changed then.
    """
    weights = load_checkpoint(path).part("model")
    remedy = "Build the model with the arguments of the checkpoint's run"
    _check_weights(Path(path), weights, model.state_dict(), remedy)
    model.load_state_dict(weights)


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
            f"The checkpoint {path} is of another run: {name} differs",
            expected=f"{now}",
            got=f"{saved} in the file",
            remedy="Resume with the options of the first call, or start anew in another folder",
        )


def _check_weights(path: Path, weights: Mapping[str, np.ndarray], current: Mapping[str, Any], remedy: str) -> None:
    wanted = {name: (array.shape, str(array.dtype)) for name, array in current.items()}
    saved = {
        name: (array.shape, str(array.dtype))
        for name, array in weights.items()
        if name in wanted or not name.endswith(MASK)  # a pruned checkpoint brings its masks along
    }
    if saved != wanted:
        name = next(n for n in sorted(saved.keys() | wanted.keys()) if saved.get(n) != wanted.get(n))
        raise FileFormatError(
            f"The checkpoint {path} does not fit the model: parameter {name}",
            expected=_shape_text(wanted.get(name)),
            got=_shape_text(saved.get(name)),
            remedy=remedy,
        )


def _shape_text(entry: tuple[tuple[int, ...], str] | None) -> str:
    return "no such parameter" if entry is None else f"shape {entry[0]}, {entry[1]}"


def _generators(model: Any) -> Iterator[tuple[str, np.random.Generator]]:
    """Yield the random generators that layers draw from while training (dropout), by name."""
    generators = getattr(model, "generators", None)
    if generators is not None:
        yield from sorted(generators().items())
