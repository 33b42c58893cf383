"""Runs cases under ``mpiexec``: ``python -m mpi [--report FILE] [--seconds S] [NAME]…``."""

from __future__ import annotations

import argparse
import faulthandler
import json
import re
import sys
import time
import traceback
from pathlib import Path

from mpi import cases
from sparsebp.comm.mpi import End, MPITransport


def wrong(errors: dict[int, str], fails: str) -> dict[int, str]:
    """Return what is wrong with the errors of a case that has to fail: none like that, or others."""
    if not any(re.search(fails, text) for text in errors.values()):
        return errors | {-1: f"no error like {fails!r}"}
    return {rank: text for rank, text in errors.items() if not re.search(rf"{fails}|Rank \d+ has (failed|ended)", text)}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    faulthandler.dump_traceback_later(given.seconds, exit=True)
    between = MPITransport()
    failures = 0
    for case in cases(between.size, tuple(given.names)):
        between.barrier()
        began = time.perf_counter()
        transport = MPITransport()
        try:
            case.run(transport)
            transport.peers.tell(End())
            error = None
        except BaseException as raised:
            transport.abort(raised)
            error = "".join(traceback.format_exception(raised))
        errors = {rank: text for rank, text in enumerate(between.share(error)) if text is not None}
        if case.fails is not None:
            errors = wrong(errors, case.fails)
        failures += bool(errors)
        if between.rank == 0:
            print(f"{'FAILED' if errors else 'passed'} {case.name} ({time.perf_counter() - began:.2f} s)", flush=True)
            for rank, text in errors.items():
                print(f"--- rank {rank}\n{text}", flush=True)
            if given.report is not None:
                with given.report.open("a") as file:
                    file.write(json.dumps({"case": case.name, "errors": errors}) + "\n")
    return 1 if failures else 0


sys.exit(main())
