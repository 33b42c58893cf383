"""Memory limits: an algorithm that needs too much is refused before anything is allocated, with one named that fits."""

from __future__ import annotations

from collections.abc import Sequence

from sparsebp.errors import MemoryLimitError
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.cost import Candidate, build, candidates
from sparsebp.scan.sizing import Products, SizedRecipe, Sizes


def build_within(
    candidate: Candidate,
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    products: Products,
    memory_limit: int | None,
) -> SizedRecipe:
    """Size `candidate`; beyond the limit raise an error that names an algorithm which keeps to it."""
    try:
        return build(candidate, patterns, sizes, products, memory_limit)
    except MemoryLimitError as error:
        raise refusal(candidate, patterns, sizes, products, memory_limit, error) from error


def refusal(
    candidate: Candidate,
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    products: Products,
    memory_limit: int | None,
    error: MemoryLimitError,
) -> MemoryLimitError:
    """Return the error for a candidate that needs too much memory; it names the nearest algorithm that does not."""
    n = len(patterns)
    nearest = [c for c in reversed(candidates(n, ())) if c.algorithm == "hybrid"]
    if candidate.algorithm == "hybrid":
        nearest = [c for c in nearest if (c.up_levels or 0) < (candidate.up_levels or 0)]
    if candidate.algorithm == "linear":
        nearest = []
    for other in [*nearest, Candidate("linear")]:
        try:
            fits = build(other, patterns, sizes, products, memory_limit)
        except MemoryLimitError:
            continue
        return MemoryLimitError(
            error.problem,
            expected=f"at most {memory_limit} bytes",
            got=error.got,
            remedy=f"Use {other.arguments}, which needs {fits.memory} bytes, or raise memory_limit",
        )
    least = build(Candidate("linear"), patterns, sizes, products).memory
    return MemoryLimitError(
        error.problem,
        expected=f"at most {memory_limit} bytes",
        got=error.got,
        remedy=f"No algorithm fits: the least is algorithm='linear' with {least} bytes. "
        "Raise memory_limit to that, or make the batch smaller",
    )
