"""What the figures of several papers share: simulated speed-ups beside the papers', and timelines of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.scaling.papers import WITHIN, judge
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Result
from papers.figure import Claim, Found
from sparsebp.schedule import Costs, Schedule, simulate

_WHY = {
    "below": "Simulated from data sheets and one fitted number; what the paper's baseline loses elsewhere is not there",
    "above": "", "within": "", "not in the paper": "The paper states no number",
}  # fmt: skip


def near(what: str, paper: float, ours: float, why: str, form: str = "{:.3g}") -> Claim:
    """Return a simulated claim that holds if ours is not more than 10 % from the paper's number."""
    met = abs(ours - paper) <= WITHIN * paper
    return Claim(what, form.format(paper), form.format(ours), met, "" if met else why)


def gain(what: str, low: float, high: float, ours: float, why: str = "") -> Claim:
    """Return a simulated claim on a speed-up, judged as those of ``bench scaling-papers``."""
    outcome = judge(ours, low, high)
    paper = f"{low:g}×" if low == high else f"{low:g}–{high:g}×"
    return Claim(what, paper, f"{ours:.2f}×", outcome != "below", (why or _WHY[outcome]) if outcome == "below" else "")


def speed_ups(result: Result, chosen: Callable[[Mapping[str, Any]], bool]) -> Found:
    """Return the rows of ``bench scaling-papers`` that are chosen as claims."""
    rows = [row for row in result["rows"] if chosen(row)]
    claims = tuple(
        Claim(f"{row['compared']}; {row['setting']}, {row['workers']} workers", str(row.get("paper") or "–"),
              f"{row['ours']:.2f}×", None if row["outcome"] == "not in the paper" else row["outcome"] != "below",
              _WHY[row["outcome"]])
        for row in rows
    )  # fmt: skip
    return Found(claims, {"rows": [dict(row) for row in rows]})


def draw_ranges(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups beside the papers' ranges."""
    rows = [row for row in data["rows"] if row["outcome"] != "not in the paper"]
    drawing, ax = pictures.bar_chart(
        [f"{row['compared']}\n{row['setting']}" for row in rows],
        [("simulated", "#1e40af", [row["ours"] for row in rows]),
         ("the paper's", "#fdba74", [row["high"] for row in rows])],
        "times faster than the baseline", each=0.5,
    )  # fmt: skip
    ax.tick_params(axis="y", labelsize=6)
    ax.legend(fontsize=8)
    return drawing


def drawn_timelines(schedules: Sequence[Schedule], costs: Costs) -> Any:
    """Draw simulated schedules below each other, on one scale."""
    from sparsebp.schedule import gantt

    drawing, axes = pictures.figure(len(schedules), height=1.7 * len(schedules) + 0.5)
    found = [simulate(schedule, costs) for schedule in schedules]
    for ax, one in zip(axes[:, 0], found, strict=True):
        gantt(one, ax, memory=False)
        ax.set_xlim(0, max(other.makespan for other in found))
    return drawing
