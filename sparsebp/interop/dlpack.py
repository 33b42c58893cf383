"""DLPack on the three arrays of a CSR matrix, values, indices, indptr: tensors of other frameworks without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebp.core import backend
from sparsebp.core.check import Array
from sparsebp.core.errors import DeviceError
from sparsebp.jacobians import TransposedJacobian
from sparsebp.patterns import SparsityPattern

_CPU, _CUDA = 1, 2  # DLDeviceType of the DLPack standard


def from_dlpack(tensor: Any) -> Array:
    """Return a tensor of any framework as an array of NumPy (host) or CuPy (CUDA), sharing its memory.

    Raises
    ------
    DeviceError
        The tensor does not support DLPack, cannot be described by it (a sparse tensor), or is on a device other than
        the host and CUDA.
    """
    if not hasattr(tensor, "__dlpack_device__"):
        raise DeviceError("The tensor does not support DLPack", got=type(tensor).__qualname__,
                          expected="an object with __dlpack__ and __dlpack_device__")  # fmt: skip
    try:
        kind = int(tensor.__dlpack_device__()[0])
        if kind == _CPU:
            return np.from_dlpack(tensor)
        if kind == _CUDA:
            return backend.cupy().from_dlpack(tensor)
    except (BufferError, ValueError, RuntimeError) as error:  # from the tensor's framework, or NumPy
        if isinstance(error, DeviceError):
            raise
        raise DeviceError("DLPack cannot describe the tensor", expected="a dense tensor on the host or CUDA",
                          got=str(error)) from error  # fmt: skip
    got = f"DLPack device type {kind}"
    raise DeviceError("The tensor is on an unknown device", expected="the host or CUDA", got=got)


def jacobian_from_dlpack(indptr: Any, indices: Any, values: Any, shape: tuple[int, int]) -> TransposedJacobian:
    """Return a `TransposedJacobian` from the three tensors of a CSR matrix.

    Parameters
    ----------
    indptr, indices
        Integer tensors (n_rows + 1,) and (nnz,), on the host or a device (then copied to the host, which synchronises).
    values
        (nnz,) or (nnz, B), batch last, float32 or float64; shared without a copy.
    shape
        (n_rows, n_columns).

    Raises
    ------
    PatternError, ShapeError, DTypeError, LayoutError, DeviceError
        A tensor does not fit.
    """
    host = [backend.to_host(from_dlpack(tensor)) for tensor in (indptr, indices)]  # synchronize!
    return TransposedJacobian(SparsityPattern(host[0], host[1], shape), from_dlpack(values))


def dlpack_arrays(jacobian: TransposedJacobian) -> tuple[Array, Array, Array]:
    """Return ``(indptr, indices, values)`` on the device of the values, all with DLPack support.

    Values are shared. Index arrays are copied: the pattern's are read-only, which not every consumer respects.
    """
    indptr, indices = jacobian.pattern.device_arrays(backend.namespace(jacobian.data))
    return indptr.copy(), indices.copy(), jacobian.data
