"""One training session: train with progress, report, leave files. Shared by ``train`` and ``demo``."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from sparsebp.cli.commands.common import console, print_line, write_json
from sparsebp.cli.commands.interrupted import Position
from sparsebp.core.errors import OptionError
from sparsebp.core.files import json_line, output_error, write_atomically
from sparsebp.recipes import Comparison
from sparsebp.recipes.compare import Agreement, compare_histories, gradient_agreement
from sparsebp.recipes.config import TrainConfig
from sparsebp.recipes.recipe import Run, build, build_retraining, prunes
from sparsebp.train import JsonLines, ProgressBar, save_loss_curve
from sparsebp.train.arrays import batch_of
from sparsebp.train.checkpoint import FILE_NAME, load_checkpoint, save_checkpoint
from sparsebp.train.run_folder import run_folder, set_aside

if TYPE_CHECKING:
    from sparsebp.distributed.timeline import Timeline
    from sparsebp.distributed.transport import Transport
    from sparsebp.nn import PruneReport

START_NAME = "start.safetensors"
STEP_NAME = "step.png"
_AGREEMENT_BATCH = 8  # samples: the stored Jacobians of `blelloch` stay below some hundred MB


def run(
    config: TrainConfig,
    folder: Path,
    *,
    weights: Path | None = None,
    resume: bool = False,
    compare: bool = False,
    agreement: bool = False,
    every: int | None = None,
    as_json: bool = False,
    transport: Transport | None = None,
) -> dict[str, Any]:
    """Train `config`, print what came out, and return it.

    Parameters
    ----------
    config
        The run.
    folder
        Takes ``checkpoint.safetensors``, ``result.json`` and, last and where matplotlib is installed, ``loss.png``; if
        that cannot be written, there is a warning. A pipeline on several ranks leaves ``step.png`` besides: when the
        actions of its last whole step ran, measured and simulated. A run that
        prunes keeps the training before that there, and writes the pruned network into the folder ``pruned`` inside.
    weights
        A checkpoint, or its folder, whose weights and pruning masks to start from; copied to ``start.safetensors``.
    resume
        Go on from the folder's checkpoint.
    compare
        Train a second time with plain back-propagation; of a run that prunes, retrain a second time.
    agreement
        Compare the scans' gradients with plain back-propagation on a test batch.
    every
        Steps between checkpoints within an epoch.
    as_json
        JSON lines on standard output instead of text.
    transport
        Between several ranks, all of which call this. Rank 0 prints, writes and returns the result; on the others it is
        empty.

    Raises
    ------
    OptionError
        Both `weights` and `resume` are given; several ranks are to compare, or to prune; or plain back-propagation
        would be compared with itself.
    FileFormatError
        There is nothing to resume in `folder`.
    OutputError
        Another run holds `folder`, or it cannot be written.
    Interrupted
        Ctrl-C, with the step, and whether there is a checkpoint to go on from.
    """
    if weights is not None and resume:
        raise OptionError(
            "A run that resumes has weights already", expected="--weights or --resume", got="both",
            remedy="Leave --weights out: the folder's checkpoint holds what the run has made of them",
        )  # fmt: skip
    leads = transport is None or transport.rank == 0
    if transport is not None:
        _check_on_ranks(config, compare)
    position = Position(resumed=resume)
    with position.told(), run_folder(folder if leads else None, resume=resume):
        callbacks = [JsonLines(sys.stdout) if as_json else ProgressBar()]
        files: dict[str, Any] = {"callbacks": callbacks, "checkpoint_dir": folder, "checkpoint_every": every}
        start = folder / START_NAME
        if resume and leads and start.exists():
            weights = start
        if transport is not None:
            weights = transport.broadcast(weights)
        session = dense = build(config, weights=weights, transport=transport, **files)
        position.follow(session)
        if compare:
            _check_comparison(session, config)
        if not leads:
            session.fit(resume=resume)
            _timeline(session, transport)
            return {}
        if weights is None:
            _remove(start)
        elif weights != start:  # a copy: what was given may be the checkpoint that this run is about to replace
            save_checkpoint(start, load_checkpoint(weights))
        inner = folder / "pruned"
        if prunes(config) and not resume:  # of another run: never go on from it
            set_aside(inner)
            _remove(inner / FILE_NAME)
        session.fit(resume=resume)
        timeline = _timeline(session, transport)
        pruning: dict[str, Any] = {}
        if prunes(config):
            folder = inner
            session, report = build_retraining(config, dense, **(files | {"checkpoint_dir": folder}))
            position.follow(session)
            pruning = _pruned(dense, session, report, as_json)
            session.fit(resume=resume and (inner / FILE_NAME).exists())
        x = _batch(session, min(config.batch_size, len(session.train_set)))[0]
        choice = config.backward_of(session.trainer.model, x)
        result: dict[str, Any] = {
            "config": dataclasses.asdict(config),
            **({} if transport is None else {"ranks": transport.size}),
            **_measured(session),
            "backward": choice,
            **_schedule(session),
            **pruning,
            "checkpoint": str(folder / FILE_NAME),
            "picture": str(folder / "loss.png") if _draws(session) else None,
        }
        if timeline is not None:
            result["step"] = _step(timeline, folder if _draws(session) else None)
        if agreement:
            batch = _batch(session, min(_AGREEMENT_BATCH, len(session.test_set)))
            result["agreement"] = [
                a.to_json() for a in gradient_agreement(config, session.trainer.model, session.trainer.loss, batch)
            ]
        if compare:
            comparison, sequential = _compare(session, dense, choice["algorithm"], start if start.exists() else None)
            result["comparison"] = comparison.to_json()
            result["sequential_test_accuracy"] = sequential.trainer.evaluate(sequential.test_set)[1]
        write_atomically(folder / "result.json", (json_line(result, indent=2) + "\n").encode())
        if as_json:
            write_json({"event": "result", **result})
        else:
            _print(result)
        if result["picture"] is not None:
            _draw(session, Path(result["picture"]))
        if timeline is not None and result["step"]["picture"] is not None:
            _draw_timeline(timeline, Path(result["step"]["picture"]))
        return result


def _check_on_ranks(config: TrainConfig, compare: bool) -> None:
    for wrong, problem, name in (
        (compare, "A comparison trains once more, in one process", "--compare"),
        (prunes(config), "Pruning and retraining is for one process", "--prune"),
    ):
        if wrong:
            raise OptionError(problem, expected="one process", got="several ranks", remedy=f"Leave {name} out")


def _check_comparison(session: Run, config: TrainConfig) -> None:
    """Refuse, before anything is trained, to compare plain back-propagation with itself."""
    got = "--backward bp"
    if config.backward == "auto" and not prunes(config):
        model = session.trainer.model.eval()  # so that no dropout is drawn
        choice = config.backward_of(model, _batch(session, config.batch_size)[0])
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


def _batch(session: Run, size: int) -> tuple[Any, Any]:
    return batch_of(session.test_set, np.arange(min(size, len(session.test_set))), session.trainer.model)


def _measured(session: Run) -> dict[str, Any]:
    loss, accuracy = session.trainer.evaluate(session.test_set)
    history = session.trainer.history
    return {
        "steps": history.steps,
        "training_seconds": sum(history.seconds),
        "test_loss": loss,
        "test_accuracy": accuracy,
    }


def _pruned(dense: Run, session: Run, report: PruneReport, as_json: bool) -> dict[str, Any]:
    """Report a pruning that has not been retrained yet, and return what the result says of it."""
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
    """Say whether there is a loss curve to draw, and matplotlib: training needs no more than its extra ``cli``."""
    return importlib.util.find_spec("matplotlib") is not None and session.trainer.history.steps > 0


def _draw(session: Run, path: Path) -> None:
    """Draw the loss curve, or warn that it cannot be: what was trained and written is as good without it."""
    try:
        save_loss_curve(session.trainer.history, path, title=session.config.title)
    except Exception as error:  # Matplotlib writes caches of its own: errors of any kind
        typer.echo(f"Warning: The loss curve was not drawn. {error}", err=True)


def _timeline(session: Run, transport: Transport | None) -> Timeline | None:
    """Return when the last whole step's actions ran on all ranks; None where no pipeline has run on the CPUs."""
    schedule = session.trainer.current_schedule
    if transport is None or schedule is None or schedule.workers != transport.size or session.config.device != "cpu":
        return None
    from sparsebp.distributed.timeline import measured

    return measured(transport, schedule, session.trainer.times)


def _step(timeline: Timeline, folder: Path | None) -> dict[str, Any]:
    simulated = timeline.simulated()
    return {
        "seconds": timeline.makespan, "idle": timeline.bubble, "simulated_seconds": simulated.makespan,
        "simulated_idle": simulated.bubble, "clock_uncertainty": timeline.uncertainty,
        "picture": None if folder is None else str(folder / STEP_NAME),
    }  # fmt: skip


def _draw_timeline(timeline: Timeline, path: Path) -> None:
    from sparsebp.distributed.timeline import save_timeline

    try:
        save_timeline(timeline, path)
    except Exception as error:
        typer.echo(f"Warning: The picture of a step was not drawn. {error}", err=True)


def _schedule(session: Run) -> dict[str, Any]:
    """Return what is to be said of a schedule that was found in the first steps."""
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


def _print(result: dict[str, Any]) -> None:
    def line(label: str, text: str) -> None:
        print_line(label, text, 15)

    if "pruning" in result:
        line("before pruning", _scores(result["before_pruning"]))
        line(
            "pruned",
            f"{result['pruning']['sparsity']:.2%} of the weights; test accuracy at once "
            f"{result['test_accuracy_at_once']:.4f}",
        )
    line("test accuracy", _scores(result))
    line("backward plan", result["backward"]["reason"])
    if "schedule" in result:
        line("schedule", result["schedule"]["reason"])
    if "step" in result:
        step = result["step"]
        drawn = "" if step["picture"] is None else f": {step['picture']}"
        line(
            "last step",
            f"{1e3 * step['seconds']:.3g} ms on {result['ranks']} ranks, idle {step['idle']:.0%}; simulated with the "
            f"same durations {1e3 * step['simulated_seconds']:.3g} ms, idle {step['simulated_idle']:.0%}{drawn}",
        )
    for entry in result.get("agreement", ()):
        agreed = Agreement(**entry)
        line(
            "agreement",
            f"{agreed.algorithm} against plain back-propagation: relative difference of the "
            f"gradients {agreed.relative_difference:.2e}, largest {agreed.largest_difference:.2e} ({agreed.parameter})",
        )
    if "comparison" in result:
        entry = {name: value for name, value in result["comparison"].items() if name != "time_ratio"}
        line("comparison", Comparison(**entry).describe())
        line("sequential", f"test accuracy {result['sequential_test_accuracy']:.4f}")
    if result["steps"] == 0:
        line("loss curve", "not drawn: no step was taken")
    elif result["picture"] is None:
        line("loss curve", "not drawn: matplotlib is not installed (extra: plot)")
    else:
        line("loss curve", result["picture"])
    line("checkpoint", result["checkpoint"])
