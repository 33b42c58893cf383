"""Two streams on a CPU: two threads, each runs its tasks in order, and waits for what the other must have done.

Kernels and matrix products release the GIL, so those of one stream run beside those of the other. Each thread computes
on one core: one BLAS thread, one Numba thread, and no parallel region, which not every threading layer of Numba's can
enter twice at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterable

import numpy as np

from sparsebp import threads
from sparsebp.train.actions import Step
from sparsebp.train.program import Program, Task


class _Aborted(Exception):
    """The other stream has failed."""


class Lanes:
    """Runs programs of two streams: the first on the calling thread, the second on one of its own."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Program, Step, Step | None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._alone = contextlib.ExitStack()
        self._inside = False
        self._error: BaseException | None = None

    def run(self, program: Program, step: Step, before: Step | None) -> None:
        """Run a step; of a program that is late, the second stream may be at work on it until `finish`.

        Raises
        ------
        BaseException
            The first one that a stream has raised; both have ended then.
        """
        self._start()
        step.events = [threading.Event() for _ in range(program.events + 1)]  # the last one: the second stream is done
        self._jobs.put((program, step, before))
        try:
            _run(program.lanes[0], step, before)
            if not program.late:
                _wait(step, -1)
                self._leave()
        except BaseException as error:
            raise self._abort(step, error) from None

    def finish(self, program: Program, step: Step) -> None:
        """Compute the gradients that a step has left over on either stream.

        Raises
        ------
        BaseException
            As `run`.
        """
        try:
            _run((task for task in program.lanes[0] if task.old and not task.updates), step, step)
            _wait(step, -1)
            self._leave()
        except BaseException as error:
            raise self._abort(step, error) from None

    def stop(self) -> None:
        """End the second thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._leave()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="sparsebp second stream", daemon=True)
            self._thread.start()
        if not self._inside:
            self._alone.enter_context(threads.one_blas_thread())
            self._alone.enter_context(threads.serial_kernels())
            self._inside = True

    def _leave(self) -> None:
        """Let kernels and products of the calling thread use all threads again."""
        self._alone.close()
        self._inside = False

    def _work(self) -> None:
        with threads.serial_kernels(), np.errstate(over="ignore", invalid="ignore"):
            while (job := self._jobs.get()) is not None:
                program, step, before = job
                try:
                    _run(program.lanes[1], step, before)
                except _Aborted:
                    pass
                except BaseException as error:
                    self._error = self._error or error
                    _release(step)
                step.events[-1].set()
                del job, program, step, before  # a waiting thread keeps nothing alive

    def _abort(self, step: Step, error: BaseException) -> BaseException:
        """Let the second stream end `step`; return what to raise."""
        _release(step)
        step.events[-1].wait()
        self._leave()
        first, self._error = self._error, None
        return error if first is None or not isinstance(error, _Aborted) else first


def _run(tasks: Iterable[Task], step: Step, before: Step | None) -> None:
    for task in tasks:
        if task.old:
            if before is not None:
                _do(task, before, before)
        else:
            _do(task, step, before)


def _do(task: Task, step: Step, before: Step | None) -> None:
    for event, of_before in task.waits:
        if not of_before:
            _wait(step, event)
        elif before is not None:
            _wait(before, event)
    if step.aborted:
        raise _Aborted
    task.run(step)
    if task.signal is not None:
        step.events[task.signal].set()


def _wait(step: Step, event: int) -> None:
    step.events[event].wait()
    if step.aborted:
        raise _Aborted


def _release(step: Step) -> None:
    """Wake whoever waits for anything of `step`, to find that it is not to be waited for any more."""
    step.aborted = True
    for event in step.events[:-1]:
        event.set()
