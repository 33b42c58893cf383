"""gpu test bodies run on the strict stand-in for CuPy, in processes of its own, one of them without Numba."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends import ORDERS

TESTS = Path(__file__).parents[1]
PLANNED = (
    "device", "patterns", "products", "scan/test_run.py", "kernels/test_spgemm.py", "train/test_callbacks.py",
    "train/test_counted.py", "train/test_late_steps.py", "bench/test_gpu_products.py",
)  # fmt: skip
"""Where something is compared with the host kernels, or planned by them."""
WITHOUT_NUMBA = ("-p", "strict_cupy.without_numba")
RUNS = {
    "planned": [*PLANNED],
    "all others": [*WITHOUT_NUMBA, ".", "--ignore=kernels", *(f"--ignore={path}" for path in PLANNED)],
}
if len(ORDERS) > 1:  # else bodies in ``kernels`` run on `cuda_on_cpu` alone, and ``device`` calls each kernel here
    RUNS["kernels"] = [*WITHOUT_NUMBA, "kernels"]


@pytest.mark.parametrize("name", RUNS)
def test_gpu_tests_pass_on_the_stand_in(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "strict_cupy.plugin", "-p", "no:cacheprovider", "-m", "gpu"]
    places = [f"--rootdir={TESTS.parent}", f"-c={TESTS.parent / 'pyproject.toml'}", "-q", "-n0", "--tb=short"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    done = subprocess.run(
        [*command, *places, *RUNS[name]], cwd=TESTS, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-5000:]
    assert " passed" in done.stdout
