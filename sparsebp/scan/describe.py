"""A planned scan as text: what runs and why, the totals, and a table of its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sparsebp.scan.planning.cost import amount
from sparsebp.scan.planning.planned import PlannedScan
from sparsebp.scan.steps import ScanStep

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
