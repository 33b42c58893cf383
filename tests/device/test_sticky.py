"""A CUDA error that stays: the run goes on in another process, the culprit is named, and the run has failed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sticky

TESTS = Path(__file__).parents[1]
SUITE = """
import cupy, pytest
from strict_cupy.device import DEVICE
pytestmark = pytest.mark.gpu

def test_breaks():
    DEVICE.sticky = 700

@pytest.mark.parametrize("number", range(12))
def test_works(number):
    assert cupy.ones(3).sum().item() == 3
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu\n  real_gpu\n")
    command = [sys.executable, "-m", "pytest", "-p", "strict_cupy.plugin", "-p", "sticky", "-p", "no:cacheprovider"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return subprocess.run(
        [*command, "-rfEX", *options], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_another_worker_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("xdist")
    done = run(tmp_path, "-n2", "--dist", "worksteal")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert "test_breaks has broken the CUDA context: cudaErrorIllegalAddress" in done.stdout
    assert re.search(r"crashed while running '?test_suite.py::test_breaks", done.stdout), done.stdout
    assert "replacing crashed worker" in done.stdout
    assert " 13 passed" in done.stdout  # test_breaks itself has passed; its teardown has not


def test_without_workers_the_session_stops_there(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "the CUDA context is broken since test_suite.py::test_breaks" in done.stdout, done.stdout
    assert " 1 passed, 1 error" in done.stdout


def test_what_passes_is_not_looked_at_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Error(RuntimeError):
        pass

    calls = iter([Error("cudaErrorNotReady"), None])

    def synchronize() -> None:
        found = next(calls)
        if found is not None:
            raise found

    class Cupy:
        class cuda:
            Device = staticmethod(lambda: type("Device", (), {"synchronize": staticmethod(synchronize)}))

            class runtime:
                CUDARuntimeError = Error

    monkeypatch.setitem(sys.modules, "cupy", Cupy)
    assert sticky._status() is None
