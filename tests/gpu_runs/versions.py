"""Prints, as JSON, what a run stands on: device, packages, tools; returns 1 where there is no GPU to run on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gpu_runs.carried import CACHE, sanitizer, unpack
from sparsebp.bench.tools.environment import environment

PACKAGES = (
    "numpy", "scipy", "numba", "llvmlite", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "nvidia-cuda-nvrtc",
    "pytest", "pytest-xdist", "hypothesis", "threadpoolctl", "safetensors", "typer", "rich", "matplotlib",
)  # fmt: skip

TRIED = {
    "numba": "import numba; numba.njit(lambda x: x + 1)(1); print('compiles')",
    "torch": "import torch; print(torch.version.cuda, torch.cuda.is_available(), torch.backends.cudnn.version())",
    "cupy": "import cupy; print(float((cupy.arange(5.0) @ cupy.arange(5.0)) + cupy.ones(3).sum()))",
}
"""Packages that may be there and not work, with some Python that shows it."""


def main() -> int:
    """Print what is here."""
    found: dict[str, Any] = {"cache": unpack(), "carried": sorted(path.name for path in CACHE.iterdir())}
    found["python"], found["packages"] = sys.version, {name: _version(name) for name in PACKAGES}
    found["tools"] = {name: shutil.which(name) for name in ("nvcc", "ncu", "nvidia-smi", "g++", "git")}
    found["tools"]["compute-sanitizer"] = str(sanitizer())
    with ThreadPoolExecutor() as pool:  # the first imports on a machine take their time
        found |= dict(zip(TRIED, pool.map(_tried, TRIED.values()), strict=True))
    try:
        found["environment"] = environment()
    except Exception as error:  # the rest is worth knowing all the more
        found["environment"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found, indent=1, ensure_ascii=False))
    gpu = found["environment"].get("gpu") if isinstance(found["environment"], dict) else None
    if gpu is None:
        print("no GPU answers CuPy: nothing can be run here")
        return 1
    print(f"{gpu['name']}, compute capability {gpu['compute_capability']}, driver {gpu['driver']}, "
          f"CuPy {found['cupy']}, Numba {found['numba']}, torch {found['torch']}, {os.cpu_count()} cores")  # fmt: skip
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tried(code: str) -> str:
    """Return what some Python prints, or the end of what it complains about."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "does not answer"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
