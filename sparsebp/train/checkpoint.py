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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsebp.core import backend
from sparsebp.core.absent import held, is_absent
from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, OptionError, SparseBPError
from sparsebp.core.files import check_path, check_regular, parse_json, reason, write_atomically
from sparsebp.nn.linear import MASK
from sparsebp.optim import Optimizer
from sparsebp.optim import state as states
from sparsebp.optim.lr_schedules import with_parts
from sparsebp.optim.state import groups_added
from sparsebp.runtime.actions import buffers_of
from sparsebp.train.batches import steps_of
from sparsebp.train.grouping import layers_in_order, renamed_state, renamed_tensor, renaming, without_groups
from sparsebp.train.history import History
from sparsebp.train.state import FILE_NAME, TrainingState, generators_of

FORMAT = "sparsebp-checkpoint"
VERSION = 2


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


_DTYPES = {
    np.dtype(kind): name for name, kind in {
        "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "U64": "u8", "I32": "i4", "U32": "u4", "I16": "i2",
        "U16": "u2", "I8": "i1", "U8": "u1", "BOOL": "?",
    }.items()
}  # fmt: skip
_KINDS_OF = {name: dtype for dtype, name in _DTYPES.items()}


def save_checkpoint(
    path: str | os.PathLike[str], checkpoint: Checkpoint, fetch: Callable[[str], np.ndarray] | None = None
) -> None:
    """Write `checkpoint` to `path`, array by array, replacing what is there in one atomic step.

    Parameters
    ----------
    path
        The file.
    checkpoint
        The arrays and the state.
    fetch
        Returns an array of which `checkpoint` has only shape and dtype, as other ranks hold it; called in the order of
        `file_order`.

    Raises
    ------
    OptionError
        A name or an array is one that safetensors cannot hold, or the state one that JSON cannot.
    OutputError
        The folder does not exist or cannot be written; what was at `path` before is untouched.
    """
    state, tensors = json_text("The state of a checkpoint", checkpoint.state), checkpoint.tensors
    metadata = {"format": FORMAT, "version": str(VERSION), "state": state, "digest": "0" * 2 * _DIGEST_BYTES}
    try:
        odd = [name for name in tensors if not isinstance(name, str) or name == "__metadata__"]  # the header's own
        if odd:
            raise ValueError(f"an array of the name {odd[0]!r}")
        order, end = file_order(tensors), 0
        header: dict[str, Any] = {"__metadata__": metadata}
        for name in order:
            shape, dtype = np.shape(tensors[name]), _native_dtype(tensors[name])
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        _header_bytes(header)
    except (TypeError, ValueError, KeyError) as error:
        raise OptionError("A checkpoint cannot hold these arrays", expected="real or boolean arrays by name",
                          got=str(error)) from error  # fmt: skip

    def write(file: BinaryIO) -> None:
        file.write(_header_bytes(header))
        digests = {}
        for name in order:
            array = tensors[name]
            array = _native(fetch(name) if fetch is not None and is_absent(array) else array)
            digests[name] = _digest_of_array(name, array)
            file.write(array.reshape(-1).data)
        metadata["digest"] = _digest_of_all(digests, state)
        file.seek(0)
        file.write(_header_bytes(header))  # of the same length

    write_atomically(path, write)


def file_order(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Return the names of arrays in the order of their bytes in a file: large items first, so that all are aligned."""
    return sorted(tensors, key=lambda name: (-_native_dtype(tensors[name]).itemsize, name))


def _header_bytes(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


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
    with open_checkpoint(path) as checkpoint:
        return Checkpoint(dict(checkpoint.tensors), checkpoint.state)


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[Checkpoint]:
    """Do as `load_checkpoint`, but read each array anew whenever it is asked for: memory for one is enough."""
    path = check_path("path", path)
    path = path / FILE_NAME if os.path.isdir(path) else path
    with contextlib.ExitStack() as stack:
        try:
            check_regular(path, follow=True)
            file = stack.enter_context(open(path, "rb"))
            size = os.fstat(file.fileno()).st_size
        except (OSError, ValueError) as error:  # ValueError: a path with NUL
            raise FileFormatError(f"No checkpoint can be read at {path}", expected="a checkpoint file",
                                  got=reason(error),
                                  remedy="Give a checkpoint, or the folder that an earlier run wrote to"
                                  ) from error  # fmt: skip
        try:
            tensors, metadata = FileTensors(file, size), {}
            metadata = tensors.metadata
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise FileFormatError(f"{path} is damaged or no checkpoint at all", expected="a safetensors file",
                                  got=f"{size} bytes that do not read as one ({error})",
                                  remedy="Take another copy, or start anew") from error  # fmt: skip
        yield Checkpoint(tensors, _checked_state(path, tensors, metadata))


def _checked_state(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, Any]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} was not written by sparsebp's trainer", expected=f"format {FORMAT!r} in the header",
            got=shown(metadata.get("format")),
            remedy="Weights alone are loaded with model.load_state_dict(safetensors.numpy.load_file(path))",
        )  # fmt: skip
    if metadata.get("version") not in _DIGESTS:
        raise FileFormatError(f"{path} has a version that this sparsebp does not read",
                              expected=" or ".join(map(repr, _DIGESTS)), got=shown(metadata.get("version")),
                              remedy="Use the version of sparsebp that wrote it")  # fmt: skip
    text = metadata.get("state", "")
    found = _DIGESTS[metadata["version"]](tensors, text)
    if metadata.get("digest") != found:
        raise FileFormatError(f"{path} is damaged", expected=f"content of digest {metadata.get('digest')}",
                              got=found, remedy="Take another copy, or start anew")  # fmt: skip
    try:
        state = parse_json(text)
    except ValueError as error:
        state = error
    if not isinstance(state, dict):
        raise FileFormatError(f"{path} has no state of a run", expected="a JSON object", got=shown(state),
                              remedy="Take another copy, or start anew")  # fmt: skip
    return state


class FileTensors(Mapping[str, np.ndarray]):
    """The arrays of a safetensors file, each read when it is asked for."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._start = 8 + int.from_bytes(file.read(8), "little")
        if not 8 < self._start <= size:
            raise ValueError("no header")
        header = parse_json(file.read(self._start - 8))
        self.metadata: dict[str, Any] = header.pop("__metadata__", None) or {}
        self._entries: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
        end = 0
        for name, entry in sorted(header.items(), key=lambda one: one[1]["data_offsets"]):
            dtype, shape, (begin, stop) = _KINDS_OF[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*shape, begin, stop)) or begin != end:
                raise ValueError(f"odd sizes of {name}")
            end = begin + math.prod(shape) * dtype.itemsize
            if stop != end:
                raise ValueError(f"a wrong number of bytes of {name}")
            self._entries[name] = dtype, shape, begin
        if self._start + end != size:
            raise ValueError(f"{self._start + end} bytes expected")

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, begin = self._entries[name]
        array = np.empty(shape, dtype)
        self._file.seek(self._start + begin)
        self._file.readinto(array.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def forms(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape of every array."""
        return {name: (dtype, shape) for name, (dtype, shape, _) in self._entries.items()}


def _native_dtype(array: Any) -> np.dtype:
    return np.asarray(array).dtype.newbyteorder("=")


def _native(array: Any) -> np.ndarray:
    """Return an array in C order and native byte order: safetensors keeps neither."""
    array = np.asarray(array, order="C")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


_DIGEST_BYTES = 16


def _digest(tensors: Mapping[str, np.ndarray], state: str) -> str:
    """Return the digest of version 1."""
    digest = hashlib.blake2b(state.encode(), digest_size=_DIGEST_BYTES)
    for name in sorted(tensors):
        digest.update(_told(name, tensors[name]))
        digest.update(tensors[name].reshape(-1).data)
    return digest.hexdigest()


def _digest_of_all(digests: Mapping[str, bytes], state: str) -> str:
    digest = hashlib.blake2b(state.encode(), digest_size=_DIGEST_BYTES)
    for name in sorted(digests):
        digest.update(digests[name])
    return digest.hexdigest()


def _digest_of_array(name: str, array: np.ndarray) -> bytes:
    digest = hashlib.blake2b(_told(name, array))
    digest.update(array.reshape(-1).data)
    return digest.digest()


def _told(name: str, array: np.ndarray) -> bytes:
    return f"\n{name} {array.dtype.str} {array.shape}\n".encode()


_DIGESTS: dict[str, Callable[[Mapping[str, np.ndarray], str], str]] = {
    "1": _digest,
    "2": lambda tensors, state: _digest_of_all(
        {name: _digest_of_array(name, tensors[name]) for name in tensors}, state
    ),
}
"""How the digest is computed, by version. From version 2 on the arrays may come in any order."""


def checked_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run as a checkpoint gives it back."""
    if not isinstance(config, Mapping):
        raise OptionError("config is not a mapping", expected="a dict", got=type(config).__name__)
    described: dict[str, Any] = json.loads(json_text("config", dict(config), finite=True))
    return described


# The state of a trainer, into a checkpoint and back after checking that it fits.


def pack(run: TrainingState) -> Checkpoint:
    """Return the checkpoint of `run` at its position, to be written at once: it has the arrays themselves."""
    optimizer_arrays, optimizer_scalars = _split(live_state(run.optimizer))
    tensors = {f"model.{name}": backend.to_host(array) for name, array in live_state(run.model).items()}
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
        "layers": layers_in_order(run.model),
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


def in_groups_of(model: Any, checkpoint: Checkpoint, path: Path) -> tuple[Checkpoint, bool]:
    """Return a checkpoint with the names of a model whose layers may be in other groups, and whether they are."""
    state = checkpoint.state
    if any(not isinstance(state.get(name), dict) for name in ("optimizer", "generators")):
        return checkpoint, False  # refused by `restore`
    with _loading(path):
        rename = renaming(state, layers_in_order(model))
        if rename is None:
            return checkpoint, False
        names = {name: renamed_tensor(name, rename) for name in checkpoint.tensors}
        tensors = {new: checkpoint.tensors[name] for name, new in names.items()}
        return Checkpoint(tensors, renamed_state(state, rename)), True


def _callbacks_with_state(run: TrainingState) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return callbacks and their states by their class, with a number from the second of a class on."""
    found: dict[str, tuple[Any, Mapping[str, Any]]] = {}
    for callback in run.callbacks if run.leads else ():
        if state := callback.state_dict():
            kind = type(callback).__name__
            number = sum(type(other) is type(callback) for other, _ in found.values())
            found[f"{kind}{number + 1}" if number else kind] = callback, state
    return found


def live_state(part: Any) -> dict[str, Any]:
    """Return the state of a model or an optimizer with the arrays themselves, where it can."""
    if isinstance(part, Optimizer):
        return states.live(part)
    return dict(part.live_state() if hasattr(part, "live_state") else part.state_dict())


def restore(run: TrainingState, checkpoint: Checkpoint, shape: Mapping[str, int], path: Path) -> tuple[int, int]:
    """Check that `checkpoint` belongs to this run, load it into `run`, and return the next (epoch, batch)."""
    checkpoint, regrouped = in_groups_of(run.model, checkpoint, path)
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
        if regrouped:
            now = without_groups(now, layers_in_order(run.model))
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
    _check_weights(path, weights, live_state(run.model), remedy)
    optimizer_state = checkpoint.part("optimizer") | state["optimizer"]
    with _all_or_nothing(run):
        if isinstance(run.optimizer, Optimizer):
            with _loading(path):
                for group in groups_added(run.optimizer, optimizer_state, run.model.parameters()):
                    run.optimizer.add_param_group(group)
        kept, wanted = (
            sorted(name for name in some if not name.startswith(("group", "joined.")))  # load_state_dict compares those
            for some in (optimizer_state, live_state(run.optimizer))
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
    before = [copy.deepcopy(live_state(part)) for part in parts]
    drawn = [(generator, generator.bit_generator.state) for generator in generators_of(run.model).values()]
    arrays = run.model.parameters() | buffers_of(run.model)
    weights = [(array, array.copy()) for array in held(arrays).values()]
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
