"""Compiles the CUDA sources at first use and keeps the modules."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core.types import Array
from sparsebp.kernels.device.base import ByValue, Defines, by_value

_INCLUDE = re.compile(r'#include "(\w+\.cuh)"')
_OPTIONS = ("-std=c++17",)
"""No --use_fast_math: division, square root and functions keep float32's accuracy. Contraction to fused multiply-adds
is the compiler's default and stays. CuPy appends ``-ftz=true``, and of two contradicting options NVRTC takes the last:
in float32, and only there, numbers below 1.2e-38 count as zero on a GPU. That saves two multiplications in each
exponential on the chain of a recurrent step, and nothing here needs such numbers."""


@cache
def source(file: str) -> str:
    """Return the text of a file of ``cuda/`` with its ``#include "…"`` lines resolved: the compiler's input."""
    folder = resources.files("sparsebp.kernels.device") / "cuda"
    return _expand(folder, file)


def _expand(folder: Traversable, file: str) -> str:
    lines = [f'#line 1 "{file}"']
    for number, line in enumerate((folder / file).read_text(encoding="utf-8").splitlines(), start=1):
        header = _INCLUDE.fullmatch(line)
        lines.append(f'{_expand(folder, header[1])}\n#line {number + 1} "{file}"' if header else line)
    return "\n".join(lines) + "\n"


def options(defines: Defines) -> tuple[str, ...]:
    """Return the compiler options for these defines, in a fixed order."""
    return (*_OPTIONS, *(f"-D{name}={value}" for name, value in sorted(defines.items())))


class RawModuleLoader:
    """Loads `cupy.RawModule` objects, one per file, set of defines and device; CuPy keeps the binaries on disk too.

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
        """What arithmetic in float64 costs over float32 on the current device."""
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
            module = self._cupy.RawModule(code=source(file), options=options(defines), backend="nvrtc")
            self._modules[key] = module
        return module

    def addresses(self, arrays: Sequence[Array | None], count: int) -> ByValue:
        """Return `count` int64: where these arrays begin on the device, 0 for None and from their number on."""
        table = np.zeros(count, np.int64)
        table[: len(arrays)] = [0 if array is None else array.data.ptr for array in arrays]
        return by_value(table)

    def _attribute(self, name: str, otherwise: int | None = None) -> int:
        number = self.device
        if number not in self._attributes:
            self._attributes[number] = self._cupy.cuda.Device(number).attributes
        found = self._attributes[number]
        return int(found[name] if otherwise is None else found.get(name, otherwise))
