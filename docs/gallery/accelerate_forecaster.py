"""Accelerate a PyTorch forecaster

A GRU learns to predict the next value of two mixed waves. `st.accelerate` moves its recurrent layer to sparsebp's
kernels: the same module, parameters and optimizer, and `st.explain` says which calls they take.

More: [Accelerate a PyTorch model](../how-to/accelerate-pytorch.md)
"""

import matplotlib.pyplot as plt
import torch

import sparsebp.torch as st

torch.manual_seed(0)
time = torch.arange(1200.0)
series = torch.sin(time / 5) + 0.5 * torch.sin(time / 17) + 0.1 * torch.randn(1200)
windows = series.unfold(0, 101, 1)  # every run of 101 values
x, target = windows[:, :-1].T.unsqueeze(-1), windows[:, 1:].T.unsqueeze(-1)  # (T, B, 1); the value that comes next
train, test = slice(0, 900, 9), slice(1000, 1100)

model = torch.nn.ModuleDict({"gru": torch.nn.GRU(1, 24), "head": torch.nn.Linear(24, 1)})
st.accelerate(model)
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(80):
    adam.zero_grad()
    forecast = model["head"](model["gru"](x[:, train])[0])
    loss = torch.nn.functional.mse_loss(forecast, target[:, train])
    loss.backward()
    adam.step()

with torch.no_grad():
    forecast = model["head"](model["gru"](x[:, test])[0])[-1, :, 0]
truth, last_value = target[-1, test, 0], x[-1, test, 0]
explained = st.explain(model["gru"], x[:, train])

plt.plot(truth, ".", color="gray", label="measured")
plt.plot(forecast, label=f"GRU, rms error {(forecast - truth).square().mean().sqrt():.2f}")
plt.plot(last_value, ":", label=f"the last value, rms error {(last_value - truth).square().mean().sqrt():.2f}")
plt.xlabel("step")
plt.legend()

plt.show()
