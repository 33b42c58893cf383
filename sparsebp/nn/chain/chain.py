"""Back-propagation through a chain of layers: one input gradient after the other, or a scan over Jacobians.

The scan takes the place of the chain of I (BPPSA §3.1): the layers' transposed Jacobians are its elements, their values
new at every step, while patterns and plans are made once. The rest of the package has the batch first, a scan has it
last; gradients are turned around here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any, cast

import numpy as np

from sparsebp import backend
from sparsebp.core.errors import MemoryLimitError
from sparsebp.core.types import Array, ScanAlgorithm
from sparsebp.nn.chain.link import Link
from sparsebp.nn.chain.verdict import Verdict, Verdicts
from sparsebp.nn.gradients import Gradients
from sparsebp.nn.jacobian import jacobian_of
from sparsebp.nn.recurrent.backward import BackwardOptions


def chain_gradients(
    links: Sequence[Link], last: Gradients, options: BackwardOptions | None, verdicts: Verdicts
) -> tuple[Array, list[Gradients]]:
    """Return the gradient at the input of the first link, and the `Gradients` of every link.

    Parameters
    ----------
    links
        In the order of forward.
    last
        The gradients of the last one.
    options
        How to scan; None: one input gradient after the other.
    verdicts
        What ``"auto"`` has decided for this chain.

    Notes
    -----
    Stretches of layers are scanned each by itself; a layer between them that couples the samples has no Jacobian and
    runs its `input_grad`, and so does one that stands alone, for which there is nothing to scan.

    Raises
    ------
    MemoryLimitError
        Jacobians and scan of a stretch need more than the options' limit.
    """
    gy, found = last.gy, list[Gradients]()  # from the last link to the first

    def met(link: Link) -> Gradients:
        found.append(link.layer.gradients(gy, link.saved) if found else last)
        return found[-1]

    for scannable, stretch in _stretches(links):
        if options is not None and scannable and _verdict(stretch, gy, options, verdicts).scans:
            for link, at_input in zip(stretch, _scan(stretch, gy, options), strict=True):
                met(link)
                gy = at_input
        else:
            for link in stretch:
                gy = met(link).input_grad()
    return gy, found[::-1]


def chain_plans(links: Sequence[Link], like: Array, options: BackwardOptions | None, verdicts: Verdicts) -> list[Any]:
    """Return a `ScanPlan`, or a `LayerByLayer`, for every stretch that could be scanned, from the last to the first.

    `like` is an array of the gradient's dtype, on its device. There is nothing to return if `options` is None.
    """
    from sparsebp.scan.layerwise import LayerByLayer

    if options is None:
        return []
    plans: list[Any] = []
    for scannable, stretch in _stretches(links):
        if not scannable:
            continue
        verdict = _verdict(stretch, like, options, verdicts)
        if not verdict.scans:
            plans.append(LayerByLayer(verdict.reason, verdict.estimates))
        elif moving := _moving(_jacobians(stretch, like)):
            plan = _plan_within(options, moving, stretch[0].shape[0])
            if options.algorithm == "auto":  # the plan may serve another chain, for another reason
                plan = copy(plan)
                plan.reason, plan.estimates = f"{verdict.reason} {plan.reason}", verdict.estimates
            plans.append(plan)
    return plans


def _verdict(stretch: Sequence[Link], like: Array, options: BackwardOptions, verdicts: Verdicts) -> Verdict:
    """Return what ``"auto"`` takes for a stretch; all other options are scans."""
    if options.algorithm != "auto":
        return Verdict(True, f"backward={options.algorithm!r} was asked for.", {})
    return verdicts.of(
        stretch, like, options, lambda: _moving(_jacobians(stretch, like)),
        lambda moving: _plan_within(options, moving, stretch[0].shape[0]),
    )  # fmt: skip


def _stretches(links: Sequence[Link]) -> Iterator[tuple[bool, list[Link]]]:
    """Yield ``(whether it can be scanned, links from last to first)`` from the last stretch to the first."""
    for alone, group in groupby(reversed(links), _stands_alone):
        stretch = list(group)
        samples = stretch[0].shape[0]
        yield not alone and len(stretch) > 1 and samples > 0, stretch


def _stands_alone(link: Link) -> bool:
    """Whether a layer has no Jacobian a sample that a scan could chain: its samples meet, or are not on axis 0."""
    return link.layer.couples_samples(link.saved) or link.layer.batch_axes != (0, 0)


def _jacobians(stretch: Sequence[Link], like: Array) -> list[Any]:
    return [jacobian_of(*link, like) for link in stretch]


def _moving(jacobians: Sequence[Any]) -> list[Any]:
    """Return the Jacobians that change a gradient."""
    return [j for j in jacobians if not _is_identity(j)]


def _is_identity(jacobian: Any) -> bool:
    return jacobian.pattern.kind == "identity"


def _scan(stretch: Sequence[Link], gy: Array, options: BackwardOptions) -> list[Array]:
    """Return the gradients at the inputs of `stretch`, which goes from the last layer to the first."""
    batch = gy.shape[0]
    y = backend.namespace(gy).ascontiguousarray(gy.reshape(batch, -1).T)
    jacobians = _jacobians(stretch, gy)
    moving = _moving(jacobians)
    results = iter(_plan_within(options, moving, batch)(y, [j.data for j in moving]) if moving else [])
    gradients = []
    for link, jacobian in zip(stretch, jacobians, strict=True):
        if not _is_identity(jacobian):
            y = next(results)
        gradients.append(y.T.reshape(link.shape))
    return gradients


def _plan_within(options: BackwardOptions, moving: Sequence[Any], batch: int) -> Any:
    """Return the plan for these Jacobians, none of them an identity, if they and the scan fit into the memory limit."""
    first = moving[0].data
    stored = sum(j.data.nbytes for j in moving)
    limit = options.memory_limit
    try:
        return _plan(
            tuple(j.pattern for j in moving), tuple(j.batch is None for j in moving), batch, first.dtype,
            backend.namespace(first), options, None if limit is None else max(limit - stored, 0),
        )  # fmt: skip
    except MemoryLimitError as error:
        raise MemoryLimitError(
            f"backward={options.algorithm!r} needs too much memory for {len(moving)} layers and B = {batch}",
            expected=f"at most {limit} bytes (memory_limit)",
            got=f"{stored} bytes of Jacobians, and for the scan {error.got}",
            remedy=f"{error.remedy} (memory_limit less the Jacobians), or use backward='bp', which stores none",
        ) from error


@lru_cache(maxsize=8)  # a plan keeps its buffers, gigabytes for large nets; one for each stretch and batch size
def _plan(
    patterns: tuple[Any, ...], shared: tuple[bool, ...], batch: int, dtype: np.dtype, xp: ModuleType,
    options: BackwardOptions, memory_limit: int | None,
) -> Any:  # fmt: skip
    from sparsebp.scan import plan_scan

    chunks = options.chunks if options.algorithm == "chunked" else None
    up_levels = options.up_levels if options.algorithm == "hybrid" else None
    return plan_scan(
        patterns, algorithm=cast(ScanAlgorithm, options.algorithm), workers=options.workers,
        up_levels=up_levels, chunks=chunks, memory_limit=memory_limit, batch=batch, dtype=dtype, shared=shared, xp=xp,
    )  # fmt: skip
