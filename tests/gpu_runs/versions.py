"""Prints what a run stands on, JSON, a line a fact: device, packages, tools; returns 1 where there is no GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from benchmarks.harness import environment
from gpu_runs.carried import CACHE, sanitizer, unpack
from sparsebp.core import backend

PACKAGES = (
    "numpy", "scipy", "numba", "llvmlite", "cupy-cuda13x", "cupy-cuda12x", "torch", "jax", "nvidia-cuda-nvrtc",
    "pytest", "pytest-xdist", "hypothesis", "threadpoolctl", "safetensors", "typer", "rich", "matplotlib",
)  # fmt: skip

TRIED = {
    "numba": "import numba; numba.njit(lambda x: x + 1)(1); print(numba.__version__)",
    "torch": "import torch; print(torch.__version__, torch.cuda.is_available(), torch.backends.cudnn.version())",
    "cupy": "import cupy; float(cupy.arange(5.0) @ cupy.arange(5.0)); print(cupy.__version__)",
}
"""Packages that may be there and not work, with some Python that shows it."""


SECONDS = 20
"""That such a package has; the whole stage has twice as many."""


def main(quick: bool = False) -> int:
    """Print what is here, each fact as soon as it is known; nothing but a missing GPU is a failure.

    `quick`: packages are not tried.
    """
    found: dict[str, Any] = {}

    def tell(name: str, fact: Callable[[], Any]) -> None:
        try:
            found[name] = fact()
        except Exception as error:  # the rest is worth knowing all the more
            found[name] = f"{type(error).__name__}: {error}"
        print(json.dumps({name: found[name]}, ensure_ascii=False, default=str), flush=True)

    tell("python", lambda: sys.version)
    tell("packages", lambda: {name: _version(name) for name in PACKAGES})
    tell("tools", lambda: {name: shutil.which(name) for name in ("nvcc", "ncu", "nvidia-smi", "g++", "git")})
    tell("carried", lambda: {path.name: path.stat().st_size for path in CACHE.iterdir()})
    tell("gpu", backend.has_gpu)
    tell("cache", unpack)
    tell("environment", environment)
    tell("compute-sanitizer", lambda: str(sanitizer()))
    with ThreadPoolExecutor() as pool:  # the first imports on a machine take their time
        tried = {pool.submit(_tried, "" if quick else code): name for name, code in TRIED.items()}
        for done in as_completed(tried):
            tell(tried[done], done.result)
    if found["gpu"] is not True:
        print("no GPU answers CuPy: nothing can be run here")
        return 1
    known = found["environment"] if isinstance(found["environment"], dict) else {}
    gpu = known.get("gpu") or {}
    print(f"{gpu.get('name', 'a GPU')}, compute capability {gpu.get('compute_capability')}, "
          f"driver {gpu.get('driver')}, CuPy {found['cupy']}, Numba {found['numba']}, torch {found['torch']}, "
          f"{os.cpu_count()} cores")  # fmt: skip
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tried(code: str) -> str:
    """Return what some Python prints, or the end of what it complains about."""
    if not code:
        return "not tried"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return "does not answer"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return lines[-1] if lines else f"status {done.returncode}"


if __name__ == "__main__":
    sys.exit(main("--quick" in sys.argv[1:]))
