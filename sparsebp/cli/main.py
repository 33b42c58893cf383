"""The command line: makes sure that typer and rich are there and hands over to `sparsebp.cli.app`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

from sparsebp.cli.terminal import status_of, terminable, write_nearest


def main(
    arguments: Sequence[str] | None = None, application: str = "sparsebp.cli.app", program: str = "sparsebp"
) -> None:
    """Run the command line on `arguments` (``sys.argv`` if None) and exit.

    `application` is the module that has the commands, as ``app``; `program` is how they are called.

    Exit codes: 0 done; 1 an error of sparsebp's own, or of the standard output, printed as one message; 2 wrong usage,
    an unknown or impossible value of an option among it; 130 interrupted, 143 ended by SIGTERM.
    """
    from sparsebp.comm.launcher import launched, quiet_others

    quiet_others()
    try:
        try:
            with terminable(), _streams():
                _run(arguments, application, program)
        except KeyboardInterrupt as error:  # also while modules are imported
            print("Interrupted.", file=sys.stderr)
            raise SystemExit(status_of(error)) from None
    except SystemExit as leaving:
        if launched() is not None:
            _take_leave(leaving.code)
        raise


def _take_leave(status: object) -> None:
    """Tell the other ranks of this one's end; where modules are broken off half-way, let the launcher tell them."""
    try:
        from sparsebp.runtime.launch import take_leave

        take_leave(status)
    except BaseException:  # NumPy, say, cannot be imported twice; a launcher ends all ranks when one dies by a signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)


def _run(arguments: Sequence[str] | None, application: str, program: str) -> None:
    missing = [name for name in ("typer", "rich") if not _installed(name)]
    if missing:
        print(
            f"Error: The command line needs {' and '.join(missing)}, not installed here. "
            "Install the extra `cli`: pip install 'sparsebp[cli]'.",
            file=sys.stderr,
        )
        raise SystemExit(1)
    app = importlib.import_module(application).app
    app(args=None if arguments is None else list(arguments), prog_name=program)


class _UnwritableError(Exception):
    """Standard output cannot be written; no OSError, which the application would take for one of its own."""


class _Output:
    """Standard output that says when it cannot be written; a reader that has had enough is left to the application."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text."""
        with _said():
            return self._stream.write(text)

    def flush(self) -> None:
        """Write what is left."""
        with _said():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _UnwritableError(error.strerror) from error


@contextlib.contextmanager
def _streams() -> Iterator[None]:
    """Let streams that are closed lead nowhere, and exit with one message if standard output cannot be written.

    What the encoding of a stream lacks is written by the nearest letters.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # opened at once, so that no file of a run gets the stream's descriptor
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)
        write_nearest(getattr(sys, name))
    stream = sys.stdout
    sys.stdout = cast(TextIO, _Output(stream))
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (_UnwritableError, BrokenPipeError) as error:
        with contextlib.suppress(OSError):  # what cannot be written is not tried again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        if isinstance(error, _UnwritableError):
            print(f"Error: Standard output cannot be written. Got {error}. Write it elsewhere.", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        sys.stdout = stream


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False
