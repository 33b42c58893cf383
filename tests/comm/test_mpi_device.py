"""CuPy arrays over MPI, on a device or on a stand-in whose work finishes late unless it is awaited."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backends import make_backend
from sparsebp.runtime import launch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("on_device", [False, True])
def test_arrays_of_a_device_are_complete_when_mpi_reads_them(on_device: bool) -> None:
    """One rank that sends to itself; `on_device` is not for MPI libraries that cannot read the device's memory."""
    MPI = pytest.importorskip("mpi4py.MPI")
    from sparsebp.comm.mpi import MPITransport

    cp: Any = make_backend("gpu").xp
    transport = MPITransport(MPI.COMM_SELF, on_device=on_device)
    buffer, finish = transport._buffer(cp.arange(5.0) * 2 + 1, read=True)
    if on_device:
        assert (type(buffer), finish) == (cp.ndarray, None)
        return
    assert type(buffer) is np.ndarray
    np.testing.assert_array_equal(buffer, [1, 3, 5, 7, 9])
    sent, out = cp.arange(1000.0) * 3, cp.zeros(1000)
    receive = transport.irecv(out, 0, 4)
    send = transport.isend(sent, 0, 4)
    receive.wait()
    send.wait()
    np.testing.assert_array_equal(cp.asnumpy(out), np.arange(1000.0) * 3)
    transport.allreduce(sent).wait()
    np.testing.assert_array_equal(cp.asnumpy(sent), np.arange(1000.0) * 3)
    part, whole = cp.zeros(1000), cp.zeros(1000)
    transport.reduce_scatter(sent, part).wait()
    transport.allgather(part, whole).wait()
    np.testing.assert_array_equal(cp.asnumpy(whole), np.arange(1000.0) * 3)
    assert transport.exscan(sent, lambda earlier, later: earlier + later) is None
    transport.close()


def test_a_rank_takes_its_gpu_with_a_hardware_queue_for_every_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    make_backend("gpu")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    local = SimpleNamespace(rank=0, size=1, Free=lambda: None)
    world = SimpleNamespace(Split_type=lambda kind: local)
    monkeypatch.setattr(launch, "mpi", lambda: SimpleNamespace(COMM_WORLD=world, COMM_TYPE_SHARED=0))
    transport: Any = SimpleNamespace(share=lambda value: [value])
    assert launch.own_device(transport) == 0
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
