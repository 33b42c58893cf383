"""The Makefile refuses test files that do not exist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("tests", "missing"),
    [("tests/none.py", "tests/none.py"), ("tests/test_make.py tests/nowhere", "tests/nowhere"),
     ("tests/none.py::test_one -k some", "tests/none.py::test_one"), ("tests/scan tests/test_make.py::test -k x", "")],
)  # fmt: skip
def test_tests_that_are_not_there_are_named(tests: str, missing: str) -> None:
    """Before anything is installed or run; ``-n`` runs nothing."""
    done = subprocess.run(
        ["make", "-n", "test", f"TESTS={tests}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode != 0) == bool(missing)
    assert f"There is no {missing}. Expected files or folders under tests/" in done.stderr or not missing
    assert "pytest" not in done.stdout or not missing
