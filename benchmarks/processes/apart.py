"""Sides of a comparison in a process of their own, timed there, in turn with ours.

Libraries keep threads that go on spinning after their work. In one process PyTorch's, BLAS's and Numba's would wait for
each other's cores, which happens to nobody who uses one of them.

A library that takes its threads from the cores that a process may use, as JAX does, is given fewer cores while it
starts: see `Apart`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from benchmarks.processes.spawned import Spawned
from sparsebp.core import timing
from sparsebp.core.errors import SparseBPError

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
        super().__init__(_serve, cores, patience=5)

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


def _serve(connection: Any, cores: int | None) -> None:
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
