"""Exceptions: every one says what was expected and what came, and where it helps what to do about it.

Each class also derives from the built-in exception that NumPy or the standard library would raise in its place,
so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class SparseBPError(Exception):
    """Base of all exceptions that sparsebp raises on purpose.

    Parameters
    ----------
    problem
        What is wrong, in one clause.
    expected, got, remedy
        What was expected, what came instead, and what to do. Each is optional and becomes a sentence of the message.

    Attributes
    ----------
    alike
        Whether all ranks raise it, at one place of their program: none of them waits for another then.
    """

    alike = False

    def __init__(self, problem: str, *, expected: object = None, got: object = None, remedy: str | None = None) -> None:
        self.problem, self.expected, self.got, self.remedy = problem, expected, got, remedy
        parts = [problem.rstrip(".") + "."]
        if expected is not None:
            parts.append(f"Expected {expected}.")
        if got is not None:
            parts.append(f"Got {got}.")
        if remedy:
            parts.append(remedy.rstrip(".") + ".")
        super().__init__(" ".join(parts))


class PatternError(SparseBPError, ValueError):
    """``indptr``, ``indices`` or ``shape`` do not describe a canonical CSR pattern."""


class ShapeError(SparseBPError, ValueError):
    """An array has the wrong shape, or shapes do not chain."""


class DTypeError(SparseBPError, TypeError):
    """An array has a dtype that the operation does not take; nothing is converted silently."""


class LayoutError(SparseBPError, ValueError):
    """An array is not C-contiguous where a kernel needs it."""


class DeviceError(SparseBPError, RuntimeError):
    """NumPy and CuPy arrays are mixed, or a device was asked for that is not there."""


class OptionError(SparseBPError, ValueError):
    """An option has a value outside its choices or range."""


class ScheduleError(SparseBPError, ValueError):
    """A schedule lacks an action, has one twice, cannot come to an end, or reads weights that are no longer there.

    Parameters
    ----------
    problem, expected, got, remedy
        As for `SparseBPError`.
    actions
        The actions (`sparsebp.schedule.Action`) that the message is about, so that a reader of files can say where
        they stand.
    """

    def __init__(self, problem: str, *, expected: object = None, got: object = None, remedy: str | None = None,
                 actions: Iterable[object] = ()) -> None:  # fmt: skip
        self.actions = tuple(actions)
        super().__init__(problem, expected=expected, got=got, remedy=remedy)


class TransportError(SparseBPError, RuntimeError):
    """Ranks cannot go on together: one has failed or is gone, or what was sent is not what was expected."""


class StaleError(SparseBPError, RuntimeError):
    """Gradients were asked for of a forward whose weights are no longer there."""


class MemoryLimitError(SparseBPError, MemoryError):
    """More memory is needed than ``memory_limit`` allows, said before anything is allocated, or than there is."""


@contextlib.contextmanager
def within_memory(problem: str, remedy: str) -> Iterator[None]:
    """Let a `MemoryLimitError` say what is too large where NumPy, or CuPy, finds no memory inside the ``with`` block.

    Raises
    ------
    MemoryLimitError
        There is not enough memory, or an array would have more elements than can be counted.
    """
    try:
        yield
    except (MemoryError, ValueError) as error:
        too_large = (
            isinstance(error, MemoryError) or "array is too big" in str(error) or "Maximum allowed" in str(error)
        )
        if isinstance(error, SparseBPError) or not too_large:
            raise
        raise MemoryLimitError(
            problem, expected="memory for its arrays", got=str(error) or "no memory left", remedy=remedy
        ) from error


class NonFiniteError(SparseBPError, ArithmeticError):
    """A weight, loss or gradient is NaN or infinite; the message names the step and the layer or parameter."""


class FileFormatError(SparseBPError, ValueError):
    """A checkpoint or another file is corrupt, of another kind, or does not fit the object it is loaded into."""


class OutputError(SparseBPError, OSError):
    """A file or folder cannot be written."""


class MissingDependencyError(SparseBPError, ImportError):
    """An optional package is not installed; the message names the extra that brings it."""
