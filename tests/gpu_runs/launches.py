"""Calls every kernel once in every variant of a launch, on the GPU, and compares what it has written.

``python -m gpu_runs.launches --out FOLDER --seconds 60``. With ``--bare``, for compute-sanitizer: one small call a
kernel, in this process, with CuPy's pool off.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.harness import Row, Run
from benchmarks.processes import measure_apart
from gpu_runs.cases import Case, differences, every, run
from gpu_runs.references import Wanted
from sparsebp import kernels
from sparsebp.core import backend

QUICK = ("clamp_arrays", "gather")
LIMIT = 15.0
"""Seconds that a case may take: a kernel that hangs costs no more."""
SHOWN = 20
"""Cases that are listed at the end."""


def make() -> Callable[[Case], Row]:
    """Return what runs a case, in the process that does."""
    cupy, wanted = backend.cupy(), Wanted()
    device = kernels.get(cupy)

    def launch(case: Case) -> Row:
        arrays = run(device, case, cupy.asarray)
        cupy.cuda.Device().synchronize()
        got = {name: np.array(backend.to_host(array)) for name, array in arrays.items()}
        right = wanted.of(case)
        found = [] if right is None else differences(got, right)
        row: Row = {"compared": wanted.source}
        return row | {"error": f"differs: {'; '.join(found)}"} if found else row

    return launch


def main() -> int:
    """Run the cases; return 0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--bare", action="store_true")
    options = parser.parse_args()
    cases = [case for case in every(small=options.bare or options.quick) if not options.quick or case.kernel in QUICK]
    return bare(cases) if options.bare else compare(cases, options.out, options.seconds, options.quick)


def compare(cases: list[Case], out: Path, seconds: float, quick: bool) -> int:
    """Run the cases in a process of their own, note each in a file at once, print the summary last."""
    notes: list[str] = []
    followed = Run(quick, {}, {}, {"notes": notes}, print, "launches", seconds)
    done: list[Row] = []
    with (out / "check-launches.jsonl").open("w", encoding="utf-8") as file:
        for row in measure_apart(followed, cases, make, limit=LIMIT):
            done.append(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
            print(f"[{followed.elapsed:4.0f} s] {row['kernel']} {row.get('error', 'is right')}", flush=True)
    wrong = [row for row in done if "error" in row]
    against = {row["compared"] for row in done if "compared" in row}
    for note in notes[:SHOWN]:
        print(note)
    names = {row["kernel"] for row in done}
    print(f"{len(done)} of {len(cases)} calls of {len(names)} kernels, {len(wrong)} wrong, compared with "
          f"{', '.join(sorted(against)) or 'nothing'}", flush=True)  # fmt: skip
    compared = not any(source.startswith("nothing") for source in against)
    return int(bool(wrong) or len(done) < len(cases) or not compared)


def bare(cases: list[Case]) -> int:
    """Run the cases here; what watches this process says whether they are right."""
    cupy = backend.cupy()
    cupy.cuda.set_allocator(None)  # every array has memory of its own, whose end is known
    device, failed = kernels.get(cupy), 0
    for case in cases:
        try:
            run(device, case, cupy.asarray)
            cupy.cuda.Device().synchronize()
            print(f"{case.key}: launched", flush=True)
        except Exception as error:
            failed += 1
            traceback.print_exc()
            print(f"{case.key}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(cases)} calls, {failed} failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
