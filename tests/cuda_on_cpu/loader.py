"""What ``DeviceKernels`` gets in place of CuPy's loader, to run its launchers and sources on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from cuda_on_cpu.compiler import Mode
from cuda_on_cpu.executor import SHARED_AT_MOST, AddressTable, Kernel, Module, Order
from sparsebp.kernels.device.launch import Defines, options, source


class NoGpu:
    """What every loader tells the launchers of a device that is not there."""

    max_shared_memory = SHARED_AT_MOST
    """Bytes of shared memory that a block can opt in to, of compute capability 9.0."""
    multiprocessors = 132
    double_cost = 2
    device = None

    def get(self, file: str, defines: Defines) -> Any:
        raise AssertionError(f"{file} was about to be launched with arguments that are wrong")

    def addresses(self, arrays: Sequence[np.ndarray | None], count: int) -> AddressTable:
        """Return a stand-in of the table of addresses, see `AddressTable`."""
        return AddressTable.of(arrays, count)


class NotingLoader(NoGpu):
    """A loader whose launches do nothing but call ``note(file, defines, kernel, grid, block, args, shared_mem=…)``."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def get(self, file: str, defines: Defines) -> Any:
        return SimpleNamespace(get_function=lambda name: partial(self._note, file, defines, name))


class ExecutorLoader(NoGpu):
    """Compiles the kernels' sources for the CPU executor, each (file, defines) once.

    Parameters
    ----------
    order, seed, mode
        As of `cuda_on_cpu.executor.Module`.
    """

    multiprocessors = 4
    """Few, so that launches sized by it stay small, and more than one, so that they are split."""

    def __init__(self, order: Order = "forward", seed: int = 0, mode: Mode = "check") -> None:
        self.order, self.seed, self.mode = order, seed, mode
        self.launched: set[tuple[str, str]] = set()
        """(file, kernel) of everything that was launched, for tests that ask what was exercised."""
        self._modules: dict[tuple[str, tuple[str, ...]], Module] = {}

    def get(self, file: str, defines: Defines) -> _Recorded:
        """Return the module of `file` compiled with `defines`."""
        key = (file, options(defines))
        if key not in self._modules:
            self._modules[key] = Module(source(file), key[1], self.order, self.seed, self.mode)
        return _Recorded(self, file, self._modules[key])


class _Recorded:
    """A module that notes which of its kernels are asked for."""

    def __init__(self, loader: ExecutorLoader, file: str, module: Module) -> None:
        self._loader, self._file, self._module = loader, file, module

    def get_function(self, name: str) -> Kernel:
        self._loader.launched.add((self._file, name))
        return self._module.get_function(name)
