"""PyTorch's tensors on the CPU, taken for tensors of the device: so the bridge to PyTorch goes its way to a GPU.

Their memory is the device's. PyTorch works on it at once, and waits for the device where it takes an array.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from strict_cupy.arrays import ndarray
from strict_cupy.device import DEVICE, Stream, current_stream
from strict_cupy.memory import Foreign


def to_array(tensor: torch.Tensor) -> ndarray:
    """As ``cupy.from_dlpack``."""
    if tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
        raise BufferError("Can't export tensors that require gradient, or with the conjugate or negative bit set")
    storage = tensor.untyped_storage()
    return ndarray.of_memory(Foreign(storage.data_ptr(), storage.nbytes(), tensor), tensor.numpy())


def to_tensor(array: ndarray) -> torch.Tensor:
    """As ``torch.from_dlpack``: behind CuPy's current stream, and no other one."""
    DEVICE.synchronize(current_stream().ptr)
    tensor = torch.from_numpy(array.host)
    tensor.array = array  # type: ignore[attr-defined]  # its memory is not given to others
    return tensor


@contextlib.contextmanager
def on_the_device() -> Iterator[None]:
    """Take all tensors for tensors on the device, in a stream of their own that waits for no other one."""
    stream, from_dlpack = Stream(non_blocking=True), torch.from_dlpack
    deterministic = torch.are_deterministic_algorithms_enabled()

    def taken(array: Any, **options: Any) -> torch.Tensor:
        return to_tensor(array) if isinstance(array, ndarray) else from_dlpack(array, **options)

    def always(value: bool) -> Any:
        return mock.PropertyMock(return_value=value)

    torch.use_deterministic_algorithms(True)  # new memory holds NaN
    with (
        mock.patch.object(torch.Tensor, "is_cuda", always(True), create=True),
        mock.patch.object(torch.Tensor, "is_cpu", always(False), create=True),
        mock.patch.object(torch.Tensor, "__dlpack_device__", lambda _: (2, 0)),
        mock.patch.object(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=stream.ptr)),
        mock.patch.object(torch.cuda, "default_stream", lambda device=None: SimpleNamespace(cuda_stream=0)),
        mock.patch.object(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200"),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: stream.ptr, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
        mock.patch.object(torch, "from_dlpack", taken),
        mock.patch.object(sys.modules["cupy"], "from_dlpack", to_array, create=True),
    ):
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
