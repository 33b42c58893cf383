"""A recipe for n equal square dense blocks, turned into few kernel calls: a whole level, or a whole chain, per call.

Integers only. Matrices are addressed as (stack, position): stack 0 is the data itself, every level of products and
every reduction has a stack of its own. Vectors are addressed by their position p in ``y``, where ``y[0] = g``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from sparsebp.scan.steps import AbstractStep, Recipe, Span

Address: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Matmul:
    """A level of products: ``stack[out][s] = stack[right][right_index[s]] @ stack[left][left_index[s]]``."""

    right: int
    right_index: Sequence[int]
    left: int
    left_index: Sequence[int]
    out: int


@dataclass(frozen=True)
class Matvec:
    """A level of ``y[out_index[s]] = stack[a][a_index[s]] @ y[x_index[s]]``."""

    a: int
    a_index: Sequence[int]
    x_index: Sequence[int]
    out_index: Sequence[int]


@dataclass(frozen=True)
class Linear:
    """Linear scans over ``stack[a][first:last]``, cut at `chunk_ptr`; that of chunk c starts from ``y[x_index[c]]``.

    The k-th product goes to ``y[out + k]``, or to ``y[out[k]]`` where the positions do not lie side by side.
    """

    a: int
    first: int
    last: int
    chunk_ptr: Sequence[int]
    x_index: Sequence[int]
    out: int | tuple[int, ...]


@dataclass(frozen=True)
class Reduce:
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
        return _chunked(recipe.n, recipe.cuts)
    return _levels(recipe)


def _chunked(n: int, cuts: tuple[int, ...]) -> StackProgram:
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
