"""Tensors as arrays and back, without a copy: NumPy's on the CPU, CuPy's on a GPU and on PyTorch's current stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from sparsebp import backend
from sparsebp.core.types import Array


@contextlib.contextmanager
def on_its_stream(tensor: Tensor) -> Iterator[None]:
    """Let CuPy work on the tensor's device and on the stream that PyTorch uses there now; nothing for the CPU."""
    if not tensor.is_cuda:
        yield
        return
    cp, number = backend.cupy(), tensor.device.index
    with cp.cuda.Device(number), cp.cuda.ExternalStream(torch.cuda.current_stream(number).cuda_stream, number):
        yield


def to_array(tensor: Tensor) -> Array:
    """Return a tensor's values as a C-contiguous array that shares its memory, or a copy's if it is not contiguous."""
    if tensor.is_cuda:
        return backend.cupy().from_dlpack(tensor.detach().resolve_neg().contiguous())
    # not DLPack: it has no way to say that memory may be written to, and kernels are compiled for memory that may
    array = tensor.numpy(force=True)  # without a copy unless its sign is to be changed
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def to_tensor(array: Array) -> Tensor:
    """Return an array that nobody else keeps as a tensor. It shares the memory of an array of NumPy.

    One of CuPy's is copied on the current stream: its memory goes back to CuPy's pool, which does not know what other
    streams of PyTorch may still read.
    """
    if backend.device_of(array) == "cpu":
        return torch.from_numpy(array)
    return torch.from_dlpack(array).clone()
