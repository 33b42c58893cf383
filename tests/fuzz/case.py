"""One case: a target's function on the random generator of (seed, number), and what came of it."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core import threads
from sparsebp.core.errors import SparseBPError

Target: TypeAlias = Callable[[np.random.Generator], None]
"""Draws arguments, calls the package and compares. What it lets through of our own errors counts as a refusal."""

BAD = ("crash", "raw", "wrong", "hang")
GOOD = ("right", "refused", "memory")


class Wrong(Exception):
    """A result differs from the oracle's, bad input was accepted, or good input refused."""


class Outcome(NamedTuple):
    """What came of a case: one of `GOOD` or `BAD`, the target, and for the bad ones what happened."""

    number: int
    target: str
    kind: str
    detail: str = ""


def run_case(targets: dict[str, Target], seed: int, number: int) -> Outcome:
    """Run case `number`: targets take turns."""
    name, before = target_of(targets, number), threads.get_threads()
    threads.set_threads(min(threads.most_threads(), 2 if number % 11 == 0 else 1))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            targets[name](np.random.default_rng([seed, number]))
    except SparseBPError as error:
        bad = "" if type(error) is not SparseBPError and error.problem else f"an error without a class: {error!r}"
        return Outcome(number, name, "wrong" if bad else "refused", bad)
    except MemoryError:
        return Outcome(number, name, "memory")
    except Wrong:
        return Outcome(number, name, "wrong", traceback.format_exc(limit=-2))
    except BaseException:
        return Outcome(number, name, "raw", traceback.format_exc(limit=-5))
    finally:
        threads.set_threads(before)
    return Outcome(number, name, "right")


def target_of(targets: dict[str, Target], number: int) -> str:
    """Return the name of the target of case `number`."""
    return list(targets)[number % len(targets)]


# ---- what targets say ------------------------------------------------------------------------------------------------


def expect(holds: bool, message: str) -> None:
    """Raise `Wrong` unless it holds."""
    if not holds:
        raise Wrong(message)


@contextlib.contextmanager
def accepted(what: str) -> Iterator[None]:
    """Within, our own errors are wrong: the arguments are good."""
    try:
        yield
    except MemoryError:
        raise
    except SparseBPError as error:
        raise Wrong(f"{what} was refused: {error}") from error


def refused(what: str, function: Callable[..., Any], *args: Any, **options: Any) -> SparseBPError:
    """Call with bad arguments, and return our own error."""
    try:
        result = function(*args, **options)
    except SparseBPError as error:
        return error
    raise Wrong(f"{what} was accepted: {result!r}"[:500])


def same(what: str, found: Any, wanted: Any, dtype: Any = None, factor: float = 1.0, exact: bool = False) -> None:
    """Compare arrays: shape, dtype, values; the tolerance is that of sums of some tens of terms of size one."""
    expect(isinstance(found, np.ndarray), f"{what}: {type(found)} is no array")
    wanted = np.asarray(wanted)
    expect(found.shape == wanted.shape, f"{what}: shape {found.shape}, not {wanted.shape}")
    dtype = np.dtype(wanted.dtype if dtype is None else dtype)
    expect(found.dtype == dtype, f"{what}: {found.dtype}, not {dtype}")
    if exact:
        close = np.asarray((found == wanted) | (_nan(found) & _nan(wanted)))
    else:
        eps = float(np.finfo(dtype).eps)
        scale = float(np.max(np.abs(wanted), where=np.isfinite(wanted), initial=1.0))
        close = np.isclose(found, wanted, rtol=400 * eps * factor, atol=200 * eps * factor * scale, equal_nan=True)
    if not close.all():
        differ = f"{np.count_nonzero(~close)} of {close.size} differ"
        raise Wrong(f"{what}: {differ}\n{np.array_repr(found)[:500]}\n{np.array_repr(wanted)[:500]}")


def _nan(array: np.ndarray) -> np.ndarray:
    return np.isnan(array) if array.dtype.kind in "fc" else np.zeros(array.shape, bool)
