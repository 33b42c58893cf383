"""Scaling Back-propagation by Parallel Scan Algorithm: BPPSA's preprint (Wang, Bai and Pekhimenko, 2019)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness, jacobians, workloads
from benchmarks.recurrent import GEMM, gemm
from papers import bppsa
from papers.claims import Context, Found, Ours, Run, ratio
from sparsebp import nn, optim
from sparsebp.core import timing
from sparsebp.data import load_mnist_images
from sparsebp.models import vgg11
from sparsebp.patterns import SparsityPattern, conv_pattern
from sparsebp.products import ProductPlan, plan_product
from sparsebp.scan.algorithms import Span, critical_path, recipe
from sparsebp.scan.run import Multiply

# Every product of Blelloch's scan over the convolution layers of VGG-11: its operands, its operations, its seconds.

OPERATORS = 21
"""Of VGG-11, in front of its linear layer (BPPSA §5.3)."""
_LONG, _BUDGET, _TRIALS = 2.0, 0.5, 50
"""Seconds from which a step is run once; seconds for the trials of a shorter one; trials at most, as in the preprint"""


class Element(NamedTuple):
    """A transposed Jacobian, or a product of some: where its entries are, and their values for one image."""

    pattern: SparsityPattern
    data: np.ndarray


def elements(model: nn.Sequential, x: np.ndarray) -> list[Element]:
    """Return J_1 … J_21 for the image `x`, the last operator's first.

    Max-pooling is stored as in Algorithms 8 to 10: one entry for each output.
    """
    saved = model.forward(x)[1]
    found = []
    for number in reversed(range(OPERATORS)):
        made = model[number].jacobian_t(saved.layers[number])
        data = np.ascontiguousarray(made.data.reshape(made.pattern.nnz, -1)[:, 0])
        found.append(Element(made.pattern, data))
        if isinstance(model[number], nn.MaxPool2d):
            found[-1] = _without_zeros(found[-1])
    return found


def _without_zeros(element: Element) -> Element:
    matrix = element.pattern.to_scipy(element.data, copy=True)
    matrix.eliminate_zeros()
    return Element(SparsityPattern.from_scipy(matrix), matrix.data)


def walk(
    chain: Sequence[Element], *, timed: bool, note: Callable[[str], None] = lambda line: None, way: Any = "blelloch",
    **options: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Go through Algorithm 1 and return a row for every product, and for every Jacobian that it starts from."""
    steps = recipe(way, len(chain), **options).steps
    spans = {Span(i + 1, i + 2): element for i, element in enumerate(chain)}
    last = {span: number for number, step in enumerate(steps) for span in (step.left, step.right)}
    g = np.random.default_rng(1).standard_normal((chain[0].pattern.shape[1], 1)).astype(chain[0].data.dtype)
    vectors, multiply = {Span(0, 1): g}, Multiply(g)
    exact = _linear(chain, g, multiply, timed)
    rows = [_row(str(span), "input", element) for span, element in spans.items()]
    products = []
    for number, step in enumerate(steps):
        right = spans[step.right]
        row: dict[str, Any] = {"step": str(step.target), "kind": step.kind, "phase": step.phase, "level": step.level}
        if step.kind == "mv":
            size = right.pattern.shape
            row |= {"flops": 2 * right.pattern.nnz, "dense": math.prod(size)}
            if timed:
                seconds, y = _time(partial(multiply, *right, vectors[step.left], None))
                vectors[step.target] = y
                wanted = exact[step.target.stop - 1][1]
                row |= {"seconds": seconds, "difference": _steps_difference(y, wanted)}
        else:
            left = spans[step.left]
            plan, spans[step.target], taken = _product(right, left, timed)
            row |= _row(str(step.target), "mm", spans[step.target]) | {
                "flops": plan.flops, "dense": right.pattern.shape[0] * math.prod(left.pattern.shape),
                "left": left.pattern.nnz, "right": right.pattern.nnz, "strategy": plan.strategy, "seconds": taken,
            }  # fmt: skip
            note(f"{row['step']}: {row['flops']:.3g} FLOP, {row['nnz']} entries")
        products.append(row)
        for span in {step.left, step.right}:
            if last[span] == number:
                spans.pop(span, None)
    path = set(critical_path(steps, [row["flops"] for row in products]))
    for number, row in enumerate(products):
        row["critical"] = number in path
    if timed:
        rows += [{"step": f"y{i}", "kind": "linear", "seconds": exact[i][0]} for i in sorted(exact)]
    return rows + products


def _row(step: str, kind: str, element: Element) -> dict[str, Any]:
    pattern = element.pattern
    return {"step": step, "kind": kind, "nnz": pattern.nnz, "sparsity": pattern.sparsity,
            "convolution": kind == "input" and pattern.kind in ("general", "dense")}  # fmt: skip


def _product(right: Element, left: Element, timed: bool) -> tuple[ProductPlan, Element, float | None]:
    """Return the plan of ``right · left``, the product, and the seconds of its values."""
    plan = plan_product(right.pattern, left.pattern)
    if not timed:
        return plan, Element(plan.pattern, np.empty(0, np.float32)), None
    out = np.empty(plan.pattern.nnz, right.data.dtype)
    seconds, _ = _time(lambda: plan(right.data, left.data, out=out))
    return plan, Element(plan.pattern, out), seconds


def _linear(
    chain: Sequence[Element], g: np.ndarray, multiply: Multiply, timed: bool
) -> dict[int, tuple[float, np.ndarray]]:
    """Return seconds and result of every step of the linear scan: the preprint's weaker baseline."""
    found: dict[int, tuple[float, np.ndarray]] = {}
    y = g
    for number, element in enumerate(chain if timed else (), 1):
        seconds, y = _time(partial(multiply, *element, y, None))
        found[number] = seconds, y
    return found


def _steps_difference(found: np.ndarray, exact: np.ndarray) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def _time(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the median of the trials after one that warms up, and the last result; a long run is the only one."""
    begin = time.perf_counter()
    result = run()
    seconds = [time.perf_counter() - begin]
    if seconds[0] < _LONG:
        begin, seconds = time.perf_counter(), []
        while not seconds or (len(seconds) < _TRIALS and time.perf_counter() - begin < _BUDGET):
            start = time.perf_counter()
            result = run()
            seconds.append(time.perf_counter() - start)
    return float(np.median(seconds)), result


# Inverse kinematics of a long skeleton (§4.2 of BPPSA's preprint): a chain of 4×4 Jacobians, by a scan.

_POSE = 4
_WAYS = ("linear", "chunked", "blelloch")
_TARGET = np.array([0.15, 0.35, 0.25])
"""Where the tip is to go; the chain is as long as 1."""


class Skeleton:
    """A chain of n bones in space, all as long, together 1; the joints turn about z and y in turn."""

    def __init__(self, joints: int, way: Any = "blelloch") -> None:
        self.joints, self.way = joints, way

    def transforms(self, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return every joint's matrix (n, 4, 4), from its bone's end to its beginning, and its derivative."""
        n = self.joints
        cos, sin = np.cos(angles), np.sin(angles)
        turn, slope = (np.zeros((n, _POSE, _POSE)), np.zeros((n, _POSE, _POSE)))
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
        """Return where the tip is, in the frame at the end of each bone: (n, 4)."""
        tip = np.array([0.0, 0.0, 0.0, 1.0])
        y = _plan(self.way, self.joints)(tip, np.ascontiguousarray(turn[::-1]).reshape(self.joints, -1))
        return np.concatenate([np.asarray(y)[-2::-1], tip[None]])

    def back(self, turn: np.ndarray, error: np.ndarray) -> np.ndarray:
        """Return the gradients at the outputs of the joints' matrices: (n, 4)."""
        data = np.ascontiguousarray(turn.transpose(0, 2, 1)).reshape(self.joints, -1)
        return np.concatenate([error[None], np.asarray(_plan(self.way, self.joints)(error, data))[:-1]])


@lru_cache(maxsize=8)
def _plan(way: Any, joints: int) -> Any:
    from sparsebp import SparsityPattern, plan_scan

    return plan_scan([SparsityPattern.dense(_POSE, _POSE)] * joints, way, dtype=np.float64, shared=[True] * joints)


def snake(context: Context) -> dict[str, Any]:
    """Reach for a target, and time the gradient's chain for growing numbers of joints."""
    from scipy.optimize import minimize

    joints = 50 if context.quick else 1000
    angles = np.random.default_rng(0).normal(scale=0.02, size=joints)
    scan, bp = (Skeleton(joints, way) for way in ("blelloch", "linear"))
    (value, gradient), (_, exact) = scan.value_and_gradient(angles), bp.value_and_gradient(angles)
    found = minimize(scan.value_and_gradient, angles, jac=True, method="L-BFGS-B", options={"maxiter": 200})
    counts = [10, 100] if context.quick else [10, 100, 1000, 10_000, 100_000]
    return {
        "rows": [_timed(n, context.quick) for n in counts], "steps": int(found.nit),
        "apart": float(np.abs(gradient - exact).max() / np.abs(exact).max()), "begin": math.sqrt(2 * value),
        "left": math.sqrt(2 * scan.value_and_gradient(found.x)[0]),
    }  # fmt: skip


def kinematics(data: Mapping[str, Any]) -> Found:
    longest = data["rows"][-1]
    joints = longest["joints"]
    least = bppsa.first_gain(_POSE)
    return Found({
        "faster": ratio(longest["blelloch"],
            other=f"{joints} joints; chunked scan {longest['chunked']['median']:.3g}×"),
        "condition": Ours(least / math.log2(least), other=f"n = {least}, as many workers"),
        "same": Ours(data["apart"], text=f"{data['apart']:.1g}",
                     other=f"the tip reaches its target: {data['begin']:.2g} before and {data['left']:.0e} after "
                     f"{data['steps']} steps of L-BFGS"),
    })  # fmt: skip


def _timed(n: int, quick: bool) -> dict[str, Any]:
    """Return seconds of the gradient's chain by every algorithm."""
    angles = np.random.default_rng(1).normal(scale=0.02, size=n)
    turn = Skeleton(n).transforms(angles)[0]
    calls = {way: partial(Skeleton(n, way).back, turn, np.ones(_POSE)) for way in _WAYS}
    rounds = {"rounds": 3, "least_rounds": 2, "warmup": 1, "budget": 0.1} if quick else {"rounds": 15, "budget": 3.0}
    found = timing.measure(calls, **rounds)  # type: ignore[arg-type]
    seconds = {way: one.median for way, one in found.items()}
    return {"joints": n, "seconds": seconds} | {
        way: timing.ratio(found["linear"], found[way]) for way in ("chunked", "blelloch")}  # fmt: skip


# Products of Jacobians by Monte Carlo (§5 of BPPSA's preprint; Drineas, Kannan and Mahoney, 2006): cost and error.

SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the inner columns that are drawn: the share of the exact product's operations."""
_TRAINED = (1.0, 1 / 2, 1 / 8, 1 / 32)


def draw_weights(sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return how much each inner column counts: drawn `count` times in proportion to its size, 1 on the mean."""
    share = sizes / sizes.sum()
    drawn = rng.multinomial(count, share)
    return np.asarray(np.divide(drawn, count * share, out=np.zeros(len(share)), where=share > 0))


def column_sizes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the products of the norms of A's columns and B's rows."""
    return np.asarray(np.linalg.norm(a, axis=0) * np.linalg.norm(b, axis=1), np.float64)


def expected_error(a: np.ndarray, b: np.ndarray, exact: np.ndarray, count: int) -> float:
    """Return the root of the mean squared Frobenius error, relative to the product (Lemma 4 there)."""
    whole = float(np.linalg.norm(exact))
    return float(np.sqrt(max(column_sizes(a, b).sum() ** 2 - whole**2, 0.0) / count)) / whole


def trade_off(context: Context) -> dict[str, Any]:
    """Sample the product of the Jacobians of VGG-11's last convolutions, and train with sampled products."""
    model = vgg11(3, 10, width=1 / 16 if context.quick else 1.0, rng=0)
    x = np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    chain = elements(model, x)
    first, relu, a = (chain[k].pattern.to_scipy(chain[k].data).toarray() for k in (2, 3, 4))
    b = relu @ first
    g = np.random.default_rng(1).standard_normal(b.shape[1]).astype(np.float32)
    exact, rng = a @ b, np.random.default_rng(2)
    sizes, rows = column_sizes(a, b), []
    for share in SHARES:
        count, found, at_gradient = max(round(share * len(sizes)), 1), [], []
        for _ in range(4 if context.quick else 10):
            weights = draw_weights(sizes, count, rng).astype(np.float32)
            kept = weights > 0
            product = (a[:, kept] * weights[kept]) @ b[kept]
            found.append(float(np.linalg.norm(product - exact) / np.linalg.norm(exact)))
            at_gradient.append(float(np.linalg.norm(product @ g - exact @ g) / np.linalg.norm(exact @ g)))
        rows.append({"share": share, "error": float(np.sqrt(np.mean(np.square(found)))),
                     "gradient": float(np.sqrt(np.mean(np.square(at_gradient)))),
                     "expected": expected_error(a, b, exact, count)})  # fmt: skip
    curves = _curves(20 if context.quick else 300)
    return {"rows": rows, "curves": {f"{share:g}": curve for share, curve in curves.items()}}


def approximate(data: Mapping[str, Any]) -> Found:
    worst = max(abs(row["error"] / row["expected"] - 1) for row in data["rows"])
    errors = {row["share"]: 100 * row["gradient"] for row in data["rows"]}
    ends = [float(np.mean(curve[-20:])) for curve in data["curves"].values()]
    return Found({
        "errors": Ours(errors[1 / 8], unit=" %",
            other=f"at an eighth of the cost; at half of it {errors[1 / 2]:.0f} %; "
                       f"the product's error is within {worst:.0%} of Drineas et al.'s Lemma 4"),
        "trade-off": Ours(ends == sorted(ends), text="loss at the end, exact and at 1/2, 1/8, 1/32 of the cost: "
                          + ", ".join(f"{end:.3f}" for end in ends)),
    })  # fmt: skip


def _curves(steps: int) -> dict[float, list[float]]:
    data, _ = load_mnist_images(test=500)
    given = [data.batch(chosen) for chosen in workloads.batches(len(data), 32, 0, steps)]
    return {share: train(given, share) for share in _TRAINED}


class _Sampled(nn.Linear):
    """A linear layer whose product with the next one is sampled: what is behind gets gradients of drawn units only."""

    draw: Callable[[np.ndarray], np.ndarray]  # takes the layer's weights, returns how much each unit counts

    def input_grad(self, gy: Any, saved: Any) -> Any:
        return super().input_grad(gy * self.draw(self.params["weight"]).astype(gy.dtype), saved)


def train(given: Sequence[tuple[np.ndarray, np.ndarray]], share: float, width: int = 64) -> list[float]:
    """Train with products of which `share` of the inner columns is drawn anew at each step; return the losses.

    The scan multiplies the Jacobians of the linear layers 5 and 4, and of 3 and 2 (each with its ReLU). A sampled
    product weighs its inner units, so the gradients behind it are off, and those within it are not.
    """
    rng = np.random.default_rng(0)
    sizes = [int(np.prod(given[0][0].shape[1:])), *[width] * 5, 10]
    linear: list[Any] = [(_Sampled if share < 1 and number in (1, 3) else nn.Linear)(a, b, rng=rng)
                         for number, (a, b) in enumerate(pairwise(sizes))]  # fmt: skip

    def draw(behind: Any, weight: np.ndarray) -> np.ndarray:
        return draw_weights(column_sizes(weight.T, behind.params["weight"].T), max(round(share * width), 1), rng)

    for number in (1, 3) if share < 1 else ():
        linear[number].draw = partial(draw, linear[number + 1])
    model = nn.Sequential(*[layer for one in linear for layer in (one, nn.ReLU())][:-1])
    optimizer, step = (
        optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        nn.value_and_grad(model, nn.CrossEntropyLoss()),
    )
    found = []
    for x, target in given:
        value, grads = step(x.reshape(len(x), -1), target)
        found.append(float(value))
        optimizer.step(grads)
    return found


_FULL, _PRUNED = "VGG-11", "97 % pruned VGG-11"


# ---- the scan over VGG-11, step by step ------------------------------------------------------------------------------


def _walked(context: Context, name: str, *, timed: bool) -> dict[str, Any]:
    """Return the rows of a network's scan and of autograd's operators; several figures rest on one walk."""
    for key in (f"{name}, timed", *(() if timed else (name,))):
        if key in context.results:
            return context.results[key]
    model, x = _network(context, name)
    rows = walk(elements(model, x), timed=timed, note=context.echo)
    found: dict[str, Any] = {"rows": rows, "operators": [], "rate": 0.0}
    context.results[f"{name}, timed" if timed else name] = found
    return found


def _network(context: Context, name: str) -> tuple[Any, np.ndarray]:
    """Return VGG-11 and an image; the pruned one is trained and pruned on digits by `benchmarks.pruned`."""
    model = vgg11(3, 10, width=1 / 16 if context.quick else 1.0, rng=0)
    if name == _FULL:
        return model, np.random.default_rng(0).standard_normal((1, 3, 32, 32)).astype(np.float32)
    data, _ = load_mnist_images(size=32, channels=3, test=jacobians.TEST)
    sizes = jacobians.PRUNED.quick if context.quick else jacobians.PRUNED.sizes
    jacobians.train_in_stages(
        model, data, sizes["train"], sizes["stages"],
        lambda part, seconds: context.echo(f"{part}: {len(seconds)} steps"),
    )  # fmt: skip
    nn.prune(model, jacobians.AMOUNT, jacobians.METHOD)
    return model, data.batch(np.arange(1))[0]


def _beside_autograd(context: Context, name: str, *, timed: bool) -> dict[str, Any]:
    """Return `_walked`, with PyTorch's operators and the rate by which FLOPs become seconds."""
    found = _walked(context, name, timed=timed)
    if not found["operators"]:
        model, x = _network(context, _FULL)  # autograd computes with the zeros of a pruned network
        found["operators"] = jacobians.pruned_operators(model, x, 2 if context.quick else 50)
        found["rate"] = _rate()
    return found


def _rate() -> float:
    """Return the FLOPs a second of this machine's matrix product: the best of some."""
    timed = timing.measure({"gemm": gemm(np.dtype(np.float32))}, rounds=5, least_rounds=5, warmup=1)["gemm"]
    return float(2 * GEMM**3 / min(timed.seconds))


def measured(context: Context) -> dict[str, Any]:
    return _drawn(_beside_autograd(context, _FULL, timed=True), "seconds")


def projected(context: Context) -> dict[str, Any]:
    """Fig. 7b: the latency that the FLOPs of each step stand for, full network."""
    return _drawn(_projected(_beside_autograd(context, _FULL, timed=False)), "projected")


def projected_pruned(context: Context) -> dict[str, Any]:
    """Fig. 7c: the same for the pruned network."""
    return _drawn(_projected(_beside_autograd(context, _PRUNED, timed=False)), "projected")


def _projected(found: dict[str, Any]) -> dict[str, Any]:
    for row in found["rows"]:
        if row["kind"] in ("mm", "mv"):
            row["projected"] = row["flops"] / found["rate"]
    return found


def latencies(data: Mapping[str, Any]) -> Found:
    """Fig. 7a: the steps beside the linear scan's slowest one."""
    mm, linear = [row for row in data["rows"] if row["kind"] == "mm"], data["linear"]
    above = [row for row in mm if row["seconds"] > linear]
    within = len(mm) - len(above)
    return Found({
        "many": Ours(2 * within >= len(mm), text=f"{within} of {len(mm)} products of matrices"),
        "few": Ours(0 < len(above) < len(mm) / 2 and all(row["seconds"] > 2 * linear for row in above),
                    text=_names(above, "seconds", linear)),
        "weaker": Ours(linear / data["autograd"], unit="×"),
    })  # fmt: skip


def anomalies(data: Mapping[str, Any]) -> Found:
    """Fig. 7b and 7c: the steps projected above autograd's slowest operator."""
    most = data["autograd"]
    above = sorted((row for row in data["rows"] if row["projected"] > most), key=lambda row: -row["projected"])
    kinds, said = {row["kind"] for row in above} <= {"mm"}, _names(above, "projected", most)
    share = f"{len(data['rows']) - len(above)} of {len(data['rows'])} steps meet it; above: {said or 'none'}"
    close = all(row["projected"] <= 2 * most for row in above)
    return Found({"anomalies": Ours(len(above) if kinds else f"{len(above)}, not all products of matrices",
        other=share),
                  "close": Ours(len(above) <= 1 and close, text=share)})  # fmt: skip


def full_anomalies(data: Mapping[str, Any]) -> Found:
    return Found({"anomalies": anomalies(data).ours["anomalies"]})


def pruned_anomaly(data: Mapping[str, Any]) -> Found:
    return Found({"close": anomalies(data).ours["close"]})


def _names(rows: Sequence[Mapping[str, Any]], key: str, unit: float) -> str:
    return ", ".join(f"{row['step']} {row[key] / unit:.3g}×" for row in rows)


def _slowest(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    return max((row["seconds"] for row in rows if row["kind"] == kind), default=float("nan"))


def _drawn(found: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the data of a picture of latencies."""
    names = ("step", "kind", "critical", "dense", "flops", key)
    return {
        "key": key, "autograd": max(row["seconds"] for row in found["operators"]), "rate": found["rate"],
        "linear": _slowest(found["rows"], "linear") if key == "seconds" else None,
        "rows": [{name: row[name] for name in names} for row in found["rows"] if row["kind"] in ("mm", "mv")],
    }  # fmt: skip


def draw_latencies(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(width=10.5, height=5.6)
    ax, key = axes[0, 0], data["key"]
    for kind, colour, name in (("mv", harness.BLUES[2], "matrix–vector"), ("mm", harness.OURS, "matrix–matrix")):
        for critical in (True, False):
            rows = [row for row in data["rows"] if row["kind"] == kind and row["critical"] is critical]
            ax.scatter([row["dense"] for row in rows], [row[key] for row in rows], s=44, edgecolors=colour,
                       facecolors=colour if critical else "none",
                       label=f"{name}, {'on' if critical else 'off'} the critical path")  # fmt: skip
    for number, row in enumerate(row for row in data["rows"] if row["kind"] == "mm" or row[key] > data["autograd"]):
        ax.annotate(row["step"], (row["dense"], row[key]), xytext=(5, (4, -9)[number % 2]), textcoords="offset points",
                    fontsize=7)  # fmt: skip
    if data["linear"] is not None:
        ax.axhline(data["linear"], color=harness.BLUES[2], linestyle="--", label="slowest step of the linear scan")
    ax.axhline(data["autograd"], color=harness.TORCH, linestyle="--", label="PyTorch Autograd's slowest operator")
    ax.set(xscale="log", yscale="log", xlabel="multiplications of the step if its Jacobians were full",
           ylabel="time, s" if key == "seconds" else f"projected, s, at {data['rate'] / 1e9:.0f} GFLOP/s")  # fmt: skip
    return drawing


def operands(context: Context) -> dict[str, Any]:
    """Fig. 8: entries of the operands of every product of matrices."""
    rows = [row for row in _walked(context, _FULL, timed=False)["rows"] if row["kind"] == "mm"]
    return {"rows": [{name: row[name] for name in ("step", "left", "right", "flops")} for row in rows]}


def lost_sparsity(data: Mapping[str, Any]) -> Found:
    rows = data["rows"]
    dear = sorted(rows, key=lambda row: -row["flops"])[:3]
    full = {row["step"] for row in sorted(rows, key=lambda row: -min(row["left"], row["right"]))[:3]}
    share = 100 * sum(row["flops"] for row in dear) / sum(row["flops"] for row in rows)
    said = "; ".join(f"{row['step']}: {row['left']:.2g}, {row['right']:.2g}" for row in dear)
    return Found({"cause": Ours({row["step"] for row in dear} == full,
        text=f"the three dearest products have the fullest "
                                f"operands ({said} entries)", other=f"{share:.1f} % of all FLOPs")})  # fmt: skip


def draw_operands(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(width=10.5, height=4.8)
    ax, rows = axes[0, 0], data["rows"]
    at = np.arange(len(rows))
    ax.bar(at - 0.2, [row["left"] for row in rows], 0.38, color=harness.OURS, label="entries of the left operand")
    ax.bar(at + 0.2, [row["right"] for row in rows], 0.38, color=harness.BLUES[1], label="entries of the right operand")
    other = ax.twinx()
    other.plot(at, [row["flops"] for row in rows], "o", color=harness.KINDS[5], label="FLOP of the product")
    ax.set(yscale="log", ylabel="stored entries", xlabel="product")
    ax.set_xticks(at, [row["step"] for row in rows])
    other.set(yscale="log", ylabel="FLOP")
    return drawing


def sparsities(context: Context) -> dict[str, Any]:
    """Fig. 9a, 9b and §5: sparsity of all matrices of the up-sweep, full and pruned."""
    return {name: _matrices(_walked(context, name, timed=False)["rows"]) for name in (_FULL, _PRUNED)}


_POOLED = (0, 1, 3, 5)
"""Convolutions of VGG-11 that another one follows after a pooling, from the first on."""


def falling(data: Mapping[str, Any]) -> Found:
    full, pruned = (data[name] for name in (_FULL, _PRUNED))
    convolutions = [row["sparsity"] for row in full if row["convolution"]][::-1]
    less = [row["step"] for row, other in zip(full, pruned, strict=True) if other["sparsity"] < row["sparsity"]]
    levels = [float(np.mean([row["sparsity"] for row in pruned if row["level"] == level]))
              for level in sorted({row["level"] for row in pruned})][1:]  # fmt: skip
    return Found({
        "pooling": Ours(text=_listed(convolutions), value=all(
            a > b if number in _POOLED else np.isclose(a, b) for number, (a, b) in enumerate(pairwise(convolutions)))),
        "pruning": Ours(not less, text=", ".join(less) or "every matrix is at least as sparse"),
        "levels": Ours(all(a >= b for a, b in pairwise(levels)), text=_listed(levels)),
    })  # fmt: skip


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def overhead(data: Any) -> Found:
    """§5: entries of the Jacobians of ReLU and max-pooling; what a batch shares."""
    rng, worst, values = np.random.default_rng(0), 0.0, {}
    for layer in (nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, padding=1, rng=0)):
        x = rng.standard_normal((4, 3, 8, 8)).astype(np.float32)
        found = layer.jacobian_t(layer.forward(x)[1])
        values[type(layer).__name__] = int(np.asarray(found.data).size)
        if not isinstance(layer, nn.Conv2d):
            one = Element(found.pattern, np.ascontiguousarray(found.data.reshape(found.pattern.nnz, -1)[:, 0]))
            kept = one if isinstance(layer, nn.ReLU) else _without_zeros(one)
            worst = max(worst, kept.pattern.nnz / (x.size // len(x)))
    shared = values["Conv2d"] == conv_pattern(3, 4, input_size=(8, 8), kernel_size=3, padding=1).pattern.nnz
    return Found({"entries": Ours(worst, text=f"at most {worst:g} of the input size"),
                  "amortized": Ours(shared, text=f"{values['Conv2d']} values for any batch")})  # fmt: skip


def _matrices(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return tag, sparsity and row of Fig. 2 of the matrices of the up-sweep."""
    return [
        {"step": row["step"], "sparsity": row["sparsity"], "convolution": row["convolution"],
         "level": 0 if row["kind"] == "input" else row["level"] + 1}
        for row in rows if row["kind"] == "input" or row["kind"] == "mm"
    ]  # fmt: skip


def draw_sparsities(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(2, width=10.5, height=7.2)
    for ax, (name, rows) in zip(axes[:, 0], data.items(), strict=True):
        for number, row in enumerate(rows):
            colour = harness.KINDS[row["level"]]
            ax.scatter(number, row["sparsity"], s=46, edgecolors=colour,
                       facecolors=colour if row["convolution"] else "none")  # fmt: skip
        ax.set_xticks(range(len(rows)), [row["step"] for row in rows], rotation=60, fontsize=8)
        ax.set(ylabel="sparsity: share of zeros", title=name, ylim=(-0.05, 1.05))
        for level in sorted({row["level"] for row in rows}):
            ax.scatter([], [], edgecolors=harness.KINDS[level], facecolors="none", label=f"row L{level}" if level else
                       "row L0 (filled: convolutions)")  # fmt: skip
    axes[1, 0].set_xlabel("matrix")
    return drawing


_TIMED = {"draw": draw_latencies, "needs": ("torch",)}
RUNS = {
    "preprint-fig7a": Run(latencies, measured, seconds=155, **_TIMED),  # type: ignore[arg-type]
    "preprint-fig7b": Run(full_anomalies, projected, seconds=120, **_TIMED),  # type: ignore[arg-type]
    "preprint-fig7c": Run(pruned_anomaly, projected_pruned, draw=draw_latencies, seconds=360, needs=("torch", "data")),
    "preprint-fig8": Run(lost_sparsity, operands, draw=draw_operands, seconds=120),
    "preprint-fig9": Run(falling, sparsities, draw=draw_sparsities, seconds=480, needs=("data",)),
    "preprint-s5": Run(overhead),
    "preprint-kinematics": Run(kinematics, snake, seconds=15),
    "preprint-monte-carlo": Run(approximate, trade_off, seconds=30, needs=("data",)),
}
"""By the figure's name."""
