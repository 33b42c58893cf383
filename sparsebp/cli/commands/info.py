"""``sparsebp info``: devices, versions, threads, BLAS, and what ``auto`` would choose here."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any, Literal

import numpy as np

from sparsebp import __version__, backend
from sparsebp.cli.commands.common import JsonOption, print_line, write_json
from sparsebp.core.errors import DeviceError, MissingDependencyError

_PACKAGES = ("numpy", "scipy", "numba", "safetensors", "typer", "rich", "matplotlib", "mlxtend", "torch")
# cell, T, B, H: the paper's RNN and GRU, the demo's GRU, a long sequence in small batch, a wide layer
_SHAPES: tuple[tuple[Literal["rnn", "gru"], int, int, int], ...] = (
    ("rnn", 1000, 16, 20),
    ("gru", 517, 16, 20),
    ("gru", 784, 25, 32),
    ("rnn", 30_000, 1, 20),
    ("gru", 100, 32, 128),
)


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
    from sparsebp.scan.planning.recurrent import choose_recurrent_backward

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
    """Return the names of the CuPy wheels that are installed; each CUDA version has one of its own."""
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
    for entry in facts["auto"]:
        print_line("", f"{entry['model'].upper()}: {entry['reason']}", 9)
