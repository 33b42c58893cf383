"""Compiles the host's kernels into Numba's cache, in many processes: tests compare with them.

``python -m gpu_runs.host_kernels --seconds 100``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np

from gpu_runs.cases import every, run
from sparsebp import kernels

QUICK = ("clamp_arrays",)


def warm(kernel: str, dtype: str) -> str:
    """Run a kernel, which leaves its machine code in the cache; return what failed, or nothing."""
    try:
        for case in every():
            if (case.kernel, case.dtype) == (kernel, dtype):
                run(kernels.get(np), case)
    except Exception as error:  # tests say more
        return f"{kernel} {dtype}: {type(error).__name__}: {error}"
    return ""


def main() -> int:
    """Compile until time is up; return 0 if all are done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    begin, errors, done = time.perf_counter(), list[str](), 0
    wanted = sorted({(case.kernel, case.dtype) for case in every() if not options.quick or case.kernel in QUICK})
    pool = ProcessPoolExecutor(max((os.cpu_count() or 1) - 2, 1), multiprocessing.get_context("spawn"))
    try:
        for future in as_completed([pool.submit(warm, *one) for one in wanted], options.seconds):
            done += 1
            errors += [future.result()] * bool(future.result())
    except TimeoutError:
        for process in (pool._processes or {}).values():
            process.kill()
    for error in errors[:5]:
        print(error[:300])
    print(f"{done - len(errors)} of {len(wanted)} kernels of the host are warm, {time.perf_counter() - begin:.0f} s")
    pool.shutdown(wait=False, cancel_futures=True)
    return int(bool(errors) or done < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
