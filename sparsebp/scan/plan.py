"""`plan_scan`: choose an algorithm, do all symbolic work, and know every cost before a value exists."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import (
    SCAN_ALGORITHMS,
    Array,
    ScanAlgorithm,
    check_choice,
    check_flag,
    check_integer,
    check_sequence,
)
from sparsebp.core.errors import OptionError, PatternError, ShapeError
from sparsebp.core.machine import machine
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.algorithms import piece_ends
from sparsebp.scan.cost import Candidate, Chain, Sizes, choose, estimate, options_for
from sparsebp.scan.report import Operator, describe, plot
from sparsebp.scan.run import PlannedScan, execute, step_times

# Checks of what a scan is planned with: of the arguments of `plan_scan` become a chain and what may run over it.


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


class ScanPlan(PlannedScan):
    """A planned scan over a chain of transposed Jacobians. Made by `plan_scan`; call it with values.

    The buffers for intermediate products are kept after a call and used again by the next one with the same batch,
    dtype, device and sharing; the result vectors are new at every call, on the host as parts of one allocation where
    they are small (4 MiB together): keep a copy of one to let the others go. Calls from several threads are safe: a
    second call that runs at the same time gets buffers of its own.

    Attributes
    ----------
    patterns : tuple of SparsityPattern
        One a Jacobian, in the order of back-propagation: J_1 belongs to the last operator.
    algorithm : str
        The one that runs; ``"auto"`` is resolved.
    up_levels, chunks : int or None
        Its parameter: levels of the up-sweep (hybrid), number of chunks (chunked).
    levels : dict of str to int
        Number of levels by phase, as BPPSA Algorithm 1 counts them.
    flops : int
        For the whole batch, injections not counted.
    injection_flops : int
        What injections at every step would add.
    memory : int
        Bytes that a call needs beyond its arguments: intermediate products, results, index arrays of the plan.
    batch, dtype
        What FLOPs, bytes and memory are stated for. A call may have another batch and dtype.
    reason : str
        Why this algorithm runs.
    estimates : dict of str to float
        Seconds that the cost model expects of the algorithms it compared; empty if none was.
    """

    def describe(self, max_rows: int = 40) -> str:
        """Return a text: the choice and its reason, totals, and a table of the steps (the first `max_rows`).

        Raises
        ------
        OptionError
            `max_rows` is no integer, or negative.
        """
        return describe(self, check_integer("max_rows", max_rows, 0))

    def plot(
        self,
        ax: Any = None,
        *,
        kind: Literal["tree", "flops"] = "tree",
        operators: Sequence[Operator] = (),
        measured: Sequence[float] | None = None,
    ) -> Any:
        """Draw the scan on a matplotlib Axes, and return that.

        Parameters
        ----------
        ax
            Axes to draw on; a new figure's if None.
        kind
            ``"tree"``: the array and its levels, as BPPSA Fig. 3. ``"flops"``: the FLOPs of every step over its dense
            complexity, as BPPSA Fig. 10.
        operators
            For ``"flops"``: back-propagation's own operators to show beside, each (name, FLOPs) or (name, FLOPs, dense
            FLOPs), or with `measured` (name, seconds[, dense FLOPs]).
        measured
            For ``"flops"``: seconds of every step, as `profile` returns them, drawn in place of the FLOPs.

        Raises
        ------
        OptionError
            `kind` is unknown, or an argument belongs to the other kind.
        ShapeError
            `measured` has another length than `steps`.
        MissingDependencyError
            matplotlib is not installed.
        """
        return plot(self, ax, kind, operators, measured)

    def profile(
        self, g: Array, data: Sequence[Array], injections: Sequence[Array | None] | None = None, *, repeats: int = 5
    ) -> list[float]:
        """Measure every step by itself.

        Parameters
        ----------
        g, data, injections
            As in a call, with one array a Jacobian.
        repeats
            Runs, after one that is not counted; each step's time is its least.

        Returns
        -------
        list of float
            Seconds of each of `steps`, on a GPU with a synchronisation after each.

        Raises
        ------
        OptionError
            `repeats` is less than 1.
        ShapeError, DTypeError, LayoutError, DeviceError, MemoryLimitError
            As in a call; ShapeError too if `data` is one stacked array, whose levels run in one kernel call.
        """
        return step_times(self, g, data, injections, repeats)

    def __repr__(self) -> str:
        return f"ScanPlan({len(self.patterns)} Jacobians, {self.algorithm}, {self.flops} FLOP, {self.memory} bytes)"

    def __call__(
        self, g: Array, data: Sequence[Array] | Array, injections: Sequence[Array | None] | Array | None = None
    ) -> list[Array] | Array:
        """Run the scan: ``y[i] = J_i @ y[i-1] (+ injections[i])`` with ``y[-1] = g``.

        Parameters
        ----------
        g
            (n_out, B), or (n_out,) without a batch, where n_out is the number of columns of J_0.
        data
            One array a Jacobian, ``(nnz,)`` where the batch shares it or ``(nnz, B)``. Where all patterns are the same
            square one, also one stacked array ``(n, nnz, B)``, or ``(n, nnz)`` shared.
        injections
            None, or one entry a Jacobian: None or an array of y[i]'s shape, e.g. the gradient that arrives from a loss
            at that step. With stacked data also one stacked array.

        Returns
        -------
        list of arrays, or one array
            y[i] of shape (rows of J_i, B); without a batch (rows of J_i,). With stacked data one array (n, rows, B).

        Raises
        ------
        ShapeError, DTypeError, LayoutError, DeviceError
            An argument does not fit the plan or the others.
        MemoryLimitError
            The batch of this call takes the plan beyond its ``memory_limit``; raised before anything is allocated.
        """
        return execute(self, g, data, injections)


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
        One a Jacobian in the order of back-propagation; ``patterns[i].shape[1] == patterns[i - 1].shape[0]``.
    algorithm
        ``"linear"`` (back-propagation), ``"blelloch"`` (BPPSA Algorithm 1), ``"hybrid"`` (BPPSA §5.3), ``"chunked"``
        (reduce-then-scan) or ``"auto"`` (the cost model decides and says why).
    workers
        Of the cost model. By default what the machine has, where one thread starts one step after the other; a number
        stands for so many workers that each start steps by themselves (the parallel machine of BPPSA §3.6, or a
        cluster).
    up_levels
        Levels of the up-sweep of ``"hybrid"``: 0 is linear, many are Blelloch; by default the cost model decides.
    memory_limit
        Bytes that a call may need beyond its arguments; by default the plan is made if the machine has them at all.
    chunks
        How many of ``"chunked"``; by default as many as keep all workers busy.
    fold
        Fold diagonal, identity and selection elements into their neighbour, so that the algorithm runs over fewer
        elements; the gradient at every position comes out all the same. The linear scan multiplies nothing and has
        nothing to fold.
    batch, dtype, shared
        What FLOPs, bytes, memory and the choice are based on; `shared` says of each Jacobian whether the batch shares
        its values (by default none). Calls may differ.
    xp
        ``numpy`` or ``cupy``: the machine that the cost model looks at.

    Raises
    ------
    PatternError, ShapeError
        There are no patterns, or they do not chain.
    OptionError
        `patterns` is no sequence; an option is unknown, out of range, or does not belong to the algorithm.
    MemoryLimitError
        The algorithm, or one of its steps, needs more than `memory_limit`; the message names an algorithm that does
        not. Fill-in is estimated first, so that a hopeless product is not even planned.

    Warns
    -----
    RuntimeWarning
        The algorithm was asked for, and by the estimate its products take a hundred times the work of the linear scan
        or more: before they are planned. `ScanPlan.reason` says what fill-in costs in any case.
    """
    chain, options, limit = check_plan(
        patterns, algorithm, workers, up_levels, chunks, memory_limit, fold, batch, dtype, shared, xp
    )
    return ScanPlan(choose(options, chain, limit), chain, memory_limit)


def estimate_scans(
    patterns: Sequence[SparsityPattern], workers: int | None = None, memory_limit: int | None = None, *, batch: int = 1,
    dtype: Any = np.float32, shared: Sequence[bool] | None = None, xp: ModuleType = np,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds that ``plan_scan(algorithm="auto")`` would compare, by algorithm, without planning a product.

    The arguments, and the errors that they raise, are those of `plan_scan`. Algorithms that clearly exceed the memory
    limit are left out, as are those whose FLOPs alone take longer than the best; there may be none left.
    """
    checked = check_plan(patterns, "auto", workers, None, None, memory_limit, True, batch, dtype, shared, xp)
    chain, options, limit = checked
    return {str(option): seconds for option, seconds in estimate(options, chain, limit)[0].items()}
