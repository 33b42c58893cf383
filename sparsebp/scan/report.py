"""A planned scan as a table or a picture (BPPSA Figs. 3 and 10)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from sparsebp.core.errors import MissingDependencyError, OptionError, ShapeError
from sparsebp.scan.algorithms import ScanStep, Span
from sparsebp.scan.cost import amount

_NUMBERS = ("FLOP", "dense FLOP", "bytes")
_COLUMNS = ("level", "phase", "left", "right", "target", "kind", *_NUMBERS, "critical")


def describe(plan: Any, max_rows: int = 40) -> str:
    """Return the text of `ScanPlan.describe`."""
    steps, sized = plan.steps, plan.sized
    mm = sum(step.kind == "mm" for step in steps)
    path = plan.critical_path
    parameter = {"hybrid": f", {plan.up_levels} levels of up-sweep", "chunked": f", {plan.chunks} chunks"}
    levels = ", ".join(f"{phase} {count}" for phase, count in plan.levels.items())
    folded = "" if len(plan.elements) == len(plan.patterns) else f", folded into {len(plan.elements)} elements"
    lines = [
        f"Scan over {len(plan.patterns)} transposed Jacobians{folded}: "
        f"{plan.algorithm}{parameter.get(plan.algorithm, '')}",
        f"Why: {plan.reason}",
        f"Counted for a batch of {plan.batch} in {plan.dtype}.",
        "",
        f"levels         {levels}",
        f"products       {mm} matrix–matrix, {len(steps) - mm} matrix–vector",
        f"work           {amount(plan.flops, 'FLOP')} (injections at every step add "
        f"{amount(plan.injection_flops, 'FLOP')})",
        f"critical path  {len(path)} of {len(steps)} steps, {amount(sum(s.flops for s in path), 'FLOP')}",
        f"memory         {amount(plan.memory, 'B')}: products {amount(sized.workspace, 'B')}, "
        f"results {amount(sized.results, 'B')}, product index {amount(sized.index, 'B')}",
    ]
    if mm:
        entries, filled = (
            sum(p.nnz for p in plan.patterns),
            [p.nnz for s, p in sized.patterns.items() if not s.is_element],
        )
        linear = 2 * plan.batch * sum(p.nnz for p in plan.patterns if p.kind != "identity")
        lines.insert(
            -1,
            f"fill-in        {amount(sum(filled), '')} entries in {len(filled)} products, {amount(entries, '')} in all "
            f"Jacobians; {plan.flops / max(linear, 1):.3g} times the work of the linear scan",
        )
    lines += ["", *_table(steps[:max_rows])]
    if len(steps) > max_rows:
        lines.append(f"… {len(steps) - max_rows} more steps; see .steps")
    return "\n".join(lines)


def _table(steps: Sequence[ScanStep]) -> list[str]:
    rows = [_COLUMNS]
    for s in steps:
        names = (f"L{s.level}", s.phase, str(s.left), str(s.right), str(s.target), s.kind)
        numbers = (f"{s.flops}", f"{s.dense_flops:.3g}", f"{s.bytes}")
        rows.append((*names, *numbers, "*" if s.critical else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(w) if name in _NUMBERS else cell.ljust(w)
            for cell, w, name in zip(row, widths, _COLUMNS, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


@dataclass(frozen=True)
class LayerByLayer:
    """Takes the place of a `ScanPlan` where no scan runs; `reason` says why."""

    reason: str
    algorithm: str = "bp"

    def describe(self) -> str:
        """Return the choice and its reason as text."""
        return f"Layer by layer, without a scan\nWhy: {self.reason}"


Operator: TypeAlias = tuple[str, float] | tuple[str, float, float]
"""An operator of plain back-propagation: name, FLOPs (or seconds), and optionally the dense complexity."""

MATRIX, VECTOR, BASELINE = "#4c78a8", "#f58518", "#2ca02c"
"""Colours of the figures: matrices blue, vectors orange, back-propagation's operators green."""


def plot(
    plan: Any, ax: Any, kind: str, operators: Sequence[Operator] = (), measured: Sequence[float] | None = None
) -> Any:
    """Draw `plan`; see `ScanPlan.plot`."""
    if kind not in ("tree", "flops"):
        raise OptionError("Unknown kind of plot", expected="'tree' or 'flops'", got=repr(kind))
    if kind == "tree" and (len(operators) or measured is not None):
        raise OptionError(
            "The tree does not show operators or measured times", expected="kind='flops'", got="kind='tree'"
        )
    if measured is not None and len(measured) != len(plan.steps):
        raise ShapeError(
            "measured has the wrong length", expected=f"{len(plan.steps)} seconds, one per step", got=len(measured),
            remedy="Pass the result of plan.profile(...) of the same plan",
        )  # fmt: skip
    try:
        import matplotlib.pyplot as plt
        from matplotlib.axes import Axes
    except ImportError as error:
        raise MissingDependencyError(
            "Drawing a scan needs matplotlib, which is not installed",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    if ax is None:
        tree = (_inches(6, 2 + 0.5 * len(plan.patterns)), _inches(4, 2 + 0.35 * len(_rows(plan.steps))))
        ax = plt.subplots(figsize=tree if kind == "tree" else (7, 5), layout="constrained")[1]  # clips no labels
    elif not isinstance(ax, Axes):
        raise OptionError(
            "ax is not a matplotlib axes", expected="an Axes, or None for a new one", got=repr(ax),
            remedy="For a file: plan.plot().figure.savefig(path)",
        )  # fmt: skip
    if kind == "tree":
        _tree(plan, ax)
    else:
        _flops(plan, ax, operators, measured)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return ax


def _tree(plan: Any, ax: Any) -> None:
    """Draw the array from left to right, levels from top to bottom.

    A value is in the column of its last element, where the algorithm keeps it. Lines lead from both operands to the
    product; lines of the critical path are thick.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    n = len(plan.patterns)
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
            label = ax.annotate(str(span), (x, y), xytext=(0, 6), textcoords="offset points", ha="center", fontsize=6)
            label.set_path_effects([withStroke(linewidth=2, foreground="white")])  # lines pass behind it
    ax.set_yticks(list(ticks), list(ticks.values()))
    ax.set_ylim(1.1 * depth + 1.2, -0.7)  # the legend has the last row
    ax.set_xticks([0, *range(1, n + 1, max(1, n // 16))])
    ax.set_xlabel("position in the array [g, J_1, …, J_n]")
    ax.set_title(f"{plan.algorithm}: {n} Jacobians, {len(plan.critical_path)} steps on the critical path")
    ax.legend(
        handles=[Line2D([], [], color=MATRIX, label="matrix", marker="s", linestyle="none"),
                 Line2D([], [], color=VECTOR, label="vector", marker="s", linestyle="none"),
                 Line2D([], [], color="black", linewidth=2.4, label="critical path")],
        loc="lower center", ncols=3, fontsize=7, frameon=False,
    )  # fmt: skip


def _inches(least: float, wanted: float) -> float:
    """Return the side of a figure, at most two feet."""
    return min(max(least, wanted), 24)


def _rows(steps: tuple[ScanStep, ...]) -> list[list[ScanStep]]:
    """Split the steps into the rows of the picture: levels, and the dependent rounds of chains within a level."""
    rows = []
    for _, group in groupby(steps, key=lambda s: (s.level, s.phase)):
        round_of: dict[Span, int] = {}
        rounds: list[list[ScanStep]] = []
        for step in group:
            number = max(round_of.get(step.left, 0), round_of.get(step.right, 0))
            round_of[step.target] = number + 1
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(step)
        rows += rounds
    return rows


def _flops(plan: Any, ax: Any, operators: Sequence[Operator], measured: Sequence[float] | None) -> None:
    """Draw the FLOPs, or the measured time, of every step over its dense complexity.

    Steps on the critical path are filled. Where the dense complexity of an operator is not given, its FLOPs are used.
    """
    heights = [s.flops for s in plan.steps] if measured is None else measured
    drawn = [(s, h) for s, h in zip(plan.steps, heights, strict=True) if h > 0]  # a product with an identity is free
    for kind, name, marker, colour in (("mv", "matrix–vector", "o", VECTOR), ("mm", "matrix–matrix", "s", MATRIX)):
        for critical in (False, True):
            points = [(s.dense_flops, h) for s, h in drawn if s.kind == kind and s.critical == critical]
            label = f"{name}, critical" if critical else name
            face = colour if critical else "none"
            if points:
                x, y = zip(*points, strict=True)
                ax.scatter(x, y, marker=marker, s=42, facecolors=face, edgecolors=colour, label=label, zorder=2)
    if operators:
        x, y = zip(*((o[2] if len(o) == 3 else o[1], o[1]) for o in operators), strict=True)
        ax.scatter(x, y, marker="o", s=90, facecolors="none", edgecolors=BASELINE, label="BP operators", zorder=3)
        for at in range(len(operators) if len(operators) <= 24 else 0):
            ax.annotate(operators[at][0], (x[at], y[at]), xytext=(6, -3), textcoords="offset points", fontsize=6)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("FLOP of the step if nothing were sparse")
    ax.set_ylabel("FLOP of the step" if measured is None else "seconds of the step, measured")
    ax.set_title(f"{plan.algorithm} over {len(plan.elements)} elements, batch {plan.batch}")
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
