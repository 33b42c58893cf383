"""Products of Jacobians by Monte Carlo (§5 of BPPSA's preprint; Drineas, Kannan and Mahoney, 2006): cost and error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.tools import images, pictures
from papers.figure import Claim, Context, Figure, Found

SHARES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Of the inner columns that are drawn: the share of the exact product's operations."""
_TRAINED = (1.0, 1 / 2, 1 / 8, 1 / 32)


def draw_weights(sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return how much each inner column counts: drawn `count` times in proportion to its size, 1 on the mean.

    Parameters
    ----------
    sizes
        Of column k of A and row k of B, the product of their norms: the best probabilities there are (§4.2 there).
    """
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
    from papers.bppsa.steps import elements
    from sparsebp.models import vgg11

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
        Claim("error of the product over what the source's Lemma 4 expects, at most off by", "1 on the mean",
              f"{worst:.0%}", worst < 0.2, "" if worst < 0.2 else "Few trials", ran),
        Claim("an eighth of the cost: relative error of the gradient", "noticeable", f"{eighth['gradient']:.0%}",
              eighth["gradient"] > 0.1, "", ran),
        Claim("training loss at the end, exact and at 1/2, 1/8, 1/32 of a product's cost", "a trade-off: rises",
              ", ".join(f"{ends[share]:.3f}" for share in _TRAINED), ordered,
              "" if ordered else "So few steps do not part them", trained),
    ), {"rows": rows, "curves": {f"{share:g}": curve for share, curve in curves.items()}})  # fmt: skip


def _curves(steps: int) -> dict[float, list[float]]:
    from sparsebp.data import load_mnist_images

    data, _ = load_mnist_images(test=500)
    given = [data.batch(chosen) for chosen in images.batches(len(data), 32, 0, steps)]
    return {share: train(given, share) for share in _TRAINED}


def train(given: Sequence[tuple[np.ndarray, np.ndarray]], share: float, width: int = 64) -> list[float]:
    """Train with products of which `share` of the inner columns is drawn anew at each step; return the losses.

    The scan multiplies the Jacobians of the linear layers 5 and 4, and of 3 and 2 (each with its ReLU). A sampled
    product weighs its inner units, so the gradients behind it are off, and those within it are not.
    """
    from sparsebp import nn, optim

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
    """Draw error over cost, and the losses."""
    drawing, axes = pictures.figure(1, 2, width=11.6, height=4.4)
    left, right = axes[0]
    shares = [row["share"] for row in data["rows"]]
    left.loglog(shares, [row["error"] for row in data["rows"]], "o-", color="#1e40af", label="product")
    left.loglog(shares, [row["gradient"] for row in data["rows"]], "s-", color="#059669", label="gradient behind it")
    left.loglog(shares, [row["expected"] for row in data["rows"]], "--", color="black", label="product, expected")
    left.set(xlabel="share of the exact product's operations", ylabel="relative error (root mean square)")
    left.set_xticks(shares, [f"1/{round(1 / share)}" for share in shares])
    left.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    for share, curve in data["curves"].items():
        means = np.convolve(curve, np.ones(10) / 10, mode="valid") if len(curve) > 10 else curve
        right.plot(means, linewidth=1.3, label="exact" if float(share) == 1 else f"{float(share):.3g} of the cost")
    right.set(xlabel="step", ylabel="training loss, mean of 10 steps")
    right.grid(alpha=0.3)
    right.legend(fontsize=8)
    return drawing


FIGURES = (
    Figure(
        name="preprint-monte-carlo",
        paper="Preprint",
        source="§5",
        kind="executed",
        seconds=30,
        run=trade_off,
        draw=draw_trade_off,
        needs=("data",),
        states="approximate products by sampling: cheaper, with errors in the gradients",
    ),
)
