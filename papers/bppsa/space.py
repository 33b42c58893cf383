"""BPPSA §3.6 and App. B: what a worker stores of a scan and of a pipeline, and from when on a scan has fewer steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from benchmarks.tools import pictures
from papers.figure import Claim, Context, Found, claim
from sparsebp.scan.algorithms import Span, level_counts, recipe
from sparsebp.schedule import Action, Costs, Schedule, simulate
from sparsebp.schedule.builders import gpipe
from sparsebp.schedule.costs import StageBytes

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
    """Draw both over the number of workers."""
    drawing, axes = pictures.figure(width=11.6, height=4.4)
    workers = [row["workers"] for row in data["rows"]]
    ax = axes[0, 0]
    ax.loglog(workers, [row["scan"] for row in data["rows"]], "o-", color="#1e40af", base=2,
              label="scan: transposed Jacobians")  # fmt: skip
    ax.loglog(workers, [row["pipeline"] for row in data["rows"]], "s-", color="#c2410c", base=2,
              label="GPipe: activations, in layers")  # fmt: skip
    ax.set(xlabel=f"workers, {_LAYERS} layers", ylabel="stored by a worker, at most")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
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
    """Draw the longest path over n for Jacobians of three sizes."""
    drawing, axes = pictures.figure(width=11.6, height=4.4)
    ax = axes[0, 0]
    ax.loglog(data["lengths"], data["lengths"], "--", color="black", label="linear scan, any size")
    for row, colour in zip(data["rows"], ("#059669", "#1e40af", "#a21caf"), strict=True):
        ax.loglog(data["lengths"], row["path"], "o-", markersize=3, color=colour,
                  label=f"Blelloch's scan, {row['size']}×{row['size']}")  # fmt: skip
        ax.axvline(row["n"], color=colour, linewidth=0.7)
    ax.set(xlabel="operators n", ylabel="longest path, products of a matrix and a vector")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
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
    """Draw the forwards of every device; a colour a micro-batch."""
    from matplotlib import colormaps

    devices = data["devices"]
    found = simulate(_pipeline(devices))
    drawing, axes = pictures.figure(width=11.6, height=3.2)
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
    ax.legend(fontsize=8, loc="lower left")
    return drawing
