"""What the modules refuse. PyTorch's own modules compute some of it; the messages say so and name them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from sparsebp.core.errors import DeviceError, DTypeError, OptionError, SparseBPError

DTYPES = (torch.float32, torch.float64)
DEVICES = ("cpu", "cuda", "meta")


def autocasts(x: Tensor) -> bool:
    """Say whether autocast is on where x is."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Return a block in which autocast is off where x is."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else contextlib.nullcontext()


def cast_input(name: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return x, under autocast in the dtype of the weights: recurrences are computed in that alone."""
    if autocasts(x) and x.is_floating_point():
        x = x.to(weight.dtype)
    check_tensors(name, {"weight": weight, "input": x})
    return x


def check_tensors(name: str, tensors: dict[str, Tensor | None]) -> None:
    """Check that all tensors have one dtype and device, those that the kernels know; `name` is the module's.

    Raises
    ------
    DTypeError, DeviceError
        One of them differs, or all are of another kind.
    """
    first: Tensor | None = None
    for what, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = tensor
            if first.dtype not in DTYPES:
                raise DTypeError(
                    f"st.{name} has no kernels for {first.dtype}", expected="float32 or float64", got=first.dtype,
                    remedy=f"Convert the module with .float(), or use torch.nn.{name}",
                )  # fmt: skip
            if first.device.type not in DEVICES or first.layout != torch.strided:
                raise DeviceError(f"st.{name} has no kernels for such tensors", got=f"{first.layout} on {first.device}",
                                  expected="dense ones on a CPU or on CUDA", remedy=f"Use torch.nn.{name}")  # fmt: skip
        elif tensor.dtype != first.dtype:
            raise DTypeError(f"{what} of st.{name} has another dtype", expected=first.dtype, got=tensor.dtype,
                             remedy="Convert one of the two; nothing is converted silently")  # fmt: skip
        elif tensor.device != first.device or tensor.layout != first.layout:
            raise DeviceError(f"{what} of st.{name} is elsewhere", expected=f"a dense tensor on {first.device}",
                              got=f"{tensor.layout} on {tensor.device}", remedy="Move it with .to(...)")  # fmt: skip


def check_dense(name: str, what: str, value: Any, expected: str = "a dense tensor") -> None:
    """Check that an argument of the module `name` is a tensor, and a dense one.

    Raises
    ------
    DTypeError, DeviceError
        It is something else: an array of NumPy, a list, a text; or a sparse tensor.
    """
    if not isinstance(value, Tensor):
        raise DTypeError(f"{what} of st.{name} is no tensor", expected=expected, got=type(value).__name__,
                         remedy="Convert an array or a list with torch.as_tensor(...)")  # fmt: skip
    if value.layout != torch.strided:
        raise DeviceError(f"{what} of st.{name} is sparse", expected=expected, got=value.layout,
                          remedy="Make it dense with .to_dense()")  # fmt: skip


def check_lengths(lengths: Tensor | list[int], steps: int, batch: int) -> Tensor:
    """Return the lengths (B,) as an int64 tensor on the CPU.

    Raises
    ------
    DTypeError, OptionError
        They are no integers, not one a sample, or not all from 1 to the number of steps.
    """
    try:
        values = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:  # a string, or a ragged list
        raise DTypeError("lengths are no numbers", expected="integers", got=type(lengths).__name__,
                         remedy="Count valid steps a sample") from error  # fmt: skip
    values = values.cpu()
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise DTypeError("lengths has the wrong dtype", expected="integers", got=values.dtype,
                         remedy="Count valid steps a sample")  # fmt: skip
    wrong: SparseBPError | None = None
    if values.shape != (batch,):
        wrong = OptionError("lengths has the wrong shape", expected=(batch,), got=tuple(values.shape),
                            remedy="Pass one length for each sample")  # fmt: skip
    elif batch and (int(values.min()) < 1 or int(values.max()) > steps):
        wrong = OptionError("lengths is out of range", expected=f"1 to {steps} (the number of steps of the input)",
                            got=f"{int(values.min())} to {int(values.max())}",
                            remedy="Leave empty sequences out, and pad the input to the longest one")  # fmt: skip
    if wrong is not None:
        raise wrong
    return values.to(torch.int64)
