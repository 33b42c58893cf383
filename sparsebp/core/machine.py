"""The machine: its processor, memory, and number of workers."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from sparsebp.core import backend, threads


class Machine(NamedTuple):
    """The machine that a scan is planned for."""

    name: str  # shown in reasons
    workers: int  # that run at the same time: CPU threads, or a GPU's warp schedulers
    memory: int  # bytes; a scan that needs more is refused
    is_device: bool  # whether it is a GPU


def machine(xp: ModuleType, workers: int | None = None) -> Machine:
    """Return the machine behind ``numpy`` or ``cupy``; `workers` replaces its number of workers."""
    number = backend.device_number(xp)
    if number is not None:
        found = _device(xp, number)
    else:
        count = threads.get_threads()
        found = Machine(f"CPU with {count} thread{'s' if count != 1 else ''}", count, host_memory(), False)
    return found if workers is None else found._replace(workers=workers)


@cache
def _device(xp: ModuleType, number: int) -> Machine:
    processors = int(backend.device_attributes(xp)["MultiProcessorCount"])  # slow: it asks the driver
    name = f"GPU with {processors} multiprocessors"
    return Machine(name, 4 * processors, backend.device_memory(xp), True)  # four schedulers each


def host_memory() -> int:
    """Return the bytes of physical memory."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**63


@cache
def cpu_model() -> str:
    """Return the processor's name as the system gives it, with family and model, as a virtual machine's is short."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "model name" in facts:
            numbers = [f"{key.split()[-1]} {facts[key]}" for key in ("cpu family", "model") if key in facts]
            return facts["model name"] + (f" ({', '.join(numbers)})" if numbers else "")
    except OSError:
        pass
    return platform.processor() or platform.machine()
