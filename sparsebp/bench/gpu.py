"""The paper's grid on a GPU: T = 10 … 30 000 at B = 16 and B = 2 … 256 at T = 1000, against ``torch.nn`` with cuDNN.

``sparsebp bench gpu`` (BPPSA §5.1, §5.2). RNN and GRU, float32 and float64; backward alone and whole step, timed with
CUDA events. Beside them our two backward kernels alone, with their floors: operations over the rate of the unit that
does them, and bytes over the copy bandwidth that this GPU shows. Points are measured in order of interest until
time is up. Before them: whole steps of a DenseNet, launched and captured (`sparsebp.bench.gpu_steps`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsebp import backend, kernels
from sparsebp.bench import gpu_steps
from sparsebp.bench.recurrent import measure_row
from sparsebp.bench.tools import peers, pictures, report
from sparsebp.bench.tools.benchmark import Benchmark, Result, Row, Run
from sparsebp.bench.tools.report import Column
from sparsebp.bench.tools.workload import SequenceWorkload, chunk_count
from sparsebp.core import timing

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
BATCH, LENGTH = 16, 1000
SECONDS = 270.0
TARGETS = {"backward at T = 1000": 20.0, "backward at T = 30000": 60.0, "step, largest": 2.75}


class Point(NamedTuple):
    """One point of the grid."""

    cell: str
    dtype: Any
    length: int
    batch: int


class Rates(NamedTuple):
    """What the GPU can do at best: FLOP/s by dtype name (from its data), bytes/s (measured by a copy)."""

    flops: dict[str, float]
    bandwidth: float


def measure(run: Run) -> Iterator[Row]:
    """Measure the DenseNet's steps, then the points of the grid until time is up.

    Raises
    ------
    DeviceError, MissingDependencyError
        There is no GPU, or CuPy or a CUDA build of PyTorch is not installed.
    """
    cupy = backend.cupy()
    begin = time.perf_counter()
    env, result, rates = run.result["environment"], run.result, device_rates(cupy)
    run.stem = f"{env['gpu']['name'].replace(' ', '-').lower()}-{env['commit'].rstrip('+')}"
    result["settings"] |= {
        "peak_flops": rates.flops,
        "copy_bandwidth": rates.bandwidth,
        "torch_allow_tf32": _allows_tf32(),
    }
    points = [*grid()][:2] if run.quick else [*grid()]
    clock = timing.DeviceClock(cupy)
    result["steps"], notes = gpu_steps.measure_steps(cupy, run.quick, run.rounds, clock)
    for note in notes:
        run.note(note)
    run.echo(report.text_table(gpu_steps.COLUMNS, result["steps"], report.letters()))
    for number, point in enumerate(points):
        if not run.quick and time.perf_counter() - begin > SECONDS:
            run.note(f"{len(points) - number} of {len(points)} points not measured: {SECONDS:.0f} s were up")
            break
        yield measure_point(point, cupy, rates, run.rounds, clock)
        cupy.get_default_memory_pool().free_all_blocks()


def grid() -> Iterator[Point]:
    """Yield the points, the paper's own first: float32 over T, float32 over B, then float64."""
    for dtype in (np.float32, np.float64):
        for cell in ("RNN", "GRU"):
            for length in (1000, 30_000, *(n for n in LENGTHS if n not in (1000, 30_000))):
                yield Point(cell, dtype, length, BATCH)
        for cell in ("RNN", "GRU"):
            for batch in BATCHES:
                if batch != BATCH:
                    yield Point(cell, dtype, LENGTH, batch)


def measure_point(point: Point, xp: ModuleType, rates: Rates, rounds: Mapping[str, Any], clock: timing.Clock) -> Row:
    """Time one point: step and backward against PyTorch, and our two backward kernels against their floors."""
    device = "cpu" if backend.is_host(xp) else "cuda"
    workload = SequenceWorkload(point.cell, point.length, point.batch, dtype=point.dtype, device=device)
    row = measure_row(workload, rounds, clock)
    del workload
    calls, chunks = kernel_calls(point, xp)
    for name, measured in timing.measure(calls, clock=clock, **rounds).items():
        row[f"kernel_{name}"] = measured.to_dict()
    row["chunks"] = chunks
    for name, (operations, moved) in costs(point).items():
        row[f"floor_{name}"] = max(operations / rates.flops[row["dtype"]], moved / rates.bandwidth)
        row[f"flops_{name}"], row[f"bytes_{name}"] = operations, moved
    return row


def kernel_calls(point: Point, xp: ModuleType, hidden: int = 20) -> tuple[dict[str, Callable[[], object]], int]:
    """Return the two backward kernels on random states, ready to be timed, and the scan's number of chunks."""
    k = kernels.get(xp)
    rng = np.random.default_rng(0)
    length, batch, dtype = point.length, point.batch, np.dtype(point.dtype)

    def array(*shape: int) -> Any:
        return xp.asarray(rng.uniform(-0.2, 0.2, shape).astype(dtype))

    h, gh0, grad = array(length, batch, hidden), array(batch, hidden), array(batch, hidden)
    chunks = chunk_count(length)
    if point.cell == "RNN":
        w, gz = array(hidden, hidden), xp.empty_like(h)
        return {
            "bp": lambda: k.rnn_backward(h, w, None, grad, "tanh", gz, gh0),
            "chunked": lambda: k.rnn_backward(h, w, None, grad, "tanh", gz, gh0, chunks),
        }, chunks
    w, h0, gates = array(3 * hidden, hidden), array(batch, hidden), array(length, batch, 4 * hidden)
    ga = xp.empty_like(gates)
    return {
        "bp": lambda: k.gru_backward(h, h0, gates, w, None, grad, ga, gh0),
        "chunked": lambda: k.gru_backward(h, h0, gates, w, None, grad, ga, gh0, chunks),
    }, chunks


def costs(point: Point, hidden: int = 20) -> dict[str, tuple[int, int]]:
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


def device_rates(cupy: ModuleType) -> Rates:
    """Return the GPU's peak FLOP/s without matrix units, and the bandwidth that a large copy reaches."""
    device = cupy.cuda.Device()
    attributes = device.attributes
    clock = attributes["ClockRate"] * 1e3
    lanes = {"80": (64, 32), "90": (128, 64)}.get(device.compute_capability, (128, 2))
    flops = [attributes["MultiProcessorCount"] * each * 2 * clock for each in lanes]
    source = cupy.ones(1 << 28, cupy.uint8)
    target = cupy.empty_like(source)
    copy = timing.measure({"copy": lambda: cupy.copyto(target, source)}, rounds=7, clock=timing.DeviceClock(cupy))[
        "copy"
    ]
    return Rates({"float32": flops[0], "float64": flops[1]}, 2 * source.nbytes / copy.median)


def _allows_tf32() -> bool | None:
    torch = peers.optional("torch")
    return None if torch is None else bool(torch.backends.cudnn.allow_tf32)


def picture(result: Result) -> Any:
    """Draw the speed-ups over T and over B, backward and step, one curve a model and dtype."""
    drawing, axes = pictures.figure(1, 2, width=10.0, height=4.0)
    for ax, key, held, value in ((axes[0, 0], "length", "batch", BATCH), (axes[0, 1], "batch", "length", LENGTH)):
        for cell, color in (("RNN", "#1e40af"), ("GRU", "#9a3412")):
            for dtype, line in (("float32", "-"), ("float64", "--")):
                rows = sorted(
                    (r for r in result["rows"] if r["cell"] == cell and r["dtype"] == dtype and r[held] == value),
                    key=lambda r: r[key],
                )
                for part, marker in (("backward", "o"), ("step", "s")):
                    ax.plot(
                        [r[key] for r in rows],
                        [r[f"{part}_ratio"]["median"] for r in rows],
                        line + marker,
                        color=color,
                        markersize=4,
                        alpha=1.0 if part == "backward" else 0.5,
                        label=f"{cell} {dtype}, {part}",
                    )
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.axhline(1, color="black", linewidth=0.8)
        ax.set_xlabel("sequence length T (B = 16)" if key == "length" else "batch B (T = 1000)")
        ax.set_ylabel("times faster than torch.nn with cuDNN")
        ax.grid(alpha=0.3)
    axes[0, 1].legend(fontsize=7, ncols=2)
    return drawing


_POINT = ("model", "dtype", "length", "batch")

BENCHMARK = Benchmark(
    name="gpu",
    title="Training a recurrent network on a GPU, hidden size 20: step and backward against torch.nn (cuDNN)",
    leaves_out="transfer of the batch to the GPU (both sides alike); floors count H = 20 lanes as full",
    settings={"targets": TARGETS | gpu_steps.TARGETS, "seconds": SECONDS},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 1.0},
    threads=None,
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("dtype", "dtype", number=False),
        Column("T", "length"),
        Column("B", "batch"),
        Column("step, sparsebp", "step_ours", report.seconds, on_terminal=False),
        Column("step, cuDNN", "step_torch", report.seconds, on_terminal=False),
        Column("step, over cuDNN", "step_ratio", report.times),
        Column("backward, sparsebp", "backward_ours", report.seconds, on_terminal=False),
        Column("backward, cuDNN", "backward_torch", report.seconds, on_terminal=False),
        Column("backward, over cuDNN", "backward_ratio", report.times),
        Column("`auto` chose", "algorithm", number=False),
        Column("sequential kernel", "kernel_bp", report.seconds),
        Column("its floor", "floor_bp", report.seconds, on_terminal=False),
        Column("scan kernels", "kernel_chunked", report.seconds),
        Column("their floor", "floor_chunked", report.seconds, on_terminal=False),
    ),
    tables={
        "The whole step": (*_POINT, "step_ours", "step_torch", "step_ratio", "algorithm"),
        "Backward alone": (*_POINT, "backward_ours", "backward_torch", "backward_ratio"),
        "Kernels of the recursion": (*_POINT, "kernel_bp", "floor_bp", "kernel_chunked", "floor_chunked"),
    },
    short=(*_POINT, "step_ratio", "backward_ratio", "algorithm", "kernel_bp", "kernel_chunked"),
    picture=picture,
)
