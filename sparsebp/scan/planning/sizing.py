"""A recipe meets patterns: products, FLOPs, bytes and memory of every step, before any value exists.

The products are planned for real, or estimated (`sparsebp.scan.planning.fill_in`): the counting is the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from sparsebp.backend.machine import Machine
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.validate import index_bytes
from sparsebp.products import ProductPlan, plan_product
from sparsebp.scan.planning.fill_in import Multiply, Pattern, Product
from sparsebp.scan.planning.stack_plan import StackProgram, stack_program
from sparsebp.scan.steps import AbstractStep, Recipe, Span


@dataclass(frozen=True)
class Sizes:
    """What the plan-time numbers are counted for: batch, dtype of the values, and which Jacobians the batch shares."""

    batch: int
    dtype: np.dtype
    shared: tuple[bool, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of a value."""
        return self.dtype.itemsize


@dataclass(frozen=True)
class Chain:
    """The chain that a scan is planned for.

    Attributes
    ----------
    patterns
        One a Jacobian; equal ones are the same object.
    ends
        Ends of the folded pieces, see `sparsebp.scan.planning.fold.piece_ends`.
    sizes
        What the numbers are counted for.
    machine
        What the cost model looks at.
    products
        Products planned so far, those of equal blocks once.
    """

    patterns: tuple[SparsityPattern, ...]
    ends: tuple[int, ...]
    sizes: Sizes
    machine: Machine
    products: dict[tuple[Pattern, Pattern], ProductPlan] = field(default_factory=dict)

    @cached_property
    def is_stack(self) -> bool:
        """Whether all patterns are the same square dense one, so that data can be one stacked array."""
        first = self.patterns[0]
        square = first.kind == "dense" and first.shape[0] == first.shape[1]
        return square and all(p is first for p in self.patterns)

    def product(self, right: Any, left: Any, memory_limit: int | None) -> ProductPlan:
        """Return the plan of ``right · left``."""
        plan = self.products.get((right, left))
        if plan is None:
            plan = self.products[right, left] = plan_product(right, left, memory_limit=memory_limit)
        return plan


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
        Bytes of the index arrays that the product plans keep, and of the fours of rows by which one vector is run.
    stack
        The kernel calls for one stacked array of data, where all patterns are the same square dense one, else None.
    """

    recipe: Recipe
    plans: tuple[Any, ...]
    patterns: dict[Span, Any]
    counts: tuple[StepCount, ...]
    workspace: int
    results: int
    index: int
    stack: StackProgram | None

    @property
    def memory(self) -> int:
        """Bytes that a call needs beyond its arguments, index arrays of the plan included."""
        return self.workspace + self.results + self.index

    @property
    def flops(self) -> int:
        """Of all steps."""
        return sum(count.flops for count in self.counts)


def fours_bytes(pattern: Pattern) -> int:
    """Return the bytes of `SparsityPattern.fours`, 0 for kinds that need none."""
    return 0 if pattern.kind in ("identity", "diagonal", "dense") else 12 * 4 * -(-pattern.shape[0] // 4)


def size_recipe(
    recipe: Recipe,
    chain: Chain,
    multiply: Multiply,
    memory_limit: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> SizedRecipe:
    """Plan, or estimate, every product of `recipe` and count.

    Parameters
    ----------
    multiply
        Makes the products: `Chain.product`, or a `FillIn`.
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
    patterns, sizes, batch, itemsize = chain.patterns, chain.sizes, chain.sizes.batch, chain.sizes.itemsize
    pattern: dict[Span, Pattern] = {Span(i + 1, i + 2): p for i, p in enumerate(patterns)}
    shared = shared_spans(recipe.steps, patterns, sizes.shared)
    results = sum(p.shape[0] for p in patterns) * batch * itemsize
    plans: list[Any] = []
    counts: list[StepCount] = []
    known: set[int] = set()
    index = 0
    for step in recipe.steps:
        right = pattern[step.right]
        rows, inner = right.shape
        width = 1 if shared[step.right] else batch
        if step.kind == "mv":
            plans.append(None)
            if not chain.machine.is_device:  # a call with one vector makes them, and the patterns keep them
                index += 0 if id(right) in known else fours_bytes(right)
                known.add(id(right))
            flops = 0 if right.kind == "identity" else 2 * right.nnz * batch
            if watch is not None:
                watch(flops)
            moved = _matvec_bytes(right, width, batch, itemsize)
            counts.append(StepCount("matvec", flops, 2 * rows * inner * batch, moved, batch, rows))
            continue
        left = pattern[step.left]
        left_width = 1 if shared[step.left] else batch
        both = max(width, left_width)
        rest = None if memory_limit is None else max(memory_limit - results - index, 0)
        try:
            plan = multiply(right, left, rest)
        except MemoryLimitError as error:
            raise _step_refused(step, right, left, memory_limit, error.got) from error
        flops = plan.flops * both
        if watch is not None:
            watch(flops)
        pattern[step.target] = plan.pattern
        plans.append(plan)
        index += 0 if id(plan) in known else plan.index_bytes
        known.add(id(plan))
        own = 0 if is_view(plan) else plan.pattern.nnz * both * itemsize
        if memory_limit is not None and (need := index + results + own) > memory_limit:
            raise _step_refused(step, right, left, memory_limit, f"{need} bytes for {plan.pattern.nnz} entries")
        operands = right.nnz * width + left.nnz * left_width
        moved = 0 if is_view(plan) else operands * itemsize + own + plan.index_bytes
        dense = 2 * rows * inner * left.shape[1] * both
        counts.append(StepCount(plan.strategy, flops, dense, moved, both, rows))
    _, capacities = assign_slots(recipe.steps, plans, pattern, shared, batch)
    workspace, stack = sum(capacities), None
    if chain.is_stack:  # one stacked array may run on its own program, which keeps every level's products
        stack = stack_program(recipe)
        workspace = max(workspace, stack.values(patterns[0].shape[0], 1 if all(sizes.shared) else batch, batch))
    sized = SizedRecipe(recipe, tuple(plans), pattern, tuple(counts), workspace * itemsize, results, index, stack)
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
    vectors = sum(pattern.shape) * batch * itemsize
    if pattern.kind == "identity":
        return vectors
    index = 0 if pattern.kind == "dense" else index_bytes(pattern.nnz, pattern.shape)
    return vectors + pattern.nnz * width * itemsize + index


# ---- buffers of intermediate products ------------------------------------------------------------------------------


@dataclass
class Slots:
    """Buffers of a workspace, handed out so that products which do not live at the same time share memory."""

    capacities: list[int] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, values: int) -> int:
        """Return the number of a free buffer for `values` values: the smallest that fits, else the largest grown."""
        where = bisect_left(self.free, (values, -1))
        if where == len(self.free):
            where -= 1
        if where < 0:
            self.capacities.append(values)
            return len(self.capacities) - 1
        slot = self.free.pop(where)[1]
        self.capacities[slot] = max(self.capacities[slot], values)
        return slot

    def give(self, slot: int) -> None:
        """Take a buffer back."""
        insort(self.free, (self.capacities[slot], slot))


def shared_spans(
    steps: Sequence[AbstractStep], patterns: Sequence[SparsityPattern], shared: Sequence[bool]
) -> dict[Span, bool]:
    """Say of every matrix whether the batch shares its values; an identity's are always shared: nobody reads them."""
    inputs = enumerate(zip(patterns, shared, strict=True))
    found = {Span(i + 1, i + 2): s or p.kind == "identity" for i, (p, s) in inputs}
    for step in steps:
        if step.kind == "mm":
            found[step.target] = found[step.left] and found[step.right]
    return found


def is_view(plan: Product | None) -> bool:
    """Whether the product has an identity operand, so that the other operand's values are the result as they stand."""
    return plan is not None and plan.strategy == "identity"


def assign_slots(
    steps: Sequence[AbstractStep],
    plans: Sequence[Product | None],
    patterns: Mapping[Span, Pattern],
    shared: Mapping[Span, bool],
    batch: int,
) -> tuple[dict[Span, int], list[int]]:
    """Give every intermediate product a buffer that is free while the product lives.

    Returns
    -------
    slots : dict of Span to int
        Buffer of each product that needs one.
    capacities : list of int
        Values (not bytes) that each buffer holds.
    """
    root: dict[Span, Span] = {}  # spans that are another span's values under a new name, through an identity
    for step, plan in zip(steps, plans, strict=True):
        if is_view(plan):
            source = step.left if patterns[step.right].kind == "identity" else step.right
            root[step.target] = root.get(source, source)
    last_use: dict[Span, int] = {}
    for number, step in enumerate(steps):
        for span in (step.left, step.right):
            last_use[root.get(span, span)] = number
    slots: dict[Span, int] = {}
    pool = Slots()
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if plan is not None:
            target = step.target
            if not is_view(plan):
                slots[target] = pool.take(plan.pattern.nnz * (1 if shared[target] else batch))
        for span in (step.left, step.right):
            owner = root.get(span, span)
            if owner in slots and last_use[owner] == number:
                pool.give(slots[owner])
    return slots, pool.capacities
