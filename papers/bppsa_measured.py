"""BPPSA: figures that are trained or timed. The baseline is PyTorch's back-propagation; the scan is Blelloch's."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import harness, jacobians, schedules, training
from benchmarks.harness import Result, import_torch
from benchmarks.workloads import NETWORKS, SequenceWorkload, TorchTwin
from papers import preprint
from papers.claims import Context, Found, Ours, Run, by_round, of_runs, ratio
from papers.dualpipe import course
from papers.table import TABLE_4, TABLE_5, TABLE_6
from sparsebp import kernels, nn, optim
from sparsebp.core import threads, timing
from sparsebp.data import BitstreamDataset, Dataset, epoch_order, load_mnist_images, synthetic_instruments
from sparsebp.models import vgg11
from sparsebp.nn.recurrent.runs import jacobians as step_jacobians

# ---- App. C: PipeDream's stale weights with Adam, and plain training with Adam ---------------------------------------

_RATE, _BATCH, _TOPS = 1e-3, 32, (1, 5)
_SIDES = {"in turn": schedules.SIDES["synchronous"], "PipeDream": schedules.SIDES["stashing"]}


def accuracies(context: Context) -> dict[str, Any]:
    """Train VGG-11 on digits with Adam, in turn and by PipeDream; return top-1 and top-5 accuracies."""
    network = NETWORKS["VGG-11"]
    data = network.data(20 if context.quick else 1000)
    sizes, seeds = (network.quick, (0, 1)) if context.quick else (network.sizes, (0, 1, 2))
    parts, steps = (2, 4) if context.quick else (4, 250)

    def run(side: str, seed: int) -> list[list[float]]:
        found = course(_SIDES[side], lambda: network.build(np.random.default_rng(seed), **sizes),
                       lambda params: optim.Adam(params, lr=_RATE), data, _BATCH, parts, steps, seed,
                           _tops)  # fmt: skip
        return [part[1:] for part in found]

    return {"steps": [steps * (k + 1) for k in range(parts)],
            "accuracies": {side: [run(side, seed) for seed in seeds] for side in _SIDES}}  # fmt: skip


def _tops(logits: np.ndarray, target: np.ndarray) -> list[float]:
    order = np.argsort(-logits, axis=1)
    return [float((order[:, :k] == target[:, None]).any(axis=1).mean()) for k in _TOPS]


def lost_accuracy(data: Mapping[str, Any]) -> Found:
    top = {side: 100 * np.array(runs)[:, -1] for side, runs in data["accuracies"].items()}  # (seeds, tops)
    means = {side: found.mean(axis=0) for side, found in top.items()}
    return Found({
        f"top-{k}": of_runs(
            *schedules.interval(top["in turn"][:, number] - top["PipeDream"][:, number]), " points",
            other=f"in turn {means['in turn'][number]:.1f} %, PipeDream {means['PipeDream'][number]:.1f} %")
        for number, k in enumerate(_TOPS)
    })  # fmt: skip


# ---- §3.5 and §2.2: losses by scan and by BP; §4.3: a pruned VGG-11 --------------------------------------------------

_SGD = "SGD, lr 1e-3, momentum 0.9"


def convergence(context: Context) -> dict[str, Any]:
    """Fig. 6: train LeNet-5 on digits by the paper's optimizer, batch 256, by the scan and by BP."""
    steps = 4 if context.quick else 800
    data = load_mnist_images(test=training.TEST)
    runs = {way: training.train(_SGD, "float32", data, 32 if context.quick else 256, steps, way)
            for way in ("bp", "blelloch")}  # fmt: skip
    return {"rows": [{
        "optimizer": _SGD, "dtype": "float32", "iterations": steps, "losses_bp": runs["bp"]["loss"],
            "losses_scan": runs["blelloch"]["loss"],
        "test_bp": runs["bp"]["test"], "test_scan": runs["blelloch"]["test"],
        "losses_torch": training.train_torch(_SGD, "float32", data, 32 if context.quick else 256, steps),
    }]}  # fmt: skip


def overlap(data: Mapping[str, Any]) -> Found:
    (row,) = data["rows"]
    floor = training.largest_difference(row["losses_torch"], row["losses_bp"])
    pairs = {"training": ("losses_scan", "losses_bp"), "test": ("test_scan", "test_bp")}
    apart = {key: training.largest_difference(row[scan], row[bp]) for key, (scan, bp) in pairs.items()}
    steps = len(row["losses_bp"])
    return Found({
        key: Ours(apart[key], other=f"by BP the loss falls from {row[bp][0]:.3f} to {row[bp][-1]:.3f} in {steps} steps",
                  noise=f"PyTorch's BP and ours differ by {floor:.1g}" if 1e-4 < apart[key] <= 2 * floor else "")
        for key, (_, bp) in pairs.items()
    })  # fmt: skip


def agnostic(result: Result) -> Found:
    """§2.2: the same with Adam, in float64 and float32."""
    rows = {row["dtype"]: row for row in result["rows"] if row["optimizer"].startswith("Adam")}
    torch = f"PyTorch and our BP differ by {rows['float32']['torch_difference']:.1g} in float32"
    return Found({dtype: Ours(max(row["difference"], row["test_difference"]), other=torch if dtype == "float32" else "")
                  for dtype, row in rows.items()})  # fmt: skip


def _pruned(quick: bool, width: float, steps: int) -> tuple[nn.Sequential, Any, dict[str, float]]:
    """Train VGG-11 on digits, prune 97 % of its weights, and train it on for as many steps; return the accuracies."""
    data = load_mnist_images(size=32, channels=3, test=1000)
    model = vgg11(3, 10, width=1 / 16 if quick else width, rng=0)
    options, found = {"batch": 32, "steps": 2 if quick else steps, "lr": 5e-4}, {}
    for name in ("trained", "retrained"):
        jacobians.train(model, data[0], options, 0)
        found[name] = jacobians.accuracy(model, data[1])
        if name == "trained":
            nn.prune(model, jacobians.AMOUNT, jacobians.METHOD)
            found["pruned"] = jacobians.accuracy(model, data[1])
    return model, data[0], found | {"steps": options["steps"]}


def retraining(context: Context) -> dict[str, Any]:
    """§4.3: accuracies before and after, VGG-11 of half the width."""
    return _pruned(context.quick, 0.5, 500)[2]


def retrained(data: Mapping[str, Any]) -> Found:
    said = " %, ".join(f"{100 * data[name]:.1f}" for name in ("trained", "pruned", "retrained"))
    return Found({"lost": Ours(other=f"{data['steps']} steps before and after: trained, pruned, retrained {said} %")})


def pruned_steps(context: Context) -> dict[str, Any]:
    """Fig. 10: the FLOPs of every step of the scan with the paper's levels, and of BP's operators."""
    model, data, found = _pruned(context.quick, 1.0, 60)
    x = data.batch(np.arange(1))[0]
    chain = preprint.elements(model, x)
    scan = preprint.walk(chain, timed=False, way="hybrid", up_levels=2)
    names = ("step", "kind", "critical", "dense", "flops")
    rows = [{name: row[name] for name in names} | {"side": "scan"} for row in scan if row["kind"] in ("mm", "mv")]
    rows += [{"side": "BP", "step": row["step"], "kind": "op", "critical": False, "dense": row["dense_flops"] // 2,
              "flops": row["flops"]} for row in jacobians.pruned_operators(model, x, 1)]  # fmt: skip
    return {"rows": rows, "training": found}


def similar_steps(data: Mapping[str, Any]) -> Found:
    scan, bp = ([row for row in data["rows"] if row["side"] == side] for side in ("scan", "BP"))
    most = max(row["flops"] for row in bp)
    above = sorted((row["flops"] / most for row in scan if row["flops"] > most), reverse=True)
    total = sum(row["flops"] for row in scan) / sum(row["flops"] for row in bp)
    others = f"{len(above)} of {len(scan)} steps exceed it; all steps together {total:.3g}× the FLOPs of BP"
    return Found({"largest": Ours(max(row["flops"] for row in scan) / most, unit="×", other=others)})


# ---- Table 1 ---------------------------------------------------------------------------------------------------------

_GENERATED = {
    "Conv2d(3, 64, 3, padding=1)": "convolution",
    "ReLU, 64×32×32": "ReLU",
    "MaxPool2d(2), 64×32×32": "max-pool",
}


def generation(result: Result) -> Found:
    """Table 1: analytic generation over autograd column by column; the verdict is of all cores."""
    rows = {(row["name"], row["threads"]): row for row in result["rows"] if row["name"] in _GENERATED}
    most = max(count for _, count in rows)
    return Found({
        key: ratio(rows[name, most]["columns_ratio"], ran=f"analytic routines, {most} threads",
                   other=f"1 thread: {rows[name, 1]['columns_ratio']['median']:.3g}×")
        for name, key in _GENERATED.items()
    })  # fmt: skip


# ---- Fig. 7 to 9: time -----------------------------------------------------------------------------------------------

_SETS = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}


def _point(cell: str, length: int, batch: int, features: int | None, quick: bool) -> dict[str, Any]:
    """Time PyTorch's forward and backward and ours by every algorithm, in turn.

    `overall` is the paper's set-up: PyTorch's forward on both sides, and the scan in place of its backward.
    """
    ways = {way: SequenceWorkload(cell, length, batch, input_size=features, backward=way)
            for way in ("blelloch", "chunked", "bp")}  # fmt: skip
    twin = TorchTwin(ways["bp"])
    calls: dict[str, Any] = {"torch forward": twin.forward, "torch backward": timing.Call(twin.backward, twin.forward)}
    calls |= {way: timing.Call(one.backward, one.forward) for way, one in ways.items()}
    scan = ways["blelloch"]
    (run,) = scan.forward()[0].rnn.runs
    layer = scan.model.rnn
    weight, k = layer.params["weight_hh_l0"], kernels.get(np).unchecked
    calls |= {"forward": scan.forward, "prepare": lambda: step_jacobians(k, layer.cell, run, weight, reverse=True)}
    rounds = {"rounds": 2, "least_rounds": 2} if quick else {"rounds": 7, "least_rounds": 3, "budget": 4.0}
    t = timing.measure(calls, warmup=1, **rounds)
    forward, back, ours = t["torch forward"], t["torch backward"], t["blelloch"]
    return {
        "length": length, "batch": batch, "seconds": {name: one.median for name, one in t.items()},
        "backward": by_round(lambda b, s: b / s, back, ours),
        "without": by_round(lambda b, s, p: b / max(s - p, 1e-9), back, ours, t["prepare"]),
        "overall": by_round(lambda f, b, s: (f + b) / (f + s), forward, back, ours),
        "overhead": by_round(lambda f, b, p: p / (f + b), forward, back, t["prepare"]),
        "own": by_round(lambda f, b, s: (f + b) / (f + s), t["forward"], t["bp"], ours),
        "bp": by_round(lambda b, s: b / s, back, t["bp"]), "chunked": by_round(lambda b, s: b / s, back, t["chunked"]),
    }  # fmt: skip


def _points(cell: str, points: Sequence[tuple[int, int, int | None]], context: Context) -> dict[str, Any]:
    count, rows = threads.most_threads(), []
    with harness.using_threads(count):
        for point in points:
            rows.append(_point(cell, *point, context.quick))
            context.echo(f"{cell}, T, B = {point[:2]}: backward {rows[-1]['backward']['median']:.2f}×")
    return {"threads": count, "rows": rows}


def rnn(context: Context) -> dict[str, Any]:
    """Fig. 8 and Tables 4 and 5: RNN over the sequence length, B = 16, and over the batch, T = 1000."""
    points: list[tuple[int, int]] = [(length, 16) for length in TABLE_4] + [
        (1000, batch) for batch in TABLE_5 if batch != 16
    ]
    return _points("RNN", [(*point, None) for point in ([(10, 16), (10, 4)] if context.quick else points)], context)


def gru(context: Context) -> dict[str, Any]:
    """Fig. 9 and Table 6: GRU on the features S, M and L with B of 16, 32 and 64."""
    points = [(12, 16, 38)] if context.quick else [
        (_SETS[name][0], batch, _SETS[name][1]) for name, batch in TABLE_6]  # fmt: skip
    return _points("GRU", points, context)


def _speed(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], part: str) -> dict[str, Ours]:
    """Return the results that both figures have: of every row by its key, the largest, a step over our own BP's."""
    found = {}
    for key, row in zip(keys, rows, strict=True):
        found[f"overall {key}"] = ratio(row["overall"])
        found[f"{part} {key}"] = ratio(
            row[part], other=f"plain BP {row['bp']['median']:.3g}×, chunked scan {row['chunked']['median']:.3g}×"
        )
    most = max(row["bp"]["median"] for row in rows)
    for what, other in (("overall", ""), (part, f"; plain BP up to {most:.3g}×")):
        best = max(rows, key=lambda row: row[what]["median"])
        found[f"largest {what}"] = ratio(best[what], other=f"at T = {best['length']}, B = {best['batch']}{other}")
    best, least = (choose(rows, key=lambda row: row["own"]["median"]) for choose in (max, min))
    found["own"] = ratio(best["own"], other=(
        f"the worst of {len(rows)} points {least['own']['median']:.2g}×; above 1 at "
        f"{sum(row['own']['median'] > 1 for row in rows)} of them"))  # fmt: skip
    return found


def _grows(rows: Sequence[Mapping[str, Any]], part: str = "backward", beyond: Sequence[Mapping[str, Any]] = ()) -> Ours:
    """Return whether a speed-up grows from row to row: for certain, not at all, or within the quartiles."""

    def said(some: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{row[part]['median']:.2g}×" for row in some)

    pairs = [(a[part], b[part]) for a, b in pairwise(rows)]
    falls = any(b["high"] < a["low"] for a, b in pairs)
    unsure = not falls and any(b["low"] <= a["high"] for a, b in pairs)
    return Ours(not falls, text=said(rows), other=f"then {said(beyond)}" if beyond else "",
                noise="Quartiles of neighbours overlap" if unsure else "")  # fmt: skip


def by_size(data: Mapping[str, Any]) -> Found:
    rows = data["rows"]
    lengths = sorted((row for row in rows if row["batch"] == 16), key=lambda row: row["length"])
    batches = sorted((row for row in rows if row["length"] == 1000), key=lambda row: -row["batch"])
    keys = [f"T {row['length']}" if row["batch"] == 16 else f"B {row['batch']}" for row in rows]
    return Found(_speed(rows, keys, "backward") | {
        "scales length": _grows([row for row in lengths if row["length"] <= 3000],
                                beyond=[row for row in lengths if row["length"] > 3000]),
        "scales batch": _grows([row for row in batches if row["batch"] >= 32],
                               beyond=[row for row in batches if row["batch"] < 32]),
        "still": ratio(lengths[-1]["overall"])})  # fmt: skip


def by_set(data: Mapping[str, Any]) -> Found:
    rows = data["rows"]
    names = {length: name for name, (length, _) in _SETS.items()}
    keys = [f"{names.get(row['length'], 'S')}, {row['batch']}" for row in rows]
    found = _speed(rows, keys, "without") | {"scales": _grows([row for row in rows if row["batch"] == 16], "without")}
    for key, row in zip(keys, rows, strict=True):
        found[f"overhead {key}"] = ratio({name: 100 * value for name, value in row["overhead"].items()}, " %")
    return Found(found)


# ---- Fig. 7 and 13: losses -------------------------------------------------------------------------------------------

_EVERY = 10
"""Steps between two losses, which are means over their batches."""


def wall_clock(context: Context) -> dict[str, Any]:
    """Fig. 7: RNN(1, 20) on bitstreams, T = 1000, B = 16, Adam with the paper's rate; and the times of a step."""
    length = 40 if context.quick else 1000
    workload = SequenceWorkload("RNN", length, 16, input_size=1, classes=10, backward="blelloch")
    point = _points("RNN", [(length, 16, None)], context)
    data = BitstreamDataset(length, 320 if context.quick else 32_000)
    return point | {"curves": {
        f"RNN(1, 20), T = {length}, B = 16": race(workload, data, 10 if context.quick else 1500, 1e-5)}}  # fmt: skip


def loss_over_time(data: Mapping[str, Any]) -> Found:
    (row,), (curves,) = data["rows"], data["curves"].values()
    bp = row["bp"]["median"]
    return Found({
        "overall": ratio(row["overall"]), "backward": ratio(row["backward"], other=f"plain BP {bp:.3g}×"),
        "losses": Ours(other=_same(curves)),
    })  # fmt: skip


def _same(curves: Mapping[str, Any]) -> str:
    ours, theirs = (np.array(curves[side]["loss"]) for side in ("BPPSA", "torch.nn"))
    apart = np.abs(ours - theirs).max()
    return (f"{len(ours)} of {len(ours)} points of the first {_EVERY * len(ours)} steps within {apart:.1g} nats of "
            f"torch.nn's; the loss goes from {ours[0]:.3f} to {ours[-1]:.3f}")  # fmt: skip


def instruments(context: Context) -> dict[str, Any]:
    """Fig. 13: the same for GRU on **synthetic** instruments, the paper's rate."""
    curves = {}
    for name, steps in {"L": 10}.items() if context.quick else {"S": 400, "M": 200, "L": 100}.items():
        data, _ = synthetic_instruments(name, each=2 if context.quick else 40)  # type: ignore[arg-type]
        x = data.batch(np.arange(1))[0]
        workload = SequenceWorkload("GRU", x.shape[0], 16, input_size=x.shape[2], classes=11, backward="blelloch")
        curves[name] = race(workload, data, steps, 3e-4)
    return {"curves": curves}


def scaled_curves(data: Mapping[str, Any]) -> Found:
    return Found(
        {"shape": Ours(other="; ".join(f"{name}: {_same(curves)}" for name, curves in data["curves"].items()))}
    )


def race(workload: SequenceWorkload, data: Dataset, steps: int, rate: float) -> dict[str, Any]:
    """Return seconds and losses of both sides from the same weights on the same batches; steps are taken in turn."""
    torch = import_torch()
    twin = TorchTwin(workload)
    workload.optimizer = optim.Adam(workload.model.parameters(), lr=rate)
    adam = torch.optim.Adam(twin.model.parameters(), lr=rate)

    def ours(x: np.ndarray, target: np.ndarray) -> float:
        logits, saved = workload.model.forward(x)
        value, kept = workload.loss.forward(logits, target)
        workload.optimizer.step(workload.model.weight_grad(workload.loss.input_grad(kept), saved))
        return float(value)

    def theirs(x: np.ndarray, target: np.ndarray) -> float:
        twin.x, twin.target = torch.from_numpy(x), torch.from_numpy(target)
        loss = twin.forward()
        loss.backward()
        adam.step()
        return float(loss.detach())

    sides = {"BPPSA": ours, "torch.nn": theirs}
    clocks, losses = dict.fromkeys(sides, 0.0), {name: [] for name in sides}  # type: ignore[var-annotated]
    found: dict[str, Any] = {name: {"seconds": [], "loss": []} for name in sides}
    epochs = 1 + steps * workload.batch // len(data)
    order = np.concatenate([epoch_order(len(data), seed=0, epoch=epoch) for epoch in range(epochs)])
    for step in range(steps):
        x, target, *_ = data.batch(order[step * workload.batch : (step + 1) * workload.batch])
        for name, side in sides.items():
            begin = time.perf_counter()
            losses[name].append(side(x, target))
            clocks[name] += time.perf_counter() - begin if step else 0.0  # the first step compiles
            if step % _EVERY == _EVERY - 1:
                found[name]["seconds"].append(clocks[name])
                found[name]["loss"].append(float(np.mean(losses[name])))
                losses[name].clear()
    return found


# ---- pictures --------------------------------------------------------------------------------------------------------


def draw_races(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, len(data["curves"]), width=10.5, height=4.2)
    for ax, (what, sides) in zip(axes[0], data["curves"].items(), strict=True):
        for (name, side), colour in zip(sides.items(), (harness.OURS, harness.TORCH), strict=True):
            ax.plot(side["seconds"], side["loss"], color=colour, linewidth=1.2, label=name)
        ax.set(xlabel="wall-clock time, s", ylabel="training loss, nats")
        ax.set_title(what, fontsize=9)
    return drawing


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


_WAYS = {"blelloch": "Blelloch's scan", "chunked": "chunked scan", "bp": "plain back-propagation"}


def draw_times(data: Mapping[str, Any]) -> Any:
    """Draw the speed-up of the backward over torch.nn's: over T at B = 16, and over B at the T that has several."""
    rows = data["rows"]
    at = {
        "length": [row for row in rows if row["batch"] == 16],
        "batch": [row for row in rows if row["length"] == max(rows, key=lambda row: row["batch"])["length"]],
    }
    drawing, axes = harness.figure(1, 2, width=10.5, height=4.4)
    for ax, (key, some) in zip(axes[0], at.items(), strict=True):
        some.sort(key=lambda row: row[key])
        for (way, name), colour in zip(_WAYS.items(), harness.BLUES, strict=False):
            speed = [row["seconds"]["torch backward"] / row["seconds"][way] for row in some]
            ax.loglog([row[key] for row in some], speed, "o-", color=colour, label=name)
        ax.axhline(1, color=harness.TORCH, linewidth=0.8)
        ax.set(xlabel="sequence length T, steps (B = 16)" if key == "length" else f"batch B (T = {some[0]['length']})",
               ylabel="backward: speed-up over torch.nn")  # fmt: skip
    return drawing


def draw_flops(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(width=10.5, height=4.6)
    kinds = {"mm": ("matrix–matrix", harness.OURS), "mv": ("matrix–vector", harness.BLUES[2]),
             "op": ("operator of BP", harness.KINDS[2])}  # fmt: skip
    for kind, (name, colour) in kinds.items():
        rows = [row for row in data["rows"] if row["kind"] == kind]
        axes[0, 0].loglog([row["dense"] for row in rows], [row["flops"] for row in rows], "o", color=colour, label=name)
    axes[0, 0].set(xlabel="multiplications if the Jacobians were full", ylabel="FLOP")
    return drawing


RUNS = {
    "bppsa-table1-time": Run(generation, rests_on="jacobian", seconds=180, needs=("torch",)),
    "bppsa-fig6": Run(overlap, convergence, draw=training.draw_convergence, seconds=300, needs=("data",)),
    "bppsa-s22": Run(agnostic, rests_on="convergence", seconds=160, needs=("torch", "data")),
    "bppsa-fig7": Run(loss_over_time, wall_clock, draw=draw_races, seconds=240, needs=("torch",)),
    "bppsa-fig8": Run(by_size, rnn, draw=draw_times, seconds=160, needs=("torch",)),
    "bppsa-fig9": Run(by_set, gru, draw=draw_times, seconds=70, needs=("torch",)),
    "bppsa-fig10": Run(similar_steps, pruned_steps, draw=draw_flops, seconds=240, needs=("torch", "data")),
    "bppsa-s43": Run(retrained, retraining, seconds=100, needs=("data",)),
    "bppsa-fig13": Run(scaled_curves, instruments, draw=draw_races, seconds=240, needs=("torch", "audio")),
    "bppsa-fig12": Run(lost_accuracy, accuracies, draw=draw_accuracies, seconds=240, needs=("data",)),
}
"""By the figure's name."""
