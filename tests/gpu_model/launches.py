"""The launches of a recurrent layer's kernels as the launchers choose them, and what machine code says of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuda_on_cpu.loader import NotingLoader
from gpu_model.kernels import figures
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.device.launch import WARP, Defines
from sparsebp.kernels.operands import WeightSums


@dataclass(frozen=True)
class Launch:
    """One launch.

    Attributes
    ----------
    kernel, defines
        What runs.
    warps
        Warps of the busiest multiprocessor.
    bytes
        Of the arrays that it is given, each once.
    """

    kernel: str
    defines: Defines
    warps: int
    bytes: int

    def cycles(self, memory: str, wide: bool = False) -> float:
        """Return the cycles of a time step of one warp among so many, with what it loads coming from `memory`.

        `wide`: a load of one place by all lanes passes through shared memory once for each word.
        """
        warps = 1 if self.kernel == "scan_combine" else self.warps  # one follows the chunks, the others fetch for it
        return figures(self.kernel, self.defines).with_warps(warps, memory, wide)


def recurrence(cell: str, length: int, batch: int, hidden: int, chunks: int, multiprocessors: int) -> list[Launch]:
    """Return the launches of the forward pass and, by so many chunks, of the backward, as a first layer's in training.

    Parameters
    ----------
    cell
        ``"rnn"`` with one feature, whose backward sums the weight gradients, or ``"gru"`` or ``"lstm"`` with more
        features than kernels take themselves: its weight gradients are products. float32, a gradient at every time
        step.
    length, batch, hidden
        T, B and H.
    chunks
        1: the recursion.
    multiprocessors
        Of the device that the launchers size their grids for.
    """
    launches: list[Launch] = []

    def note(file: str, defines: Defines, kernel: str, grid: Any, block: Any, args: Any, shared_mem: int) -> None:
        warps = -(-grid[0] // multiprocessors) * -(-int(np.prod(block)) // WARP)
        arrays = {arg.ctypes.data: arg.nbytes for arg in args if isinstance(arg, np.ndarray)}
        launches.append(Launch(kernel, defines, warps, sum(arrays.values())))

    loader = NotingLoader(note)
    loader.multiprocessors = multiprocessors
    kernels = DeviceKernels(np, loader)

    def real(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    h, gy, h0, last = real(length, batch, hidden), real(length, batch, hidden), real(batch, hidden), real(batch, hidden)
    if cell == "rnn":
        x, weights, biases = real(length, batch, 1), real(hidden, hidden), (real(hidden), real(hidden))
        kernels.rnn_forward(x, weights, h0, "tanh", h, real(hidden, 1), *biases, True)
        sums = WeightSums(x, h, real(hidden, 1), real(hidden, hidden), *biases)
        kernels.rnn_backward(h, weights, gy, last, "tanh", None, real(batch, hidden), chunks, sums)
    elif cell == "lstm":
        gx, weights, gates = real(length, batch, 4 * hidden), real(4 * hidden, hidden), real(length, batch, 4 * hidden)
        c, c0, last_c = real(length, batch, hidden), real(batch, hidden), real(batch, hidden)
        biases = real(4 * hidden), real(4 * hidden)
        kernels.lstm_forward(gx, weights, h0, c0, h, c, gates, None, *biases, True)
        initial, ga = (real(batch, hidden), real(batch, hidden)), real(length, batch, 4 * hidden)
        kernels.lstm_backward(c, c0, gates, weights, gy, last, last_c, ga, *initial, chunks, None)
    else:
        gx, weights, gates = real(length, batch, 3 * hidden), real(3 * hidden, hidden), real(length, batch, 4 * hidden)
        biases = real(3 * hidden), real(3 * hidden)
        kernels.gru_forward(gx, weights, real(hidden), h0, h, gates, None, *biases, True)
        ga = real(length, batch, 4 * hidden)
        kernels.gru_backward(h, h0, gates, weights, gy, last, ga, real(batch, hidden), chunks, None)
    return launches
