"""All cases, on ranks of this process and on processes of MPI."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mpi import Case, cases
from mpi.launch import run
from sparsebp.comm.threads import run_ranks

SIZES = (1, 2, 3, 4)
SECONDS = 300.0  # of all cases of a number of ranks; for one that hangs


@pytest.mark.parametrize(
    ("size", "case"),
    [pytest.param(size, case, id=f"{case.name}-{size}") for size in SIZES for case in cases(size, in_process=True)],
)
def test_in_process(size: int, case: Case) -> None:
    if case.fails is None:
        run_ranks(size, case.run)
    else:
        with pytest.raises(Exception) as raised:  # of the first rank that failed, by itself or not
            run_ranks(size, case.run)
        assert re.search(case.fails, f"{raised.type.__name__}: {raised.value}")


@pytest.mark.parametrize("size", SIZES[:3])  # to MPI a fourth rank is as a third
def test_mpi(size: int, tmp_path: Path) -> None:
    names = [case.name for case in cases(size)]
    report = tmp_path / "report"
    done = run(size, "-m", "mpi", "--report", str(report), "--seconds", str(SECONDS), seconds=SECONDS + 20)
    told = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
    failed = [f"{one['case']}, rank {rank}:\n{text}" for one in told for rank, text in one["errors"].items()]
    assert not failed, "\n".join(failed)
    assert [one["case"] for one in told] == names, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, done.stderr
