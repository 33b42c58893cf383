"""Least squares: restore 100 000 samples

A sensor smears a signal and saturates, and 1 % of its readings are wrong. A robust loss ignores these, and the sparse
normal equations are planned once.

More: [Fit a model with 10⁵ parameters](../how-to/least-squares.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

n, rng = 100_000, np.random.default_rng(0)
t = np.linspace(0, 1, n)
true = np.sign(np.sin(40 * t)) * (0.5 + t) + 0.3 * np.sin(7 * t)


def sensor(x):
    """Return the readings: each of three neighbours, saturated."""
    return np.tanh(0.25 * x[:-2] + 0.5 * x[1:-1] + 0.25 * x[2:])


readings = sensor(true) + 0.05 * rng.standard_normal(n - 2)
wrong = rng.random(n - 2) < 0.01
readings[wrong] = rng.uniform(-3, 3, wrong.sum())


def residuals(x):
    """Return what differs from the readings, and how fast the signal changes."""
    return np.concatenate([(sensor(x) - readings) / 0.05, 20 * (x[1:] - x[:-1])])


found = sb.least_squares(residuals, np.zeros(n), loss="soft_l1", ftol=1e-4)
print(found.message, found.nfev, "evaluations")

shown = slice(None, None, 100)
plt.plot(t[1:-1][shown], readings[shown], ".", color="#93c5fd", label="readings")
plt.plot(t[shown], true[shown], color="#d97706", linewidth=4, alpha=0.6, label="true signal")
plt.plot(t[shown], found.x[shown], color="#1e40af", linewidth=1, label="fit")
plt.xlabel("time (100 000 samples)")
plt.ylim(-3, 3)
plt.legend(loc="upper left")

plt.show()
