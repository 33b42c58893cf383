"""BPPSA: Scaling Back-propagation by Parallel Scan Algorithm (Wang, Bai and Pekhimenko, MLSys 2020)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebp.bench.tools import pictures
from sparsebp.core import threads
from sparsebp.reproduce.figure import Claim, Context, Figure, Found, at_least, claim, median

_NO_CUDNN = "The paper's peer is cuDNN on a GPU, ours is PyTorch on the CPU"
_MANY = ((10, 30, 100, 300, 1000, 3000, 10_000, 30_000), (2, 4, 8, 16, 32, 64, 128, 256))
"""T and B of §5.1."""


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


def generation(context: Context) -> Found:
    """Table 1: analytic generation over autograd column by column."""
    rows = [row for row in context.benchmark("jacobian")["rows"] if row.get("target")]
    return Found(tuple(
        at_least(f"{row['name']}, {row['threads']} threads", row["target"], median(row, "columns_ratio"))
        for row in rows
    ))  # fmt: skip


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
        claims.append(Claim(f"{name}: largest difference from finite differences", "0", f"{error:.1g}", error < 1e-6))
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
    from sparsebp.scan.algorithms.counts import level_counts

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


def convergence(context: Context) -> Found:
    """Fig. 6: LeNet-5's losses by scan and by back-propagation lie on each other."""
    rows = context.benchmark("convergence")["rows"]
    claims = [
        Claim(f"LeNet-5, {row['optimizer']}, {row['dtype']}: largest difference of the losses",
              "on each other", f"{row['difference']:.2g} (at most {row['target']:g})", bool(row["met"]))
        for row in rows
    ]  # fmt: skip
    return Found(tuple(claims), {"rows": [dict(row) for row in rows if "losses_bp" in row][:1]})


def draw_convergence(data: Mapping[str, Any]) -> Any:
    """Draw loss over iterations."""
    drawing, axes = pictures.figure()
    for row in data["rows"]:
        axes[0, 0].plot(row["losses_bp"], color="#c2410c", linewidth=3, alpha=0.5, label="back-propagation")
        axes[0, 0].plot(row["losses_scan"], color="#1e40af", linewidth=1, label="scan")
    axes[0, 0].set(xlabel="iteration", ylabel="training loss")
    axes[0, 0].legend()
    return drawing


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
        *(at_least("RNN, T = 1000, B = 16: speed-up of the backward (Fig. 7)", 16, r, why=_NO_CUDNN) for r in known),
        at_least("RNN: the largest speed-up of a training step", 2.75, max(r["step"] for r in rows), why=_NO_CUDNN),
        at_least("RNN: the largest speed-up of the backward", 108, max(r["backward"] for r in rows), why=(
            f"{_NO_CUDNN}; its backward takes 20 to 60 µs a step there, ours is bounded by the recursion itself")),
    ), {"rows": rows, "at": 30 if context.quick else 1000})  # fmt: skip


def _measured(context: Context, cell: str, points: list[tuple[int, int, int | None]]) -> list[dict[str, Any]]:
    from sparsebp.bench.recurrent.training import measure_row
    from sparsebp.bench.tools import peers
    from sparsebp.bench.tools.workload import SequenceWorkload

    rounds = {"rounds": 2, "least_rounds": 2, "warmup": 1} if context.quick else {"rounds": 7, "budget": 3.0}
    rows = []
    with peers.threads(threads.most_threads()):
        for length, batch, features in points:
            found = measure_row(SequenceWorkload(cell, length, batch, input_size=features), rounds)
            rows.append({"length": length, "batch": batch, "step": median(found, "step_ratio"),
                         "backward": median(found, "backward_ratio"), "features": features})  # fmt: skip
            context.echo(f"{cell}, T = {length}, B = {batch}: step {rows[-1]['step']:.1f}×, "
                         f"backward {rows[-1]['backward']:.1f}×")  # fmt: skip
    return rows


def draw_lengths(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups over T and over 1 / B."""
    drawing, axes = pictures.figure(1, 2)
    for ax, key, fixed in ((axes[0, 0], "length", ("batch", 16)), (axes[0, 1], "batch", ("length", data["at"]))):
        rows = sorted((r for r in data["rows"] if r[fixed[0]] == fixed[1]), key=lambda r: r[key])
        for what, colour in (("step", "#1e40af"), ("backward", "#93c5fd")):
            ax.plot([r[key] for r in rows], [r[what] for r in rows], marker="o", color=colour, label=what)
        ax.axhline(1, color="grey", linewidth=0.8)
        named = "sequence length T (B = 16)" if key == "length" else f"batch size B (T = {data['at']})"
        ax.set(xscale="log", yscale="log", ylabel="times faster than torch.nn", xlabel=named)
        ax.legend(fontsize=8)
    return drawing


def gru(context: Context) -> Found:
    """Fig. 9: GRU on the features S, M and L with B of 16, 32 and 64."""
    sizes = [(12, 4, 38)] if context.quick else [(259, 0, 38), (517, 0, 24), (1034, 0, 12)]
    rows = _measured(context, "GRU", [
        (length, batch or b, features) for length, batch, features in sizes for b in ((4,) if batch else (16, 32, 64))
    ])  # fmt: skip
    return Found((
        at_least("GRU: the largest speed-up of a training step", 2.36, max(r["step"] for r in rows), why=_NO_CUDNN),
        at_least("GRU: the largest speed-up of the backward", 13.4, max(r["backward"] for r in rows), why=_NO_CUDNN),
    ), {"rows": rows})  # fmt: skip


def draw_gru(data: Mapping[str, Any]) -> Any:
    """Draw the speed-ups of every set and batch size."""
    rows = data["rows"]
    names = {259: "S", 517: "M", 1034: "L"}
    drawing, ax = pictures.bar_chart(
        [f"{names.get(row['length'], row['length'])}, B = {row['batch']}" for row in rows],
        [("step", "#1e40af", [r["step"] for r in rows]), ("backward", "#93c5fd", [r["backward"] for r in rows])],
        "times faster than torch.nn", each=0.4,
    )  # fmt: skip
    ax.legend(fontsize=8)
    return drawing


def pruned(context: Context) -> Found:
    """Fig. 10: FLOPs of every scan step beside those of the BP operators, 97 % pruned VGG-11."""
    result = context.benchmark("pruned")
    rows = [row for row in result["rows"] if row["batch"] == min(r["batch"] for r in result["rows"])]
    scan, bp = ([row for row in rows if row["side"] == side] for side in ("scan", "BP"))
    steps = [row for row in scan if "flops" in row]  # the Jacobians' values take time, and are no step
    most = max(row["flops"] for row in bp)
    below = sum(row["flops"] <= most for row in steps)
    return Found((
        Claim("steps of the scan with at most the FLOPs of the largest BP operator", "about all",
              f"{below} of {len(steps)}", below >= 0.8 * len(steps)),
        Claim("all steps in turn over all operators in turn, seconds (the paper counts, we run)", "not stated",
              f"{sum(r['seconds'] for r in scan) / sum(r['seconds'] for r in bp):.1f}×", None,
              "The scan pays with as many workers as a level has products; here they run in turn"),
    ), {"scan": [r["flops"] for r in steps], "BP": [r["flops"] for r in bp]})  # fmt: skip


def draw_pruned(data: Mapping[str, Any]) -> Any:
    """Draw the FLOPs of steps and operators."""
    drawing, axes = pictures.figure(1, 2)
    for ax, (name, flops) in zip(axes[0], data.items(), strict=True):
        ax.bar(range(len(flops)), [max(value, 1) for value in flops], color="#1e40af" if name == "scan" else "#c2410c")
        ax.set(yscale="log", xlabel="step" if name == "scan" else "operator", ylabel="FLOPs", title=name)
    return drawing


def features(context: Context) -> Found:
    """Table 3: the features of 3 s of audio."""
    from sparsebp.data.instruments import mfcc, synthesise

    clip = synthesise("cel")
    wanted = {"S": (259, 38), "M": (517, 24), "L": (1034, 12)}
    return Found(tuple(claim(f"frames × coefficients, {name}", shape, mfcc(clip, name).shape)  # type: ignore[arg-type]
                       for name, shape in wanted.items()))  # fmt: skip


def bitstream(context: Context) -> Found:
    """Eq. 8: how often a bit is set, by class."""
    from sparsebp.data import BitstreamDataset

    data = BitstreamDataset(200 if context.quick else 1000, 32_000)
    bits = data.bits()
    shares = [float(bits[data.targets == c].mean()) for c in range(10)]
    worst = max(abs(share - 0.05 - 0.1 * c) for c, share in enumerate(shares))
    return Found((Claim("share of ones of class c over 0.05 + 0.1 c: largest difference", "0 but for chance",
                        f"{worst:.1g}", worst < 2e-3),))  # fmt: skip


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
    return Found((Claim("largest difference from the equation, float64", "0", f"{error:.1g}", error < 1e-14),))


_HERE = "Intel and NVIDIA machines of 2019 in the paper; ours is named under every picture"
FIGURES = (
    Figure(
        name="bppsa-fig1",
        paper="BPPSA",
        source="Fig. 1, 4 and Alg. 1",
        kind="exact",
        run=levels,
        draw=draw_tree,
        states="Blelloch's scan: ⌈log₂(n+1)⌉−1 levels up, ⌈log₂(n+1)⌉ down, matrices multiplied on the way up",
    ),
    Figure(
        name="bppsa-fig3",
        paper="BPPSA",
        source="Fig. 2, 3 and §5.3",
        kind="exact",
        run=hybrid,
        states="VGG-11's 21 operators: up-sweep L0–L2, linear middle, down-sweep L7–L10",
    ),
    Figure(
        name="bppsa-table1",
        paper="BPPSA",
        source="Table 1 and §3.3",
        kind="exact",
        run=sparsity,
        states="guaranteed zeros of VGG-11's first operators, and the memory that CSR saves",
    ),
    Figure(
        name="bppsa-table1-time",
        rests_on="jacobian",
        paper="BPPSA",
        source="Table 1",
        kind="measured",
        seconds=180,
        run=generation,
        needs=("torch",),
        states="analytic Jacobians over autograd, column by column",
    ),
    Figure(
        name="bppsa-fig5",
        paper="BPPSA",
        source="Fig. 5",
        kind="executed",
        seconds=1,
        run=jacobians,
        draw=draw_jacobians,
        states="transposed Jacobians of convolution, ReLU and max-pool",
    ),
    Figure(
        name="bppsa-eq6",
        paper="BPPSA",
        source="Eq. 6 and 7",
        kind="exact",
        run=complexity,
        draw=draw_complexity,
        states="steps Θ(log n) with enough workers, work Θ(n)",
    ),
    Figure(
        name="bppsa-eq8",
        paper="BPPSA",
        source="Eq. 8",
        kind="executed",
        seconds=1,
        run=bitstream,
        states="bitstreams: x_t ~ Bernoulli(0.05 + 0.1 c)",
    ),
    Figure(
        name="bppsa-eq11",
        paper="BPPSA",
        source="Eq. 10 and 11",
        kind="executed",
        run=gru_jacobian,
        states="the transposed Jacobian of a GRU's step",
    ),
    Figure(
        name="bppsa-table2",
        paper="BPPSA",
        source="Table 2",
        kind="elsewhere",
        gpu=True,
        why=_HERE,
        states="the paper's machines: RTX 2070 and RTX 2080 Ti",
    ),
    Figure(
        name="bppsa-table3",
        paper="BPPSA",
        source="Table 3",
        kind="exact",
        seconds=1,
        run=features,
        needs=("audio",),
        states="features of audio, S / M / L",
    ),
    Figure(
        name="bppsa-fig6",
        rests_on="convergence",
        paper="BPPSA",
        source="Fig. 6 and §3.5",
        kind="executed",
        seconds=120,
        run=convergence,
        draw=draw_convergence,
        needs=("torch", "data"),
        states="LeNet-5: losses by scan and BP lie on each other",
    ),
    Figure(
        name="bppsa-fig7",
        paper="BPPSA",
        source="Fig. 7",
        kind="measured",
        seconds=15,
        run=wall_clock,
        draw=draw_race,
        needs=("torch",),
        gpu=True,
        states="RNN, T = 1000: loss over time, 2.73× overall",
    ),
    Figure(
        name="bppsa-fig8",
        paper="BPPSA",
        source="Fig. 8, Tables 4 and 5",
        kind="measured",
        seconds=120,
        run=lengths,
        draw=draw_lengths,
        needs=("torch",),
        gpu=True,
        states="RNN: speed-ups over T and B, at most 2.75× overall, 108× backward",
    ),
    Figure(
        name="bppsa-fig9",
        paper="BPPSA",
        source="Fig. 9, Table 6 and §5.2",
        kind="measured",
        seconds=90,
        run=gru,
        draw=draw_gru,
        needs=("torch",),
        gpu=True,
        states="GRU on S, M, L: at most 2.36× overall, 13.4× backward",
    ),
    Figure(
        name="bppsa-fig10",
        rests_on="pruned",
        paper="BPPSA",
        source="Fig. 10",
        kind="executed",
        seconds=420,
        run=pruned,
        draw=draw_pruned,
        needs=("torch", "data"),
        states="pruned VGG-11: FLOPs of each scan step and BP operator",
    ),
    Figure(
        name="bppsa-fig13",
        paper="BPPSA",
        source="Fig. 13",
        kind="measured",
        seconds=20,
        run=instruments,
        draw=draw_race,
        needs=("torch", "audio"),
        gpu=True,
        states="GRU on synthetic clips, S: loss over wall-clock time",
    ),
    Figure(
        name="bppsa-fig11",
        paper="BPPSA",
        source="Fig. 11 and 12 (appendix)",
        kind="elsewhere",
        gpu=True,
        states="PipeDream's timing and accuracy, by its authors' code on 4 GPUs",
        why="PipeDream's schedule is executed here with sparsebp train --schedule pipedream; see spectrain-table1",
    ),
)
