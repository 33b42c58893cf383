"""What the launchers share: compile-time types, grids, argument passing and device checks."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import DeviceError, OptionError
from sparsebp.core.types import Array

_NULL = np.uint64(0)
WARP = 32
BLOCK = 256
MAX_THREADS = 1024
MAX_GRID = 2**31 - 1
STATIC_SHARED_LIMIT = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may have without asking for more."""
DEFAULT_SHARED_LIMIT = 99 * 1024
"""Opt-in limit in bytes that every GPU since compute capability 8.0 has, taken when the loader names none."""

_REAL = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}
_INDEX = {np.dtype(np.int32): "int", np.dtype(np.int64): "long long"}
_POSITION = {np.dtype(np.uint16): "unsigned short", np.dtype(np.uint32): "unsigned int"}
_WINNER = {np.dtype(np.uint8): "unsigned char", np.dtype(np.int32): "int"}

Defines = dict[str, str | int]


class Loader(Protocol):
    """Compiles a file of `cuda/` with defines; `sparsebp.kernels.device.RawModuleLoader` is the one for a GPU.

    A loader may have the attributes ``max_shared_memory`` (bytes a block can opt in to), ``multiprocessors``,
    ``double_cost`` (time of float64 arithmetic over that of float32) and ``device`` (of the arrays it can run on).
    """

    def get(self, file: str, defines: Defines) -> Any:
        """Return the module of `file` compiled with `defines`; it has CuPy's ``get_function(name)``."""

    def addresses(self, arrays: Sequence[Array | None]) -> Array:
        """Return an int64 array, on the device, of where these arrays begin; 0 for None."""


class Launcher:
    """Base of the kernel families: an array namespace and a loader.

    Parameters
    ----------
    xp
        The namespace of the arrays that are passed in; also allocates scratch.
    loader
        Compiles and keeps the modules.
    """

    def __init__(self, xp: ModuleType, loader: Loader) -> None:
        self.xp = xp
        self.loader = loader

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory that one block can have."""
        return int(getattr(self.loader, "max_shared_memory", DEFAULT_SHARED_LIMIT))

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors, by which launches are sized."""
        return int(getattr(self.loader, "multiprocessors", 1))

    @property
    def double_cost(self) -> float:
        """What arithmetic in float64 costs over float32, by which launches are sized."""
        return float(getattr(self.loader, "double_cost", 2))

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
        nothing behind this line checks them. `shared` is in bytes.
        """
        if grid == 0:
            return
        self._check_device(args)
        if shared > self.shared_limit or grid > MAX_GRID:
            raise OptionError(
                f"The sizes are too large for {name} on this device",
                expected=f"at most {self.shared_limit} bytes of shared memory and {MAX_GRID} blocks",
                got=f"{shared} bytes and {grid} blocks",
                remedy="Use smaller sizes, or the host kernels",
            )
        kernel = self.loader.get(file, defines).get_function(name)
        if shared > STATIC_SHARED_LIMIT:
            kernel.max_dynamic_shared_size_bytes = shared
        kernel((grid,), block, tuple(_NULL if a is None else a for a in args), shared_mem=shared)

    def _check_device(self, args: tuple[Any, ...]) -> None:
        """Check that all arrays belong to this namespace and live on the current device.

        A launch costs a few microseconds, so what is right must pass in less: one comparison an array.
        """
        array_type, current = self.xp.ndarray, getattr(self.loader, "device", None)
        for value in args:
            if value is None or isinstance(value, np.generic):
                continue
            if not isinstance(value, array_type):
                backend.namespace(*(a for a in args if a is not None and not isinstance(a, np.generic)))
                raise DeviceError(
                    "An array belongs to another namespace than these kernels",
                    expected=f"{self.xp.__name__}.ndarray",
                    got=type(value).__name__,
                    remedy="Take the kernels with sparsebp.kernels.get(sparsebp.backend.namespace(array))",
                )
            if current is not None and value.device != current:
                raise DeviceError(
                    "An array does not live on the current device",
                    expected=str(current),
                    got=str(value.device),
                    remedy="Move it, or call inside `with array.device:`",
                )


def real_define(array: Array) -> Defines:
    """Return the define that names the array's C type."""
    return {"REAL": _REAL[array.dtype]}


def types(array: Array, index: Array) -> Defines:
    """Return the defines of a kernel with real and index arrays."""
    return {"REAL": _REAL[array.dtype], "INDEX": _INDEX[index.dtype]}


def position_define(positions: Array) -> Defines:
    """Return the define that names the C type of output positions."""
    return {"POSITION": _POSITION[positions.dtype]}


def winner_define(winner: Array) -> Defines:
    """Return the define that names the C type of a pool's winners."""
    return {"WINNER": _WINNER[winner.dtype]}


def ceil_div(a: int, b: int) -> int:
    """Return ``a / b`` rounded up."""
    return -(-a // b)


def thread_block(batch: int, threads: int = BLOCK) -> tuple[int, int]:
    """Return the shape of a block of threads: x along the batch (a power of two up to a warp), y along entries."""
    x = min(WARP, 1 << max(batch - 1, 0).bit_length())
    return x, threads // x


def step(array: Array, batch: int) -> np.int32:
    """Return 1 for values per sample, 0 for values shared by the batch (last axis of length 1)."""
    return np.int32(array.shape[-1] == batch and batch != 1)
