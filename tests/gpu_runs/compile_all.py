"""Compiles every source with every set of defines that launches use, in many processes, into CuPy's cache.

``python -m gpu_runs.compile_all --seconds 60``. Then the host's kernels, with which tests compare, into Numba's.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np

from benchmarks import gpu
from benchmarks.gpu import HIDDEN as HIDDEN_OF_PAPER
from benchmarks.gpu import Recurrence
from benchmarks.workloads import CELLS, chunk_count
from cuda_on_cpu.loader import NotingLoader
from gpu_runs.cases import every, line_numbers, run
from sass.sources import SOURCES, kernels_of
from sparsebp import kernels
from sparsebp.core import backend
from sparsebp.kernels.device import DeviceKernels, RawModuleLoader
from sparsebp.kernels.device.launch import Defines
from sparsebp.kernels.spec import Kernels

PROCESSES = 12
HIDDEN = (1, 7, 20, 32, 33, 64, 128)
"""What tests and benchmarks draw on a GPU."""
CHUNKS = (1, 3, 5, 16, 24, 31, 32, 48, 64, 96, 128, 173, 192, 258, 384, 528)


class Compiled(NamedTuple):
    """What came of one set of defines."""

    what: str
    seconds: float
    registers: int
    spilled: int
    error: str


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
        for hidden, dtype in itertools.product(HIDDEN, (np.float32, np.float64)):
            _recurrences(device, hidden, dtype)
        for rows in gpu.GPU_NUMBERS.sizes["rows_a_lane"]:
            _rows_a_lane(asked, rows)
    return asked.found()


def small_sets() -> list[tuple[str, Defines]]:
    """Return those of the calls under compute-sanitizer."""
    asked = Asked()
    for case in every(small=True):
        run(Kernels(DeviceKernels(np, asked)), case)
    return asked.found()


def _recurrences(k: Kernels, hidden: int, dtype: type) -> None:
    for cell in CELLS:
        for length, batch in ((1000, 16), (528, 2)):
            run = Recurrence(k, np, cell, dtype, length, batch, hidden)
            run.forward()
            run.forward_from_input()
            for chunks in CHUNKS if hidden == 20 else (1, 5, 31):
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


class Processes:
    """Processes that work side by side, each in a pool of its own: so it is known at what one has died."""

    def __init__(self, count: int) -> None:
        self._threads, self._own = ThreadPoolExecutor(count), threading.local()
        self._pools: list[ProcessPoolExecutor] = []
        self._ended = False

    def submit(self, function: Callable[..., Compiled], *arguments: Any) -> Future[Compiled]:
        """Have one of them call a function; if it dies at that, that is what the result says, and another one comes."""
        return self._threads.submit(self._call, function, arguments)

    def _call(self, function: Callable[..., Compiled], arguments: tuple[Any, ...]) -> Compiled:
        begin = time.perf_counter()
        pool = getattr(self._own, "pool", None)
        if pool is None:
            pool = self._own.pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
            self._pools.append(pool)
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            self._own.pool = None
            error = "ended" if self._ended else "its process has died"
            return Compiled(" ".join(map(str, arguments)), time.perf_counter() - begin, 0, 0, error)

    def end(self) -> None:
        """End them, whatever they are at."""
        self._ended = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for pool in self._pools:
            for process in [*(pool._processes or {}).values()]:
                process.kill()


def compile_one(file: str, defines: Defines, lines: bool = False) -> Compiled:
    """Compile in this process, with line numbers or without; say what the driver says of the kernels.

    That is their most registers and bytes of local memory.
    """
    name = f"{file} {' '.join(f'{key}={value}' for key, value in defines.items())}{' with lines' if lines else ''}"
    begin = time.perf_counter()
    try:
        with line_numbers() if lines else contextlib.nullcontext():
            raw = RawModuleLoader(backend.cupy()).get(file, defines)
        raw.compile()
        found = [kernel for each in kernels_of(file) if (kernel := _looked_up(raw, each))]
        registers, spilled = (max(column) for column in zip(*found, strict=True))
    except Exception as error:  # said, with all others
        return Compiled(name, time.perf_counter() - begin, 0, 0, f"{type(error).__name__}: {error}")
    return Compiled(name, time.perf_counter() - begin, registers, spilled, "")


def _looked_up(raw: Any, name: str) -> tuple[int, int] | None:
    """Return the registers and bytes of local memory of a kernel; None if there is none with these defines."""
    try:
        kernel = raw.get_function(name)
        return kernel.num_regs, kernel.local_size_bytes
    except (RuntimeError, KeyError, AttributeError):
        return None


def warm_host(kernel: str, dtype: str) -> Compiled:
    """Run a kernel of the host's, which leaves its machine code in Numba's cache."""
    begin = time.perf_counter()
    try:
        for case in every():
            if (case.kernel, case.dtype) == (kernel, dtype):
                run(kernels.get(np), case)
    except Exception as error:
        return Compiled(f"{kernel} {dtype}", time.perf_counter() - begin, 0, 0, f"{type(error).__name__}: {error}")
    return Compiled(f"{kernel} {dtype}", time.perf_counter() - begin, 0, 0, "")


def main() -> int:
    """Compile; return 0 if all sources do, without spills."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    begin = time.perf_counter()
    wanted = [(*one, False) for one in sets()] + [(*one, True) for one in small_sets()]
    wanted = [one for one in wanted if not chosen.quick or one[0] == "pointwise.cu"]
    hosts = [] if chosen.quick else sorted({(case.kernel, case.dtype) for case in every()})
    pool = Processes(1 if chosen.quick else PROCESSES)
    try:
        done = list(_followed([pool.submit(compile_one, *one) for one in wanted], begin, chosen.seconds, len(wanted)))
        warm = list(_followed([pool.submit(warm_host, *one) for one in hosts], begin, chosen.seconds, len(hosts)))
    finally:
        pool.end()  # what they compile now is not waited for
    failed = [one for one in done if one.error]
    spilled = [one for one in done if one.spilled]
    cold = [one for one in warm if one.error]
    for one in (*failed, *spilled, *cold[:3]):
        print(f"{one.what}: {one.error or f'{one.spilled} bytes of local memory'}"[:600])
    print(f"{len(warm) - len(cold)} of {len(hosts)} kernels of the host are warm")
    most, work = max((one.registers for one in done), default=0), sum(one.seconds for one in done)
    print(f"{len(done) - len(failed)} of {len(wanted)} compile, {len(spilled)} with local memory, most registers"
          f" {most}; {work:.0f} s of work in {time.perf_counter() - begin:.0f} s", flush=True)  # fmt: skip
    return int(bool(failed) or len(done) < len(wanted))


def _followed(futures: Sequence[Any], begin: float, seconds: float, count: int) -> Iterator[Compiled]:
    """Yield what is done, as it is, until time is up."""
    try:
        for number, future in enumerate(as_completed(futures, max(seconds - (time.perf_counter() - begin), 0.1)), 1):
            one = future.result()
            print(f"[{time.perf_counter() - begin:4.0f} s] {number}/{count} {one.what}: {one.seconds:.2f} s, "
                  f"{one.registers} registers{', ' + one.error[:200] if one.error else ''}", flush=True)  # fmt: skip
            yield one
    except TimeoutError:
        for future in futures:
            future.cancel()


if __name__ == "__main__":
    sys.exit(main())
