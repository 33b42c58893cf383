"""A pruned VGG-11, retrained by scan

97 % of the weights of a small VGG-11 are pruned, which leaves sparse Jacobians. Retraining by a hybrid scan then gives
the losses of ordinary back-propagation.

More: [Prune and retrain by scan](../how-to/prune-and-retrain.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

rng = np.random.default_rng(0)
target = rng.integers(0, 10, 8)
x = rng.standard_normal((8, 3, 32, 32), dtype=np.float32)


def retrain(backward, **options):
    """Prune the network and return the losses of 20 steps, by this algorithm."""
    model = sb.models.vgg11(width=0.1, rng=0)
    sb.prune(model, 0.97, "class_uniform")
    model.set_backward(backward, **options)
    value_and_grad = sb.value_and_grad(model, sb.nn.CrossEntropyLoss())
    adam, losses = sb.optim.Adam(model.parameters(), lr=3e-2), []
    for _ in range(20):
        loss, grads = value_and_grad(x, target)
        adam.step(grads)
        losses.append(float(loss))
    return model, losses


model, by_scan = retrain("hybrid", up_levels=1)
_, by_bp = retrain("bp")
plt.plot(by_bp, "o", fillstyle="none", label="layer by layer")
plt.plot(by_scan, ".-", label="hybrid scan")
plt.xlabel("step")
plt.ylabel("cross-entropy")
plt.legend()

plt.show()
