"""The Jacobian of a convolutional network

The transposed Jacobian of a convolution, a ReLU and a max-pooling is sparse, and so is their product. The pattern is
known before any input: places stay in it where a ReLU is off or another pixel won the pooling.

More: [Jacobians of convolutions](../explanation/jacobians-of-convolutions.md)
"""

import matplotlib.pyplot as plt
import numpy as np

import sparsebp as sb

model = sb.nn.Sequential(sb.nn.Conv2d(1, 3, 3, padding=1, dtype=np.float64, rng=0), sb.nn.ReLU(), sb.nn.MaxPool2d(2))
x = np.random.default_rng(0).standard_normal((2, 1, 10, 10))

parts, value = [], x
for layer in model:
    parts.append(sb.jacobian_t(layer, value))
    value = layer(value)
whole = sb.jacobian_t(model, x)

figure, axes = plt.subplots(1, 4, figsize=(9, 3.4), width_ratios=[3, 3, 1.2, 1.2])
for ax, jacobian, name in zip(axes, [*parts, whole], ["convolution", "ReLU", "pooling", "their product"], strict=True):
    matrix = jacobian.to_scipy(0 if jacobian.batch else None)
    ax.spy(matrix, markersize=0.8, precision="present")
    ax.set_title(f"{name}\n{matrix.shape[0]} × {matrix.shape[1]}, {jacobian.pattern.nnz} entries", fontsize=8)
    ax.set(xticks=[], yticks=[])

plt.show()
