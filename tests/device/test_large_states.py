"""States of more values than a block has threads: an LSTM's from H = 513 on. Executed on the CPU, without checks."""

from __future__ import annotations

import numpy as np

from cuda_on_cpu.loader import ExecutorLoader
from cuda_on_cpu.memory import CheckedNumpy, uninitialised
from sparsebp.kernels.api import Kernels
from sparsebp.kernels.device import DeviceKernels
from strategies import tolerance


def test_chunks_of_a_large_lstm_are_combined() -> None:
    kernels = Kernels(DeviceKernels(CheckedNumpy(), ExecutorLoader(mode="fast")))
    steps, batch, hidden, dtype = 4, 1, 513, np.dtype(np.float64)
    rng = np.random.default_rng(0)
    gates, c, c0 = (
        rng.random(shape) for shape in ((steps, batch, 4 * hidden), (steps, batch, hidden), (batch, hidden))
    )
    w_hh, gy = rng.standard_normal((4 * hidden, hidden)) / hidden, rng.standard_normal(c.shape)
    found = []
    for chunks in (1, steps):
        written = [uninitialised(shape, dtype) for shape in (gates.shape, c0.shape, c0.shape)]
        kernels.lstm_backward(c, c0, gates, w_hh, gy, c0, c0, *written, chunks)
        found.append(written)
    for got, want in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(got, want, **tolerance(dtype, 8))
