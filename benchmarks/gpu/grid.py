"""The paper's grid on a GPU: T = 10 … 30 000 at B = 16 and B = 2 … 256 at T = 1000, against ``torch.nn`` with cuDNN.

``python -m benchmarks gpu-grid`` (BPPSA §5.1, §5.2). RNN and GRU, float32 and float64; backward alone and whole step,
timed with CUDA events; the step launched kernel by kernel, and captured into a CUDA graph as `Trainer` does. Beside
them our two backward kernels alone, with their floors: operations over the rate of the unit that does them, and bytes
over the copy bandwidth that this GPU shows. Points are measured in order of interest until time is up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks.gpu.device import COLOURS, HIDDEN, SECONDS, Rates, Recurrence, begin, device_rates
from benchmarks.gpu.graphs import Steps
from benchmarks.processes.points import measure_apart
from benchmarks.recurrent.training import measure_row
from benchmarks.tools import peers, pictures
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run
from benchmarks.tools.workload import CELLS, SequenceWorkload, TorchTwin, chunk_count
from sparsebp import kernels
from sparsebp.core import backend, tables, timing
from sparsebp.core.errors import SparseBPError
from sparsebp.core.tables import Column

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
BATCH, LENGTH = 16, 1000
DTYPES = ("float32", "float64")
TARGETS = {"backward at T = 1000": 20.0, "backward at T = 30000": 60.0, "captured step at T = 1000": 9.0}


class Point(NamedTuple):
    """One point of the grid."""

    cell: str
    dtype: Any
    length: int
    batch: int


def measure(run: Run) -> Iterator[Row]:
    """Measure the points of the grid until time is up.

    Raises
    ------
    DeviceError, MissingDependencyError
        There is no GPU, or CuPy is not installed.
    """
    begin(run)
    sizes = {name: run.settings[name] for name in ("lengths", "batches", "dtypes")}
    for row in measure_apart(run, [*grid(**sizes)], make, dict(run.rounds)):
        if row.get("uncaptured"):
            run.note(f"{row['model']}, {row['dtype']}: steps are not captured: {row['uncaptured']}")
        yield row


def grid(
    lengths: tuple[int, ...] = LENGTHS, batches: tuple[int, ...] = BATCHES, dtypes: tuple[str, ...] = DTYPES
) -> Iterator[Point]:
    """Yield the points, the paper's own first: float32 at T = 1000 and 30 000, then over T, over B, then float64."""
    first = [length for length in (LENGTH, 30_000) if length in lengths]
    for number, dtype in enumerate(np.dtype(name).type for name in dtypes):
        if number == 0:
            yield from (Point(cell, dtype, length, BATCH) for length in first for cell in CELLS)
        for cell in CELLS:
            for length in (*first, *(n for n in lengths if n not in first)):
                if number > 0 or length not in first:
                    yield Point(cell, dtype, length, BATCH)
        for cell in CELLS:
            for batch in batches:
                if batch != BATCH:
                    yield Point(cell, dtype, LENGTH, batch)


def make(rounds: Mapping[str, Any]) -> Callable[[Point], Row]:
    """Return what measures a point, in the process that does."""
    cupy = backend.cupy()
    rates, clock = device_rates(cupy), timing.DeviceClock(cupy)
    device = {"copy_bandwidth": rates.bandwidth, "peak_flops": rates.flops, "tf32": _allows_tf32()}

    def measure(point: Point) -> Row:
        try:
            return measure_point(point, cupy, rates, rounds, clock) | device
        finally:
            cupy.get_default_memory_pool().free_all_blocks()

    return measure


def measure_point(point: Point, xp: ModuleType, rates: Rates, rounds: Mapping[str, Any], clock: timing.Clock) -> Row:
    """Time one point: step and backward against PyTorch, and our two backward kernels against their floors."""
    device = "cpu" if backend.is_host(xp) else "cuda"
    workload = SequenceWorkload(point.cell, point.length, point.batch, dtype=point.dtype, device=device)
    row = measure_row(workload, rounds, clock)
    choice = workload.choice()
    row["chunks"] = chunks = choice.chunks if choice.chunks > 1 else chunk_count(point.length)
    row |= captured_step(workload, rounds, clock)
    del workload
    recurrence = Recurrence(kernels.get(xp), xp, point.cell, point.dtype, point.length, point.batch)
    calls = {"bp": recurrence.backward(), "chunked": recurrence.backward(chunks)}
    for name, measured in timing.measure(calls, clock=clock, **rounds).items():
        row[f"kernel_{name}"] = measured.to_dict()
    for name, (operations, moved) in costs(point).items():
        row[f"floor_{name}"] = max(operations / rates.flops[row["dtype"]], moved / rates.bandwidth)
        row[f"flops_{name}"], row[f"bytes_{name}"] = operations, moved
    return row


def captured_step(workload: SequenceWorkload, rounds: Mapping[str, Any], clock: timing.Clock) -> Row:
    """Time the step captured, in turn with PyTorch's; say why it is not, where it is not."""
    try:
        steps = Steps(workload.model, workload.loss, workload.optimizer, (workload.x, workload.target), graph=True)
    except (RuntimeError, SparseBPError) as error:  # CuPy's and CUDA's are RuntimeErrors
        return {"uncaptured": f"{type(error).__name__}: {error}"}
    if steps.uncaptured:
        return {"uncaptured": steps.uncaptured}
    timings = timing.measure({"ours": steps, "torch": TorchTwin(workload).step}, clock=clock, **rounds)
    return {"captured": timings["ours"].to_dict(), "captured_ratio": timing.ratio(timings["torch"], timings["ours"])}


def costs(point: Point, hidden: int = HIDDEN) -> dict[str, tuple[int, int]]:
    """Return (operations, bytes) that the sequential and the chunked backward cannot do without.

    Sequential: one matrix-vector product a step and gate matrix. Chunked: a matrix-matrix product in their place (the
    second pass over vectors is left out of the floor). Bytes: states and gates read, pre-activation gradients written,
    each once; the chunked scan reads its input twice.
    """
    steps = point.length * point.batch
    size = np.dtype(point.dtype).itemsize
    matrices, read, written = (1, hidden, hidden) if point.cell == "RNN" else (3, 5 * hidden, 4 * hidden)
    return {
        "bp": (2 * steps * matrices * hidden**2, steps * size * (read + written)),
        "chunked": (2 * steps * matrices * hidden**3, steps * size * (2 * read + written)),
    }


def _allows_tf32() -> bool | None:
    torch = peers.optional("torch")
    return None if torch is None else bool(torch.backends.cudnn.allow_tf32)


PARTS = {"backward": "backward", "captured": "step, captured", "step": "step, launched"}


def picture(result: Result) -> Any:
    """Draw the speed-ups over T and over B, backward and step, one curve a model and dtype."""
    drawing, axes = pictures.figure(1, 2, width=10.0, height=4.0)
    for ax, key, held, value in ((axes[0, 0], "length", "batch", BATCH), (axes[0, 1], "batch", "length", LENGTH)):
        for cell, color in COLOURS.items():
            for dtype, line in (("float32", "-"), ("float64", "--")):
                rows = sorted(
                    (r for r in result["rows"] if r["cell"] == cell and r["dtype"] == dtype and r[held] == value),
                    key=lambda r: r[key],
                )
                for part, marker in zip(PARTS, "osx", strict=True):
                    shown = [r for r in rows if f"{part}_ratio" in r]
                    ax.plot(
                        [r[key] for r in shown],
                        [r[f"{part}_ratio"]["median"] for r in shown],
                        line + marker,
                        color=color,
                        markersize=4,
                        alpha=1.0 if part == "backward" else 0.5,
                        label=f"{cell} {dtype}, {PARTS[part]}",
                    )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_xlabel("sequence length T (B = 16)" if key == "length" else "batch B (T = 1000)")
        ax.set_ylabel("times faster than torch.nn with cuDNN")
        ax.grid(alpha=0.3)
    axes[0, 1].legend(fontsize=6, ncols=2)
    return drawing


_POINT = ("model", "dtype", "length", "batch")

BENCHMARK = Benchmark(
    name="gpu-grid",
    title="Training a recurrent network on a GPU, hidden size 20: step and backward against torch.nn (cuDNN)",
    leaves_out="transfer of the batch to the GPU (both sides alike); floors count H = 20 lanes as full",
    settings={"targets": TARGETS},
    sizes={"lengths": LENGTHS, "batches": BATCHES, "dtypes": DTYPES},
    quick={"lengths": (4,), "batches": (), "dtypes": ("float32",)},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 1.0},
    threads=None,
    seconds=SECONDS,
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("dtype", "dtype", number=False),
        Column("T", "length"),
        Column("B", "batch"),
        Column("step, launched", "step_ours", tables.seconds, on_terminal=False),
        Column("step, captured", "captured", tables.seconds, on_terminal=False),
        Column("step, cuDNN", "step_torch", tables.seconds, on_terminal=False),
        Column("launched, over cuDNN", "step_ratio", tables.times),
        Column("captured, over cuDNN", "captured_ratio", tables.times),
        Column("backward, sparsebp", "backward_ours", tables.seconds, on_terminal=False),
        Column("backward, cuDNN", "backward_torch", tables.seconds, on_terminal=False),
        Column("backward, over cuDNN", "backward_ratio", tables.times),
        Column("`auto` chose", "algorithm", number=False),
        Column("sequential kernel", "kernel_bp", tables.seconds),
        Column("its floor", "floor_bp", tables.seconds, on_terminal=False),
        Column("scan kernels", "kernel_chunked", tables.seconds),
        Column("chunks", "chunks"),
        Column("their floor", "floor_chunked", tables.seconds, on_terminal=False),
    ),
    tables={
        "The whole step": (*_POINT, "step_ours", "captured", "step_torch", "captured_ratio"),
        "The whole step, launched": (*_POINT, "step_ratio"),
        "Backward alone": (*_POINT, "backward_ours", "backward_torch", "backward_ratio", "algorithm"),
        "Kernels of the recursion": (
            "model",
            "length",
            "batch",
            "kernel_bp",
            "floor_bp",
            "kernel_chunked",
            "floor_chunked",
            "chunks",
        ),
    },
    short=(*_POINT, "captured_ratio", "backward_ratio", "algorithm", "kernel_bp", "kernel_chunked"),
    picture=picture,
)
