"""Runs cases in child processes: one that dies or does not come to an end is the fault of the case it was at."""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import multiprocessing
import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from fuzz.case import Outcome, Target, run_case, target_of

MEMORY = 16 * 2**30
"""Bytes of address space of a child: a case that asks for all memory gets a MemoryError, not the machine."""
START = 180.0
"""Seconds that a child may take to start and import, on a busy machine; it is no case's fault."""


class Child:
    """A process that works on a list of numbers and reports after every one."""

    def __init__(self, targets: str, seed: int, numbers: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        self.numbers, self.done = numbers, 0
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(targets, seed, numbers, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.deadline = time.monotonic() + START


def _work(targets: str, seed: int, numbers: list[int], connection: Connection) -> None:
    """Work on the numbers; runs in the child."""
    faulthandler.enable()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    table = load(targets)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send(None)  # from now on it is the cases that take time
    for number in numbers:
        connection.send(run_case(table, seed, number))


def load(targets: str) -> dict[str, Target]:
    """Return the table of targets that ``module:name`` names."""
    module, name = targets.split(":")
    table: dict[str, Target] = getattr(importlib.import_module(module), name)
    return table


def run_cases(
    targets: str, seed: int, numbers: Iterable[int], workers: int = 1, limit: float = 120.0, chunk: int = 10_000
) -> Iterator[Outcome]:
    """Run the cases in child processes, and yield every outcome as it comes.

    Parameters
    ----------
    targets
        The table of targets, as ``module:name``: children import it themselves.
    seed, numbers
        Which cases.
    workers
        How many children work at once.
    limit
        Seconds that a case may take; generous, since the first call of a kernel compiles it.
    chunk
        Cases that a child works on before a fresh one takes over.
    """
    todo = iter(numbers)
    children: list[Child] = []
    names = load(targets)

    def start(numbers: list[int]) -> None:
        children.append(Child(targets, seed, numbers))

    while True:
        while len(children) < workers and (part := list(itertools.islice(todo, chunk))):
            start(part)
        if not children:
            return
        multiprocessing.connection.wait([child.connection for child in children], timeout=1.0)
        for child in list(children):
            bad = ""
            try:
                while child.connection.poll():
                    outcome = child.connection.recv()
                    child.deadline = time.monotonic() + limit
                    if outcome is not None:
                        child.done += 1
                        yield outcome
            except EOFError:
                child.process.join()
                bad = f"the process ended with {child.process.exitcode}" if child.done < len(child.numbers) else ""
            else:
                if child.done < len(child.numbers):
                    if time.monotonic() < child.deadline:
                        continue
                    bad = f"no end after {limit:.0f} s"
            child.process.kill()
            child.process.join()
            child.connection.close()
            children.remove(child)
            if bad:
                number, rest = child.numbers[child.done], child.numbers[child.done + 1 :]
                yield Outcome(number, target_of(names, number), "hang" if "no end" in bad else "crash", bad)
                if rest:
                    start(rest)


def summary(
    outcomes: Iterable[Outcome], each: Callable[[Outcome], Any] = lambda outcome: None
) -> Counter[tuple[str, str]]:
    """Count outcomes by (target, kind); `each` sees every one."""
    counts: Counter[tuple[str, str]] = Counter()
    for outcome in outcomes:
        counts[outcome.target, outcome.kind] += 1
        each(outcome)
    return counts
