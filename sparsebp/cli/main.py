"""The entry point: checks for typer and rich, handles signals and streams, and hands over to `sparsebp.cli.app`."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, TextIO, cast


def main(
    arguments: Sequence[str] | None = None, application: str = "sparsebp.cli.app", program: str = "sparsebp"
) -> None:
    """Run the command line on `arguments` (``sys.argv`` if None) and exit.

    `application` is the module with the commands' ``app``, `program` the name in messages. Exit codes: 0 done; 1 an
    error of sparsebp or of standard output, printed as one message; 2 wrong usage; 130 interrupted, 143 SIGTERM.
    """
    from sparsebp.comm.launcher import launched, silence_other_ranks

    silence_other_ranks()
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
    """Tell the other ranks of this one's end, or let the launcher do so if modules are half imported."""
    try:
        from sparsebp.runtime.launch import announce_exit

        announce_exit(status)
    except BaseException:  # NumPy cannot be imported twice; a launcher ends all ranks when one dies by a signal
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
    """Standard output cannot be written; not an OSError, which the application would handle."""


class _Output:
    """Standard output that raises `_UnwritableError`; a closed pipe is left to the application."""

    encoding = "utf-8"  # typer would write UTF-8 past an ASCII stream; `write_nearest` has seen to its letters

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
    """Open closed streams to nowhere, and exit with one message if standard output cannot be written."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # at once, so that no file of a run gets the stream's descriptor
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)
        write_nearest(getattr(sys, name))
    stream = sys.stdout
    sys.stdout = output = cast(TextIO, _Output(stream))
    try:
        try:
            yield
        finally:
            output.flush()  # the application may have put another in its place, which hides that a pipe is closed
    except (_UnwritableError, BrokenPipeError) as error:
        with contextlib.suppress(OSError):  # so that it is not tried again at exit
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


# Signals, exit codes, and letters that a terminal's encoding lacks.

_NAME = "sparsebp.nearest"
_NEAREST = str.maketrans("×–−—…·≥≤µμ‖→±√§δΔΣΘ◇─│“”‘’∞▁▂▃▄▅▆▇█", "x---..><uu|>~vSdDSO*-|\"\"''i._-=+*%#")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    """Return the nearest ASCII letter for each, so that tables stay aligned, and ``?`` where there is none."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    nearest = ""
    for letter in error.object[error.start : error.end]:
        plain = unicodedata.normalize("NFKD", letter.translate(_NEAREST))[:1]
        nearest += plain if plain.isascii() and plain else "?"
    return nearest, error.end


codecs.register_error(_NAME, _nearest)


def write_nearest(stream: Any) -> None:
    """Let a stream write letters that its encoding lacks as the nearest ASCII ones."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if hasattr(stream, "reconfigure") and not codecs.lookup(encoding).name.startswith("utf"):
        stream.reconfigure(errors=_NAME)


class Terminated(KeyboardInterrupt):
    """SIGTERM, reported as Ctrl-C is, with the step and the way to go on."""


def status_of(error: KeyboardInterrupt) -> int:
    """Return the shell's exit code of an interruption."""
    return 143 if Terminated in (type(error), type(error.__cause__)) else 130


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` at the first SIGTERM; the second one ends the process at once.

    Neither SIGTERM nor Ctrl-C is lost while a kernel is compiled.
    """

    def terminate(number: int, frame: FrameType | None) -> None:
        if not _again(number, frame):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            raise Terminated

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not _again(number, frame):
            raise KeyboardInterrupt

    handlers: list[tuple[int, Any, Any]] = [
        (signal.SIGTERM, terminate, signal.SIG_DFL), (signal.SIGINT, interrupt, signal.default_int_handler)
    ]  # fmt: skip
    here = threading.current_thread() is threading.main_thread()
    own = [one for one in handlers if here and signal.getsignal(one[0]) is one[2]]  # others have another handler
    for number, handler, _ in own:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler, usual in own:
            if signal.getsignal(number) is handler:
                signal.signal(number, usual)


def _again(number: int, frame: FrameType | None) -> bool:
    """Send a signal once more, a little later, if it comes in a callback of LLVM: what is raised there is dropped."""
    while frame is not None and not frame.f_code.co_name.startswith("_raw_object_cache"):
        frame = frame.f_back
    if frame is not None:
        threading.Timer(0.01, os.kill, (os.getpid(), number)).start()
    return frame is not None
