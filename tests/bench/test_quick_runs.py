"""Every benchmark runs from end to end in its quick form, and its result holds what the tables show."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import NAMES, gpu, harness, jacobians, load, recurrent, scan, training
from benchmarks.gpu_timing import torch_replay
from benchmarks.scaling import ASYNCHRONOUS
from benchmarks.workloads import SequenceWorkload, TorchTwin
from sparsebp import nn
from sparsebp.core import backend
from sparsebp.core.errors import DeviceError, MissingDependencyError
from sparsebp.core.threads import most_threads

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

GPU = ("gpu-numbers", "gpu-grid", "gpu-graphs", "gpu-peers")
ONCE = {"rounds": 1, "least_rounds": 1, "warmup": 1}
OPTIONAL = {
    "graphblas_ratio", "mkl_ratio", "mkl_numeric_ratio", "earned_after", "moved", "floor", "floor_times", "target",
    "met", "fused", "fused_ratio", "step_jax", "jax_ratio", "jax_unroll", "gemm_rate", "share", "peer_share", "onnx",
    "onnx_ratio", "jax", "jax_form", "ours_jax", "ours_jax_ratio", "klu_ratio", "scipy_ratio", "asdex_ratio",
    "channels_last", "channels_last_ratio", "qdldl_ratio", "pardiso_ratio", "cholmod_ratio",
}  # fmt: skip
NEEDS = (
    dict.fromkeys(("convergence", "pruned", "spectrain"), "mlxtend")
    | dict.fromkeys(("time-parallel", "data-parallel", "scaling-measured"), "mpi4py")
    | {"others": "recbole", "others-speech": "sb3_contrib", "derivatives": "casadi"}
)
SPARSE = ("convergence", "pruned", "spectrain", "scaling", "scaling-papers")
"""Benchmarks of which not every row has every column, nor a quick run every schedule."""
CHECKS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "convergence": lambda result: all(row["met"] for row in result["rows"]),
    "pruned": lambda result: {row["side"] for row in result["rows"]} == {"scan", "BP"}
    and len(result["notes"]) == 1 + len(result["settings"]["batches"]),
    "data-parallel": lambda result: [row["network"] for row in result["rows"]] == ["this machine's memory"],
    "time-parallel": lambda result: [(row["model"], row["way"]) for row in result["rows"]] == [
        (model, way) for model in ("RNN(1, 20)", "GRU(38, 20)", "MinGRU(38, 20)") for way in ("maps", "vectors")
    ] and all(row["sent_exscan"] == (4 * 20 * 21 if row["way"] == "maps" else 0) for row in result["rows"])
    and all(row["kept"] < row["kept_whole"] for row in result["rows"]),
    "scaling-measured": lambda result: [row["schedule"] for row in result["rows"]] == ["1f1b", "zb-h1", "dualpipe-v"]
    and all(row["measured"] > 0 and row["simulated"] > 0 for row in result["rows"]),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two thread pools on a busy machine wait for each other more than they work."""
    with harness.using_threads(1):
        yield


@pytest.fixture(autouse=True)
def jax_for_small_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Most of their time is compiling, in processes of their own; its precision in this one is other tests' too."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", False)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GPU])
def test_quick_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    if NEEDS.get(name) == "mpi4py" and (most_threads() < 2 or not has_mpiexec()):
        pytest.skip("needs two cores and mpiexec (extra: mpi)")
    lines: list[str] = []
    chosen = load(name)
    result = chosen.run(tmp_path, quick=True, threads=(1,) if chosen.threads else None, echo=lines.append)
    assert result["quick"] is True
    read = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    assert read and read == json.loads(json.dumps(result["rows"]))
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    shown = {*chosen.short, *(column.key for column in chosen.columns)} - OPTIONAL
    for row in [set().union(*read) | {*ASYNCHRONOUS, "pipedream_peak", "dualpipe_peak"}] if name in SPARSE else read:
        assert not shown - set(row), f"{row} lacks {shown - set(row)}"
    assert lines[-1].splitlines()[0].split()[0] in {column.heading.split()[0] for column in chosen.named(chosen.short)}
    assert CHECKS.get(name, bool)(result)


def has_mpiexec() -> bool:
    return Path(sys.executable).with_name("mpiexec").exists() or shutil.which("mpiexec") is not None


@pytest.mark.parametrize("how", ["none", "backward"])
def test_gradients_of_layers_whose_parts_share_sums_are_watched(how: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3, rng=0), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3, rng=0))
    sizes = {name: value.nbytes for name, value in model.parameters().items()}
    executors, _ = training.ours(model, "Adam")
    peak = training.peak_of_ours(executors[how], [(np.ones((2, 1, 4, 4), np.float32), np.zeros(2, np.int64))])
    assert peak == sum(sizes.values()) if how == "none" else peak < sum(sizes.values())


def test_retraining_never_sees_the_test_set(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    monkeypatch.setattr(jacobians, "train", lambda model, data, options, seed: trained.append(data) or [])
    monkeypatch.setattr(jacobians, "accuracy", lambda model, data: float(data == "test"))
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    _, found = jacobians.retrained(model, ("train", "test"), {}, [(0.5, {})], {}, lambda line: None)  # type: ignore[arg-type]
    assert trained == ["train"] * 4
    assert all(row["accuracy"] == 1 for name, row in found.items() if name != "sparsity")


def test_scan_memory_and_flops_follow_the_algorithms() -> None:
    """At H = 20 stored Jacobians cost at least 15 times the memory of the fused chunked scan."""
    row = scan.measure_scan_row(300, ONCE, pytest.fail)
    assert row["memory_ratio"] >= 15
    assert row["flops_bp"] == 2 * 300 * 16 * 20 * 20
    assert row["flops_bp"] < row["flops_blelloch"] < 2 * 2 * 300 * 16 * 20**3
    assert row["best"] in (*scan.ALGORITHMS, "torch")


def test_what_does_not_fit_into_memory_is_left_out_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "available_memory", lambda: 1000)
    notes: list[str] = []
    row = scan.measure_scan_row(10, ONCE, notes.append)
    assert {"time_bp", "time_chunked"} <= row.keys()
    assert "time_blelloch" not in row
    assert [note.split(":")[0] for note in notes] == ["T = 10, hybrid", "T = 10, blelloch"]


@pytest.mark.parametrize("cell", ["RNN", "GRU", "LSTM"])
def test_both_sides_of_the_workload_have_the_same_gradients(cell: str) -> None:
    workload = SequenceWorkload(cell, 13, 5, dtype=np.float64)
    assert workload.agreement(TorchTwin(workload)) < 1e-12


def test_jax_has_the_same_gradients_on_any_machine_that_has_it() -> None:
    """Of the cell that no quick run has; those compare with JAX too."""
    pytest.importorskip("jax")
    assert {task.cell for task in recurrent.QUICK} == {"RNN", "GRU"}
    workload = SequenceWorkload("LSTM", 5, 3, dtype=np.float64, input_size=2, hidden=4)
    found, gradients = recurrent.sides("LSTM", workload.state, *workload.host_batch, 1e-3)
    assert found.keys() == gradients.keys() == {f"jax{unroll}" for unroll in recurrent.UNROLLED}
    for grads in gradients.values():
        assert grads.keys() == workload.state.keys()
        assert workload.difference(grads) < 1e-12


@pytest.mark.parametrize(
    ("hidden", "times", "share", "peer", "missed"),
    [
        (20, 3.1, None, None, None),
        (20, 2.9, None, None, "2.9×"),
        (64, 2.1, None, None, None),
        (128, 1.1, 0.9, 0.8, None),
        (128, 1.1, 0.9, 0.6, "1.1×"),
        (512, 1.3, 0.8, 0.6, "80% of GEMM"),
        (512, 0.9, 0.8, 0.75, "80% of GEMM, 0.9×"),
    ],
)
def test_what_a_training_step_is_to_be(
    hidden: int, times: float, share: float | None, peer: float | None, missed: str | None
) -> None:
    row = {"hidden": hidden, "best_ratio": {"median": times}, "share": share, "peer_share": peer}
    assert recurrent.judge_recurrent(row)["met"] == (f"missed: {missed}" if missed else "met")


@pytest.mark.parametrize("cell", ["RNN", "GRU"])
def test_a_point_of_the_gpu_grid_is_measured_whole(cell: str) -> None:
    """On the CPU: the same code with another clock and other arrays."""
    rates = gpu.Rates({"float32": 1e12, "float64": 1e12}, 1e11, 1e9)
    row = gpu.measure_grid_point(gpu.GridPoint(cell, np.float64, 7, 3), np, rates, ONCE)
    chosen = load("gpu-grid")
    shown = {*chosen.short, *(column.key for column in chosen.columns)}
    of_captured = {"captured", "captured_ratio", "captured_torch", "both_captured_ratio"}
    assert shown - of_captured <= row.keys()
    assert "the model is on the host" in row["uncaptured"]
    assert row["gradient_difference"] < 1e-12
    matrices = 1 if cell == "RNN" else 3
    assert row["flops_bp"] == 2 * matrices * 7 * 3 * 20**2
    assert row["flops_chunked"] == 20 * row["flops_bp"]


class _TorchOnAGPU:
    """What `gpu.captured_torch` asks of ``torch.cuda``; every call is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def is_available(self) -> bool:
        return True

    def current_stream(self) -> _TorchOnAGPU:
        return self

    Stream = CUDAGraph = current_stream

    def wait_stream(self, other: object) -> None:
        self.notes.append("wait")

    @contextlib.contextmanager
    def stream(self, which: object) -> Iterator[None]:
        self.notes.append("beside")
        yield

    @contextlib.contextmanager
    def graph(self, which: object, stream: object) -> Iterator[None]:
        self.notes.append("capture")
        yield
        self.notes.append("captured")

    def replay(self) -> None:
        self.notes.append("replay")


def test_pytorchs_step_is_captured_after_steps_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = TorchTwin(SequenceWorkload("RNN", 7, 3))
    with pytest.raises(MissingDependencyError, match="on a GPU alone"):
        gpu.captured_torch(twin)
    cuda, step = _TorchOnAGPU(), twin.step
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch.optim, "Adam", lambda params, *, lr, fused, capturable: torch.optim.SGD(params, lr))
    monkeypatch.setattr(twin, "step", lambda: (cuda.notes.append("step"), step()))
    gpu.captured_torch(twin)()
    assert cuda.notes == ["wait", "beside", *["step"] * gpu.WARM, "wait", "capture", "step", "captured", "replay"]


def test_after_a_capture_that_fails_pytorch_is_on_the_stream_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(_TorchOnAGPU):
        def set_stream(self, stream: object) -> None:
            self.notes.append("back")

    def call() -> None:
        cuda.notes.append("call")
        if "capture" in cuda.notes:
            raise RuntimeError("not while capturing")

    cuda = Failing()
    monkeypatch.setattr(torch, "cuda", cuda)
    with pytest.raises(RuntimeError, match="not while capturing"):
        torch_replay(call)
    assert cuda.notes[-3:] == ["capture", "call", "back"]


def test_a_replay_keeps_the_arrays_that_its_graph_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cuda", _TorchOnAGPU())
    images = torch.ones(3)
    here, call = weakref.ref(images), images.sum
    replay = torch_replay(call)
    del images, call
    assert here() is not None
    del replay
    assert here() is None


@pytest.mark.parametrize("order", gpu.ORDERS.values())
def test_steps_that_are_not_captured_say_why(order: str) -> None:
    sizes = load("gpu-graphs").quick
    row = gpu.measure_graphs_point(gpu.GraphsPoint("DenseNet", order), np, sizes, ONCE)
    assert row["met"] == "not captured" and row["launched"]["median"] > 0
    assert row["uncaptured"] == "the model is on the host"


@pytest.mark.parametrize("what", ["forward", "input", "backward", "scan", "weights"])
@pytest.mark.parametrize("cell", ["RNN", "GRU"])
def test_single_kernels_are_measured(cell: str, what: str) -> None:
    point = gpu.NumbersPoint(what, cell, np.float64, 9, 5, chunks=3)
    row = gpu.measure_numbers_point(point, np, ONCE)
    assert row["a_step"] == pytest.approx(row["time"]["median"] / 9)
    assert len(row["time"]["all"]) == row["time"]["rounds"]


def test_an_lstm_is_compared_with_flashrnns_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    point = gpu.NumbersPoint("flashrnn", "LSTM", np.float32, 9, 5, batch=2)
    monkeypatch.setattr(harness, "optional", lambda name: None)
    assert gpu.measure_numbers_point(point, np, ONCE) == {"uncompared": "not installed"}

    def flashrnn(x: Any, weights: Any, bias: Any, *, function: str, backend: str, dtype: str) -> tuple[Any, Any]:
        """Return states and the last one, of their shapes: samples, steps, gates, heads, units."""
        assert (x.shape, weights.shape, bias.shape) == ((2, 9, 4, 1, 5), (4, 1, 5, 5), (4, 1, 5))
        assert (function, backend, dtype) == ("lstm", "triton_fused", "float32")
        states = (x.sum(2) + bias.sum(0)) @ weights.sum((0, 1))
        return torch.stack([states, states]), states[:, -1]

    found = {"flashrnn.flashrnn": SimpleNamespace(flashrnn=flashrnn), "torch": torch}
    monkeypatch.setattr(harness, "optional", found.get)
    row = gpu.measure_numbers_point(point, np, ONCE)
    for part in ("forward", "backward"):
        ours, theirs = row[f"{part}_ours"]["all"][0], row[f"{part}_flashrnn"]["all"][0]
        assert row[f"{part}_flashrnn_ratio"]["median"] == pytest.approx(theirs / ours)


def test_fused_steps_are_judged_where_the_update_is_much_of_them() -> None:
    row = {"backward_ratio": {"median": 0.5}, "backward_peak": 1, "largest": 1}
    assert training.judge_fusion(row | {"share": 0.3}) == "missed: step ≥ 1.15×"
    assert training.judge_fusion(row | {"share": 0.1}) == "met; step without a target"
    assert training.judge_fusion(row | {"share": 0.3, "backward_ratio": {"median": 1.2}}) == "met"
    assert training.judge_fusion(row | {"share": 0.1, "backward_peak": 2}).startswith(
        "missed: gradients ≤ 1.2 × the largest"
    )


@pytest.mark.parametrize("name", GPU)
def test_without_a_gpu_the_gpu_benchmarks_say_so(name: str, tmp_path: Path) -> None:
    if backend.has_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises((DeviceError, MissingDependencyError)):
        load(name).run(tmp_path, quick=True)


@pytest.mark.gpu
@pytest.mark.real_gpu("it measures, beside torch's cuDNN")
@pytest.mark.parametrize("name", GPU)
def test_gpu_quick_run(name: str, tmp_path: Path) -> None:
    if not backend.has_gpu():
        pytest.skip("no GPU here")
    result = load(name).run(tmp_path, quick=True)
    assert result["rows"] and result["complete"]
    assert not [row for row in result["rows"] if "error" in row]
    assert all(row["gradient_difference"] < 1e-2 for row in result["rows"] if "gradient_difference" in row)
