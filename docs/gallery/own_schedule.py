"""A schedule of your own

A schedule is a list of actions for each worker: F, I and W are a stage's forward, input gradient and weight gradient
of a micro-batch. This one puts weight gradients last; it is checked, simulated and drawn.

More: [Write your own schedule](../how-to/write-a-schedule.md)
"""

import matplotlib.pyplot as plt

from sparsebp.schedule import Costs, Schedule, StepGraph, gantt, parse, simulate
from sparsebp.schedule.builders import one_f_one_b

workers = [
    "0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2",
    "1F0 1F1 1I0 1F2 1I1 1W0 1I2 1W1 1W2",
    "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2W1 2W2",
]
graph = StepGraph(stages=3, microbatches=3)
own = Schedule.of(graph, [[parse(cell) for cell in cells.split()] for cells in workers], name="weight gradients last")
usual = one_f_one_b(workers=3, stages=3, microbatches=3, input_gradient=True)
costs = Costs({"F": 1, "I": 1, "W": 1})
simulations = [simulate(schedule, costs) for schedule in (usual, own)]

figure, axes = plt.subplots(2, 1, figsize=(6.4, 4), sharex=True)
for ax, simulation in zip(axes, simulations, strict=True):
    gantt(simulation, ax, memory=False)
axes[0].set_xlim(0, max(simulation.makespan for simulation in simulations))
axes[0].set_xlabel("")

plt.show()
