"""Points that `benchmarks.processes` measures in the tests: they fail in every possible way."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A point that does what it says: ``well``, ``raises``, ``dies``, ``hangs``, ``waits`` or ``sticks``."""

    does: str
    number: int = 0
    dtype: type = float


def make(folder: Path) -> Callable[[Point], dict[str, Any]]:
    """Return what measures; leaves a file for every process that it is called in."""
    (folder / str(os.getpid())).touch()

    def measure(point: Point) -> dict[str, Any]:
        if point.does == "raises":
            raise ValueError("no such size")
        if point.does == "dies":
            os._exit(7)
        if point.does == "hangs":
            time.sleep(1000)
        if point.does == "waits":
            time.sleep(1)
            return {"value": "late"}
        if point.does == "sticks":
            _break_the_device()
        return {"value": point.number}

    return measure


def make_fails(folder: Path) -> Callable[[Point], dict[str, Any]]:
    """Fail as where there is no GPU."""
    raise RuntimeError("no GPU")


def make_slowly(folder: Path) -> Callable[[Point], dict[str, Any]]:
    """Get ready late, as where much is imported."""
    time.sleep(2)
    return make(folder)


def _break_the_device() -> None:
    """Do what leaves a device that answers every call with an error."""
    from strict_cupy import install
    from strict_cupy.device import DEVICE

    install()
    DEVICE.sticky = 700
    DEVICE.check()
