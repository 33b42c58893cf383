"""A thread that lets MPI go on with what is under way while the rank computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sparsebp.core.locks import forkable_event

PAUSE_SECONDS = 2e-4  # a look costs 4 microseconds, a sleep and the interpreter's lock some 30: a twelfth of a core


class Progress:
    """Calls ``go_on()`` again and again as long as it returns True, in a thread; `wake` begins anew.

    It needs the interpreter's lock for a moment at each call: kernels that release it are what this runs beside.
    An error ends the thread; whoever waits for an operation then meets it.
    """

    def __init__(self, go_on: Callable[[], bool]) -> None:
        self._go_on = go_on
        self._work = forkable_event()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="progress of MPI", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Note that something is under way."""
        self._work.set()

    def stop(self) -> None:
        """End the thread, and return when it has."""
        self._ended = True
        self._work.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._work.wait()
            if self._ended:
                return
            self._work.clear()
            while not self._ended and self._go_on():
                time.sleep(PAUSE_SECONDS)
