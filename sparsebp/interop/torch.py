"""A thin bridge to PyTorch: tensors without a copy, sparse CSR tensors, and weights both ways.

Functions that return tensors raise `MissingDependencyError` without PyTorch.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DTypeError, MissingDependencyError, ShapeError
from sparsebp.interop.dlpack import dlpack_arrays, from_dlpack, jacobian_from_dlpack
from sparsebp.jacobians import TransposedJacobian


def from_torch(tensor: Any) -> Array:
    """Return a tensor as an array of NumPy or CuPy that shares its memory, without the autograd graph.

    A view with a negative bit (``z.conj().imag``) is copied, as DLPack cannot describe it.

    Raises
    ------
    DeviceError
        The tensor is on a device other than the host and CUDA, or DLPack cannot describe it.
    """
    return from_dlpack(tensor.detach().resolve_neg())


def to_torch(array: Array) -> Any:
    """Return an array of NumPy or CuPy as a tensor that shares its memory; a read-only array is copied."""
    torch = _torch()
    if backend.device_of(array) == "cpu" and not array.flags.writeable:
        array = array.copy()
    return torch.from_dlpack(array)


def jacobian_to_torch(jacobian: TransposedJacobian, sample: int | None = None) -> Any:
    """Return one sample, as for `TransposedJacobian.to_scipy`, as a `torch.sparse_csr_tensor` on the values' device."""
    torch, xp = _torch(), backend.namespace(jacobian.data)
    parts = [*dlpack_arrays(jacobian)[:2], jacobian.values_of(sample)]
    indptr, indices, values = (to_torch(xp.ascontiguousarray(part)) for part in parts)
    # a pattern is valid by construction
    return torch.sparse_csr_tensor(indptr, indices, values, size=jacobian.shape, check_invariants=False)


def jacobian_from_torch(tensor: Any) -> TransposedJacobian:
    """Return a `torch.sparse_csr_tensor` as a `TransposedJacobian` with shared values, without a copy.

    Raises
    ------
    PatternError, DTypeError
        The tensor is not canonical, or its values are neither float32 nor float64.
    """
    rows, columns = tensor.shape
    return jacobian_from_dlpack(tensor.crow_indices(), tensor.col_indices(), tensor.values().detach(), (rows, columns))


def load_from_torch(layer: Any, module: Any) -> None:
    """Copy the weights of a `torch.nn.Module`, or its ``state_dict()``, into a layer with the same names and shapes.

    The layer keeps its dtype and device; half precision is converted to it, which changes no value.

    Raises
    ------
    DTypeError, ShapeError
        The weights do not fit; nothing is converted silently.
    """
    state = module.state_dict() if hasattr(module, "state_dict") else module
    detached = {name: tensor.detach() for name, tensor in state.items()}
    layer.load_state_dict({name: t if backend.is_half(t) else from_torch(t) for name, t in detached.items()})


def load_into_torch(module: Any, layer: Any) -> None:
    """Copy the weights of a layer or model into a torch module with the same names and shapes.

    Raises
    ------
    DTypeError, ShapeError
        Names, shapes or dtypes differ; nothing is changed then.
    """
    torch = _torch()
    ours, theirs = layer.state_dict(), module.state_dict()
    if ours.keys() != theirs.keys():
        raise ShapeError("The weights have different names", expected=f"{sorted(theirs)}", got=f"{sorted(ours)}")
    for name, array in ours.items():
        there = theirs[name]
        if tuple(array.shape) != tuple(there.shape):
            raise ShapeError(f"{name} has another shape", expected=tuple(there.shape), got=array.shape)
        if np.dtype(array.dtype).name != str(there.dtype).removeprefix("torch."):
            raise DTypeError(f"{name} has another dtype", expected=there.dtype, got=array.dtype,
                             remedy="Nothing is converted silently")  # fmt: skip
    with torch.no_grad():
        for name, array in ours.items():
            theirs[name].copy_(to_torch(array))


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("PyTorch is not installed, and this bridge needs it",
                                     remedy="Install the extra: pip install 'sparsebp[torch]'") from error  # fmt: skip
    return torch
