"""``sparsebp verify``: does this installation compute right?"""

from __future__ import annotations

from typing import Annotated

import typer

from sparsebp.cli.commands.common import (
    JsonOption,
    ThreadsOption,
    console,
    print_line,
    progress_bar,
    use_threads,
    write_json,
)
from sparsebp.recipes.config import Device


def verify(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the models and their data.")] = 0,
    details: Annotated[bool, typer.Option("--details", help="Show every check.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "cpu",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Check gradients: scans against plain back-propagation, both against finite differences.

    Small models of every kind, in float32 and float64. Exit code 1 if a
    difference is beyond its tolerance.

    \b
    Examples:
      sparsebp verify
      sparsebp verify --details
      sparsebp verify --device cuda
      sparsebp verify --json
    """
    from sparsebp.recipes import verify as checks

    use_threads(threads)
    with progress_bar("model") as told:
        reports = checks.self_check(seed, device=device, progress=told)
    failed = [name for name, report in reports.items() if not report.ok]
    if json:
        write_json(
            {
                "event": "result",
                "ok": not failed,
                "reports": {name: report.to_json() for name, report in reports.items()},
            }
        )
    else:
        out = console()
        for name, report in reports.items():
            scan, finite = f"{report.max_scan_difference:.1e}", f"{report.max_finite_difference:.1e}"
            verdict = "ok" if report.ok else "DIFFERS"
            print_line(verdict, f"{name:<60} scan\xa0{scan}\xa0\xa0 finite\xa0differences\xa0{finite}", 9)
            if details:
                out.print(f"{report}\n", markup=False)
        agree = len(reports) - len(failed)
        print_line("", f"{agree} of {len(reports)} models: gradients agree within their tolerances", 0)
    if failed:
        raise typer.Exit(1)
