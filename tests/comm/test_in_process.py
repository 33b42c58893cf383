"""Ranks of one process, which notice when all wait for each other; the order of sums; launchers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebp.comm.launcher import LAUNCHERS, launched, launching
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport, parts_of, sum_in_order
from sparsebp.core.errors import OptionError, TransportError


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(5, lambda transport: (transport.rank, transport.size)) == [(rank, 5) for rank in range(5)]
    with pytest.raises(OptionError):
        run_ranks(0, lambda transport: None)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_wait_for_each_other_are_told(size: int) -> None:
    """Nothing is buffered: a send ends when it is received, which here comes after it on all ranks."""

    def work(transport: Transport) -> None:
        right, left = (transport.rank + 1) % size, (transport.rank - 1) % size
        transport.isend(np.ones(3), right, 0).wait()
        transport.irecv(np.ones(3), left, 0).wait()

    with pytest.raises(TransportError, match=f"All ranks wait for each other.*{size} that wait"):
        run_ranks(size, work)


def test_a_message_and_a_sum_may_wait_for_each_other() -> None:
    def work(transport: Transport) -> None:
        if transport.rank == 0:
            transport.barrier()
        else:
            transport.irecv(np.ones(3), 0, 0).wait()

    with pytest.raises(TransportError, match="All ranks wait for each other"):
        run_ranks(2, work)


def test_objects_are_shared_by_value() -> None:
    def work(transport: Transport) -> bool:
        own: list[int] = [transport.rank]
        every = transport.share(own)
        every[transport.rank].append(7)
        return own == [transport.rank]

    assert run_ranks(3, work) == [True] * 3


def test_no_thread_is_left_of_a_failure() -> None:
    before = threading.active_count()

    def work(transport: Transport) -> None:
        if transport.rank == 2:
            raise KeyError("gone")
        transport.barrier()

    with pytest.raises(KeyError):
        run_ranks(3, work)
    assert threading.active_count() == before


# ---- which rank sums which part --------------------------------------------------------------------------------------


class Huge:
    """As an array that is only cut."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, part: slice) -> slice:
        return part


@given(size=st.integers(0, 2**40), ranks=st.integers(1, 64))
def test_parts_are_all_and_as_equal_as_can_be(size: int, ranks: int) -> None:
    parts = parts_of(Huge(size), ranks)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == size
    lengths = {part.stop - part.start for part in parts}
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_sums_have_one_order(count: int) -> None:
    """Into an array of their own, and into each of those that are summed."""
    every = np.random.default_rng(count).standard_normal((count, 100)).astype(np.float32)
    expected = every[0]
    for one in every[1:]:
        expected = expected + one
    for place in [None, *range(count)]:
        arrays = list(every.copy())
        out = np.empty(100, np.float32) if place is None else arrays[place]
        sum_in_order(arrays, out)
        np.testing.assert_array_equal(out, expected)
        if place is None:
            np.testing.assert_array_equal(np.array(arrays), every)


# ---- launchers of ranks, and which rank prints -----------------------------------------------------------------------


PROGRAM = """
import sys
from sparsebp.comm.launcher import silence_other_ranks, restore_stderr
silence_other_ranks()
print("out")
print("err", file=sys.stderr)
if len(sys.argv) > 1:
    restore_stderr()
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
