"""Memory of arrays on the host, used again: fresh pages cost more than many kernels."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.check import Array
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import forkable_lock

# A pool for large NumPy arrays.
#
# A training step allocates the same large arrays every time. The C library returns memory of that size to the system
# when it is freed, and the next step pays for thousands of page faults: as much time as the arithmetic, in a GRU of
# hidden size 20. Arrays from here return their memory to the pool when their last view dies. CuPy has its own pool.

SMALLEST = 1 << 18
"""Bytes below which the C library keeps freed memory itself."""
KEPT = 1 << 28
"""Most bytes of unused memory in the pool."""
ALIGNMENT = 64
"""A cache line, and the widest vector."""


class _Memory(NamedTuple):
    """Bytes, and the first address in them that is a multiple of `ALIGNMENT`; NumPy takes microseconds to say it."""

    data: np.ndarray
    address: int

    @classmethod
    def new(cls, size: int) -> _Memory:
        """Allocate `size` bytes and room for the alignment."""
        data = np.empty(size + ALIGNMENT, np.uint8)
        return cls(data, -(-data.ctypes.data // ALIGNMENT) * ALIGNMENT)


class _Block:
    """Memory on loan: the base of a NumPy array and of all its views. Its end returns the memory."""

    __slots__ = ("__array_interface__", "_memory", "_pool")

    def __init__(self, pool: HostPool, memory: _Memory, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self._pool, self._memory = pool, memory
        self.__array_interface__ = {"shape": shape, "typestr": dtype.str, "data": (memory[1], False), "version": 3}

    def __del__(self) -> None:
        self._pool.give_back(self._memory)


class HostPool:
    """Free memory by size, at most `kept` bytes. Thread-safe."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept
        self.free_bytes = 0
        self._free: dict[int, list[_Memory]] = {}
        self._lock = forkable_lock(self._forget)  # reentrant: garbage collection inside may return a block

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised C-contiguous array, like numpy.empty; MemoryLimitError if there is no memory."""
        dtype = np.dtype(dtype)
        size = math.prod(shape) * dtype.itemsize
        try:
            if size < SMALLEST:
                return np.empty(shape, dtype)
            with self._lock:
                same = self._free.get(size + ALIGNMENT)
                memory = same.pop() if same else None
                if memory is not None:
                    self.free_bytes -= size + ALIGNMENT
            if memory is None:
                memory = _Memory.new(size)
        except (MemoryError, ValueError, OverflowError) as error:  # ValueError: more than NumPy can count
            raise MemoryLimitError(f"An array of shape {tuple(shape)} does not fit in memory",
                                   expected="memory for its elements", got=f"{size} bytes of {dtype}",
                                   remedy="Use smaller batches, smaller inputs or less padding") from error  # fmt: skip
        return np.asarray(_Block(self, memory, tuple(shape), dtype))

    def release(self) -> int:
        """Release all free memory to the system; return its bytes."""
        with self._lock:
            freed, self.free_bytes = self.free_bytes, 0
            self._free.clear()
        return freed

    def _forget(self) -> None:
        """Start empty in a child process forked while another thread changed the pool."""
        self.free_bytes, self._free = 0, {}

    def give_back(self, memory: _Memory) -> None:
        """Take memory back; beyond `kept`, memory of the size first met is released."""
        size = memory[0].nbytes
        if size > self.kept:
            return
        with self._lock:
            self._free.setdefault(size, []).append(memory)
            self.free_bytes += size
            while self.free_bytes > self.kept:
                oldest = next(iter(self._free))
                if self._free[oldest]:
                    self.free_bytes -= self._free[oldest].pop().data.nbytes
                if not self._free[oldest]:
                    del self._free[oldest]


_HOST = HostPool()


def release() -> int:
    """Release the pool's unused memory to the system; return its bytes."""
    return _HOST.release()


def empty(xp: ModuleType, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return an uninitialised array of `xp`; large NumPy arrays come from the pool."""
    if xp is np and 0 < math.prod(shape) * np.dtype(dtype).itemsize < SMALLEST:
        return np.empty(shape, dtype)
    return _HOST.empty(shape, dtype) if xp is np else xp.empty(shape, dtype)
