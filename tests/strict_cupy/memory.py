"""Memory of the device: pools, pointers, pinned memory.

A pool gives what was freed to whoever asks next for as much on the same stream, as CuPy's does, and what it gives is
filled with bytes that are NaN as a float and -1 as an integer, by the stream whose memory it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from strict_cupy.device import DEVICE, current_device, current_stream

UNIT = 512
"""Bytes that sizes are rounded up to, and that addresses are multiples of."""
UNWRITTEN = 0xFF


class _Current(threading.local):
    allocator: Callable[[int], MemoryPointer] | None = None


_current = _Current()


class Memory:
    """A piece of a pool's memory; when nobody holds it, the pool has it back."""

    def __init__(self, pool: MemoryPool, size: int, place: tuple[int, int], buffer: np.ndarray) -> None:
        self.size, self.buffer, self.device_id = size, buffer, place[0]
        self.ptr = buffer.ctypes.data if size else 0
        weakref.finalize(self, pool._take_back, place, buffer).atexit = False
        with _lock:
            _held.add(self)


class Foreign(Memory):
    """Memory of another library, which `owner` keeps."""

    def __init__(self, address: int, size: int, owner: Any = None) -> None:
        self.ptr, self.size, self.device_id, self.owner = address, size, current_device(), owner
        self.buffer = _host_bytes(address, size, owner) if size else np.empty(0, np.uint8)
        with _lock:
            _held.add(self)


class UnownedMemory(Foreign):
    """As ``cupy.cuda.UnownedMemory``. Who asks for an owner, to use the memory, waits for the current stream.

    Until then all owners are kept: other libraries' memory is freed in the order of the stream, too.
    """

    def __init__(self, ptr: int, size: int, owner: Any, device_id: int | None = None) -> None:
        super().__init__(ptr, size, owner)
        _lent.setdefault(current_stream().ptr, []).append(owner)

    @property
    def _owner(self) -> Any:
        stream = current_stream().ptr
        DEVICE.synchronize(stream)
        _lent.pop(stream, None)
        return self.owner


_lent: dict[int, list[Any]] = {}


_held: weakref.WeakSet[Memory] = weakref.WeakSet()
_lock = threading.RLock()


def holds(address: int, size: int) -> bool:
    """Say whether so many bytes from an address on are somebody's memory on the current device."""
    with _lock:
        return any(
            each.ptr <= address and address + size <= each.ptr + each.size and each.device_id == current_device()
            for each in _held
        )


class MemoryPointer:
    """As ``cupy.cuda.MemoryPointer``: a place in a piece of memory."""

    def __init__(self, mem: Memory, offset: int) -> None:
        self.mem, self.offset = mem, offset
        self.ptr = mem.ptr + offset if mem.ptr else 0
        self.device_id = mem.device_id

    @property
    def device(self) -> Any:
        from strict_cupy.modules import Device

        return Device(self.device_id)

    def bytes(self, size: int) -> np.ndarray:
        """Return the host's view of `size` bytes."""
        return self.mem.buffer[self.offset : self.offset + size]

    def copy_from_host_async(self, mem: Any, size: int, stream: Any = None) -> None:
        """Copy from the host; from memory that is not pinned CUDA takes a copy at once, from pinned memory later."""
        pointer = (current_stream() if stream is None else stream).ptr
        if pointer in DEVICE.captures:
            raise RuntimeError("the current stream is capturing, so H2D transfers are disallowed")
        if not size:
            return
        source, target, holder = _host_bytes(_address(mem), size), self.bytes(size), _holder(_address(mem))
        if holder is None:
            source = source.copy()
        DEVICE.submit(lambda _=holder: np.copyto(target, source), pointer, "h2d", "", size)

    def copy_from_device_async(self, src: MemoryPointer, size: int, stream: Any = None) -> None:
        pointer = (current_stream() if stream is None else stream).ptr
        if size:
            source, target = src.bytes(size), self.bytes(size)
            DEVICE.submit(lambda: np.copyto(target, source), pointer, "copies", "", size)

    def memset_async(self, value: int, size: int, stream: Any = None) -> None:
        pointer = (current_stream() if stream is None else stream).ptr
        if size:
            target = self.bytes(size)
            DEVICE.submit(lambda: target.fill(value), pointer, "memsets", "", size)


class MemoryPool:
    """As ``cupy.cuda.MemoryPool``."""

    def __init__(self, allocator: Any = None) -> None:
        self._free: dict[tuple[tuple[int, int], int], list[np.ndarray]] = {}
        self._lock = threading.RLock()  # a collection of garbage inside may give memory back
        self._used = 0

    def malloc(self, size: int) -> MemoryPointer:
        """Return memory whose bytes nobody has written."""
        rounded, stream = -(-size // UNIT) * UNIT, current_stream().ptr
        place = current_device(), stream
        with self._lock:
            DEVICE.check()
            free = self._free.get((place, rounded))
            if free:
                buffer = free.pop()
            else:
                room = np.empty(rounded + UNIT, np.uint8)
                begin = -room.ctypes.data % UNIT
                buffer = room[begin : begin + rounded]
            self._used += rounded
        if size:
            DEVICE.submit(lambda: buffer.fill(UNWRITTEN), stream, "allocation", "", size)
        return MemoryPointer(Memory(self, size, place, buffer), 0)

    def _take_back(self, place: tuple[int, int], buffer: np.ndarray) -> None:
        with self._lock:
            self._used -= buffer.nbytes
            self._free.setdefault((place, buffer.nbytes), []).append(buffer)

    def free_all_blocks(self, stream: Any = None) -> None:
        with self._lock:
            self._free.clear()

    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> int:
        return sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)


_pool = MemoryPool()


def get_default_memory_pool() -> MemoryPool:
    """Return the pool that memory comes from unless something else is said."""
    return _pool


@contextlib.contextmanager
def using_allocator(allocator: Callable[[int], MemoryPointer] | None = None) -> Iterator[None]:
    """Take memory from `allocator` in this thread."""
    before, _current.allocator = _current.allocator, allocator
    try:
        yield
    finally:
        _current.allocator = before


def allocate(size: int) -> MemoryPointer:
    """Return memory of the allocator in use.

    Raises
    ------
    RuntimeError
        Work is captured, and nobody has said where memory comes from: it would be given to others while the graph
        still uses it. CuPy does not refuse that.
    """
    if _current.allocator is not None:
        return _current.allocator(size)
    if current_stream().ptr in DEVICE.captures:
        raise RuntimeError("memory of the default pool is taken while work is captured")
    return _pool.malloc(size)


# ---- the host's memory -----------------------------------------------------------------------------------------------


class PinnedMemoryPool:
    """As ``cupy.cuda.PinnedMemoryPool``."""

    def malloc(self, size: int) -> Any:
        """Return pinned memory, with ``ptr``, ``mem``, ``size()`` and the buffer protocol."""
        kind = type("PinnedMemoryPointer", (ctypes.c_byte * max(size, 1),), {"size": lambda self: size})
        buffer = kind()
        buffer.mem, buffer.ptr = buffer, ctypes.addressof(buffer)
        _pinned[:] = [each for each in _pinned if each[2]() is not None]
        _pinned.append((buffer.ptr, buffer.ptr + max(size, 1), weakref.ref(buffer)))
        return buffer

    def free_all_blocks(self) -> None:
        """Do nothing: nothing is kept."""


_pinned: list[tuple[int, int, weakref.ref[Any]]] = []
"""Of each piece of pinned memory: where it begins and ends, and what holds it."""
_pinned_pool = PinnedMemoryPool()
_pinned_allocator: list[Callable[[int], Any]] = [_pinned_pool.malloc]


def get_default_pinned_memory_pool() -> PinnedMemoryPool:
    return _pinned_pool


def set_pinned_memory_allocator(allocator: Callable[[int], Any] | None = None) -> None:
    """Take pinned memory from `allocator`."""
    _pinned_allocator[0] = allocator or _pinned_pool.malloc


def alloc_pinned_memory(size: int) -> Any:
    return _pinned_allocator[0](size)


def _holder(address: int) -> Any:
    """Return what holds the pinned memory at an address of the host, None if it is not pinned."""
    return next((held() for begin, end, held in _pinned if begin <= address < end and held() is not None), None)


def _address(mem: Any) -> int:
    return mem if isinstance(mem, int) else mem.value


def _host_bytes(address: int, size: int, owner: Any = None) -> np.ndarray:
    memory = (ctypes.c_uint8 * size).from_address(address)
    memory.owner = owner  # type: ignore[attr-defined]  # until work that was asked for has been done
    return np.frombuffer(memory, np.uint8)
