"""``sparsebp demo``: the tour of ``make demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from sparsebp.cli.commands import session
from sparsebp.cli.commands.common import JsonOption, ThreadsOption, choice_option, out_option, use_threads
from sparsebp.recipes.recurrent_config import SequenceModel


def demo(
    out: Annotated[Path, out_option("Folder for checkpoint and picture.")] = Path("runs", "demo"),
    model: Annotated[SequenceModel, choice_option("Recurrent layer", get_args(SequenceModel))] = "gru",
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs.", show_default="those of train seqmnist")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed.")] = 0,
    threads: ThreadsOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the folder.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a GRU, or another recurrent layer, on digits, pixel by pixel, and show what the scans do with it.

    5 000 real MNIST images, 784 time steps each. Prints the test accuracy, what
    the backward plan chose and why, and how far the scans' gradients lie from
    plain back-propagation; leaves a loss curve and a checkpoint. Takes less
    than a minute.

    \b
    Examples:
      sparsebp demo
      sparsebp demo --epochs 2 --out runs/short
      sparsebp demo --model lstm
    """
    from sparsebp.recipes.recipe import config_for

    config = config_for("seqmnist", model=model, epochs=epochs, seed=seed)
    use_threads(threads)
    session.run(config, out, resume=resume, agreement=True, as_json=json)
