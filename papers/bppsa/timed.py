"""BPPSA: what is timed beside PyTorch, by the way back that is quickest here and by the scans."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Result
from papers.bppsa.tables import TABLE_4, TABLE_5, TABLE_6, Sides
from papers.figure import Claim, Context, Found, at_least, median
from sparsebp.core import threads, timing

_NO_CUDNN = "The paper's peer is cuDNN on a GPU, ours are PyTorch and JAX on the CPU"
_WORK = "A scan does about 20 times the work of the recursion, and two cores are few workers"
_BESIDE_JAX = {(100, 16), (1000, 16), (10_000, 16), (1000, 64), (259, 16), (517, 16), (1034, 16)}
"""T and B where JAX is measured too: it compiles some ten seconds for each."""
WAYS = ("auto", "chunked", "blelloch")
"""Ways back that are measured; what ``auto`` chose, its row says."""
_NAMES = {"bp": "plain back-propagation (bp)", "chunked": "chunked scan", "blelloch": "Blelloch's scan"}
_COLOURS = {"torch.nn": "#dc2626", "auto": "#1e40af", "chunked": "#059669", "blelloch": "#a21caf"}
_PARTS = (("FP: forward", "#1e40af"), ("FO: Jacobians", "#d97706"), ("backward", "#93c5fd"))


def generation(result: Result) -> Found:
    """Table 1: analytic generation over autograd column by column."""
    rows = [row for row in result["rows"] if row.get("target")]
    return Found(tuple(
        at_least(f"{row['name']}, {row['threads']} threads", row["target"], median(row, "columns_ratio"),
                 ran="analytic routines, over autograd a column at a time")
        for row in rows
    ))  # fmt: skip


# ---- losses over time: Fig. 7 and 13 ---------------------------------------------------------------------------------


def wall_clock(context: Context) -> Found:
    """Fig. 7: loss over wall-clock time, RNN(1, 20) on bitstreams, T = 1000, B = 16, ours and PyTorch's."""
    from sparsebp.data import BitstreamDataset

    length = 40 if context.quick else 1000
    data = BitstreamDataset(length, 3200)
    return _races({"": ("RNN", length, 1, 10, data, 2.73, 10 if context.quick else 400)})


def instruments(context: Context) -> Found:
    """Fig. 13: the same for GRU on **synthetic** instruments; the ratios are those of Table 6 for B = 16."""
    from sparsebp.data import synthetic_instruments

    runs = {}
    for name, steps in {"L": 3}.items() if context.quick else {"S": 400, "M": 200, "L": 100}.items():
        data, _ = synthetic_instruments(name, each=2 if context.quick else 40)  # type: ignore[arg-type]
        x = data.batch(np.arange(1))[0]
        runs[name] = ("GRU", x.shape[0], x.shape[2], 11, data, TABLE_6[name, 16].overall, steps)
    return _races(runs)


def _races(runs: Mapping[str, tuple[str, int, int, int, Any, float, int]]) -> Found:
    """Train with each way back, beside PyTorch from the same weights on the same batches."""
    from benchmarks.tools.workload import SequenceWorkload
    from papers.curves import race

    claims: list[Claim] = []
    curves: dict[str, dict[str, Any]] = {}
    for name, (cell, length, features, classes, data, paper, steps) in runs.items():
        for way in ("auto", "blelloch"):
            workload = SequenceWorkload(cell, length, 16, input_size=features, classes=classes, backward=way)
            ran = workload.choice().algorithm
            found = race(workload, data, steps)
            ours, theirs = found["sparsebp"], found["torch.nn"]
            apart = max(abs(a - b) for a, b in zip(ours["loss"][:3], theirs["loss"][:3], strict=True))
            what = f"{name + ': ' if name else ''}{cell}({features}, 20), T = {length}, B = 16"
            claims += [
                at_least(f"{what}: time of {steps} steps over ours", paper, theirs["seconds"][-1] / ours["seconds"][-1],
                         why=_WORK if way == "blelloch" else _NO_CUDNN, ran=_NAMES[ran]),
                Claim(f"{what}: largest difference of the first losses", "on each other", f"{apart:.1g}", apart < 1e-3,
                      "" if apart < 1e-3 else "Rounding grows with the steps", _NAMES[ran]),
            ]  # fmt: skip
            curves.setdefault(what, {"torch.nn": theirs})[f"sparsebp, {ran}"] = ours
    return Found(tuple(claims), curves)


def draw_races(data: Mapping[str, Any]) -> Any:
    """Draw loss over wall-clock time, a panel a training."""
    drawing, axes = pictures.figure(1, len(data), width=11.6, height=4.2)
    for ax, (what, sides) in zip(axes[0], data.items(), strict=True):
        for (name, side), colour in zip(sides.items(), ("#dc2626", "#1e40af", "#a21caf"), strict=False):
            ax.plot(side["seconds"], side["loss"], color=colour, linewidth=1.2, marker=".", markersize=3,
                    label=name)  # fmt: skip
        ax.set(xlabel="wall-clock time, s", ylabel="training loss")
        ax.set_title(what, fontsize=9)
        ax.legend(fontsize=8)
    return drawing


# ---- the tables: Fig. 8 and 9 ----------------------------------------------------------------------------------------


def lengths(context: Context) -> Found:
    """Fig. 8a to c and Table 4: RNN over the sequence length, B = 16."""
    chosen = (10, 30) if context.quick else tuple(TABLE_4)
    rows = _measured(context, "RNN", [(length, 16, None) for length in chosen])
    return Found((*_largest("RNN", 2.75, 108, rows), *_sixteen(rows),
                  *_table(rows, {(length, 16): TABLE_4[length] for length in chosen})), {"rows": rows})  # fmt: skip


def batches(context: Context) -> Found:
    """Fig. 8d to f and Table 5: RNN over the share of the machine that a sample has, 1 / B."""
    length, chosen = (30, (2, 4)) if context.quick else (1000, tuple(TABLE_5))
    rows = _measured(context, "RNN", [(length, batch, None) for batch in chosen])
    return Found((*_largest("RNN", 2.75, 108, rows),
                  *_table(rows, {(length, batch): TABLE_5[batch] for batch in chosen})), {"rows": rows})  # fmt: skip


def gru(context: Context) -> Found:
    """Fig. 9 and Table 6: GRU on the features S, M and L with B of 16, 32 and 64; what the Jacobians cost."""
    sizes = {"S": (12, 38)} if context.quick else {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
    points = {(size[0], batch, size[1]): (name, batch) for name, size in sizes.items()
              for batch in ((16,) if context.quick else (16, 32, 64))}  # fmt: skip
    rows = _measured(context, "GRU", list(points))
    for row in rows:
        row["set"] = points[row["length"], row["batch"], row["features"]][0]
    paper = {(length, batch): TABLE_6[key] for (length, batch, _), key in points.items()}
    shares = []
    for row in rows:
        if row["way"] == "blelloch":
            wanted, ours = paper[row["length"], row["batch"]].overhead, row["prepare"] / row["torch"]["step"]
            shares.append(Claim(f"{_named(row)}: the Jacobians' share of torch.nn's step (FO)", f"{wanted:.0%}",
                                f"{ours:.0%}", ours <= wanted, "" if ours <= wanted else _WORK,
                                _NAMES["blelloch"]))  # fmt: skip
    return Found((*_largest("GRU", 2.36, 13.4, rows), *_table(rows, paper), *shares), {"rows": rows})


def _measured(context: Context, cell: str, points: Sequence[tuple[int, int, int | None]]) -> list[dict[str, Any]]:
    """Return a row for every way back at every point (T, B, features), each beside PyTorch in the same rounds."""
    from benchmarks.processes.apart import Apart
    from benchmarks.recurrent.training import measure_row
    from benchmarks.tools import peers
    from benchmarks.tools.workload import SequenceWorkload

    few: dict[str, Any] = {"rounds": 2, "least_rounds": 2, "warmup": 1}
    rounds = few if context.quick else {"rounds": 7, "least_rounds": 3, "budget": 1.0}
    rows, count = [], threads.most_threads()
    jax = not context.quick and importlib.util.find_spec("jax") is not None
    with peers.threads(count), Apart(count) if jax else nullcontext(None) as apart:
        for length, batch, features in points:
            for way in WAYS:
                workload = SequenceWorkload(cell, length, batch, input_size=features, backward=way)
                beside = apart if way == "auto" and (length, batch) in _BESIDE_JAX else None
                found = measure_row(workload, rounds if way == "auto" else {**few, "rounds": 3}, apart=beside)
                prepare = _preparation(workload) if found["algorithm"] == "blelloch" else 0.0
                row = {
                    "length": length, "batch": batch, "features": features, "way": way, "ran": found["algorithm"],
                    "step": median(found, "step_ratio"), "prepare": prepare, "rounds": found["step_ours"]["rounds"],
                    "gradient_difference": found["gradient_difference"],
                    "ours": {part: median(found, f"{part}_ours") for part in ("step", "backward")},
                    "torch": {part: median(found, f"{part}_torch") for part in ("step", "backward")},
                }  # fmt: skip
                back = max(row["ours"]["backward"] - prepare, 1e-9)
                row["backward"] = row["torch"]["backward"] / back if prepare else median(found, "backward_ratio")
                if "jax_ratio" in found:
                    row["jax"] = median(found, "jax_ratio")
                rows.append(row)
                context.echo(f"{_named(row)}, {row['ran']}: step {row['step']:.1f}×, backward {row['backward']:.1f}×")
    return rows


def _preparation(workload: Any) -> float:
    """Return the seconds in which the transposed Jacobians of all steps are made, all samples."""
    saved, _ = workload.forward()
    layer, (tape,) = workload.model.rnn, saved.rnn.tapes
    weight = layer.params["weight_hh_l0"]
    found = timing.measure({"prepare": lambda: layer.cell.jacobians(tape, weight, reverse=True)}, rounds=5, budget=0.5)
    return found["prepare"].median


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['set']}, B = {row['batch']}" if "set" in row else f"T = {row['length']}, B = {row['batch']}"


def _largest(cell: str, step: float, backward: float, rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return the claims of the largest speed-ups, of whole steps and of the backward, by every way back."""
    claims = []
    for way in WAYS:
        of_way = [row for row in rows if row["way"] == way]
        why = _NO_CUDNN if way == "auto" else _WORK
        ran = _ran(of_way)
        claims.append(at_least(f"{cell}: the largest speed-up of a training step over torch.nn", step,
                               max(row["step"] for row in of_way), why=why, ran=ran))  # fmt: skip
        if jax := [row["jax"] for row in of_way if "jax" in row]:
            claims.append(at_least(f"{cell}: the largest speed-up of a training step over JAX", step, max(jax), why=why,
                                   ran=ran))  # fmt: skip
        best = max(of_way, key=lambda row: row["backward"])
        theirs = 1e6 * best["torch"]["backward"] / best["length"]
        if way == "auto" and cell == "RNN":
            cudnn = 1e6 * TABLE_4[1000].step_seconds(1000)
            why = (f"{_NO_CUDNN}: cuDNN's backward takes {cudnn:.1f} µs a step on a V100 (from Table 4, T = 1000), "
                   f"torch.nn's {theirs:.3g} µs here")  # fmt: skip
        claims.append(at_least(f"{cell}: the largest speed-up of the backward over torch.nn", backward,
                               best["backward"], why=why, ran=ran))  # fmt: skip
    return claims


def _ran(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(_NAMES[name] for name in dict.fromkeys(row["ran"] for row in rows))


def _sixteen(rows: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Return §5.1's claims of the backward at T = 1000, B = 16, which is not in a quick run."""
    return [
        at_least("T = 1000, B = 16: the backward over torch.nn (§5.1, RTX 2070)", 16, row["backward"],
                 why=_NO_CUDNN if row["way"] == "auto" else _WORK, ran=_NAMES[row["ran"]])
        for row in rows if (row["length"], row["batch"]) == (1000, 16)
    ]  # fmt: skip


def _table(rows: Sequence[Mapping[str, Any]], paper: Mapping[tuple[int, int], Sides]) -> list[Claim]:
    """Return a claim for every row of the paper's table and every way back: met if step and backward both are."""
    claims = []
    for row in sorted(rows, key=lambda row: WAYS.index(row["way"])):
        theirs = paper[row["length"], row["batch"]]
        pairs = {"step": theirs.overall, "backward": theirs.backward}
        missed = [part for part, wanted in pairs.items() if row[part] < wanted]
        cause = _NO_CUDNN if row["way"] == "auto" else _WORK
        why = f"{' and '.join(missed).capitalize()}: {cause}" if missed else ""
        claims.append(Claim(
            f"{_named(row)}: step, and backward alone", f"{theirs.overall:.2f}×, {theirs.backward:.1f}×{theirs.doubt}",
            f"{row['step']:.3g}×, {row['backward']:.3g}×", not missed, why, _NAMES[row["ran"]],
        ))  # fmt: skip
    return claims


def draw_table(data: Mapping[str, Any]) -> Any:
    """Draw latency and speed-up of the backward, and the parts of a step, over T or over 1 / B, as Fig. 8."""
    rows = data["rows"]
    key = "length" if len({row["length"] for row in rows}) > 1 else "batch"
    drawing, axes = pictures.figure(1, 3, width=11.6, height=6.2)
    latency, faster, parts = axes[0]
    named = "sequence length T (B = 16)" if key == "length" else f"1 / B (T = {rows[0]['length']})"
    place = (lambda row: row["length"]) if key == "length" else (lambda row: 1 / row["batch"])
    for way in WAYS:
        of_way = sorted((row for row in rows if row["way"] == way), key=place)
        label, at = f"{way} ({', '.join(dict.fromkeys(row['ran'] for row in of_way))})", [place(row) for row in of_way]
        if way == "auto":
            latency.loglog(at, [1e3 * row["torch"]["backward"] for row in of_way], "o-", color=_COLOURS["torch.nn"],
                           label="torch.nn")  # fmt: skip
        latency.loglog(at, [1e3 * row["ours"]["backward"] for row in of_way], "o-", color=_COLOURS[way], label=label)
        faster.loglog(at, [row["backward"] for row in of_way], "o-", color=_COLOURS[way], label=label)
    faster.axhline(1, color="grey", linewidth=0.8)
    latency.set(xlabel=named, ylabel="backward, ms an iteration")
    faster.set(xlabel=named, ylabel="backward: times faster than torch.nn")
    for ax in (latency, faster):
        ax.grid(alpha=0.3)
    _draw_parts(parts, sorted(rows, key=lambda row: (place(row), WAYS.index(row["way"]))))
    pictures.legend_below(drawing, *latency.get_legend_handles_labels(), columns=4)
    return drawing


def draw_gru(data: Mapping[str, Any]) -> Any:
    """Draw the parts of a step for every set and batch size, as Fig. 9."""
    drawing, axes = pictures.figure(width=11.6, height=1.6 + 0.24 * len(data["rows"]))
    _draw_parts(axes[0, 0], data["rows"])
    return drawing


def _draw_parts(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw forward, preparation of the Jacobians and backward as shares of torch.nn's step; the sums are written."""
    names, shares = [], []
    for row in rows:
        if row["way"] == "chunked":  # makes no Jacobians
            continue
        sides = [("torch.nn", row["torch"], 0.0)] if row["way"] == "auto" else []
        for side, seconds, prepare in (*sides, (row["ran"], row["ours"], row["prepare"])):
            parts = (seconds["step"] - seconds["backward"], prepare, seconds["backward"] - prepare)
            names.append(f"{_named(row)}, {side}")
            shares.append([max(part, 0.0) / row["torch"]["step"] for part in parts])
    begin = np.zeros(len(names))
    for (label, colour), part in zip(_PARTS, np.array(shares).T, strict=True):
        ax.barh(range(len(names)), part, 0.8, left=begin, color=colour, label=label)
        begin += part
    for number, whole in enumerate(begin):
        ax.text(whole, number, f" {whole:.2g}", va="center", fontsize=7)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel="time, in steps of torch.nn")
    ax.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)
