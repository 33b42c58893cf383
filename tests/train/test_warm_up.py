"""Compiling ahead of time (`train.warm_up`), and the one line that announces compilation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from device.kernel_arguments import KERNELS
from sparsebp import kernels, warm_up
from sparsebp.kernels.host.engine import compile


def test_every_kernel_is_called_in_both_precisions(monkeypatch):
    called: set[tuple[str, str]] = set()
    for owner in (type(kernels.get(np)), type(kernels.get(np).unchecked)):  # layers leave the checks out
        for name in KERNELS:
            monkeypatch.setattr(owner, name, _recorded(name, getattr(owner, name), called))
    for _, job in warm_up.jobs():
        job()
    compiled = set(KERNELS) - {"add_bias", "clip_arrays", "join_arrays", "sum_gates"}  # NumPy's on the host
    assert called >= {(name, dtype) for name in compiled for dtype in ("float32", "float64")}


def _recorded(name, kernel, called):
    def run(self, *args, **options):
        called.update((name, dtype) for dtype in _dtypes(args))
        return kernel(self, *args, **options)

    return run


def _dtypes(values):
    for value in values:
        if isinstance(value, np.ndarray):
            yield value.dtype.name
        elif isinstance(value, (list, tuple)):
            yield from _dtypes(value)


PROGRAM = """
import pathlib, sys
from sparsebp import warm_up

def write(name):
    if name == sys.argv[1]:
        raise ValueError("no " + name)
    pathlib.Path(name).write_text("")

warm_up.get_threads = lambda: 2
warm_up.jobs = lambda: ((name, lambda name=name: write(name)) for name in "abcd")
if __name__ == "__main__":
    told = []
    warm_up.compile_all(lambda *given: told.append(given))
    print(sorted(name for name, _, _ in told[1:]), [number for _, number, _ in told])
"""


def test_processes_share_the_jobs(tmp_path):
    """And one that fails ends them all, with its error."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(kernels.__file__).parents[2])}

    def run(bad):
        command = [sys.executable, "program.py", bad]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert run("none").stdout.splitlines() == ["['a', 'b', 'c', 'd'] [0, 1, 2, 3, 4]"]
    assert all((tmp_path / name).exists() for name in "abcd")
    failed = run("c")
    assert failed.returncode == 1 and failed.stderr.endswith("ValueError: no c\n")


def test_kernels_are_kept_in_the_folder_that_it_names():
    assert any(warm_up.folder().rglob("*.nbi"))


class Terminal:
    """Stands for standard error."""

    def __init__(self, terminal: bool) -> None:
        self.terminal, self.text = terminal, ""

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_once(monkeypatch, terminal):
    """Elsewhere after two seconds of compilation, of which time between kernels counts as one at most."""
    stream, now = Terminal(terminal), [0.0]
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(compile.time, "monotonic", lambda: now[0])
    notice = compile.Notice()
    for now[0], told in ((0.2, terminal), (100.0, terminal), (100.5, terminal), (101.5, True), (102.0, True)):
        notice()
        assert stream.text.count("compiling kernels") == told


def test_it_is_told_when_something_is_compiled_and_not_when_all_is_there(tmp_path):
    """With a pseudo-terminal as standard error and a cache of its own, twice."""
    code = """
import numpy as np
from sparsebp import kernels
x = np.ones(3, np.float32)
kernels.get(np).clamp(x, 0.0, 0.5, np.empty_like(x))
"""
    told = []
    for _ in range(2):
        ours, theirs = os.openpty()
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(kernels.__file__).parents[2])}
        subprocess.run([sys.executable, "-c", code], check=True, env=env, stderr=theirs)
        os.write(theirs, b"end\n")
        told.append(os.read(ours, 4096).decode().count("compiling kernels"))
        os.close(ours), os.close(theirs)
    assert told == [1, 0]
