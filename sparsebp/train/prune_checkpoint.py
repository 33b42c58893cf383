"""A checkpoint in, a pruned one out: weights, masks, and the optimizer's state without that of pruned weights."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from sparsebp import backend
from sparsebp.errors import FileFormatError, OptionError
from sparsebp.train.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from sparsebp.train.recipe import config_of

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
        `amount` or `method` cannot be had.
    OutputError
        `out` cannot be written.
    """
    from sparsebp import nn

    checkpoint = load_checkpoint(path)
    try:
        model = config_of(checkpoint.state["config"]).build_model()
    except OptionError as error:
        raise FileFormatError(
            f"{path} does not say what network it is of",
            expected="a checkpoint that sparsebp train wrote",
            got=str(error),
            remedy="Load the weights into your model, call sparsebp.prune, and save its state_dict",
        ) from error
    model.to("cpu").load_state_dict(checkpoint.part("model"))
    report = nn.prune(model, amount, method)
    state = {name: backend.to_host(array) for name, array in model.state_dict().items()}
    tensors = dict(checkpoint.tensors) | {f"model.{name}": array for name, array in state.items()}
    for name in report.kept:
        mask = state[f"{name}.weight_mask"]
        for stored in tensors:
            if stored.startswith("optimizer.") and stored.endswith(f".{name}.weight"):
                tensors[stored] = tensors[stored] * mask
    save_checkpoint(out, Checkpoint(tensors, {**checkpoint.state, "pruning": report.to_json()}))
    return report
