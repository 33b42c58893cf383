"""The costs of a scan before any value exists: its products, FLOPs, bytes and memory, counted step by step.

Products are planned for real, or estimated (`sparsebp.scan.fill_in`); the counting is the same.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.core.machine import Machine
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.pattern import index_bytes
from sparsebp.products import ProductPlan, plan_product
from sparsebp.scan.algorithms import AbstractStep, Recipe, Span, StackProgram, stack_program
from sparsebp.scan.fill_in import FillIn


class TooMuch(Exception):
    """A recipe has so many FLOPs that counting them stopped."""


Multiply: TypeAlias = Callable[[Any, Any, int | None], Any]
"""``multiply(right, left, memory_limit)``: the plan of ``right · left``, or an estimate; may raise MemoryLimitError."""


@dataclass(frozen=True)
class Chain:
    """The chain that a scan is planned for, and the products planned so far."""

    patterns: tuple[SparsityPattern, ...]  # one per Jacobian; equal patterns are the same object
    ends: tuple[int, ...]  # of the folded pieces, see `sparsebp.scan.algorithms.piece_ends`
    batch: int  # the sizes that are counted for: batch, dtype, and whether the batch shares each Jacobian's values
    dtype: np.dtype
    shared: tuple[bool, ...]
    machine: Machine
    products: dict[tuple[SparsityPattern, SparsityPattern], ProductPlan] = field(default_factory=dict)

    @cached_property
    def is_stack(self) -> bool:
        """Whether all patterns are the same square dense one, so that data can be one stacked array."""
        first = self.patterns[0]
        square = first.kind == "dense" and first.shape[0] == first.shape[1]
        return square and len({*map(id, self.patterns)}) == 1

    @cached_property
    def fill_in(self) -> FillIn:
        """Estimates of the chain's products."""
        return FillIn()

    def product(self, right: Any, left: Any, memory_limit: int | None) -> ProductPlan:
        """Return the plan of ``right · left``."""
        plan = self.products.get((right, left))
        if plan is None:
            plan = self.products[right, left] = plan_product(right, left, memory_limit=memory_limit)
        return plan


class StepCount(NamedTuple):
    """The work of one step, for the whole batch."""

    flops: int
    dense_flops: int  # if no operand were sparse (an identity included)
    bytes: int  # moved at least: operands, result and index arrays, each once
    width: int  # values per entry of the result: 1 where the batch shares it, else the batch
    rows: int  # of the result


@dataclass(frozen=True)
class SizedRecipe:
    """A recipe with its products, costs and memory.

    `index` counts the index arrays that the product plans keep, and the row groups (`SparsityPattern.fours`) by which a
    single vector is run. `stack` has the kernel calls for one stacked array of data, None unless all patterns are the
    same square dense one.
    """

    recipe: Recipe
    plans: tuple[Any, ...]  # per step: the `ProductPlan`, or its estimate; None for a matrix–vector product
    patterns: dict[Span, Any]  # pattern, or its estimate, of every matrix span
    counts: tuple[StepCount, ...]  # per step
    workspace: int  # bytes of the buffers for intermediate products
    results: int  # bytes of the n result vectors
    index: int
    flops: int  # of all steps
    stack: StackProgram | None

    @property
    def memory(self) -> int:
        """Bytes that a call needs in addition to its arguments, index arrays of the plan included."""
        return self.workspace + self.results + self.index


def size_recipe(
    recipe: Recipe, chain: Chain, multiply: Multiply, memory_limit: int | None = None, most_flops: float = float("inf")
) -> SizedRecipe:
    """Plan, or estimate, every product of `recipe` and count.

    Raises
    ------
    MemoryLimitError
        The scan, or a step that is then named, needs more than `memory_limit` bytes. Raised before later steps are
        planned, and before anything of the scan's size is allocated.
    TooMuch
        There are more than `most_flops`.
    """
    patterns, batch, itemsize = chain.patterns, chain.batch, chain.dtype.itemsize
    pattern: dict[Span, Any] = {Span(i + 1, i + 2): p for i, p in enumerate(patterns)}
    shared = shared_spans(recipe.steps, patterns, chain.shared)
    results = sum([p.shape[0] for p in patterns]) * batch * itemsize
    plans: list[Any] = []
    counts: list[StepCount] = []
    known: dict[Any, tuple[Any, StepCount]] = {}  # equal products are counted once
    indexed: set[int] = set()  # plans and patterns whose index arrays are counted
    index = flops = 0
    for step in recipe.steps:
        right = pattern[step.right]
        width = 1 if shared[step.right] else batch
        if step.kind == "mv":
            key: Any = id(right), width
            if key not in known:
                known[key] = None, _count_matvec(right, width, batch, itemsize)
                if not chain.machine.is_device and id(right) not in indexed and right.kind in ("general", "selection"):
                    indexed.add(id(right))
                    index += 12 * 4 * -(-right.shape[0] // 4)  # `SparsityPattern.fours`
        else:
            left = pattern[step.left]
            both = width if shared[step.left] else batch
            key = id(right), id(left), width, shared[step.left]
            if key not in known:
                rest = None if memory_limit is None else max(memory_limit - results - index, 0)
                try:
                    plan = multiply(right, left, rest)
                except MemoryLimitError as error:
                    raise _step_refused(step, right, left, memory_limit, error.got) from error
                if flops + plan.flops * both > most_flops:
                    raise TooMuch
                if id(plan) not in indexed:
                    indexed.add(id(plan))
                    index += plan.index_bytes
                own = moved = 0
                if plan.strategy != "identity":
                    own = plan.pattern.nnz * both * itemsize
                    operands = right.nnz * width + left.nnz * (1 if shared[step.left] else batch)
                    moved = operands * itemsize + own + plan.index_bytes
                if memory_limit is not None and (need := index + results + own) > memory_limit:
                    got = f"{need} bytes for {plan.pattern.nnz} entries"
                    raise _step_refused(step, right, left, memory_limit, got)
                dense = 2 * right.shape[0] * right.shape[1] * left.shape[1] * both
                known[key] = plan, StepCount(plan.flops * both, dense, moved, both, right.shape[0])
            pattern[step.target] = known[key][0].pattern
        plan, count = known[key]
        plans.append(plan)
        counts.append(count)
        flops += count.flops
        if flops > most_flops:
            raise TooMuch
    workspace, stack = 0, None
    if len(pattern) > len(patterns):
        workspace = sum(assign_slots(recipe.steps, plans, pattern, shared, batch)[1])
    if chain.is_stack:  # one stacked array may run on its own program, which keeps the products of every level
        stack = stack_program(recipe)
        workspace = max(workspace, stack.values(patterns[0].shape[0], 1 if all(chain.shared) else batch, batch))
    sized = SizedRecipe(
        recipe, tuple(plans), pattern, tuple(counts), workspace * itemsize, results, index, flops, stack
    )  # fmt: skip
    if memory_limit is not None and sized.memory > memory_limit:
        raise MemoryLimitError(
            f"The {recipe.algorithm} scan needs more memory than memory_limit",
            expected=f"at most {memory_limit} bytes",
            got=f"{sized.memory} bytes",
        )
    return sized


def _step_refused(step: AbstractStep, right: Any, left: Any, memory_limit: int | None, got: object) -> MemoryLimitError:
    """Return the error for a product that alone is too large."""
    sizes = " times ".join(f"{p.shape[0]} x {p.shape[1]} with {p.nnz} entries" for p in (right, left))
    return MemoryLimitError(
        f"A step of the scan's {step.phase}, {step.target} = {step.right} · {step.left} ({sizes}), needs more memory "
        "than memory_limit",
        expected=f"at most {memory_limit} bytes",
        got=got,
    )


def _count_matvec(pattern: Any, width: int, batch: int, itemsize: int) -> StepCount:
    """Count ``y = J x``: values, both vectors, and the index of a pattern that has one."""
    (rows, columns), nnz = pattern.shape, pattern.nnz
    flops, moved = 2 * nnz * batch, (rows + columns) * batch * itemsize
    if pattern.kind == "identity":
        flops = 0
    else:
        moved += nnz * width * itemsize
        moved += 0 if pattern.kind == "dense" else index_bytes(nnz, pattern.shape)
    return StepCount(flops, 2 * rows * columns * batch, moved, batch, rows)


def bounds(recipe: Recipe, chain: Chain) -> tuple[int, int]:
    """Return FLOPs and bytes of values of all matrix products if every one of them were full."""
    sizes = [chain.patterns[0].shape[1], *[p.shape[0] for p in chain.patterns]]
    flops = values = 0
    for step in recipe.steps:
        if step.kind == "mm":
            first, middle, last = sizes[step.left.start - 1], sizes[step.right.start - 1], sizes[step.right.stop - 1]
            flops += 2 * first * middle * last
            values += first * last
    return flops * chain.batch, values * chain.batch * chain.dtype.itemsize


def amount(value: float, unit: str) -> str:
    """Write a number with a metric prefix: ``1234567`` as ``1.23 M<unit>``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


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
    """Return whether the batch shares each matrix's values; an identity's, which are never read, count as shared."""
    found = {Span(i + 1, i + 2): s or patterns[i].kind == "identity" for i, s in enumerate(shared)}
    for step in steps:
        if step.kind == "mm":
            found[step.target] = found[step.left] and found[step.right]
    return found


def is_view(plan: Any) -> bool:
    """Whether the product has an identity operand, so that its values are those of the other operand."""
    return plan is not None and plan.strategy == "identity"


def assign_slots(
    steps: Sequence[AbstractStep], plans: Sequence[Any], patterns: Mapping[Span, Any], shared: Mapping[Span, bool],
    batch: int,
) -> tuple[dict[Span, int], list[int]]:  # fmt: skip
    """Give every product that needs one a buffer; return it by span, and how many values (not bytes) each holds."""
    root: dict[Span, Span] = {}  # spans that are another span's values under a new name, through an identity
    last_use: dict[Span, int] = {}
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if is_view(plan):
            source = step.left if patterns[step.right].kind == "identity" else step.right
            root[step.target] = root.get(source, source)
        for span in (step.left, step.right):
            last_use[root.get(span, span)] = number
    slots: dict[Span, int] = {}
    pool = Slots()
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if plan is not None and plan.strategy != "identity":
            slots[step.target] = pool.take(plan.pattern.nnz * (1 if shared[step.target] else batch))
        for span in (step.left, step.right):
            owner = root.get(span, span)
            if owner in slots and last_use[owner] == number:
                pool.give(slots[owner])
    return slots, pool.capacities
