"""Lyapunov spectrum of an RNN

A random network h ← tanh(g W h) forgets its state for a small gain g and is chaotic for a large one. The sparse
Jacobians of its steps give all Lyapunov exponents; the largest one decides.

More: [Is my RNN chaotic?](../explanation/is-my-rnn-chaotic.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

UNITS = 60
weight = np.random.default_rng(0).standard_normal((UNITS, UNITS)) / np.sqrt(UNITS)
no_input = np.zeros((500, 2, 1))  # 500 steps of two samples


def random_network(gain):
    """Return h <- tanh(gain W h)."""
    rnn = sb.nn.RNN(1, UNITS, bias=False, dtype=np.float64, rng=0)
    rnn.params["weight_hh_l0"][...] = gain * weight
    return rnn


spectra = {gain: sb.lyapunov(random_network(gain), no_input, warm_up=200) for gain in (0.7, 1.5, 3.0)}

plt.axhline(0, color="gray", linewidth=0.8)
for gain, spectrum in spectra.items():
    verdict = "chaotic" if spectrum.largest > 0 else "forgets"
    label = f"g = {gain}: largest {spectrum.largest:+.2f}, {verdict}"
    plt.plot(np.arange(1, UNITS + 1), spectrum.mean, ".-", label=label)
plt.xlabel("number of the exponent")
plt.ylabel("growth per step")
plt.legend()

plt.show()
