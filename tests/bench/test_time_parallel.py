"""Measurements on ranks that cannot be: each is one error that says why."""

from __future__ import annotations

import pytest

from benchmarks.processes import on_ranks
from benchmarks.ranks import time_parallel_on_ranks
from sparsebp.core.errors import MissingDependencyError, SparseBPError


@pytest.fixture
def mpi() -> None:
    pytest.importorskip("mpi4py")


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
