"""What both sides of a comparison need: the same number of threads, and packages that may be missing."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from sparsebp.core.errors import MissingDependencyError
from sparsebp.core.threads import get_threads, most_threads, set_threads


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Let the kernels, BLAS and PyTorch (each if it is there) use `count` threads inside the ``with`` block.

    Raises
    ------
    OptionError
        `count` is below 1 or above `sparsebp.core.threads.most_threads`.
    """
    before = get_threads()
    torch = optional("torch")
    torch_before = torch.get_num_threads() if torch else 0
    set_threads(count)
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        set_threads(before)
        if torch:
            torch.set_num_threads(torch_before)


def thread_counts_here(wanted: tuple[int, ...], note: Callable[[str], None]) -> tuple[int, ...]:
    """Return those of `wanted` that this machine has; tell `note` about the others."""
    most = most_threads()
    for count in wanted:
        if count > most:
            note(f"{count} threads: left out, this machine gives {most}")
    return tuple(count for count in wanted if count <= most)


def optional(name: str) -> ModuleType | None:
    """Import and return a package that may be missing; None if it is."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # a library that it needs may be missing
        return None


def import_torch() -> Any:
    """Import and return PyTorch, the peer.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    torch = optional("torch")
    if torch is None:
        raise MissingDependencyError("PyTorch is not installed, and this benchmark measures against it",
                                     remedy="Install the extra: pip install 'sparsebp[torch]'")  # fmt: skip
    return torch
