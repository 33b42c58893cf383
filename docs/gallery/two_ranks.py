"""A pipeline on two ranks

Two ranks train one model in the order of 1F1B: each has half of the stages and passes activations and gradients on.
Here the ranks are threads of one process; under `mpiexec` the same program runs over MPI.

More: [Train with many workers](../how-to/many-workers.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb
from sparsebp.comm.threads import run_ranks

rng = np.random.default_rng(0)
x = rng.standard_normal((256, 40)).astype(np.float32)
target = (x[:, :4]).argmax(axis=1)


def train(transport):
    """Return the losses of 40 steps, on one rank of several or, without a transport, alone."""
    model = sb.nn.Sequential(
        sb.nn.Linear(40, 64, rng=0), sb.nn.ReLU(), sb.nn.Linear(64, 64, rng=1), sb.nn.ReLU(), sb.nn.Linear(64, 4, rng=2)
    )
    trainer = sb.train.Trainer(
        model, sb.nn.CrossEntropyLoss(), sb.optim.Adam(model.parameters(), lr=3e-3), accumulate=4,
        schedule="conventional" if transport is None else "1f1b", transport=transport, rng=0,
    )  # fmt: skip
    return trainer.fit((x, target), epochs=10, batch_size=64).loss


alone = train(None)
first_rank, second_rank = run_ranks(2, train)
plt.plot(alone, "o", fillstyle="none", label="one worker")
plt.plot(first_rank, ".-", label="two ranks, 1F1B")
plt.xlabel("step")
plt.ylabel("cross-entropy")
plt.legend()

plt.show()
