"""The command line and its terminal: SIGTERM as an interruption, exit codes, letters that an encoding lacks."""

from __future__ import annotations

import codecs
import contextlib
import signal
import threading
import unicodedata
from collections.abc import Iterator
from typing import Any, NoReturn

# Text for terminals whose encoding lacks letters of ours: the nearest letter of ASCII in the place of each.

_NAME = "sparsebp.nearest"
_NEAREST = str.maketrans("×–−—…·≥≤µμ‖→±√§δΔΣΘ◇─│“”‘’∞▁▂▃▄▅▆▇█", "x---..><uu|>~vSdDSO*-|\"\"''i._-=+*%#")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Return as many letters as there were, so that tables stay aligned; ``?`` for what has none that is near."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = ""
    for letter in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", letter.translate(_NEAREST))[:1]
        found += plain if plain.isascii() and plain else "?"
    return found, error.end


codecs.register_error(_NAME, _nearest)


def write_nearest(stream: Any) -> None:
    """Let a stream write what its encoding does not have by the nearest letters; one that has all is left as it is."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if hasattr(stream, "reconfigure") and not codecs.lookup(encoding).name.startswith("utf"):
        stream.reconfigure(errors=_NAME)


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
