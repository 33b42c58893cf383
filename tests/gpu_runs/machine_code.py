"""Machine code of every source with every set of defines that launches use, compiled here for a GPU that is elsewhere.

`sets` is what tests, benchmarks and small calls of every kernel ask for. `compile_for` makes one file of each, under
the name by which `RawModuleLoader` looks for it, with the NVRTC of the CUDA that the GPU machine has.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gpu
from benchmarks.gpu import HIDDEN as HIDDEN_OF_PAPER
from benchmarks.gpu import Recurrence
from benchmarks.workloads import CELLS, chunk_count
from cuda_on_cpu.loader import NotingLoader
from gpu_runs.cases import every, run
from nvrtc import compile as nvrtc
from nvrtc.sources import SOURCES
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.device.launch import Defines, machine_code, source
from sparsebp.kernels.spec import Kernels

HIDDEN, RECURSION = (1, 7, 12, 20, 32, 33, 64, 128), (24, 40, 70, 120, 200, 256, 512)
"""What tests and benchmarks draw on a GPU; and what they run by the recursion alone."""
CHUNKS = (1, 3, 5, 16, 24, 31, 32, 48, 64, 96, 128, 173, 192, 258, 384, 528)


class Asked(NotingLoader):
    """Notes for which files and defines the launchers ask."""

    def __init__(self) -> None:
        super().__init__(lambda file, defines, *_, **__: self.add(file, defines))
        self._sets: dict[tuple[str, tuple[Any, ...]], Defines] = {}

    def add(self, file: str, defines: Defines) -> None:
        self._sets[file, tuple(sorted(defines.items()))] = defines

    def found(self) -> list[tuple[str, Defines]]:
        """Return what was asked for, each once."""
        return [(file, defines) for (file, _), defines in self._sets.items()]


def sets() -> list[tuple[str, Defines]]:
    """Return files with the defines of tests, small cases and the recurrences' sizes, each once."""
    asked = Asked()
    for file, listed in SOURCES.items():
        for defines in listed:
            asked.add(file, defines)
    device = Kernels(DeviceKernels(np, asked))
    for case in every():
        run(device, case)
    with np.errstate(all="ignore"):  # of what no kernel has written
        for hidden, dtype in itertools.product(HIDDEN + RECURSION, (np.float32, np.float64)):
            _recurrences(device, hidden, dtype)
        for rows in gpu.GPU_NUMBERS.sizes["rows_a_lane"]:
            _rows_a_lane(asked, rows)
    return asked.found()


def _recurrences(k: Kernels, hidden: int, dtype: type) -> None:
    for cell in CELLS:
        for length, batch in ((1000, 16), (528, 2)) if hidden in HIDDEN else ((3, 16),):
            run = Recurrence(k, np, cell, dtype, length, batch, hidden)
            run.forward()
            run.forward_from_input()
            for chunks in CHUNKS if hidden == HIDDEN_OF_PAPER else (1, 5, 31) if hidden in HIDDEN else (1,):
                for summed in (False, True):
                    run.backward(chunks, summed)()


def _rows_a_lane(asked: Asked, rows: int) -> None:
    """Ask for what gpu-numbers forces lanes to hold."""
    device = DeviceKernels(np, asked)  # type: ignore[arg-type]
    device._rows_a_lane = lambda *sizes: rows  # type: ignore[method-assign]
    length = gpu.GPU_NUMBERS.sizes["lengths"][0]
    for cell in CELLS:
        if rows not in gpu.rows_tried(cell, gpu.GPU_NUMBERS.sizes):
            continue
        run = Recurrence(Kernels(device), np, cell, np.float32, length, gpu.BATCH, HIDDEN_OF_PAPER)
        for summed in (False, True):
            run.backward(chunk_count(length), summed)()


def compile_for(capability: str, folder: Path, library: Path, wanted: list[tuple[str, Defines]]) -> Iterator[str]:
    """Compile what is not in `folder` yet; yield a line for each file, with the error where there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        compiled = [pool.submit(_compile_one, *one, capability, folder, library) for one in wanted]
        for number, done in enumerate(as_completed(compiled), 1):
            yield f"{number}/{len(wanted)} {done.result()}"


def _compile_one(file: str, defines: Defines, capability: str, folder: Path, library: Path) -> str:
    name = f"{file} {' '.join(f'{key}={value}' for key, value in defines.items())}"
    path = folder / machine_code(file, defines, capability)
    if path.exists():
        return f"{name}: is there"
    for builtins in library.parent.glob("libnvrtc-builtins.so.*"):  # the library finds what is loaded
        ctypes.CDLL(str(builtins))
    nvrtc.library = lambda: ctypes.CDLL(str(library))  # type: ignore[assignment]
    begin = time.perf_counter()
    try:
        compiled = nvrtc.compiled(source(file), file, nvrtc.flags(defines, f"sm_{capability}"))
    except AssertionError as error:
        return f"{name}: error: {error}"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(compiled.cubin)
    unfinished.rename(path)
    return f"{name}: {time.perf_counter() - begin:.1f} s"
