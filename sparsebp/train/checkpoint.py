"""Checkpoints: one safetensors file of arrays and a JSON state; and the folder of a run.

The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed over the last
checkpoint. Whenever the process dies, the folder holds either the last checkpoint or the new one, whole. Any
safetensors reader can open the file: weights are the tensors ``model.*``, the state is JSON in the header's metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core.check import shown
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import (
    LOCK_NAME,
    check_path,
    check_regular,
    hold_folder,
    keep_copy,
    output_error,
    parse_json,
    prepare_folder,
    read_file,
    remove_temporaries,
    write_atomically,
)

FORMAT = "sparsebp-checkpoint"
VERSION = 1
FILE_NAME = "checkpoint.safetensors"
PREVIOUS_NAME = "checkpoint.previous.safetensors"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Arrays by name, and a state that JSON can hold. Floats in the state survive exactly."""

    tensors: Mapping[str, np.ndarray]
    state: Mapping[str, Any]

    def part(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names start with ``prefix.``, without it."""
        start = prefix + "."
        return {name[len(start) :]: array for name, array in self.tensors.items() if name.startswith(start)}


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
    """Return `value` as JSON; arrays in it (of the states of random generators) become lists."""
    # NaN and infinities are written as Python reads them, or refused if `finite`.
    try:
        return json.dumps(value, default=_listed, allow_nan=not finite)
    except (TypeError, ValueError, RecursionError) as error:
        raise OptionError(f"{name} cannot be kept as JSON", expected="texts, numbers, truth values, lists and dicts",
                          got=str(error)) from error  # fmt: skip


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
                              got=f"{len(content)} bytes that do not read as one ({error})", remedy="Take another copy "
                              f"({PREVIOUS_NAME} holds the run before), or start anew") from error  # fmt: skip
    if metadata.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} was not written by sparsebp's trainer",
            expected=f"format {FORMAT!r} in the header",
            got=shown(metadata.get("format")),
            remedy="Weights alone are loaded with model.load_state_dict(safetensors.numpy.load_file(path))",
        )
    if metadata.get("version") != str(VERSION):
        raise FileFormatError(f"{path} has a version that this sparsebp does not read", expected=repr(str(VERSION)),
                              got=shown(metadata.get("version")),
                              remedy="Use the version of sparsebp that wrote it")  # fmt: skip
    text = metadata.get("state", "")
    if metadata.get("digest") != _digest(tensors, text):
        raise FileFormatError(f"{path} is damaged", expected=f"content of digest {metadata.get('digest')}",
                              got=_digest(tensors, text), remedy="Take another copy, or start anew")  # fmt: skip
    return Checkpoint(tensors, _state(path, text))


def _state(path: Path, text: str) -> dict[str, Any]:
    try:
        state = parse_json(text)
    except ValueError as error:
        state, got = None, str(error)
    else:
        got = f"a {type(state).__name__}"
    if not isinstance(state, dict):
        raise FileFormatError(f"{path} has no state of a run", expected="a JSON object", got=got,
                              remedy="Take another copy, or start anew")  # fmt: skip
    return state


def _native(array: Any) -> np.ndarray:
    """Return an array in C order and in the byte order of this machine: safetensors keeps neither."""
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
        raise OptionError("config is no mapping", expected="a dict of what describes the run",
                          got=type(config).__name__)  # fmt: skip
    described: dict[str, Any] = json.loads(json_text("config", dict(config), finite=True))
    return described


# Training and evaluation, with every layer's own mode as it was afterwards.


@contextlib.contextmanager
def training(model: Any) -> Iterator[None]:
    """Train: a model in evaluation is switched as a whole, one in training keeps layers that are in evaluation."""
    with _restored(model):
        if not getattr(model, "training", False):
            _switch(model, "train")
        yield


@contextlib.contextmanager
def evaluation(model: Any) -> Iterator[None]:
    """Switch all layers to evaluation. What a layer draws nevertheless is not missing afterwards."""
    drawn = [(generator, generator.bit_generator.state) for generator in generators_of(model).values()]
    with _restored(model):
        _switch(model, "eval")
        try:
            yield
        finally:
            for generator, state in drawn:
                generator.bit_generator.state = state


def generators_of(model: Any) -> dict[str, np.random.Generator]:
    """Return the random generators that layers draw from while training (dropout), sorted by name."""
    return dict(sorted(model.generators().items())) if hasattr(model, "generators") else {}


@contextlib.contextmanager
def _restored(model: Any) -> Iterator[None]:
    layers = [layer for _, layer in model.modules()] if hasattr(model, "modules") else [model]
    modes = [(layer, layer.training) for layer in layers if hasattr(layer, "training")]
    try:
        yield
    finally:
        if not modes:  # it does not say
            _switch(model, "train")
        for layer, mode in modes:
            layer.training = mode


def _switch(model: Any, mode: str) -> None:
    switch = getattr(model, mode, None)
    if switch is not None:
        switch()


# The folder of a run: held by one run at a time, and never taken for another one's by a slip of the keyboard.


@contextlib.contextmanager
def run_folder(folder: Path | None, *, resume: bool) -> Iterator[None]:
    """Create the folder of a run if need be and hold it meanwhile; None is no folder."""
    if folder is None:
        yield
        return
    if resume and not any(os.path.lexists(folder / name) for name in (FILE_NAME, LOCK_NAME)):
        raise FileFormatError(f"There is no run to resume in the folder {folder}",
                              expected=f"{FILE_NAME} of an earlier run",
                              got="no such file" if os.path.isdir(folder) else "no such folder",
                              remedy="Name the folder of the run, or start a new one without resume")  # fmt: skip
    prepare_folder(folder)
    with hold_folder(folder):
        for name in (FILE_NAME, PREVIOUS_NAME):  # said now, and not by the first checkpoint after an epoch's work
            try:
                check_regular(folder / name)
            except OSError as error:
                raise output_error(folder / name, error) from error
        remove_temporaries(folder / FILE_NAME)
        yield


@contextlib.contextmanager
def held_if_run(folder: Path) -> Iterator[None]:
    """Hold a folder meanwhile if runs have ever written there; any other is left without a lock file."""
    with hold_folder(folder) if os.path.lexists(folder / LOCK_NAME) else contextlib.nullcontext():
        yield


def set_aside(folder: Path) -> None:
    """Let the checkpoint of an earlier run, if there is one, have the name `PREVIOUS_NAME` as well."""
    # Its own name stays until the new run's first checkpoint takes it: at any moment the folder holds a checkpoint.
    if os.path.lexists(folder / FILE_NAME):
        keep_copy(folder / FILE_NAME, PREVIOUS_NAME)
