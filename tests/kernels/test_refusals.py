"""Every kernel refuses every wrong array, on the host and on a device in the same words.

The cases are made from the rows of `sparsebp.kernels.spec`: each array of a call in turn gets another dtype, number of
axes, length of an axis or layout, is read-only though it is written, lies elsewhere, or is none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from cuda_on_cpu.loader import NoGpu
from cuda_on_cpu.memory import CheckedNumpy
from device.kernel_arguments import KERNELS, Maker, arrays_of, copies, flat, replaced
from sparsebp import kernels
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, ShapeError, SparseBPError
from sparsebp.kernels.device import DeviceKernels
from sparsebp.kernels.spec import Kernels

WRITTEN_LISTS = {
    "optimizer_update": ("params", "buffers"), "scale_arrays": ("arrays",), "clip_arrays": ("arrays",),
    "clamp_arrays": ("arrays",), "square_sums": ("out",), "join_arrays": ("out",),
}  # fmt: skip
"""What kernels write that their rows do not state: those of sequences of arrays have no rows."""
ANYWHERE = ("options", "steps")
"""What kernels on a device take from the host as well."""

Change = Callable[[Any], dict[str, Any]]
"""The arguments of a call with something else in the place of one array."""


class Elsewhere:
    """An array of CuPy, as far as the host can see."""


def places(arguments: dict[str, Any]) -> Iterator[tuple[str, np.ndarray, Change]]:
    """Yield all arrays of a call, those in operands and lists included: the name, the array, and how to change it."""
    for key, value in flat(arguments).items():
        yield from _inside(key, value, lambda new, key=key: replaced(arguments, {key: new}))


def _inside(name: str, value: Any, change: Change) -> Iterator[tuple[str, np.ndarray, Change]]:
    if isinstance(value, np.ndarray):
        yield name, value, change
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield from _inside(
            f"{name}[{i}]", item,
            lambda new, i=i: change([new if k == i else other for k, other in enumerate(value)]),
        )  # fmt: skip


def wrongs(kernel: str, name: str, value: np.ndarray) -> Iterator[tuple[type[SparseBPError], Any, bool]]:
    """Yield what is wrong in the place of an array: the error, the thing, and whether the error surely names it.

    Where two arrays disagree about a length, the error may name either.
    """
    listed, stated = name.partition("[")[0], getattr(KERNELS[kernel], "arrays", {}).get(name)
    yield DTypeError, value.astype(np.float16 if value.dtype.kind == "f" else np.int16), True
    if name not in ANYWHERE:
        yield DeviceError, Elsewhere(), False
    for wrong in ([1.0, 2.0], 1.0, "x"):
        yield DTypeError, wrong, True
    if not (stated.there == f"{name} is not None" if stated else listed == "buffers"):
        yield DTypeError, None, True
    if listed != "arrays":  # those may have any shapes
        yield ShapeError, value[None], listed != "params"
        for axis in range(value.ndim):
            if not _is_free(kernel, name, axis) and (value.size or axis == 0):
                longer = np.concatenate([value, np.take(value, [-1], axis) if value.size else value[:1]], axis)
                if longer.shape != value.shape:
                    yield ShapeError, longer, False
    if value.ndim and value.size > 1 and not (stated and stated.strided):
        strided = np.repeat(value, 2, axis=-1)[..., ::2]
        yield LayoutError, strided, True
    if stated.written if stated else listed in WRITTEN_LISTS.get(kernel, ()):
        frozen = value.copy()
        frozen.flags.writeable = False
        yield LayoutError, frozen, True


def _is_free(kernel: str, name: str, axis: int) -> bool:
    """Whether an axis may have any length: no other tells its size, or it has the squares of a norm."""
    arrays = getattr(KERNELS[kernel], "arrays", {})
    if name not in arrays:
        return name == "squares"
    size = arrays[name].dims[axis].removesuffix(" + 1")
    named = [dim.removesuffix(" + 1") for array in arrays.values() for dim in array.dims]
    return size.isidentifier() and named.count(size) == 1


@pytest.mark.parametrize("name", KERNELS)
def test_wrong_arrays_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = ModuleType("cupy")
    monkeypatch.setattr(cupy, "ndarray", Elsewhere, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    host, device = kernels.get(np), Kernels(DeviceKernels(CheckedNumpy(), NoGpu()))
    tried = 0
    for arguments in (Maker(np.float32).arguments(name), Maker(np.float64, batch=2).arguments(name)):
        before = arrays_of(copies(arguments))
        for array, value, change in places(arguments):
            for error, wrong, surely in wrongs(name, array, value):
                case = f"{array}: {error.__name__} for {wrong!r:.60}"
                said = []
                for implementation in (host, device):
                    with pytest.raises(SparseBPError) as caught:
                        getattr(implementation, name)(*change(wrong).values())
                    said.append(f"{type(caught.value).__name__}: {caught.value}")
                assert said[0] == said[1], case
                assert "Expected" in said[0] and "Got" in said[0], said[0]
                assert (error is ShapeError and not surely) or said[0].startswith(error.__name__), f"{case}: {said[0]}"
                where = array[-3:] if array.startswith("buffers") else array  # which have a name a rule
                assert not surely or f"{where} " in said[0], f"{case}: {said[0]}"
                tried += 1
        for array, value in arrays_of(arguments).items():
            assert value.tobytes() == before[array].tobytes(), f"{array} was written by a call that was refused"
    assert tried > 10
