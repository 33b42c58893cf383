"""Checks of what a scan is planned with: of the arguments of `plan_scan` become a chain and what may run over it."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from sparsebp import backend
from sparsebp.backend.machine import machine
from sparsebp.core.arguments import check_choice, check_flag, check_integer, check_sequence
from sparsebp.core.errors import OptionError, PatternError, ShapeError
from sparsebp.core.types import SCAN_ALGORITHMS, ScanAlgorithm
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.candidates import Candidate, options_for
from sparsebp.scan.planning.fold import piece_ends
from sparsebp.scan.planning.sizing import Chain, Sizes


def check_plan(
    patterns: Sequence[SparsityPattern], algorithm: ScanAlgorithm, workers: int | None, up_levels: int | None,
    chunks: int | None, memory_limit: int | None, fold: bool, batch: int, dtype: Any, shared: Sequence[bool] | None,
    xp: ModuleType,
) -> tuple[Chain, list[Candidate], int]:  # fmt: skip
    """Check the arguments of `plan_scan`; return the chain, the algorithms to choose from, and the memory there is."""
    dtype, patterns, xp = backend.float_dtype(dtype), _checked_patterns(patterns), backend.check_module(xp)
    check_choice("scan algorithm", algorithm, SCAN_ALGORITHMS)
    for name, value, owner in (("up_levels", up_levels, "hybrid"), ("chunks", chunks, "chunked")):
        if value is not None and algorithm != owner:
            raise OptionError(
                f"{name} belongs to the {owner} scan alone",
                expected=f"algorithm={owner!r}",
                got=f"algorithm={algorithm!r}",
                remedy=f"Leave {name} out, or pass algorithm={owner!r}",
            )
    workers = None if workers is None else check_integer("workers", workers, 1)
    up_levels = None if up_levels is None else check_integer("up_levels", up_levels, 0)
    chunks = None if chunks is None else check_integer("chunks", chunks, 1)
    memory_limit = None if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    batch = check_integer("batch", batch, 1)
    flags = [False] * len(patterns)
    if shared is not None:
        flags = [check_flag("an entry of shared", entry) for entry in check_sequence("shared", shared, "flags")]
    if len(flags) != len(patterns):
        raise ShapeError(
            "shared has the wrong length", expected=len(patterns), got=len(flags), remedy="Pass one flag a pattern"
        )
    m = machine(xp, workers)
    ends = piece_ends(patterns) if check_flag("fold", fold) else tuple(range(1, len(patterns) + 1))
    chain = Chain(patterns, ends, Sizes(batch, dtype, tuple(flags)), m)
    options = options_for(algorithm, len(ends), up_levels, chunks, m, batch)
    return chain, options, m.memory if memory_limit is None else memory_limit


def _checked_patterns(patterns: Sequence[SparsityPattern]) -> tuple[SparsityPattern, ...]:
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
