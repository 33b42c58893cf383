"""The NCCL transport on a stand-in for the binding: its calls, their streams and results."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest

from comm.nccl_standin import CUPY, World, current_stream, device
from mpi.cases_transport import refuses_once_closed
from sparsebp.comm.nccl import NCCLTransport, nccl
from sparsebp.comm.threads import run_ranks
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, MissingDependencyError, TransportError

DTYPES = (np.float32, np.float64)


def on_ranks(size: int, body: Callable[[NCCLTransport], None], *, close: bool = True) -> World:
    """Run `body` on ranks with a device each, and return what NCCL was asked for."""
    world = World()

    def work(host: object) -> None:
        transport = NCCLTransport(host, xp=CUPY, binding=world)  # type: ignore[arg-type]
        body(transport)
        if close:
            transport.close()

    run_ranks(size, work)
    return world


def values(rank: int, size: int, dtype: type = np.float64) -> Array:
    return device(np.random.default_rng(rank).standard_normal(size).astype(dtype))


def read(array: Array) -> np.ndarray:
    """Return what the current stream sees."""
    current_stream().synchronize()
    return np.array(array)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_messages_go_both_ways_at_once(size: int) -> None:
    """Each rank sends to both neighbours before it receives, which one stream for all would not survive."""

    def body(transport: NCCLTransport) -> None:
        for dtype in DTYPES:
            for count in (0, 1, 1001):
                peers = [rank for rank in range(size) if rank != transport.rank]
                sends = [transport.isend(values(transport.rank, count, dtype), to, 3) for to in peers]
                outs = {source: device(np.zeros(count, dtype)) for source in peers}
                receives = [transport.irecv(out, source, 3) for source, out in outs.items()]
                for handle in sends + receives:
                    handle.wait()
                for source, out in outs.items():
                    np.testing.assert_array_equal(read(out), values(source, count, dtype))
                assert all(handle.done() for handle in sends + receives)

    on_ranks(size, body)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_and_prefixes(size: int) -> None:
    def body(transport: NCCLTransport) -> None:
        for dtype in DTYPES:
            for count in (0, 1, 7, 1001):
                every = [values(rank, count * size, dtype) for rank in range(size)]
                expected = np.array(every[0])
                for one in every[1:]:
                    expected = expected + np.array(one)
                array = values(transport.rank, count * size, dtype)
                transport.allreduce(array).wait()
                np.testing.assert_array_equal(read(array), expected)
                own, whole, out = (
                    values(transport.rank, count * size, dtype),
                    device(expected * 0),
                    device(np.zeros(count, dtype)),
                )
                transport.reduce_scatter(own, out).wait()
                np.testing.assert_array_equal(read(own), values(transport.rank, count * size, dtype))
                transport.allgather(out, whole).wait()
                np.testing.assert_array_equal(read(whole), expected)
                found = transport.exscan(device([float(transport.rank + 1)]), _digits)
                assert (None if found is None else float(read(found)[0])) == [None, 1.0, 12.0, 123.0][transport.rank]

    on_ranks(size, body)


def _digits(earlier: Array, later: Array) -> Array:
    current_stream().synchronize()
    return device(np.array(earlier) * 10 + np.array(later))


def test_every_way_has_a_stream_that_waits_for_no_other() -> None:
    world = on_ranks(3, lambda transport: None)
    streams = [stream for name, stream in world.calls if name in ("send", "recv")]
    assert len(streams) == len(set(streams)) == 12  # six ways with two ends
    assert sum(name == "destroy" for name, _ in world.calls) == 12 + 3  # and of each rank that of all ranks


def test_other_data_is_refused() -> None:
    def body(transport: NCCLTransport) -> None:
        if transport.rank == 0:
            transport.isend(device(np.zeros(0)), 1, 0).wait()
        else:
            transport.irecv(device(np.zeros(0, np.float32)), 0, 0).wait()

    with pytest.raises(TransportError, match=r"Rank 1 expected other data of rank 0.*float32.*float64"):
        on_ranks(2, body)


def test_receives_in_another_order_are_refused() -> None:
    def body(transport: NCCLTransport) -> None:
        if transport.rank == 0:
            for handle in [transport.isend(device(np.full(3, float(tag))), 1, tag) for tag in (1, 2)]:
                handle.wait()
        else:
            transport.irecv(device(np.zeros(3)), 0, 2).wait()

    with pytest.raises(TransportError, match=r"Rank 1 expected other data.*order"):
        on_ranks(2, body)


def test_calls_that_differ_are_refused() -> None:
    def body(transport: NCCLTransport) -> None:
        array = device(np.zeros(4))
        if transport.rank == 0:
            transport.allreduce(array).wait()
        else:
            transport.allgather(array, device(np.zeros(8))).wait()

    with pytest.raises(TransportError, match=r"makes another collective call.*all(reduce|gather) of 32 bytes"):
        on_ranks(2, body)


def test_a_failure_ends_the_devices_too() -> None:
    world = World()

    def work(host: object) -> None:
        transport = NCCLTransport(host, xp=CUPY, binding=world)  # type: ignore[arg-type]
        if transport.rank == 0:
            transport.abort(ValueError("out of paper"))
        else:
            transport.allreduce(device(np.zeros(4))).wait()

    with pytest.raises(ValueError, match="out of paper"):
        run_ranks(2, work)
    assert sum(name == "abort" for name, _ in world.calls) == 3


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(MissingDependencyError, match="nvidia-nccl-cu13"):
        nccl()


def test_a_closed_transport_says_so() -> None:
    on_ranks(2, lambda transport: refuses_once_closed(transport, lambda size: device(np.ones(size))), close=False)


def test_arrays_of_the_host_are_refused() -> None:
    def body(transport: NCCLTransport) -> None:
        for call in (lambda: transport.isend(np.ones(2), 0, 0), lambda: transport.allreduce(np.ones(2))):
            with pytest.raises(DeviceError, match=r"between GPUs.*MPITransport"):
                call()

    on_ranks(2, body)
