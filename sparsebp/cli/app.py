"""The application, and its commands on the installation: ``info``, ``verify`` and ``warm-up``.

Importing this needs typer and rich; `sparsebp.cli.main.main` checks for them first.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Annotated, Any, Literal

import numpy as np
import typer

from sparsebp import __version__
from sparsebp import warm_up as kernels_ahead
from sparsebp.cli.common import JsonOption, ThreadsOption, make_app, print_table, progress_bar, use_threads, write_json
from sparsebp.cli.demo import demo
from sparsebp.cli.schedule import schedule_app
from sparsebp.cli.train import prune, train, tune
from sparsebp.core import backend, tables
from sparsebp.core.errors import DeviceError, MissingDependencyError
from sparsebp.core.threads import thread_counts
from sparsebp.scan.rules import choose_recurrent_backward
from sparsebp.train import verify as checks
from sparsebp.train.config import Device

_PACKAGES = (
    "numpy", "scipy", "numba", "safetensors", "typer", "rich", "matplotlib", "mlxtend", "torch", "mpi4py", "mpich",
)  # fmt: skip
_CUPY = ("cupy-cuda12x", "cupy-cuda13x", "cupy")  # wheels, one per CUDA version
# cell, T, B, H: the paper's RNN and GRU, the demo's GRU, an LSTM as large, a long sequence in small batch, a wide layer
_SHAPES: tuple[tuple[Literal["rnn", "gru", "lstm"], int, int, int], ...] = (
    ("rnn", 1000, 16, 20), ("gru", 517, 16, 20), ("gru", 784, 25, 32), ("lstm", 784, 25, 32), ("rnn", 30_000, 1, 20),
    ("gru", 100, 32, 128),
)  # fmt: skip


def info(json: JsonOption = False) -> None:
    """Show devices, threads and versions, and what `auto` chooses.

    \b
    Examples:
      sparsebp info
      sparsebp info --json
    """
    facts = collect()
    if json:
        write_json(facts)
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """Return the facts as a dict that JSON can hold."""
    gpu = _gpu()
    modules = {"cpu": np} if "name" not in gpu else {"cpu": np, "cuda": backend.cupy()}
    choices = []
    for device, xp in modules.items():
        for cell, steps, batch, hidden in _SHAPES:
            choice = choose_recurrent_backward(cell, steps, batch, hidden, np.float32, xp)
            choices.append(
                {"device": device, "model": cell, "T": steps, "B": batch, "H": hidden}
                | {"algorithm": choice.algorithm, "reason": choice.reason}
            )
    return {
        "sparsebp": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpu": gpu,
        "packages": {name: _version(name) for name in (*_PACKAGES, *filter(_version, _CUPY))},
        "blas": np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"],
        "threads": thread_counts(),
        "auto": choices,
    }


def _gpu() -> dict[str, str]:
    try:
        cupy = backend.cupy()
    except (MissingDependencyError, DeviceError) as error:
        return {"none": str(error)}
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {"name": properties["name"].decode(), "compute_capability": f"{properties['major']}.{properties['minor']}"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print(facts: dict[str, Any]) -> None:
    gpu = facts["gpu"]
    parts: dict[str, dict[str, Any]] = {
        "machine": {
            "platform": facts["platform"], "CPU cores": facts["cpu_count"], "BLAS": facts["blas"],
            "GPU": gpu.get("name", "none"),
        },
        "threads": {name.partition("-")[0]: count for name, count in facts["threads"].items()},
        "version": {name: facts[name] for name in ("sparsebp", "python")} | facts["packages"],
        "auto": {"{device} {model} T{T} B{B} H{H}".format(**entry): entry["algorithm"] for entry in facts["auto"]},
    }  # fmt: skip
    rows = [{"about": about, "item": item, "value": "not installed" if value is None else value}
            for about, part in parts.items() for item, value in part.items()]  # fmt: skip
    reasons = "; ".join(dict.fromkeys(entry["reason"] for entry in facts["auto"]))
    print_table([tables.Column(name, name, number=False) for name in ("about", "item", "value")], rows,
                f"auto: the backward of float32 layers with T steps, B samples, H units. {reasons}. "
                + gpu.get("none", ""))  # fmt: skip


# ``sparsebp verify``: does this installation compute right?

_CHECKED = (
    tables.Column("", "verdict", number=False), tables.Column("model", "model", number=False),
    tables.Column("scan", "scan", "{:.0e}".format), tables.Column("finite", "finite", "{:.0e}".format),
)  # fmt: skip


def verify(
    seed: Annotated[int, typer.Option(min=0, help="Seed of the models and their data.")] = 0,
    details: Annotated[bool, typer.Option("--details", help="Show every check.")] = False,
    device: Annotated[Device, typer.Option(help="Where to compute.")] = "cpu",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Check gradients by scan, by back-propagation and by differences.

    Small models of every kind, in float32 and float64, in evaluation and in
    training: scans are compared with plain back-propagation, and that with
    finite differences. Exit code 1 if a difference is beyond its tolerance.

    \b
    Examples:
      sparsebp verify
      sparsebp verify --details
      sparsebp verify --device cuda
      sparsebp verify --json
    """
    use_threads(threads)
    with progress_bar("model") as told:
        reports = checks.self_check(seed, device=device, progress=told)
    failed = [name for name, report in reports.items() if not report.ok]
    if json:
        found = {name: report.to_json() for name, report in reports.items()}
        write_json({"event": "result", "ok": not failed, "reports": found})
    else:
        print_table(_CHECKED, [
            {"verdict": "ok" if report.ok else "DIFFERS", "model": name, "scan": report.max_scan_difference,
             "finite": report.max_finite_difference} for name, report in reports.items()
        ], "Largest relative difference of a gradient from plain back-propagation. scan: of the scans; finite: of "
        "finite differences.")  # fmt: skip
        for name, report in reports.items() if details else ():
            typer.echo(f"\n{name}\n{report}")
        agree = len(reports) - len(failed)
        typer.echo(f"{agree} of {len(reports)} models: gradients agree within their tolerances")
    if failed:
        raise typer.Exit(1)


def warm_up() -> None:
    """Compile all CPU kernels ahead, and keep them on disk.

    For float32 and float64, on all cores. Otherwise each is compiled at its first use, which takes a few seconds.

    \b
    Examples:
      sparsebp warm-up
    """
    begin = time.perf_counter()
    with progress_bar("kernel group", "; what was compiled is kept", lines=True) as told:
        kernels_ahead.compile_all(told)
    typer.echo(f"All kernels are ready after {time.perf_counter() - begin:.1f} s, kept below {kernels_ahead.folder()}")


app = make_app((train, tune, prune, demo, verify, warm_up, info), {"schedule": schedule_app})

__all__ = ["app"]
