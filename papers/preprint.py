"""Scaling Back-propagation by Parallel Scan Algorithm: BPPSA's preprint (Wang, Bai and Pekhimenko, 2019)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.tools import pictures
from papers import kinematics, sampled
from papers.bppsa import steps
from papers.figure import Claim, Context, Figure, Found, claim

_RAN = "Blelloch's scan, every level, one image, float32; max-pooling stored as in Alg. 8–10"
_FULL, _PRUNED = "VGG-11", "97 % pruned VGG-11"
_SIZE = 1024
"""Rows and columns of the matrices whose product gives the machine's rate."""


# ---- the scan over VGG-11, step by step ------------------------------------------------------------------------------


def _walked(context: Context, name: str, *, timed: bool) -> dict[str, Any]:
    """Return the rows of a network's scan and of autograd's operators; several figures rest on one walk."""
    for key in (f"{name}, timed", *(() if timed else (name,))):
        if key in context.results:
            return context.results[key]  # type: ignore[return-value]
    model, x = _network(context, name)
    rows = steps.walk(steps.elements(model, x), timed=timed, note=context.echo)
    found: dict[str, Any] = {"rows": rows, "operators": [], "rate": 0.0}
    context.results[f"{name}, timed" if timed else name] = found
    return found


def _network(context: Context, name: str) -> tuple[Any, np.ndarray]:
    """Return VGG-11 and an image; the pruned one is trained and pruned on digits by `benchmarks.pruned`."""
    from sparsebp.models import vgg11

    model = vgg11(3, 10, width=1 / 16 if context.quick else 1.0, rng=0)
    if name == _FULL:
        return model, np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    from benchmarks import pruned
    from sparsebp import nn
    from sparsebp.data import load_mnist_images

    data, _ = load_mnist_images(size=32, channels=3, test=pruned.TEST)
    sizes = pruned.BENCHMARK.quick if context.quick else pruned.BENCHMARK.sizes
    pruned.train_in_stages(
        model,
        data,
        sizes["train"],
        sizes["stages"],
        lambda part, seconds: context.echo(f"{part}: {len(seconds)} steps"),
    )
    nn.prune(model, pruned.AMOUNT, pruned.METHOD)
    return model, data.batch(np.arange(1))[0]


def _beside_autograd(context: Context, name: str, *, timed: bool) -> dict[str, Any]:
    """Return `_walked`, with PyTorch's operators and the rate by which FLOPs become seconds."""
    from benchmarks import pruned

    found = _walked(context, name, timed=timed)
    if not found["operators"]:
        model, x = _network(context, _FULL)  # autograd computes with the zeros of a pruned network
        found["operators"] = pruned.operators(model, x, 2 if context.quick else 50)
        found["rate"] = _rate()
    return found


def _rate() -> float:
    """Return the FLOPs a second of this machine's matrix product: the best of some."""
    a = np.ones((_SIZE, _SIZE), np.float32)
    seconds = []
    for _ in range(6):
        begin = time.perf_counter()
        np.matmul(a, a)
        seconds.append(time.perf_counter() - begin)
    return float(2 * _SIZE**3 / min(seconds[1:]))


def measured(context: Context) -> Found:
    """Fig. 7a: the measured latency of every step, beside a linear scan's and autograd's."""
    found = _beside_autograd(context, _FULL, timed=True)
    rows = found["rows"]
    mm = [row for row in rows if row["kind"] == "mm"]
    vectors = [row for row in rows if row["kind"] == "mv"]
    linear, autograd = _slowest(rows, "linear"), max(row["seconds"] for row in found["operators"])
    within = [row for row in mm if row["seconds"] <= linear]
    above = sorted((row for row in mm if row["seconds"] > linear), key=lambda row: -row["seconds"])
    apart = max(row["difference"] for row in vectors)
    return Found((
        Claim("products of matrices that take at most the linear scan's slowest step", "many",
              f"{len(within)} of {len(mm)}", 2 * len(within) >= len(mm),
              "" if 2 * len(within) >= len(mm) else "The linear scan's kernels are quick here too", _RAN),
        Claim("those that take longer, over the linear scan's slowest step", "a few, significantly",
              ", ".join(f"{row['step']} {row['seconds'] / linear:.3g}×" for row in above), 0 < len(above) < len(mm) / 2,
              "" if 0 < len(above) < len(mm) / 2 else "More than a few are slower than the linear scan", _RAN),
        Claim("the linear scan's slowest step over autograd's: the weaker baseline", "above 1",
              f"{linear / autograd:.3g}×", linear > autograd,
              "" if linear > autograd else "Our products of a matrix and a vector are the quicker",
              "linear scan, PyTorch's BP"),
        Claim("gradients of the scan beside the linear scan's: largest relative difference", "the same outputs",
              f"{apart:.1g}", apart < 1e-4, "", _RAN),
    ), _drawn(found, "seconds"))  # fmt: skip


def projected(context: Context) -> Found:
    """Fig. 7b: the latency that the FLOPs of each step stand for, full network."""
    found = _beside_autograd(context, _FULL, timed=False)
    above, within, most = _projected(found)
    return Found((
        Claim("products of matrices projected above autograd's slowest operator", "3", str(len(above)), len(above) == 3,
              "" if len(above) == 3 else "Autograd's operators and the rate are this machine's", _RAN),
        Claim("which ones, over that operator", "not stated in the text", _names(above, most), None,
              "The preprint's figure names them, its text does not", _RAN),
        Claim("all other steps projected at or below it", "most", f"{within} of {within + len(above)}",
              within > len(above), "", _RAN),
    ), _drawn(found, "projected"))  # fmt: skip


def projected_pruned(context: Context) -> Found:
    """Fig. 7c: the same for the pruned network."""
    found = _beside_autograd(context, _PRUNED, timed=False)
    above, within, most = _projected(found)
    far = max((row["projected"] / most for row in above), default=1.0)
    return Found((
        Claim("steps projected above autograd's slowest operator: anomalies", "1", f"{len(above)}", len(above) <= 1,
              "" if len(above) <= 1 else "Other weights are kept here, and products fill in", _RAN),
        Claim("the anomaly over autograd's slowest operator", "close to it", _names(above, most) or "none", far < 2, ""
              if far < 2 else "With the same share of every layer kept, the product of the third level is full again",
              _RAN),
        Claim("all other steps projected at or below it", "all", f"{within} of {within + len(above)}", len(above) <= 1,
              "" if len(above) <= 1 else "As above", _RAN),
    ), _drawn(found, "projected"))  # fmt: skip


def _projected(found: Mapping[str, Any]) -> tuple[list[Any], int, float]:
    """Return the steps above autograd's slowest operator, how many are not, and its seconds."""
    most = max(row["seconds"] for row in found["operators"])
    products = [row for row in found["rows"] if row["kind"] in ("mm", "mv")]
    for row in products:
        row["projected"] = row["flops"] / found["rate"]
    above = sorted((row for row in products if row["projected"] > most), key=lambda row: -row["projected"])
    return above, len(products) - len(above), most


def _names(rows: Sequence[Mapping[str, Any]], unit: float) -> str:
    return ", ".join(f"{row['step']} {row['projected'] / unit:.3g}×" for row in rows)


def _slowest(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    return max((row["seconds"] for row in rows if row["kind"] == kind), default=float("nan"))


def _drawn(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return what a picture of latencies shows."""
    names = ("step", "kind", "critical", "dense", "flops", key)
    return {
        "key": key, "autograd": max(row["seconds"] for row in found["operators"]), "rate": found["rate"],
        "linear": _slowest(found["rows"], "linear") if key == "seconds" else None,
        "rows": [{name: row[name] for name in names} for row in found["rows"] if row["kind"] in ("mm", "mv")],
    }  # fmt: skip


def draw_latencies(data: Mapping[str, Any]) -> Any:
    """Draw the latency of every step over its complexity without zeros."""
    drawing, axes = pictures.figure(width=11.6, height=5.6)
    ax, key = axes[0, 0], data["key"]
    for kind, colour, name in (("mv", "#f58518", "matrix–vector"), ("mm", "#4c78a8", "matrix–matrix")):
        for critical in (True, False):
            rows = [row for row in data["rows"] if row["kind"] == kind and row["critical"] is critical]
            ax.scatter([row["dense"] for row in rows], [row[key] for row in rows], s=44, edgecolors=colour,
                       facecolors=colour if critical else "none",
                       label=f"{name}, {'on' if critical else 'off'} the critical path")  # fmt: skip
    for number, row in enumerate(row for row in data["rows"] if row["kind"] == "mm" or row[key] > data["autograd"]):
        ax.annotate(row["step"], (row["dense"], row[key]), xytext=(5, (4, -9)[number % 2]), textcoords="offset points",
                    fontsize=7)  # fmt: skip
    if data["linear"] is not None:
        ax.axhline(data["linear"], color="#dc2626", linestyle="--", label="slowest step of the linear scan")
    ax.axhline(data["autograd"], color="#1d4ed8", linestyle="--", label="PyTorch Autograd's slowest operator")
    ax.set(xscale="log", yscale="log", xlabel="multiplications of the step if its Jacobians were full",
           ylabel="s" if key == "seconds" else f"s, projected: FLOP over {data['rate'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    ax.grid(alpha=0.3)
    pictures.legend_below(drawing, columns=3)
    return drawing


def operands(context: Context) -> Found:
    """Fig. 8: entries of the operands of every product of matrices."""
    found = _walked(context, _FULL, timed=False)
    mm = [row for row in found["rows"] if row["kind"] == "mm"]
    dear = {row["step"] for row in sorted(mm, key=lambda row: -row["flops"])[:3]}
    full = sorted(mm, key=lambda row: -min(row["left"], row["right"]))[:3]
    shown = "; ".join(f"{row['step']}: {row['left']:.2g}, {row['right']:.2g}" for row in full)
    share = sum(row["flops"] for row in mm if row["step"] in dear) / sum(row["flops"] for row in mm)
    return Found((
        claim("the three dearest products are the three whose operands both have many entries", sorted(dear),
              sorted(row["step"] for row in full), ran=_RAN),
        Claim("entries of their left and right operands", "the most of all", shown,
              {row["step"] for row in full} == dear, "", _RAN),
        Claim("their share of the FLOPs of all products of matrices", "three anomalies", f"{share:.1%}", share > 0.9,
              "", _RAN),
    ), {"rows": [{name: row[name] for name in ("step", "left", "right", "flops")} for row in mm]})  # fmt: skip


def draw_operands(data: Mapping[str, Any]) -> Any:
    """Draw entries of both operands, and FLOPs."""
    drawing, axes = pictures.figure(width=11.6, height=4.8)
    ax, rows = axes[0, 0], data["rows"]
    at = np.arange(len(rows))
    ax.bar(at - 0.2, [row["left"] for row in rows], 0.38, color="#4c78a8", label="entries of the left operand")
    ax.bar(at + 0.2, [row["right"] for row in rows], 0.38, color="#9ecae9", label="entries of the right operand")
    other = ax.twinx()
    other.plot(at, [row["flops"] for row in rows], "o", color="#dc2626", label="FLOP of the product")
    ax.set(yscale="log", ylabel="entries that are stored", xlabel="product")
    ax.set_xticks(at, [row["step"] for row in rows])
    other.set(yscale="log", ylabel="FLOP")
    pictures.legend_below(drawing, columns=3)
    return drawing


def sparsities(context: Context) -> Found:
    """Fig. 9a, 9b and §5: sparsity of all matrices of the up-sweep, full and pruned."""
    both = {name: _matrices(_walked(context, name, timed=False)["rows"]) for name in (_FULL, _PRUNED)}
    full, pruned = both.values()
    convolutions = [row["sparsity"] for row in full if row["convolution"]][::-1]
    less = [row["step"] for row, other in zip(full, pruned, strict=True) if other["sparsity"] < row["sparsity"]]
    levels = [float(np.mean([row["sparsity"] for row in pruned if row["level"] == level]))
              for level in sorted({row["level"] for row in pruned})]  # fmt: skip
    falls = [a >= b for a, b in pairwise(levels[1:])]
    return Found((
        Claim("full: sparsity of the convolutions' Jacobians, from the first layer on", "falls with every pooling",
              ", ".join(f"{value:.3f}" for value in convolutions),
              all(a >= b for a, b in pairwise(convolutions)), "", _RAN),
        Claim("matrices that are sparser in the full network than in the pruned one", "none",
              ", ".join(less) or "none", not less, "" if not less else "Another image: other entries of max-pooling",
              _RAN),
        Claim("pruned: mean sparsity of the products, level by level", "falls (fill-in)",
              ", ".join(f"{value:.3f}" for value in levels[1:]), all(falls),
              "" if all(falls) else "A product with a pooling's Jacobian is sparse again", _RAN),
    ), both)  # fmt: skip


def _matrices(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tag, sparsity and row of Fig. 2 of the matrices of the up-sweep."""
    return [
        {"step": row["step"], "sparsity": row["sparsity"], "convolution": row["convolution"],
         "level": 0 if row["kind"] == "input" else row["level"] + 1}
        for row in rows if row["kind"] == "input" or row["kind"] == "mm"
    ]  # fmt: skip


def draw_sparsities(data: Mapping[str, Any]) -> Any:
    """Draw the sparsity of every matrix, by tag; those of convolutions are filled."""
    drawing, axes = pictures.figure(2, width=11.6, height=7.2)
    colours = ("#1e40af", "#d97706", "#059669", "#a21caf", "#dc2626")
    for ax, (name, rows) in zip(axes[:, 0], data.items(), strict=True):
        for number, row in enumerate(rows):
            colour = colours[row["level"]]
            ax.scatter(number, row["sparsity"], s=46, edgecolors=colour,
                       facecolors=colour if row["convolution"] else "none")  # fmt: skip
        ax.set_xticks(range(len(rows)), [row["step"] for row in rows], rotation=60, fontsize=8)
        ax.set(ylabel="sparsity: share of zeros", title=name, ylim=(-0.05, 1.05))
        ax.grid(axis="y", alpha=0.3)
        for level in sorted({row["level"] for row in rows}):
            ax.scatter([], [], edgecolors=colours[level], facecolors="none", label=f"row L{level}" if level else
                       "row L0 (filled: convolutions)")  # fmt: skip
    axes[1, 0].set_xlabel("matrix")
    pictures.legend_below(drawing, *axes[0, 0].get_legend_handles_labels(), columns=5)
    return drawing


FIGURES = (
    Figure(
        name="preprint-shared",
        paper="Preprint",
        source="Fig. 1–6, Table 1, Alg. 1–10 and Eq. 5, 6",
        kind="elsewhere",
        why="They came again in the paper of 2020: see BPPSA's Fig. 1–6, Table 1, Alg. 1 and Eq. 6 and 7",
        states="the scan, the Jacobians' patterns, the convergence and the complexity",
    ),
    Figure(
        name="preprint-fig7a",
        paper="Preprint",
        source="Fig. 7a and §4.3",
        kind="measured",
        seconds=155,
        run=measured,
        draw=draw_latencies,
        needs=("torch",),
        gpu=True,
        states="full VGG-11: measured latency of every step of the scan",
    ),
    Figure(
        name="preprint-fig7b",
        paper="Preprint",
        source="Fig. 7b and §4.3",
        kind="measured",
        seconds=120,
        run=projected,
        draw=draw_latencies,
        needs=("torch",),
        gpu=True,
        states="full VGG-11: FLOPs of every step as seconds; three anomalies",
    ),
    Figure(
        name="preprint-fig7c",
        paper="Preprint",
        source="Fig. 7c and §4.3",
        kind="measured",
        seconds=360,
        run=projected_pruned,
        draw=draw_latencies,
        needs=("torch", "data"),
        gpu=True,
        states="97 % pruned VGG-11, on digits: FLOPs of every step as seconds",
    ),
    Figure(
        name="preprint-fig8",
        paper="Preprint",
        source="Fig. 8",
        kind="executed",
        seconds=120,
        run=operands,
        draw=draw_operands,
        states="full VGG-11: entries of the operands of every product of matrices",
    ),
    Figure(
        name="preprint-fig9",
        paper="Preprint",
        source="Fig. 9a, 9b and §5",
        kind="executed",
        seconds=480,
        run=sparsities,
        draw=draw_sparsities,
        needs=("data",),
        states="sparsity along the up-sweep, full and 97 % pruned VGG-11 (on digits)",
    ),
    *kinematics.FIGURES,
    *sampled.FIGURES,
)
