"""Buffers of intermediate products: those that do not live at the same time share memory."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sparsebp.scan.running.product import Pattern, Product
from sparsebp.scan.steps import AbstractStep, Span


@dataclass
class Slots:
    """Buffers of a workspace, handed out so that products which do not live at the same time share memory."""

    capacities: list[int] = field(default_factory=list)
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, values: int) -> int:
        """Return the number of a free buffer for `values` values: the smallest that fits, else the largest grown."""
        where = bisect_left(self.free, (values, -1))
        if where == len(self.free):
            where -= 1
        if where < 0:
            self.capacities.append(values)
            return len(self.capacities) - 1
        slot = self.free.pop(where)[1]
        self.capacities[slot] = max(self.capacities[slot], values)
        return slot

    def give(self, slot: int) -> None:
        """Take a buffer back."""
        insort(self.free, (self.capacities[slot], slot))


def shared_spans(shared: Sequence[bool], patterns: Mapping[Span, Pattern]) -> dict[Span, bool]:
    """Say of each input whether the batch shares its values; an identity's are always shared: nobody reads them."""
    spans = (Span(i + 1, i + 2) for i in range(len(shared)))
    return {span: s or patterns[span].kind == "identity" for span, s in zip(spans, shared, strict=True)}


def is_view(plan: Product | None) -> bool:
    """Whether the product has an identity operand, so that the other operand's values are the result as they stand."""
    return plan is not None and plan.strategy == "identity"


def assign_slots(
    steps: Sequence[AbstractStep],
    plans: Sequence[Product | None],
    patterns: Mapping[Span, Pattern],
    shared: Sequence[bool],
    batch: int,
) -> tuple[dict[Span, int], list[int]]:
    """Give every intermediate product a buffer that is free while the product lives.

    Returns
    -------
    slots : dict of Span to int
        Buffer of each product that needs one.
    capacities : list of int
        Values (not bytes) that each buffer holds.
    """
    root: dict[Span, Span] = {}  # spans that are another span's values under a new name, through an identity
    for step, plan in zip(steps, plans, strict=True):
        if is_view(plan):
            source = step.left if patterns[step.right].kind == "identity" else step.right
            root[step.target] = root.get(source, source)
    last_use: dict[Span, int] = {}
    for number, step in enumerate(steps):
        for span in (step.left, step.right):
            last_use[root.get(span, span)] = number
    is_shared = shared_spans(shared, patterns)
    slots: dict[Span, int] = {}
    pool = Slots()
    for number, (step, plan) in enumerate(zip(steps, plans, strict=True)):
        if plan is not None:
            target = step.target
            is_shared[target] = is_shared[step.left] and is_shared[step.right]
            if not is_view(plan):
                slots[target] = pool.take(plan.pattern.nnz * (1 if is_shared[target] else batch))
        for span in (step.left, step.right):
            owner = root.get(span, span)
            if owner in slots and last_use[owner] == number:
                pool.give(slots[owner])
    return slots, pool.capacities
