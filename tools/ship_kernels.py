"""Compile every kernel of the host for the x86-64 levels that wheels carry: ``python tools/ship_kernels.py [LEVEL]``.

Without a level, one child process a level; those that this machine cannot execute are left out, and said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time


def main() -> int:
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
        running.append(subprocess.Popen([sys.executable, __file__, level], env={**os.environ, **settings}))
    return max((child.wait() for child in running), default=1)


def ship(level: str) -> None:
    """Run every job of warm-up with a store that keeps what is compiled."""
    from sparsebp.kernels.host.engine import shipped

    begin = time.perf_counter()
    shipped.recording = store = shipped.Store(shipped.FOLDER / level)
    from sparsebp.train import warm_up

    for name, job in warm_up.jobs():
        job()
        print(f"{level}: {name}, {len(store.index)} kernels, {time.perf_counter() - begin:.0f} s", flush=True)
    store.write()
    print(f"{level}: {len(store.index)} kernels, {len(store.blob) / 1e6:.1f} MB in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    sys.exit(ship(sys.argv[1]) if len(sys.argv) > 1 else main())
