"""Files: written atomically by `write_atomically`, read with errors that say what is wrong."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sparsebp.core.errors import FileFormatError, OptionError, OutputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of every file that is opened here, of those that a system has."""
LOCK_NAME = ".sparsebp-lock"
_TEMPORARY = ".sparsebp-{token}-{name}"
_KINDS = {
    stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)  # from some network file systems

_held: set[tuple[int, int, int]] = set()
"""Locks held by this process: thread, and device and inode of the lock file."""


# ---- writing -------------------------------------------------------------------------------------------------------


def prepare_folder(folder: str | os.PathLike[str]) -> Path:
    """Create `folder` if needed, and check that a file can be written there."""
    folder = check_path("folder", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, probe = _new_file(folder / "probe")
        os.close(descriptor)
        os.unlink(probe)
    except (OSError, ValueError) as error:
        raise output_error(folder, error) from error
    return folder


def cache_folder() -> Path | None:
    """Return the user's cache folder, which may not exist; None without a home.

    ``$XDG_CACHE_HOME/sparsebp`` or ``~/.cache/sparsebp``, on Windows ``%LOCALAPPDATA%\\sparsebp``.
    """
    windows = os.name == "nt"
    folder = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME", "")
    if os.path.isabs(folder):  # relative ones are invalid by the standard
        return Path(folder) / "sparsebp"
    try:
        home = Path.home()
    except RuntimeError:  # the system does not know the user
        return None
    return home / ("AppData/Local" if windows else ".cache") / "sparsebp"


def write_atomically(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write `content`, or let it write, to `path` through a temporary file in the same folder."""
    # Readers and concurrent writers always find the old content or the new one, complete, even after a power cut. On
    # failure no temporary file stays (unless the process is killed).
    path = check_path("path", path)
    try:
        check_regular(path)
        descriptor, temporary = _new_file(path)
        try:
            with open(descriptor, "wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(descriptor)  # before the name changes: a power cut must not leave an empty file
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(path.parent)  # the new name as well
    except (OSError, ValueError) as error:
        raise output_error(path, error) from error


def write_figure(figure: Any, path: str | os.PathLike[str], **options: Any) -> Path:
    """Write a Matplotlib figure in the format of the suffix of `path`, and return the path."""
    path = check_path("path", path)
    picture = io.BytesIO()
    try:
        figure.savefig(picture, format=path.suffix[1:], **options)
    except ValueError as error:
        raise OutputError(f"{path} cannot be written", expected="a suffix such as .png, .svg or .pdf",
                          got=error) from error  # fmt: skip
    write_atomically(path, picture.getvalue())
    return path


def remove_temporaries(path: Path) -> None:
    """Remove temporary files of `path` left by killed processes. Nobody may be writing it now."""
    for left in path.parent.glob(_TEMPORARY.format(token="*", name=path.name)):
        with contextlib.suppress(OSError):
            left.unlink()


def output_error(path: Path, error: OSError | ValueError) -> OutputError:
    """Return the error that says why `path` cannot be written."""
    return OutputError(f"{_shown(path)} cannot be written",
                       expected="a regular file, or a new one, in a folder with write permission and free space",
                       got=reason(error))  # fmt: skip


def _new_file(path: Path) -> tuple[int, str]:
    """Create a temporary file for `path`, with the usual mode; return its writable descriptor and its name."""
    # The name is new, and a link with that name would not be followed.
    name = _TEMPORARY.format(token=secrets.token_hex(8), name=path.name[:40])  # at most 255 bytes
    temporary = os.path.join(path.parent, name)
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OWN, 0o666), temporary


def check_regular(path: Path, *, follow: bool = False) -> None:
    """Raise OSError if `path` exists and is not a regular file; links count as such only if `follow`."""
    try:
        mode = os.stat(path, follow_symlinks=follow).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, f"{_KINDS.get(stat.S_IFMT(mode), 'something else')} that is there")


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _OWN)
    except PermissionError:  # the folder is writable but not readable, or the system opens none
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


# ---- one writer ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, so that no other run writes there."""
    # An open-file lock (`flock`) ends with the process, so the file `.sparsebp-lock`, which stays, means nothing by
    # itself. A thread may hold a folder more than once. On file systems without such locks, and on Windows, nothing is
    # locked out.
    path = folder / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | _OWN, 0o666)
    except (OSError, ValueError) as error:
        raise output_error(path, error) from error
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        key = (threading.get_ident(), status.st_dev, status.st_ino)
        if key in _held:
            yield
            return
        _lock(file, folder)
        _held.add(key)
        try:
            yield
        finally:
            _held.discard(key)


def _lock(file: io.FileIO, folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise OutputError(f"{folder} is in use by another run", expected="a folder that no other run writes to",
                          got=f"a lock of process {file.read(20).decode('ascii', 'replace').strip() or 'unknown'}",
                          remedy="Wait until it has ended, or choose another folder") from error  # fmt: skip
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise output_error(folder / LOCK_NAME, error) from error
    with contextlib.suppress(OSError):  # only for the message above
        file.truncate(0)
        file.write(f"{os.getpid()}\n".encode())


# ---- reading -------------------------------------------------------------------------------------------------------


def read_file(path: str | os.PathLike[str], problem: str, *, expected: str, remedy: str) -> bytes:
    """Return the content of a file."""
    path = check_path("path", path)
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a path with NUL
        raise FileFormatError(problem, expected=expected, got=reason(error), remedy=remedy) from error


def json_line(value: Any, indent: int | None = None) -> str:
    """Return valid JSON: null for non-finite numbers, ``str(value)`` for types that JSON does not have."""
    return json.dumps(_finite(value), allow_nan=False, default=str, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; duplicate keys and deep nesting raise ValueError."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:60]!r} twice")
        found[key] = value
    return found


def check_path(name: str, value: Any) -> Path:
    """Return an argument as a path."""
    if isinstance(value, str) and value == "":
        raise OptionError(f"{name} is empty", expected="the name of a file or folder", got="''")
    try:
        return Path(value)
    except TypeError as error:
        raise OptionError(f"{name} is not a path", expected="a str or pathlib.Path",
                          got=type(value).__name__) from error  # fmt: skip


def kept_path(name: str, value: Any) -> Path:
    """Return an argument as an absolute path, for later use in another current folder."""
    path = check_path(name, value)
    try:
        return path.absolute()  # links and .. are left to the system
    except OSError as error:
        raise FileFormatError(f"{name} is relative to a folder that is gone", expected="an absolute path",
                              got=_shown(path)) from error  # fmt: skip


def reason(error: OSError | ValueError) -> str:
    """Return the text of a system error, without path and number."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _shown(path: Path) -> str:
    """Return a path for a message: short and printable."""
    text = str(path)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 300 else f"{text[:100]}…{text[-100:]}"
