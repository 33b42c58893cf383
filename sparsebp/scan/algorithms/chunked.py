"""Reduce-then-scan: every worker reduces a chunk, the chunks are combined, every worker runs its chunk with vectors.

The first chunk knows its incoming gradient and works with vectors from the start; the last chunk's product is needed by
nobody. So only the chunks between multiply matrices, and with one or two chunks the scan is the linear one.
"""

from __future__ import annotations

from sparsebp.scan.steps import AbstractStep, Recipe, Span


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
