"""The rank of this process, as told by the program that started it. Nothing else is imported here."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

# Rank and number of processes, as MPICH and Intel MPI, Open MPI, and Slurm's srun tell their children.
LAUNCHERS = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
             ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))  # fmt: skip
_KEPT = 1000  # characters
_stderr: TextIO | None = None


def launched() -> tuple[int, int] | None:
    """Return this process's rank and the number of ranks, from the launcher, without MPI; None if there was none."""
    for rank, size in LAUNCHERS:
        try:
            return int(os.environ[rank]), int(os.environ[size])
        except (KeyError, ValueError):
            continue
    return None


def launching() -> list[str]:
    """Return the launcher's part of a command for the same number of ranks; empty where there was no launcher."""
    ranks = launched()
    if ranks is None:
        return []
    size = str(ranks[1])
    by_srun = os.environ.get(LAUNCHERS[-1][1]) == size  # whichever interface tells the ranks
    return ["srun" if by_srun else "mpiexec", "-n", size]


def silence_other_ranks() -> None:
    """Silence all ranks but 0 from here on, except for an error after `restore_stderr`."""
    global _stderr  # noqa: PLW0603 (there is one standard error)
    ranks = launched()
    if ranks is not None and ranks[0] > 0 and _stderr is None:
        _stderr = sys.stderr
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until the end)
        sys.stderr = _TailBuffer()


class _TailBuffer(io.StringIO):
    """Keeps the end of the text written to it."""

    def write(self, text: str) -> int:
        """Write a text."""
        if self.tell() > _KEPT:
            end = self.getvalue()[-_KEPT:]
            self.seek(0)
            self.truncate()
            super().write(end)
        return super().write(text)


def stderr_tail() -> str:
    """Return the end of this rank's silenced standard error, in one line."""
    text = sys.stderr.getvalue()[-_KEPT:] if isinstance(sys.stderr, _TailBuffer) else ""
    return " ".join(text.replace("Error: ", "").split())


def restore_stderr() -> None:
    """Let this rank print on standard error again: it has an error to report."""
    if _stderr is not None:
        sys.stderr = _stderr


def say(text: str) -> None:
    """Print a line on standard error, also on a rank that `silence_other_ranks` has silenced."""
    print(text, file=_stderr or sys.stderr, flush=True)
