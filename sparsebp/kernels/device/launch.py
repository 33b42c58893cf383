"""Base of the launchers: compiling the CUDA sources, compile-time types, grids, arguments and device checks."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError, OptionError
from sparsebp.core.locks import forkable_lock

_NULL = np.uint64(0)
WARP = 32
BLOCK = 256
WARP_A_ROW = (WARP, BLOCK // WARP)
"""A block in which a warp has a row, or whatever a kernel gives to one."""
BLOCKS_AT_ONCE = 8
"""Blocks of `BLOCK` threads that a multiprocessor holds."""
MAX_THREADS = 1024
MAX_GRID = 2**31 - 1
MAX_INT32 = 2**31 - 1025
"""The largest number that a kernel may count to in 32 bits: a block's threads may step past the end."""
STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may have without asking for more."""
_C_TYPES = {
    np.dtype(np.float32): "float", np.dtype(np.float64): "double",
    np.dtype(np.int32): "int", np.dtype(np.int64): "long long",
    np.dtype(np.uint8): "unsigned char", np.dtype(np.uint16): "unsigned short",
    np.dtype(np.uint32): "unsigned int", np.dtype(np.uint64): "unsigned long long",
}  # fmt: skip

Defines = dict[str, str | int]


class ByValue(np.ndarray):
    """Numbers of the host that a kernel gets in a struct: a launch copies them. One item, as CuPy asks for."""


def by_value(numbers: np.ndarray) -> ByValue:
    """Return a C-contiguous array as one item that is passed by value."""
    return ByValue(1, f"V{numbers.nbytes}", numbers.data)


class _Kernel:
    """A kernel of one device, and the bytes of dynamic shared memory that it may have."""

    __slots__ = ("run", "shared")

    def __init__(self, run: Any) -> None:
        self.run, self.shared = run, STATIC_SHARED_LIMIT


class Launcher:
    """Base of the kernel families: an array namespace and a loader.

    Parameters
    ----------
    xp
        The namespace of the arrays that are passed in; also allocates scratch.
    loader
        Compiles and keeps the modules.
    """

    def __init__(self, xp: ModuleType, loader: RawModuleLoader) -> None:
        self.xp = xp
        self.loader = loader
        self._kernels: dict[tuple[Any, ...], _Kernel] = {}
        self._lock = forkable_lock()

    def _launch(
        self,
        file: str,
        name: str,
        defines: Defines,
        grid: int,
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        """Run kernel `name` of `file` on the current stream; a launch of no blocks is left out.

        Arguments are arrays, None (a null pointer), or NumPy scalars of exactly the width that the kernel declares:
        nothing after this line checks them. `shared` is in bytes.
        """
        if grid == 0:
            return
        device = self._check_device(args)
        key = (device, file, name, *defines.items())
        kernel = self._kernels.get(key)
        if kernel is None:
            found = _Kernel(self.loader.get(file, defines).get_function(name))
            kernel = self._kernels.setdefault(key, found)  # another thread may have been faster
        if shared > kernel.shared or grid > MAX_GRID:
            self._allow(kernel, name, grid, shared)
        kernel.run((grid,), block, [_NULL if a is None else a for a in args], shared_mem=shared)

    def _launch_entries(
        self,
        file: str,
        name: str,
        defines: Defines,
        args: tuple[Any, ...],
        count: int,
        *sizes: int,
        threads: int = BLOCK,
    ) -> None:
        """Launch a line of threads along the batch for each of `count` entries; `sizes` end with the batch.

        The numbers come last among the kernel's arguments, `count` in 64 bits and `sizes` in 32.
        """
        batch = sizes[-1]
        block = thread_block(batch, threads)
        grid = ceil_div(count, block[1]) if batch else 0
        self._launch(file, name, defines, grid, block, (*args, np.int64(count), *map(np.int32, sizes)))

    def _allow(self, kernel: _Kernel, name: str, grid: int, shared: int) -> None:
        """Check sizes that few launches have, and ask the driver for so much shared memory, once a kernel."""
        if shared > self.loader.max_shared_memory or grid > MAX_GRID:
            most = f"at most {self.loader.max_shared_memory} bytes of shared memory and {MAX_GRID} blocks"
            got = f"{shared} bytes and {grid} blocks"
            raise OptionError(f"The sizes are too large for {name} on this device", expected=most, got=got)
        with self._lock:  # another thread may ask for more
            if shared > kernel.shared:
                kernel.run.max_dynamic_shared_size_bytes = kernel.shared = shared

    def _check_device(self, args: Sequence[Any]) -> int | None:
        """Check that all arrays belong to this namespace and live on the current device; return its number.

        A launch costs a few microseconds, so the check must take less: one comparison for each array.
        """
        array_type, current = self.xp.ndarray, self.loader.device
        for value in args:
            if type(value) is array_type:
                if current is None or value.data.device_id == current:
                    continue
            elif value is None or isinstance(value, (np.generic, ByValue)):
                continue
            elif not isinstance(value, array_type):
                backend.namespace(*(a for a in args if not (a is None or isinstance(a, (np.generic, ByValue)))))
                raise DeviceError("An array is not of these kernels' namespace", expected=f"{self.xp.__name__}.ndarray",
                                  got=type(value).__name__)  # fmt: skip
            if current is not None and value.data.device_id != current:
                got = f"device {value.data.device_id}"
                raise DeviceError("An array is not on the current device", expected=f"device {current}", got=got)
        return current


def launch_emitted(kernels: Launcher, file: str, like: Array, count: int, *args: Any) -> None:
    """Run kernel ``run`` of an emitted file, of the dtype of `like`, with a thread for each of `count` turns.

    Threads take further turns where there are more than a device runs at a time. `count` is the last argument.
    """
    grid = min(ceil_div(count, BLOCK), BLOCKS_AT_ONCE * kernels.loader.multiprocessors)
    kernels._launch(file, "run", c_types(REAL=like), grid, (BLOCK,), (*args, np.int64(count)))


def c_types(**arrays: Array) -> Defines:
    """Return the defines that name the C types of arrays, such as ``REAL=data, INDEX=indices``."""
    return {name: _C_TYPES[array.dtype] for name, array in arrays.items()}


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def check_int32(name: str, numbers: dict[str, int]) -> None:
    """Check numbers that a kernel counts with in 32 bits; each has a name.

    Raises
    ------
    OptionError
        One of them is too large.
    """
    for what, number in numbers.items():
        if number > MAX_INT32:
            most = f"{what}: at most {MAX_INT32}"
            raise OptionError(f"The sizes are too large for {name} on a device", expected=most, got=number)


def thread_block(batch: int, threads: int = BLOCK) -> tuple[int, int]:
    """Return the shape of a block of threads: x along the batch (a power of two up to a warp), y along entries."""
    x = min(WARP, 1 << max(batch - 1, 0).bit_length())
    return x, threads // x


def step(array: Array, batch: int) -> np.int32:
    """Return 1 for values per sample, 0 for values shared by the batch (last axis of length 1)."""
    return np.int32(array.shape[-1] == batch and batch != 1)


# Compiles the CUDA sources at first use and keeps the modules.

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_OPTIONS = ("-std=c++17",)
"""No --use_fast_math: division, square root and functions keep float32's accuracy. Contraction to fused multiply-adds
is the compiler's default and stays. CuPy appends ``-ftz=true``, and of two contradicting options NVRTC takes the last:
in float32, and only there, numbers below 1.2e-38 count as zero on a GPU. That saves two multiplications in each
exponential on the chain of a recurrent step, and nothing here needs such numbers."""


_emitted: dict[str, str] = {}


def emitted(text: str) -> str:
    """Return a name for a source that was written at run time, under which it is compiled like a file of ``cuda/``."""
    name = f"emitted_{hashlib.sha256(text.encode()).hexdigest()[:24]}.cu"
    _emitted[name] = text
    return name


@cache
def source(file: str) -> str:
    """Return the text of a file of ``cuda/``, or an emitted one, with ``#include "…"`` lines resolved."""
    text = _emitted.get(file) or (resources.files("sparsebp.kernels.device") / "cuda" / file).read_text("utf-8")
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate(text.splitlines(), start=1):
        header = _INCLUDE.fullmatch(line)
        lines.append(f'{source(header[1])}\n#line {number + 1} "{file}"' if header else line)
    return "\n".join(lines) + "\n"


def options(defines: Defines) -> tuple[str, ...]:
    """Return the compiler options for these defines, in a fixed order."""
    return (*_OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items())))


MACHINE_CODE = "SPARSEBP_MACHINE_CODE"
"""Environment variable: a folder with machine code that was compiled elsewhere, under the names of `machine_code`."""


def machine_code(file: str, defines: Defines, capability: str) -> str:
    """Return the name of the file with machine code: of a source, its options, and a compute capability as ``90``."""
    given = repr((source(file), options(defines)))
    return f"{hashlib.sha256(given.encode()).hexdigest()[:24]}-sm_{capability}.cubin"


class RawModuleLoader:
    """Loads `cupy.RawModule` objects, one per file, set of defines and device; CuPy keeps the binaries on disk too.

    Where the environment variable ``SPARSEBP_MACHINE_CODE`` names a folder, machine code in it is taken in place of
    compiling, and what it lacks is added to its file ``missing.txt`` if that can be written.

    Parameters
    ----------
    cupy
        The CuPy module.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._modules: dict[tuple[Any, ...], Any] = {}
        self._attributes: dict[int, dict[str, int]] = {}

    @property
    def device(self) -> int:
        """The number of the current device, on which launches run."""
        return int(self._cupy.cuda.runtime.getDevice())

    @property
    def max_shared_memory(self) -> int:
        """Bytes of shared memory that a block can opt in to on the current device."""
        return self._attribute("MaxSharedMemoryPerBlockOptin")

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the current device."""
        return self._attribute("MultiProcessorCount")

    @property
    def double_cost(self) -> int:
        """Cost of float64 arithmetic over float32 on the current device."""
        return self._attribute("SingleToDoublePrecisionPerfRatio", 2)

    def get(self, file: str, defines: Defines) -> Any:
        """Return the module of `file` compiled with `defines` for the current device; it has ``get_function(name)``.

        Raises
        ------
        cupy.cuda.compiler.CompileException
            The source does not compile; nothing is passed over.
        """
        key = (file, options(defines), self.device)
        module = self._modules.get(key)
        if module is None:
            module = self._modules[key] = self._load(file, defines)
        return module

    def addresses(self, arrays: Sequence[Array | None], count: int) -> ByValue:
        """Return `count` int64: where these arrays begin on the device, 0 for None and from their number on."""
        table = np.zeros(count, np.int64)
        table[: len(arrays)] = [0 if array is None else array.data.ptr for array in arrays]
        return by_value(table)

    def _load(self, file: str, defines: Defines) -> Any:
        folder = os.environ.get(MACHINE_CODE)
        if folder:
            path = Path(folder) / machine_code(file, defines, self._cupy.cuda.Device().compute_capability)
            if path.exists():
                return self._cupy.RawModule(path=str(path), backend="nvrtc")
            with (
                contextlib.suppress(OSError),  # a folder that is not there, or read-only
                (Path(folder) / "missing.txt").open("a", encoding="utf-8") as missing,
            ):
                missing.write(f"{path.name} {file} {' '.join(options(defines))}\n")
        return self._cupy.RawModule(code=source(file), options=options(defines), backend="nvrtc")

    def _attribute(self, name: str, otherwise: int | None = None) -> int:
        number = self.device
        if number not in self._attributes:
            self._attributes[number] = self._cupy.cuda.Device(number).attributes
        found = self._attributes[number]
        return int(found[name] if otherwise is None else found.get(name, otherwise))
