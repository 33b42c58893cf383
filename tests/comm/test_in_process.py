"""Ranks of one process: the transport notices when all of them wait for each other."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
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
