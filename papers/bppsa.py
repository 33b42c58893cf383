"""BPPSA: Scaling Back-propagation by Parallel Scan Algorithm (Wang, Bai and Pekhimenko, MLSys 2020).

Figures that are counted, computed or run without timing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.harness import Result
from papers.claims import Context, Found, Ours, Run, ratio
from sparsebp import hidden_jacobians, nn, plan_scan
from sparsebp.data import BitstreamDataset, synthetic_instruments
from sparsebp.data.instruments import mfcc, synthesise
from sparsebp.patterns import SparsityPattern, conv_pattern, pool_pattern
from sparsebp.scan.algorithms import Span, level_counts, recipe
from sparsebp.schedule import Action, Costs, Schedule, simulate
from sparsebp.schedule.builders import gpipe
from sparsebp.schedule.costs import StageBytes
from sparsebp.train.config import build, config_for

_LENGTHS = (1, 7, 21, 999, 12_345)


def levels(data: Any) -> Found:
    """Algorithm 1: its levels, where matrices are multiplied, and its results."""
    wanted, found, phases = [], [], set()
    for n in _LENGTHS:
        depth, one = math.ceil(math.log2(n + 1)), recipe("blelloch", n)
        wanted.append((depth - 1, depth))
        found.append((one.levels["up-sweep"], one.levels["down-sweep"]))
        phases |= {step.phase for step in one.steps if step.kind == "mm"}
    rng, apart = np.random.default_rng(0), 0.0
    for n in range(1, 33):
        jacobians, g = [rng.standard_normal((3, 3)) / 2 for _ in range(n)], rng.standard_normal(3)
        plan = plan_scan([SparsityPattern.dense(3, 3)] * n, "blelloch", dtype=np.float64, shared=[True] * n)
        y = np.asarray(plan(g, np.array(jacobians).reshape(n, -1)))
        for i, jacobian in enumerate(jacobians):
            g = jacobian @ g
            apart = max(apart, float(np.abs(y[i] - g).max()))
    return Found({
        "levels": Ours(found == wanted, text="; ".join(f"n = {n}: {up} and {down}"
                                                       for n, (up, down) in zip(_LENGTHS, found, strict=True))),
        "phases": Ours(phases == {"up-sweep"}, text=", ".join(sorted(phases))),
        "outputs": Ours(apart, text=f"{apart:.1g}"),
    })  # fmt: skip


def draw_tree(data: Mapping[str, Any]) -> Any:
    plan = plan_scan([SparsityPattern.dense(2, 2)] * 8, "blelloch")
    drawing, axes = harness.figure(height=5)
    plan.plot(ax=axes[0, 0])
    return drawing


def hybrid(data: Any) -> Found:
    """Fig. 3 and §5.3: the rows of VGG-11's scan."""
    whole, found = recipe("blelloch", 21), recipe("hybrid", 21, up_levels=2)
    rows = {phase: sorted({s.level for s in found.steps if s.phase == phase}) for phase in ("up-sweep", "down-sweep")}
    return Found({
        "whole": Ours((whole.levels["up-sweep"], whole.levels["down-sweep"])),
        "up": Ours(rows["up-sweep"]), "down": Ours(rows["down-sweep"]),
        "last": Ours(max(step.level for step in found.steps)),
    })  # fmt: skip


def sparsity(data: Any) -> Found:
    """Table 1 and §3.3: guaranteed zeros of VGG-11's first operators on 32×32."""
    conv = conv_pattern(3, 64, input_size=(32, 32), kernel_size=3, padding=1).pattern
    relu, pool = SparsityPattern.diagonal(64 * 32 * 32), pool_pattern(64, (32, 32), 2).pattern
    said = {"convolution": 1 - 9 / (32 * 32), "ReLU": 1 - 1 / relu.shape[0], "max-pool": 1 - 4 / (64 * 32 * 32)}
    found = {"convolution": conv.sparsity, "ReLU": relu.sparsity, "max-pool": pool.sparsity}
    same = abs(found["convolution"] / said["convolution"] - 1) < 1e-3 and all(
        math.isclose(found[name], said[name], rel_tol=1e-12) for name in ("ReLU", "max-pool"))  # fmt: skip
    return Found({name: Ours(round(value, 5), text=f"{value:.5f}") for name, value in found.items()} | {
        "expressions": Ours(same, text=f"convolution {said['convolution']:.5f} for {conv.sparsity:.5f}"),
        "dense": Ours(round(math.prod(conv.shape) * 4 / 2**20)), "CSR": Ours(round(conv.nnz * 4 / 2**20, 1)),
    })  # fmt: skip


def planned(result: Result) -> Found:
    """§3.3: products on a planned pattern over generic ones, of the Jacobians of a convolution; all cores."""
    most = max(row["threads"] for row in result["rows"])
    found = {}
    for key, name in (
        ("ReLU", "conv · ReLU"),
        ("max-pool", "conv · max-pool"),
        ("pruned", "pruned conv · pruned conv"),
    ):
        (row, *_) = [row for row in result["rows"] if row["name"] == name and row["threads"] == most]
        peers = {peer: row[f"{peer}_ratio"] for peer in ("scipy", "mkl", "graphblas") if f"{peer}_ratio" in row}
        best = min(peers, key=lambda peer: peers[peer]["median"])
        found[key] = ratio(peers.pop(best), ran=f"planned product; {best}", other=", ".join(
            f"over {peer} {value['median']:.3g}×" for peer, value in peers.items()))  # fmt: skip
    return Found(found)


def jacobians(data: Any) -> Found:
    """Fig. 5: the patterns hold every derivative that is not zero, found by differences."""
    worst, places = 0.0, {}
    for name, layer, shape in _OPERATORS:
        module = getattr(nn, layer[0])(*layer[1:], **({"dtype": "float64", "rng": 0} if layer[0] == "Conv2d" else {}))
        x = np.random.default_rng(0).permuted(np.arange(math.prod(shape), dtype=float) - 7.3).reshape(1, *shape)
        y, saved = module.forward(x)
        found = module.jacobian_t(saved)
        exact = np.zeros((x.size, y.size))
        for i in range(x.size):
            moved = x.copy()
            moved.reshape(-1)[i] += 1e-3
            exact[i] = ((module.forward(moved)[0] - y) / 1e-3).reshape(-1)
        worst = max(worst, float(np.abs(_dense(found) - exact).max()))
        places[name] = np.argwhere(found.pattern.to_scipy().toarray()).tolist(), list(found.shape)
    return Found({"differences": Ours(worst, text=f"{worst:.1g}")}, places)


_OPERATORS = (
    ("convolution 3×3", ("Conv2d", 1, 2, 3, 1, 1), (1, 6, 6)), ("ReLU", ("ReLU",), (1, 6, 6)),
    ("max-pool 2×2", ("MaxPool2d", 2), (1, 6, 6)),
)  # fmt: skip


def _dense(found: Any) -> np.ndarray:
    data = found.data[:, 0] if found.data.ndim == 2 else found.data
    matrix = found.pattern.to_scipy().astype(float)
    matrix.data[:] = data
    return np.asarray(matrix.toarray())


def draw_jacobians(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, len(data), height=3)
    for ax, (name, (entries, shape)) in zip(axes[0], data.items(), strict=True):
        places = np.array(entries)
        ax.scatter(places[:, 1], places[:, 0], s=4, color=harness.OURS)
        ax.set(title=name, xlim=(-1, shape[1]), ylim=(shape[0], -1), xlabel="output, element", ylabel="input, element")
        ax.set_aspect("equal")
    return drawing


_SIZES, _WORKERS_OF = (2, 10, 100, 1000, 10_000, 100_000, 1_000_000), (1, 16, 1024, 65_536)


def _steps(name: Any, n: int, workers: int) -> int:
    """Return the steps of an algorithm: a level's products go over the workers in rounds."""
    return sum(max(level.rounds, -(-(level.mm + level.mv) // workers)) for level in level_counts(name, n))


def _work(name: Any, n: int) -> int:
    return sum(level.mm + level.mv for level in level_counts(name, n))


def _constant(ratios: list[float], ran: str = "") -> Ours:
    """Return the result of a Θ: how far the ratios to its expression are apart."""
    return Ours(max(ratios) / min(ratios), text=f"{min(ratios):.2g} to {max(ratios):.2g} times the expression", ran=ran)


def complexity(data: Any) -> Found:
    """Eq. 6 and 7: the constants of Θ, that is steps and work over the expressions, for n operators on p workers."""
    rows: list[dict[str, Any]] = [
        {"algorithm": name, "n": n, "workers": p, "steps": _steps(name, n, p or n + 1), "work": _work(name, n)}
        for n in _SIZES for name in ("linear", "blelloch") for p in (*_WORKERS_OF, 0)
    ]  # fmt: skip
    of = {(row["algorithm"], row["n"], row["workers"]): row for row in rows}
    many = [of["blelloch", n, 0]["steps"] / math.log2(n) for n in _SIZES]
    few = [of["blelloch", n, p]["steps"] / (n / p + math.log2(p)) for n in _SIZES for p in _WORKERS_OF if p <= n]
    work = [of["blelloch", n, 0]["work"] / n for n in _SIZES]
    linear = [row["steps"] / row["n"] for row in rows if row["algorithm"] == "linear"]

    return Found({"p > n": _constant(many), "p <= n": _constant(few), "work": _constant(work),
                  "linear": _constant(linear, "linear scan, counted")},
                 {"rows": rows})  # fmt: skip


def draw_complexity(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure()
    for name, p, style in (("linear", 1, "o--"), *(("blelloch", p, "o-") for p in (*_WORKERS_OF, 0))):
        rows = [row for row in data["rows"] if (row["algorithm"], row["workers"]) == (name, p)]
        label = name if name == "linear" else f"{name}, p = {p}" if p else f"{name}, p > n"
        axes[0, 0].loglog([r["n"] for r in rows], [r["steps"] for r in rows], style, markersize=3, label=label)
    axes[0, 0].set(xlabel="number of operators n", ylabel="steps, products one after another")
    return drawing


_TREND_SIZES, _TREND_BATCHES, _SMS = [2**k for k in range(3, 21)], [2**k for k in range(1, 9)], (36, 68)
_BLOCKS = 16
"""Thread blocks that an SM runs at the same time: a block is a worker (§4.1)."""


def workers(data: Any) -> Found:
    """§5.1: how the counted speed-up n / steps moves with the workers of a sample: SMs · 16 / B, on 36 and 68 SMs."""
    speed = {sms: [n / _steps("blelloch", n, sms * _BLOCKS // 16) for n in _TREND_SIZES] for sms in _SMS}
    reach = {sms: next(n for n, s in zip(_TREND_SIZES, found, strict=True) if s >= 0.9 * found[-1])
             for sms, found in speed.items()}  # fmt: skip
    drop = {sms: [1000 / _steps("blelloch", 1000, max(sms * _BLOCKS // b, 1)) for b in _TREND_BATCHES] for sms in _SMS}
    kept = {sms: found[-1] / found[0] for sms, found in drop.items()}
    bound = speed[36][-1] / speed[36][-4]
    return Found({
        "length": Ours(reach[68] > reach[36], text=f"nine tenths of the most from n = {reach[36]} and {reach[68]} on"),
        "batch": Ours(kept[68] > kept[36], text=f"left at B = 256 of B = 2: {kept[36]:.0%} and {kept[68]:.0%}"),
        "grows": Ours(all(a <= b for found in speed.values() for a, b in pairwise(found)),
                      text=f"{speed[36][0]:.2g}× at n = 8 to {speed[36][-1]:.3g}× at n = 2²⁰, 36 SMs"),
        "bounded": Ours(bound, unit="×", text=f"eight times as many steps change it by {bound:.3f}×"),
    })  # fmt: skip


def features(data: Any) -> Found:
    """Table 3: the features of 3 s of audio."""
    clip = synthesise("cel")
    return Found({"shapes": Ours([mfcc(clip, name).shape for name in ("S", "M", "L")])})


def told_apart(context: Context) -> dict[str, Any]:
    """§5.2: GRU(20) on **synthetic** instruments, and a linear model on all features; L in a quick run, else S."""
    features, each = ("L", 2) if context.quick else ("S", 120)
    sets = synthetic_instruments(features, each=each)  # type: ignore[arg-type]
    run = build(config_for("instruments", features=features, epochs=1 if context.quick else None), data=sets)
    last = run.fit().epochs[-1]
    return {"linear": _least_squares(*sets), "GRU": float(last.validation_accuracy), "epochs": run.epochs,
            "clips": [len(one) for one in sets]}  # fmt: skip


def accuracies(data: Mapping[str, Any]) -> Found:
    held, every = data["clips"][1], sum(data["clips"])
    return Found({"accuracy": Ours(other=(
        f"synthetic clips, {held} held out of {every}: GRU(20) after {data['epochs']} epochs {data['GRU']:.1%}, a "
        f"linear model on all features {data['linear']:.1%}"))})  # fmt: skip


def _least_squares(train: Any, test: Any) -> float:
    """Return the accuracy of a linear model on the flattened features: ridge, the best of its penalties on `test`."""
    (x, labels), (y, wanted) = ((d.inputs.reshape(len(d), -1).astype(float), d.targets) for d in (train, test))
    x, y = x - x.mean(0), y - x.mean(0)
    gram, onto = x @ x.T, y @ x.T
    one_hot = np.eye(labels.max() + 1)[labels]
    guesses = (onto @ np.linalg.solve(gram + penalty * np.eye(len(x)), one_hot) for penalty in 10.0 ** np.arange(1, 7))
    return max(float(np.mean(guess.argmax(1) == wanted)) for guess in guesses)


def bitstream(data: Any) -> Found:
    """Eq. 8: how often a bit is set, by class."""
    given = BitstreamDataset(1000, 32_000)
    bits = given.bits()
    worst = max(abs(float(bits[given.targets == c].mean()) - 0.05 - 0.1 * c) for c in range(10))
    return Found({"shares": Ours(worst, text=f"{worst:.1g}")})


def rnn_step(data: Any) -> Found:
    """Eq. 9: a step of the RNN."""
    rng = np.random.default_rng(0)
    layer = nn.RNN(1, 20, dtype="float64", rng=rng)
    x = rng.normal(size=(6, 2, 1))
    w, h = {name: np.asarray(value) for name, value in layer.state_dict().items()}, np.zeros((2, 20))
    for t in range(len(x)):
        h = np.tanh(x[t] @ w["weight_ih_l0"].T + w["bias_ih_l0"] + h @ w["weight_hh_l0"].T + w["bias_hh_l0"])
    error = float(np.abs(np.asarray(layer.forward(x)[0])[-1] - h).max())
    return Found({"states": Ours(error, text=f"{error:.1g}")})


def gru_jacobian(data: Any) -> Found:
    """Eq. 11: the transposed Jacobian of a GRU's step."""
    rng = np.random.default_rng(0)
    layer = nn.GRU(3, 5, dtype="float64", rng=rng)
    x = rng.normal(size=(1, 1, 3))
    found = np.asarray(hidden_jacobians(layer, x)).reshape(5, 5)
    w = {name: np.asarray(value) for name, value in layer.state_dict().items()}
    a = x[0, 0] @ w["weight_ih_l0"].T + w["bias_ih_l0"]
    b = w["bias_hh_l0"]
    r, z = (1 / (1 + np.exp(-(a[k : k + 5] + b[k : k + 5]))) for k in (0, 5))
    m = b[10:]
    n = np.tanh(a[10:] + r * m)
    hr, hz, hn = np.split(w["weight_hh_l0"], 3)
    exact = (hn.T * (r * (1 - n**2) * (1 - z)) + hr.T * (r * (1 - r) * m * (1 - n**2) * (1 - z))
             + hz.T * (z * (1 - z) * (0 - n)) + np.diag(z))  # fmt: skip
    error = float(np.abs(found.T - exact).max())
    return Found({"Jacobian": Ours(error, text=f"{error:.1g}")})


# ---- §3.6 and App. B: the memory of a worker; the length from which a scan is shorter --------------------------------

_LAYERS = 64
_WORKERS = (1, 2, 4, 8, 16, 32, 64)


def jacobians_stored(n: int, workers: int) -> int:
    """Return the most matrices that one of the workers has at a time: its own, and one that it is sent.

    Worker w has the same number of neighbouring elements as the others. A product stays where its right operand was,
    and the left one is sent there if it is another worker's.
    """
    steps = recipe("blelloch", n).steps
    last = {span: number for number, step in enumerate(steps) for span in (step.left, step.right)}
    held: list[set[Span]] = [set() for _ in range(workers)]

    def home(span: Span) -> int:
        return (span.stop - 2) * workers // n

    for i in range(1, n + 1):
        held[home(Span(i, i + 1))].add(Span(i, i + 1))
    most = max(map(len, held))
    for number, step in enumerate(steps):
        here = home(step.right)
        sent = not step.left.is_vector and home(step.left) != here
        for span in (step.left, step.right):
            if not span.is_vector and last[span] == number:
                held[home(span)].discard(span)
        if step.kind == "mm":
            held[here].add(step.target)
        most = max(most, len(held[here]) + sent)
    return most


def activations_stored(layers: int, devices: int) -> float:
    """Return the most activations, in layers' outputs, that a device of GPipe keeps, with as many micro-batches."""
    schedule = gpipe(workers=devices, stages=devices, microbatches=devices)
    schedule = dataclasses.replace(schedule, recomputed=frozenset(range(devices)))
    stage = StageBytes(output=1, saved=layers / devices, weights=0)
    found = simulate(schedule, Costs(stages=stage))
    return max(max(curve.saved) for curve in found.memory)


def space(data: Any) -> Found:
    """§3.6 and App. B: Jacobians a worker of the scan stores, activations a device of a pipeline does, of 64 layers."""
    rows = [{"workers": p, "scan": jacobians_stored(_LAYERS, p), "pipeline": activations_stored(_LAYERS, p)}
            for p in _WORKERS]  # fmt: skip
    scan = [row["scan"] / max(_LAYERS / row["workers"], 1) for row in rows]
    pipeline = [row["pipeline"] / (_LAYERS / row["workers"] + row["workers"]) for row in rows]
    return Found({"scan": _constant(scan, "Blelloch's scan, in place, counted"),
                  "pipeline": _constant(pipeline, "GPipe with re-materialisation, simulated")})  # fmt: skip


def path(n: int, size: int) -> int:
    """Return the longest path of Blelloch's scan with n workers, in products of a matrix and a vector of `size`."""
    return sum(level.rounds * (size if level.mm else 1) for level in level_counts("blelloch", n))


def first_gain(size: int) -> int:
    """Return the least n from which on the path is shorter than the chain of n products."""
    n = 1 << (4 * size).bit_length() + 3  # far beyond
    while path(n - 1, size) < n - 1:
        n -= 1
    return n


def condition(data: Any) -> Found:
    """§3.6: n / log₂ n from which a scan of dense Jacobians has the shorter path, over their size."""
    rows = [{"size": size, "n": first_gain(size)} for size in (4, 20, 100)]
    over = [row["n"] / math.log2(row["n"]) / row["size"] for row in rows]
    said = ", ".join(f"{row['size']}×{row['size']}: {o * row['size']:.3g} (n = {row['n']})"
                     for row, o in zip(rows, over, strict=True))  # fmt: skip
    return Found({"size": Ours(over[1], min(over), max(over), text=said)})


def filling(data: Any) -> Found:
    """Fig. 11: the forward pass of a pipeline, and how many micro-batches fill it."""
    inside = {}
    for devices in (2, 4, 8, 16):
        found = simulate(_pipeline(devices))
        begins = found.start(Action(devices - 1, "F", 0))
        inside[devices] = sum(found.start(Action(0, "F", m)) <= begins for m in range(2 * devices))
    return Found({"inside": Ours(all(a == b for a, b in inside.items()), text=", ".join(
        f"{devices} devices: {count}" for devices, count in inside.items()))}, {"devices": 4})  # fmt: skip


def _pipeline(devices: int) -> Schedule:
    return gpipe(workers=devices, stages=devices, microbatches=2 * devices)


def draw_filling(data: Mapping[str, Any]) -> Any:
    from matplotlib import colormaps

    devices = data["devices"]
    found = simulate(_pipeline(devices))
    drawing, axes = harness.figure(width=10.5, height=3.2)
    ax = axes[0, 0]
    for device in range(devices):
        for m in range(2 * devices):
            begin = found.start(Action(device, "F", m))
            ax.barh(device, 1, left=begin, height=0.8, color=colormaps["tab10"](m), edgecolor="white")
            ax.text(begin + 0.5, device, str(m), ha="center", va="center", color="white", fontsize=9)
    ax.set_yticks(range(devices), [f"device {device}" for device in range(devices)])
    ax.invert_yaxis()
    ax.axvline(devices, color="black", linestyle="--", linewidth=1, label=f"full: {devices} micro-batches inside")
    ax.set(xlabel="time, forwards of a stage", xlim=(0, 3 * devices - 1))
    return drawing


RUNS = {
    "bppsa-fig1": Run(levels, draw=draw_tree),
    "bppsa-fig3": Run(hybrid),
    "bppsa-table1": Run(sparsity),
    "bppsa-s33": Run(planned, rests_on="spgemm", seconds=500),
    "bppsa-fig5": Run(jacobians, draw=draw_jacobians, seconds=1),
    "bppsa-eq6": Run(complexity, draw=draw_complexity),
    "bppsa-s51": Run(workers),
    "bppsa-eq8": Run(bitstream, seconds=1),
    "bppsa-eq9": Run(rnn_step),
    "bppsa-eq11": Run(gru_jacobian),
    "bppsa-table3": Run(features, seconds=1, needs=("audio",)),
    "bppsa-instruments": Run(accuracies, told_apart, seconds=50, needs=("audio",)),
    "bppsa-space": Run(space, seconds=1),
    "bppsa-condition": Run(condition),
    "bppsa-fig11": Run(filling, draw=draw_filling),
}
"""By the figure's name."""
