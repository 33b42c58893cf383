"""A recipe meets patterns: products, FLOPs, bytes and memory of every step, before any value exists.

The products are planned for real, or estimated (`sparsebp.scan.planning.fill_in`): the counting is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_dtype
from sparsebp.scan.planning.slots import assign_slots, is_view, shared_spans
from sparsebp.scan.planning.stack_plan import stack_program
from sparsebp.scan.running.product import Multiply, Pattern
from sparsebp.scan.steps import AbstractStep, Recipe, Span


@dataclass(frozen=True)
class Sizes:
    """What the plan-time numbers are counted for: batch, bytes of a value, and which Jacobians the batch shares."""

    batch: int
    itemsize: int
    shared: tuple[bool, ...]

    @classmethod
    def make(cls, batch: int, dtype: np.dtype, shared: Sequence[bool]) -> Sizes:
        """Collect the three."""
        return cls(batch, np.dtype(dtype).itemsize, tuple(bool(s) for s in shared))


class StepCount(NamedTuple):
    """What one step does, for the whole batch.

    Attributes
    ----------
    strategy
        The product plan's, or ``"matvec"``.
    flops, dense_flops
        Operations, and what they would be if no operand were sparse (an identity's included).
    bytes
        Moved at least: operands, result and index arrays, each once.
    width
        Values of an entry of the result: 1 where the batch shares it, else the batch.
    rows
        Of the result: what the step can be split into.
    """

    strategy: str
    flops: int
    dense_flops: int
    bytes: int
    width: int
    rows: int


@dataclass(frozen=True)
class SizedRecipe:
    """A recipe with its products, costs and memory.

    Attributes
    ----------
    plans
        One entry a step: the `ProductPlan` (or its estimate) of a matrix–matrix product, None for a matrix–vector one.
    patterns
        Pattern (or its estimate) of every matrix span.
    counts
        Of each step.
    workspace
        Bytes of the buffers that hold intermediate products.
    results
        Bytes of the n result vectors.
    index
        Bytes of the index arrays that the product plans keep.
    """

    recipe: Recipe
    plans: tuple[Any, ...]
    patterns: dict[Span, Any]
    counts: tuple[StepCount, ...]
    workspace: int
    results: int
    index: int

    @property
    def memory(self) -> int:
        """Bytes that a call needs beyond its arguments, index arrays of the plan included."""
        return self.workspace + self.results + self.index

    @property
    def flops(self) -> int:
        """Of all steps."""
        return sum(count.flops for count in self.counts)


def is_stack(patterns: Sequence[SparsityPattern]) -> bool:
    """Whether all patterns are the same square dense one, so that data can be one stacked array."""
    first = patterns[0]
    if first.kind != "dense" or first.shape[0] != first.shape[1]:
        return False
    return all(p is first or p == first for p in patterns)


def size_recipe(
    recipe: Recipe,
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    multiply: Multiply,
    *,
    memory_limit: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> SizedRecipe:
    """Plan, or estimate, every product of `recipe` and count.

    Parameters
    ----------
    multiply
        Makes the products.
    memory_limit
        Bytes; a step that alone takes more is refused before anything after it is planned.
    watch
        Called with the FLOPs of each step before its result is looked at; raises to give up.

    Raises
    ------
    MemoryLimitError
        The whole, or a step that is then named, needs more than `memory_limit`; nothing of the scan's size has been
        allocated.
    """
    batch, itemsize = sizes.batch, sizes.itemsize
    pattern: dict[Span, Pattern] = {Span(i + 1, i + 2): p for i, p in enumerate(patterns)}
    shared = shared_spans(sizes.shared, pattern)
    results = sum(p.shape[0] for p in patterns) * batch * itemsize
    plans: list[Any] = []
    counts: list[StepCount] = []
    used: dict[int, int] = {}
    index = 0
    for step in recipe.steps:
        right = pattern[step.right]
        rows, inner = right.shape
        width = 1 if shared[step.right] else batch
        if step.kind == "mv":
            plans.append(None)
            flops = 0 if right.kind == "identity" else 2 * right.nnz * batch
            if watch is not None:
                watch(flops)
            moved = _matvec_bytes(right, width, batch, itemsize)
            counts.append(StepCount("matvec", flops, 2 * rows * inner * batch, moved, batch, rows))
            continue
        left = pattern[step.left]
        both = max(width, 1 if shared[step.left] else batch)
        rest = None if memory_limit is None else max(memory_limit - results - index, 0)
        try:
            plan = multiply(right, left, rest)
        except MemoryLimitError as error:
            raise _step_refused(step, right, left, memory_limit, error.got) from error
        flops = plan.flops * both
        if watch is not None:
            watch(flops)
        pattern[step.target] = plan.pattern
        shared[step.target] = shared[step.left] and shared[step.right]
        plans.append(plan)
        index += 0 if id(plan) in used else plan.index_bytes
        used[id(plan)] = plan.index_bytes
        own = 0 if is_view(plan) else plan.pattern.nnz * both * itemsize
        if memory_limit is not None and (need := index + results + own) > memory_limit:
            raise _step_refused(step, right, left, memory_limit, f"{need} bytes for {plan.pattern.nnz} entries")
        operands = right.nnz * width + left.nnz * (1 if shared[step.left] else batch)
        moved = 0 if is_view(plan) else operands * itemsize + own + plan.index_bytes
        dense = 2 * rows * inner * left.shape[1] * both
        counts.append(StepCount(plan.strategy, flops, dense, moved, both, rows))
    _, capacities = assign_slots(recipe.steps, plans, pattern, sizes.shared, batch)
    workspace = sum(capacities)
    if is_stack(patterns):  # one stacked array may run on its own program, which keeps every level's products
        width = 1 if all(sizes.shared) else batch
        workspace = max(workspace, stack_program(recipe).values(patterns[0].shape[0], width, batch))
    sized = SizedRecipe(
        recipe=recipe,
        plans=tuple(plans),
        patterns=pattern,
        counts=tuple(counts),
        workspace=workspace * itemsize,
        results=results,
        index=index,
    )
    if memory_limit is not None and sized.memory > memory_limit:
        raise MemoryLimitError(
            f"The {recipe.algorithm} scan needs more memory than memory_limit",
            expected=f"at most {memory_limit} bytes",
            got=f"{sized.memory} bytes",
        )
    return sized


def _step_refused(
    step: AbstractStep, right: Pattern, left: Pattern, memory_limit: int | None, got: object
) -> MemoryLimitError:
    """Return the error for a product that alone is too much."""
    sizes = " times ".join(f"{p.shape[0]} x {p.shape[1]} with {p.nnz} entries" for p in (right, left))
    return MemoryLimitError(
        f"A step of the scan's {step.phase}, {step.target} = {step.right} · {step.left} ({sizes}), needs more memory "
        "than memory_limit",
        expected=f"at most {memory_limit} bytes",
        got=got,
    )


def _matvec_bytes(pattern: Pattern, width: int, batch: int, itemsize: int) -> int:
    """Count the bytes that ``y = J x`` moves: values, both vectors, and the index of a pattern that has one."""
    rows, columns = pattern.shape
    vectors = (rows + columns) * batch * itemsize
    if pattern.kind == "identity":
        return vectors
    index = (
        0 if pattern.kind == "dense" else (pattern.nnz + rows + 1) * index_dtype(pattern.nnz, pattern.shape).itemsize
    )
    return vectors + pattern.nnz * width * itemsize + index
