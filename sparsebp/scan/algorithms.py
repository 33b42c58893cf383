"""Scans as lists of steps: linear, hybrid, Blelloch, chunked; over Jacobians and over affine maps.

All algorithms run on the paper's input array (BPPSA Eq. 5), ``a = [g, J_1, …, J_n]``, with the operator
``A ◇ B = B · A``. Whatever an algorithm computes is the product of a contiguous stretch of that array, so a `Span`
names every value there is: one that starts at 0 contains the gradient and is a vector, any other is a matrix.
This file holds integers only; sizes, patterns and arrays come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, NamedTuple, TypeAlias

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.patterns import SparsityPattern

__all__ = ["blelloch", "chunk_cuts", "chunked", "hybrid", "linear", "recipe", "tree_levels"]


# Affine maps of gradients as one array each, so that they can be joined, kept, and sent to another worker.
#
# A map takes a gradient g, a row of n numbers, to ``g @ M + v``. It is kept as the matrix M with the row v below it: (n
# + 1, n), whatever stands before these two axes (samples, chunks). Joining is associative and does not commute.


def join(first: Array, then: Array) -> Array:
    """Return the map that does `first`, and `then` after it; both (…, n + 1, n). 2·(n + 1)·n² FLOP."""
    size = first.shape[-1]
    out: Array = backend.namespace(first, then).matmul(first, then[..., :size, :])
    out[..., size, :] += then[..., size, :]
    return out


def join_all(maps: Array) -> Array:
    """Return the map that does all of `maps`, (C, …, n + 1, n) with C from 1 on, the first one first."""
    while len(maps) > 1:
        even = len(maps) // 2 * 2
        joined = join(maps[0:even:2], maps[1:even:2])
        maps = backend.namespace(maps).concatenate((joined, maps[even:]))
    return maps[0]


def identity(like: Array) -> Array:
    """Return the maps, of `like`'s shape and dtype, that leave a gradient as it is."""
    xp, size = backend.namespace(like), like.shape[-1]
    out = xp.zeros_like(like)
    out[..., :size, :] = xp.eye(size, dtype=like.dtype)
    return out


def constant(vectors: Array) -> Array:
    """Return the maps (…, n + 1, n) that give `vectors` (…, n), whatever comes in."""
    xp = backend.namespace(vectors)
    size = vectors.shape[-1]
    out = xp.zeros((*vectors.shape[:-1], size + 1, size), dtype=vectors.dtype)
    out[..., size, :] = vectors
    return out


Phase: TypeAlias = Literal[
    "fold", "up-sweep", "middle", "down-sweep", "linear", "reduce", "combine", "apply", "output", "unfold"
]
Kind: TypeAlias = Literal["mm", "mv"]


class Span(NamedTuple):
    """The elements ``a[start] ◇ … ◇ a[stop - 1]`` of the input array ``a = [g, J_1, …, J_n]``, multiplied.

    A span from 0 is the vector ``J_{stop-1} … J_1 g``; any other is the matrix ``J_{stop-1} … J_start``.
    """

    start: int
    stop: int

    @property
    def is_vector(self) -> bool:
        """Whether the gradient is among the elements."""
        return self.start == 0

    @property
    def is_element(self) -> bool:
        """Whether it is an input rather than a product."""
        return self.stop == self.start + 1

    def __str__(self) -> str:
        """``g``, ``J3``, ``J2:5`` (the product of J_2 to J_5) or ``y4`` (the output after J_1 to J_4)."""
        last = self.stop - 1
        if self.start == 0:
            return "g" if last == 0 else f"y{last}"
        return f"J{last}" if self.start == last else f"J{self.start}:{last}"


class AbstractStep(NamedTuple):
    """``target = left ◇ right = right · left``: a product of two neighbouring spans, without sizes.

    `level` is the row of BPPSA Fig. 3 from which the step starts (Blelloch, hybrid), and else a running number of the
    parallel round.
    """

    level: int
    phase: Phase
    left: Span
    right: Span

    @property
    def target(self) -> Span:
        """The span that the two operands make together."""
        return Span(self.left.start, self.right.stop)

    @property
    def kind(self) -> Kind:
        """``"mv"`` if the left operand is a vector, else ``"mm"``."""
        return "mv" if self.left.start == 0 else "mm"


@dataclass(frozen=True)
class Recipe:
    """What an algorithm does to ``n`` Jacobians: its steps in an order that can be executed as it stands.

    Attributes
    ----------
    algorithm
        ``"linear"``, ``"blelloch"``, ``"hybrid"`` or ``"chunked"``.
    n
        Number of Jacobians; the input array has n + 1 elements.
    steps
        Every product. Products with the symbolic identity, and products that nobody reads, are not among them.
    levels
        Number of levels by phase, as the paper counts them.
    up_levels
        Levels of the up-sweep (hybrid), else None.
    cuts
        Chunk c is made of the Jacobians ``J_{cuts[c]+1} … J_{cuts[c+1]}`` (chunked), else None.
    """

    algorithm: str
    n: int
    steps: tuple[AbstractStep, ...]
    levels: dict[str, int]
    up_levels: int | None = None
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScanStep:
    """One product of a planned scan: ``target = left ◇ right = right · left``.

    Attributes
    ----------
    level
        Steps of one level and phase are independent, but for the phases ``middle``, ``linear`` and ``combine``, where
        each depends on the one before, and for the members of a folded piece. For Blelloch and hybrid: the row of BPPSA
        Fig. 3 from which the step starts, so ``level=0`` takes row L0 to row L1. Folding and unfolding count rounds of
        their own.
    phase
        ``fold``, ``up-sweep``, ``middle``, ``down-sweep``, ``linear``, ``reduce``, ``combine``, ``apply``, ``output``
        or ``unfold``.
    left, right, target
        Spans of the input array ``[g, J_1, …, J_n]``.
    kind
        ``"mm"`` (matrix–matrix) or ``"mv"`` (matrix–vector).
    flops
        Floating-point operations for the whole batch, two a multiplication with its addition, injections not counted.
    dense_flops
        The same if no operand were sparse: the dense complexity of BPPSA Fig. 10.
    bytes
        Bytes that have to be moved: operands, result and index arrays, each once.
    seconds
        Estimated time of the step by itself, on all workers of the machine that the scan is planned for.
    critical
        Whether the step lies on the critical path: the dependent steps that cost most FLOPs together.
    """

    level: int
    phase: Phase
    left: Span
    right: Span
    target: Span
    kind: Kind
    flops: int
    dense_flops: int
    bytes: int
    seconds: float
    critical: bool


def critical_path(steps: Sequence[AbstractStep], weights: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the steps on the heaviest path of dependences, first to last.

    Parameters
    ----------
    steps
        In an order that can be executed.
    weights
        Cost of each step. One is added to each, so that of paths of free steps the longest counts.
    """
    maker: dict[Span, int] = {}
    cost: list[int] = []
    before: list[int] = []
    for number, step in enumerate(steps):
        left, right = maker.get(step.left, -1), maker.get(step.right, -1)
        previous = max((left, right), key=lambda s: cost[s] if s >= 0 else -1)
        before.append(previous)
        cost.append(weights[number] + 1 + (cost[previous] if previous >= 0 else 0))
        maker[step.target] = number
    if not cost:
        return ()
    path = [max(range(len(cost)), key=cost.__getitem__)]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path))


# Reduce-then-scan: every worker reduces a chunk, the chunks are combined, every worker runs its chunk with vectors.
#
# The first chunk knows its incoming gradient and works with vectors from the start; the last chunk's product is needed
# by nobody. So only the chunks between multiply matrices, and with one or two chunks the scan is the linear one.


def chunk_cuts(n: int, chunks: int) -> tuple[int, ...]:
    """Cut ``range(n)`` into `chunks` parts (at most n) whose lengths differ by at most one; the longer come first."""
    chunks = min(chunks, n)
    size, longer = divmod(n, chunks)
    return tuple(c * size + min(c, longer) for c in range(chunks + 1))


def chunked(n: int, chunks: int) -> Recipe:
    """Return reduce-then-scan over ``min(chunks, n)`` chunks."""
    cuts = chunk_cuts(n, chunks)
    count = len(cuts) - 1
    longest = cuts[1]
    steps: list[AbstractStep] = []
    # reduce, a product of every chunk a round; chunk c holds the array elements cuts[c] + 1 … cuts[c + 1]
    for k in range(longest):
        steps.append(AbstractStep(k, "reduce", Span(0, k + 1), Span(k + 1, k + 2)))
        for c in range(1, count - 1):
            first, element = cuts[c] + 1, cuts[c] + 1 + k
            if k > 0 and element <= cuts[c + 1]:
                steps.append(AbstractStep(k, "reduce", Span(first, element), Span(element, element + 1)))
    for c in range(1, count - 1):
        level = longest + c - 1
        steps.append(AbstractStep(level, "combine", Span(0, cuts[c] + 1), Span(cuts[c] + 1, cuts[c + 1] + 1)))
    level = longest + max(count - 2, 0)
    rounds = 0
    for k in range(longest):
        for c in range(1, count):
            element = cuts[c] + 1 + k
            end = cuts[c + 1] if c == count - 1 else cuts[c + 1] - 1  # the last vector of an inner chunk is combined
            if element <= end:
                steps.append(AbstractStep(level + k, "apply", Span(0, element), Span(element, element + 1)))
                rounds = k + 1
    levels = {"reduce": longest, "combine": max(count - 2, 0), "apply": rounds}
    return Recipe("chunked", n, tuple(steps), levels, cuts=cuts)


# The linear, the hybrid and the Blelloch scan: no level of up-sweep, some, and all.
#
# BPPSA §3.2, Algorithm 1 works in place on ``a = [g, J_1, …, J_n]`` and leaves the exclusive scan there; here it is
# acted out on spans. Two of its costs are only apparent and make no step:
#
# - a product with the symbolic identity (line 7 sets ``a[n]`` to it) is a move of data. All products of the first
#   down-sweep level are such;
# - an up-sweep product that lands in ``a[n]`` is overwritten on line 7 before anybody reads it.
#
# The exclusive scan ends with the gradient of x_1. The gradient of x_0 follows as one last matrix–vector product, the
# phase ``output``.
#
# Products grow denser with every level of the up-sweep; stopping it after k of them trades them for a chain over the
# ``⌈(n + 1) / 2^k⌉`` blocks that they have made: the hybrid scan of BPPSA §5.3. In the rows of Fig. 3 with D =
# ⌈log₂(n+1)⌉, the up-sweep goes from L0 to Lk, the middle yields the vectors of row L(2D-1-k), and the down-sweep goes
# on to L2D: k + 1 levels, of which the first only moves data, as in Algorithm 1.

IDENTITY = Span(0, 0)
"""The symbolic identity: the product of no elements."""


def tree_levels(n: int) -> int:
    """Return ⌈log₂(n + 1)⌉: the levels of the down-sweep for n Jacobians. The up-sweep has one fewer."""
    return n.bit_length()  # for n >= 1, n.bit_length() is the least D with 2**D >= n + 1


def linear(n: int) -> Recipe:
    """Return the n matrix–vector products ``y_i = J_i y_{i-1}`` of back-propagation (BPPSA Eq. 3), a level each."""
    steps = tuple(AbstractStep(i, "linear", Span(0, i + 1), Span(i + 1, i + 2)) for i in range(n))
    return Recipe("linear", n, steps, {"linear": n})


def blelloch(n: int) -> Recipe:
    """Return Algorithm 1 for n Jacobians, and the last product for the gradient of x_0."""
    steps, levels = _sweeps(n, tree_levels(n) - 1)
    return Recipe("blelloch", n, steps, levels)


def hybrid(n: int, up_levels: int) -> Recipe:
    """Return the hybrid scan with `up_levels` levels of up-sweep.

    With 0 it is the linear scan, with ⌈log₂(n+1)⌉ - 1 or more it is Algorithm 1.
    """
    k = min(up_levels, tree_levels(n) - 1)
    steps, levels = _sweeps(n, k) if up_levels else (linear(n).steps, {"linear": n})
    return Recipe("hybrid", n, steps, levels, up_levels=k)


def _sweeps(n: int, k: int) -> tuple[tuple[AbstractStep, ...], dict[str, int]]:
    """Return the steps with k levels of up-sweep, and the number of levels by phase."""
    a = [Span(i, i + 1) for i in range(n + 1)]
    depth = tree_levels(n)
    up = _up_sweep(a, k)
    middle = _middle(a, k)
    down = _down_sweep(a, k - 1)
    last = AbstractStep(2 * depth, "output", Span(0, n), Span(n, n + 1))
    levels = {"up-sweep": k, "middle": len(middle), "down-sweep": k + 1, "output": 1}
    if k == depth - 1:  # Algorithm 1 has no middle
        del levels["middle"]
    return (*up, *middle, *down, last), levels


def _up_sweep(a: list[Span], levels: int) -> list[AbstractStep]:
    """Run lines 1–6 for d = 0 … levels - 1, in place on `a`; return the products."""
    n, steps = len(a) - 1, []
    for d in range(levels):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if right < n:  # a[n] is overwritten on line 7
                steps.append(AbstractStep(d, "up-sweep", a[left], a[right]))
                a[right] = steps[-1].target
    return steps


def _middle(a: list[Span], k: int) -> list[AbstractStep]:
    """Replace the blocks that k levels have made by their exclusive scan, one after the other; return the products.

    After all levels there are two blocks: line 7, and the first down-sweep level, which only moves data.
    """
    n, steps, prefix, size = len(a) - 1, list[AbstractStep](), IDENTITY, 2**k
    for start in range(0, n + 1, size):
        end = min(start + size - 1, n)
        block, a[end] = a[end], prefix
        if end == n:  # the last block's total is not part of an exclusive scan
            break
        if prefix == IDENTITY:
            prefix = block
        else:
            steps.append(AbstractStep(k, "middle", prefix, block))
            prefix = steps[-1].target
    return steps


def _down_sweep(a: list[Span], first: int) -> list[AbstractStep]:
    """Run lines 8–15 for d = first … 0, in place on `a`; return the products.

    The level of depth d starts from row ``2·⌈log₂(n+1)⌉ - 1 - d`` of BPPSA Fig. 3: row L0 is the input, row
    ``L(⌈log₂(n+1)⌉)`` the array after line 7.
    """
    n, steps = len(a) - 1, []
    last_row = 2 * tree_levels(n) - 1
    for d in range(first, -1, -1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            prefix, block = a[right], a[left]
            a[left] = prefix
            if prefix == IDENTITY:
                a[right] = block
            else:
                steps.append(AbstractStep(last_row - d, "down-sweep", prefix, block))
                a[right] = steps[-1].target
    return steps


# The algorithms of a scan as lists of steps: pure integers, no arrays, no patterns.


def recipe(algorithm: str, n: int, *, up_levels: int | None = None, chunks: int = 1) -> Recipe:
    """Return the steps of `algorithm` for `n` Jacobians; the others are the options of hybrid and chunked.

    Raises
    ------
    OptionError
        The algorithm has no steps of its own (``"auto"`` is resolved before) or is unknown.
    """
    if algorithm == "linear":
        return linear(n)
    if algorithm == "blelloch":
        return blelloch(n)
    if algorithm == "hybrid":
        return hybrid(n, up_levels or 0)
    if algorithm == "chunked":
        return chunked(n, chunks)
    raise OptionError(
        "Unknown scan algorithm",
        expected="linear, blelloch, hybrid or chunked",
        got=repr(algorithm),
        remedy="Pass one of them",
    )


# How many products of which kind each level has, in closed form: the recipe's shape without its steps.
#
# A chain of 30 000 equal blocks is judged by these counts in microseconds, where building every candidate's list of
# steps would take seconds.


class LevelCount(NamedTuple):
    """One level, or one chain of them: products by kind, and how many follow each other.

    Attributes
    ----------
    phase
        As in `ScanStep`.
    mm, mv
        Matrix–matrix and matrix–vector products, all together.
    rounds
        Dependent rounds: 1 for a level of independent products, the length for a chain.
    """

    phase: str
    mm: int
    mv: int
    rounds: int


def level_counts(algorithm: str, n: int, *, up_levels: int = 0, chunks: int = 1) -> list[LevelCount]:
    """Return the levels of `algorithm` for n Jacobians. Levels without products are left out.

    The phases of ``chunked`` are one entry each, the work of all chunks together.
    """
    if algorithm == "chunked":
        return _counts_chunked(n, chunks)
    depth = tree_levels(n)
    if algorithm == "blelloch":
        up_levels = depth - 1
    if algorithm == "linear" or (algorithm == "hybrid" and up_levels == 0):
        return [LevelCount("linear", 0, n, n)]
    k = min(up_levels, depth - 1)
    levels = [LevelCount("up-sweep", n // 2 ** (d + 1) - 1, 1, 1) for d in range(k)]
    if k < depth - 1:
        blocks = -(-(n + 1) // 2**k)
        levels.append(LevelCount("middle", 0, blocks - 2, blocks - 2))
    levels += [LevelCount("down-sweep", 0, (n - 2**d) // 2 ** (d + 1), 1) for d in range(k - 1, -1, -1)]
    levels.append(LevelCount("output", 0, 1, 1))
    return [level for level in levels if level.mm + level.mv]


def _counts_chunked(n: int, chunks: int) -> list[LevelCount]:
    cuts = chunk_cuts(n, chunks)
    count, longest = len(cuts) - 1, cuts[1]
    if count == 1:
        return [LevelCount("reduce", 0, n, n)]
    inner = cuts[-2] - cuts[1]  # Jacobians of the chunks that are neither first nor last
    levels = [
        LevelCount("reduce", inner - (count - 2), longest, longest),
        LevelCount("combine", 0, count - 2, count - 2),
        LevelCount("apply", 0, inner - (count - 2) + n - cuts[-2], max(longest - 1, n - cuts[-2])),
    ]
    return [level for level in levels if level.mm + level.mv]


# Folding: diagonal and selection elements join their neighbour, so that a conv–ReLU–pool block is one element.
#
# A product with a diagonal is a scaling, one with a selection (a max-pooling's transposed Jacobian: at most one entry a
# row) hardly more, and neither makes its neighbour denser. Left to themselves they would take levels of the tree. So
# the chain is cut after every other element, an algorithm runs over the pieces, and here its steps are put in terms of
# the chain's own positions:
#
# - a piece that the algorithm multiplies with a matrix is multiplied together first (phase ``fold``);
# - a piece that it multiplies with a vector is applied member by member, which costs less than the folded matrix, whose
#   values are per sample as soon as one member's are, and gives the gradients inside the piece on the way;
# - what is left inside of pieces follows last, from the vector that enters the piece (phase ``unfold``).

LIGHT = frozenset({"identity", "diagonal", "selection"})
"""Kinds of patterns that are folded into a neighbour."""


def piece_ends(patterns: Sequence[SparsityPattern]) -> tuple[int, ...]:
    """Cut a chain into pieces: light elements and the first other one after them; light ones at the end join the last.

    Returns
    -------
    tuple of int
        How many Jacobians the first piece holds, the first two together, and so on; the last is ``len(patterns)``.
    """
    ends = [i + 1 for i, p in enumerate(patterns) if p.kind not in LIGHT]
    return (*ends[:-1], len(patterns))


def fold_recipe(recipe: Recipe, ends: tuple[int, ...]) -> Recipe:
    """Return the steps of `recipe`, which runs over the pieces, on the chain that the pieces are made of.

    Parameters
    ----------
    recipe
        For ``len(ends)`` Jacobians.
    ends
        As `piece_ends` returns it.
    """
    if len(ends) == ends[-1]:
        return recipe
    before = (0, *ends)

    def unfolded(span: Span) -> Span:
        start = 0 if span.is_vector else before[span.start - 1] + 1
        return Span(start, before[span.stop - 1] + 1)

    steps: list[AbstractStep] = []
    multiplied: set[Span] = set()
    for step in recipe.steps:
        left, right = unfolded(step.left), unfolded(step.right)
        if step.kind == "mv" and step.right.is_element:
            steps += _applied(right, step.level, step.phase)
            continue
        steps.append(AbstractStep(step.level, step.phase, left, right))
        multiplied |= {unfolded(s) for s in (step.left, step.right) if s.is_element and not s.is_vector}
    fold = _rounds(_multiplied(piece) for piece in sorted(multiplied))
    known = {step.target for step in steps}
    pieces = (Span(first + 1, end + 1) for first, end in zip(before, ends, strict=False))
    inside = [_applied(Span(p.start, p.stop - 1), 0, "unfold") for p in pieces]
    unfold = _rounds([s for s in chain if s.target not in known] for chain in inside)
    levels = dict(recipe.levels)
    for name, extra in (("fold", fold), ("unfold", unfold)):
        if extra:
            levels[name] = extra[-1].level + 1
    cuts = None if recipe.cuts is None else tuple(before[c] for c in recipe.cuts)
    return replace(recipe, n=ends[-1], steps=(*fold, *steps, *unfold), levels=levels, cuts=cuts)


def _applied(piece: Span, level: int, phase: str) -> list[AbstractStep]:
    """The matrix–vector products through a piece, one member after the other."""
    return [AbstractStep(level, phase, Span(0, i), Span(i, i + 1)) for i in range(piece.start, piece.stop)]  # type: ignore[arg-type]


def _multiplied(piece: Span) -> list[AbstractStep]:
    """The products that make one matrix of a piece. Light members come first, so that they meet small operands."""
    return [AbstractStep(0, "fold", Span(piece.start, i), Span(i, i + 1)) for i in range(piece.start + 1, piece.stop)]


def _rounds(chains: Iterable[list[AbstractStep]]) -> list[AbstractStep]:
    """Number the steps of independent chains by their place in the chain, and order them so."""
    numbered = [step._replace(level=place) for chain in chains for place, step in enumerate(chain)]
    return sorted(numbered, key=lambda step: step.level)


# A recipe for n equal square dense blocks, turned into few kernel calls: a whole level, or a whole chain, per call.
#
# Integers only. Matrices are addressed as (stack, position): stack 0 is the data itself, every level of products and
# every reduction has a stack of its own. Vectors are addressed by their position p in ``y``, where ``y[0] = g``.

Address: TypeAlias = tuple[int, int]


class Matmul(NamedTuple):
    """A level of products: ``stack[out][s] = stack[right][right_index[s]] @ stack[left][left_index[s]]``."""

    right: int
    right_index: Sequence[int]
    left: int
    left_index: Sequence[int]
    out: int


class Matvec(NamedTuple):
    """A level of ``y[out_index[s]] = stack[a][a_index[s]] @ y[x_index[s]]``."""

    a: int
    a_index: Sequence[int]
    x_index: Sequence[int]
    out_index: Sequence[int]


class Linear(NamedTuple):
    """Linear scans over ``stack[a][first:last]``, cut at `chunk_ptr`; that of chunk c starts from ``y[x_index[c]]``.

    The k-th product goes to ``y[out + k]``, or to ``y[out[k]]`` where the positions do not lie side by side.
    """

    a: int
    first: int
    last: int
    chunk_ptr: Sequence[int]
    x_index: Sequence[int]
    out: int | tuple[int, ...]


class Reduce(NamedTuple):
    """The products of the chunks of the data's ``[first:last]``, cut at `chunk_ptr`, into stack 1."""

    first: int
    last: int
    chunk_ptr: Sequence[int]


Operation: TypeAlias = Matmul | Matvec | Linear | Reduce


@dataclass(frozen=True)
class StackProgram:
    """Kernel calls in order, and how many matrices each stack of products has (stack 1 first)."""

    operations: tuple[Operation, ...]
    stacks: tuple[int, ...]

    @property
    def scratch(self) -> int:
        """Vectors of scratch: results of a chain that are not side by side in ``y``, and starts of several chains."""
        chains = [o for o in self.operations if isinstance(o, Linear)]
        spread = max((o.last - o.first for o in chains if isinstance(o.out, tuple)), default=0)
        return spread + max((len(o.x_index) for o in chains if len(o.x_index) > 1), default=0)

    def values(self, size: int, width: int, batch: int) -> int:
        """Return the values that all stacks and the scratch hold, for blocks of `size` with `width` values an entry."""
        return sum(self.stacks) * size * size * width + self.scratch * size * batch


def stack_program(recipe: Recipe) -> StackProgram:
    """Return the kernel calls of `recipe` over a stack of blocks."""
    if recipe.cuts is not None:
        return _stack_plan_chunked(recipe.n, recipe.cuts)
    return _levels(recipe)


def _stack_plan_chunked(n: int, cuts: tuple[int, ...]) -> StackProgram:
    """Reduce, combine, apply in one call each, and one more for the first chunk, which works with vectors.

    The last product of every inner chunk is made twice, by the combination and by the chunk's own chain: a chain that
    runs through is worth more than the one product a chunk that it could leave out.
    """
    count = len(cuts) - 1
    first = Linear(0, 0, cuts[1], (0, cuts[1]), (0,), 1)
    if count == 1:
        return StackProgram((first,), ())
    rest = Linear(0, cuts[1], n, tuple(c - cuts[1] for c in cuts[1:]), cuts[1:-1], cuts[1] + 1)
    if count == 2:
        return StackProgram((first, rest), ())
    inner = Reduce(cuts[1], cuts[-2], tuple(c - cuts[1] for c in cuts[1:-1]))
    combine = Linear(1, 0, count - 2, (0, count - 2), (cuts[1],), cuts[2:-1])
    return StackProgram((first, inner, combine, rest), (count - 2,))


def _levels(recipe: Recipe) -> StackProgram:
    """One call for the products of a level, one for its vectors; chains in one call."""
    address: dict[Span, Address] = {Span(i + 1, i + 2): (0, i) for i in range(recipe.n)}
    operations: list[Operation] = []
    stacks: list[int] = []
    for (_, phase), group in groupby(recipe.steps, key=lambda s: (s.level, s.phase)):
        steps = list(group)
        if phase == "middle":
            operations.append(_linear(steps, address))
            continue
        vectors = [s for s in steps if s.kind == "mv"]
        matrices = [s for s in steps if s.kind == "mm"]
        if matrices:
            stacks.append(len(matrices))
            operations.append(_matmul(matrices, address, len(stacks)))
        if vectors:
            operations.append(_matvec(vectors, address))
    if recipe.steps and recipe.steps[0].phase == "linear":  # a level each, but one chain
        return StackProgram((Linear(0, 0, recipe.n, (0, recipe.n), (0,), 1),), ())
    return StackProgram(tuple(operations), tuple(stacks))


def _linear(steps: list[AbstractStep], address: dict[Span, Address]) -> Linear:
    """The middle of a hybrid scan: its blocks lie side by side in the stack of the last up-sweep level."""
    stack, first = address[steps[0].right]
    targets = tuple(s.target.stop - 1 for s in steps)
    return Linear(stack, first, first + len(steps), (0, len(steps)), (steps[0].left.stop - 1,), targets)


def _matmul(steps: list[AbstractStep], address: dict[Span, Address], out: int) -> Matmul:
    """Products of one level all take their operands from the stack of the level before."""
    right, left = [address[s.right] for s in steps], [address[s.left] for s in steps]
    address.update({s.target: (out, i) for i, s in enumerate(steps)})
    return Matmul(right[0][0], [i for _, i in right], left[0][0], [i for _, i in left], out)


def _matvec(steps: list[AbstractStep], address: dict[Span, Address]) -> Matvec:
    matrices = [address[s.right] for s in steps]
    starts, ends = [s.left.stop - 1 for s in steps], [s.target.stop - 1 for s in steps]
    return Matvec(matrices[0][0], [i for _, i in matrices], starts, ends)
