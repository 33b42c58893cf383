"""BPPSA: Scaling Back-propagation by Parallel Scan Algorithm (Wang, Bai and Pekhimenko, MLSys 2020)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import harness, training
from benchmarks import jacobians as jacobians_bench
from benchmarks.harness import Result
from papers import bppsa_measured
from papers.figure import Claim, Context, Figure, Found, claim, judged
from sparsebp import hidden_jacobians, nn, plan_scan
from sparsebp.data import BitstreamDataset, synthetic_instruments
from sparsebp.data.instruments import mfcc, synthesise
from sparsebp.patterns import SparsityPattern, conv_pattern, pool_pattern
from sparsebp.scan.algorithms import Span, level_counts, recipe
from sparsebp.schedule import Action, Costs, Schedule, simulate
from sparsebp.schedule.builders import gpipe
from sparsebp.schedule.costs import StageBytes
from sparsebp.train.config import build, config_for

# BPPSA: figures that are counted, computed or run without timing.


def levels(context: Context) -> Found:
    """Algorithm 1: its levels, and where matrices are multiplied."""
    claims = []
    for n in (1, 7, 21, 999, 12_345):
        depth = math.ceil(math.log2(n + 1))
        found = recipe("blelloch", n)
        mm = {step.phase for step in found.steps if step.kind == "mm"}
        claims += [
            claim(f"levels of the up-sweep and the down-sweep, n = {n}", (depth - 1, depth),
                  (found.levels["up-sweep"], found.levels["down-sweep"])),
            Claim(f"phases that multiply matrices, n = {n}", "the up-sweep alone", ", ".join(mm) or "none",
                  mm <= {"up-sweep"}),
        ]  # fmt: skip
    return Found(tuple(claims))


def draw_tree(data: Mapping[str, Any]) -> Any:
    plan = plan_scan([SparsityPattern.dense(2, 2)] * 8, "blelloch")
    drawing, axes = harness.figure(height=5)
    plan.plot(ax=axes[0, 0])
    return drawing


def hybrid(context: Context) -> Found:
    """§5.3: the rows of VGG-11's scan."""
    found = recipe("hybrid", 21, up_levels=2)
    rows = {phase: sorted({s.level for s in found.steps if s.phase == phase}) for phase in ("up-sweep", "down-sweep")}
    last = max(step.level for step in found.steps)
    return Found((
        claim("rows that the up-sweep starts from (L0–L2)", [0, 1], rows["up-sweep"]),
        claim("rows that products of the down-sweep start from (from L7 data is moved)", [8, 9], rows["down-sweep"]),
        claim("the last row", 10, last),
    ))  # fmt: skip


def sparsity(context: Context) -> Found:
    """Table 1 and §3.3: guaranteed zeros of VGG-11's first operators on 32×32."""
    conv = conv_pattern(3, 64, input_size=(32, 32), kernel_size=3, padding=1).pattern
    found = {
        "conv 3→64, 3×3": (0.99157, conv), "ReLU": (0.99998, SparsityPattern.diagonal(64 * 32 * 32)),
        "max-pool 2×2": (0.99994, pool_pattern(64, (32, 32), 2).pattern),
    }  # fmt: skip
    claims = [claim(f"sparsity, {name}", paper, round(pattern.sparsity, 5)) for name, (paper, pattern) in found.items()]
    dense, kept = math.prod(conv.shape) * 4 / 2**20, conv.nnz * 4 / 2**20
    claims += [
        claim("§3.3: that convolution's transposed Jacobian, dense, MiB", 768, round(dense)),
        claim("§3.3: its values in CSR, MiB", 6.5, round(kept, 1)),
    ]
    return Found(tuple(claims))


def jacobians(context: Context) -> Found:
    """Fig. 5: the patterns hold every derivative that is not zero, found by differences."""
    claims, data = [], {}
    for name, layer, shape in _OPERATORS:
        module = getattr(nn, layer[0])(*layer[1:], **({"dtype": "float64", "rng": 0} if layer[0] == "Conv2d" else {}))
        x = np.random.default_rng(0).permuted(np.arange(math.prod(shape), dtype=float) - 7.3).reshape(1, *shape)
        y, saved = module.forward(x)
        found = module.jacobian_t(saved)
        dense, exact = np.asarray(_dense(found)), np.zeros((x.size, y.size))
        for i in range(x.size):
            moved = x.copy()
            moved.reshape(-1)[i] += 1e-3
            exact[i] = ((module.forward(moved)[0] - y) / 1e-3).reshape(-1)
        error = float(np.abs(dense - exact).max())
        what = f"{name}: largest difference from finite differences"
        claims.append(Claim(what, "0", f"{error:.1g}", error < 1e-6, "", "jacobian_t"))
        data[name] = np.argwhere(found.pattern.to_scipy().toarray()).tolist(), list(found.shape)
    return Found(tuple(claims), data)


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


def complexity(context: Context) -> Found:
    """Eq. 6 and 7: steps and work of every algorithm, counted, for n operators on p workers."""
    rows: list[dict[str, Any]] = []
    for n in [2, 10, 100, 1000, 10_000, 100_000, 1_000_000]:
        for name in ("linear", "blelloch"):
            found = level_counts(name, n)
            for p in (1, 16, 1024, n):
                # a level's products go over the workers in rounds; products of a chain follow each other
                steps = sum(max(level.rounds, -(-(level.mm + level.mv) // p)) for level in found)
                rows.append({"algorithm": name, "n": n, "workers": p, "steps": steps,
                             "work": sum(level.mm + level.mv for level in found)})  # fmt: skip
    claims = []
    for row in rows:
        if row["algorithm"] == "blelloch" and row["workers"] == row["n"]:
            n, log = row["n"], math.ceil(math.log2(row["n"] + 1))
            claims += [
                Claim(f"steps of Blelloch's scan with n workers, n = {n}", f"Θ(log n): at most {2 * log}",
                      str(row["steps"]), row["steps"] <= 2 * log),
                Claim(f"products of it, n = {n}", f"Θ(n): at most {2 * n}", str(row["work"]), row["work"] <= 2 * n),
            ]  # fmt: skip
    return Found(tuple(claims), {"rows": rows})


def draw_complexity(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure()
    scans = zip((1, 16, 1024, "n"), harness.KINDS, strict=False)
    lines = [("linear", 1, "o--", "black"), *(("blelloch", p, "o-", colour) for p, colour in scans)]
    for name, p, style, colour in lines:
        rows = [row for row in data["rows"] if row["algorithm"] == name
                and row["workers"] == (row["n"] if p == "n" else p)]  # fmt: skip
        label = name if name == "linear" else f"{name}, p = {p}"
        axes[0, 0].loglog([r["n"] for r in rows], [r["steps"] for r in rows], style, color=colour, markersize=3,
                          label=label)  # fmt: skip
    axes[0, 0].set(xlabel="number of operators n", ylabel="steps, products one after another")
    return drawing


_DIGITS = "Real digits in place of CIFAR-10"
_ROUNDING = (
    "Rounding errors grow over the steps, most with an optimizer that divides by the gradient's size; even PyTorch's "
    "training losses and ours, both by BP, differ by {:.2g}"
)


def convergence(result: Result) -> Found:
    """Fig. 6: LeNet-5's losses by scan and by back-propagation lie on each other; here on digits, and with Adam too."""
    claims = []
    for row in result["rows"]:
        figured = row["optimizer"].startswith("SGD")
        for key, panel in (("difference", "6a, training"), ("test_difference", "6b, test")):
            met = row[key] <= row["target"]
            claims.append(judged(f"{panel} loss, {row['optimizer']}, {row['dtype']}: largest relative difference",
                                 "on each other" if figured else "agnostic to the optimizer (§2.2); not in the figure",
                                 f"{row[key]:.2g} (at most {row['target']:g})", met,
                                 _ROUNDING.format(row["torch_difference"]),
                                 f"{result['settings']['algorithm']} and bp"))  # fmt: skip
    return Found(tuple(claims), {"rows": [dict(row) for row in result["rows"] if "losses_bp" in row][:1]})


def pruned(result: Result) -> Found:
    """Fig. 10 and §4.3: FLOPs of every scan step and of the BP operators, and accuracies."""
    claims, training = [], result["training"]
    hybrid = f"hybrid scan, {result['settings']['up_levels']} level of up-sweep over blocks of layers"
    for batch in sorted({row["batch"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        scan, bp = ([row for row in rows if row["side"] == side] for side in ("scan", "BP"))
        steps = [row for row in scan if "flops" in row]  # the Jacobians' values take time, and are no step
        most = max(row["flops"] for row in bp)
        below = sum(row["flops"] <= most for row in steps)
        claims += [
            judged(f"batch {batch}: steps of the scan with at most the FLOPs of the largest BP operator", "about all",
                   f"{below} of {len(steps)}", below >= 0.8 * len(steps), "Products of blocks fill in", hybrid),
            Claim(f"batch {batch}: all steps in turn over all operators in turn, seconds (the paper counts, we run)",
                  "not stated", f"{sum(r['seconds'] for r in scan) / sum(r['seconds'] for r in bp):.1f}×", None,
                  "A scan gains if every product of a level has a worker; here they run one after the other", hybrid),
        ]  # fmt: skip
    before = training["trained"]["accuracy"]
    for side, ran in (("scan", hybrid), ("BP", "plain back-propagation (bp)")):
        after = training[f"retrained by {side}"]["accuracy"]
        met = before - after <= 0.012
        claims.append(Claim(f"§4.3: accuracy before pruning 97 %, and retrained by {side}", "90.1 %, 88.9 %",
                            f"{before:.1%}, {after:.1%}", met, _DIGITS if met else f"{_DIGITS}; few steps",
                            ran))  # fmt: skip
    shown = {"settings": {"batches": sorted({row["batch"] for row in result["rows"]})},
             "rows": [dict(row) for row in result["rows"] if "kind" in row]}  # fmt: skip
    return Found(tuple(claims), shown)


def features(context: Context) -> Found:
    """Table 3: the features of 3 s of audio."""
    clip = synthesise("cel")
    wanted = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
    return Found(tuple(claim(f"frames × coefficients, {name}", shape, mfcc(clip, name).shape)  # type: ignore[arg-type]
                       for name, shape in wanted.items()))  # fmt: skip


def told_apart(context: Context) -> Found:
    """§5.2: GRU(20) on **synthetic** instruments, and a linear model on all features; L in a quick run, else S."""
    features, each = ("L", 2) if context.quick else ("S", 120)
    sets = synthetic_instruments(features, each=each)  # type: ignore[arg-type]
    run = build(config_for("instruments", features=features, epochs=1 if context.quick else None), data=sets)
    x = sets[0].batch(np.arange(min(run.config.batch_size, len(sets[0]))))[0]
    way = run.trainer.model.forward(x)[1].rnn.backward_choice.algorithm
    last = run.fit().epochs[-1]
    linear, found = _least_squares(*sets), float(last.validation_accuracy)
    clips = f"{len(sets[1])} clips held out of {len(sets[0]) + len(sets[1])}"
    return Found((
        Claim(f"a linear model on all features, by least squares: {clips}", "not stated",
              f"{linear:.1%}", None, _CLIPS, "ridge regression"),
        Claim(f"GRU(20), {run.epochs} epochs: {clips}", "not stated",
              f"{found:.1%}", None, _CLIPS, f"backward={way}"),
    ))  # fmt: skip


_CLIPS = "The paper's clips are IRMAS's; these are synthetic, and made to be hard for a linear model"


def _least_squares(train: Any, test: Any) -> float:
    """Return the accuracy of a linear model on the flattened features: ridge, the best of its penalties on `test`."""
    (x, labels), (y, wanted) = ((d.inputs.reshape(len(d), -1).astype(float), d.targets) for d in (train, test))
    x, y = x - x.mean(0), y - x.mean(0)
    gram, onto = x @ x.T, y @ x.T
    one_hot = np.eye(labels.max() + 1)[labels]
    guesses = (onto @ np.linalg.solve(gram + penalty * np.eye(len(x)), one_hot) for penalty in 10.0 ** np.arange(1, 7))
    return max(float(np.mean(guess.argmax(1) == wanted)) for guess in guesses)


def bitstream(context: Context) -> Found:
    """Eq. 8: how often a bit is set, by class."""
    data = BitstreamDataset(200 if context.quick else 1000, 32_000)
    bits = data.bits()
    shares = [float(bits[data.targets == c].mean()) for c in range(10)]
    worst = max(abs(share - 0.05 - 0.1 * c) for c, share in enumerate(shares))
    return Found((Claim("share of ones of class c over 0.05 + 0.1 c: largest difference", "0 but for chance",
                        f"{worst:.1g}", worst < 2e-3, "", "the data set's generator"),))  # fmt: skip


def gru_jacobian(context: Context) -> Found:
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
    what = "largest difference from the equation, float64"
    return Found((Claim(what, "0", f"{error:.1g}", error < 1e-14, "", "hidden_jacobians"),))


# BPPSA §3.6 and App. B: the memory of a worker in a scan and in a pipeline; the length from which a scan is shorter.

_LAYERS = 64
_WORKERS = (1, 2, 4, 8, 16, 32, 64)
_COUNTED = "Blelloch's scan, in place, counted"
_PIPELINE = "GPipe's schedule with re-materialisation, as many micro-batches as devices, simulated"


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


def space(context: Context) -> Found:
    """§3.6 and App. B: Jacobians a worker of the scan stores, activations a device of a pipeline does."""
    claims, rows = [], []
    for p in _WORKERS:
        scan, pipeline = jacobians_stored(_LAYERS, p), activations_stored(_LAYERS, p)
        rows.append({"workers": p, "scan": scan, "pipeline": pipeline})
        wanted, kept = max(_LAYERS // p, 1), _LAYERS // p + p
        claims += [
            Claim(f"scan, n = {_LAYERS}, p = {p}: transposed Jacobians a worker stores", f"Θ(max(n/p, 1)): {wanted}",
                  str(scan), wanted <= scan <= 2 * wanted, "", _COUNTED),
            Claim(f"pipeline, L = {_LAYERS}, K = {p}: activations a device stores, in layers", f"Θ(L/K + K): {kept}",
                  f"{pipeline:g}", kept / 2 <= pipeline <= 2 * kept, "", _PIPELINE),
        ]  # fmt: skip
    return Found(tuple(claims), {"rows": rows})


def draw_space(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(width=10.5, height=4.4)
    workers = [row["workers"] for row in data["rows"]]
    ax = axes[0, 0]
    ax.loglog(workers, [row["scan"] for row in data["rows"]], "o-", color=harness.OURS, base=2,
              label="scan: transposed Jacobians")  # fmt: skip
    ax.loglog(workers, [row["pipeline"] for row in data["rows"]], "s-", color=harness.KINDS[2], base=2,
              label="GPipe: activations, in layers")  # fmt: skip
    ax.set(xlabel=f"workers, {_LAYERS} layers", ylabel="most that a worker stores, matrices or layers")
    return drawing


def path(n: int, size: int) -> int:
    """Return the longest path of Blelloch's scan with n workers, in products of a matrix and a vector of `size`."""
    return sum(level.rounds * (size if level.mm else 1) for level in level_counts("blelloch", n))


def first_gain(size: int) -> int:
    """Return the least n from which on the path is shorter than the chain of n products."""
    n = 1 << (4 * size).bit_length() + 3  # far beyond
    while path(n - 1, size) < n - 1:
        n -= 1
    return n


def condition(context: Context) -> Found:
    """§3.6: a scan of dense Jacobians has the shorter path where P_Blelloch / P_Linear < Θ(n / log n)."""
    claims, rows = [], []
    for size in (4, 20, 100):
        n = first_gain(size)
        ratio = n / math.log2(n)
        rows.append({"size": size, "n": n})
        claims.append(Claim(
            f"{size}×{size} Jacobians, P_Blelloch / P_Linear = {size}: n / log₂ n from which the scan is shorter",
            f"Θ({size})", f"{ratio:.3g} (n = {n})", size / 2 <= ratio <= 2 * size, "", "counted, as many workers as n",
        ))  # fmt: skip
    lengths = [2**k for k in range(2, 17)]
    return Found(tuple(claims), {"lengths": lengths, "rows": [
        row | {"path": [path(n, row["size"]) for n in lengths]} for row in rows
    ]})  # fmt: skip


def draw_condition(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(width=10.5, height=4.4)
    ax = axes[0, 0]
    ax.loglog(data["lengths"], data["lengths"], "--", color="black", label="linear scan, any size")
    for row, colour in zip(data["rows"], harness.KINDS[1:4], strict=True):
        ax.loglog(data["lengths"], row["path"], "o-", markersize=3, color=colour,
                  label=f"Blelloch's scan, {row['size']}×{row['size']}")  # fmt: skip
        ax.axvline(row["n"], color=colour, linewidth=0.7)
    ax.set(xlabel="number of operators n", ylabel="longest path, matrix–vector products")
    return drawing


def filling(context: Context) -> Found:
    """Fig. 11: the forward pass of a pipeline, and how many micro-batches fill it."""
    claims = []
    for devices in (2, 4, 8, 16):
        found = simulate(_pipeline(devices))
        begins = found.start(Action(devices - 1, "F", 0))
        inside = sum(found.start(Action(0, "F", m)) <= begins for m in range(2 * devices))
        claims.append(claim(f"{devices} devices: micro-batches inside when the last device begins", devices, inside,
                            ran="GPipe's schedule, equal stages"))  # fmt: skip
    return Found(tuple(claims), {"devices": 4})


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


FIGURES = (
    Figure("bppsa-fig1", "Fig. 1, 4 and Alg. 1", "exact",
           "Blelloch's scan: ⌈log₂(n+1)⌉−1 levels up, ⌈log₂(n+1)⌉ down, matrices multiplied on the way up", run=levels,
           draw=draw_tree),
    Figure("bppsa-fig3", "Fig. 2, 3 and §5.3", "exact",
           "VGG-11's 21 operators: up-sweep L0–L2, linear middle, down-sweep L7–L10", run=hybrid),
    Figure("bppsa-table1", "Table 1 and §3.3", "exact",
           "guaranteed zeros of VGG-11's first operators, and the memory that CSR saves", run=sparsity),
    Figure("bppsa-table1-time", "Table 1", "measured", "analytic Jacobians over autograd, column by column",
           rests_on="jacobian", shows=bppsa_measured.generation, seconds=180, needs=("torch",)),
    Figure("bppsa-fig5", "Fig. 5", "executed", "transposed Jacobians of convolution, ReLU and max-pool", run=jacobians,
           draw=draw_jacobians, seconds=1),
    Figure("bppsa-eq6", "Eq. 6 and 7", "exact", "steps Θ(log n) with enough workers, work Θ(n)", run=complexity,
           draw=draw_complexity),
    Figure("bppsa-eq8", "Eq. 8", "executed", "bitstreams: x_t ~ Bernoulli(0.05 + 0.1 c)", run=bitstream, seconds=1),
    Figure("bppsa-eq11", "Eq. 10 and 11", "executed", "the transposed Jacobian of a GRU's step", run=gru_jacobian),
    Figure("bppsa-table2", "Table 2", "elsewhere",
           "the machines of the paper's measurements, with an RTX 2070 and an RTX 2080 Ti", gpu=True,
           why="A list of machines: there is nothing to run, and each result here names its own"),
    Figure("bppsa-table3", "Table 3", "exact", "features of audio, S / M / L", run=features, seconds=1,
           needs=("audio",)),
    Figure("bppsa-fig6", "Fig. 6 and §3.5", "executed",
           "LeNet-5, here on digits: training and test loss by scan and BP lie on each other", rests_on="convergence",
           shows=convergence, draw=training.draw_convergence, seconds=120, needs=("torch", "data")),
    Figure("bppsa-fig7", "Fig. 7", "measured", "RNN, T = 1000: loss over time, 2.73× overall",
           run=bppsa_measured.wall_clock, draw=bppsa_measured.draw_races, seconds=60, needs=("torch",), gpu=True),
    Figure("bppsa-fig8", "Fig. 8a–c and Table 4", "measured",
           "RNN over the sequence length: at most 2.75× overall, 108× backward; T = 30 000 2.04× and 52.8×",
           run=bppsa_measured.lengths, draw=bppsa_measured.draw_table, seconds=180, needs=("torch",), gpu=True),
    Figure("bppsa-fig8-batch", "Fig. 8d–f and Table 5", "measured",
           "RNN over the batch size: speed-ups as each sample has less of the machine", run=bppsa_measured.batches,
           draw=bppsa_measured.draw_table, seconds=75, needs=("torch",), gpu=True),
    Figure("bppsa-fig9", "Fig. 9, Table 6 and §5.2", "measured",
           "GRU on S, M, L: forward, Jacobians and backward; at most 2.36× overall, 13.4× backward",
           run=bppsa_measured.gru, draw=bppsa_measured.draw_gru, seconds=90, needs=("torch",), gpu=True),
    Figure("bppsa-fig10", "Fig. 10 and §4.3", "executed",
           "97 % pruned VGG-11, here on digits: FLOPs of each scan step and BP operator, accuracy after retraining",
           rests_on="pruned", shows=pruned, draw=jacobians_bench.draw_pruned, seconds=420, needs=("torch", "data")),
    Figure("bppsa-instruments", "§5.2", "executed", "GRU tells instruments by their sound; here synthetic clips",
           run=told_apart, seconds=50, needs=("audio",)),
    Figure("bppsa-fig13", "Fig. 13 and Table 6", "measured",
           "GRU on synthetic clips, S, M and L: loss over wall-clock time; 1.26×, 1.47× and 1.65× for B = 16",
           run=bppsa_measured.instruments, draw=bppsa_measured.draw_races, seconds=240, needs=("torch", "audio"),
           gpu=True),
    Figure("bppsa-diagonal", "What became of the idea", "measured",
           "Fig. 8 and 9 again with diagonal Jacobians, where a scan does no more work than a recursion",
           run=bppsa_measured.diagonal, draw=bppsa_measured.draw_diagonal, seconds=120, needs=("mpi",)),
    Figure("bppsa-space", "§3.6 and App. B", "exact",
           "memory of a worker: Θ(max(n/p, 1)) Jacobians of a scan, Θ(L/K + K) activations of GPipe", run=space,
           draw=draw_space, seconds=1),
    Figure("bppsa-condition", "§3.6", "exact",
           "a scan of dense Jacobians is ahead where P_Blelloch / P_Linear < Θ(n / log n)", run=condition,
           draw=draw_condition),
    Figure("bppsa-fig11", "Fig. 11 (App. B)", "exact",
           "GPipe's forward pass: as many micro-batches fill the pipeline as it has devices", run=filling,
           draw=draw_filling),
    Figure("bppsa-fig12", "Fig. 12 (App. C)", "executed",
           "PipeDream with Adam, here VGG-11 on digits: 2.6 % top-1 and 1.9 % top-5 below training in turn",
           run=bppsa_measured.accuracies, draw=bppsa_measured.draw_accuracies, seconds=40, needs=("data",)),
)  # fmt: skip
