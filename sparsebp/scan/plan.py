"""`plan_scan`: choose an algorithm, do all symbolic work, and count all costs before a value exists."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import (
    SCAN_ALGORITHMS,
    Array,
    ScanAlgorithm,
    check_choice,
    check_flag,
    check_integer,
    check_scan_options,
    check_sequence,
)
from sparsebp.core.errors import PatternError, ShapeError
from sparsebp.core.machine import machine
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.algorithms import Recipe, Span, combine, piece_ends
from sparsebp.scan.cost import Chain, is_view, size_recipe
from sparsebp.scan.rules import choose
from sparsebp.scan.run import Multiply, ScanPlan


def check_plan(
    patterns: Sequence[SparsityPattern], memory_limit: int | None, fold: bool, batch: int, dtype: Any,
    shared: Sequence[bool] | None, xp: ModuleType, workers: int | None = None,
) -> tuple[Chain, int]:  # fmt: skip
    """Check the arguments of `plan_scan`; return the chain and the memory limit."""
    dtype, xp = backend.float_dtype(dtype), backend.check_module(xp)
    patterns = tuple(check_sequence("patterns", patterns, "SparsityPattern"))
    if not patterns:
        raise PatternError("A scan needs at least one Jacobian", expected="a list of SparsityPattern",
                           got="an empty list")  # fmt: skip
    known: dict[SparsityPattern, SparsityPattern] = {}
    last: SparsityPattern | None = None
    found = []
    for i, p in enumerate(patterns):
        if p is not last:  # equal patterns become the same object, so that they are compared and planned once
            if not isinstance(p, SparsityPattern):
                raise PatternError(f"patterns[{i}] is not a pattern", expected="a SparsityPattern",
                                   got=type(p).__name__, remedy="Pass jacobian.pattern")  # fmt: skip
            last, same = p, known.setdefault(p, p)
        if i and p.shape[1] != patterns[i - 1].shape[0]:
            raise ShapeError(
                f"patterns[{i}] does not chain with patterns[{i - 1}]",
                expected=f"{patterns[i - 1].shape[0]} columns",
                got=f"shape {p.shape}",
                remedy="Order them as back-propagation meets them: the last operator's transposed Jacobian first",
            )
        found.append(same)
    batch = check_integer("batch", batch, 1)
    flags = [False] * len(patterns)
    if shared is not None:
        flags = [check_flag("an entry of shared", entry) for entry in check_sequence("shared", shared, "flags")]
    if len(flags) != len(patterns):
        raise ShapeError("shared has the wrong length", expected=f"{len(patterns)} flags", got=len(flags))
    m = machine(xp, None if workers is None else check_integer("workers", workers, 1))
    ends = piece_ends(patterns) if check_flag("fold", fold) else tuple(range(1, len(patterns) + 1))
    limit = m.memory if memory_limit is None else check_integer("memory_limit", memory_limit, 0)
    return Chain(tuple(found), ends, batch, dtype, tuple(flags), m), limit


def plan_scan(
    patterns: Sequence[SparsityPattern],
    algorithm: ScanAlgorithm = "auto",
    workers: int | None = None,
    up_levels: int | None = None,
    memory_limit: int | None = None,
    *,
    chunks: int | None = None,
    fold: bool = True,
    batch: int = 1,
    dtype: Any = np.float32,
    shared: Sequence[bool] | None = None,
    xp: ModuleType = np,
) -> ScanPlan:
    """Plan a scan over the chain of transposed Jacobians with these patterns.

    Parameters
    ----------
    patterns
        One per Jacobian in the order of back-propagation; ``patterns[i].shape[1] == patterns[i - 1].shape[0]``.
    algorithm
        ``"linear"`` (back-propagation), ``"blelloch"`` (BPPSA Algorithm 1), ``"hybrid"`` (BPPSA §5.3), ``"chunked"``
        (reduce-then-scan) or ``"auto"``, a rule: on a host the linear scan; on a GPU, or with `workers`, the algorithm
        with the least parallel time, counted in FLOPs.
    workers
        Number of workers that run steps at the same time (the parallel machine of BPPSA §3.6, or a cluster). Given,
        even as 1, ``"auto"`` compares parallel times.
    up_levels
        Levels of the up-sweep of ``"hybrid"``: 0 is linear, many are Blelloch; by default the rule decides.
    memory_limit
        Bytes that a call may need in addition to its arguments; by default the memory of the machine.
    chunks
        Number of chunks of ``"chunked"``; by default as many as keep all workers busy.
    fold
        Fold diagonal, identity and selection elements into their neighbour, so that the algorithm runs over fewer
        elements; the gradient at every position still comes out. The linear scan multiplies no matrices and has
        nothing to fold.
    batch, dtype, shared
        The sizes for which FLOPs, bytes, memory and the choice are counted; `shared` says for each Jacobian whether the
        batch shares its values (by default none). Calls may differ.
    xp
        ``numpy`` or ``cupy``: where the scan will run.

    Raises
    ------
    PatternError, ShapeError
        There are no patterns, or they do not chain.
    OptionError
        `patterns` is not a sequence; an option is unknown, out of range, or does not belong to the algorithm.
    MemoryLimitError
        The algorithm, or one of its steps, needs more than `memory_limit`; the message names an algorithm that does
        not.

    Warns
    -----
    RuntimeWarning
        The products of the algorithm that was asked for take a hundred times the work of the linear scan or more.
        Fill-in is estimated first, so the warning comes before anything large is planned.
    """
    check_choice("scan algorithm", algorithm, SCAN_ALGORITHMS)
    check_scan_options("algorithm", algorithm, up_levels, chunks)
    up_levels = None if up_levels is None else check_integer("up_levels", up_levels, 0)
    chunks = None if chunks is None else check_integer("chunks", chunks, 1)
    chain, limit = check_plan(patterns, memory_limit, fold, batch, dtype, shared, xp, workers)
    decision = choose(algorithm, up_levels, chunks, workers is not None, chain, limit)
    return ScanPlan(decision, chain, memory_limit)


# A chain of transposed Jacobians reduced to one affine map: the first phase of reduce-then-scan alone.
#
# For a piece of a longer chain, whose incoming gradient g is not known yet: its outgoing gradient is ``A g + b``, where
# A is the product of the piece's Jacobians and b is the sum of its injections, carried to the end.


class Reduction:
    """The planned product of a chain. Made by `plan_reduction`; call it with values.

    Attributes
    ----------
    pattern : SparsityPattern
        Of the product A, (rows of the last Jacobian, columns of the first).
    flops : int
        For the whole batch, without injections.
    memory : int
        Bytes of the intermediate products and of the index arrays of their plans.
    """

    def __init__(
        self, patterns: Sequence[SparsityPattern], memory_limit: int | None, batch: int, dtype: Any,
        shared: Sequence[bool] | None, xp: ModuleType,
    ) -> None:  # fmt: skip
        self._chain, limit = check_plan(patterns, memory_limit, False, batch, dtype, shared, xp)
        n = len(self._chain.patterns)
        steps = tuple(combine(k - 1, "reduce", Span(1, k + 1), Span(k + 1, k + 2)) for k in range(1, n))
        recipe = Recipe("chunked", n, steps, {"reduce": n - 1})
        sized = size_recipe(recipe, self._chain, self._chain.product, limit)
        self._plans = sized.plans
        self.pattern: SparsityPattern = sized.patterns[Span(1, n + 1)]
        self.flops, self.memory = sized.flops, sized.workspace + sized.index

    def __call__(
        self, data: Sequence[Array], injections: Sequence[Array | None] | None, like: Array
    ) -> tuple[Array, Array | None]:
        """Return the values of A, and b.

        Parameters
        ----------
        data, injections
            As `ScanPlan` takes them, one entry per Jacobian; with a batch.
        like
            An array with the shape of g, (columns of A, B), and its dtype and device.

        Returns
        -------
        data
            (nnz,) if the batch shares all values of the piece, else (nnz, B); it may be one of `data`.
        vector
            (rows, B), or None if nothing is injected.

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            Values do not fit their patterns.
        """
        added = [None] * len(data) if injections is None else list(injections)
        matrix, vector = data[0], added[0]
        multiply = Multiply(like)
        for number, product in enumerate(self._plans, 1):
            pattern, right = self._chain.patterns[number], data[number]
            vector = added[number] if vector is None else multiply(pattern, right, vector, added[number])
            if not is_view(product):
                matrix = product(right, matrix)
            elif pattern.kind != "identity":
                matrix = right
        return matrix, vector


def plan_reduction(
    patterns: Sequence[SparsityPattern], memory_limit: int | None = None, *, batch: int = 1, dtype: Any = np.float32,
    shared: Sequence[bool] | None = None, xp: ModuleType = np,
) -> Reduction:  # fmt: skip
    """Plan the product of a chain, by fixed-pattern products starting with its first Jacobian.

    Arguments and errors are the same as in `plan_scan`.
    """
    return Reduction(patterns, memory_limit, batch, dtype, shared, xp)
