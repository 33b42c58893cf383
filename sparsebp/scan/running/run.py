"""Run a planned scan on values: dense blocks by `stacked`, others by `compiled` on the host, by steps on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from sparsebp import backend
from sparsebp.core.arguments import check_integer
from sparsebp.core.errors import MemoryLimitError, ShapeError
from sparsebp.core.types import Array
from sparsebp.scan.planning.candidates import Candidate
from sparsebp.scan.planning.choose import refusal
from sparsebp.scan.planning.planned import PlannedScan
from sparsebp.scan.planning.sizing import Sizes, assign_slots, shared_spans
from sparsebp.scan.running.arguments import Arguments, check_arguments
from sparsebp.scan.running.compiled import Program, make_program, run_program
from sparsebp.scan.running.multiply import Maps, Multiply
from sparsebp.scan.running.stacked import StackBuffers, run_stacked
from sparsebp.scan.steps import Span

_HOST = "numpy", "cpu", None
KEPT_WORKSPACES = 2
"""Workspaces that a plan keeps: enough for a batch size and its last, smaller batch."""


@dataclass
class Workspace:
    """Buffers of one call's shape, kept by the plan between calls.

    Attributes
    ----------
    key
        Array module, device, dtype, batch, sharing, stacked or not.
    products
        Array of every intermediate product that has one of its own; products that do not live together share memory.
    stack
        Buffers of the stacked run, else None.
    program
        What the host runs, made by its first call, else None.
    """

    key: tuple[Any, ...]
    products: dict[Span, Array]
    stack: StackBuffers | None = None
    program: Program | None = None


def execute(
    plan: PlannedScan,
    g: Array,
    data: Sequence[Array] | Array,
    injections: Sequence[Array | None] | Array | None,
) -> list[Array] | Array:
    """Run `plan`; see `ScanPlan.__call__`."""
    arguments = check_arguments(plan, g, data, injections)
    with workspace_of(plan, arguments) as workspace:
        if workspace.stack is not None:
            y: Any = run_stacked(plan, arguments, workspace.stack)
        elif arguments.xp is np and plan.compiles:
            if workspace.program is None:
                batch = arguments.g.shape[1]
                workspace.program = make_program(plan.sized, plan.patterns, arguments.shared, batch, workspace.products)
            y = run_program(plan, arguments, workspace.program, workspace.products)
        else:
            y = [v if arguments.batched else v.reshape(-1) for v in run_steps(plan, arguments, workspace)]
    if workspace.stack is not None:
        return y if arguments.batched else y.reshape(y.shape[:2])
    return arguments.xp.stack(y) if arguments.stacked else y


@contextmanager
def workspace_of(plan: PlannedScan, arguments: Arguments) -> Iterator[Workspace]:
    """Lend a workspace that fits the call, and keep it for the next one; after an error it is forgotten.

    What is captured has one of its own, in the graph's memory.
    """
    workspace = _take_workspace(plan, arguments)
    yield workspace
    if backend.is_recorded():
        return
    plan.workspaces.append(workspace)
    del plan.workspaces[:-KEPT_WORKSPACES]


def _take_workspace(plan: PlannedScan, arguments: Arguments) -> Workspace:
    """Take a fitting workspace out of the plan, or make one; while it is out, no other call can write to it."""
    xp, g = arguments.xp, arguments.g
    sized, batch, shared = plan.sized, g.shape[1], arguments.shared
    stack = sized.stack if arguments.stacked else None
    device = _HOST if xp is np else (xp.__name__, str(g.device), backend.order_of(xp))
    key = (*device, g.dtype, batch, shared, stack is not None)
    for kept in () if backend.is_recorded() else list(plan.workspaces):
        if kept.key == key:
            try:
                plan.workspaces.remove(kept)
            except ValueError:  # another thread was faster
                continue
            return kept
    if stack is not None:
        size, width = plan.patterns[0].shape[0], 1 if shared[0] else batch
        _check_limit(plan, g, stack.values(size, width, batch) * g.dtype.itemsize)
        return Workspace(key, {}, StackBuffers.make(stack, size, width, xp, g.dtype))
    is_shared = shared_spans(sized.recipe.steps, plan.patterns, [flag == 1 for flag in shared])
    slots, capacities = assign_slots(sized.recipe.steps, sized.plans, sized.patterns, is_shared, batch)
    _check_limit(plan, g, sum(capacities) * g.dtype.itemsize)
    memory = [xp.empty(c, dtype=g.dtype) for c in capacities]
    products = {}
    for span, slot in slots.items():
        nnz = sized.patterns[span].nnz
        shape = (nnz,) if is_shared[span] else (nnz, batch)
        products[span] = memory[slot][: prod(shape)].reshape(shape)
    return Workspace(key, products)


def _check_limit(plan: PlannedScan, g: Array, workspace: int) -> None:
    """Refuse a call whose batch takes the plan beyond its limit, before its buffers are allocated."""
    if plan.memory_limit is None:
        return
    results = sum(p.shape[0] for p in plan.patterns) * g.shape[1] * g.dtype.itemsize
    need = workspace + results + plan.sized.index
    if need > plan.memory_limit:
        recipe = plan.sized.recipe
        candidate = Candidate(recipe.algorithm, recipe.up_levels, plan.chunks)
        chain = replace(plan.chain, sizes=Sizes(g.shape[1], g.dtype, plan.chain.sizes.shared))
        problem = MemoryLimitError(
            f"The {recipe.algorithm} scan needs more memory than memory_limit for a batch of {g.shape[1]}",
            got=f"{need} bytes",
        )
        raise refusal(candidate, chain, plan.memory_limit, problem)


def run_steps(
    plan: PlannedScan, arguments: Arguments, workspace: Workspace, done: Callable[[], None] | None = None
) -> list[Array]:
    """Run every step by its own kernel call: products on their plans, vectors with batched SpMV.

    `done` is called after every step.
    """
    sized, g = plan.sized, arguments.g
    maps = Maps(arguments.arrays, arguments.injections, workspace.products, Multiply(g))
    vectors = {Span(0, 1): g}
    for step, product in zip(sized.recipe.steps, sized.plans, strict=True):
        pattern = sized.patterns[step.right]
        if product is None:
            values, add = maps.matrices[step.right], maps.offsets.get(step.right)
            vectors[step.target] = maps.multiply(pattern, values, vectors[step.left], add)
        else:
            maps.join(step, product, pattern)
        if done is not None:
            done()
    return [vectors[Span(0, i + 2)] for i in range(len(plan.patterns))]


def step_times(
    plan: PlannedScan, g: Array, data: Sequence[Array], injections: Sequence[Array | None] | None, repeats: int
) -> list[float]:
    """Return the least time of every step in `repeats` runs; see `ScanPlan.profile`."""
    repeats = check_integer("repeats", repeats, 1)
    arguments = check_arguments(plan, g, data, injections)
    if arguments.stacked:
        raise ShapeError(
            "Stacked data has no steps of its own: its levels run in one kernel call each",
            expected="a list with one array a Jacobian",
            got=f"an array of shape {arguments.data.shape}",
            remedy="Pass list(data)",
        )
    stamps: list[float] = []

    def stamp() -> None:
        backend.synchronize(arguments.xp)  # synchronize!
        stamps.append(time.perf_counter())

    least = [float("inf")] * len(plan.steps)
    with workspace_of(plan, arguments) as workspace:
        for run in range(repeats + 1):
            stamps.clear()
            stamp()
            run_steps(plan, arguments, workspace, stamp)
            if run:  # the first one compiles and warms up
                least = [min(pair) for pair in zip(least, map(float.__sub__, stamps[1:], stamps), strict=True)]
    return least
