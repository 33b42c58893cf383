"""Large arrays whose memory is used again by the next step, as device pools do it.

A training step allocates the same large arrays every time. The C library gives memory of that size back to the system
when it is freed, and the next step pays for thousands of page faults: as much time as the arithmetic, in a GRU of
hidden size 20. NumPy arrays from here return their memory to a pool when the last view of them dies. CuPy has a pool of
its own and allocates as always.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import forkable_lock
from sparsebp.core.types import Array

SMALLEST = 1 << 18
"""Bytes below which the C library keeps memory anyway."""
KEPT = 1 << 28
"""Bytes of unused memory that the pool keeps at most."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""


class _Block:
    """Memory on loan: the base of a NumPy array and of all its views. Its death gives the memory back."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: HostPool, memory: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._pool, self._memory = pool, memory
        address = -(-memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": (address, False), "version": 3}

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class HostPool:
    """Free memory by size. Safe for several threads.

    Parameters
    ----------
    kept
        Bytes of free memory beyond which memory is given back to the system.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self.free_bytes = 0
        self._free: dict[int, list[np.ndarray]] = {}
        self._lock = forkable_lock(self._forget)  # a garbage collection inside may give a block back: it is reentrant

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised C-contiguous array, as numpy.empty.

        Raises
        ------
        MemoryLimitError
            It is more than the system gives.
        """
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            if size < SMALLEST:
                return np.empty(shape, dtype)
            with self._lock:
                same = self._free.get(size + ALIGNMENT)
                memory = same.pop() if same else None
                if memory is not None:
                    self.free_bytes -= memory.nbytes
            if memory is None:
                memory = np.empty(size + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError, OverflowError) as error:  # the latter: more than NumPy counts
            raise MemoryLimitError(
                f"An array of shape {tuple(shape)} does not fit in memory", expected="memory for its elements",
                got=f"{size} bytes of {dtype}", remedy="Use smaller batches, a smaller input or less padding",
            ) from error  # fmt: skip
        return np.asarray(_Block(self, memory, tuple(shape), dtype))

    def release(self) -> int:
        """Drop all free memory; return its bytes."""
        with self._lock:
            freed, self.free_bytes = self.free_bytes, 0
            self._free.clear()
        return freed

    def _forget(self) -> None:
        """Begin anew in a child process that another thread of its parent left half a change."""
        self.free_bytes, self._free = 0, {}

    def give_back(self, memory: np.ndarray) -> None:
        """Take memory back; if that is too much in all, memory of the size that was met first makes room."""
        if memory.nbytes > self.kept:
            return
        with self._lock:
            self._free.setdefault(memory.nbytes, []).append(memory)
            self.free_bytes += memory.nbytes
            while self.free_bytes > self.kept:
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self.free_bytes -= self._free[oldest].pop().nbytes
                if not self._free[oldest]:
                    del self._free[oldest]


_HOST = HostPool()


def release() -> int:
    """Give the pool's unused memory back to the system; return its bytes."""
    return _HOST.release()


def empty(xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array of `xp`, from the pool if it is a large one of NumPy's."""
    return _HOST.empty(shape, dtype) if backend.is_host(xp) else xp.empty(shape, dtype)
