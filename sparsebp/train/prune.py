"""Pruning of a checkpoint: weights, masks, and the optimizer's state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.errors import FileFormatError, OptionError, OutputError
from sparsebp.core.files import check_path
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint, take_weights
from sparsebp.train.config import config_of
from sparsebp.train.folder import held_if_run
from sparsebp.train.state import FILE_NAME

# Pruning of a checkpoint: weights, masks, and the optimizer's state.


def prune_checkpoint(
    path: str | os.PathLike[str], out: str | os.PathLike[str], amount: float, method: Any = "class_uniform", *,
    overwrite: bool = False,
) -> nn.PruneReport:  # fmt: skip
    """Prune the network of the checkpoint `path` and write all of it to `out`, in one atomic step.

    Parameters
    ----------
    path
        A checkpoint of `sparsebp train`, or its folder. Existing masks are kept.
    out
        The file to write. From ``checkpoint.safetensors`` in a folder, a run with a constant learning rate and more
        epochs resumes.
    amount, method
        See `sparsebp.prune`.
    overwrite
        Whether to replace a file that is at `out`.

    Raises
    ------
    FileFormatError
        The file is not a checkpoint of such a run.
    OptionError
        `amount` or `method` is invalid, or `out` is the checkpoint itself.
    OutputError
        `out` cannot be written, is there already, or a run holds its folder.
    """
    path, out = check_path("path", path), check_path("out", out)
    with held_if_run(out.parent):
        return _prune(path, out, amount, method, overwrite)


def _prune(path: Path, out: Path, amount: float, method: Any, overwrite: bool) -> nn.PruneReport:
    source = path / FILE_NAME if os.path.isdir(path) else path
    checkpoint = load_checkpoint(source)
    if os.path.exists(out) and os.path.samefile(source, out):
        raise OptionError("out is the checkpoint itself, which would be lost", expected="another file", got=out)
    if os.path.lexists(out) and not overwrite:
        raise OutputError(f"{out} is there already", expected="a new file", got="one that would be lost",
                          remedy="Name another one (--out), or replace it by overwrite=True (--overwrite)")  # fmt: skip
    try:
        described = checkpoint.state.get("config")
        model = config_of(described if isinstance(described, dict) else {}).build_model()
    except OptionError as error:
        raise FileFormatError(
            f"{path} does not say what network it is of", expected="a checkpoint that sparsebp train wrote",
            got=str(error), remedy="Load the weights into your model, call sparsebp.prune, and save its state_dict"
        ) from error  # fmt: skip
    model.to("cpu")
    take_weights(model, checkpoint, path)
    report = nn.prune(model, amount, method)
    state = {name: backend.to_host(array) for name, array in model.state_dict().items()}
    tensors = dict(checkpoint.tensors) | {f"model.{name}": array for name, array in state.items()}
    for name in report.kept:
        mask = state[f"{name}.weight_mask"]
        for stored in tensors:
            if stored.startswith("optimizer.") and stored.endswith(f".{name}.weight"):
                if tensors[stored].shape != mask.shape:
                    raise FileFormatError(f"{path} is damaged: {stored}", expected=mask.shape,
                                          got=tensors[stored].shape)  # fmt: skip
                tensors[stored] = tensors[stored] * mask
    save_checkpoint(out, Checkpoint(tensors, {**checkpoint.state, "pruning": report.to_json()}))
    return report
