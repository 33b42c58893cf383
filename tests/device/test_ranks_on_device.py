"""Stretches of a sequence on ranks, with the device kernels: what they give on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends import Backend
from device.test_layers_on_device import CELLS, both, device  # noqa: F401  # a fixture
from sparsebp import nn
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.kernels.device import Launcher
from sparsebp.runtime.time_parallel import TimeParallel, stretch


@pytest.mark.parametrize("cell", [*CELLS, "lstm"])
def test_stretches_on_ranks(device: Backend, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    launch, alone = Launcher._launch, threading.Lock()  # the executor runs one launch at a time

    def one_by_one(*args: Any, **options: Any) -> None:
        with alone:
            launch(*args, **options)

    monkeypatch.setattr(Launcher, "_launch", one_by_one)
    steps, batch, features, hidden = 7, 2, 2, 5

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        x, gy = (rng.standard_normal((steps, batch, size)).astype(np.float32) for size in (features, hidden))

        def work(transport: Transport) -> dict[str, Any]:
            layer = place((CELLS | {"lstm": nn.LSTM})[cell](features, hidden, rng=1))
            own = stretch(steps, transport)
            y, back = TimeParallel(layer, transport, "maps").vjp(array(x[own]))
            g = back(array(gy[own]))
            return {"y": y, "input": g.input, **g.weights}

        results = run_ranks(3, work)
        return {f"{name} of {rank}": value for rank, result in enumerate(results) for name, value in result.items()}

    both(device, run)
