"""Folding: diagonal and selection elements join their neighbour, so that a conv–ReLU–pool block is one element.

A product with a diagonal is a scaling, one with a selection (a max-pooling's transposed Jacobian: at most one entry a
row) hardly more, and neither makes its neighbour denser. Left to themselves they would take levels of the tree. So the
chain is cut after every other element, an algorithm runs over the pieces, and here its steps are put in terms of the
chain's own positions:

- a piece that the algorithm multiplies with a matrix is multiplied together first (phase ``fold``);
- a piece that it multiplies with a vector is applied member by member, which costs less than the folded matrix, whose
  values are per sample as soon as one member's are, and gives the gradients inside the piece on the way;
- what is left inside of pieces follows last, from the vector that enters the piece (phase ``unfold``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from sparsebp.patterns import SparsityPattern
from sparsebp.scan.steps import AbstractStep, Recipe, Span

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
