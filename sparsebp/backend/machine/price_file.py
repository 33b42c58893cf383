"""Where the price list is kept: the one that comes with the package, and the user's own.

The user's is ``prices.json`` in the cache folder: ``$XDG_CACHE_HOME/sparsebp`` or ``~/.cache/sparsebp``, on Windows
``%LOCALAPPDATA%\\sparsebp``. The environment variable ``SPARSEBP_PRICES`` names another file; empty, none is read.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import warnings
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from sparsebp.backend.machine.prices import Prices, parse
from sparsebp.core.errors import FileFormatError
from sparsebp.core.files import cache_folder, parse_json, prepare_folder, read_file, write_atomically

VARIABLE = "SPARSEBP_PRICES"
SHIPPED = Path(__file__).with_name("shipped.json")
_FORMAT = 1
_HERE = ("cpu", "threads", "vector_bytes", "package")
"""What must be as it was where a list was measured."""


def price_path() -> Path | None:
    """Return the path of the user's list, which may not exist; None where the environment, or no home, leaves none."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    folder = cache_folder()
    return None if folder is None else folder / "prices.json"


@cache
def prices() -> Prices:
    """Return the price list of this process: the user's if it was measured on this machine, else the shipped one.

    Read once, when the first estimate asks.

    Warns
    -----
    RuntimeWarning
        The user's file is there and cannot be read.
    """
    path = price_path()
    if path is not None and os.path.exists(path):  # not where it cannot be looked at, as in another user's folder
        try:
            found = load(path, calibrated=True)
        except FileFormatError as error:
            warnings.warn(f"{error} Until then the shipped prices count.", RuntimeWarning, stacklevel=2)
        else:
            here = this_machine()
            if all(found.measured.get(name) == here[name] for name in _HERE):
                return found
    return shipped()


@cache
def shipped() -> Prices:
    """Return the price list that comes with the package."""
    return load(SHIPPED, calibrated=False)


def load(path: Path, *, calibrated: bool) -> Prices:
    """Return a list that `save` wrote.

    Raises
    ------
    FileFormatError
        The file is something else.
    """
    problem, expected = f"{path} is no list of prices", "a file that sparsebp info --calibrate wrote"
    remedy = "Run sparsebp info --calibrate, or remove the file"
    content = read_file(path, problem, expected=expected, remedy=remedy, regular=True)
    try:
        found = parse_json(content)
        if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("measured"), dict):
            raise ValueError(f"no JSON object of format {_FORMAT}")
        return parse(found.get("prices"), calibrated=calibrated, measured=found["measured"])
    except ValueError as error:
        raise FileFormatError(problem, expected=expected, got=error, remedy=remedy) from error


def save(found: Prices, path: Path) -> None:
    """Write a list in one atomic step, in a folder that is made if need be; later estimates of the process read it.

    Raises
    ------
    OutputError
        It cannot be written.
    """
    prepare_folder(path.parent)
    content = {"format": _FORMAT, "measured": dict(found.measured), "prices": found.to_json()}
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    prices.cache_clear()


def this_machine() -> dict[str, Any]:
    """Return what a price list is bound to."""
    package = importlib.import_module("sparsebp").__version__  # by name: the package itself imports all rooms
    return {"cpu": cpu_model(), "threads": os.cpu_count(), "vector_bytes": _vector_bytes(), "package": package}


def now_and_here() -> Mapping[str, Any]:
    """Return what a list that is measured now says of itself."""
    return this_machine() | {"date": datetime.now(UTC).isoformat(timespec="seconds")}


@cache
def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    return _cpu_line("model name") or platform.processor() or platform.machine()


def _vector_bytes() -> int:
    """Return the width of vectors: 64 with AVX-512, else 32, as the kernels have it."""
    return 64 if "avx512f" in _cpu_line("flags").split() else 32


@cache
def _cpu_line(key: str) -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return ""
