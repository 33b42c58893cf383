"""What a benchmark is: how it measures its rows, what their columns are, its tables and its picture; and one run of it.

A module of `benchmarks` holds what is its own: the workloads, how one row is measured and judged, the picture. It
says the rest in its ``BENCHMARK``, and `benchmarks.NAMES` lists it.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.tools import peers, pictures, report
from benchmarks.tools.environment import available_memory, environment
from sparsebp.core import tables
from sparsebp.core.errors import MissingDependencyError, OptionError, SparseBPError
from sparsebp.core.tables import Column

Row: TypeAlias = dict[str, Any]
Result: TypeAlias = Mapping[str, Any]
"""What `report.load` returns."""

QUICK_ROUNDS = {"rounds": 2, "least_rounds": 2, "warmup": 1}
PARTIAL = ".partial"
"""What the name of a result's file has more while rows are measured."""


@dataclass
class Run:
    """One run of a benchmark, as its `measure` gets it.

    Attributes
    ----------
    quick
        Whether it is a smoke test, with the benchmark's small sizes.
    settings
        What the result keeps: the benchmark's constants, its sizes, and the numbers of threads.
    rounds
        Options of `timing.measure`.
    result
        What is there so far; its rows are added as `measure` yields them.
    echo
        Takes every line that is printed.
    stem
        Name of the files without their suffix.
    seconds
        In which all rows are to be there; None: as long as it takes.
    """

    quick: bool
    settings: Mapping[str, Any]
    rounds: Mapping[str, Any]
    result: dict[str, Any]
    echo: Callable[[str], None]
    stem: str
    seconds: float | None = None
    begin: float = field(default_factory=time.monotonic)

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin

    @property
    def seconds_left(self) -> float:
        """Seconds in which rows can still be measured."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed

    def note(self, text: str) -> None:
        """Put a sentence under the tables; one that is there already is not repeated."""
        if text not in self.result["notes"]:
            self.result["notes"].append(text)

    def threads(self, using: Callable[[int], AbstractContextManager[None]] = peers.threads) -> Iterator[int]:
        """Yield each of the numbers of threads that this machine has, in use meanwhile; note the others."""
        for count in peers.thread_counts_here(self.settings["threads"], self.note):
            with using(count):
                yield count


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark that ``python -m benchmarks`` runs.

    Attributes
    ----------
    name
        That of its module and of its files.
    title, leaves_out
        What is measured, and which costs of a user are not in the numbers. The title may name settings in braces.
    measure
        Yields the rows, flat dicts: see `report`. A row that could not be measured says why under ``error``.
    columns
        What rows show.
    tables
        The tables of the documents: captions, and the keys of their columns, few enough for a page's width.
    short, in_short
        The keys of the columns that are printed as soon as a row is there, and that the README's table has; and which
        rows that table has.
    picture
        Draws a result, without a title.
    settings
        What the result says of every run, `quick` or not.
    sizes, quick
        The settings that a run with ``--quick`` has smaller, and their small values.
    rounds, quick_rounds
        Options of `timing.measure`.
    threads
        Numbers of threads to measure with, unless others are asked for; None: they are not varied.
    seconds
        In which it is to be done, unless others are asked for; rows that come too late are left out, with a note. None:
        it has no such limit.
    """

    name: str
    title: str
    leaves_out: str
    measure: Callable[[Run], Iterator[Row]]
    columns: tuple[Column, ...]
    tables: Mapping[str, tuple[str, ...]]
    short: tuple[str, ...]
    picture: Callable[[Result], Any]
    in_short: Callable[[Mapping[str, Any]], bool] = lambda row: True
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    rounds: Mapping[str, Any] = field(default_factory=dict)
    quick_rounds: Mapping[str, Any] = field(default_factory=lambda: QUICK_ROUNDS)
    threads: tuple[int, ...] | None = (1, 2)
    seconds: float | None = None

    def run(
        self,
        out: Path | None = None,
        *,
        quick: bool = False,
        threads: tuple[int, ...] | None = None,
        seconds: float | None = None,
        echo: Callable[[str], None] = print,
    ) -> dict[str, Any]:
        """Measure, write ``<name>.json`` and ``<name>.png``, print the table; return the result.

        What is there so far is in ``<name>.partial.json`` after every row, with ``"complete": false``; so a run that is
        interrupted, or killed, leaves the rows that it has measured, and the result of the run before.

        Parameters
        ----------
        out
            Folder of the two files, ``runs/bench`` if None.
        quick
            Small sizes and few rounds: a smoke test whose numbers mean little.
        threads
            Numbers of threads, the same for both sides; those of the benchmark if None.
        seconds
            In which to be done; those of the benchmark if None.
        echo
            Takes every line that is printed.

        Raises
        ------
        OptionError
            Threads are asked for that the benchmark does not vary, or seconds that it does not count.
        MissingDependencyError
            The peer, or what carries the data, is not installed.
        SparseBPError
            What was computed differs from the peer's.
        OutputError
            The files cannot be written.
        """
        if threads and self.threads is None:
            raise OptionError(f"The benchmark {self.name} does not vary threads", expected="no --threads",
                              got=", ".join(map(str, threads)), remedy="Leave the option out")  # fmt: skip
        if seconds is not None and self.seconds is None:
            raise OptionError(f"The benchmark {self.name} takes the time that it takes", expected="no --seconds",
                              got=f"{seconds:g}", remedy="Leave the option out")  # fmt: skip
        settings = {**self.settings, **self.sizes, **(self.quick if quick else {})}
        if self.threads is not None:
            settings["threads"] = threads or self.threads
        result: dict[str, Any] = {
            "benchmark": self.name,
            "title": self.title.format(**settings),
            "leaves_out": self.leaves_out,
            "quick": quick,
            "complete": False,
            "environment": environment(),
            "settings": settings,
            "rows": [],
            "notes": [],
        }
        rounds = self.quick_rounds if quick else self.rounds
        run = Run(quick, settings, rounds, result, echo, self.name, self.seconds if seconds is None else seconds)
        for row in self.measure(run):
            result["rows"].append(row)
            report.save(result, out, run.stem + PARTIAL)
            said = self.said(row)
            said = said if run.seconds is None else f"[{run.elapsed:4.0f} s] {said}"
            echo(textwrap.fill(said, tables.letters() or len(said) + 1, subsequent_indent="  "))
        self._finish(run, out)
        return result

    def named(self, keys: Iterable[str]) -> list[Column]:
        """Return the columns of these keys."""
        by_key = {column.key: column for column in self.columns}
        return [by_key[key] for key in keys]

    def said(self, row: Mapping[str, Any]) -> str:
        """Return what is printed of a row as soon as it is there."""
        shown = [column for column in self.named(self.short) if "error" not in row or column.key in row]
        said = "; ".join(f"{column.heading} {column.cell(row)}" for column in shown)
        return f"{said}: {row['error']}" if "error" in row else said

    def draw(self, result: Result) -> Any:
        """Return the picture of a result, under its title; of rows that could not be measured it shows nothing."""
        drawing = self.picture({**result, "rows": report.measured(result)})
        drawing.suptitle(textwrap.fill(result["title"], 80), fontsize=10)
        return drawing

    def _finish(self, run: Run, folder: Path | None) -> None:
        """Write JSON and picture, then print what was left out, where the files are, and the table last."""
        result = run.result
        result["complete"], result["seconds"] = True, round(run.elapsed, 1)
        path = report.save(result, folder, run.stem)
        path.with_name(f"{run.stem}{PARTIAL}.json").unlink(missing_ok=True)
        written = [str(path)]
        try:
            written.append(str(pictures.save(self.draw(result), path.with_suffix(".png"))))
        except MissingDependencyError as error:
            run.echo(f"No picture: {error}")
        for note in result["notes"]:
            run.echo(f"note: {note}")
        lines = ("", result["title"], f"Not in the numbers: {result['leaves_out']}", report.where(result),
                 "Written: " + ", ".join(written), "")  # fmt: skip
        for line in lines:
            run.echo(line)
        shown = [column for column in self.columns if column.on_terminal]
        run.echo(tables.text_table(shown, report.measured(result), tables.letters()))


SHARE = 0.7
"""Share of the available memory that a row, or one side of it, may take."""


def fits(what: str, need: int, note: Callable[[str], None]) -> bool:
    """Return whether there is memory for `need` bytes; else `note` that `what` is left out."""
    have = available_memory()
    if have is None or need <= SHARE * have:
        return True
    note(
        f"{what}: left out, it needs {tables.size(need)} and {tables.size(have)} are free "
        f"(at most {SHARE:.0%} of that are taken)"
    )
    return False


def refuse_difference(what: str, peer: str, difference: float) -> None:
    """Refuse to time what differs from the peer's by 1e-4 or more (a difference, or a relative one).

    Raises
    ------
    SparseBPError
        It does.
    """
    if not difference < 1e-4:
        raise SparseBPError(
            f"{what} differs from {peer}'s",
            expected="a difference below 1e-4",
            got=f"{difference:.3g}",
            remedy="Do not trust this build: please report it with the output of sparsebp info",
        )


def with_threads(result: Result, chosen: Callable[[Iterable[int]], int]) -> tuple[str, list[Row]]:
    """Return the most (`max`) or fewest (`min`) threads of a result, as text, and the rows with so many."""
    count = chosen(row["threads"] for row in result["rows"])
    return tables.in_threads(count), [row for row in result["rows"] if row["threads"] == count]
