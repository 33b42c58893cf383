"""Tests on several ranks: one body, run by ranks of this process and by processes of MPI.

A *case* is a function ``case(transport)`` in a file ``cases_*.py`` of this folder, decorated with `on_ranks`. It runs
on every rank, asserts what it wants, and may compare with what one rank alone computes. ``test_cases.py`` runs each
case in this process (`sparsebp.comm.threads.run_ranks`), and all cases of a number of ranks in one
``mpiexec``, since processes take a second to begin. By hand, with names of files or of cases::

    PYTHONPATH=.:tests mpiexec -n 2 python -m mpi transport
    PYTHONPATH=.:tests mpiexec -n 2 python -m mpi transport.sums

A case that fails on one rank ends on the others as well (`Transport.abort`); the next one gets a new transport.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sparsebp.comm.transport import Transport

FOLDER = Path(__file__).parent
Body = Callable[[Transport], None]


class Case(NamedTuple):
    """A case of a file.

    Attributes
    ----------
    name
        ``"transport.sums"``: the file without ``cases_``, and the function.
    run
        The function.
    fails
        A pattern of the error with which it has to fail; None if it must not.
    """

    name: str
    run: Body
    fails: str | None


def on_ranks(*sizes: int, in_process: bool = True, fails: str | None = None) -> Callable[[Body], Body]:
    """Make a function a case of these numbers of ranks.

    Parameters
    ----------
    sizes
        Numbers of ranks.
    in_process
        Whether it runs on ranks of this process too.
    fails
        A pattern of the error that some rank's body has to raise: the others may raise only what that leads to.
    """

    def decorate(body: Body) -> Body:
        body.sizes, body.in_process, body.fails = sizes, in_process, fails  # type: ignore[attr-defined]
        return body

    return decorate


def cases(size: int, names: tuple[str, ...] = (), *, in_process: bool = False) -> list[Case]:
    """Return the cases of `size` ranks, in the order of their files; those of `names` (files or cases) if given."""
    found = []
    for path in sorted(FOLDER.glob("cases_*.py")):
        file = path.stem.removeprefix("cases_")
        if names and not any(name.split(".")[0] == file for name in names):
            continue
        for function, body in vars(importlib.import_module(f"mpi.{path.stem}")).items():
            name = f"{file}.{function}"
            chosen = not names or file in names or name in names
            if chosen and size in getattr(body, "sizes", ()) and (body.in_process or not in_process):
                found.append(Case(name, body, body.fails))
    return found


@contextlib.contextmanager
def shared_folder(transport: Transport) -> Iterator[Path]:
    """Yield a fresh folder that all ranks see, and that is removed when all have left."""
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory()) if transport.rank == 0 else None
        yield Path(transport.broadcast(made))
        transport.barrier()
