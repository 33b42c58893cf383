"""Checkpoints: the file, and the state of a training into it and back.

A checkpoint is a safetensors file with arrays and a JSON state. The bytes go to a temporary file in the same folder,
are flushed to disk, and replace the last checkpoint by a rename: whenever the process dies, the folder holds one whole
checkpoint. Any safetensors reader can open it: weights are the tensors ``model.*``, the state is JSON in the header's
metadata.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, OptionError, SparseBPError
from sparsebp.core.files import check_path, parse_json, read_file, write_atomically
from sparsebp.nn.linear import MASK
from sparsebp.optim import Optimizer
from sparsebp.optim.lr_schedules import with_parts
from sparsebp.optim.state import groups_added
from sparsebp.runtime.actions import buffers_of
from sparsebp.train.batches import steps_of
from sparsebp.train.history import History
from sparsebp.train.state import FILE_NAME, TrainingState, generators_of

FORMAT = "sparsebp-checkpoint"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and a state that JSON can hold. Floats in the state survive exactly."""

    tensors: Mapping[str, np.ndarray]
    state: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Checkpoint({len(self.tensors)} arrays: {', '.join(sorted(self.tensors))})"

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names start with ``prefix.``, without it."""
        return _part(self.tensors, prefix)


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    start = prefix + "."
    return {name[len(start) :]: array for name, array in tensors.items() if name.startswith(start)}


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `path`, replacing what is there in one atomic step.

    Raises
    ------
    OptionError
        A name or an array is one that safetensors cannot hold, or the state one that JSON cannot.
    OutputError
        The folder does not exist or cannot be written; what was at `path` before is untouched.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save

    state = json_text("The state of a checkpoint", checkpoint.state)
    try:
        tensors = {name: _native(array) for name, array in checkpoint.tensors.items()}
        if "__metadata__" in tensors:  # what the format calls its header
            raise ValueError("an array of the name __metadata__")
        metadata = {"format": FORMAT, "version": str(VERSION), "state": state, "digest": _digest(tensors, state)}
        content = save(tensors, metadata)
    except (SafetensorError, TypeError, ValueError) as error:
        raise OptionError("A checkpoint cannot hold these arrays", expected="real or boolean arrays by name",
                          got=str(error)) from error  # fmt: skip
    write_atomically(path, content)


def json_text(name: str, value: Mapping[str, Any], *, finite: bool = False) -> str:
    """Return `value` as JSON; arrays become lists. NaN and infinities are written as in Python, unless `finite`."""
    try:
        _check_keys(value)
        return json.dumps(value, default=_listed, allow_nan=not finite)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{name} cannot be kept as JSON", expected="texts, numbers, booleans, lists and dicts",
                          got=str(error)) from error  # fmt: skip


def _check_keys(value: Any) -> None:
    """Refuse a dict that JSON would give back with other keys."""
    if isinstance(value, Mapping):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise TypeError(f"the key {shown(odd[0])}, which would come back as a text")
    if isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            _check_keys(inner)


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint at `path`, a file or the folder of a run.

    Raises
    ------
    FileFormatError
        There is no such file, it is a FIFO or a device, it is not a safetensors file, it was written by something else
        or a newer version, or its content does not match its digest.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = check_path("path", path)
    path = path / FILE_NAME if os.path.isdir(path) else path
    content = read_file(
        path, f"No checkpoint can be read at {path}", expected="a checkpoint file", regular=True,
        remedy="Give a checkpoint, or the folder that an earlier run wrote to",
    )  # fmt: skip
    try:
        tensors = load(content)
        header_bytes = int.from_bytes(content[:8], "little")
        metadata = parse_json(content[8 : 8 + header_bytes]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError) as error:  # KeyError: a dtype that NumPy does not have
        raise FileFormatError(f"{path} is damaged or no checkpoint at all", expected="a safetensors file",
                              got=f"{len(content)} bytes that do not read as one ({error})",
                              remedy="Take another copy, or start anew") from error  # fmt: skip
    if metadata.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} was not written by sparsebp's trainer", expected=f"format {FORMAT!r} in the header",
            got=shown(metadata.get("format")),
            remedy="Weights alone are loaded with model.load_state_dict(safetensors.numpy.load_file(path))",
        )  # fmt: skip
    if metadata.get("version") != str(VERSION):
        raise FileFormatError(f"{path} has a version that this sparsebp does not read", expected=repr(str(VERSION)),
                              got=shown(metadata.get("version")),
                              remedy="Use the version of sparsebp that wrote it")  # fmt: skip
    text = metadata.get("state", "")
    if metadata.get("digest") != _digest(tensors, text):
        raise FileFormatError(f"{path} is damaged", expected=f"content of digest {metadata.get('digest')}",
                              got=_digest(tensors, text), remedy="Take another copy, or start anew")  # fmt: skip
    try:
        state = parse_json(text)
    except ValueError as error:
        state = error
    if not isinstance(state, dict):
        raise FileFormatError(f"{path} has no state of a run", expected="a JSON object", got=shown(state),
                              remedy="Take another copy, or start anew")  # fmt: skip
    return Checkpoint(tensors, state)


def _native(array: Any) -> np.ndarray:
    """Return an array in C order and native byte order: safetensors keeps neither."""
    array = np.asarray(array, order="C")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _digest(tensors: Mapping[str, np.ndarray], state: str) -> str:
    digest = hashlib.blake2b(state.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype.str} {tensors[name].shape}\n".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run as a checkpoint gives it back."""
    if not isinstance(config, Mapping):
        raise OptionError("config is not a mapping", expected="a dict", got=type(config).__name__)
    described: dict[str, Any] = json.loads(json_text("config", dict(config), finite=True))
    return described


# The state of a trainer, into a checkpoint and back after checking that it fits.


def pack(run: TrainingState) -> Checkpoint:
    """Return the checkpoint of `run` at its position."""
    optimizer_arrays, optimizer_scalars = _split(run.optimizer.state_dict())
    tensors = {f"model.{name}": backend.to_host(array) for name, array in run.model.state_dict().items()}
    tensors |= {f"optimizer.{name}": array for name, array in optimizer_arrays.items()}
    tensors |= {f"history.{name}": array for name, array in run.history.to_arrays().items()}
    tensors |= {f"data.{name}": array for name, array in run.fingerprints.items()}
    state: dict[str, Any] = {
        "seed": run.seed, "position": dict(run.position), "config": run.config, "asynchronous": run.asynchronous,
        "options": run.options_given, "earlier_steps": run.history.earlier_steps,
        "optimizer": optimizer_scalars,
        "lr_scheduler": None if run.lr_scheduler is None else run.lr_scheduler.state_dict(),
        "generators": {name: g.bit_generator.state for name, g in generators_of(run.model).items()},
        "epochs": [record.to_json() for record in run.history.epochs],
    }  # fmt: skip
    if run.predictor is not None:
        arrays, state["predictor"] = _split(run.predictor.state_dict())
        tensors |= {f"predictor.{name}": array for name, array in arrays.items()}
    state["callbacks"] = {}
    for kind, (_, own) in _callbacks_with_state(run).items():
        arrays, state["callbacks"][kind] = _split(own)
        tensors |= {f"callbacks.{kind}.{name}": array for name, array in arrays.items()}
    for number, carried in enumerate(run.carried or () if run.position["batch"] else ()):  # an epoch begins with none
        tensors |= {f"carried.{number}.{name}": array for name, array in carried.state_dict().items()}
    return Checkpoint(tensors, state)


def _callbacks_with_state(run: TrainingState) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return callbacks and their states by their class, with a number from the second of a class on."""
    found: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for callback in run.callbacks if run.leads else ():
        if state := callback.state_dict():
            kind = type(callback).__name__
            number = sum(type(other) is type(callback) for other, _ in found.values())
            found[f"{kind}{number + 1}" if number else kind] = callback, state
    return found


def restore(run: TrainingState, checkpoint: Checkpoint, shape: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Check that `checkpoint` belongs to this run, load it into `run`, and return the next (epoch, batch)."""
    history = _checked_history(path, checkpoint)
    state = checkpoint.state
    position = state["position"]
    _check_order(path, state, run.asynchronous)
    saved, now = state["config"], run.config
    # The most telling difference comes first: the task, the model, then options that both sides have.
    rank = {"task": 0, "model": 1}
    for name in sorted(saved | now, key=lambda name: (rank.get(name, 2), (name in saved) != (name in now), name)):
        _check_same(path, name, saved.get(name), now.get(name))
    for name, value in shape.items():
        _check_same(path, name, position.get(name, _OF_BATCHES.get(name)), value)
    if run.seed_given:
        _check_same(path, "the seed", state["seed"], run.seed)
    given, data = state.get("options", {}), checkpoint.part("data")  # not in checkpoints of version 0.2
    if given:
        then, now = (dict(some) for some in (given, run.options_given))
        groups = then.pop("groups", {}), now.pop("groups", {})
        _check_options(path, "", then, now)
        for name in sorted(groups[1].keys() & groups[0]):  # those that are added later are not known when a run begins
            whose = f"'s group of {name}" if len(groups[1]) > 1 else ""
            _check_options(path, f"the optimizer{whose}", groups[0][name], groups[1][name])
    for which in ("training", "validation"):
        _check_data(path, which, *(_part(numbers, which) for numbers in (data, run.fingerprints)))
    _check_same(path, "the learning-rate schedule", state["lr_scheduler"] is not None, run.lr_scheduler is not None)
    generators = generators_of(run.model)
    _check_same(path, "the layers that draw random numbers", sorted(state["generators"]), sorted(generators))
    weights = checkpoint.part("model")
    remedy = "Build the model with the options of the first call, or start anew in another folder"
    _check_weights(path, weights, run.model.state_dict(), remedy)
    optimizer_state = checkpoint.part("optimizer") | state["optimizer"]
    with _all_or_nothing(run):
        if isinstance(run.optimizer, Optimizer):
            with _loading(path):
                for group in groups_added(run.optimizer, optimizer_state, run.model.parameters()):
                    run.optimizer.add_param_group(group)
        kept, wanted = (
            sorted(name for name in some if not name.startswith(("group", "joined.")))  # load_state_dict compares those
            for some in (optimizer_state, run.optimizer.state_dict())
        )
        _check_same(path, "the optimizer's state", kept, wanted)
        _check_same(path, "the predictor", isinstance(state.get("predictor"), dict), run.predictor is not None)
        callbacks = _callbacks_with_state(run)
        if run.leads:
            _check_same(path, "the callbacks with a state", sorted(state.get("callbacks", {})), sorted(callbacks))
        with _loading(path):
            run.optimizer.load_state_dict(optimizer_state)
            if run.lr_scheduler is not None:
                run.lr_scheduler.load_state_dict(state["lr_scheduler"])
            if not 0 <= run.optimizer.lr < math.inf:
                raise ValueError(f"a learning rate of {run.optimizer.lr}")
            for name, generator in generators.items():
                generator.bit_generator.state = state["generators"][name]
            run.model.load_state_dict(weights)
            if run.predictor is not None:
                run.predictor.load_state_dict(checkpoint.part("predictor") | state["predictor"])
            for kind, (callback, _) in callbacks.items():
                callback.load_state_dict(checkpoint.part(f"callbacks.{kind}") | state["callbacks"][kind])
            for number, carried in enumerate(run.carried or ()):
                carried.load_state_dict(checkpoint.part(f"carried.{number}"))
    run.seed, run.history, run.fingerprints = state["seed"], history, data | run.fingerprints
    return position["epoch"], position["batch"]


def load_weights(model: Any, path: str | os.PathLike[str]) -> None:
    """Load weights, buffers and pruning masks of a checkpoint, or of a run's folder, into a model."""
    take_weights(model, load_checkpoint(path), Path(path))


def take_weights(model: Any, checkpoint: Checkpoint, path: Path) -> None:
    """Do as `load_weights`, given the checkpoint read from `path`."""
    weights = checkpoint.part("model")
    remedy = "Build the model with the arguments of the checkpoint's run"
    _check_weights(path, weights, model.state_dict(), remedy)
    with _loading(path):
        model.load_state_dict(weights)


_KINDS: dict[str, tuple[type, ...]] = {
    "seed": (int,), "position": (dict,), "config": (dict,), "optimizer": (dict,), "lr_scheduler": (dict, type(None)),
    "generators": (dict,), "epochs": (list,),
}  # fmt: skip


_OF_BATCHES = {"drop_last": False, "shuffle": True, "stateful": False}
"""Options of an epoch's batches, as they were before there were options."""


def _checked_history(path: Path, checkpoint: Checkpoint) -> History:
    """Check that a checkpoint's state has the form that `pack` gives it, and return its history."""
    state = checkpoint.state
    odd = [name for name, kinds in _KINDS.items() if type(state.get(name, ...)) not in kinds]
    if not odd:
        counts = [state["position"].get(name) for name in ("epoch", "batch", "batch_size", "samples")]
        counts[2:] = [1, 1] if counts[2:] == [None, None] else counts[2:]  # a loader's
        if any(type(count) is not int or count < least for count, least in zip(counts, (0, 0, 1, 1), strict=True)):
            odd = ["position"]
        if any(type(state["position"].get(name, usual)) is not bool for name, usual in _OF_BATCHES.items()):
            odd = ["position"]
    if not odd and state["seed"] < 0:
        odd = ["seed"]
    options = state.get("options", {})
    if type(options) is not dict or type(options.get("groups", {})) is not dict:
        odd.append("options")
    if type(state.get("earlier_steps", 0)) is not int or state.get("earlier_steps", 0) < 0:
        odd.append("earlier_steps")
    if odd:
        raise FileFormatError(f"The checkpoint {path} does not hold the state of a run: {', '.join(odd)}",
                              expected="what Trainer.fit writes",
                              got=", ".join(f"{name} = {shown(state.get(name))}" for name in odd),
                              remedy="Take another copy, or start anew")  # fmt: skip
    with _loading(path):
        history = History.from_arrays(checkpoint.part("history"), state["epochs"])
        epoch, batch = counts[:2]
        steps, before = steps_of(state["position"]), history.epochs[-1].step if history.epochs else 0
        before = before if steps is None else epoch * steps
        history.earlier_steps = state.get("earlier_steps", 0)
        if batch >= (steps or math.inf) or (history.steps, len(history.epochs)) != (before + batch, epoch):
            raise ValueError(f"{epoch=}, {batch=} after {history.steps} steps and {len(history.epochs)} epochs")
    return history


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Turn errors into a `FileFormatError` that names the file."""
    try:
        yield
    except (SparseBPError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise FileFormatError(f"The checkpoint {path} is damaged, or of something else",
                              expected="a state that model, optimizer, schedule and generators take",
                              got=f"{type(error).__name__}: {error}",
                              remedy="Take another copy, or start anew") from error  # fmt: skip


@contextlib.contextmanager
def _all_or_nothing(run: TrainingState) -> Iterator[None]:
    """Restore the training if loading fails half-way."""
    every: tuple[Any, ...] = (run.lr_scheduler, run.optimizer, run.predictor)  # rates, then their readers
    parts = [part for part in every if part is not None]
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    drawn = [(generator, generator.bit_generator.state) for generator in generators_of(run.model).values()]
    arrays = run.model.parameters() | buffers_of(run.model)
    weights = [(array, array.copy()) for array in arrays.values()]
    groups = len(getattr(run.optimizer, "param_groups", ()))
    schedules = [getattr(scheduler, "__dict__", {}) for scheduler in with_parts(run.lr_scheduler)]
    of_groups = [{name: list(value) for name, value in own.items() if isinstance(value, list)} for own in schedules]
    try:
        yield
    except BaseException:
        if isinstance(run.optimizer, Optimizer):
            run.optimizer._drop_groups(groups)
        for own, lists in zip(schedules, of_groups, strict=True):
            own.update(lists)
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
            remedy="Resume with the options of the first call, or start anew in another folder, from its weights "
            "(load_checkpoint(...).part(\"model\"), --weights) if need be"
        )  # fmt: skip


def _check_options(path: Path, name: str, saved: Any, now: Any) -> None:
    if not isinstance(saved, dict) or not isinstance(now, dict):
        _check_same(path, name, saved, now)
        return
    for key in saved | now:
        _check_options(path, f"{key} of {name}" if name else key, saved.get(key, "none"), now.get(key, "none"))


def _check_data(path: Path, which: str, saved: Mapping[str, np.ndarray], now: Mapping[str, np.ndarray]) -> None:
    """Refuse to resume on other data, where the fingerprints of both are known."""
    if not saved or not now:
        return
    other = sorted(saved.keys() ^ now.keys())
    for name in sorted(now.keys() - other):
        then, numbers = saved[name], now[name]
        if (then.shape, then.dtype) != (numbers.shape, numbers.dtype):
            other.append(name)
            continue
        with np.errstate(invalid="ignore"):
            close = abs(then[0] - numbers[0]) <= then[1]
        same = close | (then[0] == numbers[0]) | (np.isnan(then[0]) & np.isnan(numbers[0]))
        if not same.all():
            other.append(f"{name} in {int((~same).sum())} of {len(same)} samples that were compared")
    if other:
        raise FileFormatError(
            f"The checkpoint {path} is of a run on other data: the {which} set differs", expected="that of the first "
            "call", got=f"other {', '.join(other)}", remedy="Pass the same samples in the same order, or start anew in "
            "another folder, from its weights (load_checkpoint(...).part(\"model\"), --weights) if need be"
        )  # fmt: skip


def _check_order(path: Path, state: Mapping[str, Any], now: str | None) -> None:
    """Refuse another order of updates: other versions of the weights would be read."""
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
        expected, got = ("no such parameter" if entry is None else f"shape {entry[0]}, {entry[1]}"
                         for entry in (wanted.get(name), saved.get(name)))  # fmt: skip
        raise FileFormatError(f"The checkpoint {path} does not fit the model: parameter {name}", expected=expected,
                              got=got, remedy=remedy)  # fmt: skip
