"""Draw a planned scan as BPPSA Fig. 3 does: the array from left to right, levels from top to bottom."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from sparsebp.errors import MissingDependencyError
from sparsebp.scan.steps import CHAIN_PHASES, ScanStep, Span

if TYPE_CHECKING:
    from sparsebp.scan.plan import ScanPlan

MATRIX, VECTOR = "#4c78a8", "#f58518"
"""Colours of the figure: matrices blue, vectors orange."""


def plot(plan: ScanPlan, ax: Any = None) -> Any:
    """Draw `plan` on a matplotlib Axes and return it; see `ScanPlan.plot`.

    A value stands in the column of its last element, where the algorithm keeps it. Lines lead from both operands to the
    product; those of the critical path are thick.

    Raises
    ------
    MissingDependencyError
        matplotlib is not installed.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib is not installed, and drawing a scan needs it",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    n = len(plan.patterns)
    if ax is None:
        ax = plt.subplots(figsize=(min(2 + 0.5 * n, 24), 6))[1]
    place: dict[Span, tuple[float, float]] = {Span(i, i + 1): (i, 0.0) for i in range(n + 1)}
    ticks: dict[float, str] = {0.0: "input"}
    depth = 0.0
    for group in _rows(plan.steps):
        depth += 1.0
        ticks[depth] = f"{group[0].phase}"
        for step in group:
            place[step.target] = (step.target.stop - 1, depth)
            colour = VECTOR if step.kind == "mv" else MATRIX
            for operand in (step.left, step.right):
                (x0, y0), (x1, y1) = place[operand], place[step.target]
                ax.plot([x0, x1], [y0, y1], color=colour, linewidth=2.4 if step.critical else 0.8, zorder=1)
    for span, (x, y) in place.items():
        ax.scatter([x], [y], marker="s", s=60, color=VECTOR if span.is_vector else MATRIX, zorder=2)
        if n <= 32:
            ax.annotate(str(span), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=6)
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_ylim(depth + 0.7, -0.7)
    ax.set_xticks([0, *range(1, n + 1, max(1, n // 16))])
    ax.set_xlabel("position in the array [g, J_1, …, J_n]")
    ax.set_title(f"{plan.algorithm}: {n} Jacobians, {len(plan.critical_path)} steps on the critical path")
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def _rows(steps: tuple[ScanStep, ...]) -> list[list[ScanStep]]:
    """Cut the steps into the rows of the picture: levels, and the single steps of a chain."""
    rows = []
    for (_, phase), group in groupby(steps, key=lambda s: (s.level, s.phase)):
        members = list(group)
        rows += [[m] for m in members] if phase in CHAIN_PHASES else [members]
    return rows
