"""What the cost model knows of a machine: workers, memory, and rates, the host's from its price list.

The host's prices are measured (`sparsebp.backend.machine.prices`); a device's are told from what its driver says.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import ModuleType

from sparsebp import backend
from sparsebp.backend.machine.price_file import prices
from sparsebp.backend.machine.prices import Prices
from sparsebp.core import threads


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
    prices
        The host's price list; None for a device.
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
    prices: Prices | None = None

    def rate(self, itemsize: int) -> float:
        """Return one worker's operations a second for values of `itemsize` bytes."""
        return self.flops * (self.double if itemsize == 8 else 1.0)

    def products(self, count: float, strategy: str, width: int, itemsize: int) -> float:
        """Return the seconds in which one worker does so many products of a strategy, each with `width` values."""
        if self.prices is None:
            return 2.0 * count / self.rate(itemsize)
        return count * self.prices.product(strategy, width) * (self.prices.double if itemsize == 8 else 1.0)

    def moved(self, size: float) -> float:
        """Return the seconds in which one worker, the others beside it, reads or writes so many bytes."""
        far = size / (self.bandwidth / self.workers)
        return far if self.prices is None or size > self.prices.cache else size * self.prices.near

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
    found = _host(threads.get_threads(), prices(), host_memory()) if number is None else _device(xp, number)
    if workers is None:
        return found
    return replace(found, workers=workers, issuers=workers, bandwidth=found.bandwidth * workers / found.workers)


@lru_cache(maxsize=8)  # asked for at every forward of a recurrent layer
def _host(workers: int, p: Prices, memory: int) -> Machine:
    return Machine(
        name=f"CPU with {workers} thread{'s' if workers != 1 else ''}",
        workers=workers,
        flops=2.0 / p.product("dense", 2),
        double=1.0 / p.double,
        bandwidth=min(workers, p.sharing) / p.far,
        vector_bytes=64,
        call=p.call,
        step=p.step,
        is_device=False,
        source=f"{'calibrated' if p.calibrated else 'shipped'} prices, "
        f"measured on {p.measured.get('cpu')}, {p.measured.get('date')}",
        memory=memory,
        prices=p,
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
        double=1 / (attributes.get("SingleToDoublePrecisionPerfRatio") or 2),
        bandwidth=0.8 * bandwidth,
        vector_bytes=0,
        call=8e-6,
        step=0.1e-6,
        is_device=True,
        source="the device's clock, multiprocessors and memory bus; half of the peak; launch and step time predicted",
        memory=backend.device_memory(xp),
    )
