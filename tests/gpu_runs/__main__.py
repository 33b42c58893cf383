"""``python3 tests/gpu_runs check|numbers|grid|graphs|prepare``."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import resource
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[0:1] = [str(TESTS), str(TESTS.parent)]  # in the place of this folder

from gpu_runs import carried, runs  # noqa: E402
from gpu_runs.stages import Session  # noqa: E402


def main() -> int:
    """Do a run; return its exit status: 0 if all that could be run has passed."""
    parser = argparse.ArgumentParser(prog="python3 tests/gpu_runs", description=runs.__doc__)
    parser.add_argument("run", choices=[*runs.RUNS, "prepare"])
    parser.add_argument("--seconds", type=_seconds, default=530.0, help="in which the run is to be done")
    parser.add_argument("--out", type=Path, help="folder for all results; by default $OUT, else runs/gpu, and "
                        "docs/benchmarks for those of benchmarks")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and few tests: is all of it there?")
    options = parser.parse_args()
    if options.run == "prepare":
        return carried.prepare()
    out = options.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else None)
    try:
        session = Session(options.run, out or Path("runs/gpu"), options.seconds)
    except OSError as error:
        print(f"Results cannot be written to {out or 'runs/gpu'}: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ValueError, OSError):  # a stage that is ended leaves a trace, and no memory's image
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    stages = runs.RUNS[options.run](session, out or Path("docs/benchmarks"), options.quick)
    return session.run(stages)


def _seconds(text: str) -> float:
    """Return the seconds that a text gives.

    Raises
    ------
    argparse.ArgumentTypeError
        They are none in which anything could be done.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"seconds must be a number above 0, not {text}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
