"""Comparisons with peers on a GPU, without one: on the host, and as if PyTorch captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks import gpu_peers, harness, load
from benchmarks.gpu_peers import CellPoint, LayerPoint, NetworkPoint, RecurrencePoint, measure_peers_point
from benchmarks.processes import named
from sparsebp.core.errors import SparseBPError

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

ONCE = {"rounds": 1, "least_rounds": 1, "warmup": 1}
CHOSEN = load("gpu-peers")
SIZES = {**CHOSEN.settings, **CHOSEN.sizes, **CHOSEN.quick}
KINDS = {
    (point.what, *(getattr(point, name, "") for name in ("layer", "compiled"))): point
    for point in reversed([*gpu_peers.points(SIZES)])
}
"""The first point of each kind."""
ALL = {"accelerate", "packed", "step", "recurrence", "selective scan", "adam", "jacobian", "inference", "kernels",
       "compiled recurrence"}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with harness.using_threads(1):
        yield


def measure(point: gpu_peers.Point) -> dict[str, Any]:
    return measure_peers_point(point, np, SIZES, ONCE)


@pytest.mark.parametrize("point", KINDS.values(), ids=named)
def test_a_point_is_measured_whole(point: gpu_peers.Point) -> None:
    row = measure(point)
    assert "error" not in row and "failed" not in row and row["case"]
    assert row["tf32"] == {"cudnn": False, "matmul": False}
    if point.what == "kernels":
        assert row["torch_kernels"] and row["kernels"]
        return
    assert row["ours"]["all"] and row.get("difference", 0.0) < 1e-4
    if point.what == "selective scan":
        assert {"backward", "copy", "copy_ratio"} <= row.keys()
    else:
        assert row["ratio"] and row["peer"] and row["theirs"]


def test_modules_are_compared_with_float64_and_the_rule_is_told() -> None:
    row = measure(CellPoint("accelerate", "LSTM", 7, 3, 5))
    for side in ("", "torch_", "tf32_"):
        assert 0 < row[f"{side}output_difference"] < 1e-5 and 0 < row[f"{side}gradient_difference"] < 1e-5
    assert row["chosen"] in ("the kernels", "PyTorch") and "float32 LSTM" in row["rule"]
    assert row["uncaptured"] == "PyTorch captures on a GPU alone"
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.benchmark
    assert flags == (True, False, False)  # as before


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch capture, so it says; replays are calls."""
    monkeypatch.setattr(gpu_peers.Place, "captures", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_peers, "torch_replay", lambda call: call)
    monkeypatch.setattr(torch, "compile", lambda scan, dynamic, fullgraph: scan)
    adam = torch.optim.Adam
    monkeypatch.setattr(torch.optim, "Adam", lambda params, capturable=False, **options: adam(params, **options))
    scan_of, generic = gpu_peers.scan_of, gpu_peers.place_of(np)._replace(device=torch.device("cpu"))
    monkeypatch.setattr(gpu_peers, "scan_of", lambda name, place: _on_the_host(scan_of, name, generic, monkeypatch))


def _on_the_host(scan_of: Callable[..., Any], name: str, place: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(gpu_peers.Place, "captures", property(lambda self: False))
        return scan_of(name, place)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("point", KINDS.values(), ids=named)
def test_what_only_a_gpu_does_runs(point: gpu_peers.Point) -> None:
    row = measure(point)
    assert "error" not in row and "failed" not in row
    if point.what in ("accelerate", "packed", "inference"):
        keys = {"captured_ours", "captured_torch", "captured_torch_tf32", "captured_ratio", "captured_tf32_ratio"}
        assert keys <= row.keys() and "uncaptured" not in row
        assert (point.what == "inference") == ("captured_difference" not in row)


@pytest.mark.usefixtures("captures")
def test_a_module_that_is_not_captured_says_why_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(call: Any) -> Any:
        if "sparsebp" in type(call.module.__dict__.get("forward")).__module__:
            try:
                raise ValueError("operation not permitted\nwhen stream is capturing")
            finally:
                raise RuntimeError("the capture cannot end")
        return call

    monkeypatch.setattr(gpu_peers, "torch_replay", replay)
    row = measure(CellPoint("accelerate", "GRU", 7, 3, 5))
    first = "ValueError: operation not permitted when stream is capturing"
    assert row["uncaptured"] == f"RuntimeError: the capture cannot end, after {first}"
    assert row["failed"] == {"captured_ours": row["uncaptured"]} and "error" not in row
    assert {"ratio", "captured_torch"} <= row.keys() and "captured_ratio" not in row


@pytest.mark.usefixtures("captures")
def test_a_replay_that_is_wrong_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = gpu_peers.Module.gradients
    seen: list[int] = []

    def last_is_wrong(module: gpu_peers.Module) -> list[Any]:
        seen.append(1)
        return [grad * (1 if len(seen) <= 4 else 2) for grad in gradients(module)]  # float64, three sides; the replay

    monkeypatch.setattr(gpu_peers.Module, "gradients", last_is_wrong)
    row = measure(CellPoint("accelerate", "GRU", 7, 3, 5))
    assert row["uncaptured"] == "a replay's gradients differ from float64's by 1" and "error" not in row
    assert "captured_torch" in row and "captured_ours" not in row and "captured_ratio" not in row


def test_a_peer_that_fails_costs_its_own_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*arguments: Any) -> Any:
        if arguments[-2:] == (True, False):
            raise RuntimeError("CUDA out of memory")
        return torch_step(*arguments)

    torch_step = gpu_peers.torch_step
    monkeypatch.setattr(gpu_peers, "torch_step", step)
    row = measure(NetworkPoint("step", gpu_peers.SMALL, 2))
    assert row["failed"] == {"torch_channels_last": "RuntimeError: CUDA out of memory"}
    assert "error" not in row and row["peer"] == "torch" and {"ratio", "tf32_ratio"} <= row.keys()


@pytest.mark.parametrize("point", [
    RecurrencePoint("recurrence", 7, 2, 3), CellPoint("accelerate", "RNN", 7, 3, 5), LayerPoint("jacobian", "ReLU"),
    NetworkPoint("adam", gpu_peers.SMALL),
], ids=named)  # fmt: skip
def test_our_failure_is_the_rows(point: gpu_peers.Point, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise SparseBPError("broken", expected="a result", got="none")

    for owner, name in (("sparsebp", "linear_recurrence"), ("sparsebp", "jacobian_t"), ("sparsebp.optim.Adam", "step"),
                        ("sparsebp.torch.dispatch.Dispatch", "__call__")):  # fmt: skip
        monkeypatch.setattr(f"{owner}.{name}", fail)
    row = measure(point)
    assert row["error"].startswith("SparseBPError: broken") and row["case"]
    assert {"torch", "hillis_steele", "vjp"} & row.keys()


@pytest.mark.parametrize(("factor", "told"), [(1.01, "0.01"), (np.nan, "nan")])
def test_a_wrong_result_is_an_error(factor: float, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu_peers.sb.linear_recurrence_vjp

    def wrong(*arrays: Any) -> Any:
        grads = right(*arrays)
        return grads._replace(a=grads.a * np.float32(factor))

    monkeypatch.setattr(gpu_peers.sb, "linear_recurrence_vjp", wrong)
    row = measure(RecurrencePoint("recurrence", 7, 2, 3))
    assert row["error"] == f"our result differs from float64's by {told}" and row["ours"]["all"]


def test_every_kind_is_among_the_first_points_and_documents_show_a_dozen() -> None:
    sizes = {**CHOSEN.settings, **CHOSEN.sizes}
    planned = [*gpu_peers.points(sizes)]
    assert len(set(planned)) == len(planned) and {point.what for point in planned} == ALL
    assert ALL - {point.what for point in planned[:28]} == {"inference", "kernels", "compiled recurrence"}
    rows = [{**point._asdict(), "ratio": 1.0} for point in planned]
    assert len([row for row in rows if CHOSEN.in_short(row)]) == 12
