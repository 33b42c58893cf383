"""BPPSA: figures that are timed against PyTorch, by the fastest backward here and by the scans."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, workloads
from benchmarks.harness import Result, import_torch
from benchmarks.processes import Apart, on_ranks
from benchmarks.ranks import STEP_TARGET, time_parallel_on_ranks
from benchmarks.recurrent import measure_recurrent_row
from benchmarks.schedules import interval, schedule_of
from benchmarks.workloads import NETWORKS, STAGES, SequenceWorkload, TorchTwin
from papers.figure import Claim, Context, Found, at_least, judged, median
from sparsebp import kernels, nn, optim
from sparsebp.comm.threads import run_ranks
from sparsebp.comm.transport import Transport
from sparsebp.core import threads, timing
from sparsebp.data import BitstreamDataset, Dataset, epoch_order, synthetic_instruments
from sparsebp.nn.recurrent.runs import jacobians
from sparsebp.runtime.pipeline import PipelineExecutor

# BPPSA App. C: PipeDream's stale weights with Adam, and plain training with Adam.

_RATE, _BATCH, _TOPS = 1e-3, 32, (1, 5)
_SIDES = ("in turn", "PipeDream")
_RAN = {"in turn": "bp, Adam, one worker", "PipeDream": f"PipeDream with stashed weights, {STAGES} stages, bp, Adam"}


def accuracies(context: Context) -> Found:
    """Train VGG-11 on digits with Adam, in turn and by PipeDream; return top-1 and top-5 accuracies."""
    network = NETWORKS["VGG-11"]
    data = network.data(20 if context.quick else 1000)
    sizes, seeds = (network.quick, (0, 1)) if context.quick else (network.sizes, tuple(range(6)))
    parts, steps = (2, 4) if context.quick else (4, 40)

    def build(seed: int) -> nn.Sequential:
        return network.build(np.random.default_rng(seed), **sizes)

    found = {side: [_train(side, partial(build, seed), data, parts, steps, seed) for seed in seeds] for side in _SIDES}
    top = {side: np.array(runs)[:, -1] for side, runs in found.items()}  # (seeds, tops)
    claims = []
    for number, (k, paper) in enumerate(zip(_TOPS, (2.6, 1.9), strict=True)):
        lost, width = interval(100 * (top["in turn"][:, number] - top["PipeDream"][:, number]))
        met = lost > width
        claims.append(judged(f"top-{k} accuracy lost by PipeDream, points, {len(seeds)} runs", f"{paper}",
                             f"{lost:.1f} ± {width:.1f}", met,
                             "Digits and a small VGG-11: within the noise of the runs", _RAN["PipeDream"]))  # fmt: skip
    for side in _SIDES:
        means = 100 * top[side].mean(axis=0)
        claims.append(Claim(f"accuracy, {side}: top-1 and top-5, %", "not stated", f"{means[0]:.1f}, {means[1]:.1f}",
                            None, "The paper trains VGG-16 on ImageNet", _RAN[side]))  # fmt: skip
    return Found(tuple(claims), {"steps": [steps * (k + 1) for k in range(parts)], "accuracies": found})


def _train(
    side: str, build: Callable[[], nn.Sequential], data: Any, parts: int, steps: int, seed: int
) -> list[list[float]]:  # fmt: skip
    """Return top-1 and top-5 accuracy after each part of the training, where the pipeline is drained."""
    train_set, test_set = data
    given = [train_set.batch(chosen) for chosen in workloads.batches(len(train_set), _BATCH, seed, parts * steps)]
    loss = nn.CrossEntropyLoss()

    def work(transport: Transport | None) -> list[list[float]]:
        model, found = build(), []
        optimizer = optim.Adam(model.parameters(), lr=_RATE)
        schedule = schedule_of("PipeDream", steps)
        executor = None if transport is None else PipelineExecutor(model, loss, optimizer, schedule, transport)
        for begin in range(0, len(given), steps):
            part = given[begin : begin + steps]
            if executor is None:
                for x, target in part:
                    workloads.step(model, optimizer, x, target)
            else:
                executor.step(part)
                executor.flush()
            if transport is None or transport.rank == 0:
                found.append(_top(model, test_set))
        return found

    return run_ranks(STAGES, work)[0] if side == "PipeDream" else work(None)


def _top(model: nn.Sequential, data: Any) -> list[float]:
    x, target = data.batch(np.arange(len(data)))
    order = np.argsort(-model(x), axis=1)
    return [float((order[:, :k] == np.asarray(target)[:, None]).any(axis=1).mean()) for k in _TOPS]


def draw_accuracies(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, len(_TOPS), width=10.5, height=4.2)
    for ax, number, k in zip(axes[0], range(len(_TOPS)), _TOPS, strict=True):
        for side, colour in zip(_SIDES, ("#111827", harness.OURS), strict=True):
            runs = 100 * np.array(data["accuracies"][side])[:, :, number]
            mean = runs.mean(axis=0)
            ax.errorbar(data["steps"], mean, [mean - runs.min(axis=0), runs.max(axis=0) - mean], color=colour,
                        capsize=3, marker="o", markersize=4, label=f"Adam, {side}")  # fmt: skip
        ax.set(xlabel="batches", ylabel=f"top-{k} accuracy on held-out digits, %")
    return drawing


# BPPSA's Tables 4 to 6: seconds of an epoch on a V100, and the speed-ups that follow from them (Appendix G).

_STEPS = 32_000 // 16
"""Iterations of an epoch of §4.1, for B = 16."""


class Sides(NamedTuple):
    """A row: seconds of an epoch."""

    forward: float  # the forward pass only
    baseline: float  # training by PyTorch with cuDNN, and by the paper's scan
    bppsa: float
    # The forward pass with the preparation of the Jacobians, where the paper has it; else `forward`.
    prepared: float | None = None

    @property
    def overall(self) -> float:
        """Speed-up of the training."""
        return self.baseline / self.bppsa

    @property
    def backward(self) -> float:
        """Speed-up of the backward, the preparation of the Jacobians left out."""
        return (self.baseline - self.forward) / (self.bppsa - (self.prepared or self.forward))

    @property
    def doubt(self) -> str:
        """Say that `backward` follows from a difference of the last digits, if it does."""
        rest = self.bppsa - (self.prepared or self.forward)
        return f" (from {rest:.2f} s)" if rest < 0.05 else ""

    @property
    def overhead(self) -> float:
        """Share of the baseline's time that the preparation of the Jacobians takes."""
        return ((self.prepared or self.forward) - self.forward) / self.baseline

    def step_seconds(self, length: int) -> float:
        """Return the seconds of the baseline's backward for one of `length` steps of a batch of 16."""
        return (self.baseline - self.forward) / _STEPS / length


TABLE_4 = {
    10: Sides(1.57, 4.49, 4.24), 30: Sides(2.13, 5.5, 4.91), 100: Sides(3.82, 8.87, 6.64),
    300: Sides(8.79, 18.49, 11.71), 1000: Sides(25.86, 53.33, 29.29), 3000: Sides(75.33, 157.11, 79.48),
    10_000: Sides(250.28, 510.13, 265.02), 30_000: Sides(748.99, 1557.94, 764.31),
}  # fmt: skip
"""RNN, by T; B = 16."""
TABLE_5 = {
    256: Sides(2.13, 4.02, 3.72), 128: Sides(3.87, 7.96, 5.49), 64: Sides(7.51, 14.77, 9.27),
    32: Sides(13.62, 29.51, 15.0), 16: Sides(25.86, 53.33, 29.29), 8: Sides(51.29, 102.77, 56.37),
    4: Sides(100.55, 209.67, 112.23), 2: Sides(200.65, 409.33, 227.13),
}  # fmt: skip
"""RNN, by B; T = 1000."""
TABLE_6 = {
    ("S", 16): Sides(1.66, 3.71, 2.94, 2.1), ("S", 32): Sides(0.91, 1.9, 1.48, 1.09),
    ("S", 64): Sides(0.52, 1.0, 0.82, 0.62), ("M", 16): Sides(3.21, 6.19, 4.2, 3.52),
    ("M", 32): Sides(1.73, 3.3, 2.22, 1.83), ("M", 64): Sides(0.86, 1.82, 1.2, 1.18),
    ("L", 16): Sides(5.78, 11.43, 6.91, 6.06), ("L", 32): Sides(3.04, 6.09, 3.57, 3.23),
    ("L", 64): Sides(1.64, 3.19, 2.33, 2.13),
}  # fmt: skip
"""GRU, by set and B."""


_NO_CUDNN = "The paper compares with cuDNN on a GPU; here the peers are PyTorch and JAX on the CPU"
_WORK = "A scan does about 20 times the work of the sequential recursion, and two cores are too few workers"
_BESIDE_JAX = {(100, 16), (1000, 16), (10_000, 16), (1000, 64), (259, 16), (517, 16), (1034, 16)}
"""T and B where JAX is measured too: it compiles some ten seconds for each."""
WAYS = ("auto", "chunked", "blelloch")
"""Backward algorithms that are measured; the row says the choice of ``auto``."""
_NAMES = {"bp": "plain back-propagation (bp)", "chunked": "chunked scan", "blelloch": "Blelloch's scan"}
_STYLES = dict(zip(WAYS, zip(harness.BLUES, ("o-", "s-", "^-"), strict=False), strict=True))
_PARTS = {"torch.nn": (harness.TORCH, "none", harness.TORCH_TINT), "sparsebp": harness.BLUES}
"""Colours of the forward, the Jacobians and the backward."""


def generation(result: Result) -> Found:
    """Table 1: analytic generation over autograd column by column."""
    rows = [row for row in result["rows"] if row.get("target")]
    return Found(tuple(
        at_least(f"{row['name']}, {row['threads']} threads", row["target"], median(row, "columns_ratio"),
                 ran="analytic routines, compared with autograd column by column")
        for row in rows
    ))  # fmt: skip


# ---- losses over time: Fig. 7 and 13 ---------------------------------------------------------------------------------


def wall_clock(context: Context) -> Found:
    """Fig. 7: loss over wall-clock time, RNN(1, 20) on bitstreams, T = 1000, B = 16, ours and PyTorch's."""
    length = 40 if context.quick else 1000
    data = BitstreamDataset(length, 3200)
    return _races({"": ("RNN", length, 1, 10, data, 2.73, 10 if context.quick else 400)})


def instruments(context: Context) -> Found:
    """Fig. 13: the same for GRU on **synthetic** instruments; with the ratios of Table 6 for B = 16."""
    runs = {}
    for name, steps in {"L": 3}.items() if context.quick else {"S": 400, "M": 200, "L": 100}.items():
        data, _ = synthetic_instruments(name, each=2 if context.quick else 40)  # type: ignore[arg-type]
        x = data.batch(np.arange(1))[0]
        runs[name] = ("GRU", x.shape[0], x.shape[2], 11, data, TABLE_6[name, 16].overall, steps)
    return _races(runs)


def _races(runs: Mapping[str, tuple[str, int, int, int, Any, float, int]]) -> Found:
    """Train with each backward and in PyTorch, from the same weights on the same batches."""
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
                judged(f"{what}: largest difference of the first losses", "on each other", f"{apart:.1g}", apart < 1e-3,
                       "Rounding grows with the steps", _NAMES[ran]),
            ]  # fmt: skip
            curves.setdefault(what, {"torch.nn": theirs})[f"sparsebp, {ran}"] = ours
    return Found(tuple(claims), curves)


def draw_races(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, len(data), width=10.5, height=4.2)
    for ax, (what, sides) in zip(axes[0], data.items(), strict=True):
        for (name, side), colour in zip(sides.items(), (harness.TORCH, *harness.BLUES), strict=False):
            ax.plot(side["seconds"], side["loss"], color=colour, linewidth=1.2, marker=".", markersize=3,
                    label=name)  # fmt: skip
        ax.set(xlabel="wall-clock time, s", ylabel="training loss, nats")
        ax.set_title(what, fontsize=9)
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
    """Fig. 9 and Table 6: GRU on the features S, M and L with B of 16, 32 and 64; and the cost of the Jacobians."""
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
            shares.append(judged(f"{_named(row)}: the Jacobians' share of torch.nn's step (FO)", f"{wanted:.0%}",
                                 f"{ours:.0%}", ours <= wanted, _WORK, _NAMES["blelloch"]))  # fmt: skip
    return Found((*_largest("GRU", 2.36, 13.4, rows), *_table(rows, paper), *shares), {"rows": rows})


def _measured(context: Context, cell: str, points: Sequence[tuple[int, int, int | None]]) -> list[dict[str, Any]]:
    """Return a row for every backward at every point (T, B, features), each in turn with PyTorch."""
    few: dict[str, Any] = {"rounds": 2, "least_rounds": 2, "warmup": 1}
    rounds = few if context.quick else {"rounds": 7, "least_rounds": 3, "budget": 1.0}
    rows, count = [], threads.most_threads()
    jax = not context.quick and importlib.util.find_spec("jax") is not None
    with harness.using_threads(count), Apart(count) if jax else nullcontext(None) as apart:
        for length, batch, features in points:
            for way in WAYS:
                workload = SequenceWorkload(cell, length, batch, input_size=features, backward=way)
                beside = apart if way == "auto" and (length, batch) in _BESIDE_JAX else None
                found = measure_recurrent_row(workload, rounds if way == "auto" else {**few, "rounds": 3}, apart=beside)
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
    layer, (run,) = workload.model.rnn, saved.rnn.runs
    weight, k = layer.params["weight_hh_l0"], kernels.get(np).unchecked
    prepare = {"prepare": lambda: jacobians(k, layer.cell, run, weight, reverse=True)}
    found = timing.measure(prepare, rounds=5, budget=0.5)
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
    rows = data["rows"]
    key = "length" if len({row["length"] for row in rows}) > 1 else "batch"
    drawing, axes = harness.figure(1, 3, width=11.0, height=5.2)
    latency, faster, parts = axes[0]
    named = "sequence length T, steps (B = 16)" if key == "length" else f"batch B, samples (T = {rows[0]['length']})"
    for way, (colour, style) in _STYLES.items():
        of_way = sorted((row for row in rows if row["way"] == way), key=lambda row: row[key])
        at, label = [row[key] for row in of_way], f"sparsebp, {way} ({', '.join({row['ran']: 0 for row in of_way})})"
        if way == "auto":
            latency.loglog(at, [1e3 * row["torch"]["backward"] for row in of_way], "x-", color=harness.TORCH,
                           label="torch.nn")  # fmt: skip
        latency.loglog(at, [1e3 * row["ours"]["backward"] for row in of_way], style, color=colour, label=label)
        faster.loglog(at, [row["backward"] for row in of_way], style, color=colour, label=label)
    faster.axhline(1, color=harness.TORCH, linewidth=0.8)
    latency.set(xlabel=named, ylabel="backward, ms per iteration")
    faster.set(xlabel=named, ylabel="backward: speed-up over torch.nn")
    every = sorted({row[key] for row in rows})
    _draw_parts(parts, sorted((row for row in rows if row[key] in (every[::2] if len(every) > 4 else every)),
                              key=lambda row: (row[key], WAYS.index(row["way"]))))  # fmt: skip
    return drawing


def draw_gru(data: Mapping[str, Any]) -> Any:
    """Draw the parts of a step, a panel for each batch size."""
    sizes = sorted({row["batch"] for row in data["rows"]})
    drawing, axes = harness.figure(1, len(sizes), width=11.0, height=4.2)
    for ax, batch in zip(axes[0], sizes, strict=True):
        _draw_parts(ax, [row for row in data["rows"] if row["batch"] == batch])
    return drawing


def _draw_parts(ax: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw forward, preparation of the Jacobians and backward as shares of torch.nn's step; the sums are written."""
    names: list[str] = []
    for row in rows:
        if row["way"] == "chunked":  # makes no Jacobians
            continue
        sides = [("torch.nn", row["torch"], 0.0)] if row["way"] == "auto" else []
        for side, seconds, prepare in (*sides, (f"sparsebp, {row['ran']}", row["ours"], row["prepare"])):
            parts = (seconds["step"] - seconds["backward"], prepare, seconds["backward"] - prepare)
            begin, library = 0.0, side.split(",")[0]
            for part, colour, name in zip(parts, _PARTS[library], ("forward", "Jacobians", "backward"), strict=False):
                width = max(part, 0.0) / row["torch"]["step"]
                label = f"{library}: {name}" if width else None
                ax.barh(len(names), width, 0.8, left=begin, color=colour, label=label)
                begin += width
            ax.text(begin, len(names), f" {begin:.2g}", va="center", fontsize=7)
            names.append(f"{_named(row)}\n{side}")
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel="time of a step, in steps of torch.nn")


# ---- what became of the idea: Fig. 8 and 9 again with diagonal Jacobians ---------------------------------------------

_ONE_PASS = "The recurrence goes over the arrays once, as fast as memory allows; a scan goes over them at least twice"
_STEPS_OF = {"GRU": ("GRU", "bp"), "MinGRU": ("MinGRU", "bp"), "scan": ("MinGRU", "blelloch")}
_SIDES_OF = {
    "GRU": "GRU, plain back-propagation", "MinGRU": "MinGRU, one recurrence", "scan": "MinGRU, Blelloch's scan",
}  # fmt: skip


def diagonal(context: Context) -> Found:
    """Training steps of GRU and MinGRU over the points of Fig. 8 and 9, B = 16, and of a minGRU on two ranks."""
    points = [(30, 1)] if context.quick else [(length, 1) for length in (100, 1000, 10_000, 30_000)]
    points += [] if context.quick else [(259, 38), (517, 24), (1034, 12)]
    count, length = threads.most_threads(), 301 if context.quick else 1_000_000
    few: dict[str, Any] = {"rounds": 2, "least_rounds": 2, "warmup": 1}
    rounds = few if context.quick else {"rounds": 7, "least_rounds": 3, "budget": 2.0}
    claims, rows = [], []
    with harness.using_threads(count):
        for steps, features in points:
            calls = {name: _training(cell, way, steps, features) for name, (cell, way) in _STEPS_OF.items()}
            found = timing.measure(calls, **rounds)
            rows.append({"length": steps, "features": features} | {name: found[name].median for name in found})
            what = f"({features}, 20), T = {steps}, B = 16"
            claims += [
                at_least(f"MinGRU{what}: a training step over GRU's", 1, found["GRU"].median / found["MinGRU"].median,
                         why="Its products with weights take the time", ran="one recurrence"),
                at_least(f"MinGRU{what}: a scan over the Jacobians' diagonals, one recurrence over it", 1,
                         found["MinGRU"].median / found["scan"].median, why=_ONE_PASS, ran=_NAMES["blelloch"]),
            ]  # fmt: skip
    parallel = on_ranks(2, time_parallel_on_ranks, threads=2, cell="MinGRU", length=length, batch=1,
                        rounds=2 if context.quick else 5)["seconds"]  # fmt: skip
    took = {side: float(np.median(parallel[side]["step"])) for side in ("vectors", "one", "same")}
    what = f"MinGRU(38, 20), T = {length:,}, B = 1: a step of two ranks that each have half of the time, over"
    for side, least, name in (("one", STEP_TARGET, "one worker"), ("same", 1, "one worker with two threads")):
        claims.append(at_least(
            f"{what} {name}", least, took[side] / took["vectors"], why="The two ranks share the memory's bandwidth",
            ran="ranks start from zero and repeat what the arriving state changes",
        ))  # fmt: skip
    return Found(tuple(claims), {"rows": rows, "ranks": took})


def _training(cell: str, way: str, steps: int, features: int) -> Callable[[], object]:
    """Return a training step of a classifier: forward, cross-entropy, backward and Adam."""
    rng = np.random.default_rng(0)
    model = nn.SequenceClassifier(
        getattr(nn, cell)(features, 20, backward=way, rng=0), nn.Linear(20, workloads.CLASSES, rng=0)
    )
    x, target = rng.standard_normal((steps, 16, features), np.float32), rng.integers(0, workloads.CLASSES, 16)
    value_and_grad = nn.value_and_grad(model, nn.CrossEntropyLoss())
    adam = optim.Adam(model.parameters(), lr=workloads.LEARNING_RATE)
    return lambda: adam.step(value_and_grad(x, target)[1])


def draw_diagonal(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 1, width=8.0, height=4.2)
    rows = sorted((row for row in data["rows"] if row["features"] == 1), key=lambda row: row["length"])
    for name, colour in zip(_STEPS_OF, ("#111827", *harness.BLUES), strict=False):
        axes[0, 0].loglog([row["length"] for row in rows], [1e3 * row[name] for row in rows], "o-", color=colour,
                          label=_SIDES_OF[name])  # fmt: skip
    axes[0, 0].set(xlabel="sequence length T, steps (B = 16)", ylabel="training step, ms")
    return drawing


# Two trainings from the same weights on the same batches: their losses over wall-clock time.

_EVERY = 10
"""Steps between two losses, which are means over their batches."""


def race(workload: SequenceWorkload, data: Dataset, steps: int) -> dict[str, Any]:
    """Return seconds and losses of both sides; steps are taken in turn, and each side's clock runs in its own alone.

    Losses are taken before the step and not timed. The first step, which
    compiles, is on no clock.
    """
    torch = import_torch()
    twin = TorchTwin(workload)
    sides: dict[str, Any] = {"sparsebp": workload, "torch.nn": twin}
    clocks = dict.fromkeys(sides, 0.0)
    losses: dict[str, list[float]] = {name: [] for name in sides}
    found: dict[str, Any] = {name: {"seconds": [], "loss": []} for name in sides}
    order = np.concatenate(
        [epoch_order(len(data), seed=0, epoch=e) for e in range(1 + steps * workload.batch // len(data))]
    )
    for step in range(steps):
        x, target, *_ = data.batch(order[step * workload.batch : (step + 1) * workload.batch])
        workload.x, workload.target = x, target
        twin.x, twin.target = torch.from_numpy(x), torch.from_numpy(target)
        losses["sparsebp"].append(float(workload.loss.forward(workload.model.forward(x)[0], target)[0]))
        losses["torch.nn"].append(float(twin.forward().detach()))
        for name, side in sides.items():
            begin = time.perf_counter()
            side.step()
            clocks[name] += time.perf_counter() - begin if step else 0.0
            if step % _EVERY == _EVERY - 1 or step == steps - 1:
                found[name]["seconds"].append(clocks[name])
                found[name]["loss"].append(float(np.mean(losses[name])))
                losses[name].clear()
    return found
