"""``sparsebp bench``: hands over to the benchmarks in `sparsebp.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sparsebp.bench import NAMES, load
from sparsebp.cli.commands.common import JsonOption, enumeration, out_option, write_json

Benchmark = enumeration("Benchmark", NAMES)


def bench(
    benchmark: Annotated[Benchmark, typer.Argument(help="What to measure.")],  # type: ignore[valid-type]
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
    """Measure sparsebp beside a peer, in turn in one run, and print the ratio with its spread.

    Exits with 1 if a row could not be measured; all others are in the result.

    \b
    Examples:
      sparsebp bench recurrent --threads 1 --threads 2
      sparsebp bench spgemm --out docs/benchmarks
      sparsebp bench scan --quick --json
    """
    silent = {"echo": lambda line: None} if json else {}
    counts = tuple(threads) if threads else None
    result = load(str(benchmark)).run(out, quick=quick, threads=counts, seconds=seconds, **silent)
    if json:
        write_json({"event": "result", **result})
    if any("error" in row for row in result["rows"]):
        raise typer.Exit(1)
