"""Draws the documentation's pictures of scans into docs/images: ``python docs/make_images.py``."""

from __future__ import annotations

from pathlib import Path

import sparsebp as sb
from sparsebp.bench import report

FOLDER = Path(__file__).parent / "images"
SIZE = 3
"""Size of the dense blocks that the drawn scans run over; the pictures show products, not sizes."""


def scan_plan(n: int, algorithm: str, **options: int) -> sb.ScanPlan:
    """Plan a scan over n dense blocks."""
    return sb.plan_scan([sb.SparsityPattern.dense(SIZE, SIZE)] * n, algorithm=algorithm, batch=16, **options)


def main() -> None:
    """Draw every picture."""
    drawing, axes = report.figure(1, 2, width=10.5, height=5.2)
    for ax, algorithm, title in (
        (axes[0, 0], "linear", "Back-propagation: a chain"),
        (axes[0, 1], "blelloch", "The same gradients by a scan: a tree"),
    ):
        plan = scan_plan(15, algorithm)
        plan.plot(ax)
        ax.set_title(f"{title}\n15 Jacobians, {len(plan.critical_path)} dependent steps", fontsize=10)
    report.save_figure(drawing, FOLDER / "scan-trees.png")
    for name, n, algorithm, options in (
        ("blelloch", 7, "blelloch", {}),
        ("hybrid", 15, "hybrid", {"up_levels": 2}),
        ("chunked", 15, "chunked", {"workers": 4}),
    ):
        drawing, axes = report.figure(1, 1, width=8.0, height=4.6)
        scan_plan(n, algorithm, **options).plot(axes[0, 0])
        report.save_figure(drawing, FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
