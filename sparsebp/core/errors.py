"""Exceptions. Messages say what was expected and what came, and where it helps what to do.

Each class also derives from the built-in exception that NumPy or the standard library would raise, so
``except ValueError`` keeps working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class SparseBPError(Exception):
    """Base of all exceptions that sparsebp raises on purpose.

    Parameters
    ----------
    problem
        The problem, in one clause.
    expected, got, remedy
        Optional sentences of the message: the expected value, the actual one, and what to do.

    Attributes
    ----------
    raised_on_all_ranks
        Whether all ranks raise it at the same place of their program, so that none of them waits for another.
    """

    raised_on_all_ranks = False

    def __init__(self, problem: str, *, expected: object = None, got: object = None, remedy: str | None = None) -> None:
        self.problem, self.expected, self.got, self.remedy = problem, expected, got, remedy
        parts = [problem.rstrip(".") + "."]
        if expected is not None:
            parts.append(f"Expected {expected}.")
        if got is not None:
            parts.append(f"Got {str(got).removesuffix('.')}.")
        if remedy:
            parts.append(remedy if remedy.endswith("?") else remedy.rstrip(".") + ".")
        super().__init__(" ".join(parts))


class PatternError(SparseBPError, ValueError):
    """``indptr``, ``indices`` or ``shape`` do not describe a canonical CSR pattern."""


class ShapeError(SparseBPError, ValueError):
    """An array has the wrong shape, or shapes do not chain."""


class DTypeError(SparseBPError, TypeError):
    """An argument is not an array, or its dtype is not one that the operation takes; nothing is converted silently."""


class LayoutError(SparseBPError, ValueError):
    """An array is not C-contiguous where a kernel needs it."""


class DeviceError(SparseBPError, RuntimeError):
    """NumPy and CuPy arrays are mixed, or the requested device does not exist."""


class OptionError(SparseBPError, ValueError):
    """An option has a value outside its choices or range."""


class ScheduleError(SparseBPError, ValueError):
    """A schedule misses or repeats an action, cannot finish, or reads weights that no longer exist.

    Parameters
    ----------
    problem, expected, got, remedy
        As for `SparseBPError`.
    actions
        The actions (`sparsebp.schedule.Action`) concerned, so that file readers can locate them.
    """

    def __init__(self, problem: str, *, expected: object = None, got: object = None, remedy: str | None = None,
                 actions: Iterable[object] = ()) -> None:  # fmt: skip
        self.actions = tuple(actions)
        super().__init__(problem, expected=expected, got=got, remedy=remedy)


class TransportError(SparseBPError, RuntimeError):
    """Ranks cannot continue together: one has failed or left, or received unexpected data."""


class StaleError(SparseBPError, RuntimeError):
    """An object depends on something that no longer exists: the weights of a forward, a plan, overwritten factors."""


class MemoryLimitError(SparseBPError, MemoryError):
    """``memory_limit`` would be exceeded, raised before anything is allocated, or the system has no memory."""


@contextlib.contextmanager
def within_memory(problem: str, remedy: str) -> Iterator[None]:
    """Turn allocation failures inside the ``with`` block into a `MemoryLimitError` that says what is too large."""
    try:
        yield
    except (MemoryError, ValueError) as error:
        too_large = (
            isinstance(error, MemoryError) or "array is too big" in str(error) or "Maximum allowed" in str(error)
        )
        if isinstance(error, SparseBPError) or not too_large:
            raise
        raise MemoryLimitError(problem, expected="memory for its arrays", got=str(error) or "no memory left",
                               remedy=remedy) from error  # fmt: skip


class TracingError(SparseBPError, RuntimeError):  # NumPy would replace a TypeError by its own
    """A function does what cannot be followed from its inputs to its outputs; the message names it and a way out."""


class NonFiniteError(SparseBPError, ArithmeticError):
    """A weight, loss or gradient is NaN or infinite; the message names the step and the layer or parameter."""


class PivotError(SparseBPError, ValueError):
    """A matrix is singular to working precision, or the order of a plan's pivots does not suit its values.

    Parameters
    ----------
    problem, expected, got, remedy
        As for `SparseBPError`.
    samples
        The numbers of the samples concerned, where values have a batch.
    """

    def __init__(self, problem: str, *, expected: object = None, got: object = None, remedy: str | None = None,
                 samples: Iterable[int] = ()) -> None:  # fmt: skip
        self.samples = tuple(samples)
        super().__init__(problem, expected=expected, got=got, remedy=remedy)


class FileFormatError(SparseBPError, ValueError):
    """A checkpoint or another file is corrupt, of another kind, or does not fit the object that loads it."""


class OutputError(SparseBPError, OSError):
    """A file or folder cannot be written."""


class MissingDependencyError(SparseBPError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""


@contextlib.contextmanager
def needing(extra: str, problem: str) -> Iterator[None]:
    """Turn a failed import inside the ``with`` block into a `MissingDependencyError` that names the extra."""
    try:
        yield
    except (ImportError, OSError) as error:  # OSError: a package that lacks its library
        remedy = f"Install the extra `{extra}`: pip install 'sparsebp[{extra}]'"
        raise MissingDependencyError(problem, remedy=remedy) from error
