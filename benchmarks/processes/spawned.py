"""A process of a benchmark's own that answers what it is sent."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self


class Spawned:
    """Runs ``serve(connection, *arguments)`` in a process of its own; as a context manager it ends it.

    Parameters
    ----------
    serve
        A function of a module. It ends when its connection has been closed.
    arguments
        Are pickled to it.
    patience
        Seconds that it has for that, before it is killed.

    Attributes
    ----------
    here
        This side of the connection.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any, patience: float) -> None:
        context = multiprocessing.get_context("spawn")  # a fork has locks without their threads, and no CUDA
        self.here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, *arguments), daemon=True)
        self._process.start()
        self._patience = patience
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.here.close()
        self._process.join(self._patience)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def status(self) -> int | None:
        """Return the exit status of a process that is about to end; None if it goes on."""
        self._process.join(5)
        return self._process.exitcode
