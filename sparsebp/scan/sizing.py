"""A recipe meets patterns: symbolic products, FLOPs, bytes and memory of every step, before any value exists."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sparsebp.errors import MemoryLimitError
from sparsebp.patterns import ProductPlan, SparsityPattern, plan_product
from sparsebp.scan.stack_plan import stack_program
from sparsebp.scan.steps import AbstractStep, Recipe, ScanStep, Span, critical_path

Products = dict[tuple[SparsityPattern, SparsityPattern], ProductPlan]
"""Product plans by (pattern of the right span, pattern of the left span): equal blocks are planned once."""


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


@dataclass(frozen=True)
class SizedRecipe:
    """A recipe with its product plans, costs and memory.

    Attributes
    ----------
    plans
        One entry a step: the `ProductPlan` of a matrix–matrix product, None for a matrix–vector product.
    patterns
        Pattern of every matrix span.
    flops, bytes
        Of each step, for the whole batch.
    workspace
        Bytes of the buffers that hold intermediate products.
    results
        Bytes of the n result vectors.
    index
        Bytes of the index arrays that the product plans keep.
    """

    recipe: Recipe
    plans: tuple[ProductPlan | None, ...]
    patterns: dict[Span, SparsityPattern]
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    workspace: int
    results: int
    index: int

    @property
    def memory(self) -> int:
        """Bytes that a call needs beyond its arguments, index arrays of the plan included."""
        return self.workspace + self.results + self.index

    def scan_steps(self) -> tuple[ScanStep, ...]:
        """Return the steps with costs, those on the critical path marked."""
        path = set(critical_path(self.recipe.steps, self.flops))
        return tuple(
            ScanStep(s.level, s.phase, s.left, s.right, s.target, s.kind, flops, moved, number in path)
            for number, (s, flops, moved) in enumerate(zip(self.recipe.steps, self.flops, self.bytes, strict=True))
        )


def product_flops(right: SparsityPattern, left: SparsityPattern) -> int:
    """Count the FLOPs a sample of ``right @ left`` without planning it (identity operands cost nothing)."""
    if "identity" in (right.kind, left.kind):
        return 0
    if right.kind == left.kind == "dense":
        return 2 * right.shape[0] * right.shape[1] * left.shape[1]
    uses = np.bincount(np.asarray(right.indices), minlength=right.shape[1]).astype(np.int64)
    return 2 * int(uses @ np.diff(np.asarray(left.indptr)).astype(np.int64))


def matvec_flops(pattern: SparsityPattern) -> int:
    """Count the FLOPs a sample of one matrix–vector product."""
    return 0 if pattern.kind == "identity" else 2 * pattern.nnz


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


def is_stack(patterns: Sequence[SparsityPattern]) -> bool:
    """Whether all patterns are the same square dense one, so that data can be one stacked array."""
    first = patterns[0]
    if first.kind != "dense" or first.shape[0] != first.shape[1]:
        return False
    return all(p is first or p == first for p in patterns)


def shared_spans(shared: Sequence[bool], patterns: dict[Span, SparsityPattern]) -> dict[Span, bool]:
    """Say of each input whether the batch shares its values; an identity's are always shared: nobody reads them."""
    spans = (Span(i + 1, i + 2) for i in range(len(shared)))
    return {span: s or patterns[span].kind == "identity" for span, s in zip(spans, shared, strict=True)}


def is_view(plan: ProductPlan | None) -> bool:
    """Whether the product has an identity operand, so that the other operand's values are the result as they stand."""
    return plan is not None and plan.strategy == "identity"


def assign_slots(
    steps: Sequence[AbstractStep],
    plans: Sequence[ProductPlan | None],
    patterns: dict[Span, SparsityPattern],
    shared: Sequence[bool],
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
    is_shared = shared_spans(shared, patterns)
    slots: dict[Span, int] = {}
    pool = Slots()
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if plan is not None:
            target = step.target
            is_shared[target] = is_shared[step.left] and is_shared[step.right]
            if not is_view(plan):
                slots[target] = pool.take(plan.pattern.nnz * (1 if is_shared[target] else batch))
        for span in (step.left, step.right):
            owner = root.get(span, span)
            if owner in slots and last_use[owner] == number:
                pool.give(slots[owner])
    return slots, pool.capacities


def size_recipe(
    recipe: Recipe,
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    products: Products,
    *,
    memory_limit: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> SizedRecipe:
    """Plan every product of `recipe` and count.

    Parameters
    ----------
    products
        Plans made so far; new ones are added.
    memory_limit
        Bytes; passed on so that one product alone is refused before it is planned.
    watch
        Called with the FLOPs counted so far, the coming product's with them, before a product is planned; raises to
        give up.

    Raises
    ------
    MemoryLimitError
        The whole needs more than `memory_limit`; nothing of the scan's size has been allocated.
    """
    batch, itemsize = sizes.batch, sizes.itemsize
    pattern = {Span(i + 1, i + 2): p for i, p in enumerate(patterns)}
    shared = shared_spans(sizes.shared, pattern)
    plans: list[ProductPlan | None] = []
    flops: list[int] = []
    moved: list[int] = []
    used: dict[int, int] = {}
    total = 0
    for step in recipe.steps:
        right = pattern[step.right]
        width = 1 if shared[step.right] else batch
        if step.kind == "mv":
            plans.append(None)
            flops.append(matvec_flops(right) * batch)
            moved.append(_matvec_bytes(right, width, batch, itemsize))
        else:
            left = pattern[step.left]
            left_width = 1 if shared[step.left] else batch
            plan = products.get((right, left))
            if plan is None:
                count = product_flops(right, left) * max(width, left_width)
                if watch is not None:
                    watch(total + count)
                plan = products[right, left] = plan_product(right, left, memory_limit=memory_limit)
            pattern[step.target] = plan.pattern
            shared[step.target] = shared[step.left] and shared[step.right]
            both = max(width, left_width)
            plans.append(plan)
            flops.append(plan.flops * both)
            used[id(plan)] = plan.index_bytes
            values = right.nnz * width + left.nnz * left_width + plan.pattern.nnz * both
            moved.append(0 if is_view(plan) else values * itemsize + plan.index_bytes)
        total += flops[-1]
    _, capacities = assign_slots(recipe.steps, plans, pattern, sizes.shared, batch)
    workspace = sum(capacities)
    if is_stack(patterns):  # one stacked array may run on its own program, which keeps every level's products
        width = 1 if all(sizes.shared) else batch
        workspace = max(workspace, stack_program(recipe).values(patterns[0].shape[0], width, batch))
    sized = SizedRecipe(
        recipe=recipe,
        plans=tuple(plans),
        patterns=pattern,
        flops=tuple(flops),
        bytes=tuple(moved),
        workspace=workspace * itemsize,
        results=sum(p.shape[0] for p in patterns) * batch * itemsize,
        index=sum(used.values()),
    )
    if memory_limit is not None and sized.memory > memory_limit:
        raise MemoryLimitError(
            f"The {recipe.algorithm} scan needs more memory than memory_limit",
            expected=f"at most {memory_limit} bytes",
            got=f"{sized.memory} bytes",
        )
    return sized


def _matvec_bytes(pattern: SparsityPattern, width: int, batch: int, itemsize: int) -> int:
    """Count the bytes that ``y = J x`` moves: values, both vectors, and the index of a pattern that has one."""
    rows, columns = pattern.shape
    vectors = (rows + columns) * batch * itemsize
    if pattern.kind == "identity":
        return vectors
    index = 0 if pattern.kind == "dense" else pattern.nnz * pattern.indices.itemsize + pattern.indptr.nbytes
    return vectors + pattern.nnz * width * itemsize + index
