"""``python -m benchmarks NAME …``: runs benchmarks, and says which rows miss their targets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks import NAMES, harness, load
from sparsebp.cli.common import (
    Interrupted,
    JsonOption,
    make_program,
    one_of,
    out_option,
    print_line,
    print_table,
    write_json,
)
from sparsebp.core import backend, tables
from sparsebp.core.errors import OptionError
from sparsebp.core.files import prepare_folder

if TYPE_CHECKING:
    from benchmarks.processes import Outcome

ALL = "all"
_COLUMNS = (
    tables.Column("benchmark", "name", number=False), tables.Column("rows", "rows"),
    tables.Column("miss their target", "missed", lambda rows: str(len(rows))),
    tables.Column("time", "minutes"), tables.Column("", "state", number=False),
)  # fmt: skip


def bench(
    benchmarks: Annotated[
        list[str],
        typer.Argument(
            help=f"What to measure: {', '.join(NAMES)}; all is every one.", show_default=False, **one_of((*NAMES, ALL))
        ),
    ],
    out: Annotated[Path | None, out_option("Folder for the JSON and the picture.", show_default="runs/bench")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a smoke test.")] = False,
    threads: Annotated[
        list[int] | None, typer.Option("--threads", min=1, help="Thread counts to measure; give it once for each.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=1, help="Time that a benchmark on a GPU may take.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure sparsebp and a peer in turn, and print the ratio with its spread.

    Several, or all, run one after the other, each in its own process; then the
    rows that miss their targets are printed.
    Exits with 1 if a row could not be measured; all others are in the result.

    \b
    Examples:
      python -m benchmarks recurrent --threads 1 --threads 2
      python -m benchmarks spgemm --out docs/benchmarks
      python -m benchmarks scan --quick --json
      python -m benchmarks all --out docs/benchmarks
    """
    names = list(dict.fromkeys(benchmarks))
    if names == [ALL] or len(names) > 1:
        if threads or seconds is not None:
            raise OptionError("Several benchmarks run with their own threads and times", expected="one benchmark",
                              got=", ".join(names), remedy="Leave --threads and --seconds out")  # fmt: skip
        _series(names, out, quick, json)
        return
    silent = {"echo": lambda line: None} if json else {}
    counts = tuple(threads) if threads else None
    result = load(names[0]).run(out, quick=quick, threads=counts, seconds=seconds, **silent)
    if json:
        write_json({"event": "result", **result})
    if any("error" in row for row in result["rows"]):
        raise typer.Exit(1)


def _series(names: Sequence[str], out: Path | None, quick: bool, json: bool) -> None:
    from benchmarks import processes

    prepare_folder(harness.DEFAULT_FOLDER if out is None else out)  # before the first of a night's runs
    chosen = list(NAMES) if ALL in names else list(names)
    for left, why in _impossible() if ALL in names else ():
        chosen = [name for name in chosen if name not in left]
        _say(json, "left out", "left out", ", ".join(left), why)
    begin, current = time.monotonic(), "before the first benchmark"

    def told(number: int, last: float | None) -> None:
        nonlocal current
        current = f"at benchmark {number + 1} of {len(chosen)}, {chosen[number]}"
        before = "" if last is None else f", {_minutes(last)} the last time"
        _say(json, "begin", f"{number + 1} of {len(chosen)}", chosen[number],
             f"{_minutes(time.monotonic() - begin)} so far{before}")  # fmt: skip

    try:
        outcomes = processes.run_series(chosen, out, quick=quick, json=json, told=told)
    except KeyboardInterrupt as error:
        raise Interrupted(f"{current}; those before it are whole") from error
    _summary(outcomes, time.monotonic() - begin, json)
    if not all(outcome.done for outcome in outcomes):
        raise typer.Exit(1)


def _impossible() -> Iterator[tuple[list[str], str]]:
    """Yield benchmarks that cannot run here, and why."""
    from benchmarks import others

    if not backend.has_gpu():
        yield [name for name in NAMES if name.startswith("gpu")], "there is no GPU here"
    if not others.installed():
        yield ["others", "others-speech"], f"no library of theirs is installed: {', '.join(others.LIBRARIES)}"


def _summary(outcomes: Sequence[Outcome], seconds: float, json: bool) -> None:
    if json:
        write_json({"event": "summary", "seconds": round(seconds, 1), "benchmarks": [o.to_dict() for o in outcomes]})
        return
    typer.echo("\n==== rows that miss their targets")
    for outcome in outcomes:
        for row in outcome.missed:
            print_line(outcome.name, row, 18)
    typer.echo()
    print_table(_COLUMNS, [{**outcome.to_dict(), "minutes": _minutes(outcome.seconds)} for outcome in outcomes])
    failed = [outcome.name for outcome in outcomes if not outcome.done]
    typer.echo(f"{len(outcomes)} benchmarks in {_minutes(seconds)}; failed: {', '.join(failed) or 'none'}")


def _say(json: bool, event: str, place: str, name: str, what: str) -> None:
    if json:
        write_json({"event": event, "place": place, "benchmark": name, "what": what})
    else:
        typer.echo(f"\n==== {place}: {name} ({what})")


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


app = make_program(bench)
