"""Multigrid: the Galerkin product on a kept pattern

A coarse grid's matrix is PᵀAP. Its pattern stays when the coefficients of A change, so both products are planned once
and then compute values only.

More: [Multigrid with new coefficients](../how-to/multigrid.md)
"""

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
from scipy.sparse.linalg import spsolve

import sparsebp as sb

N, M = 31, 15  # points of a row, fine and coarse
slope = sp.diags_array([1.0, -1.0], offsets=[0, -1], shape=(N + 1, N))
gradient = sp.csr_array(sp.vstack([sp.kron(slope, sp.eye_array(N)), sp.kron(sp.eye_array(N), slope)]))
halves = sp.csr_array(sp.diags_array([0.5, 1.0, 0.5], offsets=[0, -1, -2], shape=(N, N)))[:, : 2 * M : 2]
P = sp.csr_array(sp.kron(halves, halves))  # bilinear interpolation

edges = gradient.shape[0]

interpolate = sb.SparsityPattern.from_scipy(P)
pattern = sb.SparsityPattern.from_scipy(sp.csr_array(gradient.T @ gradient))
times_p = sb.plan_product(pattern, interpolate)
pt_times = sb.plan_product(interpolate.T, times_p.pattern)
restrict = P.data[interpolate.transpose_permutation]  # values of Pᵀ

rng, b = np.random.default_rng(0), np.ones(N * N)
for spread in (0.0, 0.4, 0.8):  # of the logarithms of the coefficients
    c = sp.diags_array(np.exp(spread * rng.standard_normal(edges)))
    A = sp.csr_array(gradient.T @ c @ gradient)  # -div(c grad)
    coarse = pt_times.pattern.to_scipy(pt_times(restrict, times_p(A.data, P.data)))  # values only
    x, damping, norms = np.zeros(N * N), 0.7 / A.diagonal(), []
    for _ in range(12):  # two-grid cycles
        x += damping * (b - A @ x)
        x += P @ spsolve(sp.csc_array(coarse), P.T @ (b - A @ x))
        x += damping * (b - A @ x)
        norms.append(np.linalg.norm(b - A @ x) / np.linalg.norm(b))
    plt.semilogy(norms, ".-", label=f"coefficients exp({spread} · normal)")
plt.xlabel("two-grid cycle")
plt.ylabel("relative residual")
plt.legend()

plt.show()
