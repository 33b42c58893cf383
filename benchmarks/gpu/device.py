"""What the benchmarks on a GPU share: names of their files, the rates of the device, launches of the recurrences."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.tools.benchmark import Run
from benchmarks.tools.workload import chunk_count
from sparsebp.core import backend, timing
from sparsebp.core.check import Array
from sparsebp.kernels.operands import WeightSums
from sparsebp.scan.recurrent import choose_recurrent_backward

HIDDEN, BATCH = 20, 16
"""The paper's hidden size, and batch."""
COLOURS = {"RNN": "#1e40af", "GRU": "#9a3412", "LSTM": "#166534"}
"""Of the cells' curves."""
SECONDS = 500.0
"""What a run takes at most, so that it ends well within ten minutes, and its last point with it."""


def begin(run: Run) -> ModuleType:
    """Return CuPy, after naming the run's files after the GPU and the commit.

    Raises
    ------
    DeviceError, MissingDependencyError
        There is no GPU, or CuPy is not installed.
    """
    cupy = backend.cupy()
    env = run.result["environment"]
    name = f"{run.stem}-{env['gpu']['name'].lower()}-{env['commit'].rstrip('+')}"
    run.stem = re.sub("[^A-Za-z0-9._-]+", "-", name)  # also a branch's name, with a slash
    return cupy


def chosen_chunks(cell: str, dtype: Any, length: int, xp: ModuleType) -> int:
    """Return the chunks that the cost model takes for the arrays of `xp`; about the root of T for the recursion."""
    name: Any = cell.lower()
    choice = choose_recurrent_backward(name, length, BATCH, HIDDEN, dtype, xp)
    return choice.chunks if choice.chunks > 1 else chunk_count(length)


class Rates(NamedTuple):
    """What the GPU can do at best: FLOP/s by dtype name (from its data), bytes/s (measured by a copy), cycles/s."""

    flops: dict[str, float]
    bandwidth: float
    clock: float


def device_rates(cupy: ModuleType) -> Rates:
    """Return the GPU's peak FLOP/s without matrix units, the bandwidth that a large copy reaches, and its clock."""
    device = cupy.cuda.Device()
    attributes = device.attributes
    clock = attributes["ClockRate"] * 1e3
    lanes = {"80": (64, 32), "90": (128, 64)}.get(device.compute_capability, (128, 2))
    flops = [attributes["MultiProcessorCount"] * each * 2 * clock for each in lanes]
    source = cupy.ones(1 << 28, cupy.uint8)
    target = cupy.empty_like(source)
    calls = {"copy": lambda: cupy.copyto(target, source)}
    copy = timing.measure(calls, rounds=7, clock=timing.DeviceClock(cupy))["copy"]
    return Rates({"float32": flops[0], "float64": flops[1]}, 2 * source.nbytes / copy.median, clock)


class Recurrence:
    """The kernels of one recurrent layer on random states of their own.

    Parameters
    ----------
    kernels
        `sparsebp.kernels.spec.Kernels` of the arrays.
    xp
        The namespace of the arrays.
    cell
        ``"RNN"``, ``"GRU"`` or ``"LSTM"``.
    dtype, length, batch, hidden
        T, B and H.
    """

    def __init__(
        self, kernels: Any, xp: ModuleType, cell: str, dtype: Any, length: int, batch: int, hidden: int = HIDDEN
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]

        def array(*shape: int) -> Array:
            return xp.asarray(rng.uniform(-0.2, 0.2, shape).astype(dtype))

        self.kernels, self.cell = kernels, cell
        self.gx, self.w_hh = array(length, batch, gates * hidden), array(gates * hidden, hidden)
        self.h, self.h0, self.grad = array(length, batch, hidden), array(batch, hidden), array(batch, hidden)
        self.x, self.input_weights = array(length, batch, 1), (array(gates * hidden, 1), *array(2, gates * hidden))
        self.b_hn, self.gates = array(hidden), array(length, batch, 4 * hidden) if gates > 1 else None
        self.forward_h = xp.empty_like(self.h)  # the backward's states stay as they are
        self.forward_gates = xp.empty_like(self.gates) if gates > 1 else None
        self.forward_c = xp.empty_like(self.h) if gates == 4 else None  # h, h0 and grad stand for those of c, too
        outputs = [xp.empty_like(weight) for weight in (self.input_weights[0], self.w_hh, *self.input_weights[1:])]
        self.sums = WeightSums(self.x, self.h, *outputs)
        self.written = xp.empty_like(self.h if gates == 1 else self.gates)
        self.gh0, self.gc0 = xp.empty_like(self.grad), xp.empty_like(self.grad)

    def forward(self) -> None:
        """Run all steps forwards, on the projected input."""
        self._forward(self.gx)

    def forward_from_input(self) -> None:
        """Run all steps forwards, on an input of one feature, which the kernel projects."""
        self._forward(self.x, *self.input_weights)

    def _forward(self, x: Array, *weights: Array) -> None:
        if self.cell == "RNN":
            self.kernels.rnn_forward(x, self.w_hh, self.h0, "tanh", self.forward_h, *weights)
        elif self.cell == "GRU":
            written = self.forward_h, self.forward_gates
            self.kernels.gru_forward(x, self.w_hh, self.b_hn, self.h0, *written, *weights)
        else:
            states = self.h0, self.h0, self.forward_h, self.forward_c
            self.kernels.lstm_forward(x, self.w_hh, *states, self.forward_gates, *weights)

    def backward(self, chunks: int = 1, summed: bool = False) -> Callable[[], None]:
        """Return what runs all steps backwards, from a gradient at the last state, in so many chunks.

        `summed`: weight gradients of an input of one feature are summed on the way, in place of gradients at the gates.
        """
        k, last = self.kernels, self.grad
        ga, sums = (None, self.sums) if summed else (self.written, None)
        if self.cell == "RNN":
            return lambda: k.rnn_backward(self.h, self.w_hh, None, last, "tanh", ga, self.gh0, chunks, sums)
        saved = (self.h, self.h0, self.gates, self.w_hh)
        if self.cell == "LSTM":
            return lambda: k.lstm_backward(*saved, None, last, last, ga, self.gh0, self.gc0, chunks, sums)
        return lambda: k.gru_backward(*saved, None, last, ga, self.gh0, chunks, sums)
