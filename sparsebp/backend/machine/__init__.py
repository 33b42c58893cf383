"""What the cost model knows of a machine: a few rates, each with its source.

The numbers decide between algorithms, whose costs differ by factors; they are not a forecast of times. `calibrated`
in `sparsebp.scan.planning.calibrate` measures the host's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import ModuleType

from sparsebp import backend
from sparsebp.core import threads

HOST_EFFICIENCIES = {
    "matvec": (0.05, 0.4),
    "scale_rows": (0.06, 0.25),
    "scale_columns": (0.06, 0.25),
    "gather": (0.06, 0.25),
    "positions": (0.065, 0.16),
    "dense": (1.0, 1.0),
}
"""Share of the host's rate that steps of sparse chains reach, one sample and a batch. Measured on the steps of a scan
over VGG-11 at 3 % of its weights, batch 1 and 16, two threads; what streams from memory is bound by bandwidth first."""


@dataclass(frozen=True)
class Machine:
    """Rates of the machine that a scan runs on.

    Attributes
    ----------
    name
        Shown in explanations.
    workers
        Workers that can each run a product at the same time: CPU threads, or a GPU's warp schedulers.
    flops
        Floating-point operations a second of one worker in float32.
    double
        Rate of float64 over float32.
    bandwidth
        Bytes a second of all workers together.
    vector_bytes
        Bytes of the vector that a worker holds samples in; 0 where every sample is a task of its own.
    call
        Seconds for one kernel call: the Python launcher with its checks, on a GPU the launch too.
    step
        Seconds that one dependent step inside a kernel takes at least.
    is_device
        Whether it is a GPU.
    source
        Where the numbers come from.
    memory
        Bytes; a scan that needs more is not planned.
    issuers
        Steps that can be started at the same time. 1: one thread calls one kernel after the other, which then has all
        workers; as many as workers where each works for itself, as on the machine of BPPSA §3.6.
    efficiencies
        Share of `flops` that the steps of sparse chains reach, by strategy: of one sample, and of a batch.
    """

    name: str
    workers: int
    flops: float
    double: float
    bandwidth: float
    vector_bytes: int
    call: float
    step: float
    is_device: bool
    source: str
    memory: int = 2**63
    issuers: int = 1
    efficiencies: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)

    def rate(self, itemsize: int) -> float:
        """Return one worker's operations a second for values of `itemsize` bytes."""
        return self.flops * (self.double if itemsize == 8 else 1.0)

    def efficiency(self, strategy: str, width: int) -> float:
        """Return the share of the rate that a step with this strategy and so many values an entry reaches."""
        general = self.efficiencies.get("positions", (1.0, 1.0))
        one, many = self.efficiencies.get(strategy, general)
        return one if width == 1 else many

    def lanes(self, itemsize: int) -> int:
        """Return how many samples one task takes."""
        return max(1, self.vector_bytes // itemsize)


def machine(xp: ModuleType, workers: int | None = None) -> Machine:
    """Return the machine behind the array module `xp`, with its stated rates.

    Parameters
    ----------
    xp
        ``numpy`` or ``cupy``.
    workers
        Replaces the number of workers: then each brings its share of the bandwidth and starts steps by itself.
    """
    number = backend.device_number(xp)
    found = _host() if number is None else _device(xp, number)
    if workers is None:
        return found
    return replace(found, workers=workers, issuers=workers, bandwidth=found.bandwidth * workers / found.workers)


def _host() -> Machine:
    workers = threads.get_threads()
    return Machine(
        name=f"CPU with {workers} thread{'s' if workers != 1 else ''}",
        workers=workers,
        flops=40e9,
        double=0.5,
        bandwidth=20e9 * workers,
        vector_bytes=64,
        call=10e-6,
        step=0.1e-6,
        is_device=False,
        source="measured on x86 cores with 64-byte vectors: dense_reduce 38 GFLOP/s a thread at H = 20 and B = 16, "
        "dense_chain 16 GB/s and at least 0.1 µs a step, a call 4 µs to 15 µs",
        memory=host_memory(),
        efficiencies=HOST_EFFICIENCIES,
    )


def host_memory() -> int:
    """Return the bytes of physical memory."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63


@cache
def _device(xp: ModuleType, number: int) -> Machine:
    attributes = backend.device_attributes(xp)  # asks the driver for each: slow, hence kept by device number
    processors = int(attributes["MultiProcessorCount"])
    # clocks are given in kHz; where a driver keeps them to itself, those of an H100
    clock = (attributes.get("ClockRate") or 1_755_000) * 1e3
    memory_clock = (attributes.get("MemoryClockRate") or 2_619_000) * 1e3
    bandwidth = 2 * memory_clock * (attributes.get("GlobalMemoryBusWidth") or 5120) / 8
    return Machine(
        name=f"GPU with {processors} multiprocessors",
        workers=4 * processors,
        flops=2 * 32 * clock * 0.5,
        double=0.5,
        bandwidth=0.8 * bandwidth,
        vector_bytes=0,
        call=8e-6,
        step=0.1e-6,
        is_device=True,
        source="the device's clock, multiprocessors and memory bus; half of the peak; launch and step time predicted",
        memory=backend.device_memory(xp),
    )
