"""Single kernels on a GPU: the figures that plans and estimates rest on, each of them measured alone.

``python -m benchmarks gpu-numbers``. Steps of the sequential kernels by cell, dtype and hidden size; the scan by number
of chunks and by rows that a lane holds; its launches one by one; products of weight gradients; what Python takes for a
launch; a backward captured into a graph. Cycles are those of the clock that the device names.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import BATCH, COLOURS, HIDDEN, SECONDS, Recurrence, begin, chosen_chunks
from benchmarks.processes.points import measure_apart
from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.workload import CELLS
from sparsebp import kernels
from sparsebp.core import backend, tables, timing
from sparsebp.core.cuda_graphs import GraphRecorder
from sparsebp.core.errors import SparseBPError
from sparsebp.core.tables import Column
from sparsebp.kernels.device import DeviceKernels, RawModuleLoader
from sparsebp.kernels.spec import Kernels

STEPS = 4000
"""Of the sequential kernels: what a launch costs is little of it."""
LIMIT = 20.0
"""Seconds that a point may take: a kernel that hangs costs no more."""
CALLS = 300
"""Launches in a row whose Python time is taken."""


class Point(NamedTuple):
    """One figure, or those of one scan's launches."""

    what: str
    cell: str
    dtype: Any
    length: int
    hidden: int = HIDDEN
    chunks: int = 1
    rows_a_lane: int | None = None


def measure(run: Run) -> Iterator[Row]:
    """Measure every point until time is up.

    Raises
    ------
    DeviceError, MissingDependencyError
        There is no GPU, or CuPy is not installed.
    """
    return measure_apart(run, [*points(run.settings, begin(run))], make, dict(run.rounds), limit=LIMIT)


def points(sizes: Mapping[str, Any], xp: ModuleType) -> Iterator[Point]:
    """Yield the points for arrays of `xp`: one of each kind at the paper's size, then hidden sizes, sweeps, float64."""
    single, double = np.float32, np.float64
    steps, lengths, hidden, chunks = sizes["steps"], sizes["lengths"], sizes["hidden"], sizes["chunks"]
    for cell in CELLS:
        yield Point("forward", cell, single, steps)
        yield Point("input", cell, single, steps)
        yield Point("backward", cell, single, steps)
        yield Point("summed", cell, single, steps)
        for length in lengths:
            yield Point("summed", cell, single, length, chunks=chosen_chunks(cell, single, length, xp))
            yield Point("phases", cell, single, length, chunks=chosen_chunks(cell, single, length, xp))
            yield Point("weights", cell, single, length)
        yield Point("python", cell, single, 1)
        yield Point("captured", cell, single, lengths[0], chunks=chosen_chunks(cell, single, lengths[0], xp))
    for cell in CELLS:
        for length in lengths:
            yield from (Point("scan", cell, single, length, chunks=count) for count in chunks if count <= length)
    for cell in CELLS:
        for length in lengths:
            for rows in rows_tried(cell, sizes):
                yield Point(
                    "phases", cell, single, length, chunks=chosen_chunks(cell, single, length, xp), rows_a_lane=rows
                )
    for dtype in (single, double):
        for size in (size for size in hidden if (dtype, size) != (single, HIDDEN)):
            for cell in CELLS:
                for what in ("forward", "backward"):
                    yield Point(what, cell, dtype, steps, size)
    for cell in CELLS:
        for length in lengths:
            yield Point("phases", cell, double, length, chunks=chosen_chunks(cell, double, length, xp))


def rows_tried(cell: str, sizes: Mapping[str, Any]) -> list[int]:
    """Return the rows to force on a lane. An LSTM's 40 need two, and three are what its registers have room for."""
    return [rows for rows in sizes["rows_a_lane"] if cell != "LSTM" or rows in (2, 3)]


def make(rounds: Mapping[str, Any]) -> Callable[[Point], Row]:
    """Return what measures a point, in the process that does."""
    cupy = backend.cupy()
    clock = cupy.cuda.Device().attributes["ClockRate"] * 1e3

    def measure(point: Point) -> Row:
        try:
            return measure_point(point, cupy, clock, rounds, timing.DeviceClock(cupy))
        finally:
            cupy.get_default_memory_pool().free_all_blocks()

    return measure


def measure_point(
    point: Point, xp: ModuleType, cycles: float, rounds: Mapping[str, Any], clock: timing.Clock
) -> Row:  # fmt: skip
    """Measure one point; `cycles` are those of the device a second."""
    recurrence = Recurrence(kernels.get(xp), xp, point.cell, point.dtype, point.length, BATCH, point.hidden)
    row: Row = {"batch": BATCH}
    if point.what == "phases":
        return row | phases(point, xp, rounds)
    if point.what == "python":
        return row | {"time": python_time(recurrence.forward, xp)}
    calls: dict[str, Callable[[], object]] = {
        "forward": recurrence.forward, "input": recurrence.forward_from_input, "backward": recurrence.backward(),
        "scan": recurrence.backward(point.chunks), "weights": partial(products, recurrence),
        "summed": recurrence.backward(point.chunks, summed=True),
    }  # fmt: skip
    if point.what == "captured":
        calls["captured"] = captured(calls["scan"], xp)
        both = timing.measure({name: calls[name] for name in ("scan", "captured")}, clock=clock, **rounds)
        return row | {"time": both["captured"].to_dict(), "launched": both["scan"].to_dict()}
    found = timing.measure({"time": calls[point.what]}, clock=clock, **rounds)["time"]
    row["time"], row["a_step"] = found.to_dict(), found.median / point.length
    return row | {"cycles_a_step": row["a_step"] * cycles}


def products(recurrence: Recurrence) -> None:
    """Multiply gradients at pre-activations by the states before them, as the weights' gradients are."""
    written, h = (a.reshape(-1, a.shape[-1]) for a in (recurrence.written, recurrence.h))
    backend.matmul(written.T, h)


def python_time(call: Callable[[], object], xp: ModuleType) -> float:
    """Return the seconds that the host takes for a call of one launch, from the call to its return."""
    call()
    backend.synchronize(xp)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    seconds = time.perf_counter() - start
    backend.synchronize(xp)
    return seconds / CALLS


def captured(call: Callable[[], object], xp: ModuleType) -> Callable[[], None]:
    """Return what replays a call from a graph."""
    recorder = GraphRecorder(xp, 1)
    with recorder.running():
        call()
    with recorder.capturing():
        call()
    return recorder.replay


def phases(point: Point, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time every launch of a scan alone, by its kernel: the sum and the parts, medians over calls.

    Raises
    ------
    SparseBPError
        Lanes hold another number of rows than the point has.
    """
    timed = TimedLoader(xp)
    device = DeviceKernels(xp, timed)
    if point.rows_a_lane is not None:
        device._rows_a_lane = lambda *sizes: point.rows_a_lane  # type: ignore[method-assign, assignment]
    run = Recurrence(Kernels(device), xp, point.cell, point.dtype, point.length, BATCH, point.hidden)
    call = run.backward(point.chunks)
    took: dict[str, list[float]] = defaultdict(list)
    call()
    for _ in range(rounds["rounds"]):
        timed.launches.clear()
        call()
        backend.synchronize(xp)
        for number, launch in enumerate(timed.launches):
            took[f"{number} {launch.kernel} of {launch.blocks} blocks"].append(launch.seconds(xp))
    found = {name: float(np.median(seconds)) for name, seconds in took.items()}
    rows = [launch.defines["ROWS"] for launch in timed.launches if "ROWS" in launch.defines]
    if point.rows_a_lane is not None and set(rows) != {point.rows_a_lane}:
        raise SparseBPError("Lanes do not hold as many rows as they are to", expected=point.rows_a_lane, got=rows,
                            remedy="Hold them where the launchers choose them")  # fmt: skip
    shown = ", ".join(f"{name[2:]} {tables.seconds(seconds)}" for name, seconds in found.items())
    return {"time": sum(found.values()), "launches": found, "parts": shown, "rows_a_lane": rows[0] if rows else None}


class Launch(NamedTuple):
    """A launch between two events."""

    kernel: str
    blocks: int
    defines: Mapping[str, Any]
    start: Any
    stop: Any

    def seconds(self, xp: ModuleType) -> float:
        """Return the seconds between the events, which are over."""
        return float(xp.cuda.get_elapsed_time(self.start, self.stop)) * 1e-3


class TimedLoader(RawModuleLoader):
    """Compiles as `RawModuleLoader`; its kernels note two events around every launch."""

    def __init__(self, xp: ModuleType) -> None:
        super().__init__(xp)
        self._xp = xp
        self.launches: list[Launch] = []

    def get(self, file: str, defines: Any) -> Any:
        """Return the module of `file`; see `RawModuleLoader`."""
        return _TimedModule(self, super().get(file, defines), defines)


class _TimedModule:
    def __init__(self, loader: TimedLoader, module: Any, defines: Mapping[str, Any]) -> None:
        self._loader, self._module, self._defines = loader, module, defines

    def get_function(self, name: str) -> Any:
        return _TimedKernel(self._loader, self._module.get_function(name), name, self._defines)


class _TimedKernel:
    def __init__(self, loader: TimedLoader, kernel: Any, name: str, defines: Mapping[str, Any]) -> None:
        self._loader, self._kernel, self._name, self._defines = loader, kernel, name, defines

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._kernel, name, value)  # its shared memory

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], **options: Any) -> None:
        event = self._loader._xp.cuda.Event
        launch = Launch(self._name, grid[0], self._defines, event(), event())
        launch.start.record()
        self._kernel(grid, block, args, **options)
        launch.stop.record()
        self._loader.launches.append(launch)


def picture(result: Result) -> Any:
    """Draw the scan over its number of chunks, and a step of the sequential kernels over the hidden size."""
    drawing, axes = pictures.figure(1, 2, width=10.0, height=4.0)
    rows, ax = result["rows"], axes[0, 0]
    for cell, colour in COLOURS.items():
        for length, line in zip(result["settings"]["lengths"], ("-o", "--s"), strict=False):
            scans = [r for r in rows if (r["what"], r["cell"], r["length"]) == ("scan", cell, length)]
            ax.plot([r["chunks"] for r in scans], [1e6 * r["time"]["median"] for r in scans], line, color=colour,
                    markersize=4, label=f"{cell}, T = {length}")  # fmt: skip
    ax.set_xlabel("chunks (B = 16, H = 20, float32)")
    ax.set_ylabel("backward, µs")
    for what, line in (("forward", "-o"), ("backward", "--s")):
        for cell, colour in COLOURS.items():
            steps = sorted((r for r in rows if (r["what"], r["cell"], r["dtype"]) == (what, cell, "float32")),
                           key=lambda r: r["hidden"])  # fmt: skip
            axes[0, 1].plot([r["hidden"] for r in steps], [1e9 * r["a_step"] for r in steps], line, color=colour,
                            markersize=4, label=f"{cell}, {what}")  # fmt: skip
    axes[0, 1].set_xlabel("hidden size H (B = 16, float32)")
    axes[0, 1].set_ylabel("ns a step")
    for ax in axes[0]:
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.grid(alpha=0.3)
        ax.legend(fontsize=7)
    return drawing


_POINT = ("what", "cell", "dtype", "length", "hidden", "chunks")

BENCHMARK = Benchmark(
    name="gpu-numbers",
    title="Kernels of the recurrences on a GPU, each alone: B = {batch}",
    leaves_out="what the host does before a launch, but for rows of Python's time; all that is not these kernels",
    settings={"batch": BATCH},
    sizes={
        "steps": STEPS,
        "lengths": (1000, 30_000),
        "hidden": (1, 7, 20, 32, 33, 64, 128),
        "chunks": (16, 24, 32, 48, 64, 96, 128, 192, 258, 384, 528),
        "rows_a_lane": (1, 2, 3, 4, 5),
    },
    quick={"steps": 5, "lengths": (9,), "hidden": (33,), "chunks": (5,), "rows_a_lane": (2,)},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 0.5},
    threads=None,
    seconds=SECONDS,
    measure=measure,
    columns=(
        Column("what", "what", number=False),
        Column("cell", "cell", number=False),
        Column("dtype", "dtype", number=False),
        Column("T", "length"),
        Column("H", "hidden"),
        Column("chunks", "chunks"),
        Column("rows a lane", "rows_a_lane"),
        Column("time", "time", tables.seconds),
        Column("launched", "launched", tables.seconds),
        Column("a step", "a_step", tables.seconds),
        Column("cycles a step", "cycles_a_step", "{:.0f}".format),
        Column("its launches", "parts", number=False, on_terminal=False),
    ),
    tables={
        "Every figure": (*_POINT, "time", "cycles_a_step"),
        "A step, and rows a lane": ("what", "cell", "length", "hidden", "chunks", "rows_a_lane", "a_step", "launched"),
        "Launches of a scan": ("cell", "length", "chunks", "parts"),
    },
    short=(*_POINT, "rows_a_lane", "time", "cycles_a_step", "parts"),
    picture=picture,
)
