"""Inverse kinematics of a long skeleton (§4.2 of BPPSA's preprint): a chain of 4×4 Jacobians, by a scan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np

from benchmarks.tools import pictures
from papers.figure import Claim, Context, Figure, Found, at_least
from sparsebp.core import timing
from sparsebp.scan.algorithms import level_counts

_SIZE = 4
_WAYS = ("linear", "chunked", "blelloch")
_TARGET = np.array([0.15, 0.35, 0.25])
"""Where the tip is to go; the chain is as long as 1."""


class Skeleton:
    """A chain of n bones in space, all as long, together 1; the joints turn about z and y in turn.

    Parameters
    ----------
    joints
        n.
    way
        The algorithm of both chains: the positions forward, the gradients back.
    """

    def __init__(self, joints: int, way: Any = "blelloch") -> None:
        self.joints, self.way = joints, way

    def transforms(self, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every joint's matrix (n, 4, 4), from its bone's end to its beginning, and its derivative."""
        n = self.joints
        cos, sin = np.cos(angles), np.sin(angles)
        turn, slope = np.zeros((n, _SIZE, _SIZE)), np.zeros((n, _SIZE, _SIZE))
        even, odd = slice(0, n, 2), slice(1, n, 2)
        for joints, (a, b, rest) in ((even, (0, 1, 2)), (odd, (2, 0, 1))):
            c, s = cos[joints], sin[joints]
            turn[joints, a, a], turn[joints, b, b], turn[joints, a, b], turn[joints, b, a] = c, c, -s, s
            slope[joints, a, a], slope[joints, b, b], slope[joints, a, b], slope[joints, b, a] = -s, -s, -c, c
            turn[joints, rest, rest] = 1
        turn[:, 3, 3] = 1
        for matrix in (turn, slope):  # first along the bone, then the turn
            matrix[:, :, 3] += matrix[:, :, 0] / n
        return turn, slope

    def value_and_gradient(self, angles: np.ndarray) -> tuple[float, np.ndarray]:
        """Return half the squared distance of the tip from the target, and its gradient at the angles."""
        turn, slope = self.transforms(angles)
        inner = self.positions(turn)
        tip = turn[0] @ inner[0]
        error = np.append(tip[:3] - _TARGET, 0.0)
        outer = self.back(turn, error)
        return 0.5 * float(error @ error), np.einsum("ni,nij,nj->n", outer, slope, inner)

    def positions(self, turn: np.ndarray) -> np.ndarray:
        """Return where the tip is, as the end of each bone sees it: (n, 4)."""
        tip = np.array([0.0, 0.0, 0.0, 1.0])
        y = _plan(self.way, self.joints)(tip, np.ascontiguousarray(turn[::-1]).reshape(self.joints, -1))
        return np.concatenate([np.asarray(y)[-2::-1], tip[None]])

    def back(self, turn: np.ndarray, error: np.ndarray) -> np.ndarray:
        """Return the gradient at what each joint's matrix yields: (n, 4)."""
        data = np.ascontiguousarray(turn.transpose(0, 2, 1)).reshape(self.joints, -1)
        return np.concatenate([error[None], np.asarray(_plan(self.way, self.joints)(error, data))[:-1]])

    def joints_at(self, angles: np.ndarray) -> np.ndarray:
        """Return where the bones end, (n + 1, 3)."""
        frame, found = np.eye(_SIZE), [np.zeros(3)]
        for matrix in self.transforms(angles)[0]:
            frame = frame @ matrix
            found.append(frame[:3, 3])
        return np.array(found)


@lru_cache(maxsize=8)
def _plan(way: Any, joints: int) -> Any:
    from sparsebp import SparsityPattern, plan_scan

    return plan_scan([SparsityPattern.dense(_SIZE, _SIZE)] * joints, way, dtype=np.float64, shared=[True] * joints)


def snake(context: Context) -> Found:
    """Reach for a target, and time the gradient's chain for growing numbers of joints."""
    from scipy.optimize import minimize

    joints = 50 if context.quick else 1000
    angles = np.random.default_rng(0).normal(scale=0.02, size=joints)
    scan, bp = (Skeleton(joints, way) for way in ("blelloch", "linear"))
    (value, gradient), (_, exact) = scan.value_and_gradient(angles), bp.value_and_gradient(angles)
    apart = float(np.abs(gradient - exact).max() / np.abs(exact).max())
    some = [0, joints // 2, joints - 1]
    differences = [_difference(scan, angles, joint) for joint in some]
    off = float(np.abs(gradient[some] - differences).max() / np.abs(exact).max())
    found = minimize(scan.value_and_gradient, angles, jac=True, method="L-BFGS-B", options={"maxiter": 200})
    left = float(np.linalg.norm(scan.joints_at(found.x)[-1] - _TARGET))
    counts = [10, 100] if context.quick else [10, 100, 1000, 10_000, 100_000]
    rows = [_timed(n, context.quick) for n in counts]
    dear = _path(rows[-1]["joints"])
    least = next(n for n in range(2, 10_000) if _path(n) < n)
    ran, longest = f"Blelloch's scan, {joints} joints, float64", rows[-1]
    why = "Two cores do the 4 times as many operations of the tree in turn"
    return Found((
        Claim("gradient by the scan beside the sequential one: largest relative difference", "the same outputs",
              f"{apart:.1g}", apart < 1e-12, "", ran),
        Claim("gradient by the scan beside finite differences, three joints", "the same", f"{off:.1g}", off < 1e-6, "",
              ran),
        Claim(f"distance of the tip from the target, before and after {found.nit} steps of L-BFGS", "not stated",
              f"{math.sqrt(2 * value):.2g}, {left:.1g}", None, "The preprint names the use, and no numbers", ran),
        Claim("joints from which the tree's longest path costs less than the chain", "n / log n above the dimension, 4",
              f"{least}, n / log₂ n = {least / math.log2(least):.1f}", 2 <= least / math.log2(least) <= 8, "",
              "counted, n workers, a product of 4×4 matrices as 4 of a matrix and a vector"),
        Claim(f"{longest['joints']} joints: the chain over the tree's longest path", "above 1",
              f"{longest['joints'] / dear:.3g}×", dear < longest["joints"], "", "counted, n workers"),
        *(at_least(f"{longest['joints']} joints: the sequential chain's time over the scan's, measured", 1.0,
                   longest["linear"] / longest[way], why=why, ran=name)
          for way, name in (("blelloch", "Blelloch's scan, 2 cores"), ("chunked", "chunked scan, 2 cores"))),
    ), {"rows": rows, "before": scan.joints_at(angles).tolist(), "after": scan.joints_at(found.x).tolist(),
        "target": _TARGET.tolist()})  # fmt: skip


def _difference(skeleton: Skeleton, angles: np.ndarray, joint: int) -> float:
    values = []
    for step in (1e-5, -1e-5):
        moved = angles.copy()
        moved[joint] += step
        values.append(skeleton.value_and_gradient(moved)[0])
    return (values[0] - values[1]) / 2e-5


def _path(n: int) -> float:
    """Return the cost of the tree's longest path with n workers, in products of a matrix and a vector."""
    return sum(level.rounds * (_SIZE if level.mm else 1) for level in level_counts("blelloch", n))


def _timed(n: int, quick: bool) -> dict[str, Any]:
    """Return seconds of the gradient's chain by every algorithm."""
    angles = np.random.default_rng(1).normal(scale=0.02, size=n)
    turn = Skeleton(n).transforms(angles)[0]
    calls = {way: partial(Skeleton(n, way).back, turn, np.ones(_SIZE)) for way in _WAYS}
    rounds = {"rounds": 3, "least_rounds": 2, "warmup": 1, "budget": 0.1} if quick else {"rounds": 15, "budget": 3.0}
    found = timing.measure(calls, **rounds)  # type: ignore[arg-type]
    return {"joints": n} | {way: timed.median for way, timed in found.items()}


def draw_snake(data: Mapping[str, Any]) -> Any:
    """Draw the skeleton before and after, and the time of its gradient."""
    drawing, axes = pictures.figure(1, 2, width=11.6, height=4.6)
    left, right = axes[0]
    for name, colour in (("before", "#9ca3af"), ("after", "#1e40af")):
        places = np.array(data[name])
        left.plot(places[:, 0], places[:, 1], color=colour, linewidth=2, label=name)
    left.plot(*data["target"][:2], "x", color="#dc2626", markersize=9, label="target")
    left.set(xlabel="x, lengths of the skeleton", ylabel="y, lengths of the skeleton", title="seen from above")
    left.set_aspect("equal", adjustable="datalim")
    left.legend(fontsize=8)
    names = {"linear": "one joint after the other", "chunked": "chunked scan", "blelloch": "Blelloch's scan"}
    for way, colour in zip(_WAYS, ("#c2410c", "#059669", "#1e40af"), strict=True):
        right.loglog([row["joints"] for row in data["rows"]], [row[way] * 1e3 for row in data["rows"]], "o-",
                     color=colour, label=names[way])  # fmt: skip
    right.set(xlabel="joints", ylabel="gradient at all joints, ms")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    return drawing


FIGURES = (
    Figure(
        name="preprint-kinematics",
        paper="Preprint",
        source="§4.2",
        kind="measured",
        seconds=15,
        run=snake,
        draw=draw_snake,
        states="inverse kinematics of a long skeleton: more joints than dimensions",
    ),
)
