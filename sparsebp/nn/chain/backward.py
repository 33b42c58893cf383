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
from sparsebp.nn.chain.choice import ChainChoice, choose_chain_backward
from sparsebp.nn.chain.container import Link
from sparsebp.nn.gradients import Gradients, gradients_of
from sparsebp.nn.norms import clamped
from sparsebp.nn.recurrent.back.backward import BackwardOptions

KEPT = 8
"""Choices that a chain keeps: of a stretch for each batch size, and as long as no mask changes."""


class ChainBackward:
    """How one chain runs backward: by its options, and by what ``"auto"`` has chosen for its stretches.

    Stretches of layers are scanned each by itself; a layer between them that couples the samples has no Jacobian and
    runs its `input_grad`, and so does one that stands alone, for which there is nothing to scan.
    """

    def __init__(self, options: BackwardOptions) -> None:
        self.options = options
        self._chosen: dict[Any, ChainChoice] = {}

    def gradients(self, links: Sequence[Link], last: Gradients) -> tuple[Array, list[Gradients]]:
        """Return the gradient at the input of the first link, and the `Gradients` of every link.

        Parameters
        ----------
        links
            In the order of forward.
        last
            The gradients of the last one.

        Raises
        ------
        MemoryLimitError
            Jacobians and scan of a stretch need more than the options' limit.
        """
        gy, found = last.gy, list[Gradients]()  # from the last link to the first

        def met(link: Link) -> Gradients:
            found.append(gradients_of(link.layer, gy, link.saved) if found else last)
            return found[-1]

        for scannable, stretch in self._stretches(links):
            if scannable and self._choice(stretch, gy).scans:
                for link, at_input in zip(stretch, self._scan(stretch, gy), strict=True):
                    met(link)
                    gy = at_input
                continue
            ahead: Gradients | None = None  # of the next link, from the gradient at this one's output
            for link, before in zip(stretch, (*stretch[1:], None), strict=True):
                if ahead is None:
                    at = met(link)
                else:
                    found.append(at := ahead)
                ahead = _through(before, link, gy)
                if ahead is None:
                    gy = at.input_grad()
        return gy, found[::-1]

    def plans(self, links: Sequence[Link], like: Array) -> list[Any]:
        """Return a `ScanPlan` or `LayerByLayer` for every stretch that could be scanned, from the last to the first.

        `like` is an array of the gradient's dtype, on its device. There is nothing to return for ``"bp"``.
        """
        from sparsebp.scan.layerwise import LayerByLayer

        plans: list[Any] = []
        for scannable, stretch in self._stretches(links):
            if not scannable:
                continue
            choice = self._choice(stretch, like)
            if not choice.scans:
                plans.append(LayerByLayer(choice.reason, choice.estimates))
            elif moving := _moving(_jacobians(stretch, like)):
                plan = self._plan_within(moving, stretch[0].shape[0])
                if self.options.algorithm == "auto":  # the plan may serve another chain, for another reason
                    plan = copy(plan)
                    plan.reason, plan.estimates = f"{choice.reason} {plan.reason}", choice.estimates
                plans.append(plan)
        return plans

    def _stretches(self, links: Sequence[Link]) -> Iterator[tuple[bool, Sequence[Link]]]:
        """Yield ``(whether it can be scanned, links from last to first)`` from the last stretch to the first."""
        if self.options.algorithm == "bp":
            yield False, links[::-1]
            return
        for alone, group in groupby(reversed(links), _stands_alone):
            stretch = list(group)
            yield not alone and len(stretch) > 1 and stretch[0].shape[0] > 0, stretch

    def _choice(self, stretch: Sequence[Link], like: Array) -> ChainChoice:
        """Return what ``"auto"`` takes for a stretch, from the last layer to the first; all other options are scans."""
        if self.options.algorithm != "auto":
            return ChainChoice(True, f"backward={self.options.algorithm!r} was asked for.", {})
        xp, batch = backend.namespace(like), stretch[0].shape[0]
        layers = tuple((link.layer, link.shape, link.layer.training) for link in stretch)
        key = (layers, _masks(stretch), like.dtype, xp.__name__)  # modules cannot be copied
        if key not in self._chosen:
            choice = choose_chain_backward(
                [link.work() for link in stretch], batch, like.dtype, xp, self.options,
                lambda: _moving(_jacobians(stretch, like)), lambda moving: self._plan_within(moving, batch),
            )  # fmt: skip
            while len(self._chosen) >= KEPT:
                del self._chosen[next(iter(self._chosen))]
            self._chosen[key] = choice
        return self._chosen[key]

    def _scan(self, stretch: Sequence[Link], gy: Array) -> list[Array]:
        """Return the gradients at the inputs of `stretch`, which goes from the last layer to the first."""
        batch = gy.shape[0]
        y = backend.namespace(gy).ascontiguousarray(gy.reshape(batch, -1).T)
        jacobians = _jacobians(stretch, gy)
        moving = _moving(jacobians)
        results = iter(self._plan_within(moving, batch)(y, [j.data for j in moving]) if moving else [])
        gradients = []
        for link, jacobian in zip(stretch, jacobians, strict=True):
            if not _is_identity(jacobian):
                y = next(results)
            gradients.append(y.T.reshape(link.shape))
        return gradients

    def _plan_within(self, moving: Sequence[Any], batch: int) -> Any:
        """Return the plan for these Jacobians, none an identity, if they and the scan fit into the memory limit."""
        first = moving[0].data
        stored = sum(j.data.nbytes for j in moving)
        limit = self.options.memory_limit
        try:
            return _plan(
                tuple(j.pattern for j in moving), tuple(j.batch is None for j in moving), batch, first.dtype,
                backend.namespace(first), self.options, None if limit is None else max(limit - stored, 0),
            )  # fmt: skip
        except MemoryLimitError as error:
            raise MemoryLimitError(
                f"backward={self.options.algorithm!r} needs too much memory for {len(moving)} layers and B = {batch}",
                expected=f"at most {limit} bytes (memory_limit)",
                got=f"{stored} bytes of Jacobians, and for the scan {error.got}",
                remedy=f"{error.remedy} (memory_limit less the Jacobians), or use backward='bp', which stores none",
            ) from error


def _through(link: Link | None, behind: Link, gy: Array) -> Gradients | None:
    """Return the gradients of a link for `gy` at the output of the one behind it, where they go in one pass."""
    if link is None or not clamped.together(link.layer, behind.layer):
        return None
    return clamped.gradients(link.layer, behind.layer, gy, link.saved, behind.saved)


def _stands_alone(link: Link) -> bool:
    """Whether a layer has no Jacobian a sample that a scan could chain: its samples meet, or are not on axis 0."""
    return link.couples_samples() or link.layer.batch_axes != (0, 0) or link.lone()


def _masks(stretch: Sequence[Link]) -> tuple[bytes, ...]:
    """Return the masks of pruned weights, packed: with the layers, they say what the patterns are."""
    masks = (mask for link in stretch for _, layer in link.layer.modules() for mask in layer.masks())
    return tuple(np.packbits(backend.to_host(mask)).tobytes() for mask in masks)  # synchronize!


def _jacobians(stretch: Sequence[Link], like: Array) -> list[Any]:
    return [link.jacobian_t(like) for link in stretch]


def _moving(jacobians: Sequence[Any]) -> list[Any]:
    """Return the Jacobians that change a gradient."""
    return [j for j in jacobians if not _is_identity(j)]


def _is_identity(jacobian: Any) -> bool:
    return jacobian.pattern.kind == "identity"


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
