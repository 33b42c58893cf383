"""Single kernels on a GPU: the figures that plans and rules rest on, each of them measured alone.

``python -m benchmarks gpu-numbers``. Steps of the sequential kernels by cell, dtype and hidden size; the scan by number
of chunks and by rows that a lane holds; its launches one by one; products of weight gradients; the Python time of a
launch; a backward captured into a graph; ours beside cuDNN's by hidden size and batch, and beside FlashRNN's where that
is installed; sparse products beside cuSPARSE's (`gpu_products`); a compiled derivative (`gpu_derivatives`).

Times of the GPU and of the host are apart, and cycles are of a measured clock: see `gpu_timing`.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from benchmarks.gpu_derivatives import DerivativePoint, measure_derivative
from benchmarks.gpu_products import SMALL, ProductPoint, measure_product, planned
from benchmarks.gpu_timing import WARM, Queued, kernel_names, measured, ratio, torch_replay
from benchmarks.harness import Benchmark, Result, Row, Run, columns
from benchmarks.processes import measure_apart
from benchmarks.recurrent import described
from benchmarks.schedules import find, optimizer_of
from benchmarks.workloads import CELLS, SequenceWorkload, TorchTwin, chunk_count
from sparsebp import kernels, models, nn
from sparsebp.core import backend, cublas, tables, timing
from sparsebp.core.check import Array
from sparsebp.core.errors import MissingDependencyError, SparseBPError
from sparsebp.core.graphs import GraphRecorder
from sparsebp.kernels.device import DeviceKernels, RawModuleLoader
from sparsebp.kernels.operands import WeightSums
from sparsebp.kernels.spec import Kernels
from sparsebp.runtime.actions import Stages
from sparsebp.runtime.executor import PlainExecutor
from sparsebp.runtime.search import all_schedules
from sparsebp.scan.rules import choose_recurrent_backward
from sparsebp.schedule import Schedule
from sparsebp.train.setup import schedule_of

# Shared by the benchmarks on a GPU: names of their files, the rates of the device, launches of the recurrences.

HIDDEN, BATCH = 20, 16
"""The paper's hidden size, and batch."""
COLOURS = dict(zip(("RNN", "GRU", "LSTM"), harness.KINDS, strict=False))
"""Of the cells' curves."""
SECONDS = 500.0
"""Limit of a run, so that it ends well within ten minutes."""


def begin(run: Run) -> ModuleType:
    """Return CuPy, after naming the run's files after the GPU and the commit."""
    cupy = backend.cupy()
    env = run.result["environment"]
    name = f"{run.stem}-{env['gpu']['name'].lower()}-{env['commit'].rstrip('+')}"
    run.stem = re.sub("[^A-Za-z0-9._-]+", "-", name)  # also a branch's name, with a slash
    return cupy


def chosen_chunks(cell: str, dtype: Any, length: int, xp: ModuleType) -> int:
    """Return the chunks that `auto` takes for the arrays of `xp`; about the root of T for the recursion."""
    name: Any = cell.lower()
    choice = choose_recurrent_backward(name, length, BATCH, HIDDEN, dtype, xp)
    return choice.chunks if choice.chunks > 1 else chunk_count(length)


class Rates(NamedTuple):
    """Limits of the GPU: FLOP/s by dtype name (from its data), bytes/s (measured by a copy), cycles/s."""

    flops: dict[str, float]
    bandwidth: float
    clock: float


def device_rates(cupy: ModuleType, rounds: Mapping[str, Any]) -> Rates:
    """Return the GPU's peak FLOP/s without matrix units, the bandwidth that a large copy reaches, and its clock."""
    device = cupy.cuda.Device()
    attributes = device.attributes
    clock = Queued(cupy)(timing.Call(lambda _: None), 1)["hertz"]
    lanes = {"80": (64, 32), "90": (128, 64)}.get(device.compute_capability, (128, 2))
    flops = [attributes["MultiProcessorCount"] * each * 2 * clock for each in lanes]
    source = cupy.ones(1 << 28, cupy.uint8)
    target = cupy.empty_like(source)
    copy = measured({"copy": lambda: cupy.copyto(target, source)}, cupy, rounds)["copy"]
    return Rates({"float32": flops[0], "float64": flops[1]}, 2 * source.nbytes / copy["median"], clock)


class Recurrence:
    """The kernels of one recurrent layer on random states of their own."""

    def __init__(
        self, kernels: Any, xp: ModuleType, cell: str, dtype: Any, length: int, batch: int, hidden: int = HIDDEN
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(0)
        gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[cell]

        def array(*shape: int) -> Array:
            return xp.asarray(rng.uniform(-0.2, 0.2, shape).astype(dtype))

        self.kernels, self.cell = kernels, cell
        self.gx, self.w_hh = array(length, batch, gates * hidden), array(gates * hidden, hidden)
        self.h, self.h0, self.grad = array(length, batch, hidden), array(batch, hidden), array(batch, hidden)
        self.x, self.input_weights = array(length, batch, 1), (array(gates * hidden, 1), *array(2, gates * hidden))
        self.b_hn, self.gates = array(hidden), array(length, batch, 4 * hidden) if gates > 1 else None
        self.forward_h = xp.empty_like(self.h)  # the backward's states stay as they are
        self.forward_gates = xp.empty_like(self.gates) if gates > 1 else None
        self.forward_c = xp.empty_like(self.h) if gates == 4 else None  # h, h0, grad serve for c, too
        outputs = [xp.empty_like(weight) for weight in (self.input_weights[0], self.w_hh, *self.input_weights[1:])]
        self.sums = WeightSums(self.x, self.h, *outputs)
        self.written = xp.empty_like(self.h if gates == 1 else self.gates)
        self.gh0, self.gc0 = xp.empty_like(self.grad), xp.empty_like(self.grad)

    def forward(self) -> None:
        """Run all steps forwards, on the projected input."""
        self._forward(self.gx)

    def forward_from_input(self) -> None:
        """Run all steps forwards, on an input of one feature, which the kernel projects."""
        self._forward(self.x, *self.input_weights)

    def _forward(self, x: Array, *weights: Array) -> None:
        if self.cell == "RNN":
            self.kernels.rnn_forward(x, self.w_hh, self.h0, "tanh", self.forward_h, *weights)
        elif self.cell == "GRU":
            written = self.forward_h, self.forward_gates
            self.kernels.gru_forward(x, self.w_hh, self.b_hn, self.h0, *written, *weights)
        else:
            states = self.h0, self.h0, self.forward_h, self.forward_c
            self.kernels.lstm_forward(x, self.w_hh, *states, self.forward_gates, *weights)

    def backward(self, chunks: int = 1, summed: bool = False) -> Callable[[], None]:
        """Return a function that runs all steps backwards in chunks, from a gradient at the last state.

        `summed`: weight gradients of an input of one feature are summed on the way, in place of gradients at the gates.
        """
        k, last = self.kernels, self.grad
        ga, sums = (None, self.sums) if summed else (self.written, None)
        if self.cell == "RNN":
            return lambda: k.rnn_backward(self.h, self.w_hh, None, last, "tanh", ga, self.gh0, chunks, sums)
        saved = (self.h, self.h0, self.gates, self.w_hh)
        if self.cell == "LSTM":
            return lambda: k.lstm_backward(*saved, None, last, last, ga, self.gh0, self.gc0, chunks, sums)
        return lambda: k.gru_backward(*saved, None, last, ga, self.gh0, chunks, sums)


# Whole steps on a GPU: launched kernel by kernel, or captured into a graph and replayed; one stream, or two.
#
# ``python -m benchmarks gpu-graphs`` (Oh et al., EuroSys 2022, §4): the paper's two recurrent models, and DenseNet. A
# net of many small layers waits for Python's launches; only captured, a second
# stream can help.

GRAPHS_TARGETS = {"capture": 1.3, "streams": 1.1}
"""A captured step over a launched one, on one stream; captured ones on two streams over one."""
GRAPHS_LIMIT = 150.0
"""Seconds of a point: the first one on two streams is in search of its orders as well."""
ONE_STREAM = "one stream"
ORDERS = {"conventional": ONE_STREAM, "two": "two streams", "joint": "two streams, joint", "list": "two streams, list"}


class GraphsPoint(NamedTuple):
    """A network and an order of its steps."""

    network: str
    order: str


Parts = tuple[Any, Any, Any, tuple[Any, Any]]
"""Model, loss, optimizer and batch."""


class Steps:
    """A compiled training step, captured if possible."""

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, batch: tuple[Any, Any], *, graph: bool,
        order: Schedule | None = None,
    ) -> None:  # fmt: skip
        order = schedule_of(Stages(model), "none", 1, "conventional") if order is None else order
        self._batch, self._executor = batch, PlainExecutor(model, loss, optimizer, order, graph=graph)
        for _ in range(WARM):  # the third is captured
            self()

    def __call__(self) -> None:
        """Run one step."""
        self._executor.step([self._batch])

    @property
    def uncaptured(self) -> str:
        """Why steps are not captured; empty if they are."""
        return "; ".join(self._executor.uncaptured)

    def close(self) -> None:
        """Run deferred updates and end the threads."""
        self._executor.flush()
        self._executor.close()


def measure_graphs(run: Run) -> Iterator[Row]:
    """Measure every network in every order."""
    begin(run)
    points = [GraphsPoint(network, ONE_STREAM) for network in run.settings["sequences"]]
    points += [GraphsPoint("DenseNet", order) for order in run.settings["orders"]]
    for row in measure_apart(run, points, make_graphs, dict(run.settings), dict(run.rounds), limit=GRAPHS_LIMIT):
        if row.get("uncaptured"):
            run.note(f"{row['network']}, {row['order']}: not captured: {row['uncaptured']}")
        yield row


def make_graphs(sizes: Mapping[str, Any], rounds: Mapping[str, Any]) -> Callable[[GraphsPoint], Row]:
    """Return the function that measures a point, in the measuring process."""
    cupy = backend.cupy()
    return lambda point: measure_graphs_point(point, cupy, sizes, rounds)


def measure_graphs_point(
    point: GraphsPoint, xp: ModuleType, sizes: Mapping[str, Any], rounds: Mapping[str, Any]
) -> Row:
    parts = _densenet(xp, sizes) if point.network == "DenseNet" else _sequence(xp, sizes["sequences"][point.network])
    sides = {"launched": (point.order, False), "captured": (point.order, True)}
    if point.order != ONE_STREAM:
        sides["one"] = (ONE_STREAM, True)
    found: dict[str, Steps] = {}
    for name, (words, graph) in sides.items():
        order = None if words == ONE_STREAM else _orders(xp, sizes["densenet"])[words]
        found[name] = Steps(*parts(), graph=graph, order=order)
    reasons = [steps.uncaptured for name, steps in found.items() if name != "launched" and steps.uncaptured]
    kept = {name: steps for name, steps in found.items() if name == "launched" or not steps.uncaptured}
    row: Row = {**measured(kept, xp, rounds, queue=False)}  # whole steps wait for the numbers of earlier ones
    for steps in found.values():
        steps.close()
    if "captured" in row:
        row["capture"] = ratio(row["launched"], row["captured"])
        if "one" in row:
            row["streams"] = ratio(row["one"], row["captured"])
    return row | {"uncaptured": "; ".join(dict.fromkeys(reasons))} | judge_graphs(row)


def _sequence(xp: ModuleType, sizes: tuple[str, int, int]) -> Callable[[], Parts]:
    device = "cpu" if backend.is_host(xp) else "cuda"

    def parts() -> Parts:
        workload = SequenceWorkload(*sizes, device=device)
        return workload.model, workload.loss, workload.optimizer, (workload.x, workload.target)

    return parts


def _densenet(xp: ModuleType, sizes: Mapping[str, Any]) -> Callable[[], Parts]:
    size, samples, side = sizes["densenet"]
    device = "cpu" if backend.is_host(xp) else "cuda"
    rng = np.random.default_rng(0)
    images = xp.asarray(rng.standard_normal((samples, 3, side, side), np.float32))
    batch = images, xp.asarray(rng.integers(10, size=samples))

    def parts() -> Parts:
        model = models.densenet(**dict(size), rng=0).to(device)
        return model, nn.CrossEntropyLoss(), optimizer_of(model), batch

    return parts


@cache
def _orders(xp: ModuleType, densenet: tuple[Any, ...]) -> dict[str, Schedule]:
    """Return DenseNet's orders on two streams by name, with the costs that are measured here."""
    parts = _densenet(xp, {"densenet": densenet})
    found = find(lambda: parts()[0], parts()[3])
    shape = {"stages": found.schedule.graph.stages, "unweighted": found.schedule.graph.unweighted}
    known = all_schedules(shape, found.costs) | {trial.name: trial.schedule for trial in found.trials}
    return {words: known[name] for name, words in ORDERS.items() if name in known}


def judge_graphs(row: Mapping[str, Any]) -> dict[str, str]:
    if "captured" not in row:
        return {"met": "not captured"}
    key = "streams" if "streams" in row else "capture"
    return {"met": "met" if row[key]["median"] >= GRAPHS_TARGETS[key] else f"missed: {key}"}


GPU_GRAPHS = Benchmark(
    name="gpu-graphs",
    title="Training steps on a GPU, launched and captured: float32",
    leaves_out="the steps in which a graph is captured or a schedule is found; loading batches",
    settings={"targets": GRAPHS_TARGETS, "dtype": "float32"},
    sizes={
        "sequences": {f"{cell}, T = {length}": (cell, length, 16) for length in (1000, 30_000) for cell in CELLS},
        "densenet": ((), 32, 32), "orders": tuple(ORDERS.values()),
    },
    quick={
        "sequences": {"RNN, T = 12": ("RNN", 12, 2)}, "densenet": ((("depth", 3), ("growth", 1), ("blocks", 1)), 2, 2),
        "orders": (ONE_STREAM, "two streams"),
    },
    rounds={"rounds": 15, "least_rounds": 3, "budget": 4.0},
    quick_rounds={**harness.QUICK_ROUNDS, "copies": 2},
    threads=None,
    seconds=SECONDS,
    measure=measure_graphs,
    columns=columns(
        words={"order": "order"},
        seconds={"launched": "launched", "captured": "captured"},
        times={"capture": "capture gains", "streams": "captured, over one stream"},
    ),
    short=("network", "order", "launched", "captured", "capture", "streams", "met"),
    picture=harness.bars("{network}\n{order}", {"captured": "captured", "launched": "launched"},
                         "ms per step, median", unit=1e3),
)  # fmt: skip


# The paper's grid on a GPU: T = 10 … 30 000 at B = 16 and B = 2 … 256 at T = 1000, against ``torch.nn`` with cuDNN.
#
# ``python -m benchmarks gpu-grid`` (BPPSA §5.1, §5.2). RNN and GRU, float32 and float64; backward alone and whole step,
# timed with CUDA events; the step launched kernel by kernel, and captured into a CUDA graph as `Trainer` does. Beside
# them our two backward kernels alone, with their floors: operations over the rate of the unit that does them, and bytes
# over the copy bandwidth that this GPU shows. Points are measured in order of interest until time is up.

LENGTHS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)
BATCHES = (2, 4, 8, 16, 32, 64, 128, 256)
GRID_BATCH, LENGTH = 16, 1000
DTYPES = ("float32", "float64")
GRID_TARGETS = {"backward at T = 1000": 20.0, "backward at T = 30000": 60.0, "captured step at T = 1000": 9.0}


class GridPoint(NamedTuple):
    """One point of the grid."""

    cell: str
    dtype: Any
    length: int
    batch: int


def measure_grid(run: Run) -> Iterator[Row]:
    """Measure the points of the grid until time is up."""
    begin(run)
    sizes = {name: run.settings[name] for name in ("lengths", "batches", "dtypes")}
    for row in measure_apart(run, [*grid(**sizes)], make_grid, dict(run.rounds)):
        if row.get("uncaptured"):
            run.note(f"{row['model']}, {row['dtype']}: steps are not captured: {row['uncaptured']}")
        yield row


def grid(
    lengths: tuple[int, ...] = LENGTHS, batches: tuple[int, ...] = BATCHES, dtypes: tuple[str, ...] = DTYPES
) -> Iterator[GridPoint]:
    """Yield the points, the paper's own first: float32 at T = 1000 and 30 000, then over T, over B, then float64."""
    first = [length for length in (LENGTH, 30_000) if length in lengths]
    for number, dtype in enumerate(np.dtype(name).type for name in dtypes):
        if number == 0:
            yield from (GridPoint(cell, dtype, length, GRID_BATCH) for length in first for cell in CELLS)
        for cell in CELLS:
            for length in (*first, *(n for n in lengths if n not in first)):
                if number > 0 or length not in first:
                    yield GridPoint(cell, dtype, length, GRID_BATCH)
        for cell in CELLS:
            for batch in batches:
                if batch != GRID_BATCH:
                    yield GridPoint(cell, dtype, LENGTH, batch)


def make_grid(rounds: Mapping[str, Any]) -> Callable[[GridPoint], Row]:
    """Return the function that measures a point, in the measuring process."""
    cupy = backend.cupy()
    rates = device_rates(cupy, rounds)
    device = {"copy_bandwidth": rates.bandwidth, "peak_flops": rates.flops, "tf32": _allows_tf32()}

    def measure(point: GridPoint) -> Row:
        try:
            return measure_grid_point(point, cupy, rates, rounds) | device
        finally:
            cupy.get_default_memory_pool().free_all_blocks()

    return measure


def measure_grid_point(point: GridPoint, xp: ModuleType, rates: Rates, rounds: Mapping[str, Any]) -> Row:
    device = "cpu" if backend.is_host(xp) else "cuda"
    workload = SequenceWorkload(point.cell, point.length, point.batch, dtype=point.dtype, device=device)
    twin = TorchTwin(workload)
    row = described(workload, twin)
    sides: dict[str, Any] = {"ours": workload, "torch": twin}
    steps = measured({name: side.step for name, side in sides.items()}, xp, rounds, queue=False)
    backwards = {name: timing.Call(side.backward, side.forward) for name, side in sides.items()}
    for part, found in (("step", steps), ("backward", measured(backwards, xp, rounds))):
        row |= {f"{part}_{name}": side for name, side in found.items()}
        row[f"{part}_ratio"] = ratio(found["torch"], found["ours"])
    row["torch_kernels"] = kernel_names(twin.step)
    choice = workload.choice()
    row["chunks"] = chunks = choice.chunks if choice.chunks > 1 else chunk_count(point.length)
    row |= captured_step(workload, twin, xp, rounds)
    del workload, twin, sides, backwards
    recurrence = Recurrence(kernels.get(xp), xp, point.cell, point.dtype, point.length, point.batch)
    calls = {"bp": recurrence.backward(), "chunked": recurrence.backward(chunks)}
    row |= {f"kernel_{name}": found for name, found in measured(calls, xp, rounds).items()}
    for name, (operations, moved) in costs(point).items():
        row[f"floor_{name}"] = max(operations / rates.flops[row["dtype"]], moved / rates.bandwidth)
        row[f"flops_{name}"], row[f"bytes_{name}"] = operations, moved
    return row


def captured_step(workload: SequenceWorkload, twin: TorchTwin, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time the step captured, in turn with PyTorch's; say why it is not, where it is not."""
    try:
        steps = Steps(workload.model, workload.loss, workload.optimizer, (workload.x, workload.target), graph=True)
    except (RuntimeError, SparseBPError) as error:  # CuPy's and CUDA's are RuntimeErrors
        return {"uncaptured": f"{type(error).__name__}: {error}"}
    if steps.uncaptured:
        return {"uncaptured": steps.uncaptured}
    found = measured({"ours": steps, "torch": twin.step}, xp, rounds, queue=False)
    row: Row = {"captured": found["ours"], "captured_ratio": ratio(found["torch"], found["ours"])}
    try:
        replay = captured_torch(twin)
    except (RuntimeError, SparseBPError) as error:
        return row | {"torch_uncaptured": f"{type(error).__name__}: {error}"}
    found = measured({"ours": steps, "torch": replay}, xp, rounds, queue=False)
    return row | {"captured_torch": found["torch"], "both_captured_ratio": ratio(found["torch"], found["ours"])}


def captured_torch(twin: TorchTwin) -> Callable[[], None]:
    """Capture PyTorch's step into a CUDA graph, and return its replay.

    Its Adam is from now on one that keeps step numbers on the device.
    """
    torch = harness.import_torch()
    if not torch.cuda.is_available():
        raise MissingDependencyError("PyTorch captures steps on a GPU alone", remedy="Install a CUDA build of PyTorch")
    rate = twin.optimizer.param_groups[0]["lr"]
    twin.optimizer = torch.optim.Adam(twin.model.parameters(), lr=rate, fused=True, capturable=True)
    return torch_replay(twin.step)


def costs(point: GridPoint, hidden: int = HIDDEN) -> dict[str, tuple[int, int]]:
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
    torch = harness.optional("torch")
    return None if torch is None else bool(torch.backends.cudnn.allow_tf32)


PARTS = {"backward": "backward", "captured": "step, captured", "step": "step, launched"}


def draw_grid(result: Result) -> Any:
    drawing, axes = harness.figure(1, 2, width=10.0, height=4.0)
    for ax, key, held, value in ((axes[0, 0], "length", "batch", GRID_BATCH), (axes[0, 1], "batch", "length", LENGTH)):
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
        ax.set_xlabel("sequence length T, steps (B = 16)" if key == "length" else "batch B, samples (T = 1000)")
        ax.set_ylabel("speed-up over torch.nn with cuDNN")
    return drawing


GPU_GRID = Benchmark(
    name="gpu-grid",
    title="Training a recurrent network on a GPU, hidden size 20: step and backward against torch.nn (cuDNN)",
    leaves_out="moving the batch to the GPU, on both sides; floors count H = 20 lanes as full",
    settings={"targets": GRID_TARGETS},
    sizes={"lengths": LENGTHS, "batches": BATCHES, "dtypes": DTYPES},
    quick={"lengths": (4,), "batches": (), "dtypes": ("float32",)},
    rounds={"rounds": 15, "least_rounds": 3, "budget": 1.0},
    quick_rounds={**harness.QUICK_ROUNDS, "copies": 2},
    threads=None,
    seconds=SECONDS,
    measure=measure_grid,
    columns=columns(
        words={"algorithm": "`auto` chose"},
        numbers={"chunks": "chunks"},
        seconds={
            "step_ours": "step, launched", "captured": "step, captured", "step_torch": "step, cuDNN",
            "captured_torch": "step, cuDNN, captured",
            "backward_ours": "backward, sparsebp", "backward_torch": "backward, cuDNN",
            "kernel_bp": "sequential kernel", "floor_bp": "its lower bound", "kernel_chunked": "scan kernels",
            "floor_chunked": "their lower bound",
        },
        times={
            "step_ratio": "launched, over cuDNN", "captured_ratio": "captured, over cuDNN",
            "both_captured_ratio": "both captured",
            "backward_ratio": "backward, over cuDNN",
        },
    ),
    short=("model", "dtype", "length", "batch", "captured_ratio", "backward_ratio", "algorithm", "kernel_bp"),
    in_short=lambda row: (
        row["dtype"] == "float32" and row["batch"] == GRID_BATCH and row["length"] in (100, 1000, 30_000)
    ),
    picture=draw_grid,
)  # fmt: skip


STEPS = 4000
"""Steps of the sequential kernels, so many that a launch costs little in comparison."""
NUMBERS_LIMIT = 30.0
"""Seconds that a point may take, among others to compile a peer's kernels: one that hangs costs no more."""
FLASH_HIDDEN = 64
"""The most that FlashRNN's Triton kernels hold."""
CALLS = 300
"""Launches in a row whose Python time is taken."""


class NumbersPoint(NamedTuple):
    """One number, or one for each launch of a scan."""

    what: str
    cell: str
    dtype: Any
    length: int
    hidden: int = HIDDEN
    chunks: int = 1
    rows_a_lane: int | None = None
    batch: int = BATCH


def measure_numbers(run: Run) -> Iterator[Row]:
    """Measure every point until time is up."""
    chosen = [*points(run.settings, begin(run))]
    if harness.optional("numba") is None:
        run.note("Sparse products and derivatives: not measured, Numba plans them and cannot be imported")
        chosen = [point for point in chosen if isinstance(point, NumbersPoint)]
    else:
        for product, _ in run.settings["products"]:
            planned(product, SMALL)  # compiles what plans, here, where no limit of a point breaks it off
    return measure_apart(run, chosen, make_numbers, dict(run.rounds), limit=NUMBERS_LIMIT)


def points(sizes: Mapping[str, Any], xp: ModuleType) -> Iterator[NumbersPoint | ProductPoint | DerivativePoint]:
    """Yield the points for arrays of `xp`: one of each kind at the paper's size, then hidden sizes, sweeps, float64."""
    single, double = np.float32, np.float64
    steps, lengths, hidden, chunks = sizes["steps"], sizes["lengths"], sizes["hidden"], sizes["chunks"]
    for cell in CELLS:
        yield NumbersPoint("forward", cell, single, steps)
        yield NumbersPoint("input", cell, single, steps)
        yield NumbersPoint("backward", cell, single, steps)
        yield NumbersPoint("summed", cell, single, steps)
        for length in lengths:
            yield NumbersPoint("summed", cell, single, length, chunks=chosen_chunks(cell, single, length, xp))
            yield NumbersPoint("phases", cell, single, length, chunks=chosen_chunks(cell, single, length, xp))
            yield NumbersPoint("weights", cell, single, length)
        yield NumbersPoint("python", cell, single, 1)
        yield NumbersPoint("captured", cell, single, lengths[0], chunks=chosen_chunks(cell, single, lengths[0], xp))
    beside = [NumbersPoint("cudnn", c, single, lengths[0], h, batch=b) for h, b in sizes["wide"] for c in CELLS]
    yield from (point for point in beside if point.batch == BATCH)
    yield NumbersPoint("flashrnn", "LSTM", single, lengths[0], FLASH_HIDDEN)
    for product, size in sizes["products"]:
        yield from (ProductPoint("spgemm", product, size, batch) for batch in sizes["product_batches"])
    yield DerivativePoint("derivative", sizes["variables"])
    for cell in CELLS:
        for length in lengths:
            yield from (NumbersPoint("scan", cell, single, length, chunks=count) for count in chunks if count <= length)
    for cell in CELLS:
        for length in lengths:
            for rows in rows_tried(cell, sizes):
                yield NumbersPoint(
                    "phases", cell, single, length, chunks=chosen_chunks(cell, single, length, xp), rows_a_lane=rows
                )
    for dtype in (single, double):
        for size in (size for size in hidden if (dtype, size) != (single, HIDDEN)):
            for cell in CELLS:
                for what in ("forward", "backward"):
                    yield NumbersPoint(what, cell, dtype, steps, size)
    yield from (point for point in beside if point.batch != BATCH)
    for cell in CELLS:
        for length in lengths:
            yield NumbersPoint("phases", cell, double, length, chunks=chosen_chunks(cell, double, length, xp))


def rows_tried(cell: str, sizes: Mapping[str, Any]) -> list[int]:
    """Return the rows to force on a lane. An LSTM's 40 need two, and its registers hold three."""
    return [rows for rows in sizes["rows_a_lane"] if cell != "LSTM" or rows in (2, 3)]


def make_numbers(rounds: Mapping[str, Any]) -> Callable[[NumbersPoint | ProductPoint | DerivativePoint], Row]:
    """Return the function that measures a point, in the measuring process."""
    cupy = backend.cupy()

    def measure(point: NumbersPoint | ProductPoint | DerivativePoint) -> Row:
        try:
            if isinstance(point, DerivativePoint):
                return measure_derivative(point, cupy, rounds)
            if isinstance(point, ProductPoint):
                return measure_product(point, cupy, rounds)
            return measure_numbers_point(point, cupy, rounds)
        finally:
            cupy.get_default_memory_pool().free_all_blocks()

    return measure


def measure_numbers_point(point: NumbersPoint, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    recurrence = Recurrence(kernels.get(xp), xp, point.cell, point.dtype, point.length, point.batch, point.hidden)
    row: Row = {}
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
        both = measured({name: calls[name] for name in ("scan", "captured")}, xp, rounds)
        return row | {"time": both["captured"], "launched": both["scan"]}
    if point.what in ("cudnn", "flashrnn"):
        return row | (beside_cudnn if point.what == "cudnn" else beside_flashrnn)(point, recurrence, xp, rounds)
    found = measured({"time": calls[point.what]}, xp, rounds)["time"]
    row["time"], row["host"], row["a_step"] = found, found.get("host"), found["median"] / point.length
    return row | ({"cycles_a_step": row["a_step"] * found["hertz"]} if "hertz" in found else {})


def beside_cudnn(point: NumbersPoint, recurrence: Recurrence, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time forward and backward beside ``torch.nn``'s with one feature, cuDNN's, without TF32 and with it."""
    torch = harness.import_torch()
    device = torch.device("cpu" if backend.is_host(xp) else "cuda")
    layer = getattr(torch.nn, point.cell)(1, point.hidden, device=device)
    x, row = torch.zeros(point.length, point.batch, 1, device=device), Row()
    ours = {"forward": recurrence.forward, "backward": recurrence.backward(point.chunks)}
    theirs: dict[str, Any] = {
        "forward": lambda: layer(x), "backward": timing.Call(lambda y: y[-1].sum().backward(), lambda: layer(x)[0]),
    }  # fmt: skip
    before = torch.backends.cudnn.allow_tf32
    try:
        for tf32 in (False, True):
            torch.backends.cudnn.allow_tf32 = tf32
            for part, call in ours.items():
                found = measured({"ours": call, "torch": theirs[part]}, xp, rounds)
                name = f"{part}_tf32" if tf32 else part
                row |= {f"{name}_{side}": each for side, each in found.items()}
                row[f"{name}_ratio"] = ratio(found["torch"], found["ours"])
        row["torch_kernels"] = kernel_names(lambda: layer(x)[0][-1].sum().backward())
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return row


def beside_flashrnn(point: NumbersPoint, recurrence: Recurrence, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time forward and backward of an LSTM beside FlashRNN's (Pöppel et al., 2024), or say why not.

    Its Triton kernels, which need no CUDA compiler; Triton multiplies in TF32.
    """
    flashrnn: Any = harness.optional("flashrnn.flashrnn")
    if flashrnn is None:
        return {"uncompared": "not installed"}
    torch = harness.import_torch()
    device = torch.device("cpu" if backend.is_host(xp) else "cuda")

    def random(*shape: int) -> Any:
        return torch.rand(shape, device=device, requires_grad=True)

    x, weights = random(point.batch, point.length, 4, 1, point.hidden), random(4, 1, point.hidden, point.hidden)
    bias, options = random(4, 1, point.hidden), {"function": "lstm", "backend": "triton_fused", "dtype": "float32"}

    def forward() -> Any:
        return flashrnn.flashrnn(x, weights, bias, **options)[0]

    def backward(states: Any) -> None:
        torch.autograd.grad(states[0, :, -1].sum(), (x, weights, bias))

    ours = {"forward": recurrence.forward, "backward": recurrence.backward(point.chunks)}
    theirs: dict[str, Any] = {"forward": forward, "backward": timing.Call(backward, forward)}
    row = Row()
    for part, call in ours.items():
        found = measured({"ours": call, "flashrnn": theirs[part]}, xp, rounds)
        row |= {f"{part}_{side}": each for side, each in found.items()}
        row[f"{part}_flashrnn_ratio"] = ratio(found["flashrnn"], found["ours"])
    return row


def products(recurrence: Recurrence) -> None:
    """Multiply gradients at pre-activations by the states before them, as the weights' gradients are."""
    written, h = (a.reshape(-1, a.shape[-1]) for a in (recurrence.written, recurrence.h))
    cublas.matmul(written.T, h)


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
    """Capture a call into a graph and return its replay."""
    recorder = GraphRecorder(xp, 1)
    with recorder.running():
        call()
    with recorder.capturing():
        call()
    return recorder.replay


def phases(point: NumbersPoint, xp: ModuleType, rounds: Mapping[str, Any]) -> Row:
    """Time every launch of a scan alone, by its kernel: the sum and the parts, medians over calls."""
    timed = TimedLoader(xp)
    device = DeviceKernels(xp, timed)
    if point.rows_a_lane is not None:
        device._rows_a_lane = lambda *sizes: point.rows_a_lane  # type: ignore[method-assign, assignment]
    run = Recurrence(Kernels(device), xp, point.cell, point.dtype, point.length, point.batch, point.hidden)
    call, queue = run.backward(point.chunks), Queued(xp)
    took: dict[str, list[float]] = defaultdict(list)
    call()
    for _ in range(rounds["rounds"]):
        timed.launches.clear()
        queue.spin()  # an idle GPU would reach the first event long before its launch
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
    return {
        "time": sum(found.values()),
        "launches": found,
        "all": dict(took),
        "parts": shown,
        "rows_a_lane": rows[0] if rows else None,
    }


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


def draw_numbers(result: Result) -> Any:
    drawing, axes = harness.figure(1, 2, width=10.0, height=4.0)
    rows, ax = [row for row in result["rows"] if "cell" in row], axes[0, 0]
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
    axes[0, 1].set_ylabel("ns per time step")
    for ax in axes[0]:
        if any(len(line.get_xdata()) for line in ax.lines):  # a run that was short may have no scans
            ax.set_xscale("log")
            ax.set_yscale("log")
    return drawing


GPU_NUMBERS = Benchmark(
    name="gpu-numbers",
    title="Kernels on a GPU, each measured separately: recurrent ones at B = {batch}, and sparse products",
    leaves_out="the host's work before a launch, except in rows of Python's time; everything other than these kernels",
    settings={"batch": BATCH},
    sizes={
        "steps": STEPS, "lengths": (1000, 30_000), "hidden": (1, 7, 20, 32, 33, 64, 128),
        "chunks": (16, 24, 32, 48, 59, 64, 69, 96, 128, 192, 237, 258, 279, 384, 528), "rows_a_lane": (1, 2, 3, 4, 5),
        "wide": tuple((hidden, batch) for batch in (16, 1, 64) for hidden in (20, 64, 128, 256, 512)),
        "products": (("Poisson, A·P", 300), ("random, 8 a row", 10_000), ("pruned conv · pruned conv", 64)),
        "product_batches": (1, 16), "variables": 1_000_000,
    },
    quick={"steps": 5, "lengths": (9,), "hidden": (33,), "chunks": (5,), "rows_a_lane": (2,),
           "wide": ((5, 2),), "products": (("Poisson, A·P", 8), ("random, 8 a row", SMALL)),
           "product_batches": (1, 3), "variables": 100},
    rounds={"rounds": 15, "least_rounds": 5, "budget": 0.5},
    quick_rounds={**harness.QUICK_ROUNDS, "copies": 2},
    threads=None,
    seconds=SECONDS,
    measure=measure_numbers,
    columns=columns(
        words={
            "what": "what", "product": "product", "strategy": "strategy", "uncompared": "not compared",
            "stale": "cuSPARSE keeps old values", "parts": "launches",
        },
        counts={"multiplications": "multiplications"},
        numbers={"size": "size", "hidden": "H", "chunks": "chunks", "rows_a_lane": "rows per lane"},
        seconds={
            "time": "time", "host": "host's time", "host_loops": "the host's loops",
            "launched": "launched", "a_step": "per step",
            "forward_ours": "forward", "forward_torch": "forward, cuDNN", "backward_ours": "backward",
            "backward_torch": "backward, cuDNN", "forward_flashrnn": "forward, FlashRNN",
            "backward_flashrnn": "backward, FlashRNN", "cusparse": "cuSPARSE, one sample",
            "plan_seconds": "plan once", "cusparse_plan_seconds": "cuSPARSE's structure once",
        },
        times={
            "host_loops_ratio": "over the host's loops",
            "cusparse_ratio": "over cuSPARSE, per sample", "forward_flashrnn_ratio": "forward, over FlashRNN",
            "backward_flashrnn_ratio": "backward, over FlashRNN",
            "forward_ratio": "forward, over cuDNN", "backward_ratio": "backward, over cuDNN",
            "forward_tf32_ratio": "forward, over TF32", "backward_tf32_ratio": "backward, over TF32",
        },
        formats={"{:.0f}": {"cycles_a_step": "cycles per step"}},
    ),
    short=("what", "cell", "hidden", "forward_ratio", "backward_ratio", "product", "time", "cusparse_ratio"),
    in_short=lambda row: row["batch"] == BATCH and (
        row["what"] == "spgemm" or (row["what"] == "cudnn" and row["hidden"] <= 128)
    ),
    picture=draw_numbers,
)  # fmt: skip
