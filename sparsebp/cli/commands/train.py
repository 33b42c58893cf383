"""``sparsebp train``: train a recurrent network on sequences, or a convolutional one on images."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebp.cli.commands import session
from sparsebp.cli.commands.common import JsonOption, ThreadsOption, choice_option, out_option, use_threads
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import OptionError


class Task(enum.StrEnum):
    """What to learn."""

    seqmnist = "seqmnist"
    bitstream = "bitstream"
    mnist = "mnist"
    digits = "digits"
    cifar10 = "cifar10"


class Model(enum.StrEnum):
    """The network."""

    rnn = "rnn"
    gru = "gru"
    lenet5 = "lenet5"
    vgg11 = "vgg11"
    mobilenetv2 = "mobilenetv2"
    densenet = "densenet"


class Optimizer(enum.StrEnum):
    """The optimizer."""

    sgd = "sgd"
    adam = "adam"
    adamw = "adamw"
    amsgrad = "amsgrad"
    adagrad = "adagrad"
    adadelta = "adadelta"
    rmsprop = "rmsprop"


class LRSchedule(enum.StrEnum):
    """The learning rate's course over the run."""

    constant = "constant"
    cosine = "cosine"
    onecycle = "onecycle"


class Backward(enum.StrEnum):
    """The algorithm of the backward pass."""

    auto = "auto"
    bp = "bp"
    linear = "linear"
    blelloch = "blelloch"
    hybrid = "hybrid"
    chunked = "chunked"


class Fusion(enum.StrEnum):
    """Where the optimizer's updates go."""

    none = "none"
    forward = "forward"
    backward = "backward"


class PruneMethod(enum.StrEnum):
    """How pruned weights are shared out over the layers."""

    class_blind = "class_blind"
    class_uniform = "class_uniform"
    class_distribution = "class_distribution"


class Device(enum.StrEnum):
    """Where to compute."""

    cpu = "cpu"
    cuda = "cuda"


class DType(enum.StrEnum):
    """The precision."""

    float32 = "float32"
    float64 = "float64"


def train(
    task: Annotated[
        Task | None,
        typer.Argument(
            help="Sequences: seqmnist (digits, pixel by pixel), bitstream (BPPSA Eq. 8). "
            "Images: mnist, digits (scikit-learn's), cifar10.",
            show_default="that of --config",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Options from this file, of sparsebp tune; those given here win.", show_default="none"),
    ] = None,
    model: Annotated[
        Model | None,
        typer.Option(
            metavar="<name>",
            help="rnn, gru for sequences; lenet5, vgg11, mobilenetv2, densenet for images.",
            show_default="gru; bitstream rnn; images lenet5; cifar10 vgg11",
        ),
    ] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Sequences: hidden size.", show_default="by task")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Sequences: recurrent layers.", show_default="1")] = None,
    seq_len: Annotated[
        int | None, typer.Option(min=1, help="Sequences: time steps.", show_default="784; bitstream 1000")
    ] = None,
    width: Annotated[
        float | None, typer.Option(help="Images: factor on the channels, not of lenet5.", show_default="1")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="cifar10: folder of the binary version.", show_default=False)
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Training samples.", show_default="all")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Batch size.", show_default="by task")] = None,
    epochs: Annotated[int | None, typer.Option(min=0, help="Epochs in all.", show_default="by task")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate (its peak).", show_default="by task")] = None,
    optimizer: Annotated[Optimizer | None, choice_option("Optimizer", Optimizer, show_default="adam")] = None,
    lr_schedule: Annotated[
        LRSchedule | None, choice_option("Learning-rate schedule", LRSchedule, show_default="by task")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.", show_default="1; images none")] = None,
    backward: Annotated[
        Backward | None, choice_option("Algorithm of the backward pass", Backward, show_default="auto; images bp")
    ] = None,
    fusion: Annotated[
        Fusion | None,
        choice_option("Updates before the next use, or right after the gradient", Fusion, show_default="none"),
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches that a batch is split into.", show_default="1")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Order of a step: conventional, ooo, or an action CSV.", show_default="conventional"),
    ] = None,
    graph: Annotated[
        bool | None, typer.Option("--graph/--no-graph", help="GPU: capture the step into a CUDA graph.")
    ] = None,
    prune: Annotated[
        float | None,
        typer.Option(help="Images: share of the weights to prune after training, then retrain.", show_default="none"),
    ] = None,
    prune_method: Annotated[
        PruneMethod | None,
        choice_option("How to share that out over the layers", PruneMethod, show_default="class_uniform"),
    ] = None,
    retrain_epochs: Annotated[
        int | None, typer.Option(min=0, help="Epochs after pruning.", show_default="as many as before; vgg11 8")
    ] = None,
    retrain_lr: Annotated[
        float | None, typer.Option(help="Learning rate after pruning.", show_default="that before; vgg11 0.003")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="Where to compute.", show_default="cpu")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Precision.", show_default="float32")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of data, weights, order.", show_default="0")] = None,
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
    compare: Annotated[
        bool, typer.Option("--compare", help="Train again with plain back-propagation and compare.")
    ] = False,
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
      sparsebp train bitstream --device cuda --out runs/gpu
      sparsebp train seqmnist --resume
      sparsebp train digits --model lenet5 --fusion backward
      sparsebp train --config runs/tuned.toml --epochs 3
      sparsebp train digits --model vgg11 --prune 0.97 --backward hybrid --compare
      sparsebp train digits --weights runs/digits-lenet5/pruned.safetensors
      sparsebp train cifar10 --data cifar-10-batches-bin --model mobilenetv2
    """
    from sparsebp.recipes.recipe import config_for

    given = {
        "task": task and task.value,
        "model": model and model.value,
        "hidden": hidden,
        "layers": layers,
        "seq_len": seq_len,
        "samples": samples,
        "batch_size": batch_size,
        "epochs": epochs,
        "lr": lr,
        "optimizer": optimizer and optimizer.value,
        "lr_schedule": lr_schedule and lr_schedule.value,
        "clip_norm": clip,
        "backward": backward and backward.value,
        "fusion": fusion and fusion.value,
        "accumulate": accumulate,
        "schedule": schedule,
        "graph": graph,
        "width": width,
        "data": data and str(data),
        "prune": prune,
        "prune_method": prune_method and prune_method.value,
        "retrain_epochs": retrain_epochs,
        "retrain_lr": retrain_lr,
        "device": device and device.value,
        "dtype": dtype and dtype.value,
        "seed": seed,
        "threads": threads,
    }
    options = _options(given, config)
    use_threads(options.pop("threads", None))
    run = config_for(**options)
    folder = Path("runs", f"{run.task}-{run.model}") if out is None else out
    session.run(run, folder, weights=weights, resume=resume, compare=compare, every=checkpoint_every, as_json=json)


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
