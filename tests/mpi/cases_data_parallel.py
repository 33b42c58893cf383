"""Replicas as processes: bitwise equal to replicas as threads, and the numbers of one worker."""

from __future__ import annotations

import numpy as np
import pytest

import replicas as rep
from mpi import on_ranks
from runtime.test_data_parallel_search import work as search
from runtime.test_random_layers import assert_like, train
from sparsebp.comm.mpi import MPITransport
from sparsebp.comm.transport import Transport
from sparsebp.core.errors import NonFiniteError, TransportError
from sparsebp.runtime.actions import Observer


def compare(transport: Transport, name: str, rtol: float = 1e-10, **options: object) -> None:
    optimizer = rep.OPTIMIZERS["adam"]
    found = rep.replica(transport, rep.mlp, optimizer, name, **options)
    options.pop("sharded", None)
    rep.assert_like_one_worker([found], rep.alone(rep.mlp, optimizer, **options), rtol)
    digests = transport.share(rep.digest(found[0]))
    assert len(set(digests)) == 1
    if transport.rank == 0:
        threads = rep.replicas(transport.size, rep.mlp, optimizer, name, **options)
        assert rep.digest(threads[0][0]) == digests[0]


@on_ranks(1, 2, 3, in_process=False)
def numbers_of_one_worker(transport: Transport) -> None:
    for name in ("waits", "forward", "reverse first-2, forward"):
        compare(transport, name)


@on_ranks(2, 3, in_process=False)
def unequal_shares_and_micro_batches(transport: Transport) -> None:
    compare(transport, "first-stage", accumulate=2, batch_size=5, epochs=1, inputs=rep.INPUTS[:11])


@on_ranks(2, 3, in_process=False)
def clipped(transport: Transport) -> None:
    compare(transport, "first-ready", 1e-8, clip_norm=0.05, epochs=1)


@on_ranks(2, 3, in_process=False)
def random_layers_draw_as_in_one_worker(transport: Transport) -> None:
    """The last step has one sample, and so only one rank."""
    for name in ("GRU", "encoder"):
        options = {"samples": 9, "accumulate": 2}
        assert_like([train(transport, name, **options)], train(None, name, **options))


@on_ranks(2, 3, in_process=False)
def states_in_pieces(transport: Transport) -> None:
    compare(transport, "forward", sharded=True)


@on_ranks(2, in_process=False)
def beside_a_thread_of_progress(transport: Transport) -> None:
    between = MPITransport(progress=True)
    compare(between, "forward")
    between.close()


@on_ranks(2, 3, in_process=False)
def one_k_on_all_ranks(transport: Transport) -> None:
    found = search(transport)
    rep.assert_like_one_worker([found], rep.alone(rep.mlp, rep.OPTIMIZERS["adam"]), 1e-10)
    assert None not in (ks := set(transport.share(found[3].k))) and len(ks) == 1


class Stop(Observer):
    def loss(self, step: object, m: int, value: float) -> None:
        if not np.isfinite(value):
            raise NonFiniteError("The loss is not finite", expected="a number", got=value, remedy="Stop")


@on_ranks(2, 3, fails="The loss is not finite")
def a_number_that_is_not_finite_ends_all(transport: Transport) -> None:
    executor = rep.executor(transport, rep.mlp(), "forward", observer=Stop())
    x = np.full((2, 5), np.nan if transport.rank == 1 else 1.0)
    executor.step([(np.ones((2, 5)), rep.CLASSES[:2])])
    try:
        executor.step([(x, rep.CLASSES[:2])])
        executor.flush()
    except Exception as error:
        transport.abort(error)  # as whoever started the ranks does
        assert type(error) is (NonFiniteError if transport.rank == 1 else TransportError)
        assert executor.flush() == []
        with pytest.raises(TransportError, match="has failed before"):
            executor.step([(x, rep.CLASSES[:2])])
        executor.close()
        raise
