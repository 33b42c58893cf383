"""What `accelerate` leaves to PyTorch on a GPU, and why. CPU tensors are taken for a GPU's, and nothing is run."""

from __future__ import annotations

from collections.abc import Iterator
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


MEASURED = [
    # cell, trains, T, B, H, microseconds of the GPU captured by the kernels and by PyTorch (the less, with TF32 or not)
    ("GRU", True, 1000, 16, 20, 263, 1192),
    ("LSTM", True, 1000, 16, 20, 393, 878),
    ("RNN", True, 1000, 16, 20, 178, 735),
    ("LSTM", True, 1000, 16, 64, 867, 1217),
    ("GRU", True, 1000, 16, 128, 1631, 2310),
    ("LSTM", True, 1000, 16, 128, 2393, 4242),
    ("RNN", True, 1000, 16, 128, 542, 1129),
    ("GRU", True, 1000, 16, 256, 34298, 16118),
    ("LSTM", True, 1000, 16, 256, 49870, 16308),
    ("RNN", True, 1000, 16, 256, 2399, 3801),
    ("GRU", True, 100, 16, 20, 83, 145),
    ("LSTM", True, 100, 16, 20, 100, 118),
    ("RNN", True, 100, 16, 20, 74, 114),
    ("GRU", True, 100, 16, 64, 111, 177),
    ("LSTM", True, 100, 16, 64, 135, 158),
    ("RNN", True, 100, 16, 64, 81, 114),
    ("GRU", True, 100, 16, 128, 213, 239),
    ("LSTM", True, 100, 16, 128, 302, 472),
    ("RNN", True, 100, 16, 128, 107, 148),
    ("GRU", True, 100, 16, 256, 3426, 1500),
    ("LSTM", True, 100, 16, 256, 4975, 1510),
    ("RNN", True, 100, 16, 256, 312, 431),
    ("LSTM", True, 3854, 16, 128, 8978, 16414),
    ("GRU", True, 1000, 1, 64, 529, 1093),
    ("LSTM", True, 1000, 1, 64, 877, 1114),
    ("LSTM", True, 1000, 64, 64, 1245, 1817),
    ("GRU", True, 1000, 256, 64, 1898, 12610),
    ("LSTM", True, 1000, 256, 64, 2268, 3999),
    ("GRU", False, 1000, 16, 64, 259, 496),
    ("LSTM", False, 1000, 16, 64, 347, 452),
    ("RNN", False, 1000, 16, 64, 150, 306),
    ("GRU", False, 100, 16, 64, 44, 62),
    ("LSTM", False, 100, 16, 64, 57, 59),
    ("RNN", False, 100, 16, 64, 33, 38),
]


@pytest.mark.parametrize(("cell", "trains", "T", "B", "H", "ours", "torchs"), MEASURED)
def test_in_a_graph_what_was_faster_runs(cell, trains, T, B, H, ours, torchs):
    """Of what an H100 measured (gpu-peers), calls too short to tell apart go to PyTorch."""
    way = decided(cell, T, B, H, graph=True, trains=trains)
    assert way.ours is (ours < torchs) or (not way.ours and torchs - ours <= 5)
    assert "in or before a CUDA graph; measured on an NVIDIA H100 80GB HBM3" in way.why


@pytest.mark.parametrize(
    ("cell", "T", "B", "H", "trains", "ours"),
    [
        ("LSTM", 1000, 16, 128, True, True),  # 1.9 ms less of the GPU, about as much more of the host
        ("LSTM", 3854, 16, 128, True, True),
        ("GRU", 1000, 16, 20, True, False),
        ("RNN", 1000, 16, 256, True, False),
        ("RNN", 3000, 16, 256, True, True),
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
    """Measured: 1.4 ms by the kernels, 29.5 ms by PyTorch, 16 and 62 ms of the host; captured 1.0 and 12.7."""
    for graph in (True, False):
        assert decided("GRU", 1000, 64, 20, graph=graph, packed=True, rows=35_000).ours
    assert not decided("GRU", 100, 100, 20, graph=True, packed=True, rows=5500).ours  # as many lengths as steps
    assert not decided("GRU", 100, 64, 20, graph=False, packed=True, rows=3500).ours
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
    assert not way_of(module, x).ours  # 0.9 ms less of the GPU, 1.9 ms more of the host
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
        "PyTorch's forward: float32 LSTM, I = 38, H = 128, B = 2, T = 100: about 0.338 ms of the GPU"
    )
    assert outcome.reason.endswith("; measured on an NVIDIA H100 80GB HBM3, not this NVIDIA H200")
