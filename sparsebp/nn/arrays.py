"""A layer's arrays: how new ones are filled; once they are there by name, what takes their place must be like them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import numpy as np

from sparsebp import backend
from sparsebp.backend import masks
from sparsebp.core.arguments import shown
from sparsebp.core.errors import DeviceError, DTypeError, LayoutError, NonFiniteError, OptionError, ShapeError
from sparsebp.core.types import Array


class NamedArrays(dict[str, Array]):
    """Parameters or buffers of a layer. Once there, an array is replaced by one of its shape, dtype and device only.

    So whatever a layer computes with fits the layer; a bias of shape (1,) in place of one of (n,) would be broadcast.

    Raises
    ------
    DeviceError, DTypeError, ShapeError, LayoutError
        On assignment, if it is no such array; `sparsebp.nn.Layer.to` changes dtype and device of a whole layer.
    OptionError
        On removal: a layer without a bias is built with ``bias=False``.
    """

    def __init__(self, arrays: Mapping[str, Array] | Iterable[tuple[str, Array]] = ()) -> None:
        super().__init__()
        self.update(arrays)

    def __setitem__(self, name: str, array: Array) -> None:
        old = self.get(name)
        if array is None:
            raise DTypeError(f"{name} is no array", expected="an array", got=None, remedy="Pass an array")
        if array is not old:
            backend.namespace(array)
            if old is not None:
                backend.namespace(array, old)
                backend.check_array(name, array, dtype=old.dtype, shape=old.shape)
            if backend.is_host(backend.namespace(array)) and not array.flags.writeable:
                raise LayoutError(f"{name} is read-only", expected="an array that can be written to",
                                  got="one that cannot", remedy=f"Pass {name}.copy()")  # fmt: skip
        super().__setitem__(name, array)
        if array is not old and old is not None and masks.some():
            masks.arrays_replaced()

    @classmethod
    def instead(cls, old: Mapping[str, Array], new: Mapping[str, Array]) -> NamedArrays:
        """Return `new`, all of it in the place of `old`."""
        arrays = cls(old)
        arrays.update(new)
        return arrays if arrays.keys() == new.keys() else arrays._kept()

    @staticmethod
    def convert(arrays: dict[str, Array], name: str, array: Array) -> None:
        """Put an array of another dtype or device in the place of one: of all of a layer's, so that they stay alike."""
        dict.__setitem__(arrays, name, array)

    def update(self, *arrays: Any, **named: Array) -> None:
        """Assign every one of them."""
        for name, array in dict(*arrays, **named).items():
            self[name] = array

    def __ior__(self, arrays: Any) -> NamedArrays:  # type: ignore[override, misc]
        self.update(arrays)
        return self

    def setdefault(self, name: str, array: Array = None) -> Array:
        """Assign it if there is none of that name, and return what is there."""
        if name not in self:
            self[name] = array
        return self[name]

    def _kept(self, *_: Any) -> NoReturn:
        """Refuse to remove an array."""
        raise OptionError("The arrays of a layer cannot be removed", expected="a layer with all of its arrays",
                          got="a removal", remedy="Build the layer without it, with bias=False say")  # fmt: skip

    __delitem__ = pop = popitem = clear = _kept

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedArrays, (dict(self),)


def parameter_dtype(dtype: Any, device: Any = None) -> np.dtype:
    """Return the dtype of new parameters, float32 for None as in PyTorch.

    Raises
    ------
    DTypeError
        It is neither float32 nor float64.
    DeviceError
        `device` is neither None nor the host: parameters are drawn there.
    """
    if device is not None and str(device) != "cpu":
        raise DeviceError("Layers are built on the host", expected="device=None or 'cpu'", got=shown(device),
                          remedy="Build the layer and call to('cuda')")  # fmt: skip
    return backend.float_dtype(np.float32 if dtype is None else dtype)


def uniform(rng: np.random.Generator, shape: tuple[int, ...], bound: float, dtype: Any) -> np.ndarray:
    """Draw from U(-bound, bound). The same seed gives the same numbers, rounded, in both dtypes.

    Raises
    ------
    OptionError
        No machine has room for so many.
    """
    _check_size(shape)
    return rng.uniform(-bound, bound, shape).astype(dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: Any) -> np.ndarray:
    """Draw from N(0, deviation²), the same numbers, rounded, in both dtypes.

    Raises
    ------
    OptionError
        No machine has room for so many.
    """
    _check_size(shape)
    return rng.normal(0.0, deviation, shape).astype(dtype)


def full(shape: tuple[int, ...], value: float, dtype: Any) -> np.ndarray:
    """Return an array of one value.

    Raises
    ------
    OptionError
        No machine has room for it.
    """
    _check_size(shape)
    return np.full(shape, value, dtype)


def _check_size(shape: tuple[int, ...]) -> None:
    if max(1, *shape) * math.prod(n or 1 for n in shape) > 2**60:  # NumPy counts bytes in 63 bits
        raise OptionError("A parameter is too large for any machine", expected="fewer than 2**60 elements", got=shape,
                          remedy="Build a smaller layer")  # fmt: skip


def fan_in_bound(fan_in: int) -> float:
    """Return ``1 / sqrt(fan_in)``, PyTorch's default bound for `Linear` and, with the hidden size, recurrent layers."""
    return 1.0 / math.sqrt(fan_in) if fan_in > 0 else 0.0


def checked_like(name: str, value: Any, param: Array) -> Array:
    """Return `value` as an array of `param`'s namespace after checking shape, dtype and finiteness.

    Raises
    ------
    DTypeError, ShapeError, NonFiniteError
        It is no array, another one, or holds NaN or infinity.
    """
    xp = backend.namespace(param)
    try:
        array = value if hasattr(value, "__cuda_array_interface__") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # a ragged list, or a tensor that NumPy cannot read
        raise DTypeError(f"{name} is no array", expected="an array", got=str(error),
                         remedy="Pass what state_dict returned") from error  # fmt: skip
    if array.shape != param.shape:
        raise ShapeError(
            f"{name} has the wrong shape",
            expected=param.shape,
            got=tuple(array.shape),
            remedy="Build the model with the arguments that the state was made with",
        )
    if array.dtype != param.dtype:
        raise DTypeError(
            f"{name} has the wrong dtype",
            expected=param.dtype,
            got=array.dtype,
            remedy=f"Convert the array, or build the model with dtype={array.dtype}",
        )
    array = backend.as_namespace(array, xp)
    if not bool(xp.isfinite(array).all()):  # synchronize!
        raise NonFiniteError(
            f"{name} holds NaN or infinity",
            expected="finite weights",
            got=f"{int((~xp.isfinite(array)).sum())} of {array.size} values not finite",
            remedy="Load the last good checkpoint",
        )
    return array
