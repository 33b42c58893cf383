"""Points of a benchmark, measured one by one in a process of its own, so that what goes wrong at one costs no other.

After an illegal access a CUDA context answers every call with the same error until its process ends, and a kernel that
never ends cannot be stopped from within. So the process that measures is another one than that which keeps the results.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.processes.spawned import Spawned
from benchmarks.tools.benchmark import Row, Run

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
        with _Process(make, arguments) as process:
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


class _Process(Spawned):
    """A process that measures points; as a context manager it ends it, whatever it is at."""

    def __init__(self, make: Maker, arguments: tuple[Any, ...]) -> None:
        super().__init__(_serve, make, arguments, patience=2)

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


def _serve(connection: Any, make: Maker, arguments: tuple[Any, ...]) -> None:
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
