"""``sparsebp tune``: which order of a step, backward and threads are the fastest for a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sparsebp.bench.tools import report
from sparsebp.cli.commands.common import (
    JsonOption,
    choice_option,
    enumeration,
    out_option,
    print_line,
    print_table,
    progress_bar,
    taking,
    write_json,
)
from sparsebp.cli.commands.run_options import Task, run_options
from sparsebp.core.errors import OptionError
from sparsebp.core.types import BACKWARDS
from sparsebp.schedule.builders import Fusion

_COLUMNS = (
    *(report.Column(name, name, number=False) for name in ("fusion", "schedule", "backward")),
    report.Column("threads", "threads"),
    report.Column("step", "step", report.seconds),
    report.Column("quartiles", "quartiles", lambda found: " – ".join(map(report.seconds, found))),
    report.Column("over the fastest", "over", lambda ratio: f"{ratio:.2f}×"),
)

_FUSIONS = enumeration("Fusion", get_args(Fusion))
_BACKWARDS = enumeration("Backward", BACKWARDS)


_run_options = run_options(
    "model", "hidden", "layers", "seq_len", "features", "width", "data", "samples", "batch_size", "optimizer",
    "clip_norm", "accumulate", "dtype",
)  # fmt: skip


@taking("given", _run_options)
def tune(
    task: Annotated[Task, typer.Argument(help="The task, see sparsebp train.")],
    *,
    given: dict[str, Any],
    fusion: Annotated[
        list[_FUSIONS] | None,  # type: ignore[valid-type]
        choice_option("Try this one; once for each", _FUSIONS, show_default="all"),
    ] = None,
    schedule: Annotated[
        list[str] | None, typer.Option(help="Try this one; once for each.", show_default="conventional, ooo")
    ] = None,
    backward: Annotated[
        list[_BACKWARDS] | None,  # type: ignore[valid-type]
        choice_option("Try this one; once for each", _BACKWARDS, show_default="bp, auto"),
    ] = None,
    threads: Annotated[
        list[int] | None, typer.Option(min=1, help="Try so many; once for each.", show_default="1, all")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in a row.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="How often each combination runs.")] = 5,
    out: Annotated[Path, out_option("The file for sparsebp train --config, .toml or .json.")] = Path("runs/tuned.toml"),
    json: JsonOption = False,
) -> None:
    """Try combinations of --fusion, --schedule, --backward and threads on a model, a few steps each, in turn.

    Prints a table, the fastest first, and what cannot be combined with the
    reason. The fastest is written into a file for sparsebp train.

    \b
    Examples:
      sparsebp tune digits --model lenet5
      sparsebp tune digits --model densenet --out runs/densenet.toml
      sparsebp train --config runs/densenet.toml --epochs 2
      sparsebp tune bitstream --backward bp --backward chunked --threads 2 --json
    """
    from sparsebp.core.files import prepare_folder
    from sparsebp.recipes import tune as tuning
    from sparsebp.recipes.config_file import write_config
    from sparsebp.recipes.recipe import config_for

    given = {"task": task, **given}
    config = config_for(**given)
    tried = tuning.combinations(config, map(str, fusion or ()), schedule or (), map(str, backward or ()), threads or ())
    if out.suffix not in (".toml", ".json"):  # before any time is spent
        raise OptionError("The format of the file is unknown", expected=".toml or .json", got=out.suffix or "none",
                          remedy="Give --out one of these suffixes")  # fmt: skip
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
    _print(trials, out)


def _print(trials: list[Any], path: Path) -> None:
    fastest = trials[0].seconds.median
    print_table(_COLUMNS, [
        {**trial.options, "step": trial.seconds.median, "quartiles": trial.seconds.quartiles,
         "over": trial.seconds.median / fastest}
        for trial in trials if trial.seconds is not None
    ])  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for trial in trials:
        if trial.refused is not None:
            reasons.setdefault(trial.refused, []).append("/".join(map(str, trial.options.values())))
    for reason, combined in reasons.items():
        print_line("refused", ", ".join(combined), 9)
        print_line("", reason, 9)
    print_line("written", f"{path}: sparsebp train --config {path}", 9)
