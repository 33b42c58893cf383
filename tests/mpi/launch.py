"""``mpiexec`` for tests: several processes on few cores, one thread each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def mpiexec() -> str:
    """Return the path of the ``mpiexec`` that belongs to this Python; skips the test if there is none."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (extra: mpi)")
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        pytest.skip("there is no mpiexec (extra: mpi)")
    return found


def command(size: int, *arguments: str) -> list[str]:
    """Return the command that runs Python with `arguments` on `size` ranks."""
    return [mpiexec(), "-n", str(size), sys.executable, *arguments]


def apart(*programs: Sequence[str]) -> list[str]:
    """Return the command that runs Python with arguments of its own on each rank."""
    ranks = [word for program in programs for word in (":", "-n", "1", sys.executable, *program)]
    return [mpiexec(), *ranks[1:]]


def environment(**more: str) -> dict[str, str]:
    """Return what processes find: this source tree, one thread each."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "HYDRA"))}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return own | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONPATH": paths} | more


def run(size: int, *arguments: str, seconds: float = 60.0, **more: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` on `size` ranks to the end; `more`: of the environment."""
    return completed(command(size, *arguments), seconds, **more)


def completed(words: Sequence[str], seconds: float, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of several ranks to the end."""
    return subprocess.run(
        words, env=environment(**more), capture_output=True, text=True, timeout=seconds, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
