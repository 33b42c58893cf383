"""LSTM layers with the device kernels against the host's, and states of more values than a block has threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends import Backend
from cuda_on_cpu.loader import ExecutorLoader
from cuda_on_cpu.memory import CheckedNumpy, uninitialised
from device.test_layers_on_device import LAYOUTS, both, device  # noqa: F401  # a fixture
from sparsebp import nn, optim
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.spec import Kernels
from strategies import tolerance

ONE, DEEP = LAYOUTS


@pytest.mark.parametrize(
    ("algorithm", "layout", "dtype"),
    [
        ("bp", ONE, np.float32),
        ("chunked", ONE, np.float32),
        ("blelloch", ONE, np.float64),
        ("bp", DEEP, np.float64),
        ("chunked", DEEP, np.float64),
    ],
)
def test_lstm_layer(device: Backend, algorithm: str, layout: str, dtype: Any) -> None:  # noqa: F811
    options = LAYOUTS[layout]
    steps, batch, features, hidden = 6, 3, 2, 5
    lengths = np.array([6, 1, 4]) if options else None

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        layer = place(nn.LSTM(features, hidden, backward=algorithm, chunks=3, dtype=dtype, rng=1, **options))
        shape = (batch, steps) if layer.batch_first else (steps, batch)
        rows = layer.num_layers * layer.directions
        x = array(rng.standard_normal((*shape, features)).astype(dtype))
        gy = array(rng.standard_normal((*shape, layer.directions * hidden)).astype(dtype))
        h0, c0, grad_h_n, grad_c_n = (array(rng.standard_normal((rows, batch, hidden)).astype(dtype)) for _ in range(4))
        y, saved = layer.forward(x, (h0, c0), lengths)
        (h_n, c_n), g = saved, layer.gradients(gy, saved, grad_h_n, grad_c_n)
        return {"y": y, "h_n": h_n, "c_n": c_n, "gx": g.input, "gh0": g.h0, "gc0": g.c0, **g.weights}

    both(device, run)


def test_lstm_training_steps(device: Backend) -> None:  # noqa: F811
    """Forward, loss, backward and update, twice: losses and parameters agree, the weights' sums among them."""

    def run(array: Callable[[Any], Any], place: Callable[[Any], Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        rnn = nn.LSTM(2, 5, backward="chunked", chunks=3, rng=1)
        model = place(nn.SequenceClassifier(rnn, nn.Linear(5, 4, rng=2)))
        loss, update, found = nn.CrossEntropyLoss(), optim.SGD(model.parameters(), lr=0.1), {}
        for step in range(2):
            x, target = array(rng.standard_normal((7, 3, 2)).astype(np.float32)), array(rng.integers(0, 4, 3))
            logits, saved = model.forward(x)
            value, loss_saved = loss.forward(logits, target)
            found[f"loss {step}"] = np.float32(value)
            update.step(model.weight_grad(loss.input_grad(loss_saved), saved))
        return found | model.state_dict()

    both(device, run)


def test_chunks_of_a_large_lstm_are_combined() -> None:
    """From H = 513 on a thread of the combination has several values; executed without checks."""
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
