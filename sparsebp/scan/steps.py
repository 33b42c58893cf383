"""The vocabulary of a scan: spans of the input array, steps that join two of them, and recipes made of steps.

All algorithms run on the paper's input array (BPPSA Eq. 5), ``a = [g, J_1, …, J_n]``, with the operator
``A ◇ B = B · A``. Whatever an algorithm computes is the product of a contiguous stretch of that array, so a `Span`
names every value there is: one that starts at 0 contains the gradient and is a vector, any other is a matrix.
This file holds integers only; sizes, patterns and arrays come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

Phase: TypeAlias = Literal[
    "fold", "up-sweep", "middle", "down-sweep", "linear", "reduce", "combine", "apply", "output", "unfold"
]
Kind: TypeAlias = Literal["mm", "mv"]


class Span(NamedTuple):
    """The elements ``a[start] ◇ … ◇ a[stop - 1]`` of the input array ``a = [g, J_1, …, J_n]``, multiplied.

    A span from 0 is the vector ``J_{stop-1} … J_1 g``; any other is the matrix ``J_{stop-1} … J_start``.
    """

    start: int
    stop: int

    @property
    def is_vector(self) -> bool:
        """Whether the gradient is among the elements."""
        return self.start == 0

    @property
    def is_element(self) -> bool:
        """Whether it is an input rather than a product."""
        return self.stop == self.start + 1

    def __str__(self) -> str:
        """``g``, ``J3``, ``J2:5`` (the product of J_2 to J_5) or ``y4`` (the output after J_1 to J_4)."""
        last = self.stop - 1
        if self.start == 0:
            return "g" if last == 0 else f"y{last}"
        return f"J{last}" if self.start == last else f"J{self.start}:{last}"


class AbstractStep(NamedTuple):
    """``target = left ◇ right = right · left``: a product of two neighbouring spans, without sizes.

    `level` is the row of BPPSA Fig. 3 from which the step starts (Blelloch, hybrid), and else a running number of the
    parallel round.
    """

    level: int
    phase: Phase
    left: Span
    right: Span

    @property
    def target(self) -> Span:
        """The span that the two operands make together."""
        return Span(self.left.start, self.right.stop)

    @property
    def kind(self) -> Kind:
        """``"mv"`` if the left operand is a vector, else ``"mm"``."""
        return "mv" if self.left.start == 0 else "mm"


@dataclass(frozen=True)
class Recipe:
    """What an algorithm does to ``n`` Jacobians: its steps in an order that can be executed as it stands.

    Attributes
    ----------
    algorithm
        ``"linear"``, ``"blelloch"``, ``"hybrid"`` or ``"chunked"``.
    n
        Number of Jacobians; the input array has n + 1 elements.
    steps
        Every product. Products with the symbolic identity, and products that nobody reads, are not among them.
    levels
        Number of levels by phase, as the paper counts them.
    up_levels
        Levels of the up-sweep (hybrid), else None.
    cuts
        Chunk c is made of the Jacobians ``J_{cuts[c]+1} … J_{cuts[c+1]}`` (chunked), else None.
    """

    algorithm: str
    n: int
    steps: tuple[AbstractStep, ...]
    levels: dict[str, int]
    up_levels: int | None = None
    cuts: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScanStep:
    """One product of a planned scan: ``target = left ◇ right = right · left``.

    Attributes
    ----------
    level
        Steps of one level and phase are independent, but for the phases ``middle``, ``linear`` and ``combine``, where
        each depends on the one before, and for the members of a folded piece. For Blelloch and hybrid: the row of BPPSA
        Fig. 3 from which the step starts, so ``level=0`` takes row L0 to row L1. Folding and unfolding count rounds of
        their own.
    phase
        ``fold``, ``up-sweep``, ``middle``, ``down-sweep``, ``linear``, ``reduce``, ``combine``, ``apply``, ``output``
        or ``unfold``.
    left, right, target
        Spans of the input array ``[g, J_1, …, J_n]``.
    kind
        ``"mm"`` (matrix–matrix) or ``"mv"`` (matrix–vector).
    flops
        Floating-point operations for the whole batch, two a multiplication with its addition, injections not counted.
    dense_flops
        The same if no operand were sparse: the dense complexity of BPPSA Fig. 10.
    bytes
        Bytes that have to be moved: operands, result and index arrays, each once.
    seconds
        Estimated time of the step by itself, on all workers of the machine that the scan is planned for.
    critical
        Whether the step lies on the critical path: the dependent steps that cost most FLOPs together.
    """

    level: int
    phase: Phase
    left: Span
    right: Span
    target: Span
    kind: Kind
    flops: int
    dense_flops: int
    bytes: int
    seconds: float
    critical: bool


def critical_path(steps: Sequence[AbstractStep], weights: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the steps on the heaviest path of dependences, first to last.

    Parameters
    ----------
    steps
        In an order that can be executed.
    weights
        Cost of each step. One is added to each, so that of paths of free steps the longest counts.
    """
    maker: dict[Span, int] = {}
    cost: list[int] = []
    before: list[int] = []
    for number, step in enumerate(steps):
        left, right = maker.get(step.left, -1), maker.get(step.right, -1)
        previous = max((left, right), key=lambda s: cost[s] if s >= 0 else -1)
        before.append(previous)
        cost.append(weights[number] + 1 + (cost[previous] if previous >= 0 else 0))
        maker[step.target] = number
    if not cost:
        return ()
    path = [max(range(len(cost)), key=cost.__getitem__)]
    while before[path[-1]] >= 0:
        path.append(before[path[-1]])
    return tuple(reversed(path))
