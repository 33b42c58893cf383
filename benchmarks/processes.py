"""Benchmarks on more than one process: sides, points and ranks, and what runs there."""

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

# A process of a benchmark's own that answers what it is sent.


class Spawned:
    """Runs ``serve(connection, *arguments)`` in a process of its own; as a context manager it ends it.

    Parameters
    ----------
    serve
        A function of a module. It ends when its connection has been closed.
    arguments
        Are pickled to it.
    patience
        Seconds that it has for that, before it is killed.

    Attributes
    ----------
    here
        This side of the connection.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, patience: float) -> None:
        context = multiprocessing.get_context("spawn")  # a fork has locks without their threads, and no CUDA
        self.here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, *arguments), daemon=True)
        self._process.start()
        self._patience = patience
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.here.close()
        self._process.join(self._patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def status(self) -> int | None:
        """Return the exit status of a process that is about to end; None if it goes on."""
        self._process.join(5)
        return self._process.exitcode


# Sides of a comparison in a process of their own, timed there, in turn with ours.
#
# Libraries keep threads that go on spinning after their work. In one process PyTorch's, BLAS's and Numba's would wait
# for each other's cores, which happens to nobody who uses one of them.
#
# A library that takes its threads from the cores that a process may use, as JAX does, is given fewer cores while it
# starts: see `Apart`.

Sides = Callable[..., tuple[Mapping[str, Callable[[], object]], Any]]
"""A function of a module: returns the sides by name, and whatever else its caller wants to know."""


class Apart(Spawned):
    """A process that builds sides and times them.

    As a context manager it ends the process. Sides are built with `build`, those before are dropped.

    Parameters
    ----------
    cores
        On how many cores sides are built, so that libraries start so many threads; those may then run on any core, as
        ours do. None: on all.
    """

    def __init__(self, cores: int | None = None) -> None:
        super().__init__(_serve_sides, cores, patience=5)

    def build(self, sides: Sides, *args: Any) -> tuple[dict[str, Callable[[], float]], Any]:
        """Build sides there; return a timer for each, as `timing.timer` does, and what else `sides` returned.

        Raises
        ------
        SparseBPError
            Something has gone wrong there; the message says what.
        """
        names, more = self._ask((sides, args))
        return {name: partial(self._ask, name) for name in names}, more

    def _ask(self, what: Any) -> Any:
        try:
            self.here.send(what)
            answer, error = self.here.recv()
        except (EOFError, BrokenPipeError) as gone:
            raise SparseBPError("The other side's process has died", expected="an answer", got=f"exit status "
                                f"{self.status()}", remedy="Look for a lack of memory") from gone  # fmt: skip
        if error is not None:
            raise SparseBPError("The other side has failed", expected="its time", got=error,
                                remedy="Run it by itself to see where")  # fmt: skip
        return answer


def _serve_sides(connection: Any, cores: int | None) -> None:
    timers: dict[str, Callable[[], float]] = {}
    while True:
        try:
            what = connection.recv()
        except EOFError:
            return
        try:
            if isinstance(what, str):
                connection.send((timers[what](), None))
                continue
            timers.clear()
            sides, args = what
            with _on_cores(cores):
                found, more = sides(*args)
            timers.update({name: timing.timer(side) for name, side in found.items()})
            connection.send(((list(timers), more), None))
        except Exception as error:  # it goes to the other process
            connection.send((None, f"{type(error).__name__}: {error}"))


@contextmanager
def _on_cores(cores: int | None) -> Iterator[None]:
    """Run what is inside the ``with`` block on so many cores; threads that it has started may use all afterwards."""
    if cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:cores])
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(thread), before)
            except ProcessLookupError:  # it has ended
                continue


# Points of a benchmark, measured one by one in a process of its own, so that what goes wrong at one costs no other.
#
# After an illegal access a CUDA context answers every call with the same error until its process ends, and a kernel
# that never ends cannot be stopped from within. So the process that measures is another one than that which keeps the
# results.

Maker = Callable[..., Callable[[Any], Row]]
"""A function of a module: builds, from what is pickled to it, the function that measures a point."""

POINT_SECONDS = 60.0
"""What a point may take, unless its benchmark says otherwise."""
START_SECONDS = 60.0
"""What a process may take until it is ready to measure."""
_MOST_FAILED = 5
"""Processes in a row that do not get ready."""


class _Answer(NamedTuple):
    """A row, and whether its process can measure another one."""

    row: Row
    usable: bool


def measure_apart(
    run: Run, points: Sequence[Any], make: Maker, *arguments: Any, limit: float = POINT_SECONDS
) -> Iterator[Row]:
    """Yield a row for every point, until time is up.

    Parameters
    ----------
    run
        Of the benchmark; is told what is left out, and why.
    points
        Named tuples that can be pickled, the most wanted first. A row begins with the fields of its point; where
        measuring raises, or its process dies, it has an ``error`` besides, and the next point is measured all the same.
    make, *arguments
        ``make(*arguments)`` is called in the other process, anew after one has died.
    limit
        Seconds that a point may take in a process that is ready; then its process is ended. A quick run has no such
        limit, only its own: it tries the code, on whatever machine and beside whatever else runs there.
    """
    left, failed = list(points), 0
    ready, each = (math.inf, math.inf) if run.quick else (START_SECONDS, limit)
    while left and run.seconds_left > 0 and failed < _MOST_FAILED:
        with _Points(make, arguments) as process:
            start = process.answer(min(ready, run.seconds_left))
            failed, usable = 0 if start.usable else failed + 1, True
            while usable and left and run.seconds_left > 0:
                point = left.pop(0)
                row, usable = process.measure(point, min(each, run.seconds_left)) if start.usable else start
                if "error" in row:
                    run.note(f"{named(point)}: {row['error']}")
                yield {**fields(point), **row}
    if left:
        why = f"{run.seconds:.0f} s were up" if failed < _MOST_FAILED else "the process that measures does not start"
        run.note(f"{len(left)} of {len(points)} points not measured, {why}, from this one on: {named(left[0])}")


def fields(point: Any) -> Row:
    """Return a point's fields as JSON can hold them."""
    return {name: value.__name__ if isinstance(value, type) else value for name, value in point._asdict().items()}


def named(point: Any) -> str:
    """Return a point in words: ``cell RNN, length 1000``."""
    return ", ".join(f"{name} {value}" for name, value in fields(point).items() if value not in (None, ""))


class _Points(Spawned):
    """A process that measures points; as a context manager it ends it, whatever it is at."""

    def __init__(self, make: Maker, arguments: tuple[Any, ...]) -> None:
        super().__init__(_serve_points, make, arguments, patience=2)

    def measure(self, point: Any, seconds: float) -> _Answer:
        """Return the row of a point, and whether the process can measure another one."""
        try:
            self.here.send(point)
        except OSError:
            return self._dead()
        return self.answer(seconds)

    def answer(self, seconds: float) -> _Answer:
        """Return what the process says next; at its beginning, whether it is ready."""
        try:
            if not self.here.poll(None if math.isinf(seconds) else seconds):
                return _Answer({"error": f"stopped after {seconds:.0f} s"}, False)
            answer: _Answer = self.here.recv()
        except (EOFError, OSError):
            return self._dead()
        return answer

    def _dead(self) -> _Answer:
        return _Answer({"error": f"its process has died, status {self.status()}"}, False)


def _serve_points(connection: Any, make: Maker, arguments: tuple[Any, ...]) -> None:
    """Say whether this process is ready; measure what comes, until nothing comes or the GPU is of no use any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends this one
    measure: Callable[[Any], Row] | None = None
    with contextlib.suppress(EOFError, OSError):  # the other process is gone, or has done with this one
        try:
            measure, start = make(*arguments), _Answer({}, True)
        except Exception as error:
            start = _Answer(_wrong(error), False)
        connection.send(start)
        usable = start.usable
        while measure is not None and usable:
            point = connection.recv()
            try:
                row = measure(point)
            except Exception as error:
                row = _wrong(error)
            usable = _usable()
            connection.send(_Answer(row, usable))


def _wrong(error: Exception) -> Row:
    """Return an error as the other process notes it; the trace goes to whoever watches."""
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def _usable() -> bool:
    """Say whether the GPU still does what it is told; where none is used, nothing can have broken it."""
    cupy = sys.modules.get("cupy")
    try:
        if cupy is not None:
            cupy.cuda.Device().synchronize()
    except RuntimeError:  # CuPy's for those of CUDA
        return False
    return True


# A measurement on several ranks: processes that ``mpiexec`` starts, and what the first of them found.
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
    """Run ``work(transport, **arguments)`` on so many processes, and return what rank 0's returned, as JSON.

    Parameters
    ----------
    size
        Number of ranks.
    work
        A function of a module.
    threads
        Most threads of each.
    progress
        Whether MPI goes on beside what they compute, as `connect` takes it.
    seconds
        What they may take.
    arguments
        What JSON can hold.

    Raises
    ------
    MissingDependencyError
        mpi4py or ``mpiexec`` is not there.
    SparseBPError
        The processes have failed, and the message ends with what they said; or they do not come to an end.
    """
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
                                got=str(error), remedy="Run less beside them") from error  # fmt: skip
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


# Benchmarks one after the other, each in a process of its own: one that fails, or leaks, does not stop the rest.

_PATIENCE = 5
"""Seconds in which a benchmark that is interrupted has to end, before it is told again, and before it is killed."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one benchmark.

    Attributes
    ----------
    name
        The benchmark.
    state
        ``"done"``, or what went wrong.
    seconds
        What it took, start and end of its process included.
    rows, missed
        How many rows it has, and those that miss their target, as texts.
    """

    name: str
    state: str
    seconds: float
    rows: int = 0
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
    """Run benchmarks as ``python -m benchmarks`` does, their output on this process's own; return what came of each.

    Parameters
    ----------
    names
        Which, in order.
    out, quick, json
        As the command takes them.
    told
        Is called before each, with its number from 0 and the seconds that its last such run took, None if not known.

    Raises
    ------
    SparseBPError
        Files of the package differ from the commit that its numbers would stand under, in a run that is not `quick`.
    """
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
    if _stamp(path) == before:  # what is there is of another run
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
    return [load(name).said(row) for row in result["rows"] if _misses(row.get("met"))]


def _misses(met: Any) -> bool:
    return met is False or (isinstance(met, str) and met.startswith("missed"))


def _path(name: str, out: Path | None) -> Path:
    return (harness.DEFAULT_FOLDER if out is None else out) / f"{name}.json"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from the one that replaces it; None if there is none."""
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
