"""BPPSA: what is timed beside PyTorch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

from sparsebp.bench.tools import pictures
from sparsebp.bench.tools.benchmark import Result
from sparsebp.core import threads
from sparsebp.reproduce.figure import Claim, Context, Found, at_least, median

_NO_CUDNN = "The paper's peer is cuDNN on a GPU, ours are PyTorch and JAX on the CPU"
_MANY = ((10, 30, 100, 300, 1000, 3000, 10_000, 30_000), (2, 4, 8, 16, 32, 64, 128, 256))
"""T and B of §5.1."""
_BESIDE_JAX = {(100, 16), (1000, 16), (10_000, 16), (1000, 64), (259, 16), (517, 16), (1034, 16)}
"""T and B where JAX is measured too: it compiles some ten seconds for each."""
_SIDES = (
    ("step", "step, over torch.nn", "#1e40af"), ("backward", "backward, over torch.nn", "#93c5fd"),
    ("jax", "step, over JAX", "#166534"),
)  # fmt: skip


def generation(result: Result) -> Found:
    """Table 1: analytic generation over autograd column by column."""
    rows = [row for row in result["rows"] if row.get("target")]
    return Found(tuple(
        at_least(f"{row['name']}, {row['threads']} threads", row["target"], median(row, "columns_ratio"))
        for row in rows
    ))  # fmt: skip


def wall_clock(context: Context) -> Found:
    """Fig. 7: loss over wall-clock time, RNN(1, 20) on bitstreams, T = 1000, B = 16, ours and PyTorch's."""
    from sparsebp.bench.tools.workload import SequenceWorkload
    from sparsebp.data import BitstreamDataset
    from sparsebp.reproduce.curves import race

    workload = SequenceWorkload("RNN", 40 if context.quick else 1000, 16)
    data = BitstreamDataset(workload.length, 3200)
    return _race(race(workload, data, 10 if context.quick else 400), 2.73, workload)


def instruments(context: Context) -> Found:
    """Fig. 13: the same for GRU on **synthetic** instruments, L in a quick run, else S."""
    from sparsebp.bench.tools.workload import SequenceWorkload
    from sparsebp.data import synthetic_instruments
    from sparsebp.reproduce.curves import race

    data, _ = synthetic_instruments("L" if context.quick else "S", each=2 if context.quick else 120)
    x = data.batch(np.arange(1))[0]
    workload = SequenceWorkload("GRU", x.shape[0], 16, input_size=x.shape[2], classes=11)
    return _race(race(workload, data, 3 if context.quick else 600), 2.36, workload)


def _race(found: dict[str, Any], paper: float, workload: Any) -> Found:
    ours, theirs = found["sparsebp"], found["torch.nn"]
    apart = max(abs(a - b) for a, b in zip(ours["loss"][:3], theirs["loss"][:3], strict=True))
    ratio = theirs["seconds"][-1] / ours["seconds"][-1]
    name = f"{workload.cell}({workload.input_size}, {workload.hidden}), T = {workload.length}, B = {workload.batch}"
    return Found((
        at_least(f"{name}: time of the training over ours", paper, ratio, why=_NO_CUDNN),
        Claim(f"{name}: largest difference of the first three losses", "on each other", f"{apart:.1g}",
              apart < 1e-3),
    ), found)  # fmt: skip


def draw_race(data: Mapping[str, Any]) -> Any:
    """Draw loss over wall-clock time."""
    drawing, axes = pictures.figure()
    for name, colour in (("sparsebp", "#1e40af"), ("torch.nn", "#dc2626")):
        axes[0, 0].plot(data[name]["seconds"], data[name]["loss"], color=colour, linewidth=1, label=name)
    axes[0, 0].set(xlabel="wall-clock time, s", ylabel="training loss")
    axes[0, 0].legend()
    return drawing


def lengths(context: Context) -> Found:
    """Fig. 8, and the backward of Fig. 7: speed-ups over T and over B, the backward alone and the whole step."""
    long, wide = ((10, 30), (2, 4)) if context.quick else _MANY
    points = [(length, 16) for length in long] + [(1000 if not context.quick else 30, batch) for batch in wide]
    rows = _measured(context, "RNN", [(length, batch, None) for length, batch in dict.fromkeys(points)])
    known = [r["backward"] for r in rows if (r["length"], r["batch"]) == (1000, 16)]  # not in a quick run
    return Found((
        *(at_least("RNN, T = 1000, B = 16: the backward over torch.nn (Fig. 7)", 16, r, why=_NO_CUDNN) for r in known),
        *_largest("RNN", 2.75, rows),
        at_least("RNN: the largest speed-up of the backward over torch.nn", 108, max(r["backward"] for r in rows), why=(
            f"{_NO_CUDNN}; its backward takes 20 to 60 µs a step there, ours is bounded by the recursion itself")),
    ), {"rows": rows, "at": 30 if context.quick else 1000})  # fmt: skip


def _largest(cell: str, paper: float, rows: list[dict[str, Any]]) -> list[Claim]:
    """Return the claims of whole steps: over each of the peers."""
    return [
        at_least(f"{cell}: the largest speed-up of a training step over {name}", paper, max(found), why=_NO_CUDNN)
        for key, name in (("step", "torch.nn"), ("jax", "JAX")) if (found := [r[key] for r in rows if key in r])
    ]  # fmt: skip


def _measured(context: Context, cell: str, points: list[tuple[int, int, int | None]]) -> list[dict[str, Any]]:
    from sparsebp.bench.processes.apart import Apart
    from sparsebp.bench.recurrent.training import measure_row
    from sparsebp.bench.tools import peers
    from sparsebp.bench.tools.workload import SequenceWorkload

    rounds = (
        {"rounds": 2, "least_rounds": 2, "warmup": 1}
        if context.quick
        else {"rounds": 7, "least_rounds": 3, "budget": 1.0}
    )
    rows = []
    count = threads.most_threads()
    jax = not context.quick and importlib.util.find_spec("jax") is not None
    with peers.threads(count), Apart(count) if jax else nullcontext(None) as apart:
        for length, batch, features in points:
            found = measure_row(SequenceWorkload(cell, length, batch, input_size=features), rounds,
                                apart=apart if (length, batch) in _BESIDE_JAX else None)  # fmt: skip
            rows.append({"length": length, "batch": batch, "step": median(found, "step_ratio"),
                         "backward": median(found, "backward_ratio"), "features": features,
                         "rounds": found["step_ours"]["rounds"]})  # fmt: skip
            if "jax_ratio" in found:
                rows[-1]["jax"] = median(found, "jax_ratio")
            context.echo(f"{cell}, T = {length}, B = {batch}: step {rows[-1]['step']:.1f}×, "
                         f"backward {rows[-1]['backward']:.1f}×")  # fmt: skip
    return rows


def draw_lengths(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups over T and over 1 / B."""
    drawing, axes = pictures.figure(1, 2)
    for ax, key, fixed in ((axes[0, 0], "length", ("batch", 16)), (axes[0, 1], "batch", ("length", data["at"]))):
        rows = sorted((r for r in data["rows"] if r[fixed[0]] == fixed[1]), key=lambda r: r[key])
        for what, name, colour in _SIDES:
            if shown := [r for r in rows if what in r]:
                ax.plot([r[key] for r in shown], [r[what] for r in shown], marker="o", color=colour, label=name)
        ax.axhline(1, color="grey", linewidth=0.8)
        named = "sequence length T (B = 16)" if key == "length" else f"batch size B (T = {data['at']})"
        ax.set(xscale="log", yscale="log", ylabel="times faster", xlabel=named)
        ax.legend(fontsize=8)
    return drawing


def gru(context: Context) -> Found:
    """Fig. 9: GRU on the features S, M and L with B of 16, 32 and 64."""
    sizes = [(12, 4, 38)] if context.quick else [(259, 0, 38), (517, 0, 24), (1034, 0, 12)]
    rows = _measured(context, "GRU", [
        (length, batch or b, features) for length, batch, features in sizes for b in ((4,) if batch else (16, 32, 64))
    ])  # fmt: skip
    return Found((
        *_largest("GRU", 2.36, rows),
        at_least("GRU: the largest speed-up of the backward over torch.nn", 13.4, max(r["backward"] for r in rows),
                 why=_NO_CUDNN),
    ), {"rows": rows})  # fmt: skip


def draw_gru(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups of every set and batch size."""
    rows = data["rows"]
    names = {259: "S", 517: "M", 1034: "L"}
    drawing, ax = pictures.bar_chart(
        [f"{names.get(row['length'], row['length'])}, B = {row['batch']}" for row in rows],
        [(name, colour, [r.get(what, 0.0) for r in rows]) for what, name, colour in _SIDES if what in rows[0]],
        "times faster", each=0.5,
    )  # fmt: skip
    ax.legend(fontsize=8)
    return drawing
