"""Draws the picture of "Is my RNN chaotic?" into docs/images: ``PYTHONPATH=. python docs/make_analysis_image.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import sparsebp as sb
from benchmarks import harness

FOLDER = Path(__file__).parent / "images"
UNITS, SAMPLES = 100, 3
GAINS = np.linspace(0.5, 3, 21)
FLOWS = ((0.8, "#166534"), (1.0, "#1e40af"), (1.3, "#9a3412"), (2.0, "#7e22ce"))


def random_network(gain: float) -> sb.nn.RNN:
    """Return h <- tanh(gain · W h), W random of spectral radius about 1."""
    model = sb.nn.RNN(1, UNITS, bias=False, dtype=np.float64, rng=0)
    weight = np.random.default_rng(0).standard_normal((UNITS, UNITS)) / np.sqrt(UNITS)
    model.params["weight_hh_l0"][...] = gain * weight
    return model


def main() -> None:
    """Draw the exponents over the gain, and how gradients flow back."""
    drawing, axes = harness.figure(1, 2, width=10.5, height=4.0)
    still = np.zeros((600, SAMPLES, 1))
    found = [sb.lyapunov(random_network(gain), still, k=10, warm_up=200).mean for gain in GAINS]
    left, right = axes[0]
    left.axhline(0, color="#888888", linewidth=0.8)
    for number, values in enumerate(np.transpose(found)):
        left.plot(GAINS, values, color="#1e40af" if number == 0 else "#93c5fd", linewidth=2 if number == 0 else 1)
    left.set_xlabel("gain g")
    left.set_ylabel("Lyapunov exponents, a step")
    left.set_title("h ← tanh(g W h): the ten largest exponents", fontsize=10)
    rng = np.random.default_rng(1)
    for gain, colour in FLOWS:
        model = random_network(gain)
        h0 = rng.uniform(-1, 1, (1, SAMPLES, UNITS))
        _, settled = model.forward(still[:200], h0)
        sb.gradient_flow(model, still[:100], settled.h_n).plot(right, f"g = {gain}", color=colour)
    right.set_title("and what is left of a gradient on its way back", fontsize=10)
    right.legend(fontsize=8)
    harness.save_picture(drawing, FOLDER / "chaos.png")


if __name__ == "__main__":
    main()
