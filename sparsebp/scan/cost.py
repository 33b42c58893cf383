"""What a scan costs before any value exists, and `auto`: FLOPs, bytes, memory, time, the choice.

The products are planned for real, or estimated (`sparsebp.scan.cost`): the counting is the same.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsebp.core.check import PatternKind
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.locks import cached_property
from sparsebp.core.machine import Machine
from sparsebp.patterns import SparsityPattern
from sparsebp.patterns.pattern import index_bytes
from sparsebp.products import ProductPlan, plan_product
from sparsebp.products.strategies import Filled, Gather, Positions, Strategy, by_kinds, worth
from sparsebp.scan.algorithms import (
    AbstractStep,
    Recipe,
    Span,
    StackProgram,
    fold_recipe,
    level_counts,
    recipe,
    stack_program,
    tree_levels,
)

# What there is to choose from: the algorithms with their parameters.


class Candidate(NamedTuple):
    """An algorithm with its parameter."""

    algorithm: str
    up_levels: int | None = None
    chunks: int | None = None

    def __str__(self) -> str:
        """As the arguments of `plan_scan`, shortened."""
        if self.up_levels is not None:
            return f"{self.algorithm} (up_levels={self.up_levels})"
        return self.algorithm if self.chunks is None else f"{self.algorithm} (chunks={self.chunks})"

    @property
    def arguments(self) -> str:
        """As the arguments of `plan_scan`."""
        extra = "" if self.up_levels is None else f", up_levels={self.up_levels}"
        extra += "" if self.chunks is None else f", chunks={self.chunks}"
        return f"algorithm={self.algorithm!r}{extra}"

    @property
    def multiplies(self) -> bool:
        """Whether it multiplies matrices at all."""
        return self.algorithm != "linear" and self.up_levels != 0

    def recipe(self, ends: tuple[int, ...]) -> Recipe:
        """Return its steps for a chain that is folded into pieces with these ends; without products, of all members."""
        n = len(ends) if self.multiplies else ends[-1]
        found = recipe(self.algorithm, n, up_levels=self.up_levels, chunks=self.chunks or 1)
        return fold_recipe(found, ends) if self.multiplies else found


def candidates(n: int, chunks: Sequence[int]) -> list[Candidate]:
    """Return every algorithm that differs from the others for n Jacobians, those with the fewest products first."""
    depth = tree_levels(n)
    found = [Candidate("linear")]
    found += [Candidate("chunked", chunks=c) for c in chunks if 3 <= c <= n]  # fewer chunks are the linear scan
    found += [Candidate("hybrid", up_levels=k) for k in range(1, depth - 1)]
    return [*found, Candidate("blelloch")] if n > 1 else found


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


# How full products of sparse Jacobians become, level by level, without multiplying them.
#
# A product's number of multiplications follows exactly from the degrees of its operands, ``Σ_k columns of right (k) ·
# rows of left (k)``, and where an operand is a product itself its degrees are estimated from random keys (Cohen's
# sketches, `sparsebp.scan.cost`). Reading every member of a span costs as much as a few matrix–vector
# products, where planning the product costs as much as the product itself.

KEYS = 32
"""Keys of a row. A count's standard error is ``1 / sqrt(KEYS - 2)``, 18 %, and that of a sum over rows less."""

Members: TypeAlias = tuple[SparsityPattern, ...]
"""What a span multiplies, in the chain's order, without the members that leave its pattern as it is."""


@dataclass(eq=False)
class EstimatedPattern:
    """A product's pattern that is not there yet: its shape, its kind, and its entries once somebody asks."""

    shape: tuple[int, int]
    kind: PatternKind
    members: Members
    fill_in: FillIn

    @cached_property
    def nnz(self) -> int:
        """Number of entries."""
        rows, columns = self.shape
        if self.kind == "dense":
            return rows * columns
        return min(round(float(self.fill_in.counts(self.members, rows=True).sum())), rows * columns)


@dataclass(eq=False)
class EstimatedProduct:
    """A product that is not planned yet: what `ProductPlan` says of itself."""

    pattern: Any
    how: type[Strategy]
    products: int

    @property
    def strategy(self) -> str:
        """As `ProductPlan.strategy`."""
        return self.how.name

    @property
    def flops(self) -> int:
        """Of one sample."""
        return 2 * self.products

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the plan's index arrays: the result's pattern, and a position of every product in its row."""
        if not self.how.own_pattern:
            return 0
        shape, nnz = self.pattern.shape, self.pattern.nnz
        return index_bytes(nnz, shape) + self.how.estimated_bytes(shape, nnz, self.products)


Pattern: TypeAlias = SparsityPattern | EstimatedPattern
Product: TypeAlias = ProductPlan | EstimatedProduct
Multiply: TypeAlias = Callable[[Any, Any, int | None], Product]
"""``multiply(right, left, memory_limit)``: the product ``right · left``; raises `MemoryLimitError` beyond the limit."""


class FillIn:
    """Estimates products of a chain's patterns, and products of such products. Its answers are the same every time."""

    def __init__(self) -> None:
        self._keys: dict[int, np.ndarray] = {}
        self._carried: dict[tuple[Members, bool], np.ndarray] = {}
        self._products: dict[tuple[Any, Any], EstimatedProduct] = {}

    def __call__(self, right: Any, left: Any, memory_limit: int | None) -> EstimatedProduct:
        """Estimate ``right · left``; raises `MemoryLimitError` where the products' index alone is beyond the limit."""
        product = self._products.get((right, left))
        if product is None:
            product = self._products[right, left] = self._product(right, left)
        least = product.how.least_bytes(product.products)
        if memory_limit is not None and least > memory_limit:
            raise MemoryLimitError("The product's index is too large", got=f"{least} bytes or more, by an estimate")
        return product

    def _product(self, right: Any, left: Any) -> EstimatedProduct:
        told = by_kinds(right, left)
        if told is not None and not told.own_pattern:
            return EstimatedProduct(told.result(right, left), told, told.count(right, left))
        shape, before, after = (right.shape[0], left.shape[1]), _members(left), _members(right)
        if told is not None:
            pattern = EstimatedPattern(shape, "dense", before + after, self)
            return EstimatedProduct(pattern, told, told.count(right, left))
        kind: PatternKind = "selection" if right.kind == left.kind == "selection" else "general"
        products = round(float(self.counts(after, rows=False) @ self.counts(before, rows=True)))
        how: type[Strategy] = Positions
        if right.kind == "selection":  # one multiplication an entry
            how = Gather
        elif left.kind != "selection" and worth(shape[0], right.shape[1], shape[1], products):
            how = Filled
        return EstimatedProduct(EstimatedPattern(shape, kind, before + after, self), how, products)

    def counts(self, members: Members, *, rows: bool) -> np.ndarray:
        """Return the entries of every row, or column, of a product, exact for one member."""
        if len(members) == 1 and rows:
            return np.diff(members[0].indptr).astype(np.float64)
        if len(members) == 1:
            return np.bincount(members[0].indices, minlength=members[0].shape[1]).astype(np.float64)
        way = members if rows else members[::-1]
        size = way[0].shape[1 if rows else 0]
        done = next((d for d in range(len(way), 0, -1) if (way[:d], rows) in self._carried), 0)
        keys = self._carried[way[:done], rows] if done else self._random(size)
        for member in way[done:]:
            keys = _carried(member, keys, rows=rows)
        self._carried[way, rows] = keys
        return self._counts(keys, size)

    def _counts(self, keys: np.ndarray, most: int) -> np.ndarray:
        """Return how many of `most` keys each row has met: the least of n exponential ones has the mean 1 / n.

        Rows that have met the same keys have the same error, so it does not average out as they fill up. That of a full
        row is known, and a row is rid of as much of it as it is full.
        """
        counts = np.asarray((KEYS - 1) / np.sum(keys, axis=1, dtype=np.float64))
        if most == 0:
            return counts
        full = (KEYS - 1) / float(np.sum(self._random(most).min(axis=0), dtype=np.float64))
        return np.asarray(np.minimum(counts * (most / full) ** (counts / full), most))

    def _random(self, size: int) -> np.ndarray:
        """Return exponentially distributed keys (size, KEYS)."""
        if size not in self._keys:
            rng = np.random.default_rng(size)
            self._keys[size] = rng.standard_exponential((size, KEYS), dtype=np.float32)
        return self._keys[size]


def _members(pattern: Any) -> Members:
    return pattern.members if isinstance(pattern, EstimatedPattern) else (pattern,)


def _carried(member: SparsityPattern, keys: np.ndarray, *, rows: bool) -> np.ndarray:
    """Carry keys through one member."""
    out = np.empty((member.shape[0 if rows else 1], KEYS), np.float32)
    if member.kind == "dense":
        out[:] = keys.min(axis=0, initial=np.inf)
        return out

    from sparsebp.scan import sketch

    (sketch.row_minima if rows else sketch.column_minima)(member.indptr, member.indices, keys, out)
    return out


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
        Ends of the folded pieces, see `sparsebp.scan.algorithms.piece_ends`.
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


# The cost model: how long an algorithm should take on a machine.
#
# One worker would take the **work** W₁ of all steps; unboundedly many, each step split over its rows, the **path** T∞
# of dependent steps. So P workers take at least ``max(T∞, W₁ / P)``, and no more than the sum of the two (R. Brent,
# "The parallel evaluation of general arithmetic expressions", J. ACM 21, 1974; BPPSA §3.6 counts step and work
# complexity). Each step adds a kernel call of its own; stacks of dense blocks run a whole level a call and are counted
# so.


class LevelCost(NamedTuple):
    """Work of one level, or of one chain.

    Attributes
    ----------
    calls, rounds, products
        Kernel calls, dependent rounds, and products; ``products / rounds`` of them can run at the same time.
    longest
        FLOPs a sample along the longest dependence.
    flops, bytes
        Of the whole batch.
    """

    calls: int
    rounds: int
    products: int
    longest: float
    flops: float
    bytes: float


def seconds(levels: Iterable[LevelCost], m: Machine, batch: int, itemsize: int) -> float:
    """Return the estimated time of one call on machine `m` that runs a level at a time."""
    rate, lanes = m.rate(itemsize), m.lanes(itemsize)
    total = 0.0
    for level in levels:
        path = level.rounds * m.step + level.longest * min(lanes, batch) / rate
        tasks = level.products * -(-batch // lanes)
        busy = min(m.workers, -(-tasks // level.rounds))
        work = max(tasks * m.step + level.flops / rate, level.bytes / (m.bandwidth / m.workers)) / busy
        total += level.calls * m.call + max(path, work)
    return total


def work(count: StepCount, m: Machine, itemsize: int) -> float:
    """Return the seconds that one worker takes for one step."""
    return m.products(count.flops / 2, count.strategy, count.width, itemsize) + m.moved(count.bytes)


def step_seconds(count: StepCount, m: Machine, itemsize: int) -> float:
    """Return the time of one step that all workers share."""
    return m.call + work(count, m, itemsize) / max(1, min(m.workers, count.rows))


def sized_seconds(sized: SizedRecipe, m: Machine, itemsize: int) -> float:
    """Return the estimated time of one call that runs a kernel call a step."""
    finish: dict[Span, float] = {}
    total = 0.0
    for step, count in zip(sized.recipe.steps, sized.counts, strict=True):
        ready = max(finish.get(step.left, 0.0), finish.get(step.right, 0.0))
        finish[step.target] = ready + step_seconds(count, m, itemsize)
        total += m.call / m.issuers + work(count, m, itemsize) / m.workers
    return max((total, *finish.values()))


def profile_costs(candidate: Candidate, n: int, size: int, sizes: Sizes) -> list[LevelCost]:
    """Return the costs by level for n stacked dense blocks of `size` × `size`: one kernel call a level or chain."""
    width = 1 if all(sizes.shared) else sizes.batch
    costs = []
    levels = level_counts(candidate.algorithm, n, up_levels=candidate.up_levels or 0, chunks=candidate.chunks or 1)
    for level in levels:
        mm, mv = 2 * size**3, 2 * size**2
        costs.append(
            LevelCost(
                calls=1 if level.mm == 0 or level.mv == 0 else 2,
                rounds=level.rounds,
                products=level.mm + level.mv,
                longest=level.rounds * (mm if level.mm else mv),
                flops=level.mm * mm * width + level.mv * mv * sizes.batch,
                bytes=(2 * level.mm + level.mm + level.mv) * size**2 * width * sizes.itemsize,
            )
        )
    return costs


def amount(value: float, unit: str) -> str:
    """Write a number with a metric prefix: ``1234567`` as ``1.23 M<unit>``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


# Choose among algorithms: estimate all, plan the one with the least estimated time that keeps to the memory limit.
#
# Where none does, the error names the nearest algorithm that would; nothing of the scan's size has been allocated.

MUCH = 100
"""Times the work of the linear scan from which an algorithm that was asked for is warned of before it is planned."""
DOUBT = 2.0
"""By how much an estimate of memory must pass the limit before it is believed without planning."""
SMALL = 1 << 24
"""Bytes beyond the limit up to which no estimate is believed: planning so little is quick, and exact."""


class Decision(NamedTuple):
    """What `choose` found: the sized winner, why, and the estimates in seconds by candidate."""

    sized: SizedRecipe
    reason: str
    estimates: Mapping[str, float]


def choose(options: Sequence[Candidate], chain: Chain, memory_limit: int) -> Decision:
    """Plan the fastest of `options` that keeps to the memory limit; of equals the first.

    Raises
    ------
    MemoryLimitError
        None does; the message names an algorithm that would.
    """
    fill_in = FillIn()
    if len(options) == 1:
        try:
            reason = f"{options[0]} was asked for." + _said_before(options[0], chain, fill_in, memory_limit)
            return Decision(_planned(options[0], chain, fill_in, memory_limit), reason, {})
        except MemoryLimitError as error:
            raise refusal(options[0], chain, memory_limit, error) from error
    times, dropped = estimate(options, chain, memory_limit)
    for option in sorted(times, key=lambda o: times[o]):
        try:
            best = _planned(option, chain, fill_in, memory_limit)
        except MemoryLimitError:
            dropped.append(str(option))
            continue
        estimates = {str(o): t for o, t in times.items() if str(o) not in dropped}
        return Decision(best, _reason(best, estimates, len(options), dropped, chain, memory_limit), estimates)
    raise refusal(
        options[0], chain, memory_limit, MemoryLimitError(f"Of {', '.join(dropped)}, none keeps to memory_limit")
    )


class _TooSlow(Exception):
    """A candidate's FLOPs alone take longer than the best so far; its products are not worth a look."""


def estimate(options: Sequence[Candidate], chain: Chain, memory_limit: int) -> tuple[dict[Candidate, float], list[str]]:
    """Return the estimated seconds of each option that may be the best, and those beyond the memory limit."""
    sizes, m, times = chain.sizes, chain.machine, dict[Candidate, float]()
    if chain.is_stack:
        n, size = len(chain.patterns), chain.patterns[0].shape[0]
        for o in options:
            times[o] = seconds(profile_costs(o, n, size, sizes), m, sizes.batch, sizes.itemsize)
        return times, []
    fill_in, dropped, least = FillIn(), list[str](), float("inf")
    for option in options:
        bound = least * m.rate(sizes.itemsize) * m.workers
        spent = 0

        def watch(flops: int) -> None:
            nonlocal spent
            spent += flops
            if spent > bound:  # noqa: B023  (called before the loop goes on)
                raise _TooSlow

        try:
            sized = _sized(option, chain, fill_in, memory_limit, watch)
        except MemoryLimitError:
            dropped.append(str(option))
        except _TooSlow:
            pass
        else:
            times[option] = sized_seconds(sized, m, sizes.itemsize)
            least = min(least, times[option])
    return times, dropped


def refusal(candidate: Candidate, chain: Chain, memory_limit: int, error: MemoryLimitError) -> MemoryLimitError:
    """Return the error for a candidate that needs too much memory; it names the nearest algorithm that does not."""
    most = {"hybrid": candidate.up_levels or 0, "linear": 0}.get(candidate.algorithm, len(chain.ends))
    levels = range(min(most, tree_levels(len(chain.ends)) - 1) - 1, 0, -1)
    fill_in = FillIn()
    for other in [*(Candidate("hybrid", up_levels=k) for k in levels), Candidate("linear")]:
        limit = memory_limit if other.multiplies else None  # what the linear scan needs is told also beyond the limit
        try:
            memory = _planned(other, chain, fill_in, limit).memory
        except MemoryLimitError:
            continue
        break
    remedy = f"Use {other.arguments}, which needs {memory} bytes, or raise memory_limit"
    if memory > memory_limit:
        remedy = (
            f"No algorithm fits: the least is {other.arguments} with {memory} bytes. "
            "Raise memory_limit to that, or make the batch smaller"
        )
    return MemoryLimitError(error.problem, expected=f"at most {memory_limit} bytes", got=error.got, remedy=remedy)


def _said_before(option: Candidate, chain: Chain, fill_in: FillIn, memory_limit: int) -> str:
    """Say what an algorithm's fill-in costs beside the linear scan, before anything is planned; warn if it is much."""
    if not option.multiplies or chain.is_stack:
        return ""
    sizes, m = chain.sizes, chain.machine
    filled = _sized(option, chain, fill_in, _believed(memory_limit))
    linear = _sized(Candidate("linear"), chain, fill_in, None)
    times = filled.flops / max(linear.flops, 1)
    if times < 1.5:
        return ""
    seconds, at_least = (sized_seconds(sized, m, sizes.itemsize) for sized in (filled, linear))
    said = (
        f" By an estimate its products take {times:.3g} times the work of the linear scan and "
        f"{amount(filled.memory, 'B')} in place of {amount(linear.memory, 'B')}: about {1e6 * seconds:.3g} µs a call, "
        f"where linear takes {1e6 * at_least:.3g} µs."
    )
    if times >= MUCH and seconds > at_least:
        warnings.warn(
            f"The {option.algorithm} scan fills in.{said} algorithm='auto' takes the least; "
            "describe() of a plan shows every product.",
            RuntimeWarning,
            stacklevel=4,
        )
    return said


def _believed(memory_limit: int) -> int:
    """Return the bytes from which an estimate refuses a scan; it may count more than a plan will take."""
    return max(round(DOUBT * memory_limit), memory_limit + SMALL)


def _planned(candidate: Candidate, chain: Chain, fill_in: FillIn, memory_limit: int | None) -> SizedRecipe:
    """Plan one candidate. Raises `MemoryLimitError` beyond the limit, from estimates alone where they are clear."""
    if memory_limit is not None and candidate.multiplies and not chain.is_stack:
        _sized(candidate, chain, fill_in, _believed(memory_limit))
    return _sized(candidate, chain, chain.product, memory_limit)


def _sized(
    candidate: Candidate,
    chain: Chain,
    multiply: Multiply,
    memory_limit: int | None,
    watch: Callable[[int], None] | None = None,
) -> SizedRecipe:
    recipe = candidate.recipe(chain.ends)
    return size_recipe(recipe, chain, multiply, memory_limit, watch)


def _reason(
    best: SizedRecipe, estimates: Mapping[str, float], options: int, dropped: Sequence[str], chain: Chain, limit: int
) -> str:
    """Say in a few sentences why `best` was taken of so many options."""
    m, name = chain.machine, best.recipe.algorithm
    (_, least), *others = order = sorted(estimates.items(), key=lambda pair: pair[1])
    equal = [key for key, value in others if value == least]
    order = [pair for pair in order if pair[0] not in equal]
    shown = ", ".join(f"{key} {1e6 * value:.4g} µs" for key, value in order[:4])
    reason = (
        f"{name} has the least estimated time of a call on a {m.name} "
        f"({m.workers} worker{'s' if m.workers != 1 else ''}) "
        f"for {len(chain.patterns)} Jacobians and batch {chain.sizes.batch}: {shown}."
    )
    if equal:
        reason += f" Just as long: {', '.join(equal[:3])}; of equals the simplest is taken."
    if name == "linear" and options > 1 + len(equal) + len(dropped):
        reason += " The others multiply matrices, which is more work than these workers save time."
    if dropped:
        reason += f" Left out, beyond {limit} bytes: {', '.join(dropped)}."
    return reason
