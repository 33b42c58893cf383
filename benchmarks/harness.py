"""What a benchmark is: how it measures its rows, what their columns are, its tables and its picture; and one run of it.

A module of `benchmarks` holds what is its own: the workloads, how one row is measured and judged, the picture. It
says the rest in a `Benchmark`, and `benchmarks.MODULES` lists it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from sparsebp.core import backend, tables
from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError, SparseBPError
from sparsebp.core.files import parse_json, prepare_folder, read_file, write_atomically, write_figure
from sparsebp.core.machine import cpu_model
from sparsebp.core.tables import Column
from sparsebp.core.threads import get_threads, most_threads, set_threads

# Where and on what a benchmark ran: processor, GPU, threads, versions, commit, date; what its memory can do.

_PACKAGES = (
    "numpy", "scipy", "numba", "torch", "cupy-cuda12x", "cupy-cuda13x", "python-graphblas", "mkl", "jax", "onnxruntime",
)  # fmt: skip

_COPIED = 1 << 27
"""Bytes of each array: several times the last cache."""


def environment() -> dict[str, Any]:
    """Return the record that every benchmark writes beside its numbers."""
    from sparsebp import __version__

    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": total_memory(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sparsebp": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "blas": _blas(),
    }
    if hasattr(os, "getloadavg"):
        record["load_at_start"] = round(os.getloadavg()[0], 2)
    if backend.has_gpu():
        record["gpu"] = _gpu()
    return record


def commit() -> str:
    """Return the source tree's commit, short, with ``+`` if files of the package differ from it.

    In a copy without its history, an installed one among them, even if it lies inside another repository: the
    environment variable ``SPARSEBP_COMMIT``, else ``unknown``.
    """
    root = Path(__file__).resolve().parents[1]
    try:
        git = ["git", "-C", str(root)]
        subprocess.run([*git, "ls-files", "--error-unmatch", "benchmarks/__init__.py"], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", "--", "sparsebp", "benchmarks", "papers"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPARSEBP_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def total_memory() -> int | None:
    """Return the machine's memory in bytes, or None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def available_memory() -> int | None:
    """Return the bytes of memory that can be had now (Linux: ``MemAvailable``), or None if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


@cache
def copy_bandwidth(threads: int, repeats: int = 7) -> float:
    """Return the bytes a second that `threads` threads read and write while they copy, the best of `repeats`."""
    source, target = np.ones(_COPIED // 8), np.ones(_COPIED // 8)
    halves = [*zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)]
    best = np.inf
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats):
            begin = time.perf_counter()
            for done in [pool.submit(np.copyto, *half) for half in halves]:
                done.result()
            best = min(best, time.perf_counter() - begin)
    return 2 * _COPIED / best


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _blas() -> str:
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found.get('name')} {found.get('version')}"


def _gpu() -> dict[str, Any]:
    cupy = backend.cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    record: dict[str, Any] = {
        "name": properties["name"].decode(),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "clock_hz": int(properties["clockRate"]) * 1000 if "clockRate" in properties else None,
        "memory_bytes": int(properties["totalGlobalMem"]),
        "driver": int(cupy.cuda.runtime.driverGetVersion()),
        "runtime": int(cupy.cuda.runtime.runtimeGetVersion()),
    }
    try:
        import torch

        record["cudnn"] = torch.backends.cudnn.version()
    except ImportError:
        pass
    except Exception as error:  # a broken installation raises anything, and the GPU is there all the same
        record["cudnn"] = f"{type(error).__name__}: {error}"
    return record


# What both sides of a comparison need: the same number of threads, and packages that may be missing.


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let the kernels, BLAS and PyTorch (each if it is there) use `count` threads inside the ``with`` block.

    Raises
    ------
    OptionError
        `count` is below 1 or above `sparsebp.core.threads.most_threads`.
    """
    before = get_threads()
    torch = optional("torch")
    torch_before = torch.get_num_threads() if torch else 0
    set_threads(count)
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        set_threads(before)
        if torch:
            torch.set_num_threads(torch_before)


def thread_counts_here(wanted: tuple[int, ...], note: Callable[[str], None]) -> tuple[int, ...]:
    """Return those of `wanted` that this machine has; tell `note` about the others."""
    most = most_threads()
    for count in wanted:
        if count > most:
            note(f"{count} threads: left out, this machine gives {most}")
    return tuple(count for count in wanted if count <= most)


def optional(name: str) -> ModuleType | None:
    """Import and return a package that may be missing; None if it is."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # a library that it needs may be missing
        return None


def import_torch() -> Any:
    """Import and return PyTorch, the peer.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    torch = optional("torch")
    if torch is None:
        raise MissingDependencyError("PyTorch is not installed, and this benchmark measures against it",
                                     remedy="Install the extra: pip install 'sparsebp[torch]'")  # fmt: skip
    return torch


# Pictures without any window system: figures, and the bars that most benchmarks draw.


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.6) -> tuple[Any, Any]:
    """Return a Matplotlib figure and its axes, (rows, columns).

    Raises
    ------
    MissingDependencyError
        Matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "Matplotlib is not installed, and the picture needs it",
            remedy="Install the extra: pip install 'sparsebp[plot]'",
        ) from error
    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    return drawing, drawing.subplots(rows, columns, squeeze=False)


def bar_chart(
    labels: Sequence[str], groups: Iterable[tuple[str, str, Sequence[float]]], xlabel: str, *, each: float
) -> tuple[Any, Any]:
    """Return a figure with bars from the left, and its axes.

    Parameters
    ----------
    labels
        Of the rows, the first at the top.
    groups
        The bars of every row, one of each group: the name for the legend, the colour, a value for each row.
    xlabel
        What the values are.
    each
        Inches that a row is high.
    """
    groups = list(groups)
    drawing, axes = figure(width=8.0, height=each * len(labels) + 1.4)
    ax = axes[0, 0]
    thick = 0.8 / max(len(groups), 1)
    for number, (name, colour, values) in enumerate(groups):
        places = [row + (number - (len(groups) - 1) / 2) * thick for row in range(len(labels))]
        ax.barh(places, values, thick * 0.95, color=colour, label=name)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return drawing, ax


def legend_below(drawing: Any, *entries: Any, columns: int = 2) -> None:
    """Put the legend below the axes, where no bar reaches: handles and names, or all that have a label."""
    drawing.legend(*entries, fontsize=8, loc="outside lower center", ncols=columns)


def save_picture(drawing: Any, path: Path) -> Path:
    """Write a figure as PNG in one atomic step, without a date in it, and return the path."""
    return write_figure(drawing, path, dpi=144, metadata={"Software": None})


# What a benchmark leaves behind, as text: a JSON file, and tables for documents and terminals.
#
# A result is a plain dict that JSON can hold::
#
#     {"benchmark": "recurrent", "title": …, "leaves_out": …, "quick": false,
#      "complete": true, "environment": {…}, "settings": {…}, "rows": [{…}, …], "notes": ["…"]}
#
# A row is a flat dict; a duration is the dict of `Timing.to_dict` (seconds), a ratio the dict of `timing.ratio`. A row
# that could not be measured has an ``error``. ``complete`` is false while rows are measured, so in what a run leaves
# that was killed; files of before that have none are complete.

DEFAULT_FOLDER = Path("runs/bench")
_KEYS = {"benchmark": str, "title": str, "leaves_out": str, "quick": bool, "environment": dict, "settings": dict,
         "rows": list, "notes": list}  # fmt: skip


def outcome(missed: Sequence[str]) -> str:
    """Say whether a row reaches what it is to reach, given what it misses."""
    return f"missed: {', '.join(missed)}" if missed else "met"


def measured(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a result but those that could not be measured."""
    return [row for row in result["rows"] if "error" not in row]


def where(result: Mapping[str, Any]) -> str:
    """Return one line that says on what and when a result was measured."""
    env = result["environment"]
    gpu = f"{env['gpu']['name']}, " if "gpu" in env and result["benchmark"].startswith("gpu-") else ""
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items() if name in _NAMED)
    return (
        f"{gpu}{env['cpu']}, {env['cores']} cores, Python {env['python']}, {packages}, "
        f"commit {env['commit']}, {env['date'][:10]}"
    )


_NAMED = ("numpy", "numba", "torch", "jax", "onnxruntime", "scipy", "cupy-cuda12x", "cupy-cuda13x")


def save_result(result: Mapping[str, Any], folder: Path | None, stem: str | None = None) -> Path:
    """Write the result as ``<folder>/<stem>.json`` in one atomic step and return the path.

    Raises
    ------
    OutputError
        The folder cannot be written.
    """
    path = prepare_folder(DEFAULT_FOLDER if folder is None else folder) / f"{stem or result['benchmark']}.json"
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def load_result(path: Path) -> dict[str, Any]:
    """Read a result that `save` wrote.

    Raises
    ------
    FileFormatError
        The file is no benchmark result.
    """
    problem, remedy = f"{path} cannot be read as a benchmark result", "Run the benchmark again"
    content = read_file(path, problem, expected="a JSON file written by python -m benchmarks", remedy=remedy)
    try:
        result = parse_json(content)
    except ValueError as error:
        raise FileFormatError(problem, expected="JSON", got=str(error), remedy=remedy) from error
    missing = sorted(_KEYS.keys() - result.keys()) if isinstance(result, dict) else list(_KEYS)
    wrong = missing or [key for key, kind in _KEYS.items() if not isinstance(result[key], kind)]
    if wrong:
        raise FileFormatError(f"{path} is no benchmark result", expected=f"a JSON object with {', '.join(_KEYS)}",
                              got=f"missing or of another type: {', '.join(wrong)}", remedy=remedy)  # fmt: skip
    return result


Row: TypeAlias = dict[str, Any]
Result: TypeAlias = Mapping[str, Any]
"""What `load_result` returns."""

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

    def threads(self, using: Callable[[int], AbstractContextManager[None]] = using_threads) -> Iterator[int]:
        """Yield each of the numbers of threads that this machine has, in use meanwhile; note the others."""
        for count in thread_counts_here(self.settings["threads"], self.note):
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
        Yields the rows, flat dicts. A row that could not be measured says why under ``error``.
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
            save_result(result, out, run.stem + PARTIAL)
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
        drawing = self.picture({**result, "rows": measured(result)})
        drawing.suptitle(textwrap.fill(result["title"], 80), fontsize=10)
        return drawing

    def _finish(self, run: Run, folder: Path | None) -> None:
        """Write JSON and picture, then print what was left out, where the files are, and the table last."""
        result = run.result
        result["complete"], result["seconds"] = True, round(run.elapsed, 1)
        path = save_result(result, folder, run.stem)
        path.with_name(f"{run.stem}{PARTIAL}.json").unlink(missing_ok=True)
        written = [str(path)]
        try:
            written.append(str(save_picture(self.draw(result), path.with_suffix(".png"))))
        except MissingDependencyError as error:
            run.echo(f"No picture: {error}")
        for note in result["notes"]:
            run.echo(f"note: {note}")
        lines = ("", result["title"], f"Not in the numbers: {result['leaves_out']}", where(result),
                 "Written: " + ", ".join(written), "")  # fmt: skip
        for line in lines:
            run.echo(line)
        shown = [column for column in self.columns if column.on_terminal]
        run.echo(tables.text_table(shown, measured(result), tables.letters()))


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
