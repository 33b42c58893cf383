"""Back-propagation through a chain of layers: one input gradient after the other, or a scan over Jacobians.

The scan takes the place of the chain of I (BPPSA §3.1): the layers' transposed Jacobians are its elements, their values
new at every step, while patterns and plans are made once. The rest of the package has the batch first, a scan has it
last; gradients are turned around here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend
from sparsebp.errors import MemoryLimitError
from sparsebp.nn.backward import BackwardOptions
from sparsebp.nn.layer import Layer
from sparsebp.types import Array


class Link(NamedTuple):
    """A layer of a chain, what it saved, and the shape of its input."""

    layer: Layer
    saved: Any
    shape: tuple[int, ...]


def chain_gradients(links: Sequence[Link], gy: Array, options: BackwardOptions | None) -> list[Array]:
    """Return the gradient at the input of every link.

    Parameters
    ----------
    links
        In the order of forward.
    gy
        Gradient with respect to the output of the last one, batch first.
    options
        How to scan; None: one `input_grad` after the other.

    Returns
    -------
    list of arrays
        In the order of `links`, each of its link's shape.

    Notes
    -----
    Stretches of layers are scanned each by itself; a layer between them that couples the samples has no Jacobian and
    runs its `input_grad`, and so does one that stands alone, for which there is nothing to scan.

    Raises
    ------
    MemoryLimitError
        Jacobians and scan of a stretch need more than the options' limit.
    """
    gradients = [gy]  # from the last link to the first
    for scannable, stretch in _stretches(links):
        if options is not None and scannable:
            gradients += _scan(stretch, gradients[-1], options)
        else:
            for link in stretch:
                gradients.append(link.layer.input_grad(gradients[-1], link.saved))
    return gradients[:0:-1]


def chain_plans(links: Sequence[Link], options: BackwardOptions | None) -> list[Any]:
    """Return the `ScanPlan` of every stretch that `chain_gradients` scans, from the last one to the first."""
    if options is None:
        return []
    plans = []
    for scannable, stretch in _stretches(links):
        jacobians = _jacobians(stretch) if scannable else []
        if any(not _is_identity(j) for j in jacobians):
            plans.append(_plan_within(options, jacobians, stretch[0].shape[0]))
    return plans


def _stretches(links: Sequence[Link]) -> Iterator[tuple[bool, list[Link]]]:
    """Yield ``(whether it can be scanned, links from last to first)`` from the last stretch to the first."""
    for coupled, group in groupby(reversed(links), lambda link: link.layer.couples_samples(link.saved)):
        stretch = list(group)
        yield not coupled and len(stretch) > 1, stretch


def _jacobians(stretch: Sequence[Link]) -> list[Any]:
    return [link.layer.jacobian_t(link.saved) for link in stretch]


def _is_identity(jacobian: Any) -> bool:
    return jacobian.pattern.kind == "identity"


def _scan(stretch: Sequence[Link], gy: Array, options: BackwardOptions) -> list[Array]:
    """Return the gradients at the inputs of `stretch`, which goes from the last layer to the first."""
    batch = gy.shape[0]
    y = backend.namespace(gy).ascontiguousarray(gy.reshape(batch, -1).T)
    jacobians = _jacobians(stretch)
    moving = [j for j in jacobians if not _is_identity(j)]
    results = iter(_plan_within(options, moving, batch)(y, [j.data for j in moving]) if moving else [])
    gradients = []
    for link, jacobian in zip(stretch, jacobians, strict=True):
        if not _is_identity(jacobian):
            y = next(results)
        gradients.append(y.T.reshape(link.shape))
    return gradients


def _plan_within(options: BackwardOptions, jacobians: Sequence[Any], batch: int) -> Any:
    """Return the plan for these Jacobians, identities left out, if they and the scan fit into the memory limit."""
    moving = [j for j in jacobians if not _is_identity(j)]
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


@lru_cache(maxsize=64)  # a plan keeps its buffers; a net has one for each stretch and batch size
def _plan(
    patterns: tuple[Any, ...], shared: tuple[bool, ...], batch: int, dtype: np.dtype, xp: ModuleType,
    options: BackwardOptions, memory_limit: int | None,
) -> Any:  # fmt: skip
    from sparsebp.scan import plan_scan

    chunks = options.chunks if options.algorithm == "chunked" else None
    up_levels = options.up_levels if options.algorithm == "hybrid" else None
    return plan_scan(
        patterns, algorithm=options.algorithm, workers=chunks or options.workers, up_levels=up_levels,
        memory_limit=memory_limit, batch=batch, dtype=dtype, shared=shared, xp=xp,
    )  # fmt: skip
