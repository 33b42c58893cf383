"""Statements of papers with their tolerances, our results, verdicts; and figures, which leave JSON and a picture.

A verdict belongs to the paper's algorithm alone. What ran otherwise stands in `Ours.other`, without one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import benchmarks as bench
from benchmarks import harness
from benchmarks.harness import Result, environment, load_result, save_picture
from sparsebp.core.errors import FileFormatError, MissingDependencyError
from sparsebp.core.files import json_line, parse_json, prepare_folder, read_file, write_atomically
from sparsebp.core.timing import Timing
from sparsebp.schedule import Costs, Schedule, simulate

Kind: TypeAlias = Literal["exact", "executed", "measured", "simulated", "elsewhere"]
Verdict: TypeAlias = Literal["met", "missed", "within noise", "not run", "claims nothing"]
VERDICTS: tuple[Verdict, ...] = ("met", "missed", "within noise", "not run", "claims nothing")

_LACKING = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of a figure when a stored result lacks something."""


# ---- rules: what a result is compared with ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rule:
    """A statement's tolerance, in words and as a test of one number."""

    says: str
    holds: Callable[[Any], bool]


def exact(value: Any) -> Rule:
    return Rule("equal", lambda ours: ours == value)


def at_least(value: float, unit: str = "×") -> Rule:
    return Rule(f"at least {value:g}{unit}", lambda ours: ours >= value)


def above(value: float, unit: str = "") -> Rule:
    return Rule(f"above {value:g}{unit}", lambda ours: ours > value)


def at_most(value: float, unit: str = "") -> Rule:
    return Rule(f"at most {value:g}{unit}", lambda ours: ours <= value)


def near(value: float, by: float = 0.1) -> Rule:
    return Rule(f"within {by:.0%}", lambda ours: abs(ours - value) <= by * abs(value))


def between(low: float, high: float, by: float = 0.0) -> Rule:
    """Return the rule of a range that the paper states, `by` of it allowed at either end."""
    more = f", ends within {by:.0%}" if by else ""
    return Rule(f"{low:g} to {high:g}{more}", lambda ours: low * (1 - by) <= ours <= high * (1 + by))


def holds(says: str = "as stated") -> Rule:
    return Rule(says, bool)


NOTHING = Rule("none", lambda ours: True)
"""Of a statement that claims nothing about a result."""


# ---- statements and results ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Statement:
    """A statement of a paper."""

    key: str
    what: str
    paper: str  # as the paper says it; never computed
    rule: Rule
    why: str = ""  # said if it is not met


@dataclasses.dataclass(frozen=True)
class Ours:
    """The result of the paper's algorithm here; `value` is None if it did not run."""

    value: Any = None
    low: float | None = None  # quartiles, or the interval of several runs
    high: float | None = None
    text: str = ""  # the result in words, in place of the number
    unit: str = ""
    noise: str = ""  # why the result cannot be told from noise
    why: str = ""
    ran: str = ""  # in place of the figure's
    other: str = ""  # what ran otherwise

    @property
    def said(self) -> str:
        """The result with its spread."""
        if self.text or self.value is None:
            return self.text or "–"
        number = "{:.3g}" if isinstance(self.value, float) else "{}"
        spread = "" if self.low is None else f" ({self.low:.3g} to {self.high:.3g})"
        return f"{number.format(self.value)}{self.unit}{spread}"


def ratio(found: Mapping[str, float], unit: str = "×", **options: str) -> Ours:
    """Return the result of a timing's ratio, with its quartiles."""
    return Ours(float(found["median"]), found.get("low"), found.get("high"), unit=unit, **options)


def quotient(peer: Mapping[str, float], ours: Mapping[str, float], **options: str) -> Ours:
    """Return ``peer / ours`` of two timings; the spread is that of their quartiles."""
    return Ours(peer["median"] / ours["median"], peer["low"] / ours["high"], peer["high"] / ours["low"], unit="×",
                **options)  # fmt: skip


def by_round(rule: Callable[..., float], *sides: Timing) -> dict[str, float]:
    """Return median and quartiles of a function of the sides' seconds in a round."""
    return Timing(tuple(rule(*seconds) for seconds in zip(*(side.seconds for side in sides), strict=True))).to_dict()


def of_runs(mean: float, width: float, unit: str = "", **options: str) -> Ours:
    """Return the result of several runs: mean and half the width of its interval."""
    return Ours(float(mean), float(mean - width), float(mean + width), unit=unit, **options)


def judge(rule: Rule, ours: Ours | None) -> Verdict:
    """Compare: a statement is met if the whole spread meets it, missed if none of it does."""
    if rule is NOTHING:
        return "claims nothing"
    if ours is None or ours.value is None:
        return "not run"
    points = [ours.value] if ours.low is None else [ours.value, ours.low, ours.high]
    found = {bool(rule.holds(point)) for point in points}
    if ours.noise or len(found) == 2:
        return "within noise"
    return "met" if found == {True} else "missed"


def row(statement: Statement, ours: Ours | None, ran: str) -> dict[str, Any]:
    """Return the row of a statement: JSON's and the page's."""
    verdict, given = judge(statement.rule, ours), ours or Ours()
    why = given.noise or "The spread reaches across" if verdict == "within noise" else given.why or statement.why
    return {
        "key": statement.key, "what": statement.what, "paper": statement.paper, "tolerance": statement.rule.says,
        "ours": given.said, "verdict": verdict, "ran": (given.ran or ran) if given.value is not None else "",
        "other": given.other, "why": "" if verdict == "met" else why,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Found:
    """Results by the statements' keys, and data for the picture."""

    ours: Mapping[str, Ours]
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# ---- figures ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Paper:
    """A text: how it is called here, and how others find it."""

    name: str
    authors: str
    title: str
    venue: str
    number: str  # DOI or arXiv


@dataclasses.dataclass(frozen=True)
class Context:
    """Options of a run, and results of benchmarks so far."""

    quick: bool  # small sizes and few rounds: a smoke test
    folder: Path  # where results of benchmarks go
    measured: Sequence[Path]  # folders with results of benchmarks and of figures, taken instead of measuring again
    echo: Callable[[str], None]
    results: dict[str, Any] = dataclasses.field(default_factory=dict)

    def kept(self, name: str) -> Path | None:
        """Return the file of an earlier result."""
        return next((path for folder in self.measured if (path := folder / f"{name}.json").exists()), None)

    def benchmark(self, name: str) -> Result:
        """Return the result of a benchmark: from `measured` if it is there, else of a run now."""
        if name not in self.results:
            path = self.kept(name)
            if path is not None:
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
class Run:
    """How the results of a figure are obtained: measured or of a benchmark, then shown; without either, computed."""

    show: Callable[[Any], Found]  # takes what was measured
    measure: Callable[[Context], Mapping[str, Any]] | None = None
    rests_on: str | None = None  # a benchmark
    draw: Callable[[Mapping[str, Any]], Any] | None = None  # takes the stored data; returns a Matplotlib figure
    seconds: int = 0  # of a full run; 0 is less than one
    needs: tuple[str, ...] = ()  # optional packages: "torch", "audio", "data", "mpi"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A figure, a table or a section of a paper, with its statements; the first is the index's."""

    paper: Paper
    name: str  # on the command line
    source: str  # where it stands in the paper
    kind: Kind
    states: str  # in a line
    ran: str  # the algorithm, order, schedule or optimizer
    statements: tuple[Statement, ...]
    run: Run | None = None

    @property
    def command(self) -> str:
        """The command line that runs it."""
        return f"python -m papers {self.name}"

    def rows(self, found: Found) -> list[dict[str, Any]]:
        """Return the row of every statement."""
        unknown = found.ours.keys() - {statement.key for statement in self.statements}
        if unknown:
            raise LookupError(f"{self.name} has no statement {', '.join(unknown)}")
        return [row(statement, found.ours.get(statement.key), self.ran) for statement in self.statements]

    def reproduce(self, context: Context, out: Path) -> dict[str, Any]:
        """Run the figure, write ``<name>.json`` and ``<name>.png`` into `out`, and return the JSON's content."""
        begin, run = time.monotonic(), self.run or Run(lambda raw: Found({}))
        path = None if run.measure is None else context.kept(self.name)
        source: Mapping[str, Any] = context.benchmark(run.rests_on) if run.rests_on else read(path) if path else {}
        try:
            raw = source["data"] if path else run.measure(context) if run.measure else source
            found = run.show(raw)
            rows, data = self.rows(found), dict(raw if run.measure else found.data)  # the picture is drawn from `data`
        except _LACKING as error:
            if not source:
                raise
            raise self._lacks(error) from error
        result = {
            "figure": self.name, "quick": source.get("quick", context.quick),
            "environment": source.get("environment") or environment(),
            "seconds": source["seconds"] if path else round(time.monotonic() - begin, 2), "claims": rows, "data": data,
        }  # fmt: skip
        drawing = self._drawing(context, data)
        prepare_folder(out)
        write_atomically(out / f"{self.name}.json", json_line(result, indent=1).encode())
        if drawing is not None:
            save_picture(drawing, out / f"{self.name}.png")
        return result

    def picture(self, data: Mapping[str, Any]) -> Any:
        """Draw `data`, of a result, under the figure's title."""
        drawing = self.run.draw(data)  # type: ignore[union-attr, misc]
        return harness.finish(drawing, f"{self.paper.name}, {self.source}: {self.states}", fontsize=9, wrap=True)

    def _drawing(self, context: Context, data: Mapping[str, Any]) -> Any:
        """Return the picture; None if there is nothing to draw, or nothing to draw it with."""
        if self.run is None or self.run.draw is None:
            return None
        try:
            return self.picture(data)
        except MissingDependencyError as error:
            context.echo(f"No picture: {error}")
            return None
        except _LACKING as error:
            raise self._lacks(error) from error

    def _lacks(self, error: Exception) -> FileFormatError:
        again = f"python -m benchmarks {self.run.rests_on}" if self.run and self.run.rests_on else self.command
        return FileFormatError(
            f"The result of {again} lacks what {self.name} shows", got=f"{type(error).__name__}: {error}",
            expected="the fields and rows of a whole run of this version", remedy=f"Run {again} again",
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


def drawn_timelines(schedules: Sequence[Schedule], costs: Costs) -> Any:
    """Draw the timelines of schedules below each other, to one scale."""
    from sparsebp.schedule import gantt

    drawing, axes = harness.figure(len(schedules), height=1.7 * len(schedules) + 0.5)
    found = [simulate(schedule, costs) for schedule in schedules]
    for ax, one in zip(axes[:, 0], found, strict=True):
        gantt(one, ax, memory=False)
        ax.set_xlim(0, max(other.makespan for other in found))
    return drawing
