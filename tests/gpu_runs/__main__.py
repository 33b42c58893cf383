"""``python3 tests/gpu_runs first-1|first-2|check|peers|numbers|grid|graphs|prepare``."""

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

from gpu_runs import carried, digest, runs  # noqa: E402
from gpu_runs.stages import Session  # noqa: E402


def main() -> int:
    """Do a run; return its exit status: 0 if all that could be run has passed."""
    parser = argparse.ArgumentParser(prog="python3 tests/gpu_runs", description=runs.__doc__)
    parser.add_argument("run", choices=[*runs.RUNS, "prepare"])
    parser.add_argument("--seconds", type=_seconds, default=330.0, help="in which the run is to be done")
    parser.add_argument("--out", type=Path, help="folder for all results; by default runs/gpu, and unless $OUT is set "
                        "docs/benchmarks for those of benchmarks. $OUT gets one archive of all results")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and few tests: is all of it there?")
    options = parser.parse_args()
    if options.run == "prepare":
        return carried.prepare()
    back = os.environ.get("OUT")
    out = options.out or Path("runs/gpu")
    benchmarks = out if options.out or back else Path("docs/benchmarks")
    archive = Path(back).absolute() / f"gpu-{options.run}.tar.gz" if back else None
    try:
        session = Session(options.run, out, options.seconds, archive)
    except OSError as error:
        print(f"Results cannot be written to {out}: {error}", file=sys.stderr)
        return 1
    with contextlib.suppress(ValueError, OSError):  # a stage that is ended leaves a trace, and no memory's image
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    stages = runs.stages_of(options.run, session.out, benchmarks.absolute(), options.quick)
    return session.run(stages, lambda: digest.of(session.out, benchmarks))


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
