"""Sparse Jacobians of PyTorch's modules: values on a pattern that the architecture tells, without backward passes."""

from __future__ import annotations

from typing import Any

import torch

from sparsebp import backend
from sparsebp.core.errors import DTypeError
from sparsebp.interop.torch import from_torch
from sparsebp.jacobians import jacobian_t
from sparsebp.torch.arrays import on_its_stream, to_tensor
from sparsebp.torch.sparse.counterparts import layer_of


def sparse_jacobian(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the Jacobian of every sample of a batch as one `torch.sparse_csr` tensor.

    It is **the Jacobian**, not its transpose, as `torch.func.jacrev` has it, flattened: entry [b, i, j] is the
    derivative of output i of sample b with respect to its input j, both counted in C order. An entry that the
    architecture allows is stored, also where its value happens to be 0 (a ReLU that is off).

    Parameters
    ----------
    module
        A module of `torch.nn` that sparsebp has an operator for: Linear, convolutions and transposed ones, pointwise
        activations, Softmax, pooling, padding, normalisations (BatchNorm in evaluation), RNN, GRU and LSTM (their
        output sequences), Flatten, Dropout in evaluation, and Sequentials of them, whose Jacobian is the product; or a
        layer of `sparsebp.nn`. Weights are read anew at every call.
    x
        The input, with a batch: as the module takes it, batch first (recurrent modules: as their ``batch_first`` says).
        float32 or float64, the module's.

    Returns
    -------
    torch.Tensor
        ``torch.sparse_csr`` of shape (B, n_out, n_in), on the device of x, without an autograd graph; ``J[b]`` is the
        matrix of sample b, as PyTorch's sparse products take it. int32 indices, the same for every sample. Where the
        values do not depend on x (a convolution), they are there once, and all samples share them: do not write to
        them.

    Raises
    ------
    OptionError
        There is no operator for this module, or its samples depend on each other (batch statistics).
    ShapeError, DTypeError, DeviceError
        x has no batch axis, or does not fit the module.
    MemoryLimitError
        An operator without a pattern of its own would take more than 2 GiB.

    See Also
    --------
    sparsebp.jacobian_t : the transposed Jacobian as scans take it, with products, `vjp` and `jvp`.

    Examples
    --------
    >>> import torch, sparsebp.torch as st
    >>> J = st.sparse_jacobian(torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(4, 3, 16, 16))
    >>> tuple(J.shape), J[0].layout
    ((4, 2048, 768), torch.sparse_csr)
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.float64):
        raise DTypeError("x is no tensor of floats", expected="a torch.Tensor, float32 or float64",
                         got=getattr(x, "dtype", type(x).__name__),
                         remedy="Convert it with .float(), or use sparsebp.jacobian_t for arrays")  # fmt: skip
    layer = layer_of(module)
    with on_its_stream(x):
        found = jacobian_t(layer, from_torch(x))
        jacobian, batch = found.T, x.shape[layer.batch_axes[0]]
        xp = backend.namespace(jacobian.data)
        indptr, indices = (to_tensor(array.copy()) for array in jacobian.pattern.device_arrays(xp))
        if jacobian.batch is None:
            values = to_tensor(jacobian.data).expand(batch, -1)
        else:
            values = to_tensor(xp.ascontiguousarray(jacobian.data.T))
    return torch.sparse_csr_tensor(
        indptr.expand(batch, -1), indices.expand(batch, -1), values, size=(batch, *jacobian.shape),
        check_invariants=False,  # a pattern is valid by construction
    )  # fmt: skip
