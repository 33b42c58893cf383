"""Compiles every set of defines for every architecture, and says which kernels spill: ``python -m gpu_runs.spills``.

Once a release: it takes half an hour. Every test run compiles all listed sets for one architecture, and those that need
most registers for the others. What compiled without spills is kept by content, so a second run compiles what is new.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor

from gpu_runs.machine_code import sets
from nvrtc.compile import usage_of
from sparsebp.kernels.device.launch import Defines

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ALLOWED = {("gru_reduce", "sm_80"): 92, ("gru_forward", "sm_90"): 56, ("gru_forward", "sm_100"): 16}
"""Kernels and architectures with the most bytes that they may spill: with five rows a lane, which a benchmark forces,
and in float64 with 70 and 120 units."""


def spilled(file: str, defines: Defines, architecture: str) -> list[str]:
    """Return a line for each kernel that spills more than it may."""
    found = []
    for kernel in usage_of(file, defines, architecture):
        most = ALLOWED.get((kernel.kernel, architecture), 0)
        if max(kernel.spill_stores, kernel.spill_loads) > most:
            named = " ".join(f"{name}={value}" for name, value in defines.items())
            found.append(f"{architecture} {file} {named}: {kernel.kernel} spills {kernel.spill_stores} bytes, "
                         f"loads {kernel.spill_loads}, {kernel.registers} registers")  # fmt: skip
    return found


def main() -> int:
    """Compile all; return 0 if no kernel spills more than it may."""
    wanted = sets()
    bad = 0
    with ProcessPoolExecutor(int(os.environ.get("WORKERS", os.cpu_count() or 1))) as pool:
        for architecture in ARCHITECTURES:
            lines = [pool.submit(spilled, *one, architecture) for one in wanted]
            for done in lines:
                for line in done.result():
                    bad += 1
                    print(line, flush=True)
            print(f"{architecture}: {len(wanted)} sets of defines", flush=True)
    print(f"{bad} kernels spill more than they may")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
