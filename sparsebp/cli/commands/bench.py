"""``sparsebp bench``: hands over to the benchmarks in `sparsebp.bench`."""

from __future__ import annotations

import enum
import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebp.cli.commands.common import JsonOption, out_option, write_json
from sparsebp.core.errors import OptionError


class Benchmark(enum.StrEnum):
    """What to measure; a module of `sparsebp.bench` each."""

    recurrent = "recurrent"
    scan = "scan"
    spgemm = "spgemm"
    jacobian = "jacobian"
    convergence = "convergence"
    pruned = "pruned"
    optim = "optim"
    fusion = "fusion"
    schedule = "schedule"
    busy = "busy"
    estimates = "estimates"
    gpu = "gpu"


def bench(
    benchmark: Annotated[Benchmark, typer.Argument(help="What to measure.")],
    out: Annotated[Path | None, out_option("Folder for the JSON and the picture.", show_default="runs/bench")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: a smoke test.")] = False,
    threads: Annotated[
        list[int] | None, typer.Option("--threads", min=1, help="Thread counts to measure; give it once for each.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure sparsebp beside a peer, in turn in one run, and print the ratio with its spread.

    \b
    Examples:
      sparsebp bench recurrent --threads 1 --threads 2
      sparsebp bench spgemm --out docs/benchmarks
      sparsebp bench scan --quick --json
    """
    run = importlib.import_module(f"sparsebp.bench.{benchmark.value}").run
    options: dict[str, Any] = {"out": out, "quick": quick}
    if threads:
        if "threads" not in inspect.signature(run).parameters:
            raise OptionError(
                f"The benchmark {benchmark.value} does not vary threads",
                expected="no --threads",
                got=", ".join(map(str, threads)),
                remedy="Leave the option out",
            )
        options["threads"] = tuple(threads)
    if json:
        options["echo"] = _quiet
    result = run(**options)
    if json:
        write_json({"event": "result", **result})


def _quiet(line: str = "") -> None:
    """Take a line of text and print nothing."""
