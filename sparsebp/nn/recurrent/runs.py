"""Running one direction of one recurrent layer backward through time, by any of the algorithms, and which one.

``bp`` (plain back-propagation, the recursion) and ``chunked`` are fused kernels that store no Jacobian. The other scans
materialise every step's transposed Jacobian and run the general scan over them (BPPSA §3.1 and Algorithm 1); the
gradients at the gates then follow from the gradient at every state without a recurrence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, cast

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import BACKWARDS, Array, Backward, ScanAlgorithm, check_choice, check_integer
from sparsebp.core.errors import MemoryLimitError
from sparsebp.nn.recurrent.cells import CellMath
from sparsebp.nn.recurrent.saved import GivenState, RunGradients, Tape, Weights, split
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.rules import HOST_CHOICE, Choice, choose_recurrent_backward

FUSED = ("bp", "chunked")
"""Algorithms of fused kernels, which store no Jacobian."""


@dataclass(frozen=True)
class BackwardOptions:
    """The backward algorithm and its options; None lets the algorithm choose."""

    algorithm: Backward = "auto"
    up_levels: int | None = None
    chunks: int | None = None
    workers: int | None = None
    memory_limit: int | None = None

    def __post_init__(self) -> None:
        check_choice("backward algorithm", self.algorithm, BACKWARDS)
        least = {"chunks": 1, "workers": 1, "up_levels": 0, "memory_limit": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_integer(name, value, low))


def run_backward(
    options: BackwardOptions, choice: Any, cell: CellMath, tape: Tape, weights: Weights, gy: Array | None,
    last: GivenState,
) -> RunGradients:  # fmt: skip
    """Return the gradients of one run from gy (T, B, H) and `last` (B, H), C-contiguous; one is not None."""
    return cell.with_projection(tape, weights, gy, last, partial(_through_recursion, options, choice))


def _through_recursion(
    options: BackwardOptions, choice: Any, cell: CellMath, tape: Tape, w_hh: Array, gy: Array | None, last: GivenState
) -> RunGradients:
    if choice.algorithm in FUSED:
        return cell.backward(tape, w_hh, gy, last, choice.chunks)
    xp = backend.namespace(tape.h)
    steps, batch, hidden = tape.h.shape
    pattern = cell.pattern(hidden)
    plan = _plan_within(options, choice.algorithm, pattern, tape.h.shape, tape.h.dtype, xp)
    data = cell.jacobians(tape, w_hh, reverse=True)  # the scan's first element is the last step's
    seed = xp.zeros((pattern.shape[0], batch), dtype=tape.h.dtype)
    injections = None
    if gy is not None:
        seed[:hidden] += gy[-1].T
        injections = xp.zeros((steps, pattern.shape[0], batch), dtype=tape.h.dtype)
        injections[:-1, :hidden] = gy[-2::-1].transpose(0, 2, 1) if steps > 1 else 0
    for number, arriving in enumerate(last):
        if arriving is not None:
            seed[number * hidden : (number + 1) * hidden] += arriving.T
    y = plan(seed, data, injections=injections)
    at_states = xp.empty((steps, batch, pattern.shape[0]), dtype=tape.h.dtype)
    at_states[-1] = seed.T
    for t in range(1, steps):
        at_states[steps - 1 - t] = y[t - 1].T
    grads = cell.empty_gradients(tape)
    for initial, found in zip(grads.initial, split(y[steps - 1].T, len(last)), strict=True):
        initial[...] = found
    cell.gate_gradients(tape, split(at_states, len(last)), grads.ga)
    return grads


def _plan_within(
    options: BackwardOptions, algorithm: ScanAlgorithm, pattern: SparsityPattern, shape: tuple[int, int, int],
    dtype: np.dtype, xp: ModuleType,
) -> Any:  # fmt: skip
    """Return the scan's plan if it and the Jacobians fit into the memory limit; refuse before anything is allocated."""
    steps, batch, hidden = shape
    stored = steps * pattern.nnz * batch * dtype.itemsize
    limit = options.memory_limit
    rest = None if limit is None else max(limit - stored, 0)
    up_levels = options.up_levels if algorithm == "hybrid" else None
    try:
        return _scan_plan(pattern, steps, algorithm, up_levels, options.workers, rest, batch, dtype, xp)
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"backward={algorithm!r} would need too much memory for T = {steps}, B = {batch}, H = {hidden}",
            expected=f"at most {limit} bytes (memory_limit)",
            got=f"{stored} bytes of Jacobians, and the scan's own",
            remedy="Use backward='bp' or 'chunked', which store no Jacobian, or raise memory_limit",
        ) from error


@lru_cache(maxsize=4)  # a plan keeps its buffers: cache only a few
def _scan_plan(
    pattern: SparsityPattern, steps: int, algorithm: ScanAlgorithm, up_levels: int | None, workers: int | None,
    memory_limit: int | None, batch: int, dtype: np.dtype, xp: ModuleType,
) -> Any:  # fmt: skip
    from sparsebp.scan import plan_scan

    return plan_scan(
        [pattern] * steps, algorithm=algorithm, up_levels=up_levels, workers=workers,
        memory_limit=memory_limit, batch=batch, dtype=dtype, xp=xp,
    )  # fmt: skip


def choose(
    options: BackwardOptions, cell: CellMath, shape: tuple[int, int, int], dtype: np.dtype, xp: ModuleType,
    **stack: int,
) -> Any:  # fmt: skip
    """Return the `scan.Choice` for states of `shape` (T, B, H); ``auto`` is a rule."""
    # `stack` are `input_size`, `layers` and `directions`.
    if options.algorithm == "auto":
        if cell.diagonal:
            return Choice("bp", 1, "A step's Jacobian is diagonal: one linear recurrence goes back, at the speed of "
                          "memory.", {})  # fmt: skip
        if options.workers is None and backend.is_host(xp):
            return HOST_CHOICE
        return choose_recurrent_backward(
            cast(Any, cell.name), *shape, dtype, xp, options.workers, options.memory_limit, **stack
        )
    steps = shape[0]
    # The square root balances the sequential part inside the chunks with the one over the chunks.
    chunks = min(options.chunks or math.isqrt(steps), steps) if options.algorithm == "chunked" else 1
    return Choice(options.algorithm, chunks, f"backward={options.algorithm!r} was asked for", {})
