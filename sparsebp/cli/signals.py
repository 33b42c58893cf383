"""SIGTERM as an interruption, and the exit codes of interruptions."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn


class Terminated(KeyboardInterrupt):
    """SIGTERM, from a batch system, say: told as Ctrl-C is, so that the step and the way to go on are printed."""


def status_of(error: KeyboardInterrupt) -> int:
    """Return the exit code of an interruption, as shells have it."""
    return 143 if Terminated in (type(error), type(error.__cause__)) else 130


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM; the second one ends the process at once."""

    def terminate(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    here = threading.current_thread() is threading.main_thread()
    own = here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # else somebody has a use for it
    if own:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if own and signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
