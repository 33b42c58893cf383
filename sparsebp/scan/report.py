"""A planned scan as a table or a picture (BPPSA Figs. 3 and 10), and layer by layer beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from sparsebp.core.errors import MissingDependencyError, OptionError, ShapeError
from sparsebp.core.machine import Machine
from sparsebp.scan.algorithms import ScanStep, Span
from sparsebp.scan.cost import amount
from sparsebp.scan.run import PlannedScan

# A planned scan as text: what runs and why, the totals, and a table of its steps.

_NUMBERS = ("FLOP", "dense FLOP", "bytes", "est. µs")
_COLUMNS = ("level", "phase", "left", "right", "target", "kind", *_NUMBERS, "critical")


def describe(plan: PlannedScan, max_rows: int = 40) -> str:
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
        lines.insert(-1, f"fill-in        {_fill_in(plan)}")
    lines += [*estimates_line(plan.estimates), "", *_table(steps[:max_rows])]
    if len(steps) > max_rows:
        lines.append(f"… {len(steps) - max_rows} more steps; see .steps")
    return "\n".join(lines)


def _fill_in(plan: PlannedScan) -> str:
    """Return how full the products are, and their work beside that of the linear scan."""
    entries = sum(p.nnz for p in plan.patterns)
    linear = 2 * plan.batch * sum(p.nnz for p in plan.patterns if p.kind != "identity")
    products = [p.nnz for span, p in plan.sized.patterns.items() if not span.is_element]
    return (
        f"{amount(sum(products), '')} entries in {len(products)} products, {amount(entries, '')} in all Jacobians; "
        f"{plan.flops / max(linear, 1):.3g} times the work of the linear scan"
    )


def estimates_line(estimates: Mapping[str, float]) -> list[str]:
    """Return the line with the estimates, the least first; none if nothing was compared."""
    shown = sorted(estimates.items(), key=lambda pair: pair[1])
    return ["estimates      " + ", ".join(f"{name} {1e6 * t:.4g} µs" for name, t in shown)] if shown else []


def _table(steps: Sequence[ScanStep]) -> list[str]:
    rows = [_COLUMNS]
    for s in steps:
        names = (f"L{s.level}", s.phase, str(s.left), str(s.right), str(s.target), s.kind)
        numbers = (f"{s.flops}", f"{s.dense_flops:.3g}", f"{s.bytes}", f"{1e6 * s.seconds:.4g}")
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


# Layer by layer, or by scan? The two estimates that decide it, and the answer in place of a plan.
#
# Back-propagation layer by layer multiplies by a layer's weights without its Jacobian; a scan writes the Jacobians'
# values first. Both are counted on the same machine model.

MARGIN = 0.8
"""A scan is taken if it promises at most this share of the time layer by layer: estimates are rough."""


@dataclass(frozen=True)
class LayerByLayer:
    """What stands where a `ScanPlan` would if no scan runs.

    Attributes
    ----------
    reason
        Why.
    estimates
        Seconds that the cost model expects, of ``"bp"`` and of the scans that it was compared with, the values of their
        Jacobians included.
    """

    reason: str
    estimates: Mapping[str, float]
    algorithm: str = "bp"

    def describe(self) -> str:
        """Return the choice and its reason as text."""
        return "\n".join(["Layer by layer, without a scan", f"Why: {self.reason}", *estimates_line(self.estimates)])


def layerwise_seconds(works: Iterable[tuple[int, int, int]], m: Machine, itemsize: int) -> float:
    """Return the estimated time of one layer after the other.

    Parameters
    ----------
    works
        Of each layer: floating-point operations, of matrix products above all; values read and written; array
        operations.
    m
        Machine. On the host its workers share the products, and one does the rest.
    itemsize
        Bytes of a value.
    """
    p = m.prices
    if p is None:
        operation, flop, byte = m.call, 1.0 / (m.rate(itemsize) * m.workers), 1.0 / m.bandwidth
    else:
        operation, byte = p.operation, p.array
        flop = 0.5 * p.blas * (p.double if itemsize == 8 else 1.0) / m.workers
    return sum(calls * operation + flops * flop + values * itemsize * byte for flops, values, calls in works)


def values_seconds(entries: Iterable[int], m: Machine, itemsize: int) -> float:
    """Return the estimated time to write Jacobians' values: so many in each, read from a layer's state by an index."""
    return sum(m.call / m.issuers + count * _written(m, itemsize) for count in entries)


def least_scan_seconds(entries: int, batch: int, m: Machine, itemsize: int) -> float:
    """Return a time below which no scan over Jacobians with so many shared entries comes, values included.

    No scan does less work than the linear one, which multiplies every entry with the whole batch once.
    """
    read = entries * (itemsize + 4) * m.moved(1.0)  # as if it lay in the cache
    return entries * _written(m, itemsize) + (m.products(entries * batch, "matvec", batch, itemsize) + read) / m.workers


def _written(m: Machine, itemsize: int) -> float:
    """Return the seconds in which all workers together write one value of a Jacobian."""
    each = 3.0 * m.workers / m.bandwidth if m.prices is None else m.prices.value
    return (2 * itemsize + 4) * each / m.workers


Operator: TypeAlias = tuple[str, float] | tuple[str, float, float]
"""An operator of plain back-propagation: name, FLOPs (or seconds), and perhaps the dense complexity."""

MATRIX, VECTOR, BASELINE = "#4c78a8", "#f58518", "#2ca02c"
"""Colours of the figures: matrices blue, vectors orange, back-propagation's operators green."""


def plot(
    plan: PlannedScan, ax: Any, kind: str, operators: Sequence[Operator] = (), measured: Sequence[float] | None = None
) -> Any:
    """Draw `plan`; see `ScanPlan.plot`."""
    if kind not in ("tree", "flops"):
        raise OptionError(
            "Unknown kind of plot", expected="'tree' or 'flops'", got=repr(kind), remedy="Pass one of them"
        )
    if kind == "tree" and (len(operators) or measured is not None):
        raise OptionError(
            "The tree has no place for operators or measured times", expected="kind='flops'", got="kind='tree'",
            remedy="Pass kind='flops', or leave operators and measured out",
        )  # fmt: skip
    if measured is not None and len(measured) != len(plan.steps):
        raise ShapeError(
            "measured has the wrong length", expected=f"{len(plan.steps)} seconds, one a step", got=len(measured),
            remedy="Pass what plan.profile(...) of the same plan returned",
        )  # fmt: skip
    try:
        import matplotlib.pyplot as plt
        from matplotlib.axes import Axes
    except ImportError as error:
        raise MissingDependencyError(
            "matplotlib is not installed, and drawing a scan needs it",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    if ax is None:
        tree = (_inches(6, 2 + 0.5 * len(plan.patterns)), _inches(4, 2 + 0.35 * len(_rows(plan.steps))))
        ax = plt.subplots(figsize=tree if kind == "tree" else (7, 5), layout="constrained")[1]  # which cuts no label
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


def _tree(plan: PlannedScan, ax: Any) -> None:
    """The array from left to right, levels from top to bottom.

    A value stands in the column of its last element, where the algorithm keeps it. Lines lead from both operands to the
    product; those of the critical path are thick.
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
    """Return a figure's side: what is wanted, within what can be looked at."""
    return min(max(least, wanted), 24)


def _rows(steps: tuple[ScanStep, ...]) -> list[list[ScanStep]]:
    """Cut the steps into the rows of the picture: levels, and in a level with chains their dependent rounds."""
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


def _flops(plan: PlannedScan, ax: Any, operators: Sequence[Operator], measured: Sequence[float] | None) -> None:
    """Every step's FLOPs, or measured time, over what it would cost if nothing were sparse.

    Steps on the critical path are filled. An operator without a dense complexity stands at that of its own FLOPs.
    """
    heights = [s.flops for s in plan.steps] if measured is None else measured
    drawn = [(s, h) for s, h in zip(plan.steps, heights, strict=True) if h > 0]  # an identity's product takes nothing
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
