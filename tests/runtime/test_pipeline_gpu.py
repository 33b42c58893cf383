"""Pipelines between ranks that share a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import pipelines as p
from backends import needs_numba
from sparsebp import optim
from sparsebp.comm.threads import run_ranks
from sparsebp.core import backend

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not backend.has_gpu(), reason="needs CuPy and a GPU")]


@pytest.mark.parametrize("schedule, predictor", [
    ("1f1b", None), ("zb-h2", None), ("pipedream", None), ("dualpipe-2018", optim.MomentumPredictor),
])  # fmt: skip
@pytest.mark.parametrize("staged", [False, True])
def test_the_numbers_are_those_of_the_host(schedule, predictor, staged):
    needs_numba("the host is what it compares with")

    def work(transport, device):
        model = p.mlp(np.float32).to(device)
        optimizer = p.momentum(model)
        transport.on_device = not staged  # or arrays go through the host
        executor = p.executor(model, schedule, transport, 3, optimizer, predictor=predictor and predictor(optimizer))
        losses = []
        for seed in range(2):
            batches = p.batches("mlp", [2, 3, 2], np.float32, seed)
            moved = [tuple(backend.to_device(array, device) for array in batch) for batch in batches]
            losses += [step.loss for step in executor.step(moved)]
        executor.flush()
        return losses, {name: backend.to_host(array) for name, array in model.state_dict().items()}

    found, wanted = (run_ranks(2, lambda transport, d=device: work(transport, d))[0] for device in ("cuda", "cpu"))
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for name, array in wanted[1].items():
        np.testing.assert_allclose(found[1][name], array, rtol=1e-4, atol=1e-5, err_msg=name)
