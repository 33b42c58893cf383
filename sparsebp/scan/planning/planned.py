"""What has been planned of a scan: steps, costs, memory. Those who draw, describe, measure or run it need no more."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core.locks import cached_property
from sparsebp.patterns import SparsityPattern
from sparsebp.scan.planning.choose import Decision
from sparsebp.scan.planning.cost import step_seconds
from sparsebp.scan.planning.sizing import Chain
from sparsebp.scan.steps import ScanStep, Span, critical_path


class PlannedScan:
    """The plan of a scan over a chain of transposed Jacobians. Its attributes are stated in `sparsebp.ScanPlan`.

    Attributes
    ----------
    workspaces : list
        Buffers that calls leave to later ones.
    """

    def __init__(self, decision: Decision, chain: Chain, memory_limit: int | None) -> None:
        self.sized, self.reason, self.estimates = decision.sized, decision.reason, dict(decision.estimates)
        self.chain, self.memory_limit = chain, memory_limit
        self.workspaces: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        """Leave the workspaces out of copies and pickles: they know by address where this plan's arrays lie."""
        return self.__dict__ | {"workspaces": []}

    @property
    def patterns(self) -> tuple[SparsityPattern, ...]:
        """One a Jacobian, in the order of back-propagation."""
        return self.chain.patterns

    @property
    def elements(self) -> tuple[Span, ...]:
        """What the algorithm runs over: the Jacobians, or the pieces that they are folded into."""
        ends = self.chain.ends if {"fold", "unfold"} & set(self.levels) else range(1, len(self.patterns) + 1)
        return tuple(Span(first + 1, end + 1) for first, end in zip((0, *ends), ends, strict=False))

    @property
    def algorithm(self) -> str:
        """The algorithm that runs."""
        return self.sized.recipe.algorithm

    @property
    def up_levels(self) -> int | None:
        """Levels of the up-sweep of a hybrid scan, else None."""
        return self.sized.recipe.up_levels

    @property
    def chunks(self) -> int | None:
        """Number of chunks of a chunked scan, else None."""
        cuts = self.sized.recipe.cuts
        return None if cuts is None else len(cuts) - 1

    @property
    def levels(self) -> dict[str, int]:
        """Number of levels by phase."""
        return dict(self.sized.recipe.levels)

    @property
    def batch(self) -> int:
        """Batch that the numbers are stated for."""
        return self.chain.sizes.batch

    @property
    def dtype(self) -> np.dtype:
        """Dtype that the numbers are stated for."""
        return self.chain.sizes.dtype

    @cached_property
    def steps(self) -> tuple[ScanStep, ...]:
        """Every product, in the order of execution."""
        steps, counts = self.sized.recipe.steps, self.sized.counts
        path = set(critical_path(steps, [count.flops for count in counts]))
        itemsize = self.chain.sizes.itemsize
        return tuple(
            ScanStep(
                *(s.level, s.phase, s.left, s.right, s.target, s.kind, c.flops, c.dense_flops, c.bytes),
                step_seconds(c, self.chain.machine, itemsize),
                number in path,
            )
            for number, (s, c) in enumerate(zip(steps, counts, strict=True))
        )

    @cached_property
    def critical_path(self) -> tuple[ScanStep, ...]:
        """The dependent steps that cost most FLOPs together."""
        return tuple(step for step in self.steps if step.critical)

    @property
    def flops(self) -> int:
        """Floating-point operations of a call without injections."""
        return self.sized.flops

    @property
    def injection_flops(self) -> int:
        """Operations that injections at every step add: a matrix–vector product to each product of matrices."""
        total = 0
        for step in self.sized.recipe.steps:
            right = self.sized.patterns[step.right]
            total += right.shape[0]
            if step.kind == "mm" and right.kind != "identity":
                total += 2 * right.nnz
        return total * self.batch

    @property
    def memory(self) -> int:
        """Bytes that a call needs beyond its arguments."""
        return self.sized.memory

    @cached_property
    def lengths(self) -> np.ndarray:
        """Of what a call is given, g, values and injections of all Jacobians: lengths of the first axis, int64."""
        vectors = [p.shape[0] for p in self.patterns]
        return np.array([self.patterns[0].shape[1], *(p.nnz for p in self.patterns), *vectors], np.int64)

    @cached_property
    def axes(self) -> np.ndarray:
        """Of the same, with a batch: how many axes they have at least, int64. Values may be shared."""
        n = len(self.patterns)
        return np.array([2, *[1] * n, *[2] * n], np.int64)

    @cached_property
    def compiles(self) -> bool:
        """Whether the host runs stretches of it in one call: all but patterns of 2**31 entries or more."""
        return all(p.indices.dtype == np.int32 for p in self.sized.patterns.values())

    @property
    def stackable(self) -> bool:
        """Whether data may be one stacked array that runs on the dense kernels, a whole level a call."""
        return self.sized.stack is not None
