"""``sparsebp train``, ``tune`` and ``prune``: the commands that run or change a training."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import numpy as np
import typer

from sparsebp.cli.common import (
    REPLACED,
    Interrupted,
    JsonOption,
    OverwriteOption,
    Position,
    ThreadsOption,
    choice_option,
    console,
    one_of,
    out_option,
    print_line,
    print_table,
    progress_bar,
    taking,
    use_threads,
    write_json,
)
from sparsebp.comm.launcher import launched
from sparsebp.comm.transport import Transport
from sparsebp.core import tables
from sparsebp.core.check import BACKWARDS, check_integer
from sparsebp.core.errors import OptionError
from sparsebp.core.files import json_line, output_error, prepare_folder, write_atomically
from sparsebp.nn.pruning import PruneMethod, PruneReport
from sparsebp.runtime.launch import connect
from sparsebp.runtime.timeline import Timeline, measured, save_timeline
from sparsebp.schedule.builders import Fusion
from sparsebp.train import JsonLines, ProgressBar, save_loss_curve
from sparsebp.train import prune as pruning
from sparsebp.train import tune as tuning
from sparsebp.train.batches import batch_of
from sparsebp.train.callbacks import Callback
from sparsebp.train.checkpoint import load_checkpoint, save_checkpoint
from sparsebp.train.compare import COMPARED, Agreement, Comparison, compare_histories, gradient_agreement
from sparsebp.train.config import (
    ImageConfig,
    ImageModel,
    ImageTask,
    InstrumentConfig,
    InstrumentTask,
    Option,
    RecurrentConfig,
    Run,
    SequenceModel,
    SequenceTask,
    TrainConfig,
    build,
    build_retraining,
    config_for,
    kind_of,
    prunes,
    read_config,
    write_config,
)
from sparsebp.train.folder import check_unused, run_folder
from sparsebp.train.setup import FIRST_K, REPLICAS
from sparsebp.train.state import FILE_NAME

START_NAME = "start.safetensors"
STEP_NAME = "step.png"
RESULTS = ("result.json", "loss.png", STEP_NAME)
_AGREEMENT_BATCH = 8  # samples: the stored Jacobians of `blelloch` stay below some hundred MB


def run_session(
    config: TrainConfig,
    folder: Path,
    *,
    weights: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    compare: bool = False,
    agreement: bool = False,
    every: int | None = None,
    as_json: bool = False,
    transport: Transport | None = None,
    ending: Callable[[Run, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train `config`, print the result, and return it.

    `folder` gets ``checkpoint.safetensors``, ``result.json`` and, where matplotlib is installed, ``loss.png``; from a
    pipeline on several ranks also ``step.png``, the last whole step as measured and as simulated. A run that prunes
    writes the pruned network into the folder ``pruned`` inside. `weights` is copied to ``start.safetensors``. A folder
    in which a run has been trained is refused, unless this one is to `resume` or `overwrite` it. Without epochs, the
    model is evaluated and nothing is written; `resume` then takes the checkpoint's weights.
    `compare` trains (or retrains) again with plain back-propagation; `agreement` compares the scans' gradients with it
    on a test batch; `every` is the number of steps between checkpoints within an epoch; `ending` prints the result and
    draws the loss curve in its own way. All ranks call this; the result is empty on all but rank 0.
    """
    if weights is not None and resume:
        raise OptionError("A run that resumes has weights already", expected="no --weights", got="--weights, --resume")
    if overwrite and resume:
        raise OptionError("A run is resumed or overwritten", expected="one of --resume and --overwrite", got="both")
    writes = config.epochs > 0 or (prunes(config) and config.retrain_epochs > 0)
    if compare and not writes:
        raise OptionError("Without epochs there are no steps to compare", expected="--epochs 1 or more", got=0,
                          remedy="Leave --compare out")  # fmt: skip
    leads = transport is None or transport.rank == 0
    for wrong, problem, name in (
        (compare, "A comparison trains once more, in one process", "--compare"),
        (prunes(config), "Pruning and retraining is for one process", "--prune"),
    ):
        if wrong and transport is not None:
            raise OptionError(problem, expected="one process", got="several ranks", remedy=f"Leave {name} out")
    position = Position(resumed=resume)
    place = folder if leads else None
    with position.told(), run_folder(place, resume=resume, overwrite=overwrite, writes=writes):
        tells = agreement and not as_json  # how far it is, on a terminal or not
        callbacks: list[Callback] = [] if tells else [JsonLines(sys.stdout) if as_json else ProgressBar()]
        start, inner = folder / START_NAME, folder / "pruned"
        files: dict[str, Any] = {"callbacks": callbacks, "checkpoint_every": every}
        files["checkpoint_dir"] = folder if writes else None
        if leads and prunes(config) and writes and not (resume or overwrite):
            check_unused(inner)
        if resume and not writes:
            weights, resume = folder / FILE_NAME, False
        elif resume and leads and start.exists():
            weights = start
        if transport is not None:
            weights = transport.broadcast(weights)
        session = dense = build(config, weights=weights, transport=transport, **files)
        position.follow(session)
        if compare:
            _check_comparison(session, config)
        if not leads:
            session.fit(resume=resume, overwrite=overwrite)
            _timeline(session, transport)
            return {}
        if writes and not resume:
            _prepare(folder, start, inner if prunes(config) else None, weights, overwrite=overwrite)
        if tells:
            _compile(session, config)
        session.fit(resume=resume, overwrite=overwrite, verbose=tells or None)
        timeline = _timeline(session, transport)
        pruning: dict[str, Any] = {}
        if prunes(config):
            folder = inner
            session, report = build_retraining(config, dense, **(files | {"checkpoint_dir": inner if writes else None}))
            position.follow(session)
            pruning = _pruned(dense, session, report, as_json)
            session.fit(resume=resume and (inner / FILE_NAME).exists())
        x = batch_of_test_set(session, min(config.batch_size, len(session.train_set)))[0]
        choice = config.backward_of(session.trainer.model, x)
        result: dict[str, Any] = {
            "config": dataclasses.asdict(config), **({} if transport is None else {"ranks": transport.size}),
            **_measured(session), "backward": choice, **_schedule(session), **pruning,
            "checkpoint": str(folder / FILE_NAME) if writes else None,
            "picture": str(folder / "loss.png") if _draws(session) else None,
        }  # fmt: skip
        if not writes:
            result["weights"] = f"drawn from the seed {config.seed}" if weights is None else str(weights)
        if timeline is not None:
            result["step"] = _step(timeline, folder if _draws(session) else None)
        if agreement:
            found = _agreement(session, config, _AGREEMENT_BATCH, "comparison of gradients", tells)
            result["agreement"] = [one.to_json() for one in found]
        if compare:
            comparison, sequential = _compare(session, dense, choice["algorithm"], start if start.exists() else None)
            result["comparison"] = comparison.to_json()
            result["sequential_test_accuracy"] = sequential.trainer.evaluate(sequential.test_set)[1]
        if writes:
            write_atomically(folder / "result.json", (json_line(result, indent=2) + "\n").encode())
        if as_json:
            write_json({"event": "result", **result})
        elif ending is not None:
            ending(session, result)
        else:
            _session_print(result)
        if result["picture"] is not None and ending is None:
            title = session.config.title
            draw("The loss curve", save_loss_curve, session.trainer.history, result["picture"], title=title)
        if timeline is not None and result["step"]["picture"] is not None:
            draw("The picture of a step", save_timeline, timeline, Path(result["step"]["picture"]))
        return result


def _prepare(folder: Path, start: Path, inner: Path | None, weights: Path | None, *, overwrite: bool) -> None:
    """Keep the weights that a new run starts from, and clear away what it would leave of an earlier run."""
    if weights is None:
        _remove(start)
    else:  # a copy: it may be the checkpoint that this run is about to replace
        save_checkpoint(start, load_checkpoint(weights))
    if inner is not None:  # a retraining that is not this run's could be resumed
        _remove(inner / FILE_NAME)
    places = [folder] if inner is None else [folder, inner]
    for path in (place / name for place in places for name in RESULTS) if overwrite else ():
        _remove(path)


def _compile(session: Run, config: TrainConfig) -> None:
    """Compile what the run needs before it trains, and say so; where all is compiled, it takes a moment."""
    _agreement(session, config, 1, "group of kernels to compile", tells=True)


def _agreement(session: Run, config: TrainConfig, samples: int, what: str, tells: bool) -> list[Agreement]:
    """Compare each scan's gradients on test samples with plain back-propagation's; `tells` says how far it is."""
    batch, found = batch_of_test_set(session, min(samples, len(session.test_set))), []
    with progress_bar(what, lines=tells) as told:
        for number, algorithm in enumerate(COMPARED):
            told(algorithm, number, len(COMPARED))
            model, loss = session.trainer.model, session.trainer.loss
            found += gradient_agreement(config, model, loss, batch, (algorithm,))
    return found


def _check_comparison(session: Run, config: TrainConfig) -> None:
    """Refuse, before anything is trained, to compare plain back-propagation with itself."""
    got = "--backward bp"
    if config.backward == "auto" and not prunes(config):
        model = session.trainer.model.eval()  # so that no dropout is drawn
        choice = config.backward_of(model, batch_of_test_set(session, config.batch_size)[0])
        model.train()
        if choice["algorithm"] != "bp":
            return
        got = "--backward auto, which takes bp here"
    elif config.backward != "bp":
        return
    raise OptionError("Plain back-propagation would be compared with itself", expected="a scan to compare with it",
                      got=got, remedy="Add --backward chunked, or leave --compare out")  # fmt: skip


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise output_error(path, error) from error


def batch_of_test_set(session: Run, size: int) -> tuple[Any, Any]:
    """Return the first samples of the test set and their targets, as the model takes them."""
    return batch_of(session.test_set, np.arange(min(size, len(session.test_set))), session.trainer.model)


def _measured(session: Run) -> dict[str, Any]:
    loss, accuracy = session.trainer.evaluate(session.test_set)
    history = session.trainer.history
    return {"steps": history.steps, "training_seconds": sum(history.seconds), "test_loss": loss,
            "test_accuracy": accuracy}  # fmt: skip


def _pruned(dense: Run, session: Run, report: PruneReport, as_json: bool) -> dict[str, Any]:
    """Print a pruning before its retraining, and return its part of the result."""
    if as_json:
        write_json({"event": "pruned", **report.to_json()})
    else:
        console().print(str(report), markup=False)
    return {
        "before_pruning": _measured(dense),
        "pruning": report.to_json(),
        "test_accuracy_at_once": session.trainer.evaluate(session.test_set)[1],
    }


def _compare(session: Run, dense: Run, chosen: str, weights: Path | None) -> tuple[Comparison, Run]:
    """Train once more by plain back-propagation, without callbacks and files, on the same data."""
    config = dataclasses.replace(session.config, backward="bp")
    if prunes(config):
        second, _ = build_retraining(config, dense)
    else:
        second = build(config, data=(session.train_set, session.test_set), weights=weights)
    name = session.config.backward if session.config.backward != "auto" else f"auto ({chosen})"
    return compare_histories(session.trainer.history, second.fit(), name, "bp"), second


def _draws(session: Run) -> bool:
    """Return whether there is a loss curve to draw, and matplotlib."""
    return importlib.util.find_spec("matplotlib") is not None and session.trainer.history.steps > 0


def draw(name: str, save: Callable[..., object], *arguments: Any, **options: Any) -> None:
    """Draw a picture, or warn that it failed."""
    try:
        save(*arguments, **options)
    except Exception as error:  # Matplotlib writes its own caches: errors of any kind
        typer.echo(f"Warning: {name} was not drawn. {error}", err=True)


def _timeline(session: Run, transport: Transport | None) -> Timeline | None:
    """Return the last whole step of a pipeline on the CPUs of all ranks, else None."""
    schedule = session.trainer.current_schedule
    if transport is None or schedule is None or schedule.workers != transport.size or session.config.device != "cpu":
        return None
    return measured(transport, schedule, session.trainer.times)


def _step(timeline: Timeline, folder: Path | None) -> dict[str, Any]:
    simulated = timeline.simulated()
    return {
        "seconds": timeline.makespan, "idle": timeline.bubble, "simulated_seconds": simulated.makespan,
        "simulated_idle": simulated.bubble, "clock_uncertainty": timeline.uncertainty,
        "picture": None if folder is None else str(folder / STEP_NAME),
    }  # fmt: skip


def _schedule(session: Run) -> dict[str, Any]:
    """Return the part of the result on a schedule that was found in the first steps."""
    found = session.trainer.found_schedule
    if found is None:
        return {}
    told = {"speedup": found.speedup, "memory": found.memory, "memory_ratio": found.memory_ratio}
    return {"schedule": told | {"name": found.schedule.name, "reason": found.describe()}}


def _scores(measured: dict[str, Any]) -> str:
    return (
        f"{measured['test_accuracy']:.4f}   (loss {measured['test_loss']:.4f}; {measured['steps']} steps, "
        f"{measured['training_seconds']:.1f} s of training)"
    )


def _session_print(result: dict[str, Any]) -> None:
    def line(label: str, text: str) -> None:
        print_line(label, text, 15)

    if result["steps"] == 0:
        line("training", "none: with 0 epochs no step was taken, the model was evaluated only")
    if "weights" in result:
        line("weights", result["weights"])
    if "pruning" in result:
        line("before pruning", _scores(result["before_pruning"]))
        line("pruned", f"{result['pruning']['sparsity']:.2%} of the weights; test accuracy at once "
             f"{result['test_accuracy_at_once']:.4f}")  # fmt: skip
    line("test accuracy", _scores(result))
    line("backward plan", result["backward"]["reason"])
    if "schedule" in result:
        line("schedule", result["schedule"]["reason"])
    if "step" in result:
        step = result["step"]
        drawn = "" if step["picture"] is None else f": {step['picture']}"
        line("last step", f"{1e3 * step['seconds']:.3g} ms on {result['ranks']} ranks, idle {step['idle']:.0%}; "
             f"simulated with the same durations {1e3 * step['simulated_seconds']:.3g} ms, idle "
             f"{step['simulated_idle']:.0%}{drawn}")  # fmt: skip
    for entry in result.get("agreement", ()):
        agreed = Agreement(**entry)
        line("agreement", f"{agreed.algorithm} against plain back-propagation: relative difference of the gradients "
             f"{agreed.relative_difference:.2e}, largest {agreed.largest_difference:.2e} "
             f"({agreed.parameter})")  # fmt: skip
    if "comparison" in result:
        entry = {name: value for name, value in result["comparison"].items() if name != "time_ratio"}
        line("comparison", Comparison(**entry).describe())
        line("sequential", f"test accuracy {result['sequential_test_accuracy']:.4f}")
    why = "no step was taken" if result["steps"] == 0 else "matplotlib is not installed (extra: plot)"
    line("loss curve", result["picture"] or f"not drawn: {why}")
    line("checkpoint", result["checkpoint"] or "none: an evaluation writes no file")


def prune(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of sparsebp train, or its folder.")],
    amount: Annotated[float, typer.Option(help="Share of the weights that is pruned afterwards.")],
    method: Annotated[
        PruneMethod, choice_option("How to share that out over the layers", get_args(PruneMethod))
    ] = "class_uniform",
    out: Annotated[
        Path | None, out_option("The file to write.", show_default="pruned.safetensors, same folder")
    ] = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Prune the network of a checkpoint by magnitude.

    The method is that of See et al. (2016). The checkpoint itself is left alone. The new one has masks, which keep the
    pruned weights at zero in further training.

    \b
    Examples:
      sparsebp prune runs/digits-vgg11 --amount 0.97
      sparsebp prune checkpoint.safetensors --amount 0.5 --method class_blind
    """
    folder = checkpoint if os.path.isdir(checkpoint) else checkpoint.parent
    target = folder / "pruned.safetensors" if out is None else out
    try:
        report = pruning.prune_checkpoint(checkpoint, target, amount, method, overwrite=overwrite)
    except KeyboardInterrupt as error:
        raise Interrupted(f"while {target} was written; the checkpoint is unchanged") from error
    if json:
        write_json({"event": "result", "checkpoint": str(target), **report.to_json()})
        return
    console().print(str(report), markup=False)
    console().print(f"checkpoint  {target}", markup=False)


# The options that describe a training run, derived from the fields of its configurations.

Task: TypeAlias = Literal[SequenceTask, InstrumentTask, ImageTask]
Model: TypeAlias = Literal[SequenceModel, ImageModel]
_OPTIONS = RecurrentConfig.options() | ImageConfig.options() | InstrumentConfig.options()
_OPTIONS["model"] = (
    Model,
    Option(
        f"{', '.join(get_args(SequenceModel))} for sequences; {', '.join(get_args(ImageModel))} for images.",
        shown="gru; bitstream rnn; images lenet5; cifar10 vgg11",
    ),
)


def _parameter(name: str) -> inspect.Parameter:
    """Return the parameter of a command from which typer makes an option."""
    hint, about = _OPTIONS[name]
    kind = kind_of(hint)
    called = about.called or name
    if len(get_args(kind)) > 2 and name != "model":
        declared = choice_option(about.text, get_args(kind), show_default=about.shown)
    else:
        flag = f"--{called.replace('_', '-')}"
        more: dict[str, Any] = {"min": about.least} if kind is int else {}
        more |= {"model": {"metavar": "<name>", **one_of(get_args(Model))}, "data": {"metavar": "<path>"}}.get(name, {})
        declared = typer.Option(f"{flag}/--no-{called}" if kind is bool else flag, help=about.text,
                                show_default=about.shown, **more)  # fmt: skip
    annotation = Annotated[kind | None, declared]  # type: ignore[valid-type]
    return inspect.Parameter(called, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def run_options(*names: str) -> Callable[..., dict[str, Any]]:
    """Return a function that takes the options `names` and returns them by name, for `taking`."""
    parameters = {name: _parameter(name) for name in names}

    def given(**values: Any) -> dict[str, Any]:
        return {name: values[parameter.name] for name, parameter in parameters.items()}

    given.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return given


_run_options = run_options(
    "model", "hidden", "layers", "seq_len", "positions", "features", "width", "data", "samples", "batch_size", "epochs",
    "lr", "optimizer", "lr_schedule", "clip_norm", "backward", "fusion", "accumulate", "schedule", "graph", "prune",
    "prune_method", "retrain_epochs", "retrain_lr", "device", "dtype", "seed",
)  # fmt: skip


@taking("given", _run_options)
def train(
    task: Annotated[
        Task | None,
        typer.Argument(
            help="Sequences: seqmnist (digits, pixel by pixel), bitstream (BPPSA Eq. 8), instruments (by their sound). "
            "Images: mnist, digits (scikit-learn's), cifar10.",
            show_default="from --config",
            **one_of(get_args(Task)),
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Options from this file, as tune writes it; those given here win.", show_default="none"),
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
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in the folder.")] = False,
    overwrite: OverwriteOption = False,
    compare: Annotated[bool, typer.Option("--compare", help="Train again by bp, and compare a scan with it.")] = False,
    json: JsonOption = False,
) -> None:
    """Train a network by scanning transposed Jacobians.

    A checkpoint is written before the first step and after every epoch. A run
    that was killed continues with --resume and the same options; on a CPU its
    losses are bitwise equal. To resume, leave --weights out. A folder that
    holds a trained run is refused without --resume or --overwrite.
    With --epochs 0 the model is evaluated, by --weights or --resume with
    trained weights, and no file is written.
    With --prune, training before the pruning uses bp, retraining --backward;
    the files of the retraining go to the folder "pruned" inside.

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
    options = _options(given | {"task": task, "threads": threads}, config)
    count = options.pop("threads", None)
    run = config_for(**options)
    transport = _transport(run)
    use_threads(count)
    folder = Path("runs", f"{run.task}-{run.model}") if out is None else out
    run_session(
        run, folder, weights=weights, resume=resume, overwrite=overwrite, compare=compare, every=checkpoint_every,
        as_json=json, transport=transport,
    )  # fmt: skip


def _transport(run: TrainConfig) -> Transport | None:
    """Return the connection with the other processes of mpiexec, or None."""
    if launched() is None:
        return None
    return connect(device=run.device, progress=run.schedule in (REPLICAS, FIRST_K))


def _options(given: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """Return the options given, and those of a file for the others."""
    options = {} if path is None else read_config(path)
    task = given["task"]
    if task is not None and options.get("task", task) != task:
        raise OptionError("The file is of another task", expected=options["task"], got=task)
    options |= {name: value for name, value in given.items() if value is not None}
    if "task" not in options and path is not None:
        raise OptionError("There is no task", expected="a task, or a file that names one", got="none",
                          remedy="Name a task: sparsebp train digits")  # fmt: skip
    if "task" not in options:
        raise typer.BadParameter("There is none, and no --config names one: sparsebp train digits", param_hint="TASK")
    if "threads" in options:
        options["threads"] = check_integer("threads", options["threads"], 1)
    return options


_COLUMNS = (
    *(tables.Column(name, name, number=False) for name in ("fusion", "schedule", "backward")),
    tables.Column("threads", "threads"),
    tables.Column("step", "step", tables.seconds),
    tables.Column("quartiles", "quartiles", lambda found: " – ".join(map(tables.seconds, found))),
    tables.Column("ratio", "over", lambda ratio: f"{ratio:.2f}×"),
)

_tune_run_options = run_options(
    "model", "hidden", "layers", "seq_len", "positions", "features", "width", "data", "samples", "batch_size",
    "optimizer", "clip_norm", "accumulate", "dtype",
)  # fmt: skip


@taking("given", _tune_run_options)
def tune(
    task: Annotated[Task, typer.Argument(help="The task, see sparsebp train.", **one_of(get_args(Task)))],
    *,
    given: dict[str, Any],
    fusion: Annotated[
        list[str] | None, choice_option("Try this one; once for each", get_args(Fusion), show_default="all")
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="Try this one; once for each.", show_default="conventional, ooo")
    ] = None,
    backward: Annotated[
        list[str] | None, choice_option("Try this one; once for each", BACKWARDS, show_default="bp, auto")
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Try this number; once for each.", show_default="1, all")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a row.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often each combination runs.")] = 5,
    out: Annotated[Path, out_option(f"For train --config, .toml or .json. {REPLACED}")] = Path("runs/tuned.toml"),
    json: JsonOption = False,
) -> None:
    """Time the options of a step on a model, and keep the fastest.

    Combinations of --fusion, --schedule, --backward and --threads run a few
    steps each, in turn. Prints a table, the fastest first, and why some are
    impossible. The fastest is written to a file for sparsebp train.

    \b
    Examples:
      sparsebp tune digits --model lenet5
      sparsebp tune digits --model densenet --out runs/densenet.toml
      sparsebp train --config runs/densenet.toml --epochs 2
      sparsebp tune bitstream --backward bp --backward chunked --threads 2 --json
    """
    given = {"task": task, **given}
    config = config_for(**given)
    tried = tuning.combinations(config, fusion or (), schedule or (), backward or (), threads or ())
    if out.suffix not in (".toml", ".json"):  # before any time is spent
        raise OptionError("The format of the file is unknown", expected=".toml or .json", got=out.suffix or "none")
    prepare_folder(out.parent)
    with progress_bar("combination", "; nothing was written") as told:
        trials = tuning.tune(given, tried, steps=steps, rounds=rounds, progress=told)
    best = trials[0]
    write_config(given | {"model": config.model} | dict(best.options), out)
    if json:
        for trial in trials:
            write_json({"event": "trial", **trial.to_json()})
        write_json({"event": "result", "best": dict(best.options), "config": str(out)})
        return
    _tune_print(trials, out)


def _tune_print(trials: list[Any], path: Path) -> None:
    fastest = trials[0].seconds.median
    print_table(_COLUMNS, [
        {**trial.options, "step": trial.seconds.median, "quartiles": trial.seconds.quartiles,
         "over": trial.seconds.median / fastest}
        for trial in trials if trial.seconds is not None
    ], "step: median time of a training step; ratio: to the fastest.")  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        if trial.refused is not None:
            reasons.setdefault(trial.refused, []).append("/".join(map(str, trial.options.values())))
    for reason, combined in reasons.items():
        print_line("refused", ", ".join(combined), 9)
        print_line("", reason, 9)
    print_line("written", f"{path}: sparsebp train --config {shlex.quote(str(path))}", 9)
