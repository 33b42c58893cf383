"""A layer of your own with its sparse Jacobian

One step of the Lorenz-96 model, dxᵢ/dt = (xᵢ₊₁ − xᵢ₋₂) xᵢ₋₁ − xᵢ + 8, becomes a layer. Its Jacobian has four entries
per variable on a fixed pattern, and a chain of such layers multiplies these sparsely.

More: [Write a layer](../how-to/write-a-layer.md)
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp

import sparsebp as sb

N, DT = 40, 0.01
rows = np.repeat(np.arange(N), 4)  # inputs j, which reach the outputs j, j - 1, j + 1 and j + 2
columns = (rows + np.tile([0, -1, 1, 2], N)) % N
order = np.lexsort((columns, rows))  # of the entries in CSR
PATTERN = sb.SparsityPattern.from_scipy(sp.csr_array((np.ones(4 * N), (rows, columns))))


class Lorenz96(sb.nn.Layer):
    """x + dt · ((xᵢ₊₁ − xᵢ₋₂) xᵢ₋₁ − xᵢ + 8)."""

    def forward(self, x):
        left, right, far = (np.roll(x, shift, axis=-1) for shift in (1, -1, 2))
        return x + DT * ((right - far) * left - x + 8), x

    def input_grad(self, gy, x):
        return self.jacobian_t(x).vjp(gy)

    def jacobian_t(self, x):
        far_left, left, right, far_right = (np.roll(x, shift, axis=-1) for shift in (2, 1, -1, -2))
        slopes = np.stack([1 - DT + 0 * x, DT * far_left, DT * (far_right - left), -DT * right], axis=-1)  # (B, N, 4)
        return sb.TransposedJacobian(PATTERN, np.ascontiguousarray(slopes.reshape(len(x), -1)[:, order].T))


x = 8 + np.random.default_rng(0).standard_normal((2, N))
chains = {steps: sb.nn.Sequential(*(Lorenz96() for _ in range(steps))) for steps in (1, 2, 4)}
jacobians = {steps: sb.jacobian_t(chain, x) for steps, chain in chains.items()}

figure, axes = plt.subplots(1, 3, figsize=(9, 3.4))
for ax, (steps, jacobian) in zip(axes, jacobians.items(), strict=True):
    ax.spy(jacobian.to_scipy(0), markersize=2, precision="present")
    ax.set_title(f"{steps} step{'s' * (steps > 1)}: {jacobian.pattern.nnz} entries", fontsize=9)

plt.show()
