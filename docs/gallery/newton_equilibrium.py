"""Newton's method with a sparse Jacobian

The equilibrium z = net(z + x) of a PyTorch network is the root of a residual with one equation per pixel. Newton's
method takes its Jacobian from `st.sparse_jacobian` and solves each step with SciPy.

More: [Jacobians of PyTorch modules](../how-to/pytorch-jacobians.md)
"""

import matplotlib.pyplot as plt
import scipy.sparse as sp
import torch
from scipy.sparse.linalg import spsolve

import sparsebp.torch as st

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3, padding=1), torch.nn.Tanh()).double()
net.requires_grad_(False)
net[0].weight.mul_(0.98 / net[0].weight.abs().sum())  # a contraction: one equilibrium, slow to reach
x = 0.3 * torch.randn(1, 1, 32, 32, dtype=torch.float64)


def newton_step(z, residual):
    """Solve (I - J) step = residual."""
    J = st.sparse_jacobian(net, z + x)[0]  # (1024, 1024), about nine entries per row
    J = sp.csr_array((J.values().numpy(), J.col_indices().numpy(), J.crow_indices().numpy()), shape=J.shape)
    step = spsolve(sp.csc_array(sp.eye_array(x.numel()) - J), residual.flatten().numpy())
    return torch.from_numpy(step).reshape(x.shape)


norms = {}
for name, step in (("Newton", newton_step), ("z ← net(z + x)", lambda z, residual: residual)):
    z, norms[name] = torch.zeros_like(x), []
    for _ in range(7 if name == "Newton" else 40):
        residual = z - net(z + x)
        norms[name].append(residual.norm().item())
        z = z - step(z, residual)
    plt.semilogy(norms[name], ".-", label=name)
plt.xlabel("step")
plt.ylabel("norm of the residual")
plt.legend()

plt.show()
