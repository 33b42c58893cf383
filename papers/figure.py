"""Figures of papers, their claims, and their runs, which leave JSON and a picture with the paper's axes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import benchmarks as bench
from benchmarks import harness
from benchmarks.harness import Result, environment, load_result, save_picture
from benchmarks.scaling import WITHIN, judge_scaling_papers
from sparsebp.core.errors import FileFormatError, MissingDependencyError
from sparsebp.core.files import json_line, parse_json, prepare_folder, read_file, write_atomically
from sparsebp.schedule import Costs, Schedule, simulate

Kind: TypeAlias = Literal["exact", "executed", "measured", "simulated", "elsewhere"]
"""How a number is obtained: computed without rounding or choice; run, whatever the time it takes; timed here; simulated
for the paper's machines; or not here at all, for want of a GPU or a cluster."""
PAPERS = {
    "BPPSA": "Wang, Bai and Pekhimenko, 2020",
    "Preprint": "Wang, Bai and Pekhimenko, BPPSA's preprint of 2019",
    "OOO": "Oh et al., 2022",
    "SpecTrain": "Chen, Yang and Cheng, 2018",
    "Fusion": "Jiang et al., 2021",
}

_LACKING = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of a figure when a benchmark's result, which may come from a file, lacks something."""
_LEFT_OUT = "A quick run leaves it out: its networks are too large"


@dataclasses.dataclass(frozen=True)
class Claim:
    """One statement of a figure, and our result."""

    what: str  # the statement
    paper: str  # the paper's number and ours, as texts
    ours: str
    met: bool | None  # whether ours is as good; None: it is not decided, or cannot be compared
    why: str = ""  # why it is missed, not decided or cannot be compared
    # Backward algorithm, order, schedule, optimizer, as far as they are choices; in every claim of a measured figure.
    ran: str = ""


@dataclasses.dataclass(frozen=True)
class Found:
    """The result of a figure: claims, and data for its picture."""

    claims: tuple[Claim, ...]
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Context:
    """Options of a run, and results of benchmarks so far."""

    quick: bool  # small sizes and few rounds: a smoke test
    folder: Path  # where results of benchmarks go
    measured: Path | None  # A folder with results of ``python -m benchmarks`` that are taken instead of measuring again
    echo: Callable[[str], None]  # takes every line that is printed
    results: dict[str, Result] = dataclasses.field(default_factory=dict)
    """Results of benchmarks so far: several figures may rest on one."""

    def benchmark(self, name: str) -> Result:
        """Return the result of a benchmark: that in `measured` if it is there, else of a run now."""
        if name not in self.results:
            path = None if self.measured is None else self.measured / f"{name}.json"
            if path is not None and path.exists():
                found = load_result(path)
                if found["benchmark"] != name or not found.get("complete", True):
                    raise FileFormatError(
                        f"{path} is no whole result", expected=f"what python -m benchmarks {name} leaves at its end",
                        got=found["benchmark"] if found["benchmark"] != name else "a run that was stopped",
                        remedy="Run the benchmark again, or remove the file to have it run",
                    )  # fmt: skip
                self.results[name] = found
            else:
                self.results[name] = bench.load(name).run(self.folder, quick=self.quick, echo=self.echo)
        return self.results[name]


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure, a table or a numbered statement of a paper."""

    name: str  # on the command line; begins with the paper's
    source: str  # where it stands in the paper
    kind: Kind
    states: str  # its statement, in a line
    run: Callable[[Context], Found] | None = None
    # Instead of `run`: a benchmark, and a function of its result. With neither, `why` says why it is not run here.
    rests_on: str | None = None
    shows: Callable[[Result], Found] | None = None
    draw: Callable[[Mapping[str, Any]], Any] | None = None  # takes `Found.data`; returns a Matplotlib figure
    seconds: int = 0  # of a full run; 0 is less than one
    needs: tuple[str, ...] = ()  # optional packages: "torch", "audio", "data", "mpi"
    gpu: bool = False  # the paper's own form needs a GPU
    why: str = ""

    @property
    def paper(self) -> str:
        """Key of `PAPERS`."""
        return next(paper for paper in PAPERS if self.name.startswith(f"{paper.lower()}-"))

    @property
    def here(self) -> bool:
        """Whether it is run here."""
        return self.run is not None or self.shows is not None

    @property
    def command(self) -> str:
        """The command line that runs it."""
        return f"python -m papers {self.name}"

    def reproduce(self, context: Context, out: Path) -> dict[str, Any]:
        """Run the figure, write ``<name>.json`` and ``<name>.png`` into `out`, and return the JSON's content."""
        begin = time.monotonic()
        found = self._found(context)
        shown = context.results[self.rests_on] if self.rests_on else {"quick": context.quick}
        result = {
            "figure": self.name, "quick": shown["quick"], "environment": shown.get("environment") or environment(),
            "seconds": round(time.monotonic() - begin, 2),
            "claims": [dataclasses.asdict(claim) for claim in found.claims], "data": dict(found.data),
        }  # fmt: skip
        drawing = self._drawing(context, found)
        prepare_folder(out)
        write_atomically(out / f"{self.name}.json", json_line(result, indent=1).encode())
        if drawing is not None:
            save_picture(drawing, out / f"{self.name}.png")
        return result

    def picture(self, data: Mapping[str, Any]) -> Any:
        """Draw `data`, of a result, under the figure's title."""
        drawing = self.draw(data)  # type: ignore[misc]
        return harness.finish(drawing, f"{self.paper}, {self.source}: {self.states}", fontsize=9, wrap=True)

    def _found(self, context: Context) -> Found:
        """Run it, or show a benchmark's result, which may come from a file and lack something."""
        if self.run is not None:
            return self.run(context)
        if self.rests_on is None or self.shows is None:
            return Found((Claim(self.states, "see there", "not run here", None, self.why),))
        result = context.benchmark(self.rests_on)  # whose own errors are not the file's
        try:
            found = self.shows(result)
            if not found.claims and not result["quick"]:
                raise LookupError("no row that it shows")
        except _LACKING as error:
            raise self._lacks(error) from error
        if found.claims:
            return found
        return Found((Claim(self.states, "see there", "not measured", None, _LEFT_OUT),), found.data)

    def _drawing(self, context: Context, found: Found) -> Any:
        """Return the picture; None if there is nothing to draw, or nothing to draw it with."""
        if self.draw is None:
            return None
        try:
            return self.picture(found.data)
        except MissingDependencyError as error:
            context.echo(f"No picture: {error}")
            return None
        except _LACKING as error:
            if self.rests_on is None:
                raise
            raise self._lacks(error) from error

    def _lacks(self, error: Exception) -> FileFormatError:
        return FileFormatError(
            f"The result of python -m benchmarks {self.rests_on} lacks what {self.name} shows",
            expected="the fields and rows of a whole run of this version", got=f"{type(error).__name__}: {error}",
            remedy=f"Run python -m benchmarks {self.rests_on} again",
        )  # fmt: skip


def read(path: Path) -> dict[str, Any]:
    """Read a result of `Figure.reproduce`."""
    remedy = "Run python -m papers again"
    content = read_file(path, f"{path} cannot be read", expected="a result of python -m papers", remedy=remedy)
    try:
        found = parse_json(content)
    except ValueError as error:
        found = str(error)
    if not isinstance(found, dict) or not {"figure", "claims", "seconds", "environment"} <= found.keys():
        raise FileFormatError(f"{path} is no result of python -m papers", expected="figure, claims, seconds, …",
                              got=found if isinstance(found, str) else "other fields", remedy=remedy)  # fmt: skip
    return found


def judged(what: str, paper: str, ours: str, met: bool | None, missed: str, ran: str = "") -> Claim:
    """Return a claim; `missed` says why, unless it is met."""
    return Claim(what, paper, ours, met, "" if met else missed, ran)


def claim(what: str, paper: Any, ours: Any, *, why: str = "", ran: str = "") -> Claim:
    """Return a claim that holds if both are equal."""
    return Claim(what, str(paper), str(ours), ours == paper, why, ran)


def at_least(what: str, paper: float, ours: float, *, why: str = "", form: str = "{:.3g}×", ran: str = "") -> Claim:
    """Return a claim that holds if ours is not below the paper's; `why` is said if it is missed."""
    met = ours >= paper
    return judged(what, form.format(paper), form.format(ours), met, why, ran)


def gained(what: str, paper: str, least: float, ratio: Mapping[str, float], *, ran: str, why: str) -> Claim:
    """Return a claim that a measured ratio of times is at least so much; a gain within its quartiles is not decided."""
    met: bool | None = ratio["median"] >= least
    if met and ratio["low"] < 1:
        met, why = None, "Not decided: the quartiles reach below 1"
    return judged(what, paper, f"{ratio['median']:.2f}×", met, why, ran)


def faster(what: str, paper: str, least: float, base: Mapping[str, float], ours: Mapping[str, float], *, ran: str,
           why: str) -> Claim:  # fmt: skip
    """Return a claim that `base` takes at least `least` times longer than `ours`; both are timings of a benchmark."""
    ratio = {"median": base["median"] / ours["median"], "low": base["low"] / ours["high"]}
    return gained(what, paper, least, ratio, ran=ran, why=why)


def elsewhere(what: str, paper: str, why: str) -> Claim:
    """Return a claim that nothing was run for here."""
    return Claim(what, paper, "not run here", None, why, "nothing")


def median(row: Mapping[str, Any], key: str) -> float:
    """Return the median of a measurement."""
    return float(row[key]["median"])


# Shared by several papers: simulated speed-ups, and timelines of schedules.

_WHY = {
    "below": "Simulated from data sheets and one fitted number; other losses of the paper's baseline are not modelled",
    "above": "", "within": "", "not in the paper": "The paper states no number",
}  # fmt: skip


def near(what: str, paper: float, ours: float, why: str, form: str = "{:.3g}") -> Claim:
    """Return a simulated claim that holds if ours is not more than 10 % from the paper's number."""
    met = abs(ours - paper) <= WITHIN * paper
    return judged(what, form.format(paper), form.format(ours), met, why)


def gain(what: str, low: float, high: float, ours: float, why: str = "") -> Claim:
    """Return a simulated claim on a speed-up, judged as in ``python -m benchmarks scaling-papers``."""
    outcome = judge_scaling_papers(ours, low, high)
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


draw_ranges = harness.bars("{compared}: {setting}, {workers} workers", {"ours": "simulated", "high": "the paper's"},
                           "speed-up over the baseline", (harness.OURS, harness.PAPER), line=1.0)  # fmt: skip
"""Draws simulated speed-ups and the papers'."""


def drawn_timelines(schedules: Sequence[Schedule], costs: Costs) -> Any:
    from sparsebp.schedule import gantt

    drawing, axes = harness.figure(len(schedules), height=1.7 * len(schedules) + 0.5)
    found = [simulate(schedule, costs) for schedule in schedules]
    for ax, one in zip(axes[:, 0], found, strict=True):
        gantt(one, ax, memory=False)
        ax.set_xlim(0, max(other.makespan for other in found))
    return drawing
