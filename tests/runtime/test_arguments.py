"""Bad arguments of multi-rank functions raise our errors."""

from __future__ import annotations

import numpy as np
import pytest

import pipelines as p
from sparsebp import nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core.errors import OptionError
from sparsebp.runtime.time_parallel import ChainParallel, TimeParallel
from sparsebp.train import Trainer


@pytest.mark.parametrize("call", [
    lambda t: t.broadcast(1, root=1), lambda t: t.broadcast(1, root=-1), lambda t: t.broadcast(1, root="0"),
    lambda t: t.share(lambda: 1), lambda t: t.exscan(np.ones(2), None), lambda t: t.isend(np.ones(2), "0", 0),
    lambda t: TimeParallel(nn.GRU(2, 3, rng=0), None), lambda t: ChainParallel([], None),
    lambda t: run_ranks(1, "work"),
])  # fmt: skip
def test_calls(call):
    with pytest.raises(OptionError) as caught:
        run_ranks(1, call)
    assert caught.value.expected is not None and caught.value.got is not None


@pytest.mark.parametrize("options", [
    {"schedule": "pipedream", "note": 3}, {"predictor": 3}, {"predictor": optim.MomentumPredictor},
])  # fmt: skip
def test_options_of_a_trainer(options):
    def work(transport):
        model = p.mlp()
        return Trainer(model, nn.CrossEntropyLoss(), p.momentum(model), transport=transport,
                       **{"schedule": "dualpipe-2018"} | options)  # fmt: skip

    with pytest.raises(OptionError):
        run_ranks(1, work)


@pytest.mark.parametrize("options", [{"comm": "world"}, {"comm": 3}, {"on_device": "yes"}, {"timeout": -1}])
def test_options_of_mpi(options):
    pytest.importorskip("mpi4py.MPI", exc_type=(ImportError, RuntimeError))
    from sparsebp.comm.mpi import MPITransport

    with pytest.raises(OptionError):
        MPITransport(**options)
