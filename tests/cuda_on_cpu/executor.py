"""Stand-ins of ``cupy.RawModule`` and ``cupy.RawKernel`` that run on the CPU and take NumPy arrays.

CuPy checks nothing about a kernel's arguments. Here everything that can be known is: the number of arguments, the width
and kind of scalars, the element type of arrays, contiguity, grid and block limits, and shared memory beyond 48 KiB that
was not asked for.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cuda_on_cpu.compiler import Library, Mode, build
from sparsebp.kernels.device.launch import ByValue, by_value

Order = Literal["forward", "reverse", "random"]
ORDERS: tuple[Order, ...] = ("forward", "reverse", "random")

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
SHARED_WITHOUT_ASKING = 48 * 1024
SHARED_AT_MOST = 227 * 1024
ARGUMENTS_AT_MOST = 4096
"""Bytes of a launch's arguments; from CUDA 12.1 on there may be more."""
DEVICE_ALIGNMENT = 512


class LaunchError(Exception):
    """A launch that a GPU refuses or, worse, takes without a word: wrong arguments, grid, block or shared memory."""


class KernelFault(Exception):
    """A kernel did what it must not do; the message names the file, the line, the thread and the array."""


class _Parameter(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_char),
        ("pointee_kind", ctypes.c_char),
        ("pointee_const", ctypes.c_bool),
        ("size", ctypes.c_int),
        ("pointee_size", ctypes.c_int),
    )


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_int),
        ("max_threads", ctypes.c_int),
    )


class Module:
    """A compiled source.

    Parameters
    ----------
    source
        CUDA C++ text.
    options
        Compiler options, of which the ``-D`` ones matter.
    order
        In which order the threads of a block and the blocks of a grid run.
    seed
        Of the random order; the same at every launch, so that a failure can be repeated.
    mode
        ``"check"`` or ``"fast"``, see `cuda_on_cpu.compiler.build`.
    in_place
        Whether kernels get the arrays' own addresses, so that an array of addresses means what it says. Nothing can be
        checked then.
    """

    def __init__(
        self, source: str, options: tuple[str, ...] = (), order: Order = "forward", seed: int = 0,
        mode: Mode = "check", in_place: bool = False,
    ) -> None:  # fmt: skip
        if in_place and mode == "check":
            raise ValueError("accesses are checked in arrays that are placed, not in place: use mode='fast'")
        self.order, self.seed, self.mode, self.in_place = order, seed, mode, in_place
        self.library: Library = build(source, options, mode)
        self.runtime = _runtime(self.library.runtime)
        self._handle = ctypes.CDLL(str(self.library.path))

    def get_function(self, name: str) -> Kernel:
        """Return kernel `name`.

        Raises
        ------
        LaunchError
            The source, with these options, has no such kernel.
        """
        if name not in self.library.parameters:
            raise LaunchError(f"no kernel {name!r}; there are {', '.join(self.library.parameters)}")
        return Kernel(self, name, _Kernel.in_dll(self._handle, f"emulator_kernel_{name}"))


class Kernel:
    """One kernel; call it as a ``cupy.RawKernel``: ``kernel(grid, block, args, shared_mem=bytes)``."""

    def __init__(self, module: Module, name: str, info: _Kernel) -> None:
        self.module, self.name, self._info = module, name, info
        self.max_dynamic_shared_size_bytes = SHARED_WITHOUT_ASKING
        self._parameters = [info.parameters[i] for i in range(info.count)]
        self._labels = [f"argument {i} ({n})" for i, n in enumerate(module.library.parameters[name])]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], *, shared_mem: int = 0
    ) -> None:
        """Run the kernel to its end; arrays are written in place.

        Raises
        ------
        LaunchError
            The launch itself is wrong.
        KernelFault
            The kernel is.
        """
        self.prepared(grid, block, args, shared_mem)()

    def prepared(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], shared_mem: int = 0
    ) -> Callable[[], None]:
        """Check a launch, and return what runs it, as often as that is called."""
        grid, block = (tuple(int(n) for n in (*shape, 1, 1)[:3]) for shape in (grid, block))
        self._check_launch(grid, block, shared_mem)
        if len(args) != len(self._parameters):
            self._refuse(f"takes {len(self._parameters)} arguments, got {len(args)}")
        if sum(parameter.size for parameter in self._parameters) > ARGUMENTS_AT_MOST:
            self._refuse(f"takes more than {ARGUMENTS_AT_MOST} bytes of arguments")
        placed = _InPlace() if self.module.in_place else _Placed(self.module.runtime, self)
        values = [self._argument(i, value, placed) for i, value in enumerate(args)]
        return lambda: self._run(grid, block, values, placed, shared_mem)

    def _run(
        self, grid: tuple[int, ...], block: tuple[int, ...], given: list[Any], placed: _Placed | _InPlace,
        shared_mem: int,
    ) -> None:  # fmt: skip
        runtime, checking = self.module.runtime, self.module.mode == "check"
        runtime.emulator_reset(self._info.entry)
        placed.copy_in()
        values = [placed.pointer(v) if isinstance(v, np.ndarray) else v for v in given]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        fault = runtime.emulator_run(
            self._info.entry,
            pointers,
            (ctypes.c_uint * 3)(*grid),
            (ctypes.c_uint * 3)(*block),
            shared_mem,
            ORDERS.index(self.module.order),
            self.module.seed & 0xFFFFFFFF,
            checking,
        ).decode()
        placed.copy_out()
        if fault:
            raise KernelFault(f"{self._with_lines(fault)} [kernel {self.name}, {self.module.order} order]")

    def _refuse(self, why: str) -> None:
        raise LaunchError(f"kernel {self.name}: {why}")

    def _check_launch(self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int) -> None:
        if any(not 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
            self._refuse(f"grid {grid} is outside 1 … {MAX_GRID}")
        threads, most = math.prod(block), min(self._info.max_threads, MAX_THREADS)
        if min(block) < 1 or block[2] > 64 or threads > most:
            self._refuse(f"block {block} has {threads} threads; it may have 1 to {most} (launch bounds)")
        if not 0 <= shared_mem <= min(self.max_dynamic_shared_size_bytes, SHARED_AT_MOST):
            self._refuse(
                f"{shared_mem} bytes of shared memory; max_dynamic_shared_size_bytes is "
                f"{self.max_dynamic_shared_size_bytes}, the device has {SHARED_AT_MOST}"
            )

    def _argument(self, i: int, value: Any, placed: _Placed | _InPlace) -> Any:
        """Return a ctypes object holding scalar `value`, or the array itself, noted for placement."""
        parameter, label = self._parameters[i], self._labels[i]
        kind, size = parameter.kind.decode(), parameter.size
        if isinstance(value, ByValue):
            if kind != "S" or value.nbytes != size or value.size != 1:
                self._refuse(f"{label} is of kind {kind!r} and {size} bytes wide, got a struct of {value.nbytes} bytes")
            if not isinstance(value, AddressTable):
                return (ctypes.c_char * size).from_buffer_copy(value.tobytes())
            for row, array in enumerate(value.arrays):
                if array is not None:
                    placed.add(array, f"entry {row} of {label}", const=not array.flags.writeable)
            return value
        if isinstance(value, np.ndarray):
            if kind != "P":
                self._refuse(f"{label} is a scalar, got an array")
            if not value.flags.c_contiguous:
                self._refuse(f"{label} has strides {value.strides} for shape {value.shape}; kernels ignore strides")
            pointee = (parameter.pointee_kind.decode(), parameter.pointee_size)
            if pointee[0] != "S" and pointee != (value.dtype.kind, value.dtype.itemsize):
                self._refuse(f"{label} points to {pointee[0]}{pointee[1]}, got an array of {value.dtype}")
            placed.add(value, label, parameter.pointee_const)
            return value
        if not isinstance(value, np.generic):  # as CuPy passes them
            value = np.bool_(value) if isinstance(value, bool) else np.asarray(value)[()]
        if value.dtype.itemsize != size:
            self._refuse(f"{label} is {size} bytes wide, got {value.dtype} of {value.dtype.itemsize} bytes")
        if kind == "P" and (value.dtype.kind not in "iu" or value != 0):
            self._refuse(f"{label} is a pointer, got {value!r}")
        if kind in "iufb" and value.dtype.kind not in {"i": "iu", "u": "iu", "f": "f", "b": "b"}[kind]:
            self._refuse(f"{label} is of kind {kind!r}, got {value.dtype}")
        return (ctypes.c_char * size).from_buffer_copy(value.tobytes())

    def _with_lines(self, text: str) -> str:
        """Replace each ``@{offset}`` by the place in the source, found with addr2line."""
        return re.sub(r"@\{([0-9a-f]+)\}", lambda m: _place_in_source(self.module.library.path, int(m[1], 16)), text)


class AddressTable(ByValue):
    """A struct of addresses in a launch's arguments: ``arrays`` are placed like arguments, None gives 0."""

    arrays: tuple[np.ndarray | None, ...]

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray | None], count: int) -> AddressTable:
        """Return the table of these arrays, `count` entries long; what it holds is filled in at each launch."""
        table = by_value(np.zeros(count, np.int64)).view(cls)
        table.arrays = tuple(arrays)
        return table


class _Placed:
    """The arrays of one launch, copied into memory with gaps between; arrays that share memory go on sharing it."""

    def __init__(self, runtime: ctypes.CDLL, kernel: Kernel) -> None:
        self._runtime, self._kernel = runtime, kernel
        self._arrays: list[tuple[np.ndarray, str, bool]] = []
        self._pieces: list[tuple[int, int, int, bool]] = []  # begin and end on the host, address, writeable

    def add(self, array: np.ndarray, label: str, const: bool) -> None:
        if not array.flags.writeable and not const:
            label += ", a read-only array passed to a pointer that is not const"
        self._arrays.append((array, label, array.flags.writeable))

    def copy_in(self) -> None:
        """Place every array; views that overlap are placed as one piece, at the same offset from each other."""
        self._pieces.clear()
        spans = sorted(
            ((a.ctypes.data, a.ctypes.data + a.nbytes, _offset(a), a.itemsize, n, w) for a, n, w in self._arrays),
            key=lambda span: span[:2],
        )
        merged: list[list[Any]] = []
        for begin, end, offset, item, name, writeable in spans:
            if merged and begin < merged[-1][1]:
                last = merged[-1]
                last[1], last[3], last[5] = max(last[1], end), min(last[3], item), last[5] or writeable
                if name not in last[4]:
                    last[4] += f" = {name}"
            else:
                merged.append([begin, end, offset, item, name, writeable])
        for begin, end, offset, item, name, writeable in merged:
            address = self._runtime.emulator_place(end - begin, offset, item, not writeable, name.encode()[:63])
            if address is None:
                raise LaunchError(f"kernel {self._kernel.name}: {name} does not fit into the executor's memory")
            ctypes.memmove(address, begin, end - begin)
            self._pieces.append((begin, end, address, writeable))

    def pointer(self, array: np.ndarray) -> Any:
        """Return what the kernel gets for `array`."""
        if isinstance(array, AddressTable):
            found = [0 if each is None else self.pointer(each).value for each in array.arrays]
            return ctypes.create_string_buffer(np.array(found, np.int64).tobytes(), array.nbytes)
        start, stop = array.ctypes.data, array.ctypes.data + array.nbytes
        for begin, end, address, _ in self._pieces:
            if begin <= start and stop <= end:
                return ctypes.c_void_p(address + start - begin)
        raise LaunchError(f"kernel {self._kernel.name}: an array was not placed")

    def copy_out(self) -> None:
        for begin, end, address, writeable in self._pieces:
            if writeable:
                ctypes.memmove(begin, address, end - begin)


class _InPlace:
    """The arrays of one launch, where they are."""

    def add(self, array: np.ndarray, label: str, const: bool) -> None:
        pass

    def copy_in(self) -> None:
        pass

    def pointer(self, array: np.ndarray) -> ctypes.c_void_p:
        return ctypes.c_void_p(array.ctypes.data if array.size else 0)

    def copy_out(self) -> None:
        pass


def _offset(array: np.ndarray) -> int:
    """Distance of `array` from the start of its memory, modulo what a device's allocator aligns to."""
    base = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return (array.ctypes.data - base.ctypes.data) % DEVICE_ALIGNMENT


@cache
def _runtime(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emulator_reset.argtypes = (ctypes.c_void_p,)
    library.emulator_reset.restype = None
    library.emulator_place.argtypes = (
        ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_char_p,
    )  # fmt: skip
    library.emulator_place.restype = ctypes.c_void_p
    library.emulator_run.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ctypes.c_size_t, ctypes.c_int, ctypes.c_uint, ctypes.c_int,
    )  # fmt: skip
    library.emulator_run.restype = ctypes.c_char_p
    return library


def _place_in_source(library: Path, offset: int) -> str:
    tool = shutil.which("addr2line")
    if tool is None:
        return f"{library.name}+{offset:#x}"
    command = [tool, "-i", "-e", str(library), hex(offset - 1)]  # the call lies before its return address
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    kernel_lines = [line for line in lines if not line.split(":")[0].endswith("cuda_subset.h")] or lines
    return Path(kernel_lines[0].split(" (")[0]).name
