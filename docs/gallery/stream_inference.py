"""Inference on a stream

Samples of a signal arrive one by one, and a GRU predicts the next. A stream keeps the state between the steps and
allocates nothing; where the signal breaks its rhythm, the error jumps.

More: [Inference, and one step at a time](../how-to/swap-gru.md#inference-and-one-step-at-a-time)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

rng = np.random.default_rng(0)
phases = rng.uniform(0, 2 * np.pi, 32)
waves = np.sin(np.arange(61)[:, None] / 3 + phases)[:, :, None].astype(np.float32)  # (T + 1, B, 1)

gru, head = sb.nn.GRU(1, 16, rng=0), sb.nn.Linear(16, 1, rng=1)
model = sb.nn.Sequential(gru, head)
value_and_grad = sb.value_and_grad(model, sb.nn.MSELoss())
adam = sb.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(150):
    _, grads = value_and_grad(waves[:-1], waves[1:])
    adam.step(grads)

BREAK = 90
t = np.arange(160)
signal = np.sin(t / 3 + 2.0 * (t >= BREAK)).astype(np.float32)[:, None]  # (T, 1)
stream = gru.stream()
predictions = [head(gru.step(x_t, stream)[None])[0] for x_t in signal]
errors = np.abs(signal[1:] - predictions[:-1])[:, 0]

figure, axes = plt.subplots(2, 1, sharex=True)
axes[0].plot(signal, ".", label="signal")
axes[0].plot(t[1:], predictions[:-1], label="predicted one step ahead")
axes[0].set_ylim(-2.6, 1.8)
axes[0].legend(loc="lower left", ncols=2)
axes[1].plot(t[1:], errors)
axes[1].set_xlabel("step")
axes[1].set_ylabel("error")

plt.show()
