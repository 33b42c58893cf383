"""Scans as lists of steps: linear, hybrid, Blelloch, chunked; over Jacobians and over affine maps.

All algorithms run on the paper's input array (BPPSA Eq. 5), ``a = [g, J_1, …, J_n]``, with the operator
``A ◇ B = B · A``. Every value that an algorithm computes is the product of neighbouring elements, so a `Span` names
it: a span from 0 contains the gradient and is a vector, any other is a matrix. Steps are integers only; sizes,
patterns and arrays come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import OptionError
from sparsebp.patterns import SparsityPattern

__all__ = ["blelloch", "chunk_cuts", "chunked", "hybrid", "linear", "recipe", "tree_levels"]


# An affine map of a gradient as one array, which can be joined with others, kept, and sent to another worker.
#
# It takes a gradient g, a row of n numbers, to ``g @ M + v`` and is stored as the matrix M with the row v below it:
# (…, n + 1, n), with any leading axes (samples, chunks). Joining is associative but not commutative.


def join(first: Array, then: Array) -> Array:
    """Return the map that applies `first` and then `then`, both (…, n + 1, n); 2·(n + 1)·n² FLOP."""
    size = first.shape[-1]
    out: Array = backend.namespace(first, then).matmul(first, then[..., :size, :])
    out[..., size, :] += then[..., size, :]
    return out


def join_all(maps: Array) -> Array:
    """Return the map that applies all of `maps`, (C, …, n + 1, n) with C ≥ 1, the first one first."""
    while len(maps) > 1:
        even = len(maps) // 2 * 2
        joined = join(maps[0:even:2], maps[1:even:2])
        maps = backend.namespace(maps).concatenate((joined, maps[even:]))
    return maps[0]


def identity(like: Array) -> Array:
    """Return identity maps of the shape and dtype of `like`."""
    xp, size = backend.namespace(like), like.shape[-1]
    out = xp.zeros_like(like)
    out[..., :size, :] = xp.eye(size, dtype=like.dtype)
    return out


def constant(vectors: Array) -> Array:
    """Return the maps (…, n + 1, n) whose result is always `vectors` (…, n)."""
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

    `level` is the row of BPPSA Fig. 3 from which the step starts (Blelloch, hybrid), otherwise the number of the
    parallel round. `kind` is ``"mv"`` if the left operand is a vector, else ``"mm"``.
    """

    level: int
    phase: Phase
    left: Span
    right: Span
    target: Span
    kind: Kind


def combine(level: int, phase: Phase, left: Span, right: Span) -> AbstractStep:
    """Return the step ``left ◇ right``."""
    return AbstractStep(level, phase, left, right, Span(left[0], right[1]), "mm" if left[0] else "mv")


@dataclass(frozen=True)
class Recipe:
    """The steps of an algorithm over ``n`` Jacobians, in an order in which they can be executed.

    Products with the symbolic identity, and those whose result is never read, are left out. The input array has n + 1
    elements.
    """

    algorithm: str  # "linear", "blelloch", "hybrid" or "chunked"
    n: int
    steps: tuple[AbstractStep, ...]
    levels: dict[str, int]  # number of levels by phase, as the paper counts them
    up_levels: int | None = None  # of the hybrid scan
    cuts: tuple[int, ...] | None = None  # of the chunked scan: chunk c is J_{cuts[c]+1} … J_{cuts[c+1]}


@dataclass(frozen=True, slots=True)
class ScanStep:
    """One product of a planned scan: ``target = left ◇ right = right · left``.

    Attributes
    ----------
    level
        Steps of one level and phase are independent, except in the phases ``middle``, ``linear`` and ``combine``, where
        each depends on the one before, and inside a folded piece. For Blelloch and hybrid: the row of BPPSA Fig. 3 from
        which the step starts, so ``level=0`` takes row L0 to row L1. Folding and unfolding have their own numbering.
    phase
        ``fold``, ``up-sweep``, ``middle``, ``down-sweep``, ``linear``, ``reduce``, ``combine``, ``apply``, ``output``
        or ``unfold``.
    left, right, target
        Spans of the input array ``[g, J_1, …, J_n]``.
    kind
        ``"mm"`` (matrix–matrix) or ``"mv"`` (matrix–vector).
    flops
        Floating-point operations for the whole batch, two per multiply-add, without injections.
    dense_flops
        The same if no operand were sparse: the dense complexity of BPPSA Fig. 10.
    bytes
        Bytes moved: operands, result and index arrays, each once.
    critical
        Whether the step lies on the critical path: the dependent steps with the most FLOPs in total.
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
    critical: bool


def critical_path(steps: Sequence[AbstractStep], weights: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the steps on the heaviest path of dependences, first to last."""
    # One is added to each weight, so that among paths of free steps the longest counts.
    maker: dict[Span, int] = {}
    cost: list[int] = []
    before: list[int] = []
    for number, step in enumerate(steps):
        left, right = maker.get(step.left, -1), maker.get(step.right, -1)
        previous = left if right < 0 or (left >= 0 and cost[left] >= cost[right]) else right
        before.append(previous)
        cost.append(weights[number] + 1 + (cost[previous] if previous >= 0 else 0))
        maker[step.target] = number
    if not cost:
        return ()
    path = [cost.index(max(cost))]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path))


# Reduce-then-scan: every worker reduces a chunk, the chunks are combined, every worker runs its chunk with vectors.
#
# The first chunk knows its incoming gradient and works with vectors from the start; the product of the last chunk is
# not needed. So only the chunks between them multiply matrices, and with one or two chunks the scan is linear.


def chunk_cuts(n: int, chunks: int) -> tuple[int, ...]:
    """Cut ``range(n)`` into `chunks` parts (at most n) whose lengths differ by at most one; the longer come first."""
    chunks = min(chunks, n)
    size, longer = divmod(n, chunks)
    return tuple([c * size + min(c, longer) for c in range(chunks + 1)])


def chunked(n: int, chunks: int) -> Recipe:
    """Return reduce-then-scan over ``min(chunks, n)`` chunks."""
    cuts = chunk_cuts(n, chunks)
    count, longest, inner = len(cuts) - 1, cuts[1], range(1, len(cuts) - 2)
    steps: list[AbstractStep] = []
    for k in range(longest):  # reduce, a product per chunk and round; chunk c holds elements cuts[c] + 1 … cuts[c + 1]
        steps.append(combine(k, "reduce", Span(0, k + 1), Span(k + 1, k + 2)))
        for c in inner if k else ():
            first, element = cuts[c] + 1, cuts[c] + 1 + k
            if element <= cuts[c + 1]:
                steps.append(combine(k, "reduce", Span(first, element), Span(element, element + 1)))
    for c in inner:
        steps.append(combine(longest + c - 1, "combine", Span(0, cuts[c] + 1), Span(cuts[c] + 1, cuts[c + 1] + 1)))
    level = longest + len(inner)
    rounds = 0
    for k in range(longest):
        for c in range(1, count):
            element = cuts[c] + 1 + k
            if element < cuts[c + 1] + (c == count - 1):  # the last vector of an inner chunk is combined
                steps.append(combine(level + k, "apply", Span(0, element), Span(element, element + 1)))
                rounds = k + 1
    levels = {"reduce": longest, "combine": len(inner), "apply": rounds}
    return Recipe("chunked", n, tuple(steps), levels, cuts=cuts)


# The linear, the hybrid and the Blelloch scan: no level of up-sweep, some, and all.
#
# BPPSA §3.2, Algorithm 1 works in place on ``a = [g, J_1, …, J_n]`` and leaves the exclusive scan there. Here it runs
# on spans, and two of its products need no step:
#
# - a product with the symbolic identity (line 7 sets ``a[n]`` to it) only moves data, as do all products of the first
#   down-sweep level;
# - an up-sweep product that lands in ``a[n]`` is overwritten on line 7 before it is read.
#
# The exclusive scan ends with the gradient of x_1. The gradient of x_0 follows as one last matrix–vector product, the
# phase ``output``.
#
# Products grow denser with every level of the up-sweep. The hybrid scan (BPPSA §5.3) stops after k levels and runs a
# chain over the ``⌈(n + 1) / 2^k⌉`` blocks that are left. In the rows of Fig. 3 with D = ⌈log₂(n+1)⌉, the up-sweep goes
# from L0 to Lk, the middle yields the vectors of row L(2D-1-k), and the down-sweep goes on to L2D: k + 1 levels, of
# which the first only moves data, as in Algorithm 1.

IDENTITY = Span(0, 0)
"""The symbolic identity: the product of no elements."""


def tree_levels(n: int) -> int:
    """Return ⌈log₂(n + 1)⌉: the levels of the down-sweep for n Jacobians. The up-sweep has one fewer."""
    return n.bit_length()  # for n >= 1, n.bit_length() is the least D with 2**D >= n + 1


def linear(n: int) -> Recipe:
    """Return the n matrix–vector products ``y_i = J_i y_{i-1}`` of back-propagation (BPPSA Eq. 3), one per level."""
    steps = tuple(AbstractStep(i, "linear", Span(0, i + 1), Span(i + 1, i + 2), Span(0, i + 2), "mv") for i in range(n))
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
    steps: list[AbstractStep] = []
    depth = tree_levels(n)
    for d in range(k):  # lines 1-6
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            if right < n:  # a[n] is overwritten on line 7
                steps.append(combine(d, "up-sweep", a[left], a[right]))
                a[right] = steps[-1].target
    # The blocks become their exclusive scan. After all levels there are two of them: this is line 7, then, and the
    # first down-sweep level, which only moves data.
    prefix, before = IDENTITY, len(steps)
    for start in range(0, n + 1, 2**k):
        end = min(start + 2**k - 1, n)
        block, a[end] = a[end], prefix
        if end < n and start:  # the total of the last block is not part of an exclusive scan
            steps.append(combine(k, "middle", prefix, block))
            prefix = steps[-1].target
        elif end < n:
            prefix = block
    middle = len(steps) - before
    # Lines 8-15: the level of depth d starts from row 2·⌈log₂(n+1)⌉ - 1 - d of Fig. 3, where L0 is the input.
    for d in range(k - 1, -1, -1):
        for i in range(0, n - 2**d + 1, 2 ** (d + 1)):
            left, right = i + 2**d - 1, min(i + 2 ** (d + 1) - 1, n)
            block, a[left] = a[left], a[right]
            if a[right] == IDENTITY:
                a[right] = block
            else:
                steps.append(combine(2 * depth - 1 - d, "down-sweep", a[right], block))
                a[right] = steps[-1].target
    steps.append(combine(2 * depth, "output", Span(0, n), Span(n, n + 1)))
    levels = {"up-sweep": k, "middle": middle, "down-sweep": k + 1, "output": 1}
    if k == depth - 1:  # Algorithm 1 has no middle
        del levels["middle"]
    return tuple(steps), levels


def recipe(algorithm: str, n: int, *, up_levels: int | None = None, chunks: int = 1) -> Recipe:
    """Return the steps of `algorithm` for `n` Jacobians; the caller has resolved ``"auto"``."""
    if algorithm == "linear":
        return linear(n)
    if algorithm == "blelloch":
        return blelloch(n)
    if algorithm == "hybrid":
        return hybrid(n, up_levels or 0)
    if algorithm == "chunked":
        return chunked(n, chunks)
    raise OptionError("Unknown scan algorithm", expected="linear, blelloch, hybrid or chunked", got=repr(algorithm))


# The number of products in each level, in closed form: algorithms over long chains of equal blocks are compared by
# these counts, without making their steps.


class LevelCount(NamedTuple):
    """One level, or one chain of them: the number of products by kind, and how many follow each other."""

    phase: str  # as in `ScanStep`
    mm: int
    mv: int
    rounds: int  # 1 for a level of independent products, the length for a chain


def level_counts(algorithm: str, n: int, *, up_levels: int = 0, chunks: int = 1) -> list[LevelCount]:
    """Return the levels of `algorithm` for n Jacobians that have products; ``chunked`` has one entry per phase."""
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
# row) costs little more, and neither makes its neighbour denser. As separate elements they would add levels to the
# tree. So the chain is cut after every other element, an algorithm runs over the pieces, and here its steps are
# translated to positions in the chain:
#
# - a piece that meets a matrix is multiplied together first (phase ``fold``);
# - a piece that meets a vector is applied member by member. That costs less than the folded matrix, whose values are
#   per sample as soon as one member's are, and gives the gradients inside the piece on the way;
# - the remaining gradients inside pieces follow last, from the vector that enters the piece (phase ``unfold``).

LIGHT = frozenset({"identity", "diagonal", "selection"})
"""Kinds of patterns that are folded into a neighbour."""


def piece_ends(patterns: Sequence[SparsityPattern]) -> tuple[int, ...]:
    """Cut a chain into pieces: light elements and the first other one after them; light ones at the end join the last.

    Returned are the numbers of Jacobians in the first piece, in the first two together, and so on.
    """
    ends = [i + 1 for i, p in enumerate(patterns) if p.kind not in LIGHT]
    return (*ends[:-1], len(patterns))


def fold_recipe(recipe: Recipe, ends: tuple[int, ...]) -> Recipe:
    """Translate `recipe`, which runs over the pieces with these `ends`, to the chain of Jacobians."""
    if len(ends) == ends[-1]:
        return recipe
    before = (0, *ends)
    steps: list[AbstractStep] = []
    multiplied: set[Span] = set()
    for level, phase, left, right, _, kind in recipe.steps:
        piece = Span(before[right.start - 1] + 1, before[right.stop - 1] + 1)
        if kind == "mv" and right.stop == right.start + 1:  # member by member
            steps += [combine(level, phase, Span(0, i), Span(i, i + 1)) for i in range(*piece)]
            continue
        other = Span(before[left.start - 1] + 1 if left.start else 0, before[left.stop - 1] + 1)
        steps.append(combine(level, phase, other, piece))
        multiplied |= {b for a, b in ((left, other), (right, piece)) if a.start and a.stop == a.start + 1}
    # light members come first, so that they meet small operands
    fold = [
        combine(i - piece.start - 1, "fold", Span(piece.start, i), Span(i, i + 1))
        for piece in sorted(multiplied)
        for i in range(piece.start + 1, piece.stop)
    ]
    known = {step.target for step in steps}
    unfold = []
    for first, end in zip(before, ends, strict=False):
        inside = [i for i in range(first + 1, end) if Span(0, i + 1) not in known]
        unfold += [combine(level, "unfold", Span(0, i), Span(i, i + 1)) for level, i in enumerate(inside)]
    levels = dict(recipe.levels)
    for name, extra in (("fold", fold), ("unfold", unfold)):
        extra.sort(key=lambda step: step.level)
        if extra:
            levels[name] = extra[-1].level + 1
    cuts = None if recipe.cuts is None else tuple(before[c] for c in recipe.cuts)
    return replace(recipe, n=ends[-1], steps=(*fold, *steps, *unfold), levels=levels, cuts=cuts)


# A recipe for n equal square dense blocks as a few kernel calls, each of a whole level or chain.
#
# Matrices are addressed as (stack, position): stack 0 is the data itself, and every level of products and every
# reduction has its own stack. Vectors are addressed by their position p in ``y``, where ``y[0] = g``.

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
    """Linear scans over ``stack[a][first:last]``, cut at `chunk_ptr`; chunk c starts from ``y[x_index[c]]``.

    The k-th product goes to ``y[out + k]``, or to ``y[out[k]]`` if the positions are not contiguous.
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
    """Kernel calls in order, and the number of matrices in each stack of products (stack 1 first)."""

    operations: tuple[Operation, ...]
    stacks: tuple[int, ...]

    @property
    def scratch(self) -> int:
        """Vectors of scratch: results of a chain that are not contiguous in ``y``, and starts of several chains."""
        chains = [o for o in self.operations if isinstance(o, Linear)]
        spread = max((o.last - o.first for o in chains if isinstance(o.out, tuple)), default=0)
        return spread + max((len(o.x_index) for o in chains if len(o.x_index) > 1), default=0)

    def values(self, size: int, width: int, batch: int) -> int:
        """Values in all stacks and the scratch, for blocks of `size` × `size` with `width` values per entry."""
        return sum(self.stacks) * size * size * width + self.scratch * size * batch


def stack_program(recipe: Recipe) -> StackProgram:
    """Return the kernel calls of `recipe` over a stack of blocks: a level or a chain per call."""
    if recipe.cuts is not None:
        return _chunked_program(recipe.n, recipe.cuts)
    if not recipe.steps or recipe.steps[0].phase == "linear":
        return StackProgram((Linear(0, 0, recipe.n, (0, recipe.n), (0,), 1),), ())
    address: dict[Span, Address] = {Span(i + 1, i + 2): (0, i) for i in range(recipe.n)}
    operations: list[Operation] = []
    stacks: list[int] = []
    for (_, phase), group in groupby(recipe.steps, key=itemgetter(0, 1)):
        steps = list(group)
        vectors, matrices = [s for s in steps if s.kind == "mv"], [s for s in steps if s.kind == "mm"]
        if phase == "middle":  # its blocks lie side by side in the stack of the last up-sweep level
            stack, first = address[steps[0].right]
            ends, chunk_ptr = tuple(s.right.stop - 1 for s in steps), (0, len(steps))
            operations.append(Linear(stack, first, first + len(steps), chunk_ptr, (steps[0].left.stop - 1,), ends))
            continue
        if matrices:  # products of one level all take their operands from the stack of the level before
            stacks.append(len(matrices))
            right, left = [address[s.right] for s in matrices], [address[s.left] for s in matrices]
            address.update((s.target, (len(stacks), i)) for i, s in enumerate(matrices))
            indices = [i for _, i in right], [i for _, i in left]
            operations.append(Matmul(right[0][0], indices[0], left[0][0], indices[1], len(stacks)))
        if vectors:
            right = [address[s.right] for s in vectors]
            x_index, out_index = [s.left.stop - 1 for s in vectors], [s.right.stop - 1 for s in vectors]
            operations.append(Matvec(right[0][0], [i for _, i in right], x_index, out_index))
    return StackProgram(tuple(operations), tuple(stacks))


def _chunked_program(n: int, cuts: tuple[int, ...]) -> StackProgram:
    """Reduce, combine, apply in one call each, and one more for the first chunk, which works with vectors.

    The last product of every inner chunk is made twice, by the combination and by the chunk's chain: an unbroken chain
    saves more than omitting that product.
    """
    count = len(cuts) - 1
    first = Linear(0, 0, cuts[1], (0, cuts[1]), (0,), 1)
    if count == 1:
        return StackProgram((first,), ())
    rest = Linear(0, cuts[1], n, tuple(c - cuts[1] for c in cuts[1:]), cuts[1:-1], cuts[1] + 1)
    if count == 2:
        return StackProgram((first, rest), ())
    inner = Reduce(cuts[1], cuts[-2], tuple(c - cuts[1] for c in cuts[1:-1]))
    combination = Linear(1, 0, count - 2, (0, count - 2), (cuts[1],), cuts[2:-1])
    return StackProgram((first, inner, combination, rest), (count - 2,))
