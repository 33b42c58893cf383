"""``sparsebp train``: train a recurrent network on sequences, or a convolutional one on images."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsebp.cli.commands import session
from sparsebp.cli.commands.common import JsonOption, ThreadsOption, out_option, taking, use_threads
from sparsebp.cli.commands.run_options import Task, run_options
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError
from sparsebp.distributed.transports.processes.launcher import launched

if TYPE_CHECKING:
    from sparsebp.distributed.transport import Transport
    from sparsebp.recipes.config import TrainConfig

_run_options = run_options(
    "model", "hidden", "layers", "seq_len", "features", "width", "data", "samples", "batch_size", "epochs", "lr",
    "optimizer", "lr_schedule", "clip_norm", "backward", "fusion", "accumulate", "schedule", "graph", "prune",
    "prune_method", "retrain_epochs", "retrain_lr", "device", "dtype", "seed",
)  # fmt: skip


@taking("given", _run_options)
def train(
    task: Annotated[
        Task | None,
        typer.Argument(
            help="Sequences: seqmnist (digits, pixel by pixel), bitstream (BPPSA Eq. 8), instruments (by their sound). "
            "Images: mnist, digits (scikit-learn's), cifar10.",
            show_default="that of --config",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Options from this file, of sparsebp tune; those given here win.", show_default="none"),
    ] = None,
    *,
    given: dict[str, Any],
    threads: ThreadsOption = None,
    out: Annotated[
        Path | None, out_option("Folder for checkpoint and picture.", show_default="runs/TASK-MODEL")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints within an epoch.", show_default="end of epoch")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="Start from the weights and pruning masks of this checkpoint, or its folder; optimizer and schedule "
            "begin anew.",
            show_default="drawn from the seed",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the folder.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Train again by bp, and compare a scan with it.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a network by scanning transposed Jacobians.

    A checkpoint is written before the first step and after every epoch. A run
    that was killed goes on with --resume and the same options, on a CPU with
    bit-identical losses (without --weights: the folder knows them). With --prune the training before it runs by bp, the
    retraining by --backward; its files are in the folder "pruned" inside.

    \b
    Examples:
      sparsebp train seqmnist --epochs 10
      sparsebp train bitstream --seq-len 3000 --backward chunked --compare
      sparsebp train instruments --features S --backward chunked --compare
      sparsebp train bitstream --device cuda --out runs/gpu
      sparsebp train seqmnist --resume
      sparsebp train digits --model lenet5 --fusion backward
      sparsebp train --config runs/tuned.toml --epochs 3
      sparsebp train digits --model vgg11 --prune 0.97 --backward hybrid --compare
      sparsebp train digits --weights runs/digits-lenet5/pruned.safetensors
      sparsebp train cifar10 --data cifar-10-batches-bin --model mobilenetv2
      mpiexec -n 4 sparsebp train digits --schedule 1f1b --accumulate 8
    """
    from sparsebp.recipes.recipe import config_for

    options = _options(given | {"task": task, "threads": threads}, config)
    count = options.pop("threads", None)
    run = config_for(**options)
    transport = _transport(run)
    use_threads(count)
    folder = Path("runs", f"{run.task}-{run.model}") if out is None else out
    session.run(
        run, folder, weights=weights, resume=resume, compare=compare, every=checkpoint_every, as_json=json,
        transport=transport,
    )  # fmt: skip


def _transport(run: TrainConfig) -> Transport | None:
    """Return what connects this process with the others that mpiexec has started; None if none has."""
    if launched() is None:
        return None
    from sparsebp.distributed.start import connect
    from sparsebp.train.training import FIRST_K, REPLICAS

    return connect(device=run.device, progress=run.schedule in (REPLICAS, FIRST_K))


def _options(given: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the options given, those of a file beneath."""
    from sparsebp.recipes.config_file import read_config

    options = {} if path is None else read_config(path)
    task = given["task"]
    if task is not None and options.get("task", task) != task:
        raise OptionError("The file is of another task", expected=options["task"], got=task,
                          remedy="Leave the task or --config out")  # fmt: skip
    options |= {name: value for name, value in given.items() if value is not None}
    if "task" not in options and path is not None:
        raise OptionError("There is no task", expected="a task, or a file that names one", got="none",
                          remedy="Name a task: sparsebp train digits")  # fmt: skip
    if "task" not in options:
        raise typer.BadParameter("There is none, and no --config names one: sparsebp train digits", param_hint="TASK")
    if "threads" in options:
        options["threads"] = check_integer("threads", options["threads"], 1)
    return options
