"""``backward="auto"`` of a chain: layer by layer, or a scan, by estimates that depend on shapes and masks alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp.core.errors import MemoryLimitError
from sparsebp.nn.recurrent.back.backward import BackwardOptions
from sparsebp.nn.work import Work


class ChainChoice(NamedTuple):
    """Whether a stretch is scanned, why, and the estimated seconds of ``"bp"`` and of scans with their values."""

    scans: bool
    reason: str
    estimates: dict[str, float]


def choose_chain_backward(
    works: Sequence[Work], batch: int, dtype: np.dtype, xp: ModuleType, options: BackwardOptions,
    jacobians: Callable[[], list[Any]], plan: Callable[[list[Any]], Any],
) -> ChainChoice:  # fmt: skip
    """Compare estimates of the same machine model: layer by layer, the least that any scan takes, the scans themselves.

    Parameters
    ----------
    works
        Costs of the layers' `input_grad`.
    batch, dtype, xp, options
        What they are for; `options` give the workers and the memory limit.
    jacobians
        Returns the transposed Jacobians that are not the identity. Called only where `works` do not tell already that
        no scan can be as fast: their patterns may be large.
    plan
        Plans the scan over them; called only if a scan is taken.
    """
    from sparsebp.backend.machine import machine
    from sparsebp.scan.layerwise import MARGIN, layerwise_seconds, least_scan_seconds, values_seconds
    from sparsebp.scan.plan import estimate_scans

    m, itemsize, limit = machine(xp, options.workers), np.dtype(dtype).itemsize, options.memory_limit
    layerwise = layerwise_seconds(((w.flops, w.values, w.calls) for w in works), m, itemsize)
    entries = sum(work.entries for work in works)
    workers = f"{m.workers} worker{'s' if m.workers != 1 else ''}"
    size = f"the gradients at {len(works)} layers' inputs, batch {batch} ({m.name}, {workers})"

    def layer_by_layer(why: str) -> ChainChoice:
        return ChainChoice(False, f"Layer by layer: {_time(layerwise)} estimated for {size}; {why}.", {"bp": layerwise})

    beyond = layer_by_layer(f"no scan keeps to memory_limit, {limit} bytes")
    least = least_scan_seconds(entries, batch, m, itemsize)
    if least > MARGIN * layerwise:
        return layer_by_layer(f"no scan takes less than {_time(least)}, over {entries} entries of Jacobians")
    if limit is not None and entries * itemsize > limit:
        return beyond
    moving = jacobians()
    if not moving:
        return layer_by_layer("no layer changes a gradient, there is nothing to scan")
    rest = None if limit is None else limit - sum(j.data.nbytes for j in moving)
    if rest is not None and rest < 0:
        return beyond
    values = values_seconds((j.data.size for j in moving), m, itemsize)
    shared = [j.batch is None for j in moving]
    try:
        times = estimate_scans(
            [j.pattern for j in moving], options.workers, rest, batch=batch, dtype=dtype, shared=shared, xp=xp
        )
        if times and min(times.values()) + values <= MARGIN * layerwise:
            times = plan(moving).estimates or times  # what planning left, estimates of memory are rough
    except MemoryLimitError:
        times = {}
    if not times:
        return beyond
    scan = min(times, key=lambda name: times[name])
    estimates = {"bp": layerwise} | {name: values + t for name, t in times.items()}
    found = f"{_time(times[scan])} and {_time(values)} for the Jacobians' values"
    if estimates[scan] <= MARGIN * layerwise:
        reason = f"By scan: {found} estimated for {size}; layer by layer {_time(layerwise)}."
        return ChainChoice(True, reason, estimates)
    refused = f"the fastest scan, {scan}, takes {found}, more than {MARGIN:.0%} of that"
    return layer_by_layer(refused)._replace(estimates=estimates)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"
