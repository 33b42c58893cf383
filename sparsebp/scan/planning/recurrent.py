"""Which backward a recurrent layer should run: sequential, fused chunked scan, or a scan over stored Jacobians.

With hidden size H a scan multiplies matrices where the recursion multiplies vectors, so it does about H times the
work. It pays where workers stand idle: a GPU with a small batch and a long sequence. On a CPU with a few cores the
batch alone keeps all of them busy, and the recursion wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from types import ModuleType
from typing import Any, Literal

import numpy as np

from sparsebp import backend
from sparsebp.backend.machine import Machine, machine
from sparsebp.core.arguments import check_choice, check_integer
from sparsebp.scan.algorithms import tree_levels
from sparsebp.scan.algorithms.counts import level_counts

GATES = {"rnn": 1, "gru": 3}
"""Matrix–vector products of one step of the recursion."""
LANES = 32
"""Threads of a warp: the device kernels give a hidden unit to each."""
SEQUENTIAL_STEP = {"rnn": 0.10e-6, "gru": 0.25e-6}
"""Seconds a step of the fused device kernel for H <= 32. Predicted (0.06–0.15 µs for a tanh RNN), not measured."""
SHARED_BANDWIDTH = 128.0
"""Bytes a clock that a multiprocessor reads from shared memory, where the weights of H > 32 lie."""
HOST_STEP = {"rnn": 30e-9, "gru": 45e-9}
"""Seconds that a step of the fused host kernels takes at least. Measured with B = H = 1: 22–32 ns and 43 ns."""
HOST_RATE = {"vector": 80e9, "matrix": 150e9}
"""float32 operations a second of one thread. Measured at H = 20 and 64, B = 16: the recursion 60–175 GFLOP/s, the
scan's matrices 85–200 GFLOP/s (x86 with 64-byte vectors; operands stay in the cache, unlike a stored scan's)."""
MARGIN = 0.8
"""A scan is taken if it promises at most this share of the recursion's time: estimates are rough."""
STORED_MARGIN = 0.4
"""The same for the scan over stored Jacobians, which takes T·B·H² values of memory and more kernel calls."""


@dataclass(frozen=True)
class Choice:
    """What was chosen for a backward pass, and why.

    Attributes
    ----------
    algorithm
        ``"bp"``, ``"chunked"`` or ``"blelloch"``.
    chunks
        Chunks of time for ``"chunked"``, else 1.
    reason
        One sentence.
    estimates
        Seconds that the model expects of each algorithm; those beyond the memory limit are left out.
    memory
        Bytes of scratch memory of each algorithm.
    """

    algorithm: str
    chunks: int
    reason: str
    estimates: Mapping[str, float]
    memory: Mapping[str, int]


def choose_recurrent_backward(
    cell: Literal["rnn", "gru"],
    T: int,
    B: int,
    H: int,
    dtype: Any = np.float32,
    xp: ModuleType = np,
    workers: int | None = None,
    memory_limit: int | None = None,
) -> Choice:
    """Choose the backward of a recurrent layer by estimated time.

    Parameters
    ----------
    cell
        ``"rnn"`` or ``"gru"``.
    T, B, H
        Length, batch and hidden size.
    dtype
        float32 or float64.
    xp
        ``numpy`` or ``cupy``: where the layer runs.
    workers
        Threads (or warp schedulers) to count with; by default what the machine has.
    memory_limit
        Bytes of scratch memory that may be used.

    Raises
    ------
    OptionError
        The cell is unknown, or a size is below 1.
    """
    check_choice("recurrent cell", cell, tuple(GATES))
    T, B, H = check_integer("T", T, 1), check_integer("B", B, 1), check_integer("H", H, 1)
    workers = None if workers is None else check_integer("workers", workers, 1)
    memory_limit = None if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    m = machine(backend.check_module(xp), workers)
    return _choose(cell, T, B, H, backend.float_dtype(dtype).itemsize, m, memory_limit)


@lru_cache(maxsize=256)
def _choose(cell: str, T: int, B: int, H: int, itemsize: int, m: Machine, memory_limit: int | None) -> Choice:
    recursion = _recursion(cell, T, B, H, itemsize, m)
    chunks, chunked = min(
        ((c, _chunked(cell, T, B, H, itemsize, m, c)) for c in _chunk_counts(T, B, m)), key=lambda pair: pair[1]
    )
    seconds = {"bp": recursion, "chunked": chunked, "blelloch": _stored(T, B, H, itemsize, m)}
    memory = {
        "bp": 0,
        "chunked": chunks * B * (H * H + H) * itemsize,
        "blelloch": sum(p.mm for p in level_counts("blelloch", T)) * B * H * H * itemsize
        + T * B * H * (H + 1) * itemsize,
    }
    fits = {name: t for name, t in seconds.items() if memory_limit is None or memory[name] <= memory_limit}
    margin = {"bp": 1.0, "chunked": 1.0 / MARGIN, "blelloch": 1.0 / STORED_MARGIN}
    best = min(fits, key=lambda name: fits[name] * margin[name])
    shown = ", ".join(f"{name} {_time(t)}" for name, t in sorted(fits.items(), key=lambda pair: pair[1]))
    left_out = [name for name in seconds if name not in fits]
    reason = f"{best} is expected to do best on a {m.name} for T={T}, B={B}, H={H}: {shown}"
    if best == "bp":
        reason += f"; a scan does about {H} times the work of the recursion"
    if left_out:
        reason += f"; beyond the memory limit: {', '.join(left_out)}"
    return Choice(best, chunks if best == "chunked" else 1, reason, fits, memory)


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


def _chunk_counts(T: int, B: int, m: Machine) -> list[int]:
    """Numbers of chunks worth trying: powers of two up to eight (chunk, sample) pairs a worker.

    Three at least (if T allows): with fewer, no chunk is reduced while another is.
    """
    least, most = min(3, T), min(T, max(ceil(8 * m.workers / B), 3))
    tried = {least, most, m.workers} | {2**k for k in range(2, most.bit_length())}
    return sorted(c for c in tried if least <= c <= most)


def _recursion(cell: str, T: int, B: int, H: int, itemsize: int, m: Machine) -> float:
    """Seconds of the fused sequential kernel."""
    if m.is_device:
        return m.call + T * _device_step(cell, H, itemsize, m) * max(1.0, B / m.workers)
    return m.call + T * _host_step(cell, B, H, itemsize, m)


def _chunked(cell: str, T: int, B: int, H: int, itemsize: int, m: Machine, chunks: int) -> float:
    """Seconds of the fused reduce-then-scan kernels: reduce with matrices, combine, apply with vectors."""
    length = ceil(T / chunks)
    inner = chunks - 2  # the first chunk works with vectors, the last needs no product
    if inner < 1:
        return _recursion(cell, T, B, H, itemsize, m) + 2 * m.call
    per_step = GATES[cell] * 2.0 * H**3  # of one sample's matrix
    if m.is_device:
        idle = LANES * ceil(H / LANES) / H  # lanes without a hidden unit
        matrix = m.step + idle * per_step / m.rate(itemsize)
        vector = _device_step(cell, H, itemsize, m)
        groups = B
    else:
        groups = ceil(B / m.lanes(itemsize))
        samples = B / groups
        half = m.double if itemsize == 8 else 1.0
        matrix = HOST_STEP[cell] + samples * per_step / (half * HOST_RATE["matrix"])
        vector = _host_step(cell, ceil(samples), H, itemsize, replace(m, workers=1))
    reduce = length * max(matrix, ((inner * matrix) + vector) * groups / m.workers)
    combine = chunks * (m.step + 2.0 * H * H / m.rate(itemsize)) * max(1.0, groups / m.workers)
    apply = length * vector * max(1.0, chunks * groups / m.workers)
    return 3 * m.call + reduce + combine + apply


def _stored(T: int, B: int, H: int, itemsize: int, m: Machine) -> float:
    """Seconds of Algorithm 1 over stored Jacobians: it writes them, then a kernel call a level."""
    block = float(H * H * B * itemsize)
    seconds = T * block / m.bandwidth
    for level in level_counts("blelloch", T):
        flops = 2.0 * (level.mm * H**3 + level.mv * H**2) * B / (m.workers * m.rate(itemsize))
        seconds += m.call + max(flops, (3 * level.mm + level.mv) * block / m.bandwidth)
    return seconds + tree_levels(T) * m.step


def _host_step(cell: str, B: int, H: int, itemsize: int, m: Machine) -> float:
    """Seconds of one step of the sequential host kernel; threads share the batch, a vector of samples each."""
    half = m.double if itemsize == 8 else 1.0
    work = GATES[cell] * 2.0 * H * H * B / (half * HOST_RATE["vector"])
    return HOST_STEP[cell] + work / min(m.workers, ceil(B / m.lanes(itemsize)))


def _device_step(cell: str, H: int, itemsize: int, m: Machine) -> float:
    """Seconds of one step of the sequential device kernel."""
    base = SEQUENTIAL_STEP[cell] * (1.5 if itemsize == 8 else 1.0)
    if H <= LANES:
        return base
    clock = m.flops / LANES  # m.flops is 2 · 32 · clock at half of the peak
    return base + GATES[cell] * itemsize * H * H / SHARED_BANDWIDTH / clock
