"""``sparsebp info``, ``verify`` and ``warm-up``: facts of the installation, gradient checks, compiling ahead."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Annotated, Any, Literal

import numpy as np
import typer

from sparsebp import __version__
from sparsebp.cli.common import JsonOption, ThreadsOption, console, print_line, progress_bar, use_threads, write_json
from sparsebp.core import backend
from sparsebp.core.errors import DeviceError, MissingDependencyError
from sparsebp.train.config import Device

_PACKAGES = (
    "numpy", "scipy", "numba", "safetensors", "typer", "rich", "matplotlib", "mlxtend", "torch", "mpi4py", "mpich",
)  # fmt: skip
# cell, T, B, H: the paper's RNN and GRU, the demo's GRU, an LSTM as large, a long sequence in small batch, a wide layer
_SHAPES: tuple[tuple[Literal["rnn", "gru", "lstm"], int, int, int], ...] = (
    ("rnn", 1000, 16, 20), ("gru", 517, 16, 20), ("gru", 784, 25, 32), ("lstm", 784, 25, 32), ("rnn", 30_000, 1, 20),
    ("gru", 100, 32, 128),
)  # fmt: skip


def info(json: JsonOption = False) -> None:
    """Show devices, versions, threads and BLAS, and which backward `auto` would choose for a few shapes.

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
    from sparsebp.core.threads import thread_counts
    from sparsebp.scan.rules import choose_recurrent_backward

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
        "packages": {name: _version(name) for name in (*_PACKAGES, *_cupy_names())},
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


def _cupy_names() -> list[str]:
    """Return the names of the installed CuPy wheels, one per CUDA version."""
    return [name for name in ("cupy-cuda12x", "cupy-cuda13x", "cupy") if _version(name) is not None]


def _print(facts: dict[str, Any]) -> None:
    gpu = facts["gpu"]
    packages = (f"{name}\xa0{version or 'not installed'}" for name, version in facts["packages"].items())
    lines = {
        "CPU": f"{facts['cpu_count']} cores",
        "GPU": gpu["name"] if "name" in gpu else f"none: {gpu['none']}",
        "BLAS": facts["blas"],
        "threads": ", ".join(f"{name} {count}" for name, count in facts["threads"].items()),
        "packages": ", ".join(packages),
        "auto": "for the backward of recurrent layers in float32:",
    }
    print_line("", f"sparsebp {facts['sparsebp']}, Python {facts['python']}, {facts['platform']}", 0)
    for label, text in lines.items():
        print_line(label, text, 9)
    same = {entry["reason"] for entry in facts["auto"]}
    for entry in facts["auto"]:
        sizes = ", ".join(f"{name} {entry[name]}" for name in ("T", "B", "H"))
        why = "" if len(same) == 1 else f"; {entry['reason']}"
        print_line("", f"{entry['model'].upper()} ({sizes}): {entry['algorithm']}{why}", 9)
    if len(same) == 1:
        print_line("", same.pop(), 9)


# ``sparsebp verify``: does this installation compute right?


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
    from sparsebp.train import verify as checks

    use_threads(threads)
    with progress_bar("model") as told:
        reports = checks.self_check(seed, device=device, progress=told)
    failed = [name for name, report in reports.items() if not report.ok]
    if json:
        found = {name: report.to_json() for name, report in reports.items()}
        write_json({"event": "result", "ok": not failed, "reports": found})
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


def warm_up() -> None:
    """Compile all CPU kernels, for float32 and float64, and keep them on disk.

    Otherwise each is compiled at its first use, which takes a few seconds.

    \b
    Examples:
      sparsebp warm-up
    """
    from sparsebp.train import warm_up as work

    out, begin, jobs = console(), time.perf_counter(), list(work.jobs())
    for number, (name, job) in enumerate(jobs, 1):
        start = time.perf_counter()
        job()
        out.print(f"{number:>2} of {len(jobs)}: {name:<24} {time.perf_counter() - start:6.1f} s", markup=False)
    seconds = time.perf_counter() - begin
    out.print(f"All kernels are ready after {seconds:.1f} s, kept below {work.folder()}", markup=False)
