"""Choose among algorithms: estimate all, plan the one with the least estimated time that keeps to the memory limit.

Where none does, the error names the nearest algorithm that would; nothing of the scan's size has been allocated.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from sparsebp.core.errors import MemoryLimitError
from sparsebp.scan.algorithms import tree_levels
from sparsebp.scan.planning.candidates import Candidate
from sparsebp.scan.planning.cost import amount, profile_costs, seconds, sized_seconds
from sparsebp.scan.planning.fill_in import FillIn, Multiply
from sparsebp.scan.planning.sizing import Chain, SizedRecipe, size_recipe

MUCH = 100
"""Times the work of the linear scan from which an algorithm that was asked for is warned of before it is planned."""
DOUBT = 2.0
"""By how much an estimate of memory must pass the limit before it is believed without planning."""


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
    filled = _sized(option, chain, fill_in, round(DOUBT * memory_limit))
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


def _planned(candidate: Candidate, chain: Chain, fill_in: FillIn, memory_limit: int | None) -> SizedRecipe:
    """Plan one candidate. Raises `MemoryLimitError` beyond the limit, from estimates alone where they are clear."""
    if memory_limit is not None and candidate.multiplies and not chain.is_stack:
        _sized(candidate, chain, fill_in, round(DOUBT * memory_limit))
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
