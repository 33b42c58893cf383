"""Optimizer fusion: move the updates

An update may run right after its gradient (backward-fusion) or just before the next forward (forward-fusion). The
results are bitwise equal, and on a second stream a step becomes shorter.

More: [Fuse the optimizer, accumulate, reorder a step](../how-to/order-of-a-step.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb
from sparsebp.schedule import Costs, gantt, simulate
from sparsebp.schedule.builders import conventional, place_updates

x = np.random.default_rng(0).standard_normal((64, 10), dtype=np.float32)
target = np.arange(64) % 3


def train(fusion):
    """Return the parameters after eight steps."""
    model = sb.nn.Sequential(sb.nn.Linear(10, 32, rng=0), sb.nn.ReLU(), sb.nn.Linear(32, 3, rng=1))
    adam = sb.optim.Adam(model.parameters(), lr=1e-2)
    trainer = sb.train.Trainer(model, sb.nn.CrossEntropyLoss(), adam, fusion=fusion, rng=0)
    trainer.fit((x, target), epochs=2, batch_size=16)
    return model.parameters()


trained = {fusion: train(fusion) for fusion in ("none", "forward", "backward")}

usual = conventional(stages=4, input_gradient=True)
orders = [usual, place_updates(usual, "forward"), place_updates(usual, "backward", stream="update")]
costs = Costs({"F": 1, "I": 0.5, "W": 0.5, "U": 1})
simulations = [simulate(order, costs) for order in orders]
figure, axes = plt.subplots(3, 1, figsize=(6.4, 4.4), height_ratios=[1, 1, 2])
for ax, simulation in zip(axes, simulations, strict=True):
    gantt(simulation, ax, memory=False)
    ax.set_xlim(0, simulations[0].makespan)
    ax.set_xlabel("")

plt.show()
