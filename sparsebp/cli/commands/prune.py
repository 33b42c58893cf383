"""``sparsebp prune``: a checkpoint in, a pruned one out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, get_args

import typer

from sparsebp.cli.commands.common import JsonOption, choice_option, console, out_option, write_json
from sparsebp.cli.commands.interrupted import Interrupted
from sparsebp.nn.pruning import PruneMethod


def prune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of sparsebp train, or its folder.")],
    amount: Annotated[float, typer.Option(help="Share of the weights that is pruned afterwards.")],
    method: Annotated[
        PruneMethod, choice_option("How to share that out over the layers", get_args(PruneMethod))
    ] = "class_blind",
    out: Annotated[
        Path | None,
        out_option("The file to write.", show_default="pruned.safetensors beside the checkpoint"),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Prune the network of a checkpoint by magnitude (See et al. 2016).

    The checkpoint itself is left alone. Masks are part of the new one: whoever
    loads it trains on without the pruned weights.

    \b
    Examples:
      sparsebp prune runs/digits-vgg11 --amount 0.97
      sparsebp prune checkpoint.safetensors --amount 0.5 --method class_uniform
    """
    from sparsebp.recipes.prune_checkpoint import prune_checkpoint

    folder = checkpoint if os.path.isdir(checkpoint) else checkpoint.parent
    target = folder / "pruned.safetensors" if out is None else out
    try:
        report = prune_checkpoint(checkpoint, target, amount, method)
    except KeyboardInterrupt as error:
        raise Interrupted(f"while {target} was made; the checkpoint is as it was") from error
    if json:
        write_json({"event": "result", "checkpoint": str(target), **report.to_json()})
        return
    console().print(str(report), markup=False)
    console().print(f"checkpoint  {target}", markup=False)
