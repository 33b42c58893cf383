"""Launchers of ranks, and which rank prints."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparsebp.comm.launcher import LAUNCHERS, launched, launching

PROGRAM = """
import sys
from sparsebp.comm.launcher import quiet_others, speak
quiet_others()
print("out")
print("err", file=sys.stderr)
if len(sys.argv) > 1:
    speak()
    print("told", file=sys.stderr)
"""


def without_launcher() -> dict[str, str]:
    named = {name for pair in LAUNCHERS for name in pair}
    return {name: value for name, value in os.environ.items() if name not in named}


@pytest.mark.parametrize("names", LAUNCHERS)
def test_launchers_are_known(names: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for pair in LAUNCHERS:
        for name in pair:
            monkeypatch.delenv(name, raising=False)
    assert launching() == []
    assert launched() is None
    monkeypatch.setenv(names[0], "2")
    assert launched() is None
    monkeypatch.setenv(names[1], "5")
    assert launched() == (2, 5)
    assert launching() == ["srun" if names[0] == "SLURM_PROCID" else "mpiexec", "-n", "5"]


@pytest.mark.parametrize(
    ("rank", "told", "out", "err"),
    [(None, False, "out\n", "err\n"), (0, True, "out\n", "err\ntold\n"), (1, False, "", ""), (1, True, "", "told\n")],
)
def test_one_rank_prints(rank: int | None, told: bool, out: str, err: str) -> None:
    ranks = {} if rank is None else {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(["told"] if told else [])], env=without_launcher() | ranks, text=True,
        capture_output=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == (out, err)
