"""Two streams: two threads, each runs its tasks in order, and waits for what the other must have done.

On a CPU, kernels and matrix products release the GIL, so those of one stream run beside those of the other. Each thread
computes on one core: one BLAS thread, and kernels without helpers, which would take the other's. On a GPU each thread
gives its work to a stream of the device, the first one of the higher priority (Oh et al., EuroSys 2022, §4.1), and the
streams wait for events as the threads do.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import islice
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend, threads
from sparsebp.core.errors import StaleError
from sparsebp.runtime.actions import Step
from sparsebp.runtime.program import Program, Task

SHORTEST, LONGEST = 2e-5, 2e-4
"""Seconds between two looks at whether the other stream is done with something."""


BYTES_TOGETHER, MOST_TOGETHER = 1 << 21, 64
"""Gradients that are computed in one call, with their updates: of the size of a core's second cache; and tasks."""


class _Aborted(Exception):
    """The other stream has failed."""


class TwoStreams:
    """Runs programs of two streams: the first on the calling thread, the second on one of its own."""

    # xp: The namespace of the model's arrays.

    def __init__(self, xp: ModuleType = np) -> None:
        self._xp = xp
        self._streams = backend.streams(xp, 2)
        self._jobs: queue.SimpleQueue[tuple[Program, Step, Step | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = contextlib.ExitStack()
        self._inside = False
        self._error: BaseException | None = None

    def run(self, program: Program, step: Step, before: Step | None) -> None:
        """Run a step; of a program that is late, the second stream may be at work on it until `finish`."""
        self._check_thread(before)
        self._start()
        step.events = [False] * (program.events + 1)  # the last one: the second stream is done
        step.marks = [None] * len(step.events)
        if not backend.is_host(self._xp):
            step.held = []
        self._jobs.put((program, step, before))
        try:
            with self._streams[0]:
                self._run(program, program.streams[0], step, before)
                if not program.late:
                    self._wait(step, -1, step)
                    step.held = None
                elif before is not None:
                    before.held = None  # all of its updates have been waited for
            if not program.late:
                self._leave()
        except BaseException as error:
            raise self._abort(step, error, before) from None

    def finish(self, program: Program, step: Step) -> None:
        """Compute the gradients that a step has left over on either stream."""
        self._check_thread(step)
        try:
            with self._streams[0]:
                left = [task for task in program.streams[0] if task.old and not task.updates]
                self._run(program, left, step, step)
                self._wait(step, -1, step)
                step.held = None
            self._leave()
        except BaseException as error:
            raise self._abort(step, error) from None

    def give_up(self, step: Step) -> None:
        """Let the second stream end a step without what the first one has left over."""
        _release(step)

    def stop(self) -> None:
        """End the second thread; it waits for the first stream if a step is neither finished nor given up."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._leave()

    def _check_thread(self, step: Step | None) -> None:
        """Refuse to wait for a second thread that a fork has left behind in the parent."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread, self._jobs = None, queue.SimpleQueue()
        if step is not None and not step.events[-1]:
            raise StaleError("The process has forked while the second stream was at work on a step",
                             expected="the parent's thread", got="a child process without it",
                             remedy="Fork before the first step, or behind finish()")  # fmt: skip

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._jobs), name="sparsebp second stream", daemon=True
            )
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None)
        if not self._inside and backend.is_host(self._xp):
            self._alone.enter_context(threads.one_blas_thread())
            self._alone.enter_context(threads.serial_kernels())
            self._inside = True

    def _leave(self) -> None:
        """Let kernels and products of the calling thread use all threads again."""
        self._alone.close()
        self._inside = False

    def second(self, program: Program, step: Step, before: Step | None) -> None:
        """Run the second stream's part of a step; what it raises is kept for the first."""
        try:
            with self._streams[1]:
                self._run(program, program.streams[1], step, before)
                step.marks[-1] = backend.record(self._xp)
        except _Aborted:
            pass
        except BaseException as error:
            self._error = self._error or error
            _release(step)
        step.events[-1] = True

    def _run(self, program: Program, tasks: Sequence[Task], step: Step, before: Step | None) -> None:
        at = 0
        while at < len(tasks):
            task, count = tasks[at], 1
            if task.joins is not None and backend.is_host(self._xp):
                count = self._able(tasks, at, step)
            if count > 1 and not step.aborted:
                self._together(program, tasks[at : at + count], step)
            elif not task.old:
                count = 1
                self._do(task, step, before, step)
            elif before is not None:
                self._do(task, before, before, step)
            at += count

    def _able(self, tasks: Sequence[Task], at: int, step: Step) -> int:
        """Return how many tasks from `at` on can run in one call by now; 1 if it is not several weight gradients."""
        weights = made = count = 0
        for task in islice(tasks, at, at + MOST_TOGETHER):
            if task.joins is None or not all(step.events[event] for event, _ in task.waits):
                break
            made += task.joins
            if weights and made > BYTES_TOGETHER:
                break
            count += 1
            weights += not task.updates
        return count if weights > 1 else 1

    def _together(self, program: Program, tasks: Sequence[Task], step: Step) -> None:
        """Do tasks that can all run by now: weight gradients first, which no update of another stage changes."""
        updates = [task for task in tasks if task.updates]
        if not program.weigh(step, [task for task in tasks if not task.updates]):
            for task in tasks:
                task.run(step)
        elif updates:
            program.use(step, updates)
        for task in tasks:
            if task.signal is not None:
                step.events[task.signal] = True

    def _do(self, task: Task, step: Step, before: Step | None, current: Step) -> None:
        """Do a task of `step`: of `current`, by which the other stream says that it has failed, or of that before."""
        for event, of_before in task.waits:
            if not of_before:
                self._wait(step, event, current)
            elif before is not None:
                self._wait(before, event, current)
        if step.aborted or current.aborted:
            raise _Aborted
        task.run(step)
        if task.signal is not None:
            step.marks[task.signal] = backend.record(self._xp)
            step.events[task.signal] = True

    def _wait(self, step: Step, event: int, current: Step) -> None:
        _await(step, event, current)
        if step.aborted or current.aborted:
            raise _Aborted
        backend.wait(self._xp, step.marks[event])

    def _abort(self, step: Step, error: BaseException, before: Step | None = None) -> BaseException:
        """Let the second stream end `step`; return what to raise."""
        # The second stream may still be at work on the step before, and wait for the first one: `finish` goes on with
        # that, and `step` ends behind it.
        _release(step)
        if before is None or before.aborted or before.events[-1]:
            _await(step, -1)
            self._leave()
        first, self._error = self._error, None
        return error if first is None or not isinstance(error, _Aborted) else first


def _work(streams: weakref.ref[TwoStreams], jobs: queue.SimpleQueue[Any]) -> None:
    """The second thread. While it waits it keeps nothing alive, not even its `TwoStreams`, whose death ends it."""
    with threads.serial_kernels(), np.errstate(over="ignore", invalid="ignore"):
        while (job := jobs.get()) is not None and (alive := streams()) is not None:
            alive.second(*job)
            del job, alive


def _release(step: Step) -> None:
    """Wake whoever waits for anything of `step`, to find that it is not to be waited for any more."""
    step.aborted = True
    step.events[:-1] = [True] * (len(step.events) - 1)


def _await(step: Step, event: int, current: Step | None = None) -> None:
    """Wait until something is done, or `current` is given up, by looking again and again, ever less often."""
    # Who has done it just says so. To wake a thread that sleeps until then takes a system call and, on a virtual
    # machine, an interrupt of another core: some 100 us at the expense of who goes on, several times a small action.
    pause = SHORTEST
    while not step.events[event] and not (current is not None and event != -1 and current.aborted):
        time.sleep(pause)
        pause = min(2 * pause, LONGEST)
