"""The cost model: how long an algorithm should take on a machine.

One worker would take the **work** W₁ of all steps; unboundedly many, each step split over its rows, the **path** T∞ of
dependent steps. So P workers take at least ``max(T∞, W₁ / P)``, and no more than the sum of the two (R. Brent, "The
parallel evaluation of general arithmetic expressions", J. ACM 21, 1974; BPPSA §3.6 counts step and work complexity).
Each step adds a kernel call of its own; stacks of dense blocks run a whole level a call and are counted so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sparsebp.backend.machine import Machine
from sparsebp.scan.algorithms.counts import level_counts
from sparsebp.scan.planning.candidates import Candidate
from sparsebp.scan.planning.sizing import SizedRecipe, Sizes, StepCount
from sparsebp.scan.steps import Span


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


def seconds(levels: Iterable[LevelCost], m: Machine, batch: int, itemsize: int) -> float:
    """Return the estimated time of one call on machine `m` that runs a level at a time."""
    rate, lanes = m.rate(itemsize), m.lanes(itemsize)
    total = 0.0
    for level in levels:
        path = level.rounds * m.step + level.longest * min(lanes, batch) / rate
        tasks = level.products * -(-batch // lanes)
        busy = min(m.workers, -(-tasks // level.rounds))
        work = max(tasks * m.step + level.flops / rate, level.bytes / (m.bandwidth / m.workers)) / busy
        total += level.calls * m.call + max(path, work)
    return total


def work(count: StepCount, m: Machine, itemsize: int) -> float:
    """Return the seconds that one worker takes for one step."""
    return m.products(count.flops / 2, count.strategy, count.width, itemsize) + m.moved(count.bytes)


def step_seconds(count: StepCount, m: Machine, itemsize: int) -> float:
    """Return the time of one step that all workers share."""
    return m.call + work(count, m, itemsize) / max(1, min(m.workers, count.rows))


def sized_seconds(sized: SizedRecipe, m: Machine, itemsize: int) -> float:
    """Return the estimated time of one call that runs a kernel call a step."""
    finish: dict[Span, float] = {}
    total = 0.0
    for step, count in zip(sized.recipe.steps, sized.counts, strict=True):
        ready = max(finish.get(step.left, 0.0), finish.get(step.right, 0.0))
        finish[step.target] = ready + step_seconds(count, m, itemsize)
        total += m.call / m.issuers + work(count, m, itemsize) / m.workers
    return max((total, *finish.values()))


def profile_costs(candidate: Candidate, n: int, size: int, sizes: Sizes) -> list[LevelCost]:
    """Return the costs by level for n stacked dense blocks of `size` × `size`: one kernel call a level or chain."""
    width = 1 if all(sizes.shared) else sizes.batch
    costs = []
    levels = level_counts(candidate.algorithm, n, up_levels=candidate.up_levels or 0, chunks=candidate.chunks or 1)
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


def amount(value: float, unit: str) -> str:
    """Write a number with a metric prefix: ``1234567`` as ``1.23 M<unit>``."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
