"""Where and on what a benchmark ran: processor, GPU, threads, versions, commit, date; what its memory can do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.machine import cpu_model

_PACKAGES = (
    "numpy", "scipy", "numba", "torch", "cupy-cuda12x", "cupy-cuda13x", "python-graphblas", "mkl", "jax", "onnxruntime",
)  # fmt: skip

_COPIED = 1 << 27
"""Bytes of each array: several times the last cache."""


def environment() -> dict[str, Any]:
    """Return the record that every benchmark writes beside its numbers."""
    from sparsebp import __version__

    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": total_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sparsebp": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "blas": _blas(),
    }
    if hasattr(os, "getloadavg"):
        record["load_at_start"] = round(os.getloadavg()[0], 2)
    if backend.has_gpu():
        record["gpu"] = _gpu()
    return record


def commit() -> str:
    """Return the source tree's commit, short, with ``+`` if files of the package differ from it.

    In a copy without its history, an installed one among them, even if it lies inside another repository: the
    environment variable ``SPARSEBP_COMMIT``, else ``unknown``.
    """
    root = Path(__file__).resolve().parents[2]
    try:
        git = ["git", "-C", str(root)]
        subprocess.run([*git, "ls-files", "--error-unmatch", "__init__.py"], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "."],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPARSEBP_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def total_memory() -> int | None:
    """Return the machine's memory in bytes, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory() -> int | None:
    """Return the bytes of memory that can be had now (Linux: ``MemAvailable``), or None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


@cache
def copy_bandwidth(threads: int, repeats: int = 7) -> float:
    """Return the bytes a second that `threads` threads read and write while they copy, the best of `repeats`."""
    source, target = np.ones(_COPIED // 8), np.ones(_COPIED // 8)
    halves = [*zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)]
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            begin = time.perf_counter()
            for done in [pool.submit(np.copyto, *half) for half in halves]:
                done.result()
            best = min(best, time.perf_counter() - begin)
    return 2 * _COPIED / best


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _blas() -> str:
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found.get('name')} {found.get('version')}"


def _gpu() -> dict[str, Any]:
    cupy = backend.cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    record: dict[str, Any] = {
        "name": properties["name"].decode(),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "clock_hz": int(properties["clockRate"]) * 1000 if "clockRate" in properties else None,
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": int(cupy.cuda.runtime.driverGetVersion()),
        "runtime": int(cupy.cuda.runtime.runtimeGetVersion()),
    }
    try:
        import torch

        record["cudnn"] = torch.backends.cudnn.version()
    except ImportError:
        pass
    except Exception as error:  # a broken installation raises anything, and the GPU is there all the same
        record["cudnn"] = f"{type(error).__name__}: {error}"
    return record
