"""``sparsebp train``: train a recurrent network on one of the two tasks."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from sparsebp.commands import session
from sparsebp.commands.common import JsonOption, ThreadsOption, use_threads


class Task(enum.StrEnum):
    """What to learn."""

    seqmnist = "seqmnist"
    bitstream = "bitstream"


class Model(enum.StrEnum):
    """The recurrent layer."""

    rnn = "rnn"
    gru = "gru"


class Optimizer(enum.StrEnum):
    """The optimizer."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"


class Schedule(enum.StrEnum):
    """The learning rate's course over the run."""

    constant = "constant"
    cosine = "cosine"
    onecycle = "onecycle"


class Backward(enum.StrEnum):
    """The algorithm of the backward pass."""

    auto = "auto"
    linear = "linear"
    blelloch = "blelloch"
    hybrid = "hybrid"
    chunked = "chunked"


class Device(enum.StrEnum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


class DType(enum.StrEnum):
    """The precision."""

    float32 = "float32"
    float64 = "float64"


def train(
    task: Annotated[Task, typer.Argument(help="seqmnist: digits, pixel by pixel. bitstream: BPPSA Eq. 8.")],
    model: Annotated[Model | None, typer.Option(help="Recurrent layer.", show_default="gru; bitstream rnn")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size.", show_default="by task")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Recurrent layers.")] = 1,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Time steps.", show_default="784; bitstream 1000")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Training samples.", show_default="all")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size.", show_default="by task")] = None,
    epochs: Annotated[int | None, typer.Option(min=0, help="Epochs in all.", show_default="by task")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (its peak).", show_default="by task")] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Optimizer.", show_default="adam")] = None,
    schedule: Annotated[Schedule | None, typer.Option(help="Learning-rate schedule.", show_default="by task")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.", show_default="1")] = None,
    backward: Annotated[Backward, typer.Option(help="Algorithm of the backward pass.")] = Backward.auto,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = Device.cpu,
    dtype: Annotated[DType, typer.Option(help="Precision.")] = DType.float32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of data, weights and order.")] = 0,
    threads: ThreadsOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for checkpoint and picture.", show_default="runs/TASK-MODEL")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints within an epoch.", show_default="end of epoch")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the folder.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train again with sequential back-propagation and compare.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train a recurrent network by scanning transposed Jacobians.

    A checkpoint is written before the first step and after every epoch. A run
    that was killed goes on with --resume and the same options, on a CPU with
    bit-identical losses.

    \b
    Examples:
      sparsebp train seqmnist --epochs 10
      sparsebp train bitstream --seq-len 3000 --backward chunked --compare
      sparsebp train bitstream --device cuda --out runs/gpu
      sparsebp train seqmnist --resume
    """
    from sparsebp.train.recipe import config_for

    config = config_for(
        task.value,
        model=model and model.value,
        hidden=hidden,
        layers=layers,
        seq_len=seq_len,
        samples=samples,
        batch_size=batch_size,
        epochs=epochs,
        lr=lr,
        optimizer=optimizer and optimizer.value,
        schedule=schedule and schedule.value,
        clip_norm=clip,
        backward=backward.value,
        device=device.value,
        dtype=dtype.value,
        seed=seed,
    )
    use_threads(threads)
    folder = Path("runs", f"{config.task}-{config.model}") if out is None else out
    session.run(config, folder, resume=resume, compare=compare, every=checkpoint_every, as_json=json)
