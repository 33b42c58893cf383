"""BPPSA: what is counted, computed or run, whatever time it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.tools import pictures
from benchmarks.tools.benchmark import Result
from papers.figure import Claim, Context, Found, claim


def levels(context: Context) -> Found:
    """Algorithm 1: its levels, and where matrices are multiplied."""
    from sparsebp.scan.algorithms import recipe

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
    """Draw the scan of eight operators."""
    from sparsebp import SparsityPattern, plan_scan

    plan = plan_scan([SparsityPattern.dense(2, 2)] * 8, "blelloch")
    drawing, axes = pictures.figure(height=5)
    plan.plot(ax=axes[0, 0])
    return drawing


def hybrid(context: Context) -> Found:
    """§5.3: the rows of VGG-11's scan."""
    from sparsebp.scan.algorithms import recipe

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
    from sparsebp.patterns import SparsityPattern, conv_pattern, pool_pattern

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
    from sparsebp import nn

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
        claims.append(
            Claim(
                f"{name}: largest difference from finite differences",
                "0",
                f"{error:.1g}",
                error < 1e-6,
                "",
                "jacobian_t",
            )
        )
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
    """Draw where the entries are."""
    drawing, axes = pictures.figure(1, len(data), height=3)
    for ax, (name, (entries, shape)) in zip(axes[0], data.items(), strict=True):
        places = np.array(entries)
        ax.scatter(places[:, 1], places[:, 0], s=4, color="#1e40af")
        ax.set(title=name, xlim=(-1, shape[1]), ylim=(shape[0], -1), xlabel="output", ylabel="input")
        ax.set_aspect("equal")
    return drawing


def complexity(context: Context) -> Found:
    """Eq. 6 and 7: steps and work of every algorithm, counted, for n operators on p workers."""
    from sparsebp.scan.algorithms import level_counts

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
    """Draw steps over n for the numbers of workers."""
    drawing, axes = pictures.figure()
    for name, style in (("linear", "--"), ("blelloch", "-")):
        for p in (1, 16, 1024, "n"):
            rows = [row for row in data["rows"] if row["algorithm"] == name
                    and row["workers"] == (row["n"] if p == "n" else p)]  # fmt: skip
            if name == "blelloch" or p == 1:
                axes[0, 0].loglog([r["n"] for r in rows], [r["steps"] for r in rows], style, marker="o",
                                  markersize=3, label=f"{name}, p = {p}" if name == "blelloch" else name)  # fmt: skip
    axes[0, 0].set(xlabel="operators n", ylabel="steps")
    axes[0, 0].legend(fontsize=8)
    return drawing


_DIGITS = "Real digits in place of CIFAR-10"
_ROUNDING = (
    "Rounding grows over the steps, most if divided by the gradient's size; the training losses of PyTorch's BP and of "
    "ours come to differ by {:.2g}"
)


def convergence(result: Result) -> Found:
    """Fig. 6: LeNet-5's losses by scan and by back-propagation lie on each other; here on digits, and with Adam too."""
    claims = []
    for row in result["rows"]:
        figured = row["optimizer"].startswith("SGD")
        for key, panel in (("difference", "6a, training"), ("test_difference", "6b, test")):
            met = row[key] <= row["target"]
            claims.append(Claim(
                f"{panel} loss, {row['optimizer']}, {row['dtype']}: largest relative difference",
                "on each other" if figured else "agnostic to the optimizer (§2.2); not in the figure",
                f"{row[key]:.2g} (at most {row['target']:g})", met,
                "" if met else _ROUNDING.format(row["torch_difference"]),
                f"{result['settings']['algorithm']} beside bp",
            ))  # fmt: skip
    return Found(tuple(claims), {"rows": [dict(row) for row in result["rows"] if "losses_bp" in row][:1]})


def draw_convergence(data: Mapping[str, Any]) -> Any:
    """Draw training and test loss over iterations."""
    from benchmarks.convergence import TEST_EVERY

    drawing, axes = pictures.figure(1, 2, width=11.6, height=4.2)
    for row in data["rows"]:
        count = len(row["losses_bp"])
        tested = [i for i in range(count) if i % TEST_EVERY == 0 or i == count - 1]
        for ax, key, at, name in ((axes[0, 0], "losses", range(count), "training loss"),
                                  (axes[0, 1], "test", tested, "test loss")):  # fmt: skip
            ax.plot(at, row[f"{key}_bp"], color="#c2410c", linewidth=4, alpha=0.5, label="back-propagation")
            ax.plot(at, row[f"{key}_scan"], color="#1e40af", linewidth=1.2, linestyle="--", label="scan")
            ax.set(xlabel="iteration", ylabel=f"{name} (digits)")
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8)
    return drawing


def pruned(result: Result) -> Found:
    """Fig. 10 and §4.3: FLOPs of every scan step beside those of the BP operators, and accuracies."""
    claims, training = [], result["training"]
    hybrid = f"hybrid scan, {result['settings']['up_levels']} level of up-sweep over blocks of layers"
    for batch in sorted({row["batch"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        scan, bp = ([row for row in rows if row["side"] == side] for side in ("scan", "BP"))
        steps = [row for row in scan if "flops" in row]  # the Jacobians' values take time, and are no step
        most = max(row["flops"] for row in bp)
        below = sum(row["flops"] <= most for row in steps)
        claims += [
            Claim(f"batch {batch}: steps of the scan with at most the FLOPs of the largest BP operator", "about all",
                  f"{below} of {len(steps)}", below >= 0.8 * len(steps),
                  "" if below >= 0.8 * len(steps) else "Products of blocks fill in", hybrid),
            Claim(f"batch {batch}: all steps in turn over all operators in turn, seconds (the paper counts, we run)",
                  "not stated", f"{sum(r['seconds'] for r in scan) / sum(r['seconds'] for r in bp):.1f}×", None,
                  "The scan pays with as many workers as a level has products; here they run in turn", hybrid),
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


def draw_pruned(data: Mapping[str, Any]) -> Any:
    """Draw FLOPs and seconds of steps and operators over their dense complexity."""
    from benchmarks.pruned import picture

    return picture(data)


def features(context: Context) -> Found:
    """Table 3: the features of 3 s of audio."""
    from sparsebp.data.instruments import mfcc, synthesise

    clip = synthesise("cel")
    wanted = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
    return Found(tuple(claim(f"frames × coefficients, {name}", shape, mfcc(clip, name).shape)  # type: ignore[arg-type]
                       for name, shape in wanted.items()))  # fmt: skip


def told_apart(context: Context) -> Found:
    """§5.2: GRU(20) on **synthetic** instruments, beside a linear model on all features; L in a quick run, else S."""
    from sparsebp.data import synthetic_instruments
    from sparsebp.train.config import build, config_for

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


_CLIPS = "The paper's clips are IRMAS's; these are synthetic, and meant to be hard for a linear model alone"


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
    from sparsebp.data import BitstreamDataset

    data = BitstreamDataset(200 if context.quick else 1000, 32_000)
    bits = data.bits()
    shares = [float(bits[data.targets == c].mean()) for c in range(10)]
    worst = max(abs(share - 0.05 - 0.1 * c) for c, share in enumerate(shares))
    return Found((Claim("share of ones of class c over 0.05 + 0.1 c: largest difference", "0 but for chance",
                        f"{worst:.1g}", worst < 2e-3, "", "the data set's generator"),))  # fmt: skip


def gru_jacobian(context: Context) -> Found:
    """Eq. 11: the transposed Jacobian of a GRU's step."""
    from sparsebp import hidden_jacobians, nn

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
    return Found(
        (
            Claim(
                "largest difference from the equation, float64",
                "0",
                f"{error:.1g}",
                error < 1e-14,
                "",
                "hidden_jacobians",
            ),
        )
    )
