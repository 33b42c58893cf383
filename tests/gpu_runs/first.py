"""The first run on a GPU: four calls within one budget of seconds; what an earlier call has done is not done again.

``python3 tests/gpu_runs first`` does the first call that has something left to do. A machine may be had for a while
only, and be another one the next time. So what was done, and how long it took, is in ``first.json`` among the results,
which come back as one archive; put into ``.cache/``, the archive brings them to the next machine.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.harness import commit
from gpu_runs.carried import ARCHIVE, CACHE, unpack
from gpu_runs.stages import Outcome, Session, Stage
from sparsebp.core.files import write_atomically

CALLS = (
    {"compile": 170, "launches": 80, "cache": 5, "graph tests": 60},
    {"gpu-numbers": 400},
    {"gpu-grid": 250, "gpu-graphs": 100},
    {"tests": 130, "memcheck": 60, "ncu": 60, "racecheck": 60},
)
"""The calls: their stages with seconds, 1575 with those between them."""
VERSIONS, BETWEEN = 30, 20
"""Seconds of the first stage of every call, which tells what is there, and between stages and for the end."""


class First(Session):
    """One call of the first run."""

    def __init__(self, out: Path, seconds: float, budget: float, parcel: Path | None = None) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._path = out.absolute() / "first.json"
        if not self._path.exists() and (CACHE / "gpu-first.tar.gz").exists():
            with tarfile.open(CACHE / "gpu-first.tar.gz") as packed:
                packed.extractall(out, filter="data")
            unpack(out / ARCHIVE)
        self._before: dict[str, Any] = {"calls": 0, "spent": 0.0, "done": {}}
        if self._path.exists():
            self._before = json.loads(self._path.read_text(encoding="utf-8"))
        self._left = budget - self._before["spent"]
        self._call = next((n for n, call in enumerate(CALLS) if call.keys() - self._before["done"].keys()), len(CALLS))
        super().__init__(f"first-{self._before['calls'] + 1}", out, min(seconds, max(self._left, 0)), parcel)

    @property
    def is_done(self) -> bool:
        """Whether no call has anything left to do."""
        return self._call == len(CALLS)

    def stages(self, known: Mapping[str, Stage]) -> list[Stage] | str:
        """Return the stages of this call that are left, or why there is none."""
        if self.is_done:
            return (
                f"All {len(CALLS)} calls are done, in {self._before['spent']:.0f} s; to begin anew, remove first.json"
            )
        if self._left < VERSIONS:
            return f"The budget is spent: {self._before['spent']:.0f} s; call {self._call + 1} of {len(CALLS)} is left"
        left = {name: share for name, share in CALLS[self._call].items() if name not in self._before["done"]}
        self.seconds = min(self.seconds, VERSIONS + sum(left.values()) + BETWEEN)
        self.say(f"call {self._call + 1} of {len(CALLS)}; {self._left:.0f} s of the budget are left")
        return [replace(known[name], share=share) for name, share in {"versions": VERSIONS, **left}.items()]

    def before(self) -> None:
        """Keep what is done, and the seconds that are spent."""
        done = {each.stage: {**asdict(each), "commit": commit()} for each in self.outcomes if self._is_done(each)}
        spent, calls = round(self._before["spent"] + self.elapsed, 1), self._before["calls"] + 1
        found = {"calls": calls, "spent": spent, "done": self._before["done"] | done}
        write_atomically(self._path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())

    def _is_done(self, outcome: Outcome) -> bool:
        """Whether a stage has had its turn; one that was interrupted, or for which no time was left, has not."""
        cut_off = outcome.outcome == "stopped" and self._interrupts and outcome is self.outcomes[-1]
        return outcome.stage != "versions" and outcome.outcome != "left out" and not cut_off
