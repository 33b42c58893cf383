"""Benchmarks in several processes: peers apart, GPU points, ranks, and series of benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from benchmarks import harness, load
from benchmarks.harness import Row, Run, commit
from sparsebp.core import timing
from sparsebp.core.errors import FileFormatError, MissingDependencyError, SparseBPError

# A process that answers messages.

Make = Callable[..., Callable[[Any], Any]]
"""A function of a module: builds, from what is pickled to it, the function that answers a message."""


class Answer(NamedTuple):
    """What a message came to: a value or an error, and whether the process can answer another one."""

    value: Any
    error: str | None = None
    usable: bool = True


class Spawned:
    """Answers messages by ``make(*arguments)`` in another process; as a context manager it ends it, whatever it is at.

    The first answer, to no message, says whether it is ready.
    """

    def __init__(self, make: Make, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # a fork has locks without their threads, and no CUDA
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, make, arguments), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._here.close()
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def ask(self, message: Any, seconds: float = math.inf) -> Answer:
        """Return the answer to a message."""
        with contextlib.suppress(OSError):  # it has died, which `answer` tells
            self._here.send(message)
        return self.answer(seconds)

    def answer(self, seconds: float = math.inf) -> Answer:
        """Return the next answer, which comes within so many seconds."""
        try:
            if not self._here.poll(None if math.isinf(seconds) else seconds):
                return Answer(None, f"stopped after {seconds:.0f} s", usable=False)
            answer: Answer = self._here.recv()
        except (EOFError, OSError):
            self._process.join(5)
            return Answer(None, f"its process has died, status {self._process.exitcode}", usable=False)
        return answer


def _serve(connection: Any, make: Make, arguments: tuple[Any, ...]) -> None:
    """Say whether this process is ready; answer messages until there are no more or the GPU is broken."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    reply: Callable[[Any], Any] | None = None
    with contextlib.suppress(EOFError, OSError):  # the other process is gone, or has done with this one
        try:
            reply, answer = make(*arguments), Answer(None)
        except Exception as error:
            answer = _wrong(error, usable=False)
        connection.send(answer)
        while reply is not None and answer.usable:
            message = connection.recv()
            try:
                answer = Answer(reply(message), usable=_usable())
            except Exception as error:
                answer = _wrong(error, usable=_usable())
            connection.send(answer)


def _wrong(error: Exception, *, usable: bool) -> Answer:
    """Return an error as an answer, and print its trace."""
    traceback.print_exc()
    return Answer(None, f"{type(error).__name__}: {error}", usable)


def _usable() -> bool:
    """Return whether the GPU, if one is used, still works."""
    cupy = sys.modules.get("cupy")
    try:
        if cupy is not None:
            cupy.cuda.Device().synchronize()
    except RuntimeError:  # CuPy's type for CUDA's errors
        return False
    return True


# Sides of a comparison in another process, timed there, in turn with ours.
#
# Libraries keep threads that go on spinning after their work. In one process PyTorch's, BLAS's and Numba's would wait
# for each other's cores, which happens to nobody who uses one of them.
#
# A library that takes its threads from the cores that a process may use, as JAX does, is given fewer cores while it
# starts: see `Apart`.

Sides = Callable[..., tuple[Mapping[str, Callable[[], object]], Any]]
"""A function of a module: returns the sides by name, and whatever else its caller wants to know."""


class Apart(Spawned):
    """A process that builds sides, on some of the cores, and times them."""

    def __init__(self, cores: int | None = None) -> None:
        super().__init__(_sides, cores)
        self._checked(self.answer())

    def build(self, sides: Sides, *args: Any) -> tuple[dict[str, Callable[[], float]], Any]:
        """Build sides there, in place of those before; return a timer for each, and the second result of `sides`."""
        names, more = self._checked(self.ask((sides, args)))
        return {name: partial(self._seconds, name) for name in names}, more

    def _seconds(self, name: str) -> float:
        return float(self._checked(self.ask(name)))

    def _checked(self, answer: Answer) -> Any:
        if answer.error is not None:
            raise SparseBPError("The other side has failed", expected="an answer", got=answer.error,
                                remedy="Run it by itself to see where, and look for a lack of memory")  # fmt: skip
        return answer.value


def _sides(cores: int | None) -> Callable[[Any], Any]:
    """Return the function that builds sides, given a function and its arguments, or times one, given its name."""
    timers: dict[str, Callable[[], float]] = {}

    def reply(message: Any) -> Any:
        if isinstance(message, str):
            return timers[message]()
        timers.clear()
        sides, args = message
        with _on_cores(cores):
            found, more = sides(*args)
        timers.update({name: timing.timer(side) for name, side in found.items()})
        return list(timers), more

    return reply


@contextmanager
def _on_cores(cores: int | None) -> Iterator[None]:
    """Run what is inside the ``with`` block on `cores` cores; threads started there may use all afterwards."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), before)


# Points of a benchmark, measured one by one in another process, so that a failure costs one point only.
#
# After an illegal access a CUDA context answers every call with the same error until its process ends, and a kernel
# that never ends cannot be stopped from within. So the process that measures is another one than that which keeps the
# results.

POINT_SECONDS = 60.0
"""Default time limit of a point."""
START_SECONDS = 60.0
"""Time limit of a process to get ready."""
_MOST_FAILED = 5
"""Processes in a row that do not get ready."""


def measure_apart(
    run: Run, points: Sequence[Any], make: Make, *arguments: Any, limit: float = POINT_SECONDS
) -> Iterator[Row]:
    """Yield a row for every point, until time is up."""
    left, failed = list(points), 0
    ready, each = (math.inf, math.inf) if run.quick else (START_SECONDS, limit)
    while left and run.seconds_left > 0 and failed < _MOST_FAILED:
        with Spawned(make, *arguments) as process:
            start = answer = process.answer(min(ready, run.seconds_left))
            failed = 0 if start.usable else failed + 1
            while left and run.seconds_left > 0:
                point = left.pop(0)
                if start.usable:
                    answer = process.ask(point, min(each, run.seconds_left))
                row = answer.value if answer.error is None else {"error": answer.error}
                if "error" in row:
                    run.note(f"{named(point)}: {row['error']}")
                yield {**fields(point), **row}
                if not answer.usable:
                    break
    if left:
        why = f"{run.seconds:.0f} s were up" if failed < _MOST_FAILED else "the process that measures does not start"
        run.note(f"{len(left)} of {len(points)} points not measured, {why}, from this one on: {named(left[0])}")


def fields(point: Any) -> Row:
    """Return a point's fields as JSON can hold them."""
    return {name: value.__name__ if isinstance(value, type) else value for name, value in point._asdict().items()}


def named(point: Any) -> str:
    """Return a point in words: ``cell RNN, length 1000``."""
    return ", ".join(f"{name} {value}" for name, value in fields(point).items() if value not in (None, ""))


# A measurement on several ranks, started by ``mpiexec``; the first one returns the result.
#
# ``python -m benchmarks.processes MODULE FUNCTION PROGRESS ARGUMENTS FILE`` is one of them.

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def on_ranks(
    size: int,
    work: Callable[..., Any],
    *,
    threads: int = 1,
    progress: bool = False,
    seconds: float = 1800.0,
    **arguments: Any,
) -> Any:
    """Run ``work(transport, **arguments)`` on `size` processes, and return rank 0's result, as JSON."""
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None or importlib.util.find_spec("mpi4py") is None:
        raise MissingDependencyError("mpi4py, or mpiexec, is not installed", expected="an MPI library", got="none",
                                     remedy="Install the extra `mpi`: pip install 'sparsebp[mpi]'")  # fmt: skip
    root = str(Path(__file__).parents[1])  # this sparsebp, whatever else there is
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environment = os.environ | dict.fromkeys(_THREADS, str(threads)) | {"PYTHONPATH": paths}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [found, "-n", str(size), sys.executable, "-P", "-m", "benchmarks.processes",
                   work.__module__, work.__name__, str(int(progress)), json.dumps(arguments), str(file)]  # fmt: skip
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=seconds, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise SparseBPError(f"{size} ranks do not come to an end", expected=f"less than {seconds:g} s",
                                got=str(error), remedy="Run fewer other programs") from error  # fmt: skip
        if done.returncode or not file.exists():
            raise SparseBPError(f"The measurement on {size} ranks has failed", expected="exit status 0",
                                got=f"{done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}",
                                remedy=f"Run it by itself: {' '.join(command[:-2])} …")  # fmt: skip
        return json.loads(file.read_text(encoding="utf-8"))


def _main(module: str, work: str, progress: str, arguments: str, file: str) -> None:
    from sparsebp.runtime.launch import connect

    transport = connect(progress=bool(int(progress)))
    found = getattr(import_module(module), work)(transport, **json.loads(arguments))
    if transport.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main(*sys.argv[1:])


# Benchmarks one after the other, each in its own process: one that fails, or leaks, does not stop the rest.

_PATIENCE = 5
"""Seconds in which a benchmark that is interrupted has to end, before it is told again, and before it is killed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one benchmark."""

    name: str  # the benchmark
    state: str  # ``"done"``, or what went wrong
    seconds: float  # start and end of its process included
    rows: int = 0  # how many rows it has, and those that miss their target, as texts
    missed: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """Whether every row was measured."""
        return self.state == "done"

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return dataclasses.asdict(self) | {"seconds": round(self.seconds, 1)}


def run_series(
    names: Sequence[str], out: Path | None, *, quick: bool, json: bool, told: Callable[[int, float | None], None]
) -> list[Outcome]:
    """Run benchmarks as ``python -m benchmarks`` does, with the same output; return their outcomes."""
    found = commit()
    if found.endswith("+") and not quick:
        raise SparseBPError(
            "Files of the package differ from its last commit, which the numbers would stand under",
            expected="a clean working tree", got=f"commit {found}", remedy="Commit, or stash, what has changed",
        )  # fmt: skip
    outcomes = []
    for number, name in enumerate(names):
        told(number, _last_seconds(_path(name, out), quick))
        command = [sys.executable, "-m", "benchmarks", name, *(["--quick"] if quick else [])]
        command += [*(["--out", str(out)] if out is not None else []), *(["--json"] if json else [])]
        outcomes.append(_one(name, command, _path(name, out)))
    return outcomes


def _one(name: str, command: Sequence[str], path: Path) -> Outcome:
    sys.stdout.flush()
    begin, before = time.monotonic(), _stamp(path)
    status = _status(command)
    seconds = time.monotonic() - begin
    if _stamp(path) == before:  # a file of another run
        return Outcome(name, f"failed, exit status {status}: no result", seconds)
    try:
        result = harness.load_result(path)
    except FileFormatError as error:
        return Outcome(name, f"failed, exit status {status}: {error}", seconds)
    errors = len(result["rows"]) - len(harness.measured(result))
    state = "done" if status == 0 else f"failed, exit status {status}: {errors} rows could not be measured"
    return Outcome(name, state, seconds, len(result["rows"]), tuple(missed(name, result)))


def _status(command: Sequence[str]) -> int:
    """Run a command; return its exit status. Ctrl-C reaches it as well, and it is waited for."""
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            for stop in (lambda: process.send_signal(signal.SIGINT), process.kill):  # if it came to this process alone
                try:
                    process.wait(_PATIENCE)
                    break
                except subprocess.TimeoutExpired:
                    stop()
            raise


def missed(name: str, result: Mapping[str, Any]) -> list[str]:
    """Return the rows of a result that miss their target, each as the benchmark prints it."""
    return [load(name).said(row) for row in result["rows"] if str(row.get("met")).startswith(("missed", "False"))]


def _path(name: str, out: Path | None) -> Path:
    return (harness.DEFAULT_FOLDER if out is None else out) / f"{name}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's inode and time, None if there is no file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _last_seconds(path: Path, quick: bool) -> float | None:
    try:
        result = harness.load_result(path)
    except FileFormatError:
        return None
    seconds = result.get("seconds") if result["quick"] == quick else None
    return float(seconds) if isinstance(seconds, int | float) else None
