"""A time limit for code that must not hang."""

from __future__ import annotations

import threading

SECONDS = 180


def within(call, seconds=SECONDS):
    """Return what `call` returns, or raise what it raises; fail if it takes longer."""
    out = []

    def run():
        try:
            out.append((call(), None))
        except BaseException as error:  # handed on
            out.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert out, f"still running after {seconds} seconds"
    value, error = out[0]
    if error is not None:
        raise error
    return value
