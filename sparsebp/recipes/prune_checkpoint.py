"""A checkpoint in, a pruned one out: weights, masks, and the optimizer's state without that of pruned weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsebp import backend
from sparsebp.core.errors import FileFormatError, OptionError
from sparsebp.core.files import check_path
from sparsebp.recipes.recipe import config_of
from sparsebp.train.checkpoint import FILE_NAME, Checkpoint, load_checkpoint, save_checkpoint
from sparsebp.train.run_folder import held_if_run
from sparsebp.train.state import take_weights

if TYPE_CHECKING:
    from sparsebp.nn import PruneReport


def prune_checkpoint(
    path: str | os.PathLike[str], out: str | os.PathLike[str], amount: float, method: Any = "class_blind"
) -> PruneReport:
    """Prune the network of the checkpoint `path` and write all of it to `out`, in one atomic step.

    Parameters
    ----------
    path
        A checkpoint of `sparsebp train`, or its folder. It may be pruned already; the masks stay then.
    out
        The file to write. In a folder of its own under the name ``checkpoint.safetensors``, a run with a constant
        learning rate and more epochs resumes from it.
    amount, method
        See `sparsebp.prune`.

    Raises
    ------
    FileFormatError
        The file is not a checkpoint of such a run.
    OptionError
        `amount` or `method` cannot be had, or `out` is the checkpoint itself.
    OutputError
        `out` cannot be written, or a run holds its folder.
    """
    path, out = check_path("path", path), check_path("out", out)
    with held_if_run(out.parent):
        return _prune(path, out, amount, method)


def _prune(path: Path, out: Path, amount: float, method: Any) -> PruneReport:
    from sparsebp import nn

    source = path / FILE_NAME if os.path.isdir(path) else path
    checkpoint = load_checkpoint(source)
    if os.path.exists(out) and os.path.samefile(source, out):
        raise OptionError("out is the checkpoint itself, which would be lost", expected="another file", got=out,
                          remedy="Give the pruned network another name")  # fmt: skip
    try:
        described = checkpoint.state.get("config")
        model = config_of(described if isinstance(described, dict) else {}).build_model()
    except OptionError as error:
        raise FileFormatError(
            f"{path} does not say what network it is of",
            expected="a checkpoint that sparsebp train wrote",
            got=str(error),
            remedy="Load the weights into your model, call sparsebp.prune, and save its state_dict",
        ) from error
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
                                          got=tensors[stored].shape, remedy="Take another copy")  # fmt: skip
                tensors[stored] = tensors[stored] * mask
    save_checkpoint(out, Checkpoint(tensors, {**checkpoint.state, "pruning": report.to_json()}))
    return report
