"""Shared by all benchmarks: the environment's record, pictures, results, columns, and `Benchmark` with its runs.

A module of `benchmarks` has the workloads, and the measurement and targets of a row; it declares the rest in a
`Benchmark`, which `benchmarks.MODULES` lists.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
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
from types import MappingProxyType, ModuleType
from typing import Any, TypeAlias

import numpy as np

from sparsebp.core import backend, tables
from sparsebp.core.errors import FileFormatError, MissingDependencyError, OptionError, SparseBPError
from sparsebp.core.files import parse_json, prepare_folder, read_file, write_atomically, write_figure
from sparsebp.core.machine import cpu_model
from sparsebp.core.tables import Column
from sparsebp.core.threads import get_threads, most_threads, set_threads
from sparsebp.core.timing import Timing

Row: TypeAlias = dict[str, Any]
Result: TypeAlias = Mapping[str, Any]
"""A result as `load_result` returns it."""

# The record of the environment: processor, GPU, threads, versions, commit, date; and the memory.

_PACKAGES = (
    "numpy", "scipy", "numba", "torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "python-graphblas", "mkl", "jax",
    "onnxruntime", "pyamg", "pandas", "arch", "torchlpc",
)  # fmt: skip

_COPIED = 1 << 27
"""Bytes of each array: several times the last cache."""


def environment() -> dict[str, Any]:
    """Return the record of the machine and the versions."""
    from sparsebp import __version__

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    record: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(), "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": total_memory(), "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "sparsebp": __version__,
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "blas": f"{blas.get('name')} {blas.get('version')}",
    }  # fmt: skip
    if hasattr(os, "getloadavg"):
        record["load_at_start"] = round(os.getloadavg()[0], 2)
    if backend.has_gpu():
        record["gpu"] = _gpu()
    return record


def commit() -> str:
    """Return the source tree's commit, short, with ``+`` if files differ from it.

    In a copy without its history, or with another one: the environment variable ``SPARSEBP_COMMIT``, which wins.
    """
    given = os.environ.get("SPARSEBP_COMMIT")
    if given:
        return given
    root = Path(__file__).resolve().parents[1]
    try:
        git = ["git", "-C", str(root)]
        subprocess.run([*git, "ls-files", "--error-unmatch", "benchmarks/__init__.py"], capture_output=True, check=True)
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        status = [*git, "status", "--porcelain", "--untracked-files=no", "--", "sparsebp", "benchmarks", "papers"]
        changed = subprocess.run(status, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
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


# Threads, the same for both sides of a comparison, and packages that may be missing.


@contextlib.contextmanager
def using_threads(count: int) -> Iterator[None]:
    """Let the kernels, BLAS and PyTorch (each if it is there) use `count` threads inside the ``with`` block."""
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
    """Return the numbers of threads in `wanted` that this machine has; pass the others to `note`."""
    most = most_threads()
    for count in wanted:
        if count > most:
            note(f"{count} threads: left out, this machine has {most}")
    return tuple(count for count in wanted if count <= most)


def optional(name: str) -> ModuleType | None:
    """Import and return a package that may be missing; None if it is."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):  # a library that it needs may be missing
        return None


def import_torch() -> Any:
    """Import and return PyTorch, the peer."""
    torch = optional("torch")
    if torch is None:
        raise MissingDependencyError("PyTorch is not installed, and this benchmark measures against it",
                                     remedy="Install the extra: pip install 'sparsebp[torch]'")  # fmt: skip
    return torch


# Pictures without any window system: figures, and the bars that most benchmarks draw.


def figure(rows: int = 1, columns: int = 1, *, width: float = 8.0, height: float = 3.6) -> tuple[Any, Any]:
    """Return a Matplotlib figure and its axes, (rows, columns)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError("Matplotlib is not installed, and the picture needs it", remedy="Install the "
                                     "extra: pip install 'sparsebp[plot]'") from error  # fmt: skip
    drawing = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawing)
    axes = drawing.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.grid(alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return drawing, axes


def finish(drawing: Any, title: str, **options: Any) -> Any:
    """Give a figure its title and, unless it has one, a legend below the axes, where nothing is covered."""
    entries: dict[str, Any] = {}
    for ax in drawing.axes:
        handles, labels = ax.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True))
    if entries and not any(ax.get_legend() for ax in drawing.axes):
        drawing.legend(entries.values(), entries, fontsize=8, loc="outside lower center", ncols=min(len(entries), 3))
    drawing.suptitle(title, **options)
    return drawing


OURS, TORCH, JAX, ONNX, SCIPY, MKL, PAPER = (
    "#1e40af", "#dc2626", "#15803d", "#7e22ce", "#d97706", "#0e7490", "#6b7280",
)  # fmt: skip
"""Colours in every picture: a time has that of who took it, a speed-up that of the peer, variants a tint of it."""
BLUES = (OURS, "#93c5fd", "#3b82f6", "#0f1f4d", "#bfdbfe")
TORCH_TINT, SCIPY_TINTS, PAPER_TINT = "#fca5a5", ("#fcd34d", "#92400e"), "#d1d5db"
PEERS = {
    "torch": ("over PyTorch", TORCH),
    **dict.fromkeys(("scipy", "coo_array.tocsr", "trf, lsmr", "SciPy trf, lsmr"), ("over SciPy", SCIPY)),
}
"""Names and colours of the peers that rows are ``against``."""
OTHER_PEER = "over another package", "#94a3b8"
SPEED_UP = "speed-up: the peer's time over ours, median"
KINDS = (OURS, "#0f766e", "#a16207", "#a21caf", "#475569", "#ea580c")
"""Colours of cells, schedules and sizes: all of them sparsebp, so that no peer is among them."""


def shades_between(low: str, high: str) -> Any:
    """Return the colours from one over white to the other."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("shades", (low, "white", high))


def bar_chart(
    labels: Sequence[str], groups: Iterable[tuple[str | Sequence[str], str | Sequence[str], Sequence[float]]],
    xlabel: str, *, log: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Return a figure with bars from the left, each with its value, and its axes. NaN draws none.

    A group has a name, a colour and values; name and colour may be those of each bar.
    """
    groups = list(groups)
    labels = ["\n".join(textwrap.fill(line, 46) for line in label.splitlines()) for label in labels]
    drawing, axes = figure(width=8.0, height=max(0.4, 0.19 * len(groups) + 0.1) * len(labels) + 1.4)
    ax = axes[0, 0]
    thick = 0.84 / max(len(groups), 1)
    present = [[not math.isnan(values[row]) for *_, values in groups] for row in range(len(labels))]
    for number, (name, colour, values) in enumerate(groups):
        places = [row + (sum(there[:number]) - (sum(there) - 1) / 2) * thick for row, there in enumerate(present)]
        drawn = ax.barh(places, values, thick * 0.92, color=colour, label=name)
        texts = ["" if math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values]
        ax.bar_label(drawn, texts, padding=2, fontsize=7)
    if log:
        ax.set_xscale("log")
        ax.set_xlim(left=0.7 * min(value for *_, values in groups for value in values if value > 0))
    ax.margins(x=0.1, y=0.02)
    ax.grid(False, axis="y")
    ax.set_axisbelow(True)
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(xlabel, fontsize=9)
    return drawing, ax


def bars(
    label: str, sides: Mapping[str, str], xlabel: str, colours: Sequence[str] = BLUES, *,
    unit: float = 1.0, log: bool = False, line: float | None = None,
) -> Callable[[Result], Any]:  # fmt: skip
    """Return a function that draws a bar for each of `sides` in the rows of the result that documents show.

    `label` is formatted with the row. `sides` maps keys of a row to names; values are multiplied by `unit`. Where rows
    say which peer they are ``against``, bars have its name and colour. `line` is dashed. Threads are on the axis where
    all rows have the same, else in the labels.
    """

    def draw(result: Result) -> Any:
        rows = result.get("shown") or result["rows"]
        threads = [tables.in_threads(row["threads"]) for row in rows if "threads" in row]
        labels = [label.format(**row) for row in rows]
        if len(set(threads)) > 1:
            labels = [f"{text}\n{count}" for text, count in zip(labels, threads, strict=True)]
        axis = f"{xlabel} ({threads[0]})" if len(set(threads)) == 1 else xlabel
        peers = [PEERS.get(row["against"], OTHER_PEER) for row in rows if "against" in row]
        groups = [([name for name, _ in peers] or side, [colour for _, colour in peers] or own,
                   [unit * middle(row[key]) if row.get(key) is not None else math.nan for row in rows])
                  for (key, side), own in zip(sides.items(), colours, strict=False)]  # fmt: skip
        drawing, ax = bar_chart(labels, groups, axis, log=log)
        if line is not None:
            ax.axvline(line, color="#475569", linewidth=0.8, linestyle="--", label=f"{line:g}×")
            ax.set_xlim(left=min(ax.get_xlim()[0], 0.7 * line))
        return drawing

    return draw


def middle(value: Any) -> float:
    """Return the median of a timing or of a ratio, or the number itself."""
    return float(value["median"] if isinstance(value, Mapping) else value)


def each(measured: Timing, count: float) -> Timing:
    """Return the timing of one of `count` things that were timed together."""
    return Timing(tuple(seconds / count for seconds in measured.seconds))


def save_picture(drawing: Any, path: Path) -> Path:
    """Write a figure as PNG in one atomic step, without a date in it, and return the path."""
    return write_figure(drawing, path, dpi=144, metadata={"Software": None})


# Results: a JSON file, and tables for documents and terminals.
#
# A result is a plain dict that JSON can hold::
#
#     {"benchmark": "recurrent", "title": …, "leaves_out": …, "quick": false,
#      "complete": true, "environment": {…}, "settings": {…}, "rows": [{…}, …], "notes": ["…"]}
#
# A row is a flat dict; a duration is the dict of `Timing.to_dict` (seconds), a ratio the dict of `timing.ratio`. A row
# that could not be measured has an ``error``. ``complete`` is false while rows are measured, so in the file of
# a killed run; older files without it are complete.

DEFAULT_FOLDER = Path("runs/bench")
_KEYS = {"benchmark": str, "title": str, "leaves_out": str, "quick": bool, "environment": dict, "settings": dict,
         "rows": list, "notes": list}  # fmt: skip


def outcome(missed: Sequence[str]) -> str:
    """Return the outcome of a row, given the targets that it misses."""
    return f"missed: {', '.join(missed)}" if missed else "met"


def reaches(row: Mapping[str, Any], key: str, least: float, peer: str = "") -> Row:
    """Return the target of a row, a ratio of at least `least`, and whether its median reaches it."""
    times = middle(row[key])
    return {"target": f"≥ {least:g}×{peer}", "met": outcome([f"{times:.2g}×"] if times < least else [])}


def measured(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if "error" not in row]


def where(result: Mapping[str, Any]) -> str:
    """Return a line with machine, versions and date of a result."""
    env = result["environment"]
    gpu = f"{env['gpu']['name']}, " if "gpu" in env and result["benchmark"].startswith("gpu-") else ""
    packages = ", ".join(f"{name} {version}" for name, version in env["packages"].items() if name in _NAMED)
    return (
        f"{gpu}{env['cpu']}, {env['cores']} cores, Python {env['python']}, {packages}, "
        f"commit {env['commit']}, {env['date'][:10]}"
    )


_NAMED = ("numpy", "numba", "torch", "jax", "onnxruntime", "scipy", "pyamg", "cupy-cuda12x", "cupy-cuda13x")


def save_result(result: Mapping[str, Any], folder: Path | None, stem: str | None = None) -> Path:
    """Write the result as ``<folder>/<stem>.json`` in one atomic step and return the path."""
    path = prepare_folder(DEFAULT_FOLDER if folder is None else folder) / f"{stem or result['benchmark']}.json"
    write_atomically(path, (json.dumps(result, indent=1, ensure_ascii=False) + "\n").encode())
    return path


def keep_of_other_maker(path: Path, result: Mapping[str, Any]) -> None:
    """Rename the files of an earlier result that another maker's processor measured: the newest of each stays."""
    if result["quick"] or not path.exists():
        return
    before, now = (maker(each) for each in (load_result(path), result))
    if before != now:
        for suffix in (".json", ".png", ".csv"):
            path.with_stem(f"{path.stem}-{now}").with_suffix(suffix).unlink(missing_ok=True)
            if path.with_suffix(suffix).exists():
                path.with_suffix(suffix).replace(path.with_stem(f"{path.stem}-{before}").with_suffix(suffix))


def maker(result: Mapping[str, Any]) -> str:
    """Return the first word of the processor's name, its maker: ``"amd"``, ``"intel"``."""
    return re.sub(r"\(.*", "", str(result["environment"]["cpu"]).split()[0]).lower()


def write_texts(wanted: Mapping[Path, str], check: bool) -> int:
    """Write the texts that differ from their files, or with `check` name them only; return the exit status."""
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_bytes() != text.encode()]
    for path in stale:
        print(f"{path}: {'out of date' if check else 'updated'}")
        if not check:
            write_atomically(path, wanted[path].encode())
    return int(bool(stale) and check)


def load_result(path: Path) -> dict[str, Any]:
    """Read a result that `save` wrote."""
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


_SHOWS: dict[str, Callable[[Any], str]] = {
    "numbers": str, "seconds": tables.seconds, "times": tables.times, "sizes": tables.size, "counts": tables.count,
}  # fmt: skip


def columns(*others: Column, words: Mapping[str, str] = MappingProxyType({}), formats: Mapping[str, Mapping[str, str]] =
            MappingProxyType({}), **kinds: Mapping[str, str]) -> tuple[Column, ...]:  # fmt: skip
    """Return columns, given the headings of each kind (`words`, or a key of `_SHOWS`, or a format) by key in a row."""
    shows = [(_SHOWS[kind], headings) for kind, headings in kinds.items()]
    shows += [(form.format, headings) for form, headings in formats.items()]
    numeric = (Column(heading, key, show) for show, headings in shows for key, heading in headings.items())
    return (*others, *numeric, *(Column(heading, key, number=False) for key, heading in words.items()))


COMMON = columns(
    words={name: name for name in ("model", "network", "cell", "dtype", "target")} | {"met": "outcome"},
    numbers={"batch": "B", "length": "T", "threads": "threads", "ranks": "ranks"},
    seconds={"ours": "sparsebp", "torch": "torch.nn", "scipy": "SciPy"},
)
"""The columns of several benchmarks, which a benchmark's own take precedence of."""

QUICK_ROUNDS = {"rounds": 2, "least_rounds": 2, "warmup": 1}
PARTIAL = ".partial"
"""Added to the stem of a result's file while rows are measured."""


@dataclass
class Run:
    """One run of a benchmark, as its `measure` gets it."""

    quick: bool  # whether it is a smoke test, with the benchmark's small sizes
    # Constants and sizes of the benchmark, and the numbers of threads; part of the result.
    settings: Mapping[str, Any]
    rounds: Mapping[str, Any]  # options of `timing.measure`
    result: dict[str, Any]  # so far; rows are added as `measure` yields them
    echo: Callable[[str], None]  # takes every line that is printed
    stem: str  # name of the files without their suffix
    seconds: float | None = None  # time limit
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
class Overview:
    """A row of the table of all benchmarks: how many times as fast as a peer, and where slower."""

    task: str
    peer: str
    ratio: str  # key of the peer's time over ours
    label: str  # names a row where we are slower; formatted with the row
    page: str  # that says more
    of: Callable[[Row], bool] = lambda row: True  # the rows that count

    def cells(self, rows: Iterable[Row]) -> tuple[str, str, str, str]:
        """Return task, peer, median and range of the ratios, and what is slower."""
        counted = [(middle(row[self.ratio]), row) for row in rows if row.get(self.ratio) is not None and self.of(row)]
        ratios = [ratio for ratio, _ in counted]
        slower = [self.label.format(**row) for ratio, row in counted if ratio < 1]
        names = f": {'; '.join(dict.fromkeys(slower))}" if slower else ""
        times = [tables.times(value) for value in (np.median(ratios), min(ratios), max(ratios))]
        return (
            f"[{self.task}]({self.page})", self.peer, f"{times[0]} ({times[1][:-1]}–{times[2][:-1]})",
            f"{len(slower) or 'none'} of {len(counted)}{names}",
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark that ``python -m benchmarks`` runs."""

    name: str  # of its files, too
    title: str  # may name settings in braces
    leaves_out: str  # costs of a user that are not in the numbers
    measure: Callable[[Run], Iterator[Row]]  # yields rows; a failed one has an ``error``
    columns: tuple[Column, ...]  # those that `COMMON` lacks
    short: tuple[str, ...]  # keys of the columns that are printed for each row, and in documents
    picture: Callable[[Result], Any]  # draws a result, without a title
    in_short: Callable[[Row], bool] = lambda row: True  # the rows that documents and bars show, at most a dozen
    in_readme: Callable[[Row], bool] | None = None  # the rows of README's table, if not those of `in_short`
    overview: Overview | None = None  # what the overview of all benchmarks says of this one
    settings: Mapping[str, Any] = field(default_factory=dict)  # part of every result
    sizes: Mapping[str, Any] = field(default_factory=dict)  # further settings
    quick: Mapping[str, Any] = field(default_factory=dict)  # their values with ``--quick``
    rounds: Mapping[str, Any] = field(default_factory=dict)  # options of `timing.measure`
    quick_rounds: Mapping[str, Any] = field(default_factory=lambda: QUICK_ROUNDS)
    threads: tuple[int, ...] | None = (1, 2)  # default numbers of threads; None: not varied
    seconds: float | None = None  # default time limit; rows that come later are left out, with a note

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

        After every row, ``<name>.partial.json`` has the rows so far, with ``"complete": false``: a killed run leaves
        these, and the result of the run before.
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
            "benchmark": self.name, "title": self.title.format(**settings), "leaves_out": self.leaves_out,
            "quick": quick, "complete": False, "environment": environment(), "settings": settings, "rows": [],
            "notes": [],
        }  # fmt: skip
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
        by_key = {column.key: column for column in (*COMMON, *self.columns)}
        return [by_key[key] for key in keys]

    def shown(self, rows: Iterable[Mapping[str, Any]]) -> list[Column]:
        """Return the columns in short, and those of the others that the rows have."""
        keys = {key for row in rows for key in row}
        others = (column.key for column in (*self.columns, *COMMON) if column.key in keys)
        return self.named(dict.fromkeys((*self.short, *others)))

    def said(self, row: Mapping[str, Any]) -> str:
        """Return the line that is printed for a row."""
        shown = [column for column in self.named(self.short) if "error" not in row or column.key in row]
        said = "; ".join(f"{column.heading} {column.cell(row)}" for column in shown)
        return f"{said}: {row['error']}" if "error" in row else said

    def draw(self, result: Result) -> Any:
        """Draw the picture; `bars` draws the rows that documents show, or all if there are none of them."""
        rows = measured(result)
        shown = [row for row in rows if self.in_short(row)]
        drawing = self.picture({**result, "rows": rows, "shown": shown})
        return finish(drawing, textwrap.fill(result["title"], 92), fontsize=10)

    def _finish(self, run: Run, folder: Path | None) -> None:
        """Write JSON and picture; print notes, the files, and the table last."""
        result = run.result
        result["complete"], result["seconds"] = True, round(run.elapsed, 1)
        keep_of_other_maker((DEFAULT_FOLDER if folder is None else folder) / f"{run.stem}.json", result)
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
        rows = measured(result)
        run.echo(tables.text_table(self.shown(rows), rows, tables.letters()))


SHARE = 0.7
"""Share of the available memory that a row, or one side of it, may take."""


def fits(what: str, need: int, note: Callable[[str], None]) -> bool:
    """Return whether there is memory for `need` bytes; if not, `note` says that `what` is left out."""
    have = available_memory()
    if have is None or need <= SHARE * have:
        return True
    note(
        f"{what}: left out, it needs {tables.size(need)} and {tables.size(have)} are free "
        f"(at most {SHARE:.0%} of that are taken)"
    )
    return False


ALIKE = 1e-4
"""Results that differ by less, over their largest value, count as equal."""


def refuse_difference(what: str, peer: str, difference: float) -> None:
    """Refuse to time a result that is not like the peer's."""
    if not difference < ALIKE:
        raise SparseBPError(f"{what} differs from {peer}'s", expected=f"a difference below {ALIKE:g}",
                            got=f"{difference:.3g}", remedy="Do not trust this build: please report it with the output "
                            "of sparsebp info")  # fmt: skip


def with_threads(result: Result, chosen: Callable[[Iterable[int]], int]) -> tuple[str, list[Row]]:
    """Return the most (`max`) or fewest (`min`) threads of a result, as text, and the rows with them."""
    count = chosen(row["threads"] for row in result["rows"])
    return tables.in_threads(count), [row for row in result["rows"] if row["threads"] == count]
