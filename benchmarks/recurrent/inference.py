"""Recurrent layers without a way back, against ONNX Runtime and ``torch.nn``; and a step of a stream, from Python.

``python -m benchmarks inference``. Layers of 20 to 128 units on the CPU, float32. ONNX Runtime has its weights packed
when the session is made and its arrays bound; ours are packed in every call. PyTorch runs in its inference mode. Where
ONNX Runtime is not installed, rows go without it. The rows with T = 1 are steps of a stream, as `Stream.step` runs
them; their peers run a sequence of one step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.recurrent import onnx_twin
from benchmarks.tools import pictures, report
from benchmarks.tools.benchmark import Benchmark, Result, Row, Run, refuse_difference
from benchmarks.tools.peers import import_torch
from sparsebp import nn
from sparsebp.core import tables, timing
from sparsebp.core.tables import Column

TARGET, STEP_TARGET = 1.2, 3e-6
"""Times faster than ONNX Runtime; seconds of a step of 20 units, one sample."""
NO_ONNX = "ONNX Runtime is not installed (pip install 'sparsebp[peers]'): torch.nn is the only peer"


def measure(run: Run) -> Iterator[Row]:
    """Measure every layer with every batch."""
    import_torch()
    has_onnx = all(importlib.util.find_spec(name) is not None for name in ("onnx", "onnxruntime"))
    if not has_onnx:
        run.note(NO_ONNX)
    for count in run.threads():
        for cell, features, hidden, length in run.settings["layers"]:
            layer = getattr(nn, cell)(features, hidden, rng=0)
            for batch in run.settings["batches"]:
                yield measure_row(layer, length, batch, count, run.rounds, has_onnx) | {"threads": count}
            if hidden <= 20:
                yield measure_row(layer, 1, 1, count, run.rounds, has_onnx) | {"threads": count}


def measure_row(layer: Any, length: int, batch: int, threads: int, rounds: Mapping[str, Any], has_onnx: bool) -> Row:
    """Time one layer over a batch, after comparing the outputs; one step of one sample is a stream's."""
    torch = import_torch()
    kind, name = type(layer).__name__, f"{type(layer).__name__}({layer.input_size}, {layer.hidden_size})"
    x = np.random.default_rng(0).standard_normal((length, batch, layer.input_size), dtype=np.float32)
    twin, given = getattr(torch.nn, kind)(layer.input_size, layer.hidden_size), torch.from_numpy(x)
    twin.load_state_dict({key: torch.from_numpy(array) for key, array in layer.state_dict().items()})

    def of_torch() -> Any:
        with torch.inference_mode():
            return twin(given)[0]

    streamed = length == batch == 1
    stream, x_t = layer.stream(), x[0, 0]
    sides: dict[str, Callable[[], object]] = {
        "ours": (lambda: stream.step(x_t)) if streamed else lambda: layer(x), "torch": of_torch
    }  # fmt: skip
    expected = of_torch().numpy()
    differences = {"torch.nn": np.abs(layer(x) - expected).max()}
    if has_onnx:
        sides["onnx"], y = onnx_twin.side(layer, x, threads)
        sides["onnx"]()
        differences["ONNX Runtime"] = np.abs(layer(x) - y).max()
    for peer, difference in differences.items():
        refuse_difference(f"{name}, B = {batch}: an output", peer, float(difference))
    row: Row = {"model": name, "batch": batch, "length": length, "difference": float(max(differences.values()))}
    row |= timing.side_by_side(timing.measure(sides, **rounds))
    return row | judge(row, streamed)


def judge(row: Mapping[str, Any], streamed: bool) -> dict[str, str | None]:
    """Say what a row is to reach, and whether it does."""
    if streamed:
        took = row["ours"]["median"]
        missed = [tables.seconds(took)] if took > STEP_TARGET else []
        return {"target": f"≤ {tables.seconds(STEP_TARGET)}", "met": report.outcome(missed)}
    if "onnx_ratio" not in row:
        return {"target": None, "met": None}
    times = row["onnx_ratio"]["median"]
    return {"target": f"≥ {TARGET:g}×", "met": report.outcome([f"{times:.2g}×"] if times < TARGET else [])}


def picture(result: Result) -> Any:
    """Draw how many times faster than ONNX Runtime, or than PyTorch without it."""
    rows = [row for row in result["rows"] if row["length"] > 1]
    key, peer = (
        ("onnx_ratio", "ONNX Runtime") if any("onnx_ratio" in row for row in rows) else ("torch_ratio", "torch.nn")
    )
    counts = dict.fromkeys(row["threads"] for row in rows)
    groups = [
        (tables.in_threads(count), f"C{n}", [row[key]["median"] for row in rows if row["threads"] == count])
        for n, count in enumerate(counts)
    ]
    labels = [f"{row['model']}, B = {row['batch']}" for row in rows if row["threads"] == next(iter(counts))]
    drawing, ax = pictures.bar_chart(labels, groups, f"times faster than {peer} (median)", each=0.4)
    ax.axvline(1, color="black", linewidth=0.8, label=peer)
    pictures.legend_below(drawing, columns=3)
    return drawing


WHO = ("model", "batch", "length", "threads")
BENCHMARK = Benchmark(
    name="inference",
    title="Recurrent layers on the CPU without a way back, float32, beside ONNX Runtime and torch.nn",
    leaves_out="nothing of ours; of ONNX Runtime, packing the weights (once a session)",
    settings={"targets": {"onnx": TARGET, "step": STEP_TARGET}, "dtype": "float32"},
    sizes={
        "layers": tuple(
            (cell, *sizes)
            for sizes in ((38, 20, 1000), (38, 64, 300), (64, 128, 200)) for cell in ("GRU", "RNN", "LSTM")
        ),
        "batches": (1, 4, 16, 32),
    },
    quick={"layers": (("GRU", 3, 5, 7),), "batches": (2,)},
    rounds={"rounds": 11, "least_rounds": 5, "budget": 1.0},
    measure=measure,
    columns=(
        Column("model", "model", number=False),
        Column("B", "batch"),
        Column("T", "length"),
        Column("threads", "threads"),
        Column("sparsebp", "ours", tables.seconds),
        Column("ONNX Runtime", "onnx", tables.seconds),
        Column("over ONNX Runtime", "onnx_ratio", tables.times),
        Column("torch.nn", "torch", tables.seconds),
        Column("over torch.nn", "torch_ratio", tables.times),
        Column("target", "target", number=False),
        Column("outcome", "met", number=False),
    ),
    tables={
        "Time": (*WHO, "ours", "onnx", "torch"),
        "Ratios, and what they are to be": (*WHO, "onnx_ratio", "torch_ratio", "target", "met"),
    },
    short=(*WHO, "ours", "onnx_ratio", "torch_ratio", "target", "met"),
    picture=picture,
)  # fmt: skip
