"""``cupy.RawModule`` and ``cupy.RawKernel``: the very CUDA source, compiled for the host and run by `cuda_on_cpu`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cuda_on_cpu.executor import Kernel, Module
from strict_cupy.arrays import ndarray
from strict_cupy.counts import note_compiled
from strict_cupy.device import DEVICE, current_stream


@cache
def _module(code: str, options: tuple[str, ...]) -> Module:
    note_compiled(code, options)
    return Module(code, options, mode="fast", in_place=True)


class RawModule:
    """As ``cupy.RawModule``, for NVRTC and without C++ names."""

    def __init__(self, *, code: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        if not isinstance(options, tuple):
            raise TypeError(f"Argument 'options' has incorrect type (expected tuple, got {type(options).__name__})")
        self.code, self.options, self.backend = code, options, backend

    def get_function(self, name: str) -> RawKernel:
        """Return a kernel; the source is compiled at the first one."""
        DEVICE.check()
        return RawKernel.of(_module(self.code, self.options).get_function(name), name)

    def compile(self, log_stream: Any = None) -> None:
        _module(self.code, self.options)


class RawKernel:
    """As ``cupy.RawKernel``."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._set(_module(code, options).get_function(name), name)

    @classmethod
    def of(cls, kernel: Kernel, name: str) -> RawKernel:
        """Return what a module hands out."""
        found = cls.__new__(cls)
        found._set(kernel, name)
        return found

    def _set(self, kernel: Kernel, name: str) -> None:
        self._kernel, self.name = kernel, name

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._kernel.max_dynamic_shared_size_bytes

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        self._kernel.max_dynamic_shared_size_bytes = size

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Any, *, shared_mem: int = 0) -> None:
        values = tuple(self._value(a) for a in args)
        grid, block = (tuple(max(1, n) for n in (*size, 1, 1)[:3]) for size in (grid, block))  # as CuPy does
        launch = self._kernel.prepared(grid, block, values, shared_mem)
        DEVICE.submit(launch, current_stream().ptr, "kernel", self.name)

    def _value(self, value: Any) -> Any:
        """Return an argument as the executor takes it."""
        if isinstance(value, ndarray):
            return value.host
        if value is None:
            return np.uint64(0)
        if isinstance(value, np.ndarray):
            if value.size != 1:
                raise TypeError(
                    f"You are trying to pass a numpy.ndarray of shape {value.shape} as a kernel parameter. Only "
                    "numpy.ndarrays of size one can be passed by value. If you meant to pass a pointer to __global__ "
                    "memory, you need to pass a cupy.ndarray instead."
                )
            return value.reshape(-1)[0]
        if not isinstance(value, (bool, int, float, np.generic)):
            raise TypeError(f"Unsupported type {type(value)}")
        return value
