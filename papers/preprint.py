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
from papers.figure import Claim, Context, Figure, Found, at_least, claim, judged
from sparsebp import nn, optim
from sparsebp.core import timing
from sparsebp.data import load_mnist_images
from sparsebp.models import vgg11
from sparsebp.patterns import SparsityPattern
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
    chain: Sequence[Element], *, timed: bool, note: Callable[[str], None] = lambda line: None
) -> list[dict[str, Any]]:
    """Go through Algorithm 1 and return a row for every product, and for every Jacobian that it starts from."""
    steps = recipe("blelloch", len(chain)).steps
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

    def joints_at(self, angles: np.ndarray) -> np.ndarray:
        """Return where the bones end, (n + 1, 3)."""
        frame, found = np.eye(_POSE), [np.zeros(3)]
        for matrix in self.transforms(angles)[0]:
            frame = frame @ matrix
            found.append(frame[:3, 3])
        return np.array(found)


@lru_cache(maxsize=8)
def _plan(way: Any, joints: int) -> Any:
    from sparsebp import SparsityPattern, plan_scan

    return plan_scan([SparsityPattern.dense(_POSE, _POSE)] * joints, way, dtype=np.float64, shared=[True] * joints)


def snake(context: Context) -> Found:
    """Reach for a target, and time the gradient's chain for growing numbers of joints."""
    from scipy.optimize import minimize

    joints = 50 if context.quick else 1000
    angles = np.random.default_rng(0).normal(scale=0.02, size=joints)
    scan, bp = (Skeleton(joints, way) for way in ("blelloch", "linear"))
    (value, gradient), (_, exact) = scan.value_and_gradient(angles), bp.value_and_gradient(angles)
    apart = float(np.abs(gradient - exact).max() / np.abs(exact).max())
    some = [0, joints // 2, joints - 1]
    differences = [_kinematics_difference(scan, angles, joint) for joint in some]
    off = float(np.abs(gradient[some] - differences).max() / np.abs(exact).max())
    found = minimize(scan.value_and_gradient, angles, jac=True, method="L-BFGS-B", options={"maxiter": 200})
    left = float(np.linalg.norm(scan.joints_at(found.x)[-1] - _TARGET))
    counts = [10, 100] if context.quick else [10, 100, 1000, 10_000, 100_000]
    rows = [_timed(n, context.quick) for n in counts]
    dear = bppsa.path(rows[-1]["joints"], _POSE)
    least = next(n for n in range(2, 10_000) if bppsa.path(n, _POSE) < n)
    ran, longest = f"Blelloch's scan, {joints} joints, float64", rows[-1]
    why = "The tree does 4 times as many operations, and two cores run them one after the other"
    return Found((
        Claim("gradient by the scan against the sequential one: largest relative difference", "the same outputs",
              f"{apart:.1g}", apart < 1e-12, "", ran),
        Claim("gradient by the scan against finite differences, three joints", "the same", f"{off:.1g}", off < 1e-6, "",
              ran),
        Claim(f"distance of the tip from the target, before and after {found.nit} steps of L-BFGS", "not stated",
              f"{math.sqrt(2 * value):.2g}, {left:.1g}", None, "The preprint gives no numbers", ran),
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


def _kinematics_difference(skeleton: Skeleton, angles: np.ndarray, joint: int) -> float:
    values = []
    for step in (1e-5, -1e-5):
        moved = angles.copy()
        moved[joint] += step
        values.append(skeleton.value_and_gradient(moved)[0])
    return (values[0] - values[1]) / 2e-5


def _timed(n: int, quick: bool) -> dict[str, Any]:
    """Return seconds of the gradient's chain by every algorithm."""
    angles = np.random.default_rng(1).normal(scale=0.02, size=n)
    turn = Skeleton(n).transforms(angles)[0]
    calls = {way: partial(Skeleton(n, way).back, turn, np.ones(_POSE)) for way in _WAYS}
    rounds = {"rounds": 3, "least_rounds": 2, "warmup": 1, "budget": 0.1} if quick else {"rounds": 15, "budget": 3.0}
    found = timing.measure(calls, **rounds)  # type: ignore[arg-type]
    return {"joints": n} | {way: timed.median for way, timed in found.items()}


def draw_snake(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 2, width=10.5, height=4.6)
    left, right = axes[0]
    for name, colour in (("before", harness.PAPER), ("after", harness.OURS)):
        places = np.array(data[name])
        left.plot(places[:, 0], places[:, 1], color=colour, linewidth=2, label=name)
    left.plot(*data["target"][:2], "x", color="black", markersize=9, label="target")
    left.set(xlabel="x, lengths of the skeleton", ylabel="y, lengths of the skeleton", title="seen from above")
    left.set_aspect("equal", adjustable="datalim")
    names = {"linear": "one joint after the other", "chunked": "chunked scan", "blelloch": "Blelloch's scan"}
    for way, colour in zip(_WAYS, (harness.BLUES[1], harness.BLUES[2], harness.OURS), strict=True):
        right.loglog([row["joints"] for row in data["rows"]], [row[way] * 1e3 for row in data["rows"]], "o-",
                     color=colour, label=names[way])  # fmt: skip
    right.set(xlabel="number of joints", ylabel="gradient at all joints, ms")
    return drawing


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


def trade_off(context: Context) -> Found:
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
    ends = {share: float(np.mean(curves[share][-20:])) for share in _TRAINED}
    worst = max(abs(row["error"] / row["expected"] - 1) for row in rows)
    eighth = next(row for row in rows if row["share"] == 1 / 8)
    ordered = all(ends[a] < ends[b] for a, b in pairwise(_TRAINED))
    ran = f"columns drawn by their norms, {len(sizes)}×{len(sizes)} Jacobians of VGG-11's last convolutions"
    trained = "MLP of 6 layers on digits, SGD; products of pairs of Jacobians sampled, all else exact"
    return Found((
        judged("error of the product over what the source's Lemma 4 expects, at most off by", "1 on the mean",
               f"{worst:.0%}", worst < 0.2, "Few trials", ran),
        Claim("an eighth of the cost: relative error of the gradient", "noticeable", f"{eighth['gradient']:.0%}",
              eighth["gradient"] > 0.1, "", ran),
        judged("training loss at the end, exact and at 1/2, 1/8, 1/32 of a product's cost", "a trade-off: rises",
               ", ".join(f"{ends[share]:.3f}" for share in _TRAINED), ordered, "So few steps do not separate them",
               trained),
    ), {"rows": rows, "curves": {f"{share:g}": curve for share, curve in curves.items()}})  # fmt: skip


def _curves(steps: int) -> dict[float, list[float]]:
    data, _ = load_mnist_images(test=500)
    given = [data.batch(chosen) for chosen in workloads.batches(len(data), 32, 0, steps)]
    return {share: train(given, share) for share in _TRAINED}


def train(given: Sequence[tuple[np.ndarray, np.ndarray]], share: float, width: int = 64) -> list[float]:
    """Train with products of which `share` of the inner columns is drawn anew at each step; return the losses.

    The scan multiplies the Jacobians of the linear layers 5 and 4, and of 3 and 2 (each with its ReLU). A sampled
    product weighs its inner units, so the gradients behind it are off, and those within it are not.
    """
    rng = np.random.default_rng(0)
    sizes = [int(np.prod(given[0][0].shape[1:])), *[width] * 5, 10]
    linear = [nn.Linear(a, b, rng=rng) for a, b in pairwise(sizes)]
    model = nn.Sequential(*linear)  # for its parameters
    optimizer, loss, relu = optim.SGD(model.parameters(), lr=0.02, momentum=0.9), nn.CrossEntropyLoss(), nn.ReLU()
    found = []
    for x, target in given:
        h, saved = x.reshape(len(x), -1), []
        for number, layer in enumerate(linear):
            h, kept = layer.forward(h)
            gate = None
            if number < len(linear) - 1:
                h, gate = relu.forward(h)
            saved.append((kept, gate))
        value, kept_loss = loss.forward(h, target)
        found.append(float(value))
        gy, weights = loss.input_grad(kept_loss), dict[int, np.ndarray]()
        grads: dict[str, np.ndarray] = {}
        if share < 1:
            for inner in (4, 2):  # unit of W_inner+1ᵀ · D · W_innerᵀ: column of the one, row of the other
                a, b = (layer.params["weight"] for layer in (linear[inner - 1], linear[inner]))
                weights[inner] = draw_weights(column_sizes(a.T, b.T), max(round(share * width), 1), rng)
        late: np.ndarray | None = None
        for number in reversed(range(len(linear))):
            kept, gate = saved[number]
            if gate is not None:
                gy = relu.input_grad(gy, gate)
                late = None if late is None else relu.input_grad(late, gate)
            grads |= {f"{number}.{name}": g for name, g in linear[number].weight_grad(gy, kept).items()}
            if number in weights:  # the down-sweep gives the inner gradient; what is behind gets the sampled product's
                late = linear[number].input_grad(gy, kept) * weights[number].astype(gy.dtype)
                gy = linear[number].input_grad(gy, kept)
            elif late is not None:
                gy, late = linear[number].input_grad(late, kept), None
            else:
                gy = linear[number].input_grad(gy, kept)
        optimizer.step(grads)
    return found


def draw_trade_off(data: Mapping[str, Any]) -> Any:
    drawing, axes = harness.figure(1, 2, width=10.5, height=4.4)
    left, right = axes[0]
    shares = [row["share"] for row in data["rows"]]
    left.loglog(shares, [row["error"] for row in data["rows"]], "o-", color=harness.OURS, label="product")
    left.loglog(
        shares,
        [row["gradient"] for row in data["rows"]],
        "s-",
        color=harness.KINDS[2],
        label="gradient computed from it",
    )
    left.loglog(shares, [row["expected"] for row in data["rows"]], "--", color="black", label="product, expected")
    left.set(xlabel="share of the exact product's operations", ylabel="relative error (root mean square)")
    left.set_xticks(shares, [f"1/{round(1 / share)}" for share in shares])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    for (share, curve), colour in zip(data["curves"].items(), harness.KINDS, strict=False):
        means = np.convolve(curve, np.ones(10) / 10, mode="valid") if len(curve) > 10 else curve
        label = "exact" if float(share) == 1 else f"1/{round(1 / float(share))} of the cost"
        right.plot(means, linewidth=1.3, color=colour, label=label)
    right.set(xlabel="training step", ylabel="training loss, nats, mean of 10 steps")
    return drawing


_RAN = "Blelloch's scan, every level, one image, float32; max-pooling stored as in Alg. 8–10"
_FULL, _PRUNED = "VGG-11", "97 % pruned VGG-11"


# ---- the scan over VGG-11, step by step ------------------------------------------------------------------------------


def _walked(context: Context, name: str, *, timed: bool) -> dict[str, Any]:
    """Return the rows of a network's scan and of autograd's operators; several figures rest on one walk."""
    for key in (f"{name}, timed", *(() if timed else (name,))):
        if key in context.results:
            return context.results[key]  # type: ignore[return-value]
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


def measured(context: Context) -> Found:
    found = _beside_autograd(context, _FULL, timed=True)
    rows = found["rows"]
    mm = [row for row in rows if row["kind"] == "mm"]
    vectors = [row for row in rows if row["kind"] == "mv"]
    linear, autograd = _slowest(rows, "linear"), max(row["seconds"] for row in found["operators"])
    within = [row for row in mm if row["seconds"] <= linear]
    above = sorted((row for row in mm if row["seconds"] > linear), key=lambda row: -row["seconds"])
    apart = max(row["difference"] for row in vectors)
    return Found((
        judged("products of matrices that take at most the linear scan's slowest step", "many",
               f"{len(within)} of {len(mm)}", 2 * len(within) >= len(mm),
               "The linear scan's kernels are quick here too", _RAN),
        judged("those that take longer, over the linear scan's slowest step", "a few, significantly",
               ", ".join(f"{row['step']} {row['seconds'] / linear:.3g}×" for row in above),
               0 < len(above) < len(mm) / 2, "More than a few are slower than the linear scan", _RAN),
        judged("the linear scan's slowest step over autograd's: the weaker baseline", "above 1",
               f"{linear / autograd:.3g}×", linear > autograd, "Our products of a matrix and a vector are the quicker",
               "linear scan, PyTorch's BP"),
        Claim("gradients of the scan against those of the linear scan: largest relative difference", "the same outputs",
              f"{apart:.1g}", apart < 1e-4, "", _RAN),
    ), _drawn(found, "seconds"))  # fmt: skip


def projected(context: Context) -> Found:
    """Fig. 7b: the latency that the FLOPs of each step stand for, full network."""
    found = _beside_autograd(context, _FULL, timed=False)
    above, within, most = _projected(found)
    return Found((
        judged("products of matrices projected above autograd's slowest operator", "3", str(len(above)),
               len(above) == 3, "Autograd's operators and the rate are this machine's", _RAN),
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
        judged("steps projected above autograd's slowest operator: anomalies", "1", f"{len(above)}", len(above) <= 1,
               "Other weights are kept here, and products fill in", _RAN),
        judged("the anomaly over autograd's slowest operator", "close to it", _names(above, most) or "none", far < 2,
               "With the same share of every layer kept, the product of the third level is full again", _RAN),
        judged("all other steps projected at or below it", "all", f"{within} of {within + len(above)}", len(above) <= 1,
               "As above", _RAN),
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
        Claim("entries of their left and right operands", "more than any other product", shown,
              {row["step"] for row in full} == dear, "", _RAN),
        Claim("their share of the FLOPs of all products of matrices", "three anomalies", f"{share:.1%}", share > 0.9,
              "", _RAN),
    ), {"rows": [{name: row[name] for name in ("step", "left", "right", "flops")} for row in mm]})  # fmt: skip


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
        judged("matrices that are sparser in the full network than in the pruned one", "none",
               ", ".join(less) or "none", not less, "Another image: other entries of max-pooling", _RAN),
        judged("pruned: mean sparsity of the products, level by level", "falls (fill-in)",
               ", ".join(f"{value:.3f}" for value in levels[1:]), all(falls),
               "A product with a pooling's Jacobian is sparse again", _RAN),
    ), both)  # fmt: skip


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


FIGURES = (
    Figure("preprint-shared", "Fig. 1–6, Table 1, Alg. 1–10 and Eq. 5, 6", "elsewhere",
           "the scan, the Jacobians' patterns, the convergence and the complexity",
           why="They came again in the paper of 2020: see BPPSA's Fig. 1–6, Table 1, Alg. 1 and Eq. 6 and 7"),
    Figure("preprint-fig7a", "Fig. 7a and §4.3", "measured", "full VGG-11: measured latency of every step of the scan",
           run=measured, draw=draw_latencies, seconds=155, needs=("torch",), gpu=True),
    Figure("preprint-fig7b", "Fig. 7b and §4.3", "measured",
           "full VGG-11: FLOPs of every step as seconds; three anomalies", run=projected, draw=draw_latencies,
           seconds=120, needs=("torch",), gpu=True),
    Figure("preprint-fig7c", "Fig. 7c and §4.3", "measured",
           "97 % pruned VGG-11, on digits: FLOPs of every step as seconds", run=projected_pruned, draw=draw_latencies,
           seconds=360, needs=("torch", "data"), gpu=True),
    Figure("preprint-fig8", "Fig. 8", "executed", "full VGG-11: entries of the operands of every product of matrices",
           run=operands, draw=draw_operands, seconds=120),
    Figure("preprint-fig9", "Fig. 9a, 9b and §5", "executed",
           "sparsity along the up-sweep, full and 97 % pruned VGG-11 (on digits)", run=sparsities, draw=draw_sparsities,
           seconds=480, needs=("data",)),
    Figure("preprint-kinematics", "§4.2", "measured",
           "inverse kinematics of a long skeleton: more joints than dimensions", run=snake, draw=draw_snake,
           seconds=15),
    Figure("preprint-monte-carlo", "§5", "executed",
           "approximate products by sampling: cheaper, with errors in the gradients", run=trade_off,
           draw=draw_trade_off, seconds=30, needs=("data",)),
)  # fmt: skip
