"""Stages of a run: processes under a time limit, one after another or side by side, and a summary of one screen."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.harness import commit
from gpu_runs.carried import ROOT, environment
from gpu_runs.carried import parcel as pack_all
from sparsebp.core.files import write_atomically

GRACE = 10.0
"""Seconds between the interrupt, after which a stage prints what it has done, and its end."""
LAST = 1.0
"""Seconds after those, in which it prints where it hangs."""
MOST_LOGGED = 4 << 20
"""Bytes of a stage's output that are kept in its log."""
TAIL = 400
"""Lines of output that a stage's summary may look at."""


@dataclass
class Outcome:
    """What became of a stage: ``passed``, ``failed``, ``stopped`` (time was up), ``left out`` or ``not run``."""

    stage: str
    outcome: str
    seconds: float = 0.0
    status: int | None = None
    said: list[str] = field(default_factory=list)


@dataclass
class Stage:
    """A process and its time.

    Attributes
    ----------
    name
        As the summary has it; its output goes to ``<name>.log``.
    share
        Of the run's time, in any unit, that it is sure to have; what earlier stages leave comes on top.
    command
        Given the seconds that it has, its arguments; a text in their place says why it cannot be run.
    summary
        Given its last lines, those that the summary of the run shows.
    needed
        Whether the run ends where this stage fails.
    optional
        Whether all may be well without it.
    leaves
        Names of its files, which are removed before it begins: what an earlier run has left is no result of it.
    beside
        Whether the next stages go on beside it, until one comes that is to be alone; it has no share of its own.
    alone
        Whether those beside it end before it begins, as it measures.
    """

    name: str
    share: float
    command: Callable[[float], Sequence[str] | str]
    summary: Callable[[Sequence[str]], list[str]] = lambda lines: list(lines)[-1:]
    needed: bool = False
    optional: bool = False
    leaves: tuple[str, ...] = ()
    beside: bool = False
    alone: bool = False


class Session:
    """One run.

    Parameters
    ----------
    name
        Of the run; its files are ``summary-<name>.json``, ``summary-<name>.txt``, a log for every stage and what
        stages write.
    out
        Their folder.
    seconds
        In which all stages are to be done.
    parcel
        An archive of all files in `out`, written anew after every stage; None: none.
    """

    def __init__(self, name: str, out: Path, seconds: float, parcel: Path | None = None) -> None:
        self.name, self.out, self.seconds = name, out.absolute(), seconds
        self.out.mkdir(parents=True, exist_ok=True)
        self.begin = time.monotonic()
        self.outcomes: list[Outcome] = []
        self.parcel = parcel
        self._stages: Sequence[Stage] = ()
        self._beside: list[tuple[threading.Thread, Outcome]] = []
        self._interrupts = 0

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    def say(self, line: str = "") -> None:
        """Print a line at once, and keep it."""
        with (self.out / f"summary-{self.name}.txt").open("a", encoding="utf-8") as kept:
            kept.write(line + "\n")
        print(line, flush=True)

    def run(self, stages: Sequence[Stage], digest: Callable[[], list[str]] = list) -> int:
        """Run the stages, print the summary last, and the lines of `digest` before it; return the exit status."""
        (self.out / f"summary-{self.name}.txt").unlink(missing_ok=True)
        before = {kind: signal.signal(kind, self._interrupt) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:  # nothing is raised by a signal, so that none comes at a wrong time; stages begin with the default
            return self._all(stages, digest)
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        self._interrupts += 1

    def _all(self, stages: Sequence[Stage], digest: Callable[[], list[str]]) -> int:
        self.say(f"{self.name}: commit {commit()}, {len(stages)} stages in {self.seconds:.0f} s, into {self.out}")
        self._stages = stages
        left = list(stages)
        unit = (self.seconds - GRACE - LAST) / sum(stage.share for stage in stages if not stage.beside)
        while left:
            stage = left.pop(0)
            if stage.alone:
                self._wait()
            later = left[next((n for n, each in enumerate(left) if each.alone), len(left)) :] if stage.beside else left
            kept = unit * sum(each.share for each in later if not each.beside)
            outcome = Outcome(stage.name, "left out", said=["no time was left"])
            self.outcomes.append(outcome)
            limit = self.seconds - GRACE - LAST - self.elapsed - kept
            if limit < 1:
                continue
            if stage.beside:
                thread = threading.Thread(target=self._run, args=(stage, limit, outcome), daemon=True)
                self._beside.append((thread, outcome))
                thread.start()
                continue
            self._run(stage, limit, outcome)
            if self._interrupts or (stage.needed and outcome.outcome == "failed"):
                why = "the run was interrupted" if self._interrupts else f"{stage.name} failed"
                self.outcomes += [Outcome(each.name, "left out", said=[why]) for each in left]
                left = []
            self._save(complete=not left and not self._interrupts)
        self._wait()
        self._save(complete=not self._interrupts)
        status = self._summary(digest)
        return 130 if self._interrupts else status

    def _wait(self) -> None:
        """Wait until no stage is beside the next one."""
        while self._beside:
            self._beside.pop()[0].join()

    # ---- one stage ---------------------------------------------------------------------------------------------------

    def _run(self, stage: Stage, limit: float, outcome: Outcome) -> None:
        outcome.outcome, outcome.said, begin = "failed", [], time.monotonic()
        try:
            self._do(stage, limit, outcome)
        except Exception as error:  # the next one comes all the same
            outcome.outcome = "failed"
            outcome.said = [f"{type(error).__name__}: {error}"]
            self.say(f"== [{self.elapsed:4.0f} s] {stage.name}: {outcome.said[0]}")
        outcome.seconds = round(time.monotonic() - begin, 1)

    def _do(self, stage: Stage, limit: float, outcome: Outcome) -> None:
        for name in stage.leaves:
            (self.out / name).unlink(missing_ok=True)
        command = stage.command(limit)
        if isinstance(command, str):
            self.say(f"== [{self.elapsed:4.0f} s] {stage.name}: not run: {command}")
            outcome.outcome, outcome.said = "not run", [command]
            return
        self.say(f"== [{self.elapsed:4.0f} s] {stage.name}, at most {limit:.0f} s")
        begin, lines = time.monotonic(), deque[str](maxlen=TAIL)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), cwd=ROOT,
            start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=self._keep, args=(stage.name, process.stdout, lines), daemon=True)
        reader.start()
        stopped = not self._ends(process, limit, 0)
        if stopped:
            self._end(process)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started
        reader.join(5)
        outcome.status = process.wait()
        outcome.outcome = "stopped" if stopped else "failed" if outcome.status else "passed"
        self.say(f"== [{self.elapsed:4.0f} s] {stage.name}: {outcome.outcome} after {time.monotonic() - begin:.0f} s")
        outcome.said = stage.summary(list(lines))

    def _ends(self, process: subprocess.Popen[bytes], seconds: float, interrupts: int) -> bool:
        """Wait until a process has ended, time is up or the run is interrupted more often; say whether it has ended."""
        end = time.monotonic() + seconds
        while process.poll() is None:
            if time.monotonic() > end or self._interrupts > interrupts:
                return False
            time.sleep(0.02)
        return True

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Interrupt a process, which then says what it has done; if it does not end, have it say where it is."""
        interrupts = self._interrupts
        process.send_signal(signal.SIGINT)
        if not self._ends(process, GRACE, interrupts):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGABRT)  # with all it has started: Python prints where each of them is
            time.sleep(LAST)

    def _keep(self, name: str, stream: IO[bytes], lines: deque[str]) -> None:
        logged = 0
        with (self.out / f"{name.replace(' ', '-')}.log").open("wb") as log:
            for line in stream:
                lines.append(line.decode(errors="replace").rstrip())
                if logged < MOST_LOGGED:
                    logged += log.write(line)
                    log.flush()

    # ---- what is left ------------------------------------------------------------------------------------------------

    def _save(self, *, complete: bool) -> None:
        found = {"run": self.name, "commit": commit(), "complete": complete, "seconds": round(self.elapsed, 1)}
        stages = [asdict(outcome) for outcome in self.outcomes]
        text = json.dumps({**found, "stages": stages}, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.out / f"summary-{self.name}.json", text.encode())
        if self.parcel is not None:
            pack_all(self.out, self.parcel)

    def _summary(self, digest: Callable[[], list[str]]) -> int:
        self.say(f"\n==== {self.name}, commit {commit()}: {self.elapsed:.0f} of {self.seconds:.0f} s")
        for outcome in self.outcomes:
            self.say(f"{outcome.outcome.upper():9} {outcome.stage} ({outcome.seconds:.0f} s)")
            for line in outcome.said:
                self.say(f"          {line[:240]}")
        for line in digest():
            self.say(line[:240])
        optional = {stage.name for stage in self._stages if stage.optional}
        bad = [
            each.stage
            for each in self.outcomes
            if each.outcome not in ("passed", "not run") and each.stage not in optional
        ]
        self.say(f"NOT WELL: {', '.join(bad)}" if bad else "ALL WELL")
        if self.parcel is not None:  # again, with the summary
            print(pack_all(self.out, self.parcel), flush=True)
        return 1 if bad else 0
