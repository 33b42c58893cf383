"""Checkpoints: one safetensors file that holds arrays and a JSON state, put in place in one atomic step.

The bytes go to a temporary name in the same folder, are flushed to the disk, and are then renamed over the last
checkpoint. Whenever the process dies, the folder holds either the last checkpoint or the new one, whole. Any
safetensors reader can open the file: weights are the tensors ``model.*``, the state is JSON in the header's metadata.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.errors import FileFormatError
from sparsebp.files import write_atomically

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
    OutputError
        The folder does not exist or cannot be written; what was at `path` before is untouched.
    """
    from safetensors.numpy import save

    tensors = {name: np.asarray(array, order="C") for name, array in checkpoint.tensors.items()}
    state = json.dumps(checkpoint.state)
    metadata = {"format": FORMAT, "version": str(VERSION), "state": state, "digest": _digest(tensors, state)}
    write_atomically(Path(path), save(tensors, metadata))


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the checkpoint at `path`, a file or the folder of a run.

    Raises
    ------
    FileFormatError
        There is no such file, it is not a safetensors file, it was written by something else or a newer version, or its
        content does not match its digest.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileFormatError(
            f"No checkpoint can be read at {path}",
            expected="a checkpoint file",
            got=error.strerror or str(error),
            remedy="Give a checkpoint, or the folder that an earlier run wrote to",
        ) from error
    try:
        tensors = load(content)
        header_bytes = int.from_bytes(content[:8], "little")
        metadata = json.loads(content[8 : 8 + header_bytes]).get("__metadata__") or {}
    except (SafetensorError, ValueError, KeyError) as error:
        raise FileFormatError(
            f"{path} is damaged or no checkpoint at all",
            expected="a safetensors file",
            got=f"{len(content)} bytes that do not read as one ({error})",
            remedy=f"Take another copy ({PREVIOUS_NAME} holds the run before), or start anew",
        ) from error
    if metadata.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} was not written by sparsebp's trainer",
            expected=f"format {FORMAT!r} in the header",
            got=repr(metadata.get("format")),
            remedy="Weights alone are loaded with model.load_state_dict(safetensors.numpy.load_file(path))",
        )
    if metadata.get("version") != str(VERSION):
        raise FileFormatError(
            f"{path} has a version that this sparsebp does not read",
            expected=repr(str(VERSION)),
            got=repr(metadata.get("version")),
            remedy="Use the version of sparsebp that wrote it",
        )
    if metadata.get("digest") != _digest(tensors, metadata.get("state", "")):
        raise FileFormatError(
            f"{path} is damaged",
            expected=f"content of digest {metadata.get('digest')}",
            got=_digest(tensors, metadata.get("state", "")),
            remedy="Take another copy, or start anew",
        )
    return Checkpoint(tensors, json.loads(metadata["state"]))


def _digest(tensors: Mapping[str, np.ndarray], state: str) -> str:
    digest = hashlib.blake2b(state.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"\n{name} {tensors[name].dtype.str} {tensors[name].shape}\n".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
