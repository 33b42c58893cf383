"""Checks of what a scan is planned with, and the algorithms that the options leave to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sparsebp.backend.machine import Machine
from sparsebp.core.arguments import check_choice, check_integer, check_sequence
from sparsebp.core.errors import OptionError, PatternError, ShapeError
from sparsebp.core.types import SCAN_ALGORITHMS
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.candidates import Candidate, candidates


def check_patterns(patterns: Sequence[SparsityPattern]) -> tuple[SparsityPattern, ...]:
    """Return the patterns as a tuple in which equal ones are the same object.

    Raises
    ------
    PatternError, ShapeError
        There are none, one is of another type, or they do not chain.
    """
    patterns = tuple(check_sequence("patterns", patterns, "SparsityPattern"))
    if not patterns:
        raise PatternError(
            "A scan needs at least one Jacobian",
            expected="a list of SparsityPattern",
            got="an empty list",
            remedy="Pass the patterns in the order of back-propagation, the last operator's first",
        )
    known: dict[SparsityPattern, SparsityPattern] = {}
    last: SparsityPattern | None = None
    found = []
    for i, p in enumerate(patterns):
        if not isinstance(p, SparsityPattern):
            raise PatternError(
                f"patterns[{i}] is not a pattern",
                expected="a SparsityPattern",
                got=type(p).__name__,
                remedy="Pass jacobian.pattern, or SparsityPattern.from_scipy(matrix)",
            )
        if i and p.shape[1] != patterns[i - 1].shape[0]:
            raise ShapeError(
                f"patterns[{i}] does not chain with patterns[{i - 1}]",
                expected=f"{patterns[i - 1].shape[0]} columns",
                got=f"shape {p.shape}",
                remedy="Order them as back-propagation meets them: the last operator's transposed Jacobian first",
            )
        if p is not last:  # equal patterns become the same object, so that they are compared and planned once
            last, same = p, known.setdefault(p, p)
        found.append(same)
    return tuple(found)


class Options(NamedTuple):
    """Checked numbers of `plan_scan`."""

    workers: int | None
    up_levels: int | None
    chunks: int | None
    memory_limit: int | None
    batch: int


def check_options(
    algorithm: Any, workers: Any, up_levels: Any, chunks: Any, memory_limit: Any, batch: Any
) -> Options:  # fmt: skip
    """Return the options of `plan_scan` as Python's integers. Raises `OptionError`."""
    check_choice("scan algorithm", algorithm, SCAN_ALGORITHMS)
    for name, value, owner in (("up_levels", up_levels, "hybrid"), ("chunks", chunks, "chunked")):
        if value is not None and algorithm != owner:
            raise OptionError(
                f"{name} belongs to the {owner} scan alone",
                expected=f"algorithm={owner!r}",
                got=f"algorithm={algorithm!r}",
                remedy=f"Leave {name} out, or pass algorithm={owner!r}",
            )
    return Options(
        None if workers is None else check_integer("workers", workers, 1),
        None if up_levels is None else check_integer("up_levels", up_levels, 0),
        None if chunks is None else check_integer("chunks", chunks, 1),
        None if memory_limit is None else check_integer("memory_limit", memory_limit, 0),
        check_integer("batch", batch, 1),
    )


def options_for(
    algorithm: str, n: int, up_levels: int | None, chunks: int | None, m: Machine, batch: int
) -> list[Candidate]:
    """Return what there is to choose from for n elements, those with the fewest products first."""
    own = -(-m.workers // batch)  # chunks that keep all workers busy
    if algorithm == "chunked":
        return [Candidate("chunked", chunks=min(n, chunks or own))]
    if algorithm == "hybrid":
        if up_levels is not None:
            return [Candidate("hybrid", up_levels=up_levels)]
        return [
            c._replace(algorithm="hybrid", up_levels=c.up_levels or 0)
            for c in candidates(n, ())
            if c.algorithm in ("linear", "hybrid")
        ]
    if algorithm == "auto":
        most = min(n, 8 * own)
        return candidates(n, sorted({own, m.workers, *(4**k for k in range(1, 16)), most} & set(range(most + 1))))
    return [Candidate(algorithm)]
