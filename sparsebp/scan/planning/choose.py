"""Choose among algorithms: estimate all, plan the one with the least estimated time that keeps to the memory limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsebp.backend.machine import Machine
from sparsebp.core.errors import MemoryLimitError
from sparsebp.scan.planning.candidates import Candidate
from sparsebp.scan.planning.cost import profile_costs, seconds, sized_seconds
from sparsebp.scan.planning.fill_in import FillIn
from sparsebp.scan.planning.sizing import SizedRecipe, is_stack
from sparsebp.scan.running.chain import Chain


@dataclass(frozen=True)
class Decision:
    """What `choose` found: the sized winner, why, and the estimates in seconds by candidate."""

    sized: SizedRecipe
    reason: str
    estimates: Mapping[str, float]


def choose(options: Sequence[Candidate], chain: Chain, m: Machine, memory_limit: int) -> Decision:
    """Return the fastest of `options` that keeps to the memory limit; of equals the first.

    Raises
    ------
    MemoryLimitError
        None does.
    """
    times, dropped = estimate(options, chain, m, memory_limit)
    fill_in = FillIn()
    for option in sorted(times, key=lambda o: times[o]):
        try:
            best = chain.build(option, memory_limit, fill_in)
        except MemoryLimitError:
            dropped.append(str(option))
            continue
        estimates = {str(o): t for o, t in times.items() if str(o) not in dropped}
        return Decision(best, _reason(best, estimates, dropped, m, chain, memory_limit), estimates)
    raise MemoryLimitError(f"Of {', '.join(dropped)}, none keeps to memory_limit", expected=f"{memory_limit} bytes")


class _TooSlow(Exception):
    """A candidate's FLOPs alone take longer than the best so far; its products are not worth a look."""


def estimate(
    options: Sequence[Candidate], chain: Chain, m: Machine, memory_limit: int
) -> tuple[dict[Candidate, float], list[str]]:
    """Return the estimated seconds of each option that may be the best, and those beyond the memory limit."""
    sizes, times = chain.sizes, dict[Candidate, float]()
    if is_stack(chain.patterns):
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
            sized = chain.estimate(option, fill_in, memory_limit, watch)
        except MemoryLimitError:
            dropped.append(str(option))
        except _TooSlow:
            pass
        else:
            times[option] = sized_seconds(sized, m, sizes.itemsize)
            least = min(least, times[option])
    return times, dropped


def _reason(
    best: SizedRecipe, estimates: Mapping[str, float], dropped: Sequence[str], m: Machine, chain: Chain, limit: int
) -> str:
    """Say in one or two sentences why `best` was taken."""
    name = best.recipe.algorithm
    order = sorted(estimates.items(), key=lambda pair: pair[1])
    shown = ", ".join(f"{key} {1e6 * value:.4g} µs" for key, value in order[:4])
    reason = (
        f"{name} has the least estimated time of a call on a {m.name} "
        f"({m.workers} worker{'s' if m.workers != 1 else ''}) "
        f"for {len(chain.patterns)} Jacobians and batch {chain.sizes.batch}: {shown}."
    )
    if name == "linear":
        reason += " The others multiply matrices, which is more work than these workers save time."
    if dropped:
        reason += f" Left out, beyond {limit} bytes: {', '.join(dropped)}."
    return reason
