"""Compile every kernel of the host for the x86-64 levels that wheels carry: ``python tools/ship_kernels.py [JOB…]``.

A child process for each level; those that this machine cannot execute are left out, and said. On another processor, as
ARM's, the wheel is one without machine code. With the names of some jobs of ``sparsebp warm-up``, their kernels alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

LEVEL = "SPARSEBP_SHIP_LEVEL"
"""Of a child process."""


def main(jobs: list[str]) -> int:
    """Compile all levels, one child process each."""
    from llvmlite import binding

    from sparsebp.kernels.host.engine import shipped

    shutil.rmtree(shipped.FOLDER, ignore_errors=True)
    features = binding.get_host_cpu_features()
    running = []
    for level, needs in shipped.LEVELS.items():
        if missing := [one for one in needs if not features.get(one)]:
            print(f"{level}: left out, this machine lacks {', '.join(missing)}")
            continue
        settings = {"NUMBA_CPU_NAME": level, "NUMBA_CPU_FEATURES": "", "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, *jobs]
        running.append(subprocess.Popen(command, env={**os.environ, **settings, LEVEL: level}))
    if not running:
        print("No machine code for this processor: the wheel has the sources alone")
    return max((abs(child.wait()) for child in running), default=0)


def ship(level: str, wanted: list[str]) -> int:
    """Run the jobs of warm-up with a store that keeps what is compiled."""
    from sparsebp.kernels.host.engine import shipped

    begin = time.perf_counter()
    shipped.recording = store = shipped.Store(shipped.FOLDER / level)
    from sparsebp import warm_up

    jobs = dict(warm_up.jobs())
    for name in wanted or jobs:
        jobs[name]()
        print(f"{level}: {name}, {len(store.index)} kernels, {time.perf_counter() - begin:.0f} s", flush=True)
    store.write()
    print(f"{level}: {len(store.index)} kernels, {len(store.blob) / 1e6:.1f} MB in {time.perf_counter() - begin:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(ship(os.environ[LEVEL], sys.argv[1:]) if LEVEL in os.environ else main(sys.argv[1:]))
