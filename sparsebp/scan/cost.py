"""The cost model: how long an algorithm should take on a machine, and which one to take.

A level of independent products, split into one task a product and vector of samples, takes at least as long as its
longest task, as its work shared out over the workers that find a task, and as its bytes over their bandwidth; each
kernel call adds its own time (BPPSA §3.6 counts the first two: step and work complexity). A chain adds its steps up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from sparsebp.errors import MemoryLimitError
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.algorithms import recipe, tree_levels
from sparsebp.scan.machine import Machine, calibrated, machine
from sparsebp.scan.profile import profile
from sparsebp.scan.recurrent import Choice, choose_recurrent_backward
from sparsebp.scan.sizing import Products, SizedRecipe, Sizes, is_stack, size_recipe
from sparsebp.scan.steps import CHAIN_PHASES

__all__ = [
    "Candidate",
    "Choice",
    "Decision",
    "LevelCost",
    "Machine",
    "calibrated",
    "candidates",
    "choose",
    "choose_recurrent_backward",
    "machine",
    "profile_costs",
    "seconds",
    "sized_costs",
]

INDEX_BUDGET = 2**30
"""Bytes of product index that `choose` is ready to plan for an algorithm where no memory limit is given."""


class Candidate(NamedTuple):
    """An algorithm with its parameter."""

    algorithm: str
    up_levels: int | None = None
    chunks: int | None = None

    def __str__(self) -> str:
        """As the arguments of `plan_scan`, shortened."""
        if self.up_levels is not None:
            return f"{self.algorithm} (up_levels={self.up_levels})"
        return self.algorithm if self.chunks is None else f"{self.algorithm} (workers={self.chunks})"

    @property
    def arguments(self) -> str:
        """As the arguments of `plan_scan`."""
        extra = "" if self.up_levels is None else f", up_levels={self.up_levels}"
        extra += "" if self.chunks is None else f", workers={self.chunks}"
        return f"algorithm={self.algorithm!r}{extra}"


class LevelCost(NamedTuple):
    """Work of one level, or of one chain.

    Attributes
    ----------
    calls, rounds, products
        Kernel calls, dependent rounds, and products; ``products / rounds`` of them can run at the same time.
    longest
        FLOPs a sample along the longest dependence.
    flops, bytes
        Of the whole batch.
    """

    calls: int
    rounds: int
    products: int
    longest: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class Decision:
    """What `choose` found: the sized winner, why, and the estimates in seconds by candidate."""

    sized: SizedRecipe
    reason: str
    estimates: Mapping[str, float]


def seconds(levels: Iterable[LevelCost], m: Machine, batch: int, itemsize: int) -> float:
    """Return the estimated time of one call on machine `m`."""
    rate, lanes = m.rate(itemsize), m.lanes(itemsize)
    total = 0.0
    for level in levels:
        path = level.rounds * m.step + level.longest * min(lanes, batch) / rate
        tasks = level.products * -(-batch // lanes)
        busy = min(m.workers, -(-tasks // level.rounds))
        work = max(tasks * m.step + level.flops / rate, level.bytes / (m.bandwidth / m.workers)) / busy
        total += level.calls * m.call + max(path, work)
    return total


def sized_costs(sized: SizedRecipe, sizes: Sizes) -> list[LevelCost]:
    """Return the costs by level of a recipe that runs one kernel call a step."""
    costs = []
    numbered = list(enumerate(sized.recipe.steps))
    for (_, phase), group in groupby(numbered, key=lambda pair: (pair[1].level, pair[1].phase)):
        numbers = [number for number, _ in group]
        flops = [sized.flops[i] for i in numbers]
        chain = phase in CHAIN_PHASES
        costs.append(
            LevelCost(
                calls=len(numbers),
                rounds=len(numbers) if chain else 1,
                products=len(numbers),
                longest=(sum(flops) if chain else max(flops)) / sizes.batch,
                flops=sum(flops),
                bytes=sum(sized.bytes[i] for i in numbers),
            )
        )
    return costs


def profile_costs(candidate: Candidate, n: int, size: int, sizes: Sizes) -> list[LevelCost]:
    """Return the costs by level for n stacked dense blocks of `size` × `size`: one kernel call a level or chain."""
    width = 1 if all(sizes.shared) else sizes.batch
    costs = []
    levels = profile(candidate.algorithm, n, up_levels=candidate.up_levels or 0, workers=candidate.chunks or 1)
    for level in levels:
        mm, mv = 2 * size**3, 2 * size**2
        costs.append(
            LevelCost(
                calls=1 if level.mm == 0 or level.mv == 0 else 2,
                rounds=level.rounds,
                products=level.mm + level.mv,
                longest=level.rounds * (mm if level.mm else mv),
                flops=level.mm * mm * width + level.mv * mv * sizes.batch,
                bytes=(2 * level.mm + level.mm + level.mv) * size**2 * width * sizes.itemsize,
            )
        )
    return costs


def candidates(n: int, chunks: Sequence[int]) -> list[Candidate]:
    """Return every algorithm that differs from the others for n Jacobians, the cheapest to plan first."""
    depth = tree_levels(n)
    found = [Candidate("linear")]
    found += [Candidate("chunked", chunks=c) for c in chunks if 3 <= c <= n]  # fewer chunks are the linear scan
    found += [Candidate("hybrid", up_levels=k) for k in range(1, depth - 1)]
    return [*found, Candidate("blelloch")] if n > 1 else found


def build(
    candidate: Candidate,
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    products: Products,
    memory_limit: int | None = None,
) -> SizedRecipe:
    """Size one candidate. Raises `MemoryLimitError` beyond the limit."""
    steps = recipe(candidate.algorithm, len(patterns), up_levels=candidate.up_levels, workers=candidate.chunks or 1)
    return size_recipe(steps, patterns, sizes, products, memory_limit=memory_limit)


def choose(
    options: Sequence[Candidate],
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    m: Machine,
    products: Products,
    memory_limit: int | None = None,
) -> Decision:
    """Return the fastest of `options` that keeps to the memory limit; of equals the first.

    Raises
    ------
    MemoryLimitError
        None does.
    """
    if is_stack(patterns):
        return _choose_stacked(options, patterns, sizes, m, products, memory_limit)
    limit = INDEX_BUDGET if memory_limit is None else memory_limit
    estimates: dict[str, float] = {}
    dropped: list[str] = []
    best: SizedRecipe | None = None
    least = float("inf")
    for option in options:
        steps = recipe(option.algorithm, len(patterns), up_levels=option.up_levels, workers=option.chunks or 1)
        bound = least * m.rate(sizes.itemsize) * m.workers

        def watch(flops: int, bound: float = bound) -> None:
            if flops > bound:
                raise _TooSlow

        try:
            sized = size_recipe(
                steps,
                patterns,
                sizes,
                products,
                memory_limit=memory_limit if option.algorithm == "linear" else limit,
                watch=watch,
            )
        except MemoryLimitError:
            dropped.append(str(option))
            continue
        except _TooSlow:
            continue
        estimates[str(option)] = time = seconds(sized_costs(sized, sizes), m, sizes.batch, sizes.itemsize)
        if time < least:
            best, least = sized, time
    if best is None:
        raise _nothing_fits(dropped, memory_limit)
    return Decision(best, _reason(best, estimates, dropped, m, len(patterns), sizes, limit), estimates)


class _TooSlow(Exception):
    """A candidate's FLOPs alone take longer than the best so far; its products are not worth planning."""


def _choose_stacked(
    options: Sequence[Candidate],
    patterns: Sequence[SparsityPattern],
    sizes: Sizes,
    m: Machine,
    products: Products,
    memory_limit: int | None,
) -> Decision:
    size = patterns[0].shape[0]
    times = {o: seconds(profile_costs(o, len(patterns), size, sizes), m, sizes.batch, sizes.itemsize) for o in options}
    dropped: list[str] = []
    for option in sorted(options, key=lambda o: times[o]):
        try:
            best = build(option, patterns, sizes, products, memory_limit)
        except MemoryLimitError:
            dropped.append(str(option))
            continue
        estimates = {str(o): t for o, t in times.items() if str(o) not in dropped}
        return Decision(best, _reason(best, estimates, dropped, m, len(patterns), sizes, memory_limit or 0), estimates)
    raise _nothing_fits(dropped, memory_limit)


def _nothing_fits(dropped: Sequence[str], memory_limit: int | None) -> MemoryLimitError:
    return MemoryLimitError(f"Of {', '.join(dropped)}, none keeps to memory_limit", expected=f"{memory_limit} bytes")


def _reason(
    best: SizedRecipe,
    estimates: Mapping[str, float],
    dropped: Sequence[str],
    m: Machine,
    n: int,
    sizes: Sizes,
    limit: int,
) -> str:
    """Say in one or two sentences why `best` was taken."""
    name = best.recipe.algorithm
    order = sorted(estimates.items(), key=lambda pair: pair[1])
    shown = ", ".join(f"{key} {1e6 * value:.4g} µs" for key, value in order[:4])
    reason = (
        f"{name} has the least estimated time on a {m.name} ({m.workers} worker{'s' if m.workers != 1 else ''}) "
        f"for {n} Jacobians and batch {sizes.batch}: {shown}."
    )
    if name == "linear":
        reason += " The others multiply matrices, which is more work than these workers save time."
    if dropped:
        reason += f" Left out, beyond {limit} bytes: {', '.join(dropped)}."
    return reason
