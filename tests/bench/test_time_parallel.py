"""The benchmark of a sequence on ranks in its quick form; an error on a rank is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import load
from benchmarks.processes import on_ranks
from benchmarks.ranks import time_parallel_on_ranks
from sparsebp.core.errors import MissingDependencyError, SparseBPError
from sparsebp.core.threads import most_threads

pytest.importorskip("matplotlib")


@pytest.fixture
def mpi() -> None:
    pytest.importorskip("mpi4py")


@pytest.mark.usefixtures("mpi")
@pytest.mark.skipif(most_threads() < 2, reason="needs two cores")
def test_quick_run(tmp_path: Path) -> None:
    lines: list[str] = []
    chosen = load("time-parallel")
    result = chosen.run(tmp_path, quick=True, echo=lines.append)
    assert [(row["model"], row["way"]) for row in result["rows"]] == [
        (model, way) for model in ("RNN(1, 20)", "GRU(38, 20)") for way in ("maps", "vectors")
    ]
    for row in result["rows"]:
        assert not {*chosen.short, *(column.key for column in chosen.columns)} - row.keys()
        assert row["sent_exscan"] == (4 * 20 * 21 if row["way"] == "maps" else 0)
        assert row["kept"] < row["kept_whole"]
    assert (tmp_path / "time-parallel.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("mpi")
def test_an_error_on_a_rank_is_said() -> None:
    with pytest.raises(
        SparseBPError, match=r"measurement on 2 ranks has failed(.|\n)*unexpected keyword argument 'colour'"
    ):
        on_ranks(2, time_parallel_on_ranks, colour="red")


def test_no_mpiexec_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)
    with pytest.raises(MissingDependencyError, match=r"sparsebp\[mpi\]"):
        on_ranks(2, time_parallel_on_ranks)


@pytest.mark.usefixtures("mpi")
def test_ranks_that_do_not_come_to_an_end_are_ended() -> None:
    with pytest.raises(SparseBPError, match="2 ranks do not come to an end"):
        on_ranks(2, time_parallel_on_ranks, seconds=0.05)
