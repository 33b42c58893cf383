"""The linear scan: one matrix–vector product after the other, which is back-propagation itself (BPPSA Eq. 3)."""

from __future__ import annotations

from sparsebp.scan.steps import AbstractStep, Recipe, Span


def linear(n: int) -> Recipe:
    """Return the n matrix–vector products ``y_i = J_i y_{i-1}``; each is a level of its own."""
    steps = tuple(AbstractStep(i, "linear", Span(0, i + 1), Span(i + 1, i + 2)) for i in range(n))
    return Recipe("linear", n, steps, {"linear": n})
