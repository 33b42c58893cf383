"""What `accelerate` leaves to PyTorch on a GPU, and why. CPU tensors are taken for a GPU's, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st_  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence  # noqa: E402

import sparsebp.torch as st  # noqa: E402
from sparsebp.torch import rule  # noqa: E402
from sparsebp.torch.rule import GPU_COSTS, MEASURED_ON, Way, _by_size_on_a_gpu, way_of  # noqa: E402


def decided(
    cell: str, T: int, B: int, H: int, *, graph: bool, trains: bool = True, packed: bool = False, layers: int = 1,
    name: str = MEASURED_ON, rows: int | None = None,
) -> Way:  # fmt: skip
    return _by_size_on_a_gpu(cell, packed, trains, graph, name, 38, H, B, T, rows or T * B, layers, 1)


RESULT = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu-peers-nvidia-h100-80gb-hbm3-d37eb1f3.json"


def rows() -> Iterator[Any]:
    """Yield what was measured: cell, whether it trains, T, B, H, and the row."""
    for row in json.loads(RESULT.read_text(encoding="utf-8"))["rows"]:
        cell, *sizes = (row.get(name) for name in ("cell", "length", "batch", "hidden"))
        trains = row["what"] == "accelerate"
        if trains or row["what"] == "inference":
            yield pytest.param(cell, trains, *sizes, row, id=f"{row['what']} {row['case']}")


MEASURED = list(rows())
TABLE = [one for one in MEASURED if one.values[2] <= 1000 and one.values[3] == 16]


@pytest.mark.parametrize(("cell", "trains", "T", "B", "H", "row"), MEASURED)
def test_in_a_graph_what_was_faster_runs(cell, trains, T, B, H, row):
    """Only a call that gains less than 10 µs may go to PyTorch."""
    way = decided(cell, T, B, H, graph=True, trains=trains)
    ours, *torchs = (row[f"captured_{side}"]["median"] for side in ("ours", "torch", "torch_tf32"))
    assert way.ours is (ours < min(torchs)) or (not way.ours and min(torchs) - ours <= 10e-6)
    assert "in or before a CUDA graph; measured on an NVIDIA H100 80GB HBM3" in way.why


@pytest.mark.parametrize(("cell", "trains", "T", "B", "H", "row"), TABLE)
def test_the_table_is_what_was_measured(cell, trains, T, B, H, row):
    for side, (call, step) in zip(("ours", "torch"), GPU_COSTS[cell, trains][H], strict=True):
        captured = "captured_" if side == "torch" and H == 256 and cell != "RNN" else ""
        assert call + step * T == pytest.approx(1e6 * row[f"{captured}{side}"]["median"], rel=0.1)


@pytest.mark.parametrize(
    ("cell", "T", "B", "H", "trains", "ours"),
    [
        ("LSTM", 1000, 16, 128, True, True),  # 2 ms less of the GPU, 1.3 ms more of the host
        ("LSTM", 3854, 16, 128, True, True),
        ("GRU", 1000, 16, 20, True, False),
        ("RNN", 500, 16, 256, True, False),
        ("RNN", 1000, 16, 256, True, True),
        ("GRU", 1000, 16, 256, True, False),
        ("GRU", 100_000, 16, 256, True, False),
        ("GRU", 1000, 16, 64, False, False),
        ("GRU", 10_000, 16, 64, False, True),
    ],
)
def test_outside_a_graph_the_host_counts(cell, T, B, H, trains, ours):
    way = decided(cell, T, B, H, graph=False, trains=trains)
    assert way.ours is ours
    assert "ms of the host; measured on an NVIDIA H100" in way.why


def test_packed_sequences_on_a_gpu():
    """Measured: 0.6 ms by the kernels, 36 ms by PyTorch, 3 and 68 ms of the host; captured 1.0 and 12.7."""
    for graph in (True, False):
        assert decided("GRU", 1000, 64, 20, graph=graph, packed=True, rows=35_000).ours
    assert not decided("GRU", 10, 64, 20, graph=False, packed=True, rows=350).ours
    assert decided("LSTM", 1000, 64, 20, graph=True, packed=True, rows=35_000).why.endswith(
        "packed: not measured on a GPU"
    )
    whole = decided("LSTM", 1000, 64, 20, graph=True, packed=True)  # of one length
    assert whole.ours and "packed" not in whole.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"H": 257}, "H = 257"),
        ({"B": 257}, "257 samples"),
        ({"B": 129, "H": 128}, "129 samples"),
        ({"layers": 2}, "several layers or directions"),
        ({"H": 65, "trains": False}, "H = 65"),
    ],
)
def test_what_was_not_measured_is_pytorchs(change, why):
    way = decided("LSTM", **({"T": 10_000, "B": 16, "H": 64, "graph": True} | change))
    assert not way.ours and way.why.endswith(f"{why}: not measured on a GPU")


def test_another_gpu_follows_the_same_rule_and_is_named():
    ways = [decided("GRU", 1000, 16, 20, graph=True, name=name) for name in (MEASURED_ON, "NVIDIA A100")]
    assert ways[0].ours and ways[1].ours
    assert ways[1].why.endswith("measured on an NVIDIA H100 80GB HBM3, not this NVIDIA A100")


@given(
    key=st_.sampled_from(sorted(GPU_COSTS)), T=st_.integers(1, 10_000), B=st_.integers(1, 256), H=st_.integers(1, 256),
    graph=st_.booleans(),
)  # fmt: skip
def test_a_longer_call_or_a_graph_never_turns_to_pytorch(key, T, B, H, graph):
    cell, trains = key
    if decided(cell, T, B, H, graph=graph, trains=trains).ours:
        assert decided(cell, T, B, H, graph=True, trains=trains).ours
        assert decided(cell, T + 1000, B, H, graph=graph, trains=trains).ours
        assert B >= 16 or decided(cell, T, 16, H, graph=graph, trains=trains).ours


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Take all tensors for a GPU's; what is in the dict may be changed."""
    now = {"captures": False, "stream": 0, "cupy": True}
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: True))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["captures"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: now["stream"])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(rule, "_sees_gpu", lambda: now["cupy"])
    rule._device_name.cache_clear()
    rule._loaded.cache_clear()
    yield now
    rule._device_name.cache_clear()
    rule._loaded.cache_clear()


def test_calls_in_a_side_stream_and_then_their_capture_run_the_kernels(on_a_gpu: dict[str, Any]) -> None:
    module, x = nn.GRU(38, 20), torch.empty(1000, 16, 38)
    assert not way_of(module, x).ours  # 1 ms less of the GPU, 1.3 ms more of the host
    on_a_gpu["captures"] = True
    assert "have not run such a call in a side stream" in way_of(module, x).why
    on_a_gpu.update(captures=False, stream=7)
    assert way_of(module, x).ours and "not this NVIDIA H200" in way_of(module, x).why
    on_a_gpu["captures"] = True
    assert way_of(module, x).ours
    with torch.no_grad():
        assert not way_of(module, x).ours
    assert not way_of(module, torch.empty(1001, 16, 38)).ours
    assert not way_of(nn.LSTM(38, 20), x).ours
    assert way_of(module, x).ours


def test_obstacles_on_a_gpu(on_a_gpu: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = nn.GRU(38, 20), torch.empty(1000, 16, 38)
    on_a_gpu["stream"] = 7
    assert way_of(module, x).ours
    assert way_of(module.double(), x.double()).why == "float64, not measured on a GPU"
    assert way_of(nn.LSTM(38, 20, proj_size=3), x).why == "a projection, not measured on a GPU"
    module.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in way_of(module, x).why
    lengths = torch.arange(16) * 60 + 100
    assert way_of(module, pack_padded_sequence(x, lengths, enforce_sorted=False)).ours
    on_a_gpu["cupy"] = False
    assert way_of(module, x).why == "a GPU that CuPy does not see; the kernels need it"
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda _: False))
    assert way_of(module, x).why == "measured on a CPU and on a GPU of NVIDIA's alone"
    assert not way_of(module, pack_padded_sequence(x, lengths, enforce_sorted=False)).ours


def test_explain_names_the_gpu(on_a_gpu: dict[str, Any]) -> None:
    model = nn.Sequential(nn.LSTM(38, 128))
    (outcome,) = st.explain(model, torch.zeros(100, 2, 38))
    assert not outcome.replaced
    assert outcome.reason.startswith(
        "PyTorch's forward: float32 LSTM, I = 38, H = 128, B = 2, T = 100: about 0.292 ms of the GPU"
    )
    assert outcome.reason.endswith("; measured on an NVIDIA H100 80GB HBM3, not this NVIDIA H200")
