"""Memory limits: an algorithm that needs too much is refused before anything is allocated, with one named that fits."""

from __future__ import annotations

from sparsebp.core.errors import MemoryLimitError
from sparsebp.scan.planning.candidates import Candidate, candidates
from sparsebp.scan.planning.fill_in import FillIn
from sparsebp.scan.planning.sizing import SizedRecipe
from sparsebp.scan.running.chain import Chain


def build_within(candidate: Candidate, chain: Chain, memory_limit: int | None) -> SizedRecipe:
    """Size `candidate`; beyond the limit raise an error that names an algorithm which keeps to it."""
    fill_in = FillIn()
    try:
        return chain.build(candidate, memory_limit, fill_in)
    except MemoryLimitError as error:
        raise refusal(candidate, chain, memory_limit, error, fill_in) from error


def refusal(
    candidate: Candidate,
    chain: Chain,
    memory_limit: int | None,
    error: MemoryLimitError,
    fill_in: FillIn | None = None,
) -> MemoryLimitError:
    """Return the error for a candidate that needs too much memory; it names the nearest algorithm that does not."""
    fill_in = fill_in or FillIn()
    nearest = [c for c in reversed(candidates(len(chain.ends), ())) if c.algorithm == "hybrid"]
    if candidate.algorithm == "hybrid":
        nearest = [c for c in nearest if (c.up_levels or 0) < (candidate.up_levels or 0)]
    if candidate.algorithm == "linear":
        nearest = []
    for other in [*nearest, Candidate("linear")]:
        try:
            fits = chain.build(other, memory_limit, fill_in)
        except MemoryLimitError:
            continue
        return MemoryLimitError(
            error.problem,
            expected=f"at most {memory_limit} bytes",
            got=error.got,
            remedy=f"Use {other.arguments}, which needs {fits.memory} bytes, or raise memory_limit",
        )
    least = chain.build(Candidate("linear"), None).memory
    return MemoryLimitError(
        error.problem,
        expected=f"at most {memory_limit} bytes",
        got=error.got,
        remedy=f"No algorithm fits: the least is algorithm='linear' with {least} bytes. "
        "Raise memory_limit to that, or make the batch smaller",
    )
