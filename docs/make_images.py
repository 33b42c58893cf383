"""Draws the documentation's pictures of scans into docs/images: ``PYTHONPATH=. python docs/make_images.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparsebp as sb
from benchmarks import harness
from sparsebp.patterns import conv_pattern, pool_pattern

FOLDER = Path(__file__).parent / "images"
SIZE = 3
"""Size of the dense blocks that the drawn scans run over; the pictures show products, not sizes."""


def scan_plan(n: int, algorithm: str, **options: int) -> sb.ScanPlan:
    """Plan a scan over n dense blocks."""
    return sb.plan_scan([sb.SparsityPattern.dense(SIZE, SIZE)] * n, algorithm=algorithm, batch=16, **options)


VGG11 = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
"""VGG-11's convolutional part: channels of the convolutions, each with a ReLU, and max-poolings."""


def vgg11(density: float = 0.03) -> tuple[list[sb.SparsityPattern], list[bool], list[tuple[str, float, float]]]:
    """Return VGG-11's chain on 32×32 images with a share of the weights kept at random, the last operator first.

    Returns
    -------
    patterns, shared, operators
        Of the Jacobians, whether the batch shares their values, and of back-propagation's own operators the name, the
        FLOPs (dense, as PyTorch runs them) and the dense complexity.
    """
    rng = np.random.default_rng(0)
    chain = []
    channels, size = 3, 32
    for layer in VGG11:
        if isinstance(layer, str):
            pattern = pool_pattern(channels, (size, size), 2).pattern
            chain.append((pattern, False, ("pool", channels * size**2)))
            size //= 2
            continue
        kept = rng.random((layer, channels, 3, 3)) < density
        pattern = conv_pattern(channels, layer, (size, size), 3, padding=1, mask=kept).pattern
        chain.append((pattern, True, ("conv", 18 * layer * channels * size**2)))
        chain.append((sb.SparsityPattern.diagonal(layer * size**2), False, ("relu", layer * size**2)))
        channels = layer
    chain.reverse()
    operators = [(name, float(flops), 2.0 * p.shape[0] * p.shape[1]) for p, _, (name, flops) in chain]
    return [p for p, _, _ in chain], [shared for _, shared, _ in chain], operators


def main() -> None:
    """Draw every picture."""
    drawing, axes = harness.figure(1, 2, width=8.4, height=4.8)
    for ax, algorithm, title in (
        (axes[0, 0], "linear", "Back-propagation: a chain"),
        (axes[0, 1], "blelloch", "The same gradients by a scan: a tree"),
    ):
        plan = scan_plan(15, algorithm)
        plan.plot(ax)
        ax.set_title(f"{title}\n15 Jacobians, {len(plan.critical_path)} dependent steps", fontsize=10)
    harness.save_picture(drawing, FOLDER / "scan-trees.png")
    for name, n, algorithm, options in (
        ("blelloch", 7, "blelloch", {}),
        ("hybrid", 15, "hybrid", {"up_levels": 2}),
        ("chunked", 15, "chunked", {"chunks": 4}),
    ):
        drawing, axes = harness.figure(1, 1, width=8.0, height=4.6)
        scan_plan(n, algorithm, **options).plot(axes[0, 0])
        harness.save_picture(drawing, FOLDER / f"{name}.png")
    patterns, shared, operators = vgg11()
    plan = sb.plan_scan(patterns, "hybrid", up_levels=2, fold=False, shared=shared)
    drawing, axes = harness.figure(1, 1, width=7.5, height=4.8)
    plan.plot(axes[0, 0], kind="flops", operators=operators)
    axes[0, 0].set_title("VGG-11 with 3 % of its weights: hybrid scan, 2 levels of up-sweep, one sample", fontsize=10)
    harness.save_picture(drawing, FOLDER / "flops.png")


if __name__ == "__main__":
    main()
